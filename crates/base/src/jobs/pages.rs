//! The pages of a run: their size, and the wait before each of them.

use std::time::{Duration, Instant};

use anyhow::{Error, Result};
use tokio_util::sync::CancellationToken;

use super::JobError;
use super::run::{Ended, Job, Run};
use crate::config::Reconcile as Limits;
use crate::runtime::retry::Outage;
use crate::servers::pace::{Health, Pace};
use crate::telemetry::{WaitsFor, telemetry};
use tallyd_connect::fate::Fate;
use tallyd_mysql::{Store, StoreError};
use tallyd_rabbitmq::{Broker, Publisher};

/// What a paged run gives way to. It also waits while a queue is longer than `queue_depth_max`, so it needs RabbitMQ.
pub struct PageLimits {
    /// By name. The run waits while one of them is too far behind. Empty for a run that writes nothing.
    pub replicas: Vec<(String, Store)>,
    /// Another server that the run reads.
    pub site: Option<Store>,
    pub limits: Limits,
    /// In the unit of [`Run::note_page`].
    pub page_max: usize,
    pub log_wait: fn(&str),
}

pub(super) struct Pages {
    pub pace: Pace,
    job: &'static str,
    broker: Broker,
    publisher: Publisher,
    outage: Outage,
}

impl<J: Job + ?Sized> Run<'_, J> {
    pub async fn limit_pages(&mut self, limits: PageLimits) -> Result<()> {
        let PageLimits { replicas, site, limits, page_max, log_wait } = limits;
        let (job, broker) = (J::NAME, self.servers.broker.clone());
        let health = Health { servers: self.servers.clone(), replicas, site, limits, number: self.number };
        let publisher = broker.connect_publisher(job).await?;
        let pace = Pace::new(health, self.stop.clone(), (job, log_wait), page_max);
        let outage = Outage::new("asking the servers whether they are busy");
        self.pages = Some(Pages { pace, job, broker, publisher, outage });
        Ok(())
    }

    pub fn page_size(&self) -> usize {
        self.pages.as_ref().map_or(1, |pages| pages.pace.page())
    }

    /// Adapts the size of the next page. `items` are what the pages are measured in, for example rows.
    pub fn note_page(&mut self, items: usize, took: Duration) {
        if let Some(pages) = &mut self.pages {
            pages.pace.note(items, took);
        }
    }

    /// Returns false if the run must end instead.
    pub async fn next_page(&mut self) -> Result<bool> {
        let deadline = self.deadline();
        if let Some(pages) = &mut self.pages {
            pages.wait(deadline, self.stop).await?;
        }
        Ok(!self.is_over())
    }

    pub fn is_over(&mut self) -> bool {
        if self.stop.is_cancelled() {
            self.end(Ended::Stopped, "it was stopped");
            return true;
        }
        let is_over = self.deadline().is_some_and(|deadline| Instant::now() > deadline);
        if is_over {
            self.end(Ended::TimeOver, "its run time was over");
        }
        is_over
    }
}

impl Pages {
    /// A server that does not answer is a busy server: the wait ends when it answers again.
    async fn wait(&mut self, until: Option<Instant>, stop: &CancellationToken) -> Result<()> {
        let mut waiting = telemetry().runs.waiting(self.job, WaitsFor::Pace);
        loop {
            let error = match self.pace.wait(until, Some(&self.publisher)).await {
                Err(error) if is_passing(&error) => error,
                waited => {
                    self.outage.over();
                    return waited;
                }
            };
            let text = format!("{error:#}");
            let pause = self.outage.failed(&text);
            waiting.note(text);
            let is_stopped = stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none();
            if is_stopped || until.is_some_and(|until| Instant::now() > until) {
                return Ok(());
            }
            // The publisher's connection does not come back.
            if let Ok(connected) = self.broker.connect_publisher(self.job).await {
                self.publisher = connected;
            }
        }
    }
}

pub fn is_passing(error: &Error) -> bool {
    match error.downcast_ref() {
        Some(StoreError::TakenOver(_)) => false,
        Some(error) => error.fate() == Fate::Passing,
        None => !error.is::<JobError>(),
    }
}
