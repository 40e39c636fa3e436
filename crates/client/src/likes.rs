//! Counts likes that change what the user likes, publishes these likes, and takes a like back if it can't be published.

use std::error::Error;

use redis::Value;
use tokio::time::timeout;
use tracing::{debug, warn};

use super::error::require;
use super::gateway::HINT_MAX;
use super::{Clicked, Client, ClientError, Counted, LikeError, OnBoard, Result, TakenBack};
use tallyd_core::chain::Chain;
use tallyd_core::event::LikeEvent;
use tallyd_core::kinds::LIKE;
use tallyd_core::model::{Micros, Target, UserId};
use tallyd_core::rules::Writes;
use tallyd_mysql::status::LastClick;
use tallyd_redis::bloom::Shape;
use tallyd_redis::keys::Place;
use tallyd_redis::recent::shape;
use tallyd_redis::{Cache, Call, LIKE as LIKE_SCRIPT, TAKE_BACK, text};

/// The value that replaces the missing row of a user who never clicked.
const NEVER: LastClick = LastClick { at: Micros(0), liked: false };

/// The error for an unexpected answer of like.lua.
const OTHER: ClientError = ClientError::Answer("like.lua returned an unexpected answer");

/// The largest number of targets of one call of [`Client::liked`]. The pipeline has two commands for each target, or
/// three if there are filters.
pub const STATUS_TARGETS_MAX: usize = 500;

/// The answer of like.lua.
enum Answer {
    Counted {
        at: Micros,
        count: Option<i64>,
    },
    Same {
        at: Micros,
        count: Option<i64>,
    },
    /// Redis does not know whether the user likes the target. If the client should ask again and send the user's bits
    /// for the target's filter, the value contains the filter's shape.
    Unknown(Option<Shape>),
}

