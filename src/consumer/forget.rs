//! Empties the ledger of applied counts, day by day, once they are too old to be taken.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::info;

use super::flush::chain;
use crate::model::Micros;
use crate::runtime::progress::Beat;
use crate::runtime::retry::Outage;
use crate::store::Store;

/// How often it is looked whether a day is over. Any number of daemons may do it.
const EVERY: Duration = Duration::from_secs(3_600);

/// Forgets what is older than `keep`, until the stop.
pub async fn forget(store: Store, keep: Duration, beat: Beat, stop: CancellationToken) {
    let mut outage = Outage::new("emptying days of applied_event");
    while !stop.is_cancelled() {
        let pause = match beat.during(store.forget_applied(Micros::now(), keep)).await {
            Ok(days) => {
                outage.over();
                if days > 0 {
                    info!(event = "ledger-emptied", days, "{days} days of applied_event were emptied");
                }
                EVERY
            }
            Err(error) => outage.failed(&chain(&error)).max(Duration::from_secs(5)),
        };
        beat.pause(pause, &stop).await;
    }
}
