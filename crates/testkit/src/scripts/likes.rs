//! Counts likes that change what the user likes, publishes these likes, and takes a like back if it can't be published.

use std::time::SystemTime;

use redis::Value;
use tallyd_client::{ClientError, Event};
use tallyd_core::event::LikeEvent;
use tallyd_core::kinds::LIKE as LIKE_NAME;
use tallyd_core::model::{Micros, Target, UserId};
use tallyd_mysql::status::LastClick;
use tallyd_redis::bloom::Shape;
use tallyd_redis::keys::Place;
use tallyd_redis::recent::shape;
use tallyd_redis::{Cache, Call, text};

use super::{
    ApiServer, Clicked, Counted, LIKE, LikeError, OnBoard, REMEMBER, Result, TAKE_BACK, TakenBack, is_of_a_moving_slot,
};

/// The value that replaces the missing row of a user who never clicked.
const NEVER: LastClick = LastClick { at: Micros(0), liked: false };

const OTHER: ClientError = ClientError::Answer("like.lua returned an unexpected answer");

enum Answer {
    Counted {
        at: Micros,
        count: Option<i64>,
    },
    Same {
        at: Micros,
        count: Option<i64>,
    },
    /// Redis does not know whether the user likes the target. If the call must be made again with the user's bits for
    /// the target's filter, the value contains the filter's shape.
    Unknown(Option<Shape>),
}

