//! Commands that import, compare, export or erase a site's data. An operator starts these commands. Each command takes
//! its own lock. A daemon never runs these commands.

pub mod compare;
pub mod erase;
pub mod export;
pub mod import;

use std::time::Instant;

use anyhow::Result;
use tokio_util::sync::CancellationToken;

use crate::jobs::pages::is_passing;
use crate::runtime::retry::Outage;
use crate::servers::pace::Pace;
use tallyd_rabbitmq::{Broker, Publisher};

/// Waits until the servers are ready for the next page, as [`Pace::wait`] does. A server that does not answer is a busy
/// server: the wait ends when it answers again.
async fn wait(
    pace: &mut Pace,
    until: Option<Instant>,
    (broker, job, publisher): (&Broker, &'static str, &mut Publisher),
    stop: &CancellationToken,
    show: impl Fn(Option<&str>),
) -> Result<()> {
    let mut outage = Outage::new("asking the servers whether they are busy");
    loop {
        let error = match pace.wait(until, Some(publisher), &show).await {
            Err(error) if is_passing(&error) => error,
            waited => return waited,
        };
        let text = format!("{error:#}");
        show(Some(&text));
        let pause = outage.failed(&text);
        let is_stopped = stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none();
        if is_stopped || until.is_some_and(|until| Instant::now() > until) {
            return Ok(());
        }
        // The publisher's connection does not come back.
        if let Ok(connected) = broker.connect_publisher(job).await {
            *publisher = connected;
        }
    }
}
