//! Decides which mode of a job is due, and when to retry a mode whose run did not do all its work. Due times follow the
//! last completed run, so a run that was missed while the daemon was down is done later.

use std::time::{Duration, Instant};

use super::run_report::RunReport;
use super::runner::{Ran, RunOutcome};
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

impl<R: RunReport> From<Ran<R>> for RetryAfter {
    fn from(ran: Ran<R>) -> Self {
        match ran {
            Ran::Held { .. } => Self::Pause,
            Ran::Ended(report) => match report.outcome() {
                RunOutcome::Done | RunOutcome::LimitExceeded | RunOutcome::Refused => Self::NextTime,
                RunOutcome::Failed | RunOutcome::Stopped | RunOutcome::DryRun => Self::LongerPause,
            },
        }
    }
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
            let same = had.iter().position(|entry| entry.spec.mode == spec.mode);
            // Only an empty pattern cannot be parsed: others were refused when the configuration was loaded.
            let times = cron::Schedule::parse(&spec.pattern, time_zone).ok();
            self.0.push(match same {
                Some(place) => Entry { spec, times, ..had.swap_remove(place) },
                None => Entry { spec, since: None, times, last: None, backoff: None },
            });
        }
    }

    /// MySQL records the starts of runs by its own clock.
    pub(super) async fn ask(&mut self, job: &str, store: &Store) -> Result<Micros, StoreError> {
        if self.0.is_empty() {
            return Ok(Micros(0));
        }
        let (now, _) = store.clock().await?;
        for Entry { spec, since, times, last, .. } in &mut self.0 {
            since.get_or_insert(now);
            if times.is_some() {
                *last = store.last_done(job, &spec.mode).await?;
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

    use super::super::Request;
    use super::*;
    use futures_util::FutureExt;

    const NOON: i64 = 1_795_262_400;

    fn at(seconds: i64) -> Micros {
        Micros((NOON + seconds) * 1_000_000)
    }

    fn spec(mode: &str, pattern: &str, rank: usize) -> JobSpec {
        let run = |_| async { Ok(RetryAfter::NextTime) }.boxed();
        JobSpec { rank, ..JobSpec::new(mode, pattern, &[], run) }
    }

    /// The modes of a reconcile, of which the first runs on request only.
    fn modes() -> Vec<JobSpec> {
        vec![
            spec("rebuild", "", 0),
            spec("full", "0 0 * * * *", 1),
            spec("scrub", "0 */10 * * * *", 2),
            spec("changed", "0 */5 * * * *", 3),
        ]
    }

    fn patient() -> Vec<JobSpec> {
        let each = ["comment", "share"].into_iter().enumerate();
        each.map(|(rank, mode)| JobSpec { first_run: FirstRun::AtItsTime, ..spec(mode, "0 0 * * * *", rank) }).collect()
    }

    /// Every mode last ran a day ago.
    fn scheduled(specs: Vec<JobSpec>) -> Schedule {
        let mut schedule = Schedule::default();
        schedule.set(specs, "UTC");
        for entry in &mut schedule.0 {
            (entry.last, entry.since) = (Some(at(-86_400)), Some(at(-86_400)));
        }
        schedule
    }

    fn request(schedule: &Schedule, mode: &str) -> Request {
        schedule.0.iter().find(|entry| entry.spec.mode == mode).unwrap().spec.request.clone()
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

    proptest! {
        /// The order of rows in the table has no effect. All due modes run in the same order, and a request starts the
        /// requested mode.
        #[test]
        fn rows_in_another_order_run_all_the_same(order in Just(vec![0, 1, 2, 3]).prop_shuffle()) {
            let mut specs: Vec<(usize, JobSpec)> = order.into_iter().zip(modes()).collect();
            specs.sort_by_key(|(place, _)| *place);
            let mut schedule = scheduled(specs.into_iter().map(|(_, spec)| spec).collect());
            prop_assert_eq!(runs(&mut schedule, at(0)), ["full", "scrub", "changed"]);
            request(&schedule, "rebuild").make();
            prop_assert_eq!(runs(&mut schedule, at(1)), ["rebuild"]);
            prop_assert_eq!(runs(&mut schedule, at(2)), Vec::<String>::new());
        }
    }

    #[test]
    fn what_redis_has_lost_goes_before_what_is_due() {
        let mut schedule = scheduled(modes());
        request(&schedule, "rebuild").make();
        assert_eq!(runs(&mut schedule, at(0)), ["rebuild", "full", "scrub", "changed"]);
    }

    #[test]
    fn a_mode_that_never_ran_runs_at_once_or_waits_for_its_time() {
        for (specs, immediately) in [(vec![spec("closed", "0 */10 * * * *", 0)], vec!["closed"]), (patient(), vec![])] {
            let mut schedule = scheduled(specs);
            schedule.0.iter_mut().for_each(|entry| (entry.last, entry.since) = (None, Some(at(60))));
            assert_eq!(runs(&mut schedule, at(60)), immediately);
        }
        let mut schedule = scheduled(patient());
        schedule.0.iter_mut().for_each(|entry| (entry.last, entry.since) = (None, Some(at(60))));
        assert_eq!(runs(&mut schedule, at(3_600)), ["comment", "share"]);
    }

    #[test]
    fn a_mode_that_was_not_done_lets_others_go_first_and_is_tried_again_after_a_pause() {
        let mut schedule = scheduled(modes());
        request(&schedule, "rebuild").make();
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
        let mut schedule = scheduled(vec![spec("keep", "0 0 * * * *", 0)]);
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
        let mut schedule = scheduled(vec![spec("keep", "0 0 * * * *", 0)]);
        schedule.0[0].ran(RetryAfter::Pause, false);
        schedule.0[0].last = Some(at(60));
        let later = Instant::now() + PAUSE * 2;
        assert!(schedule.next_due(at(60), later).is_none());
        assert!(matches!(schedule.wait(at(60), later), Wait::Woken(_)));
    }

    #[test]
    fn a_reload_keeps_what_is_known_of_modes_that_stay() {
        let mut schedule = scheduled(patient());
        schedule.0[1].ran(RetryAfter::Pause, false);
        schedule.set(patient().split_off(1), "UTC");
        assert_eq!(schedule.0.len(), 1);
        assert!(schedule.0[0].backoff.is_some() && schedule.0[0].last == Some(at(-86_400)));
    }

    #[test]
    fn the_loop_waits_for_the_next_time_and_never_more_than_a_minute() {
        let schedule = scheduled(modes());
        let wait = |seconds: i64| schedule.wait(at(seconds), Instant::now());
        assert_eq!(wait(290), Wait::Woken(Duration::from_secs(10)));
        assert_eq!(wait(10), Wait::Woken(LOOK_EVERY));
        assert_eq!([PAUSE, LOOK_EVERY, PAUSE_MAX].map(|it| it.as_secs()), [30, 60, 900]);
    }
}
