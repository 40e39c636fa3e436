//! Adds the next rows of one partition to Redis: to the counters, to the filters and to the boards.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Error, Result};
use tracing::warn;

use super::{Outbox, OutboxState};
use tallyd_base::config::{Config, Rules};
use tallyd_base::runtime::fault;
use tallyd_base::telemetry::{seconds_between, telemetry};
use tallyd_core::coalesce::Pair;
use tallyd_core::model::{Addition, Micros, Target, UserId};
use tallyd_core::outbox::CORRECTIONS;
use tallyd_redis::apply::{Applied, Bucket, Left, Row};
use tallyd_redis::feed::Gain;
use tallyd_redis::keys::KindNames;
use tallyd_redis::refused::Refused;

const ROWS_MAX: u64 = 32;

/// One pass reads rows until they have this many items (some megabytes). More items of a large pass share a bucket.
const ITEMS_MAX: usize = 30_000;

const AHEAD_MAX: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Window {
    rows: Vec<Row>,
    written: Vec<Micros>,
    likers: Vec<Pair>,
    is_full: bool,
}

pub(super) struct Ahead {
    /// All rows up to this one are in the counters, except in the buckets that are behind.
    number: u64,
    /// The buckets of each cache that can lack some of these rows.
    behind: Vec<BTreeSet<Bucket>>,
}

impl Outbox {
    /// If only some calls fail and `goes_ahead`, also adds later rows to the counters.
    pub(super) async fn add(&self, partition: u16, goes_ahead: bool, state: &mut OutboxState) -> Result<()> {
        state.more.remove(&partition);
        let after = state.added.of(partition);
        let window = self.read(partition, after).await?;
        let Some(last) = window.last() else { return Ok(()) };
        let mut behind = vec![BTreeSet::new(); self.caches.len()];
        let counted = self.count(partition, after, &window, &mut behind, state).await?;
        let config = self.live.current();
        let noted = self.note_likers(&config, &window, state).await;
        let fed = self.feed(&config, partition, &window, state).await;
        if let Err(error) = counted.and(noted).and(fed) {
            if goes_ahead {
                self.go_ahead(partition, &window, Ahead { number: last, behind }, state).await?;
            }
            return Err(error);
        }
        fault::point("outbox:added");
        let now = tallyd_base::runtime::clock::now();
        window.written.iter().for_each(|at| telemetry().outbox.lag.observe(seconds_between(*at, now)));
        telemetry().outbox.added.inc_by(window.rows.iter().map(|(_, additions)| additions.len() as u64).sum());
        state.added.raise(partition, last);
        state.ahead.remove(&partition);
        if window.is_full {
            state.more.insert(partition);
        }
        Ok(())
    }

    /// Leaves out the buckets that lack earlier rows. `added` is what this pass has added of `window`. A board waits
    /// for the failed calls, because it needs all rows in order.
    async fn go_ahead(&self, partition: u16, window: &Window, added: Ahead, state: &mut OutboxState) -> Result<()> {
        let former = state.ahead.remove(&partition).filter(|ahead| ahead.number > added.number);
        let mut ahead = match former {
            // A bucket that was behind is no longer, and perhaps its node has lost rows in a failover. So all buckets
            // get the rows after this window again, and the marks decide.
            Some(former) if self.has_reached_again(window, &former, &added) => added,
            Some(mut former) => {
                former.behind.iter_mut().zip(added.behind).for_each(|(all, new)| all.extend(new));
                former
            }
            None => added,
        };
        let (began, mut more) = (Instant::now(), Ok(true));
        while matches!(more, Ok(true)) && began.elapsed() < AHEAD_MAX {
            more = self.count_ahead(partition, &mut ahead, state).await;
        }
        state.ahead.insert(partition, ahead);
        more.map(drop)
    }

    fn has_reached_again(&self, window: &Window, former: &Ahead, added: &Ahead) -> bool {
        let config = self.live.current();
        let kinds = KindNames::new(&config.kinds);
        self.caches.iter().zip(&former.behind).zip(&added.behind).any(|((cache, before), now)| {
            let mut reached = cache.named(&config.metrics).buckets_of(&kinds, &window.rows);
            reached.retain(|bucket| !now.contains(bucket));
            !before.is_disjoint(&reached)
        })
    }

    async fn count_ahead(&self, partition: u16, ahead: &mut Ahead, state: &mut OutboxState) -> Result<bool> {
        let window = self.read(partition, ahead.number).await?;
        let Some(last) = window.last() else { return Ok(false) };
        let _failed = self.count(partition, ahead.number, &window, &mut ahead.behind, state).await?;
        ahead.number = last;
        Ok(window.is_full)
    }