impl ApiServer {
    /// Makes the user like the target: counts a new like in Redis, adds it to `boards`, and publishes its event. If
    /// MySQL is asked and does not answer, the click counts without a check.
    ///
    /// # Errors
    ///
    /// [`LikeError`] says whether the click was counted. The caller can make the same call again.
    pub async fn like(&self, target: Target, user: UserId, boards: &[OnBoard<'_>]) -> Result<Clicked, LikeError> {
        self.count_and_publish(LikeEvent { target, user, at: Micros(0), liked: true }, boards).await
    }

    pub async fn unlike(&self, target: Target, user: UserId, boards: &[OnBoard<'_>]) -> Result<Clicked, LikeError> {
        self.count_and_publish(LikeEvent { target, user, at: Micros(0), liked: false }, boards).await
    }

    async fn count_and_publish(&self, wish: LikeEvent, boards: &[OnBoard<'_>]) -> Result<Clicked, LikeError> {
        let LikeEvent { target, user, liked, .. } = wish;
        if self.is_by_daemon(self.metric, target.kind) {
            let clicked =
                if liked { self.client.like(target, user).await } else { self.client.unlike(target, user).await };
            return Ok(match clicked? {
                tallyd_client::Clicked::Published(event) => Clicked::Published(event),
                tallyd_client::Clicked::Limited { wait } => Clicked::Limited { wait },
            });
        }
        // A click that can't be published must not be counted.
        let checked = self.client.check(&Event::Like(wish)).await;
        checked.map_err(LikeError::NotCounted)?;
        let (clicked, counted) = match self.click(wish, boards).await.map_err(LikeError::NotCounted)? {
            (clicked, Some(counted)) => (clicked, counted),
            (clicked, None) => return Ok(clicked),
        };
        let Err(source) = self.publish_counted(&counted).await else { return Ok(clicked) };
        let taken_back = match self.take_back(&counted, boards).await {
            Ok(true) => TakenBack::Yes,
            Ok(false) => TakenBack::Overtaken,
            Err(_) => TakenBack::Unknown,
        };
        Err(LikeError::NotPublished { counted, taken_back, source })
    }

    /// Counts a click in Redis, but publishes nothing. A click counts only if it changes what the user likes. Also
    /// returns the event to publish. If the click changes nothing, the returned event is the user's last event, which
    /// perhaps was never published.
    async fn click(&self, wish: LikeEvent, boards: &[OnBoard<'_>]) -> Result<(Clicked, Option<Counted>)> {
        let click = LikeEvent { at: Micros::from(SystemTime::now()), ..wish };
        if let Some(wait) = self.client.limits_of(&[click]).await?.pop().flatten() {
            return Ok((Clicked::Limited { wait }, None));
        }
        let mut answer = self.ask(wish, None).await?;
        if matches!(answer, Answer::Unknown(_)) {
            let rows = self.ask_mysql(self.store.last_clicks(wish.user, &[wish.target])).await;
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
            Answer::Unknown(_) => {
                Err(ClientError::Answer("like.lua got the user's row, but does not know the user's state"))
            }
        }
    }

    /// Counts a like (`liked`) or an unlike without checking whether it changes what the user likes. The call also adds
    /// to the boards, in the same round trip. Call [`ApiServer::publish_counted`] next. In the layouts `entity` and
    /// `string`, the call returns no number.
    ///
    /// # Errors
    ///
    /// [`ClientError::Invalid`]: the daemon counts these likes. [`ClientError::NoKind`] and [`ClientError::Gain`]:
    /// nothing was sent. [`ClientError::Redis`]: the click may count.
    pub async fn count(&self, target: Target, user: UserId, liked: bool, boards: &[OnBoard<'_>]) -> Result<Counted> {
        if self.is_by_daemon(self.metric, target.kind) {
            return Err(ClientError::Invalid("the daemon counts these likes".to_owned()));
        }
        if self.shapes.is_some() && liked {
            // Note the user even if the user perhaps likes the target already. An unneeded note costs at most one
            // query.
            self.note_beside_filter(&self.kinds.name(target.kind), target, user).await?;
        }
        let mut calls = vec![self.like_call(&self.cache, target, liked)?];
        for on in boards {
            calls.push(self.add_call(on, LIKE_NAME, if liked { 1 } else { -1 })?);
        }
        if let Some(also) = &self.also {
            calls.push(self.like_call(also, target, liked)?);
        }
        let mut answers = self.cache.eval_each("count a like", &calls).await?.into_iter();
        let answer = answers.next().ok_or(OTHER)??;
        let Some(Answer::Counted { at, count }) = read_answer(&answer) else {
            return Err(OTHER);
        };
        // Redis has counted the click. So the event must be published, even if a board could not be changed.
        let boards_failed = answers.take(boards.len()).filter(|answer| answer.is_err()).count();
        Ok(Counted { event: LikeEvent { target, user, at, liked }, count, boards_failed })
    }

    /// Takes back a counted click whose event could not be published. Returns false and changes nothing if another
    /// request can still publish the same event, or if the user has clicked again. Call `take_back` once for each
    /// click. [`ApiServer::like`] and [`ApiServer::unlike`] call it automatically.
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
            Err(error) if is_of_a_moving_slot(&error) => self.count_while_moving(wish).await?,
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
            self.note_beside_filter(&kind, wish.target, wish.user).await?;
        }
        let call = self.like_call(&self.cache, wish.target, wish.liked)?;
        let answer = self.cache.eval("count a like", &[call]).await?.pop().unwrap_or(Value::Nil);
        if let Some(Answer::Counted { at, .. }) = read_answer(&answer) {
            let [recent, _] = self.cache.keys.recent(&kind, self.cache.keys.bucket(wish.target));
            let click = LastClick { at, liked: wish.liked };
            let call = Call::new(&REMEMBER, recent).arg(format!("{}:{}", wish.target.id, wish.user));
            let call = call.arg(written(click)).number(self.recent_keep);
            // If this fails, the next click of the user can be judged wrongly. The click counts nevertheless.
            let _ = self.cache.eval("remember a click", &[call]).await;
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
        Ok(Call::new(&LIKE, key).number(target.id).arg(part).arg(word(liked)))
    }

    /// Builds the call that counts a click if it changes something. A click that already has an `at` keeps this `at`.
    fn guarded_call(&self, cache: &Cache, click: LikeEvent, known: Option<LastClick>) -> Result<Call> {
        let LikeEvent { target, user, at, liked } = click;
        let Place { key, part, bucket } = self.place(cache, target)?;
        let [recent, former] = cache.keys.recent(&self.kinds.name(target.kind), cache.keys.bucket(target));
        let call = Call::new(&LIKE, key).key(recent).key(former);
        let call = bucket.into_iter().fold(call, Call::key);
        let call = call.number(target.id).arg(part).arg(word(liked)).number(user);
        let call = call.number(self.recent_keep).arg(known.map(written).unwrap_or_default());
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
        let kind = self.names.get(target.kind).ok_or(ClientError::NoKind(target.kind))?;
        Ok(cache.keys.place(kind, target, self.metric))
    }
}

/// The format in which lua/like.lua stores clicks: `1764000000000000+`.
fn written(LastClick { at, liked }: LastClick) -> String {
    format!("{at}{}", if liked { '+' } else { '-' })
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
