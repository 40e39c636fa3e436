//! Empties the ledger of applied counts, and what they added to numbers that may be set, day by day, once they are too old to
//! be taken.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::info;

use super::clock::Clock;
use crate::config::ConfigHandle;
use crate::runtime::liveness::Heartbeat;
use crate::runtime::retry::Outage;
use crate::store::Store;

/// How often it is looked whether a day is over. Any number of daemons may do it.
const EVERY: Duration = Duration::from_secs(3_600);

/// How long it is left alone where somebody holds the table, who keeps every batch with counts waiting while this waits for it.
const AGAIN_AFTER: Duration = Duration::from_secs(600);

/// Forgets what is older than `[consumer] applied_event_keep`, until the stop.
pub async fn run(store: Store, live: ConfigHandle, beat: Heartbeat, stop: CancellationToken) {
    let mut outage = Outage::new("emptying days of applied_event and recent_delta");
    while !stop.is_cancelled() {
        let keep = live.current().consumer.applied_event_keep.0;
        let emptied = async {
            // MySQL's clock, by which no daemon is wrong alone; and not at all where this machine's is another.
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
