//! The tasks of a daemon. Each task reads the configuration from [`ConfigHandle`]
//! when it begins work.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Result;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

use super::card;
use crate::consumer::Partition;
use crate::consumer::ledger_gc;
use crate::jobs::reconcile::loss_detector::LossDetector;
use crate::jobs::snapshots::clock::SnapshotClock;
use crate::jobs::{self, Requests};
use crate::outbox::Outbox;
use tallyd_base::config::ConfigHandle;
use tallyd_base::jobs::JobEntry;
use tallyd_base::jobs::runner::JobLoop;
use tallyd_base::runtime::liveness::{Heartbeat, Liveness};
use tallyd_base::runtime::ticker::Ticker;
use tallyd_base::servers::Servers;
use tallyd_core::partition::MAPS_FROM;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TaskName {
    Admin,
    Observer,
    Control,
    ControlSocket,
    Reloader,
    Outbox,
    Consumer(u16),
    Ledger,
    LossDetector,
    SnapshotClock,
    Job(&'static str),
    Ticker,
    SiteCard,
}

impl fmt::Display for TaskName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Admin => "admin port",
            Self::Observer => "observer",
            Self::Control => "order reader",
            Self::ControlSocket => "control socket",
            Self::Reloader => "reloader",
            Self::Outbox => "outbox",
            Self::Consumer(number) if *number >= MAPS_FROM => {
                return write!(f, "consumer of map number {}", number - MAPS_FROM);
            }
            Self::Consumer(number) => return write!(f, "consumer {number}"),
            Self::Ledger => "ledger",
            Self::LossDetector => "loss detector",
            Self::SnapshotClock => "snapshot clock",
            Self::Job(task) => task,
            Self::Ticker => "ticker",
            Self::SiteCard => "site card",
        })
    }
}

pub(super) struct Running {
    liveness: Liveness,
    set: JoinSet<TaskName>,
}

impl Running {
    pub(super) fn new(liveness: &Liveness) -> Self {
        Self { liveness: liveness.clone(), set: JoinSet::new() }
    }

    pub(super) fn start_loop<F>(&mut self, name: TaskName, task: impl FnOnce(Heartbeat) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.start(name, task(self.liveness.register(name.to_string())));
    }

    pub(super) fn start(&mut self, name: TaskName, task: impl Future<Output = ()> + Send + 'static) {
        self.set.spawn(async move {
            task.await;
            name
        });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.set.is_empty()
    }

    pub(super) async fn next_end(&mut self) -> Option<Result<TaskName, JoinError>> {
        self.set.join_next().await
    }
}

#[derive(Clone)]
pub(super) struct Tasks {
    pub live: ConfigHandle,
    pub servers: Servers,
    pub stop: CancellationToken,
}

impl Tasks {
    pub(super) async fn start_all(self, running: &mut Running) -> Result<()> {
        let wake_outbox = watch::Sender::default();
        let Servers { store, control, .. } = self.servers.clone();
        let stop = self.stop.clone();
        running.start_loop(TaskName::Control, |beat| control.follow(store, beat, stop));
        self.start_outbox(&wake_outbox, running)?;
        // The outbox's task ends with the last sender of its wake-ups.
        self.start_consumers(wake_outbox, running);
        let requests = Requests::default();
        self.start_detectors(&requests, running);
        self.start_site_card(running);
        let ticker = Ticker::start().await?;
        for job in jobs::table(&requests) {
            self.start_job(job, &ticker, running);
        }
        running.start(TaskName::Ticker, ticker.run(self.stop));
        Ok(())
    }

    fn start_outbox(&self, wake: &watch::Sender<()>, running: &mut Running) -> Result<()> {
        let config = self.live.current();
        let Servers { store, cache, owner, control, .. } = self.servers.clone();
        let also = cache.also(&config.redis, &config.metrics)?;
        let outbox = Outbox {
            store,
            caches: [cache].into_iter().chain(also).collect(),
            live: self.live.clone(),
            control,
            owner,
        };
        let wake = wake.subscribe();
        running.start_loop(TaskName::Outbox, |beat| async move { outbox.run(wake, beat).await });
        Ok(())
    }

    fn start_consumers(&self, wake_outbox: watch::Sender<()>, running: &mut Running) {
        let Self { live, servers, stop, .. } = self;
        let config = live.current();
        let numbered = (0..config.amqp.partitions).map(|number| (number, None));
        let of_maps = config.maps.iter().map(|map| (map.partition(), Some(Arc::new(map.clone()))));
        for (number, map) in numbered.chain(of_maps) {
            let Servers { store, broker, owner, control, .. } = servers.clone();
            running.start_loop(TaskName::Consumer(number), |beat| {
                let (live, outbox, stop) = (live.clone(), wake_outbox.clone(), stop.clone());
                Partition {
                    number,
                    map,
                    broker,
                    store,
                    owner,
                    live,
                    control,
                    outbox,
                    stop,
                    heartbeat: beat,
                    has_tried: AtomicBool::default(),
                }
                .run()
            });
        }
        let (store, live, stop) = (servers.store.clone(), live.clone(), stop.clone());
        running.start_loop(TaskName::Ledger, |beat| ledger_gc::run(store, live, beat, stop));
    }

    fn start_detectors(&self, requests: &Requests, running: &mut Running) {
        let Self { live, servers, stop, .. } = self.clone();
        let Servers { store, cache, .. } = servers;
        let detector = LossDetector { cache: cache.clone(), live: live.clone(), request: requests.rebuild.clone() };
        running.start_loop(TaskName::LossDetector, |beat| detector.run(beat, stop.clone()));
        let clock = SnapshotClock { live, store, cache, request: requests.snapshot.clone() };
        running.start_loop(TaskName::SnapshotClock, |beat| clock.run(beat, stop));
    }

    fn start_site_card(&self, running: &mut Running) {
        let Self { live, servers, stop, .. } = self.clone();
        running.start_loop(TaskName::SiteCard, |beat| card::run(servers, live, beat, stop));
    }

    fn start_job(&self, job: JobEntry, ticker: &Ticker, running: &mut Running) {
        let Self { live, servers, stop, .. } = self.clone();
        let name = TaskName::Job(job.task);
        let job_loop = JobLoop { job, servers, live, ticks: ticker.ticks(), stop };
        running.start_loop(name, |beat| job_loop.run(beat));
    }
}
