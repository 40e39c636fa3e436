//! Counts numbers other than likes. A rule says which side counts a number in Redis: the client (`writer = "api"`) or
//! the daemon.

use redis::Value;
use tracing::warn;

use super::error::require;
use super::likes::note_also;
use super::{BrokerError, Client, ClientError, CountError, OnBoard, Result, TakenBack, now};
use tallyd_core::chain::Chain;
use tallyd_core::event::{DELTA_MAX, EVENT_ID_MAX, ID_MAX, encode_count, encode_reset, encode_set};
use tallyd_core::model::{Metric, Micros, Target};
use tallyd_core::rules::Writes;
use tallyd_redis::keys::Place;
use tallyd_redis::{COUNT, Cache, Call, text};

/// The largest number that is counted exactly: 2^53-1. The smallest number is -2^53+1.
pub const NUMBER_MAX: i64 = (1 << 53) - 1;

/// The error for an unexpected answer of count.lua.
const OTHER: ClientError = ClientError::Answer("count.lua returned an unexpected answer");

/// How a number changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// `delta` is added to the number. MySQL adds `delta` once for each `event_id`.
    Add {
        /// The difference, from -2^31 to 2^31.
        delta: i64,
        /// An id of 1 to 64 characters. Each event of this number needs a different id.
        event_id: String,
    },
    /// The number is set to this value, from -[`NUMBER_MAX`] to [`NUMBER_MAX`].
    Set(i64),
    /// The number is set to zero.
    Reset,
}

/// A change of a number. If the daemon counts the number, Redis contains the change only after the daemon has processed
/// the event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The target that the number belongs to.
    pub target: Target,
    /// The metric that changes.
    pub metric: Metric,
    /// How it changes.
    pub change: Change,
    /// The time of the change. The time comes from Redis' clock if the change was counted in Redis, otherwise from this
    /// machine's clock.
    pub at: Micros,
    /// The number in Redis after the change. `None` if Redis has lost the number, or if the daemon counts it.
    pub count: Option<i64>,
    /// The amount that was added in Redis. Zero if the daemon counts the number.
    added: i64,
}

impl Changed {
    /// Describes a change that was made at `at` and has not been counted yet, for [`Client::republish`].
    pub fn at(target: Target, metric: Metric, change: Change, at: Micros) -> Self {
        Self { target, metric, change, at, count: None, added: 0 }
    }

    /// The amount that was added in Redis. Zero if the daemon counts the number.
    pub fn added(&self) -> i64 {
        self.added
    }
}

/// Arguments of count.lua: "add" or "set", the amount or number, and a time. The time is given only for a number that
/// can be set. If the number was set after that time, count.lua changes nothing.
type Step<'a> = (&'a str, i64, Option<Micros>);

/// The result of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Counting {
    /// The change was counted, and its event is published.
    Counted(Changed),
    /// The number would have gone below zero, and its rule does not say `below_zero`. Nothing was changed or published.
    BelowZero {
        /// The number in Redis. Zero if Redis has a negative number. After Redis lost data, a number can be negative.
        count: i64,
    },
}

impl Counting {
    /// Returns the counted change, if there is one.
    pub fn counted(self) -> Option<Changed> {
        if let Self::Counted(changed) = self { Some(changed) } else { None }
    }
}

impl Client {
    /// Adds `delta` (-2^31 to 2^31) to a number of the target. With `writer = "api"`, the call adds in Redis and
    /// publishes the event. With `writer = "daemon"`, the call only publishes the event, and `at` is the time of this
    /// machine's clock. This clock must not be ahead by more than `[consumer] future_max`.
    ///
    /// MySQL adds `delta` once for each `event_id` (1 to 64 characters), but Redis adds it with each call. So do not
    /// repeat this call after [`CountError::NotPublished`]. Call [`Client::republish`] with the values of the error.
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

    /// Sets a number of the target to `value` (-[`NUMBER_MAX`] to [`NUMBER_MAX`]), and publishes it like
    /// [`Client::add`]. The number's rule must say `settable`, and also `below_zero` if the value is below zero. The
    /// `set` with the newest `at` wins.
    ///
    /// # Errors
    ///
    /// [`CountError`] says whether the change was counted.
    pub async fn set(&self, target: Target, metric: Metric, value: i64) -> Result<Counting, CountError> {
        self.change(target, metric, Change::Set(value), None).await
    }

    /// Sets a number of the target to zero, like [`Client::set`].
    ///
    /// # Errors
    ///
    /// [`CountError`] says whether the change was counted.
    pub async fn reset(&self, target: Target, metric: Metric) -> Result<Counting, CountError> {
        self.change(target, metric, Change::Reset, None).await
    }

    /// Publishes the same event again, with both values from [`CountError::NotPublished`]. Even if the event arrives
    /// twice, the daemon applies the event only once. If the client had taken the change back in Redis, this call
    /// counts the change again.
    ///
    /// # Errors
    ///
    /// [`CountError`] says whether the change was counted. The caller can call `republish` again.
    pub async fn republish(&self, changed: &Changed, taken_back: TakenBack) -> Result<Counting, CountError> {
        if taken_back == TakenBack::Yes {
            return self.change(changed.target, changed.metric, changed.change.clone(), Some(changed.at)).await;
        }
        let changed = changed.clone();
        match self.publish_change(&changed).await {
            Ok(()) => Ok(Counting::Counted(changed)),
            Err(source) => Err(CountError::NotPublished { changed: Box::new(changed), taken_back, source }),
        }
    }

