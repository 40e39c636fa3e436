//! Users of the site. The users call an API server of the test kit, make random choices that depend on the seed, and
//! record each call with its answer.
//!
//! Many users click on the same few targets. Some users share an account and click at the same time, as if one person
//! used two devices.

mod gateway;
mod others;
mod seat;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use tallyd_client::Change;
use tallyd_core::model::{Kind, Metric, Target, TargetId, UserId};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::checker::POSTS;
use crate::dice::Dice;
use crate::history::{Answer, Recorder, What, event_id};
use crate::site::Site;
use seat::Seat;
use tallyd_testkit::scripts::{Changed, Clicked, CountError, Counted, Counting, LikeError, TakenBack};

/// Number of targets, and number of users who click on these targets.
pub const TARGETS: u64 = 60;
const USERS: u64 = 400;

/// The kind of all targets except posts.
pub const VIDEO: Kind = Kind(1);
const POST: Kind = Kind(2);

/// Users like the same few posts for this number of seconds. Then they like new posts, and withdraw their likes of
/// earlier posts, so a board of likes always has only a few members.
const POSTS_LAST_S: u64 = 10;
const POSTS_AT_ONCE: u64 = 4;

/// The percentage of clicks that go through the gateway, if the daemons count likes.
const BY_GATEWAY: u64 = 20;

/// Number of users who click on posts.
const FANS: u64 = 4;

/// The codes in the site's `[metrics]`.
const VIEW: u8 = 2;
const STOCK: u8 = 3;
const UNREAD: u8 = 4;

/// Each client has this number of tasks.
const TASKS: u32 = 4;

/// Longest pause between two calls of a task.
const PAUSE_MS_MAX: u64 = 60;

/// Shortest pause of a user after an error.
const AFTER_ERROR: Duration = Duration::from_millis(150);

/// Maximum number of times that an unconfirmed count event is sent again.
const SENT_AGAIN_MAX: usize = 8;

/// Number of old events that a task keeps. Sometimes the task sends one of these events again.
const KEPT: usize = 40;

/// All users.
pub struct Crowd {
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl Crowd {
    /// Starts `clients` connections to each server, with four concurrent users each.
    ///
    /// # Errors
    /// Fails if the configuration can't be used.
    pub fn start(site: &Site, clients: u32, seed: u64, recorder: &Arc<Recorder>) -> Result<Self> {
        let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
        for number in 0..clients {
            let seat = Arc::new(Seat::new(site, Arc::clone(recorder))?);
            for task in 0..TASKS {
                let who = number * TASKS + task;
                let user = User {
                    seat: Arc::clone(&seat),
                    who,
                    dice: Dice::new(seed.wrapping_mul(1_000_003).wrapping_add(u64::from(who) + 1)),
                    numbered: 0,
                    old: Vec::new(),
                };
                tasks.spawn(user.play(stop.clone()));
            }
        }
        Ok(Self { stop, tasks })
    }

    /// Ends all users, and waits for their last answers. An aborted call could still have an effect later.
    ///
    /// # Errors
    /// Fails if a user panicked or doesn't end.
    pub async fn end(mut self, deadline: Duration) -> Result<()> {
        self.stop.cancel();
        let ended = tokio::time::timeout(deadline, async {
            while let Some(task) = self.tasks.join_next().await {
                task?;
            }
            anyhow::Ok(())
        });
        match ended.await {
            Ok(ended) => ended,
            Err(_) => {
                bail!("{} users still wait for an answer {} s after the end", self.tasks.len(), deadline.as_secs())
            }
        }
    }
}

/// An event that was published before.
enum Old {
    Like(Counted),
    Change(Changed, u64),
}

struct User {
    seat: Arc<Seat>,
    who: u32,
    dice: Dice,
    /// The last number from which this task has made an id.
    numbered: u64,
    old: Vec<Old>,
}

impl User {
    async fn play(mut self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let is_well = match self.dice.below(100) {
                0..46 => self.click().await,
                46..50 => self.click_post().await,
                50..66 => self.add(VIEW).await,
                66..74 => self.add(STOCK).await,
                74..79 => self.add(UNREAD).await,
                79..82 => self.set().await,
                82..88 => self.gain().await,
                88..92 => self.late().await,
                92..93 => self.letter().await,
                93..97 => self.read().await,
                _ => self.send_an_old_one().await,
            };
            let pause = Duration::from_millis(self.dice.below(PAUSE_MS_MAX));
            tokio::time::sleep(if is_well { pause } else { pause + AFTER_ERROR }).await;
        }
    }