impl Client {
    /// Makes the user like the target. A double click, a retry after a failure, and clicks on two devices at the same
    /// time count once.
    ///
    /// If the daemon counts likes of the kind, the call only publishes the event: [`Clicked::Published`]. Then `boards`
    /// must be empty, because the daemon adds the like to the board of the rule. The client ignores `boards` if its own
    /// rules still say `writer = "api"`.
    ///
    /// With `writer = "api"`, the call counts a new like in Redis, adds the like to `boards`, and publishes its event.
    /// Redis remembers what a user likes for `[client] recent_keep`. After that time, the client asks MySQL, which must
    /// be the primary server. While MySQL is unavailable, every click counts, and a reconcile corrects the number
    /// later.
    ///
    /// # Errors
    ///
    /// [`LikeError`] says whether the click was counted. The caller can make the same call again.
    pub async fn like(&self, target: Target, user: UserId, boards: &[OnBoard<'_>]) -> Result<Clicked, LikeError> {
        self.count_and_publish(LikeEvent { target, user, at: Micros(0), liked: true }, boards).await
    }

    /// Removes the user's like of the target. Apart from this, the call works like [`Client::like`].
    ///
    /// # Errors
    ///
    /// [`LikeError`] says whether the click was counted. The caller can make the same call again.
    pub async fn unlike(&self, target: Target, user: UserId, boards: &[OnBoard<'_>]) -> Result<Clicked, LikeError> {
        self.count_and_publish(LikeEvent { target, user, at: Micros(0), liked: false }, boards).await
    }

    async fn count_and_publish(&self, wish: LikeEvent, boards: &[OnBoard<'_>]) -> Result<Clicked, LikeError> {
        if self.writer(wish.target.kind, self.metric).await == Writes::Daemon {
            return self.publish_click(LikeEvent { at: super::now(), ..wish }, boards).await;
        }
        let (clicked, counted) = match self.click(wish, boards).await.map_err(LikeError::NotCounted)? {
            (clicked, Some(counted)) => (clicked, counted),
            (clicked, None) => return Ok(clicked),
        };
        let Err(source) = self.twice(|| self.publish_like(&counted.event, counted.count)).await else {
            return Ok(clicked);
        };
        let taken_back = match self.take_back(&counted, boards).await {
            Ok(true) => TakenBack::Yes,
            Ok(false) => TakenBack::Overtaken,
            Err(_) => TakenBack::Unknown,
        };
        Err(LikeError::NotPublished { counted, taken_back, source })
    }

    /// Publishes a click that the daemon counts.
    async fn publish_click(&self, event: LikeEvent, boards: &[OnBoard<'_>]) -> Result<Clicked, LikeError> {
        // Accept boards if this client's own rules say that API servers write the number. The daemons have announced
        // that the daemon writes the number, so the daemon adds the like to the boards.
        let is_set_up_to_count = self.rules.of(event.target.kind, self.metric).writer == Writes::Api;
        require(is_set_up_to_count || boards.is_empty(), || {
            "the daemon counts these likes and adds them to the board of their [[rule]]: pass no boards".to_owned()
        })
        .and_then(|()| self.check_kind(event.target.kind))
        .map_err(LikeError::NotCounted)?;
        // While Redis is unreachable, the number of a user's clicks is not limited.
        let limited = timeout(HINT_MAX, self.limits_of(&[event.user])).await.ok().and_then(Result::ok);
        if let Some(wait) = limited.and_then(|mut waits| waits.pop().flatten()) {
            return Ok(Clicked::Limited { wait });
        }
        match self.twice(|| self.publish_like(&event, None)).await {
            Ok(()) => Ok(Clicked::Published(event)),
            Err(source) => Err(LikeError::NotConfirmed { event, source }),
        }
    }

    /// Counts a click in Redis, but publishes nothing. A click counts only if it changes what the user likes. Also
    /// returns the event to publish. If the click changes nothing, the returned event is the user's last event, which
    /// perhaps was never published.
    async fn click(&self, wish: LikeEvent, boards: &[OnBoard<'_>]) -> Result<(Clicked, Option<Counted>)> {
        if let Some(wait) = self.limits_of(&[wish.user]).await?.pop().flatten() {
            return Ok((Clicked::Limited { wait }, None));
        }
        let mut answer = self.ask(wish, None).await?;
        if matches!(answer, Answer::Unknown(_)) {
            let target = [wish.target];
            let rows = self.ask_mysql(&self.clicks_unasked, self.store.last_clicks(wish.user, &target)).await;
            let row = rows.map(|rows| rows.get(&wish.target).copied().unwrap_or(NEVER));
            // If MySQL is unavailable, count the click. The click may count twice until a reconcile, but no click is
            // lost.
            answer = self.ask(wish, Some(row.unwrap_or(LastClick { liked: !wish.liked, ..NEVER }))).await?;
        }
        match answer {
            Answer::Counted { at, count } => {
                let event = LikeEvent { at, ..wish };
                let other = LastClick { liked: !wish.liked, ..NEVER };
                let also = self.also.as_ref().map(|also| self.guarded_call(also, event, Some(other)));
                let boards_failed = self.add_elsewhere(also.transpose()?, wish.liked, boards).await;
                let counted = Counted { event, count, boards_failed };
                Ok((Clicked::Counted(counted), Some(counted)))
            }
            Answer::Same { at, count } => {
                let counted = Counted { event: LikeEvent { at, ..wish }, count, boards_failed: 0 };
                Ok((Clicked::Same { count, at }, Some(counted)))
            }
            Answer::Unknown(_) => Err(ClientError::Answer(
                "like.lua got the user's row, but answered that it does not know the user's state",
            )),
        }
    }

    /// Counts a like (`liked`) or an unlike without checking whether it changes what the user likes. The call also adds
    /// to the boards, in the same round trip. The call is for callers that know that the click changes something. Call
    /// [`Client::publish`] next. In the layouts `entity` and `string`, the call returns no number.
    ///
    /// # Errors
    ///
    /// [`ClientError::Invalid`]: the daemon counts these likes. [`ClientError::NoKind`] and
    /// [`ClientError::Gain`]: nothing was sent. [`ClientError::Redis`]: the click may count.
    pub async fn count(&self, target: Target, user: UserId, liked: bool, boards: &[OnBoard<'_>]) -> Result<Counted> {
        let by_api = self.writer(target.kind, self.metric).await == Writes::Api;
        require(by_api, || "the daemon counts these likes: call like or unlike instead".to_owned())?;
        if self.shapes.is_some() && liked {
            // Note the user even if the user perhaps likes the target already. An unneeded note costs at most one
            // query.
            self.cache.note_beside_filter(&self.kinds.name(target.kind), target, user).await?;
        }
        let mut calls = vec![self.like_call(&self.cache, target, liked)?];
        for on in boards {
            calls.push(self.add_call(on, LIKE, if liked { 1 } else { -1 })?);
        }
        if let Some(also) = &self.also {
            calls.push(self.like_call(also, target, liked)?);
        }
        let mut answers = self.cache.eval_each("count a like", &calls).await?.into_iter();
        let answer = answers.next().ok_or(OTHER)??;
        let Some(Answer::Counted { at, count }) = read_answer(&answer) else {
            return Err(OTHER);
        };
        // Redis has counted the click. So the client must publish the event, even if a board could not be changed.
        let failed = boards.iter().zip(answers.by_ref()).filter_map(|(on, answer)| Some((on, answer.err()?)));
        let boards_failed = failed.map(|(on, error)| note_board(on, &error)).sum();
        note_also(answers.next());
        Ok(Counted { event: LikeEvent { target, user, at, liked }, count, boards_failed })
    }

    /// Takes back a counted click whose event could not be published. Returns false and changes nothing if another
    /// request can still publish the same event, or if the user has clicked again. Call `take_back` once for each
    /// click. [`Client::like`] and [`Client::unlike`] call it automatically.
    ///
    /// # Errors
    ///
    /// [`ClientError::Redis`]: the click may have been taken back.
    pub async fn take_back(&self, counted: &Counted, boards: &[OnBoard<'_>]) -> Result<bool> {
        let call = self.take_back_call(&self.cache, counted.event)?;
        let answer = self.cache.eval("take back a like", &[call]).await?.pop();
        let is_done = answer == Some(Value::Int(1));
        if is_done {
            let also = self.also.as_ref().map(|also| self.take_back_call(also, counted.event));
            self.add_elsewhere(also.transpose()?, !counted.event.liked, boards).await;
        }
        Ok(is_done)
    }

    /// Returns whether the user likes each of up to [`STATUS_TARGETS_MAX`] targets, in the order of `targets`. The call
    /// makes one round trip to Redis. If Redis does not know some of the targets, the call also makes one query to
    /// MySQL for each kind of these targets.
    ///
    /// # Errors
    /// [`ClientError::Invalid`] for more targets; [`ClientError::Redis`]; [`ClientError::MySql`].
    pub async fn liked(&self, user: UserId, targets: &[Target]) -> Result<Vec<bool>> {
        let in_range = targets.len() <= STATUS_TARGETS_MAX;
        require(in_range, || format!("a call asks for at most {STATUS_TARGETS_MAX} targets"))?;
        Ok(self.known_likes(user, targets).await?.into_iter().map(|known| known.liked).collect())
    }

    /// Returns users who like the target, in the order of their ids: at most `limit` users whose id is above `after` (0
    /// for the first page). The call reads MySQL, so likes of the last moments are missing.
    ///
    /// # Errors
    /// [`ClientError::MySql`].
    pub async fn likers(&self, target: Target, after: u64, limit: u64) -> Result<Vec<UserId>> {
        Ok(self.store.likers(target, after, limit).await?)
    }

    /// Counts a click if it changes what the user likes. Redis decides this with the remembered clicks, or with
    /// `known`, the row in MySQL.
    async fn ask(&self, wish: LikeEvent, known: Option<LastClick>) -> Result<Answer> {
        let answer = self.ask_once(wish, known).await?;
        match (&answer, &self.shapes) {
            (Answer::Unknown(Some(shape)), Some(shapes)) => {
                shapes.learn(wish.target, *shape);
                self.ask_once(wish, known).await
            }
            _ => Ok(answer),
        }
    }

    async fn ask_once(&self, wish: LikeEvent, known: Option<LastClick>) -> Result<Answer> {
        let call = self.filtered_call(wish, known).await?;
        let answer = match self.cache.eval("count a like", &[call]).await {
            Err(error) if error.is_of_a_moving_slot() => {
                debug!(event = "slot-moving", "{}", Chain(&error));
                self.count_while_moving(wish).await?
            }
            answer => answer?.pop().unwrap_or(Value::Nil),
        };
        read_answer(&answer).ok_or(OTHER)
    }

    /// Counts a click while a Cluster moves the keys' hash slot to another node. The keys are then on two nodes, so a
    /// script can use only one key.
    async fn count_while_moving(&self, wish: LikeEvent) -> Result<Value> {
        let kind = self.kinds.name(wish.target.kind);
        if self.shapes.is_some() && wish.liked {
            // Note the user before counting. If a noted user doesn't like the target, the note only causes a query. But
            // if a user isn't noted, the user's like may be counted twice.
            self.cache.note_beside_filter(&kind, wish.target, wish.user).await?;
        }
        let answer =
            self.cache.eval("count a like", &[self.like_call(&self.cache, wish.target, wish.liked)?]).await?.pop();
        let answer = answer.unwrap_or(Value::Nil);
        if let Some(Answer::Counted { at, .. }) = read_answer(&answer) {
            let keep_s = self.limits.recent_keep.0.as_secs();
            self.cache.remember_click(&kind, LikeEvent { at, ..wish }, keep_s).await;
        }
        Ok(answer)
    }

    /// Builds the call that counts a click if the click changes what the user likes. If there are filters, the call also
    /// updates the target's filter.
    async fn filtered_call(&self, wish: LikeEvent, known: Option<LastClick>) -> Result<Call> {
        let call = self.guarded_call(&self.cache, wish, known)?;
        let Some(shapes) = &self.shapes else { return Ok(call) };
        let LikeEvent { target, user, .. } = wish;
        let Place { key, bucket, .. } = self.place(&self.cache, target)?;
        // In the layout packed, the number is in the bucket.
        let call = if bucket.is_none() { call.key(key) } else { call };
        let keys = self.cache.keys.filter(&self.kinds.name(target.kind), target);
        let call = keys.into_iter().fold(call, Call::key).arg("").arg(shapes.epoch(&self.cache).await);
        Ok(match shapes.get(target) {
            Some(shape) => shape.bits(user).fold(call.number(shape.size), Call::number),
            None => call.arg(""),
        })
    }

    /// Builds the call that counts without a check.
    fn like_call(&self, cache: &Cache, target: Target, liked: bool) -> Result<Call> {
        let Place { key, part, .. } = self.place(cache, target)?;
        Ok(Call::new(&LIKE_SCRIPT, key).number(target.id).arg(part).arg(word(liked)))
    }

    /// Builds the call that counts a click if it changes something. A click that already has an `at` keeps this `at`.
    fn guarded_call(&self, cache: &Cache, click: LikeEvent, known: Option<LastClick>) -> Result<Call> {
        let LikeEvent { target, user, at, liked } = click;
        let Place { key, part, bucket } = self.place(cache, target)?;
        let [recent, former] = cache.keys.recent(&self.kinds.name(target.kind), cache.keys.bucket(target));
        let call = Call::new(&LIKE_SCRIPT, key).key(recent).key(former);
        let call = bucket.into_iter().fold(call, Call::key);
        let call = call.number(target.id).arg(part).arg(word(liked)).number(user);
        let call =
            call.number(self.limits.recent_keep.0.as_secs()).arg(known.map(|row| row.to_string()).unwrap_or_default());
        Ok(if at == Micros(0) { call } else { call.number(at.0) })
    }

    fn take_back_call(&self, cache: &Cache, click: LikeEvent) -> Result<Call> {
        let LikeEvent { target, user, at, liked } = click;
        let Place { key, part, .. } = self.place(cache, target)?;
        let [recent, former] = cache.keys.recent(&self.kinds.name(target.kind), cache.keys.bucket(target));
        let call = Call::new(&TAKE_BACK, key).key(recent).key(former);
        Ok(call.number(target.id).arg(part).arg(word(liked)).number(user).number(at.0))
    }

    fn place(&self, cache: &Cache, target: Target) -> Result<Place> {
        let kind = self.names.get(target.kind);
        let kind = kind.ok_or(ClientError::NoKind(target.kind))?;
        Ok(cache.keys.place(kind, target, self.metric))
    }

    /// Adds the like to the boards, and counts it in the second layout. Returns how many boards failed.
    async fn add_elsewhere(&self, also: Option<Call>, liked: bool, boards: &[OnBoard<'_>]) -> usize {
        let mut failed = 0;
        let mut calls = Vec::with_capacity(boards.len() + 1);
        for on in boards {
            match self.add_call(on, LIKE, if liked { 1 } else { -1 }) {
                Ok(call) => calls.push((on, call)),
                Err(error) => failed += note_board(on, &error),
            }
        }
        let (called, mut calls): (Vec<_>, Vec<Call>) = calls.into_iter().unzip();
        calls.extend(also);
        if calls.is_empty() {
            return failed;
        }
        match self.cache.eval_each("add to boards and the second layout", &calls).await {
            Ok(answers) => {
                let mut answers = answers.into_iter();
                for (on, answer) in called.iter().zip(answers.by_ref()) {
                    failed += answer.err().map_or(0, |error| note_board(on, &error));
                }
                note_also(answers.next());
            }
            Err(error) => {
                failed += called.iter().map(|on| note_board(on, &error)).sum::<usize>();
                debug!(event = "also-uncounted", "{}", Chain(&error));
            }
        }
        failed
    }
}

/// Logs a failure of the second layout. The like counts nevertheless, and `tallyd layout migrate` repairs the second
/// layout.
pub(super) fn note_also(answer: Option<tallyd_redis::Result<Value>>) {
    if let Some(Err(error)) = answer {
        debug!(event = "also-uncounted", "{}", Chain(&error));
    }
}

/// Logs that a like was not added to a board. Redis has counted the like nevertheless. Returns 1, one failed board.
fn note_board(on: &OnBoard<'_>, error: &(dyn Error + 'static)) -> usize {
    let (board, error) = (on.board, Chain(error).to_string());
    warn!(
        event = "board-failed",
        board, error, "adding a like to the board {board} failed, but the like is counted: {error}"
    );
    1
}

fn word(liked: bool) -> &'static str {
    if liked { "like" } else { "unlike" }
}

fn read_answer(answer: &Value) -> Option<Answer> {
    let Value::Array(parts) = answer else { return None };
    let count = |part: Option<&Value>| match part {
        Some(Value::Int(count)) => Some(*count),
        _ => None,
    };
    match parts.as_slice() {
        [Value::Int(-1), rest @ ..] => Some(Answer::Unknown(shape(rest))),
        [Value::Int(0), at, rest @ ..] => {
            Some(Answer::Same { at: Micros(text(at)?.parse().ok()?), count: count(rest.first()) })
        }
        [Value::Int(1), at, rest @ ..] => {
            Some(Answer::Counted { at: Micros(text(at)?.parse().ok()?), count: count(rest.first()) })
        }
        _ => None,
    }
}