    async fn read(&self, partition: u16, after: u64) -> Result<Window> {
        let (mut window, mut items) = (Window::default(), 0);
        loop {
            let some = self.store.outbox_after(partition, window.last().unwrap_or(after), ROWS_MAX).await?;
            window.is_full = some.len() as u64 == ROWS_MAX;
            for row in some {
                items += row.additions.len() + row.likers.len();
                window.rows.push((row.number, row.additions));
                window.written.push(row.written_at);
                window.likers.extend(row.likers);
            }
            if !window.is_full || items >= ITEMS_MAX {
                return Ok(window);
            }
        }
    }

    /// Leaves out the buckets that are `behind`. Those for which a call failed are then behind, too, and the inner
    /// result has the first error.
    ///
    /// # Errors
    /// Redis answered no call.
    async fn count(
        &self,
        partition: u16,
        after: u64,
        window: &Window,
        behind: &mut [BTreeSet<Bucket>],
        state: &mut OutboxState,
    ) -> Result<Result<()>> {
        let config = self.live.current();
        let kinds = KindNames::new(&config.kinds);
        let (mut unanswered, mut failed) = (Ok(()), Ok(()));
        for (cache, behind) in self.caches.iter().zip(behind) {
            let cache = cache.named(&config.metrics);
            fault::point("outbox:adding");
            let mut applying = cache.applying(&kinds, partition, after, &window.rows).without(behind);
            while !applying.is_done() {
                cache.apply_some(&mut applying).await?;
                fault::point("outbox:amidst");
            }
            let Applied { left, behind: more, is_answered, failed: error } = applying.ended();
            behind.extend(more);
            match is_answered {
                true => failed = failed.and(error),
                false => unanswered = unanswered.and(error),
            }
            log_left(left, state);
            if left.unknown_marks > 0 {
                super::log_went_back(partition, state);
            }
        }
        unanswered?;
        Ok(failed.map_err(Error::from))
    }

    /// Before the rows are recorded as added. A filter build that begins later reads these likes in MySQL.
    async fn note_likers(&self, config: &Config, window: &Window, state: &mut OutboxState) -> Result<()> {
        let mut likers: BTreeMap<Target, Vec<UserId>> = BTreeMap::new();
        for (target, user) in &window.likers {
            likers.entry(*target).or_default().push(*user);
        }
        let Some(cache) = self.caches.first().filter(|_| !likers.is_empty()) else { return Ok(()) };
        let refused = cache.note_likers(&KindNames::new(&config.kinds), &likers).await?;
        let Refused { additions, error: Some(error) } = refused else { return Ok(()) };
        if let Some(times) = state.unnoted.note(additions, Instant::now()) {
            warn!(
                event = "filter-refused",
                times, error, "{times} likes could not be added to filters, so these filters were deleted: {error}"
            );
        }
        Ok(())
    }

    /// Adds to the periods in which the rows were written. A job's corrections are not added to boards.
    async fn feed(&self, config: &Config, partition: u16, window: &Window, state: &mut OutboxState) -> Result<()> {
        let Some(cache) = self.caches.first().filter(|_| partition != CORRECTIONS) else { return Ok(()) };
        let rules = Rules::from(config);
        let mut gains = Vec::new();
        for ((number, additions), at) in window.rows.iter().zip(&window.written) {
            for (place, Addition { target, metric, delta }) in (1..).zip(additions) {
                let Some(board) = rules.board(target.kind, *metric) else { continue };
                let member = target.id.to_string().into_bytes().into();
                let column = config.metrics.name(*metric).into();
                gains.push(((*number, place), Gain { board, member, column, delta: *delta, at: *at }));
            }
        }
        let calls = cache.feed_calls(&config.boards, partition, gains.into_iter())?;
        let Refused { additions, error: Some(error) } = cache.feed(calls).await? else { return Ok(()) };
        if let Some(times) = state.unfed.note(additions, Instant::now()) {
            warn!(
                event = "board-refused",
                times, error, "{times} additions to boards failed and were skipped: {error}"
            );
        }
        Ok(())
    }
}

impl Window {
    fn last(&self) -> Option<u64> {
        self.rows.last().map(|(number, _)| *number)
    }
}

fn log_left(left: Left, state: &mut OutboxState) {
    let Left { unknown, no_numbers, no_buckets, .. } = left;
    if let Some(times) = state.left.note(unknown + no_numbers + no_buckets, Instant::now()) {
        warn!(
            event = "outbox-left",
            times,
            unknown,
            no_numbers,
            no_buckets,
            "{times} additions to Redis were skipped. Reasons in the last pass: the kind or metric is not in the configuration ({unknown}), \
             the value in Redis is not a number ({no_numbers}), the bucket has another type or an invalid mark ({no_buckets})"
        );
    }
}
