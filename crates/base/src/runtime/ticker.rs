//! Ticks each second, so that the loops of the jobs look whether a run is due.
//!
//! tokio-cron-scheduler makes the ticks. It knows no job's pattern, because its own schedules would keep the offset that a
//! time zone had at startup, and a missed trigger would lose a run (decision 0041).

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::watch;
use tokio_cron_scheduler::{Job, JobScheduler};
use tokio_util::sync::CancellationToken;

/// A loop looks after this time even if there is no tick.
const TICK_MAX: Duration = Duration::from_secs(60);

pub struct Ticker {
    scheduler: JobScheduler,
    sender: watch::Sender<()>,
}

#[derive(Clone)]
pub struct Ticks(watch::Receiver<()>);

impl Ticker {
    pub async fn start() -> Result<Self> {
        let sender = watch::Sender::new(());
        let tick = sender.clone();
        let job = Job::new("* * * * * *", move |_, _| tick.send_replace(())).context("make the ticker")?;
        let scheduler = JobScheduler::new().await.context("make the scheduler")?;
        scheduler.add(job).await.context("schedule the ticker")?;
        scheduler.start().await.context("start the scheduler")?;
        Ok(Self { scheduler, sender })
    }

    pub fn ticks(&self) -> Ticks {
        Ticks(self.sender.subscribe())
    }

    pub async fn run(mut self, stop: CancellationToken) {
        stop.cancelled().await;
        if let Err(error) = self.scheduler.shutdown().await {
            tracing::debug!(event = "scheduler-stop-failed", "the scheduler did not stop cleanly: {error}");
        }
    }
}

impl Ticks {
    pub async fn next(&mut self) {
        // An error means that the ticker has stopped, as all tasks soon do.
        match tokio::time::timeout(TICK_MAX, self.0.changed()).await {
            Ok(Ok(())) | Err(_) => {}
            Ok(Err(_)) => tokio::time::sleep(TICK_MAX).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_ticker_ticks_until_it_is_stopped() {
        let (ticker, stop) = (Ticker::start().await.unwrap(), CancellationToken::new());
        let mut ticks = ticker.ticks();
        for _ in 0..2 {
            tokio::time::timeout(Duration::from_secs(10), ticks.next()).await.unwrap();
        }
        stop.cancel();
        ticker.run(stop).await;
    }
}
