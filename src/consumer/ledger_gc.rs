//! Deletes old entries from two tables: the ledger of applied counts, and the log of changes of settable counters. The
//! entries of a day are deleted once events of that day are too old to be accepted.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::info;

use super::clock::Clock;
use tallyd_base::config::ConfigHandle;
use tallyd_base::runtime::liveness::Heartbeat;
use tallyd_base::runtime::retry::Outage;
use tallyd_mysql::Store;

/// The interval between two checks for days whose entries must be deleted. Several daemons can check at the same time.
const EVERY: Duration = Duration::from_secs(3_600);

/// Delay before the next try if another session has locked the table. The delay is needed because every batch with
/// counts waits while the clean-up waits for the table.
const AGAIN_AFTER: Duration = Duration::from_secs(600);

pub(crate) async fn run(store: Store, live: ConfigHandle, beat: Heartbeat, stop: CancellationToken) {
    let mut outage = Outage::new("deleting old entries from applied_event and recent_delta");
    while !stop.is_cancelled() {
        let keep = live.current().consumer.applied_event_keep.0;
        let emptied = async {
            // MySQL's clock decides which days are old, so a daemon's wrong clock does no harm. Nothing is deleted
            // while this machine's clock differs from MySQL's.
            let (now, _) = store.clock().await?;
            if Clock::default().check(now).is_ok() { store.forget_applied(now, keep).await } else { Ok(0) }
        };
        let pause = match beat.during(emptied).await {
            Ok(days) => {
                outage.over();
                if days > 0 {
                    info!(event = "ledger-emptied", days, "{days} days of applied_event and recent_delta were emptied");
                }
                EVERY
            }
            Err(error) => {
                let is_held = error.is_lock_timeout();
                let soon = outage.failed(&format!("{:#}", anyhow::Error::from(error)));
                if is_held { AGAIN_AFTER } else { soon }
            }
        };
        beat.pause(pause, &stop).await;
    }
}
