//! Counts numbers other than likes with lua/count.lua, and publishes their events.

use redis::Value;
use tallyd_client::{Change, ClientError, Event};
use tallyd_core::model::{Metric, Micros, Target};
use tallyd_redis::keys::Place;
use tallyd_redis::{Cache, Call, text};

use super::{ApiServer, COUNT, CountError, OnBoard, Result, TakenBack};

const OTHER: ClientError = ClientError::Answer("count.lua returned an unexpected answer");

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    pub target: Target,
    pub metric: Metric,
    pub change: Change,
    /// The time of the change: of Redis' clock if the change was counted in Redis, otherwise of this machine's clock.
    pub at: Micros,
    /// The number in Redis after the change. `None` if Redis has lost the number, or if the daemon counts it.
    pub count: Option<i64>,
    /// The amount that was added in Redis. Zero if the daemon counts the number.
    added: i64,
}

impl Changed {
    fn event(&self) -> Event {
        let Self { target, metric, change, at, .. } = self.clone();
        Event::Change(tallyd_client::Changed { target, metric, change, at })
    }
}

/// Arguments of count.lua: "add" or "set", the amount or number, and a time. The time is given only for a number that
/// can be set. If the number was set after that time, count.lua changes nothing.
type Step<'a> = (&'a str, i64, Option<Micros>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Counting {
    Counted(Changed),
    /// The number would have gone below zero, and its rule does not say `below_zero`. Nothing was changed or published.
    BelowZero {
        /// The number in Redis. Zero if Redis has a negative number. After Redis lost data, a number can be negative.
        count: i64,
    },
}

impl Counting {
    pub fn counted(self) -> Option<Changed> {
        if let Self::Counted(changed) = self { Some(changed) } else { None }
    }
}

impl ApiServer {
    /// Adds `delta` to a number of the target. MySQL adds `delta` once for each `event_id`, but Redis adds it with each
    /// call. So do not repeat this call after [`CountError::NotPublished`]. Call [`ApiServer::republish`] with the values
    /// of the error.
    ///
    /// # Errors
    ///
    /// [`CountError`] says whether the change was counted.
    pub async fn add(
        &self,
        target: Target,
        metric: Metric,
        delta: i64,
        event_id: &str,
    ) -> Result<Counting, CountError> {
        self.change(target, metric, Change::Add { delta, event_id: event_id.to_owned() }, None).await
    }

    /// Sets a number of the target to `value`. The `set` with the newest `at` wins.
    ///
    /// # Errors
    ///
    /// [`CountError`] says whether the change was counted.
    pub async fn set(&self, target: Target, metric: Metric, value: i64) -> Result<Counting, CountError> {
        self.change(target, metric, Change::Set(value), None).await
    }

    /// Sets a number of the target to zero, like [`ApiServer::set`].
    ///
    /// # Errors
    ///
    /// [`CountError`] says whether the change was counted.
    pub async fn reset(&self, target: Target, metric: Metric) -> Result<Counting, CountError> {
        self.change(target, metric, Change::Reset, None).await
    }

    /// Publishes the same event again, with both values from [`CountError::NotPublished`]. Even if the event arrives
    /// twice, the daemon applies the event only once. If the change had been taken back in Redis, this call counts the
    /// change again.
    ///
    /// # Errors
    ///
    /// [`CountError`] says whether the change was counted. The caller can call `republish` again.
    pub async fn republish(&self, changed: &Changed, taken_back: TakenBack) -> Result<Counting, CountError> {
        if taken_back == TakenBack::Yes {
            return self.change(changed.target, changed.metric, changed.change.clone(), Some(changed.at)).await;
        }
        let changed = changed.clone();
        match self.client.publish(&changed.event(), changed.count).await {
            Ok(()) => Ok(Counting::Counted(changed)),
            Err(source) => Err(CountError::NotPublished { changed: Box::new(changed), taken_back, source }),
        }
    }

    async fn change(
        &self,
        target: Target,
        metric: Metric,
        change: Change,
        at: Option<Micros>,
    ) -> Result<Counting, CountError> {
        let now = at.unwrap_or_else(tallyd_base::runtime::clock::now);
        let mut changed = Changed { target, metric, change, at: now, count: None, added: 0 };
        self.client.check(&changed.event()).await.map_err(CountError::NotCounted)?;
        if !self.is_by_daemon(metric, target.kind) {
            let counted = self.count_now(target, metric, changed.change, at).await;
            match counted.map_err(CountError::NotCounted)? {
                Counting::Counted(counted) => changed = counted,
                below => return Ok(below),
            }
        }
        let Err(source) = self.client.publish(&changed.event(), changed.count).await else {
            return Ok(Counting::Counted(changed));
        };
        let taken_back = self.take_change_back(&changed).await.unwrap_or(TakenBack::Unknown);
        Err(CountError::NotPublished { changed: Box::new(changed), taken_back, source })
    }