    /// Returns a random target. Targets with lower ids are chosen more often.
    fn target(&mut self) -> Target {
        let id = 1 + self.dice.below(TARGETS).min(self.dice.below(TARGETS));
        Target { kind: VIDEO, id: TargetId(id) }
    }

    /// Returns a new id.
    fn next_number(&mut self) -> u64 {
        self.numbered += 1;
        u64::from(self.who) << 40 | self.numbered
    }

    async fn click(&mut self) -> bool {
        let (target, user, liked) = (self.target(), UserId(1 + self.dice.below(USERS)), self.dice.percent(60));
        self.click_on(target, user, liked).await
    }

    async fn click_post(&mut self) -> bool {
        let elapsed_s = (crate::history::now() - self.seat.began).unsigned_abs() / 1_000_000;
        let (now, age) = (elapsed_s / POSTS_LAST_S, self.dice.below(3));
        let first = POSTS + now.saturating_sub(age) * POSTS_AT_ONCE;
        let target = Target { kind: POST, id: TargetId(first + self.dice.below(POSTS_AT_ONCE)) };
        let (user, liked) = (UserId(1 + self.dice.below(FANS)), age == 0 && self.dice.percent(60));
        self.click_on(target, user, liked).await
    }

    async fn click_on(&mut self, target: Target, user: UserId, liked: bool) -> bool {
        let answer = self.click_once(target, user, liked).await;
        if matches!(answer, Answer::NotConfirmed { .. } | Answer::NotCounted) && self.dice.percent(50) {
            // The click was undone, so the user gets an error and clicks again.
            tokio::time::sleep(AFTER_ERROR).await;
            self.click_once(target, user, liked).await;
        }
        matches!(answer, Answer::Done { .. })
    }

    async fn click_once(&mut self, target: Target, user: UserId, liked: bool) -> Answer {
        let begin = crate::history::now();
        let gateway = self.seat.gateway.clone().filter(|_| self.dice.percent(BY_GATEWAY));
        let answer = match gateway {
            Some(gateway) => gateway::click(&gateway, target, user, liked).await,
            None => self.click_at_api(target, user, liked).await,
        };
        self.seat.note(self.who, begin, What::Like { target: target.id.0, user: user.0, liked }, answer);
        answer
    }

    async fn click_at_api(&mut self, target: Target, user: UserId, liked: bool) -> Answer {
        let client = &self.seat.client;
        let clicked = match liked {
            true => client.like(target, user, &[]).await,
            false => client.unlike(target, user, &[]).await,
        };
        match clicked {
            Ok(Clicked::Counted(counted)) => {
                self.keep(Old::Like(counted));
                Answer::Done { at: counted.event.at.0 }
            }
            Ok(Clicked::Published(event)) => Answer::Done { at: event.at.0 },
            Ok(Clicked::Same { at, .. }) => Answer::Done { at: at.0 },
            Ok(Clicked::Limited { .. }) => Answer::Nothing,
            Err(LikeError::NotCounted(_)) => Answer::NotCounted,
            Err(LikeError::NotPublished { counted, .. }) => Answer::NotConfirmed { at: counted.event.at.0 },
            Err(LikeError::NotConfirmed { event, .. }) => Answer::NotConfirmed { at: event.at.0 },
        }
    }

    async fn add(&mut self, metric: u8) -> bool {
        let (target, event) = (self.target(), self.next_number());
        let delta = match metric {
            STOCK if self.dice.percent(25) => -1,
            _ => 1 + self.dice.below(3).cast_signed(),
        };
        let begin = crate::history::now();
        let counting = self.seat.client.add(target, Metric(metric), delta, &event_id(event)).await;
        self.counted(begin, What::Add { target: target.id.0, metric, delta, event }, event, counting).await
    }

