//! Measures how long accepted events take to reach MySQL, and rows of the outbox to reach Redis. A few extra users click
//! during the whole run. These users bypass all proxies. This module reads MySQL repeatedly.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Result;
use sqlx::{Connection, MySqlConnection};
use tallyd_base::config::Config;
use tallyd_core::model::{Target, TargetId, UserId};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::history::{Answer, Call, Micros, Recorder, What, is_ahead, now};
use crate::users::VIDEO;
use tallyd_testkit::scripts::{ApiServer, Clicked, LikeError};

/// Number of the extra users. The number is so high that each partition has some of these users.
const WATCHERS: u64 = 8;

/// The extra users and their targets have ids from this number upwards. All other users have lower ids.
const FIRST: u64 = 1_000_000;

/// Pause between two clicks of such a user.
const CLICK_EVERY: Duration = Duration::from_millis(400);

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Time limit for MySQL's answer to a check.
const LOOK_MAX: Duration = Duration::from_millis(1_500);

/// If no accepted event has waited longer than this time, everything works again.
const WELL: i64 = 1_000_000;

/// A user whose clicks are watched.
#[derive(Default)]
struct Watcher {
    /// Confirmed clicks whose rows are not in MySQL yet. Each entry contains `at`, and the times when the call began
    /// and ended.
    waiting: VecDeque<(Micros, Micros, Micros)>,
    /// MySQL has the rows of some of this user's calls. The newest of these calls began at this time.
    seen_of: Micros,
}

/// The answer of MySQL: the newest row of each watched target, and the newest and the newest added outbox row of each
/// partition.
#[derive(Default)]
struct Look {
    rows: Vec<(u64, Micros)>,
    outboxes: Vec<(u16, u64, u64)>,
}

#[derive(Default)]
struct Seen {
    watchers: Vec<Watcher>,
    /// Outbox rows by partition that Redis does not have yet, each with the time of the check that saw it first.
    outboxes: HashMap<u16, VecDeque<(u64, Micros)>>,
    /// One entry for each check: the time that the oldest accepted event has waited.
    lags: Vec<(Micros, i64)>,
}

impl Seen {
    /// Returns the time for which the oldest accepted event has waited for its row in MySQL.
    fn lag(&self, at: Micros) -> i64 {
        let oldest = self.watchers.iter().filter_map(|watcher| watcher.waiting.front()).map(|waiting| waiting.2).min();
        oldest.map_or(0, |oldest| (at - oldest).max(0))
    }

    /// Returns the time for which the oldest outbox row has waited for Redis.
    fn redis_lag(&self, at: Micros) -> i64 {
        let oldest = self.outboxes.values().filter_map(VecDeque::front).map(|waiting| waiting.1).min();
        oldest.map_or(0, |oldest| (at - oldest).max(0))
    }

    fn note(&mut self, look: Look) {
        for (target, at) in look.rows {
            let Some(watcher) = usize::try_from(target - FIRST).ok().and_then(|at| self.watchers.get_mut(at)) else {
                continue;
            };
            while let Some((_, begin, _)) = watcher.waiting.pop_front_if(|waiting| waiting.0 <= at) {
                watcher.seen_of = watcher.seen_of.max(begin);
            }
        }
        let at = now();
        for (partition, newest, added) in look.outboxes {
            let waiting = self.outboxes.entry(partition).or_default();
            // An older copy of MySQL has older numbers.
            waiting.retain(|(row, _)| (added + 1..=newest).contains(row));
            if newest > added && waiting.back().is_none_or(|(row, _)| *row < newest) {
                waiting.push_back((newest, at));
            }
        }
        self.lags.push((at, self.lag(at)));
    }
}

