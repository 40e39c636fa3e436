//! Decides which mode of a job is due, and when to retry a mode whose run did not do all its work. Due times follow the
//! last completed run, so a run that was missed while the daemon was down is done later.

use std::time::{Duration, Instant};

use super::{FirstRun, JobSpec};
use crate::runtime::cron;
use tallyd_connect::pace::pace;
use tallyd_core::model::Micros;
use tallyd_mysql::{Store, StoreError};

const PAUSE: Duration = Duration::from_secs(30);

const PAUSE_MAX: Duration = Duration::from_secs(900);

/// Another daemon can have begun or ended a run.
const LOOK_EVERY: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryAfter {
    /// Either the run did everything, or an operator must act before the next run.
    NextTime,
    Pause,
    /// The run ended before all its work was done. Each further run of this kind makes the pause longer.
    LongerPause,
    Resume,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    Pause(Duration),
    Woken(Duration),
}

impl Wait {
    pub(super) const AFTER_RUN: Self = Self::Pause(PAUSE);
}

#[derive(Default)]
pub(super) struct Schedule(Vec<Entry>);

pub(super) struct Entry {
    pub spec: JobSpec,
    /// By MySQL's clock, when the mode was added to this daemon's schedule.
    since: Option<Micros>,
    times: Option<cron::Schedule>,
    last: Option<Micros>,
    backoff: Option<Backoff>,
}

#[derive(Clone, Copy)]
struct Backoff {
    times: u32,
    until: Instant,
}

impl Schedule {
    pub(super) fn set(&mut self, specs: Vec<JobSpec>, time_zone: &str) {
        let mut had = std::mem::take(&mut self.0);
        for spec in specs {
            let same = had.iter().position(|entry| (entry.spec.job, &entry.spec.mode) == (spec.job, &spec.mode));
            // Only an empty pattern cannot be parsed: others were refused when the configuration was loaded.
            let times = cron::Schedule::parse(&spec.pattern, time_zone).ok();
            self.0.push(match same {
                Some(place) => Entry { spec, times, ..had.swap_remove(place) },
                None => Entry { spec, since: None, times, last: None, backoff: None },
            });
        }
    }

    /// MySQL records the starts of runs by its own clock.
    pub(super) async fn ask(&mut self, store: &Store) -> Result<Micros, StoreError> {
        if self.0.is_empty() {
            return Ok(Micros(0));
        }
        let (now, _) = store.clock().await?;
        for Entry { spec, since, times, last, .. } in &mut self.0 {
            since.get_or_insert(now);
            if times.is_some() {
                *last = store.last_done(spec.job.name(), &spec.mode).await?;
            }
        }
        Ok(now)
    }

    /// Modes that need no retry come first, and then the modes whose pause is over.
    pub(super) fn next_due(&mut self, now: Micros, instant: Instant) -> Option<&mut Entry> {
        let due = self.0.iter_mut().filter(|entry| entry.is_due(now));
        let ready = due.filter(|entry| entry.is_ready(instant));
        ready.min_by_key(|entry| match entry.backoff {
            None => (false, entry.spec.rank),
            // Of several modes to retry, the last one comes first, because those before it have been tried already.
            Some(_) => (true, usize::MAX - entry.spec.rank),
        })
    }

    /// `now` by MySQL's clock is `instant` on this machine.
    pub(super) fn wait(&self, now: Micros, instant: Instant) -> Wait {
        let pauses = self.0.iter().filter_map(|entry| entry.backoff).map(|backoff| backoff.until);
        // If a pause is over and the mode is not due, another daemon has run the mode during the pause.
        let pauses = pauses.filter_map(|until| until.checked_duration_since(instant)).filter(|pause| !pause.is_zero());
        let next = self.0.iter().filter_map(|entry| entry.times.as_ref()?.next(now));
        let next = next.map(|next| Duration::from_micros((next.0 - now.0).unsigned_abs()));
        Wait::Woken(pauses.chain(next).chain([LOOK_EVERY]).min().unwrap_or(LOOK_EVERY))
    }

    pub(super) fn is_requested(&self, instant: Instant) -> bool {
        self.0.iter().any(|entry| entry.spec.request.is_made() && entry.is_ready(instant))
    }
}

impl Entry {
    fn is_ready(&self, instant: Instant) -> bool {
        self.backoff.is_none_or(|backoff| backoff.until <= instant)
    }

    /// By a request, or by a scheduled time since the last completed run began.
    fn is_due(&self, now: Micros) -> bool {
        if self.spec.request.is_made() {
            return true;
        }
        let Some(fired) = self.times.as_ref().and_then(|times| times.last_fired(now)) else { return false };
        match (self.last, self.spec.first_run) {
            (Some(last), _) => last < fired,
            (None, FirstRun::Immediately) => true,
            (None, FirstRun::AtItsTime) => self.since.is_some_and(|since| since < fired),
        }
    }

