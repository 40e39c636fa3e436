//! The tasks of a daemon, and the schedules that wake them. Each asks [`ConfigHandle`] for the configuration when it begins something.

use std::sync::Arc;

use anyhow::Result;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use super::Servers;
use crate::config::{Config, ConfigHandle, Recount};
use crate::consumer::Partition;
use crate::consumer::forget::forget;
use crate::jobs::archive::clock::SnapshotClock;
use crate::jobs::archive::{self, Scope};
use crate::jobs::fence::TooFew;
use crate::jobs::filters;
use crate::jobs::reconcile::loss_detector::LossDetector;
use crate::jobs::reconcile::{self, Mode, RunOptions};
use crate::jobs::recount;
use crate::jobs::runner::{self, Next, Outcome, Ran, Timetable};
use crate::outbox::Outbox;
use crate::runtime::cron::CronTriggers;
use crate::runtime::liveness::{Heartbeat, Liveness};
use crate::runtime::progress::ProgressSink;

/// What every task is given.
#[derive(Clone)]
pub(super) struct Task {
    pub live: ConfigHandle,
    pub servers: Servers,
    pub stop: CancellationToken,
}

/// Schedules of the configuration, and who is woken by them.
type Ringing = Vec<(Patterns, Arc<Notify>)>;

/// Keys of the configuration that are patterns of times; empty ones for never.
type Patterns = fn(&Config) -> Vec<&str>;

impl Task {
    /// Starts all of them.
    pub async fn start_all(self, liveness: &Liveness, tasks: &mut JoinSet<String>) -> Result<()> {
        let bell = watch::Sender::default();
        self.start_outbox(&bell, liveness, tasks)?;
        // The outbox ends with the last of those who ring.
        self.start_consumers(bell, liveness, tasks);
        let mut ringing = self.start_reconciler(liveness, tasks);
        ringing.extend(self.start_archiver(liveness, tasks));
        ringing.extend(self.start_filters(liveness, tasks));
        ringing.extend(self.start_recounter(liveness, tasks));
        // Patterns that can't be used end the start.
        let rung = patterns(&self.live.current(), &ringing);
        let bells = CronTriggers::start(with_bells(&rung, &ringing)).await?;
        tasks.spawn(self.ring(bells, ringing, rung));
        Ok(())
    }

    /// The task that adds to Redis what only the daemon counts.
    fn start_outbox(&self, bell: &watch::Sender<()>, liveness: &Liveness, tasks: &mut JoinSet<String>) -> Result<()> {
        let config = self.live.current();
        let Servers { store, cache, owner, .. } = self.servers.clone();
        let also = cache.also(&config.redis, &config.metrics)?;
        let outbox =
            Outbox { store, caches: [cache].into_iter().chain(also).collect(), live: self.live.clone(), owner };
        let (beat, bell) = (liveness.register("outbox"), bell.subscribe());
        tasks.spawn(async move {
            outbox.run(bell, beat).await;
            "outbox".to_owned()
        });
        Ok(())
    }

    fn start_consumers(&self, bell: watch::Sender<()>, liveness: &Liveness, tasks: &mut JoinSet<String>) {
        let Self { live, servers, stop } = self;
        for number in 0..live.current().amqp.partitions {
            let name = format!("consumer {number}");
            let Servers { store, broker, owner, .. } = servers.clone();
            let partition = Partition::new(number, live, broker, store, &owner, stop.clone(), liveness.register(&name));
            let partition = partition.ringing(bell.clone());
            tasks.spawn(async move {
                partition.run().await;
                name
            });
        }
        let (store, beat) = (servers.store.clone(), liveness.register("ledger"));
        let (live, stop) = (live.clone(), stop.clone());
        tasks.spawn(async move {
            forget(store, live, beat, stop).await;
            "ledger".to_owned()
        });
    }

    fn start_reconciler(&self, liveness: &Liveness, tasks: &mut JoinSet<String>) -> Ringing {
        let Self { live, servers, stop } = self;
        let timetables = vec![
            Timetable::new(reconcile::JOB, Mode::Rebuild.name(), live, |_| ""),
            Timetable::new(reconcile::JOB, Mode::Full.name(), live, |config| &config.reconcile.full_cron),
            Timetable::new(reconcile::JOB, Mode::Scrub.name(), live, |config| &config.reconcile.scrub_cron),
            Timetable::new(reconcile::JOB, Mode::Changed.name(), live, |config| &config.reconcile.changed_cron),
        ];
        let bell = Arc::new(Notify::new());
        let loss_detector = LossDetector {
            cache: servers.cache.clone(),
            live: live.clone(),
            asked: timetables.first().map(|rebuild| Arc::clone(&rebuild.asked)).unwrap_or_default(),
            bell: Arc::clone(&bell),
        };
        let (beat, stopped) = (liveness.register("lookout"), stop.clone());
        tasks.spawn(async move {
            loss_detector.run(beat, stopped).await;
            "lookout".to_owned()
        });
        tasks.spawn(self.clone().reconcile(timetables, Arc::clone(&bell), liveness.register("reconciler")));
        let patterns: Patterns = |config| {
            let limits = &config.reconcile;
            vec![&limits.full_cron, &limits.scrub_cron, &limits.changed_cron]
        };
        vec![(patterns, bell)]
    }

