//! The cron triggers of the current schedules. The triggers only wake the jobs' loops. The loops decide which run is
//! due.

use std::sync::Arc;

use anyhow::{Context, Result};
use tokio_util::sync::CancellationToken;
use tracing::error;

use crate::config::{Config, ConfigHandle};
use crate::jobs::{self, Wakes};
use crate::runtime::cron::{Schedule, Triggers};
use tallyd_core::job_name::{JobMode, JobName};

pub(super) struct Schedules {
    wakes: Wakes,
    triggers: Triggers,
    modes: Vec<JobMode>,
}

impl Schedules {
    pub(super) async fn start(live: &ConfigHandle, wakes: Wakes) -> Result<Self> {
        let modes = jobs::modes(&live.current());
        Ok(Self { triggers: start(&modes, &wakes).await?, wakes, modes })
    }

    pub(super) async fn run(mut self, mut live: ConfigHandle, stop: CancellationToken) {
        while stop.run_until_cancelled(live.changed()).await.is_some() {
            self.follow(&live.current()).await;
        }
        self.triggers.stop().await;
    }

    async fn follow(&mut self, config: &Config) {
        let wanted = jobs::modes(config);
        if wanted == self.modes {
            return;
        }
        match start(&wanted, &self.wakes).await {
            Ok(new) => std::mem::replace(&mut self.triggers, new).stop().await,
            Err(error) => {
                let error = format!("{error:#}");
                error!(
                    event = "schedules-kept",
                    error, "the new schedules could not be started, so the previous ones stay in force: {error}"
                );
                return;
            }
        }
        self.modes = wanted;
        // With a new pattern, a run can be due immediately.
        JobName::ALL.into_iter().for_each(|job| self.wakes.of(job).notify_one());
    }
}

async fn start(modes: &[JobMode], wakes: &Wakes) -> Result<Triggers> {
    let mut schedules = Vec::new();
    for mode in modes.iter().filter(|mode| !mode.pattern.is_empty()) {
        let schedule = Schedule::parse(&mode.pattern, &mode.time_zone)
            .with_context(|| format!("schedule \"{}\" in {}", mode.pattern, mode.time_zone))?;
        schedules.push((schedule, Arc::clone(wakes.of(mode.job))));
    }
    Triggers::start(schedules).await
}