    /// If a requested run did not do all its work, the request is made again.
    pub(super) fn ran(&mut self, retry: RetryAfter, requested: bool) {
        if requested && retry != RetryAfter::NextTime {
            self.spec.request.make();
        }
        self.backoff = match (retry, self.backoff) {
            (RetryAfter::NextTime | RetryAfter::Resume, _) => None,
            (RetryAfter::LongerPause, Some(former)) => Some(Backoff::new(former.times + 1)),
            (RetryAfter::LongerPause, None) | (RetryAfter::Pause, _) => Some(Backoff::new(0)),
        };
    }
}

impl Backoff {
    fn new(times: u32) -> Self {
        let pause = pace(PAUSE.saturating_mul(1 << times.min(8)).min(PAUSE_MAX));
        Self { times, until: Instant::now() + pause }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Requests;
    use super::super::table::specs;
    use super::*;
    use crate::config::Config;
    use tallyd_core::job_name::JobName;

    const NOON: i64 = 1_795_262_400;

    fn at(seconds: i64) -> Micros {
        Micros((NOON + seconds) * 1_000_000)
    }

    fn config() -> Config {
        let text = "[reconcile]\nchanged_cron = \"0 */5 * * * *\"\nfull_cron = \"0 0 * * * *\"\nscrub_cron = \"0 */10 * * * *\"\n\
                    [archive]\ncron = \"0 */10 * * * *\"\n[filter]\nlikes_min = 10\n";
        let recounts = ["comment", "share"].map(|metric| {
            let query = "SELECT video_id, COUNT(*) FROM t WHERE video_id > :after GROUP BY video_id ORDER BY video_id LIMIT :limit";
            format!("[[recount]]\nkind = \"video\"\nmetric = \"{metric}\"\nquery = \"{query}\"\ncron = \"0 0 * * * *\"\n")
        });
        let metrics = "[metrics]\nlike = 1\ncomment = 2\nshare = 3\n";
        crate::config::parse(&format!("{text}{metrics}{}", recounts.concat()), "config.toml", []).unwrap()
    }

    /// Every mode last ran a day ago.
    fn scheduled(job: JobName, config: &Config, requests: &Requests, order: &[usize]) -> Schedule {
        let mut specs: Vec<(usize, JobSpec)> = order.iter().copied().zip(specs(job, config, requests)).collect();
        specs.sort_by_key(|(place, _)| *place);
        let mut schedule = Schedule::default();
        schedule.set(specs.into_iter().map(|(_, spec)| spec).collect(), "UTC");
        for entry in &mut schedule.0 {
            (entry.last, entry.since) = (Some(at(-86_400)), Some(at(-86_400)));
        }
        schedule
    }

    fn runs(schedule: &mut Schedule, now: Micros) -> Vec<String> {
        let mut modes = Vec::new();
        while let Some(entry) = schedule.next_due(now, Instant::now()) {
            assert!(modes.len() < 10, "these modes run forever: {modes:?}");
            let requested = entry.spec.request.take();
            modes.push(entry.spec.mode.clone());
            entry.ran(RetryAfter::NextTime, requested);
            entry.last = Some(now);
        }
        modes
    }

    fn order(rows: usize) -> impl Strategy<Value = Vec<usize>> {
        Just((0..rows).collect::<Vec<_>>()).prop_shuffle()
    }

    proptest! {
        /// The order of rows in the table has no effect. All due modes run in the same order, and each request starts
        /// the requested mode.
        #[test]
        fn rows_in_another_order_run_all_the_same(reconcile in order(4), archive in order(2), recount in order(2)) {
            let (config, requests) = (config(), Requests::default());
            for (job, order, due, requested) in [
                (JobName::Reconcile, &reconcile, vec!["full", "scrub", "changed"], Some((&requests.rebuild, "rebuild"))),
                (JobName::Archive, &archive, vec!["closed"], Some((&requests.snapshot, "snapshot"))),
                (JobName::Filters, &vec![0], vec!["keep"], None),
                (JobName::Recount, &recount, vec!["video:comment", "video:share"], None),
            ] {
                let mut schedule = scheduled(job, &config, &requests, order);
                prop_assert_eq!(runs(&mut schedule, at(0)), due);
                if let Some((request, mode)) = requested {
                    request.make();
                    prop_assert_eq!(runs(&mut schedule, at(1)), [mode]);
                }
                prop_assert_eq!(runs(&mut schedule, at(2)), Vec::<String>::new());
            }
        }
    }

    #[test]
    fn what_redis_has_lost_goes_before_what_is_due() {
        let (config, requests) = (config(), Requests::default());
        let mut schedule = scheduled(JobName::Reconcile, &config, &requests, &[0, 1, 2, 3]);
        requests.rebuild.make();
        assert_eq!(runs(&mut schedule, at(0)), ["rebuild", "full", "scrub", "changed"]);
    }

    #[test]
    fn a_mode_that_never_ran_runs_at_once_or_waits_for_its_time() {
        let (config, requests) = (config(), Requests::default());
        for (job, immediately) in [(JobName::Archive, vec!["closed"]), (JobName::Recount, vec![])] {
            let mut schedule = scheduled(job, &config, &requests, &[0, 1]);
            schedule.0.iter_mut().for_each(|entry| (entry.last, entry.since) = (None, Some(at(60))));
            assert_eq!(runs(&mut schedule, at(60)), immediately, "{job}");
        }
        let mut schedule = scheduled(JobName::Recount, &config, &requests, &[0, 1]);
        schedule.0.iter_mut().for_each(|entry| (entry.last, entry.since) = (None, Some(at(60))));
        assert_eq!(runs(&mut schedule, at(3_600)), ["video:comment", "video:share"]);
    }

    #[test]
    fn a_mode_that_was_not_done_lets_others_go_first_and_is_tried_again_after_a_pause() {
        let (config, requests) = (config(), Requests::default());
        let mut schedule = scheduled(JobName::Reconcile, &config, &requests, &[0, 1, 2, 3]);
        requests.rebuild.make();
        let rebuild = schedule.next_due(at(0), Instant::now()).unwrap();
        let requested = rebuild.spec.request.take();
        rebuild.ran(RetryAfter::Pause, requested);
        assert_eq!(runs(&mut schedule, at(0)), ["full", "scrub", "changed"]);
        let Wait::Woken(pause) = schedule.wait(at(0), Instant::now()) else {
            panic!("the loop also waits for a request")
        };
        assert!(pause <= PAUSE && pause > PAUSE / 2, "{pause:?}");
        let later = Instant::now() + PAUSE;
        assert_eq!(
            schedule.next_due(at(30), later).map(|entry| entry.spec.mode.as_str()),
            Some("rebuild"),
            "still requested"
        );
    }

    #[test]
    fn pauses_grow_only_where_a_run_could_not_do_all() {
        let (config, requests) = (config(), Requests::default());
        let mut schedule = scheduled(JobName::Filters, &config, &requests, &[0]);
        let mut pauses = |retry: RetryAfter| {
            schedule.0[0].ran(retry, false);
            schedule.0[0].backoff.map(|backoff| (backoff.until - Instant::now()).as_secs_f64().ceil() as u64)
        };
        let longer: Vec<_> = (0..7).map(|_| pauses(RetryAfter::LongerPause)).collect();
        assert_eq!(longer, [30, 60, 120, 240, 480, 900, 900].map(Some));
        assert_eq!((pauses(RetryAfter::Pause), pauses(RetryAfter::NextTime)), (Some(30), None));
    }

    #[test]
    fn a_mode_that_another_daemon_has_done_meanwhile_keeps_the_loop_asleep() {
        let (config, requests) = (config(), Requests::default());
        let mut schedule = scheduled(JobName::Filters, &config, &requests, &[0]);
        schedule.0[0].ran(RetryAfter::Pause, false);
        schedule.0[0].last = Some(at(60));
        let later = Instant::now() + PAUSE * 2;
        assert!(schedule.next_due(at(60), later).is_none());
        assert!(matches!(schedule.wait(at(60), later), Wait::Woken(_)));
    }

    #[test]
    fn a_reload_keeps_what_is_known_of_modes_that_stay() {
        let (config, requests) = (config(), Requests::default());
        let mut schedule = scheduled(JobName::Recount, &config, &requests, &[0, 1]);
        schedule.0[1].ran(RetryAfter::Pause, false);
        let mut fewer = config.clone();
        fewer.recounts.remove(0);
        schedule.set(specs(JobName::Recount, &fewer, &requests), "UTC");
        assert_eq!(schedule.0.len(), 1);
        assert!(schedule.0[0].backoff.is_some() && schedule.0[0].last == Some(at(-86_400)));
    }

    #[test]
    fn the_loop_waits_for_the_next_time_and_never_more_than_a_minute() {
        let (config, requests) = (config(), Requests::default());
        let schedule = scheduled(JobName::Reconcile, &config, &requests, &[0, 1, 2, 3]);
        let wait = |seconds: i64| schedule.wait(at(seconds), Instant::now());
        assert_eq!(wait(290), Wait::Woken(Duration::from_secs(10)));
        assert_eq!(wait(10), Wait::Woken(LOOK_EVERY));
        assert_eq!([PAUSE, LOOK_EVERY, PAUSE_MAX].map(|it| it.as_secs()), [30, 60, 900]);
    }
}