    fn start_archiver(&self, liveness: &Liveness, tasks: &mut JoinSet<String>) -> Ringing {
        let Self { live, servers, stop } = self;
        let bell = Arc::new(Notify::new());
        let timetables = vec![
            Timetable::new(archive::JOB, archive::MODE, live, |config| &config.archive.cron),
            Timetable::new(archive::JOB, archive::SNAPSHOT_MODE, live, |_| ""),
        ];
        let clock = SnapshotClock {
            live: live.clone(),
            store: servers.store.clone(),
            cache: servers.cache.clone(),
            asked: timetables.last().map(|snapshot| Arc::clone(&snapshot.asked)).unwrap_or_default(),
            bell: Arc::clone(&bell),
        };
        let (beat, stopped) = (liveness.register("snapshot clock"), stop.clone());
        tasks.spawn(async move {
            clock.run(beat, stopped).await;
            "snapshot clock".to_owned()
        });
        tasks.spawn(self.clone().archive(timetables, Arc::clone(&bell), liveness.register("archiver")));
        vec![(|config| vec![&config.archive.cron], bell)]
    }

    /// The task that keeps filters, or the one that sees to it that none is trusted later.
    fn start_filters(&self, liveness: &Liveness, tasks: &mut JoinSet<String>) -> Ringing {
        let beat = liveness.register("filters");
        if !self.live.current().filter.is_on() {
            let Self { servers, stop, .. } = self.clone();
            tasks.spawn(async move {
                filters::stay_off(servers.store, beat, stop).await;
                "filters".to_owned()
            });
            return Ringing::new();
        }
        let bell = Arc::new(Notify::new());
        let timetables =
            vec![Timetable::new(filters::JOB, filters::MODE, &self.live, |config| config.filter.schedule())];
        tasks.spawn(self.clone().filters(timetables, Arc::clone(&bell), beat));
        vec![(|config| vec![config.filter.schedule()], bell)]
    }

    fn start_recounter(&self, liveness: &Liveness, tasks: &mut JoinSet<String>) -> Ringing {
        let bell = Arc::new(Notify::new());
        tasks.spawn(self.clone().recount(Arc::clone(&bell), liveness.register("recounter")));
        vec![(|config| config.recounts.iter().map(|recount| recount.cron.as_str()).collect(), bell)]
    }

    async fn reconcile(self, timetables: Vec<Timetable>, bell: Arc<Notify>, beat: Heartbeat) -> String {
        let options = [Mode::Rebuild, Mode::Full, Mode::Scrub, Mode::Changed].map(RunOptions::scheduled);
        let Self { live, servers, stop } = &self;
        runner::serve(&servers.store, &timetables, &bell, &beat, stop, |place| {
            let options = options.get(place);
            async move {
                let Some(options) = options else { return Next::Bell };
                next(servers.reconcile(&live.current(), options, ProgressSink::Log, stop).await)
            }
        })
        .await;
        "reconciler".to_owned()
    }

    async fn archive(self, timetables: Vec<Timetable>, bell: Arc<Notify>, beat: Heartbeat) -> String {
        let Self { live, servers, stop } = &self;
        runner::serve(&servers.store, &timetables, &bell, &beat, stop, |place| async move {
            if place == 0 {
                return next(servers.archive(&live.current(), &Scope::default(), ProgressSink::Log, stop).await);
            }
            match servers.snapshot(&live.current(), None, false, ProgressSink::Log, stop).await {
                // Whatever became of it: the clock says when the next one is due.
                Ok(Ran::Ended(_)) => Next::Bell,
                failed => next(failed),
            }
        })
        .await;
        "archiver".to_owned()
    }

    async fn filters(self, timetables: Vec<Timetable>, bell: Arc<Notify>, beat: Heartbeat) -> String {
        let Self { live, servers, stop } = &self;
        runner::serve(&servers.store, &timetables, &bell, &beat, stop, |_| async move {
            next(servers.filters(&live.current(), stop).await)
        })
        .await;
        "filters".to_owned()
    }