    /// Publishes the event of a change, and waits until the broker has it on disk.
    async fn publish_change(&self, changed: &Changed) -> Result<(), BrokerError> {
        let Changed { target, metric, change, at, count, .. } = changed;
        let kind = self.kinds.name(target.kind);
        let names = (kind.as_str(), self.cache.keys.metric(*metric));
        let body = match change {
            Change::Add { delta, event_id } => encode_count(target.id, names, *delta, *at, event_id, *count),
            Change::Set(value) => encode_set(target.id, names, *value, *at),
            Change::Reset => encode_reset(target.id, names, *at),
        };
        // The routing key is the target's id. So all changes of one number go through one partition in order, and
        // change one row of `counter`. The routing key of a like is the user's id, because this spreads the likes of a
        // popular target over all partitions. For counts, one partition per target is enough, because a batch adds up
        // all changes of a target.
        self.publish_body(&target.id.to_string(), &body).await
    }

    /// Counts a change and publishes its event. The event's time is `at`, or the time of counting if `at` is missing.
    async fn change(
        &self,
        target: Target,
        metric: Metric,
        change: Change,
        at: Option<Micros>,
    ) -> Result<Counting, CountError> {
        self.check(target, metric, &change).map_err(CountError::NotCounted)?;
        let changed = match self.writer(target.kind, metric).await {
            Writes::Daemon => {
                let at = at.unwrap_or_else(now);
                Changed { target, metric, change, at, count: None, added: 0 }
            }
            Writes::Api => match self.count_now(target, metric, change, at).await.map_err(CountError::NotCounted)? {
                Counting::Counted(changed) => changed,
                below => return Ok(below),
            },
        };
        // Publish once more after a failure, because perhaps only the connection had broken. A repeated event changes
        // nothing.
        let Err(source) = self.twice(|| self.publish_change(&changed)).await else {
            return Ok(Counting::Counted(changed));
        };
        let taken_back = self.take_change_back(&changed).await.unwrap_or(TakenBack::Unknown);
        Err(CountError::NotPublished { changed: Box::new(changed), taken_back, source })
    }

    /// Fails if the daemon would reject the change, because Redis must not count such a change.
    fn check(&self, target: Target, metric: Metric, change: &Change) -> Result<()> {
        let Target { kind, id } = target;
        require((1..=ID_MAX).contains(&id.0), || format!("the target's id is {id}, allowed are 1 to {ID_MAX}"))?;
        let is_like = metric == self.metric;
        require(!is_like, || "likes are counted only by `like` and `unlike`".to_owned())?;
        if !self.metrics.contains(&metric) {
            return Err(ClientError::NoMetric(metric));
        }
        self.check_kind(kind)?;
        match change {
            Change::Add { delta, event_id } => {
                let in_range = delta.unsigned_abs() <= DELTA_MAX;
                require(in_range, || format!("delta is {delta}, allowed are -{DELTA_MAX} to {DELTA_MAX}"))?;
                let length = event_id.chars().count();
                let in_range = (1..=EVENT_ID_MAX).contains(&length);
                require(in_range, || format!("event_id has {length} characters, allowed are 1 to {EVENT_ID_MAX}"))
            }
            Change::Set(_) | Change::Reset => {
                let name = self.cache.keys.metric(metric);
                let ruled = self.rules.of(kind, metric);
                require(ruled.settable, || format!("no [[rule]] says that {name} is settable"))?;
                let Change::Set(value) = *change else { return Ok(()) };
                let in_range = value.unsigned_abs() <= NUMBER_MAX.unsigned_abs();
                require(in_range, || format!("the number is {value}, and must be below 2^53"))?;
                let in_range = value >= 0 || ruled.below_zero;
                require(in_range, || format!("{name} can't be set to {value}: no [[rule]] says below_zero"))
            }
        }
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
        // The client never undoes a `set` event in Redis, because this could also undo a newer `set` event. A reconcile
        // corrects the number.
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

    /// Adds the change to the metric's board (`board` in its rule). If this fails, the change still counts.
    async fn feed(&self, (target, metric): (Target, Metric), delta: i64) {
        let Some(board) = self.rules.board(target.kind, metric).filter(|_| delta != 0) else { return };
        let member = target.id.to_string();
        let on = OnBoard { board, member: member.as_bytes() };
        if let Err(error) = self.add_to_board(on, self.cache.keys.metric(metric), delta).await {
            let error = Chain(&error).to_string();
            warn!(event = "board-refused", error, "the number was counted, but the board {board} failed: {error}");
        }
    }

    /// Counts the change in the second layout, if there is one. The call for the first layout has already checked that
    /// the change is allowed.
    async fn count_also(&self, of: (Target, Metric), step: Step<'_>) {
        let Some(also) = &self.also else { return };
        let Ok(call) = self.count_call(also, of, step, true) else { return };
        note_also(
            self.cache.eval("count in the second layout", &[call]).await.map(|mut answers| answers.pop()).transpose(),
        );
    }

    fn count_call(
        &self,
        cache: &Cache,
        (target, metric): (Target, Metric),
        (word, number, since): Step<'_>,
        below_zero: bool,
    ) -> Result<Call> {
        let kind = self.names.get(target.kind);
        let kind = kind.ok_or(ClientError::NoKind(target.kind))?;
        let Place { key, part, bucket } = cache.keys.place(kind, target, metric);
        let call = bucket.into_iter().fold(Call::new(&COUNT, key), Call::key);
        let call = call.number(target.id).arg(part).arg(word).number(number).number(u8::from(below_zero));
        Ok(since.into_iter().fold(call, |call, since| call.number(since.0)))
    }
}