    async fn set(&mut self) -> bool {
        // There are few targets, so the counter of each target is set often.
        let target = Target { kind: VIDEO, id: TargetId(1 + self.dice.below(20)) };
        let value = if self.dice.percent(60) { 0 } else { self.dice.below(50).cast_signed() };
        let (begin, client) = (crate::history::now(), &self.seat.client);
        let counting = match value {
            0 => client.reset(target, Metric(UNREAD)).await,
            value => client.set(target, Metric(UNREAD), value).await,
        };
        self.counted(begin, What::Set { target: target.id.0, metric: UNREAD, value }, 0, counting).await
    }

    /// Records the result of a count event. If a count event is unconfirmed, most users send the same event again, as
    /// docs/scripts.md recommends. Some users give up.
    async fn counted(&mut self, begin: i64, what: What, event: u64, counting: Result<Counting, CountError>) -> bool {
        let (changed, mut taken_back) = match counting {
            Ok(Counting::Counted(changed)) => {
                self.seat.note(self.who, begin, what, Answer::Done { at: changed.at.0 });
                self.keep(Old::Change(changed, event));
                return true;
            }
            Ok(Counting::BelowZero { .. }) => {
                self.seat.note(self.who, begin, what, Answer::Nothing);
                return true;
            }
            Err(CountError::NotCounted(_)) => {
                self.seat.note(self.who, begin, what, Answer::NotCounted);
                return false;
            }
            Err(CountError::NotPublished { changed, taken_back, .. }) => (*changed, taken_back),
        };
        self.seat.note(self.who, begin, what, Answer::NotConfirmed { at: changed.at.0 });
        for _ in 0..SENT_AGAIN_MAX {
            if self.dice.percent(15) {
                break;
            }
            tokio::time::sleep(AFTER_ERROR).await;
            match self.republish(what, &changed, taken_back).await {
                Ok(Counting::Counted(changed)) => {
                    self.keep(Old::Change(changed, event));
                    break;
                }
                Ok(Counting::BelowZero { .. }) => break,
                Err(CountError::NotCounted(_)) => {}
                Err(CountError::NotPublished { taken_back: now, .. }) => taken_back = now,
            }
        }
        false
    }

    async fn republish(&self, what: What, changed: &Changed, taken_back: TakenBack) -> Result<Counting, CountError> {
        let (begin, at) = (crate::history::now(), changed.at.0);
        let counting = self.seat.client.republish(changed, taken_back).await;
        let answer = match &counting {
            Ok(Counting::Counted(_)) => Answer::Done { at },
            Ok(Counting::BelowZero { .. }) => Answer::Nothing,
            Err(CountError::NotCounted(_)) => Answer::NotCounted,
            Err(CountError::NotPublished { .. }) => Answer::NotConfirmed { at },
        };
        self.seat.note(self.who, begin, what, answer);
        counting
    }

    fn keep(&mut self, old: Old) {
        if self.old.len() < KEPT {
            self.old.push(old);
        } else {
            let place = usize::try_from(self.dice.below(KEPT as u64)).unwrap();
            self.old[place] = old;
        }
    }

    /// Sends an old event again. The repeated event must not change any data.
    async fn send_an_old_one(&mut self) -> bool {
        if self.old.is_empty() {
            return true;
        }
        let place = usize::try_from(self.dice.below(self.old.len() as u64)).unwrap();
        match &self.old[place] {
            Old::Like(counted) => {
                let (begin, event) = (crate::history::now(), counted.event);
                let is_done = self.seat.client.publish_counted(counted).await.is_ok();
                let what = What::Like { target: event.target.id.0, user: event.user.0, liked: event.liked };
                let at = event.at.0;
                let answer = if is_done { Answer::Done { at } } else { Answer::NotConfirmed { at } };
                self.seat.note(self.who, begin, what, answer);
                is_done
            }
            Old::Change(changed, event) => {
                let (target, metric) = (changed.target.id.0, changed.metric.0);
                let what = match &changed.change {
                    Change::Add { delta, .. } => What::Add { target, metric, delta: *delta, event: *event },
                    Change::Set(value) => What::Set { target, metric, value: *value },
                    Change::Reset => What::Set { target, metric, value: 0 },
                };
                // It counts already.
                self.republish(what, changed, TakenBack::Unknown).await.is_ok()
            }
        }
    }
}