pub struct Watch {
    seen: Arc<Mutex<Seen>>,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Watch {
    pub fn start(config: &Config, recorder: &Arc<Recorder>) -> Result<Self> {
        let watchers = (0..WATCHERS).map(|_| Watcher::default()).collect();
        let seen = Arc::new(Mutex::new(Seen { watchers, ..Seen::default() }));
        let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
        let client = Arc::new(ApiServer::new(config));
        for number in 0..WATCHERS {
            tasks.spawn(click(Arc::clone(&client), number, Arc::clone(&seen), Arc::clone(recorder), stop.clone()));
        }
        tasks.spawn(look(config.mysql.url.expose().to_owned(), Arc::clone(&seen), stop.clone()));
        Ok(Self { seen, stop, tasks })
    }

    /// Waits until everything works again. No accepted event waits for MySQL, and no outbox row for Redis, longer than
    /// `WELL`. And for each extra user, MySQL has a click that began after `since`. Returns the time when this is true.
    pub async fn well_after(&self, since: Micros, deadline: Duration) -> Option<Micros> {
        let until = tokio::time::Instant::now() + deadline;
        while tokio::time::Instant::now() < until {
            {
                let seen = self.seen.lock().unwrap();
                let at = now();
                let lag = seen.lag(at).max(seen.redis_lag(at));
                if lag < WELL && seen.watchers.iter().all(|watcher| watcher.seen_of > since) {
                    return Some(at);
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        None
    }

    /// Returns the longest lag that this module measured between the times `from` and `to`. A lag is the time for which
    /// an accepted event has already waited.
    pub fn longest(&self, from: Micros, to: Micros) -> Duration {
        let seen = self.seen.lock().unwrap();
        let within = seen.lags.iter().filter(|(at, _)| (from..=to).contains(at)).map(|(_, lag)| *lag);
        // If MySQL does not answer a check, the events are still waiting, so the lag is recorded.
        Duration::from_micros(within.max().unwrap_or(0).unsigned_abs())
    }

    /// Stops the extra users, and waits until their last calls have ended.
    pub async fn end(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

async fn click(
    client: Arc<ApiServer>,
    number: u64,
    seen: Arc<Mutex<Seen>>,
    recorder: Arc<Recorder>,
    stop: CancellationToken,
) {
    let id = FIRST + number;
    let target = Target { kind: VIDEO, id: TargetId(id) };
    let (mut liked, mut user) = (true, id);
    while !stop.is_cancelled() {
        let begin = now();
        let clicked = match liked {
            true => client.like(target, UserId(user), &[]).await,
            false => client.unlike(target, UserId(user), &[]).await,
        };
        let end = now();
        let answer = match clicked {
            Ok(Clicked::Counted(counted)) => Answer::Done { at: counted.event.at.0 },
            Ok(Clicked::Published(event)) => Answer::Done { at: event.at.0 },
            Ok(Clicked::Same { at, .. }) => Answer::Done { at: at.0 },
            Ok(Clicked::Limited { .. }) => Answer::Nothing,
            Err(LikeError::NotCounted(_)) => Answer::NotCounted,
            Err(LikeError::NotPublished { counted, .. }) => Answer::NotConfirmed { at: counted.event.at.0 },
            Err(LikeError::NotConfirmed { event, .. }) => Answer::NotConfirmed { at: event.at.0 },
        };
        recorder.call(Call { begin, end, who: u32::MAX, what: What::Like { target: id, user, liked }, answer });
        if let Answer::Done { at } = answer
            && is_ahead(at, end)
        {
            // This event waits as a dead letter. The daemon would also dead-letter every later event of this user.
            user += WATCHERS;
            liked = true;
        } else if let Answer::Done { at } = answer {
            let watcher = usize::try_from(number).unwrap();
            seen.lock().unwrap().watchers[watcher].waiting.push_back((at, begin, end));
            liked = !liked;
        }
        tokio::time::sleep(CLICK_EVERY).await;
    }
}

/// Looks until stopped. If MySQL does not answer, no row is found.
async fn look(url: String, seen: Arc<Mutex<Seen>>, stop: CancellationToken) {
    let mut mysql: Option<MySqlConnection> = None;
    while !stop.is_cancelled() {
        let looked = tokio::time::timeout(LOOK_MAX, look_once(&url, &mut mysql)).await;
        let looked = looked.ok().and_then(Result::ok).unwrap_or_else(|| {
            mysql = None;
            Look::default()
        });
        seen.lock().unwrap().note(looked);
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn look_once(url: &str, mysql: &mut Option<MySqlConnection>) -> Result<Look> {
    const ROWS: &str = "SELECT target_id, CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', update_at) AS SIGNED) FROM like_record \
        WHERE kind = 1 AND target_id BETWEEN 1000000 AND 1000999";
    const OUTBOXES: &str = "SELECT o.`partition`, o.outbox, CAST(COALESCE(s.applied, 0) AS UNSIGNED) FROM partition_owner o \
        LEFT JOIN outbox_state s USING (`partition`)";
    let connection = match mysql {
        Some(connection) => connection,
        None => mysql.insert(MySqlConnection::connect(url).await?),
    };
    Ok(Look {
        rows: sqlx::query_as(ROWS).fetch_all(&mut *connection).await?,
        outboxes: sqlx::query_as(OUTBOXES).fetch_all(connection).await?,
    })
}