    /// Changes the number only in Redis. For a repeated change, `first` is the `at` of the first call, and the call
    /// does nothing if the number was set after this time.
    async fn count_now(
        &self,
        target: Target,
        metric: Metric,
        change: Change,
        first: Option<Micros>,
    ) -> Result<Counting> {
        let rule = self.rules.of(target.kind, metric);
        let (word, number) = match &change {
            Change::Add { delta, .. } => ("add", *delta),
            Change::Set(value) => ("set", *value),
            Change::Reset => ("set", 0),
        };
        // Redis stores one time per bucket: the time when a number of the bucket was last set. If the metric cannot be
        // set, the script must ignore this time, so the call contains no `since`.
        let since = rule.settable.then(|| first.unwrap_or(Micros(0)));
        let call = self.count_call(&self.cache, (target, metric), (word, number, since), rule.below_zero)?;
        let answer = self.cache.eval("count a number", &[call]).await?.pop().unwrap_or(Value::Nil);
        let Value::Array(parts) = &answer else { return Err(OTHER) };
        match parts.as_slice() {
            [Value::Int(0), _, Value::Int(count), _] => Ok(Counting::BelowZero { count: (*count).max(0) }),
            [Value::Int(1), at, count, Value::Int(added)] => {
                let at = text(at).and_then(|at| at.parse().ok()).ok_or(OTHER)?;
                let count = if let Value::Int(count) = count { Some(*count) } else { None };
                self.count_also((target, metric), (word, number, since)).await;
                self.feed((target, metric), *added).await;
                let at = first.unwrap_or(Micros(at));
                Ok(Counting::Counted(Changed { target, metric, change, at, count, added: *added }))
            }
            _ => Err(OTHER),
        }
    }

    async fn take_change_back(&self, changed: &Changed) -> Result<TakenBack> {
        let of = (changed.target, changed.metric);
        if changed.added == 0 {
            return Ok(TakenBack::Yes);
        }
        // A `set` is never undone in Redis, because this could also undo a newer `set`. A reconcile corrects the number.
        if !matches!(changed.change, Change::Add { .. }) {
            return Ok(TakenBack::Unknown);
        }
        // Take the change back even if other changes followed it. Each call publishes its own change or takes its own
        // amount back.
        let back = ("add", -changed.added, None);
        let call = self.count_call(&self.cache, of, back, true)?;
        self.cache.eval("take back a count", &[call]).await?;
        self.feed(of, -changed.added).await;
        self.count_also(of, back).await;
        Ok(TakenBack::Yes)
    }

    async fn feed(&self, (target, metric): (Target, Metric), delta: i64) {
        let Some(board) = self.rules.board(target.kind, metric).filter(|_| delta != 0) else { return };
        let member = target.id.to_string();
        let on = OnBoard { board, member: member.as_bytes() };
        let _ = self.add_to_board(on, self.cache.keys.metric(metric), delta).await;
    }

    /// Counts the change in the second layout, if there is one. The call for the first layout has already checked that
    /// the change is allowed. If this call fails, `tallyd admin layout migrate` repairs the second layout.
    async fn count_also(&self, of: (Target, Metric), step: Step<'_>) {
        let Some(also) = &self.also else { return };
        let Ok(call) = self.count_call(also, of, step, true) else { return };
        let _ = self.cache.eval("count in the second layout", &[call]).await;
    }

    fn count_call(
        &self,
        cache: &Cache,
        (target, metric): (Target, Metric),
        (word, number, since): Step<'_>,
        below_zero: bool,
    ) -> Result<Call> {
        let kind = self.names.get(target.kind).ok_or(ClientError::NoKind(target.kind))?;
        let Place { key, part, bucket } = cache.keys.place(kind, target, metric);
        let call = bucket.into_iter().fold(Call::new(&COUNT, key), Call::key);
        let call = call.number(target.id).arg(part).arg(word).number(number).number(u8::from(below_zero));
        Ok(since.into_iter().fold(call, |call, since| call.number(since.0)))
    }
}