    /// What is to be recounted may become another list with a reload: then the loop begins anew with that, between two runs.
    async fn recount(mut self, bell: Arc<Notify>, beat: Heartbeat) -> String {
        while !self.stop.is_cancelled() {
            let names = recounts(&self.live.current());
            if names.is_empty() {
                beat.during(self.stop.run_until_cancelled(self.live.changed())).await;
                continue;
            }
            let Self { live, servers, stop } = &mut self;
            let (now, until) = (live.clone(), stop.child_token());
            let timetables: Vec<Timetable> = names.iter().map(|name| recount_timetable(&now, name)).collect();
            let serving = runner::serve(&servers.store, &timetables, &bell, &beat, &until, |place| {
                let config = now.current();
                let name = names.get(place);
                let (servers, stop) = (&*servers, &*stop);
                async move {
                    let recount = config.recounts.iter().find(|recount| Some(&recount.name()) == name);
                    let Some(recount) = recount else { return Next::Bell };
                    next(
                        servers
                            .recount(&config, recount, recount::RunOptions::default(), ProgressSink::Log, stop)
                            .await,
                    )
                }
            });
            let changing = async {
                while recounts(&live.current()) == names {
                    live.changed().await;
                }
                until.cancel();
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = serving => {}
                () = changing => {}
            }
        }
        "recounter".to_owned()
    }

    /// Rings bells by the patterns that are in force, until the stop.
    async fn ring(mut self, mut bells: CronTriggers, ringing: Ringing, mut rung: Vec<Vec<String>>) -> String {
        while self.stop.run_until_cancelled(self.live.changed()).await.is_some() {
            let wanted = patterns(&self.live.current(), &ringing);
            if wanted == rung {
                continue;
            }
            match CronTriggers::start(with_bells(&wanted, &ringing)).await {
                Ok(new) => std::mem::replace(&mut bells, new).stop().await,
                Err(error) => {
                    let error = format!("{error:#}");
                    error!(event = "schedules-kept", error, "schedules stay as they were: {error}");
                    continue;
                }
            }
            rung = wanted;
            // A run may be due by the new pattern already.
            ringing.iter().for_each(|(_, bell)| bell.notify_one());
        }
        bells.stop().await;
        "schedules".to_owned()
    }
}

/// Of each bell, by what it rings.
fn patterns(config: &Config, ringing: &Ringing) -> Vec<Vec<String>> {
    let owned = |patterns: Vec<&str>| patterns.into_iter().map(str::to_owned).collect();
    ringing.iter().map(|(patterns, _)| owned(patterns(config))).collect()
}

fn with_bells(patterns: &[Vec<String>], ringing: &Ringing) -> Vec<(String, Arc<Notify>)> {
    let bells = patterns.iter().zip(ringing);
    bells.flat_map(|(patterns, (_, bell))| patterns.iter().map(|pattern| (pattern.clone(), Arc::clone(bell)))).collect()
}

/// The names of the `[[recount]]`s that have a schedule.
fn recounts(config: &Config) -> Vec<String> {
    config.recounts.iter().filter(|recount| !recount.cron.is_empty()).map(Recount::name).collect()
}

fn recount_timetable(live: &ConfigHandle, name: &str) -> Timetable {
    let wanted = name.to_owned();
    Timetable::new(recount::JOB, name, live, move |config| {
        let found = config.recounts.iter().find(|recount| recount.name() == wanted);
        found.map_or("", |recount| &recount.cron)
    })
    // One that is new may be costly: it waits for the hour that was chosen for it.
    .from_now_on()
}

/// When the loop looks again, after what became of a run.
fn next<R: runner::Report>(ran: Result<Ran<R>>) -> Next {
    match ran {
        Ok(Ran::Ended(report)) if matches!(report.outcome(), Outcome::Done | Outcome::LimitExceeded) => Next::Bell,
        Ok(Ran::Ended(_)) => Next::Later,
        Ok(Ran::Held { .. }) => Next::Soon,
        Err(error) if error.is::<TooFew>() => {
            let error = error.to_string();
            warn!(
                event = "partitions-behind",
                error, "jobs that wait for events on the way are left to other daemons: {error}"
            );
            Next::Later
        }
        Err(error) => {
            let refused = error.is::<runner::Refused>();
            let then = if refused { "not tried again before its next time" } else { "trying again soon" };
            error!(event = "job-failed", error = format!("{error:#}"), "a job failed, {then}: {error:#}");
            if refused { Next::Bell } else { Next::Soon }
        }
    }
}
