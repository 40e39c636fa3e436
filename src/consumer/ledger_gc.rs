//! Ledger clean-up: empties the ledger of applied counts, and the log of what they added to settable counters, day by day, once events of
//! that day are too old to be accepted.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::info;

use super::clock::Clock;
use crate::config::ConfigHandle;
use crate::runtime::liveness::Heartbeat;
use crate::runtime::retry::Outage;
use tallyd_mysql::Store;

/// How often it checks whether a day is over. Any number of daemons can do it.
const EVERY: Duration = Duration::from_secs(3_600);

/// Delay while another session holds the table: every batch with counts waits as long as this waits for the table.
const AGAIN_AFTER: Duration = Duration::from_secs(600);

/// Empties days that are older than `[consumer] applied_event_keep`, until the stop.
pub(crate) async fn run(store: Store, live: ConfigHandle, beat: Heartbeat, stop: CancellationToken) {
    let mut outage = Outage::new("emptying days of applied_event and recent_delta");
    while !stop.is_cancelled() {
        let keep = live.current().consumer.applied_event_keep.0;
        let emptied = async {
            // By MySQL's clock, so that no single daemon is wrong, and only if this machine's clock agrees.
            let (now, _) = store.clock().await?;
            if Clock::default().hold(now).is_ok() { store.forget_applied(now, keep).await } else { Ok(0) }
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
