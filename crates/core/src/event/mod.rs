//! The event's JSON: the only code that knows it. One message in, one verdict out: a like, a count, a set, a fence, or a
//! refusal with a stable reason. Pure: "now" is an argument.
//!
//! A field's *shape* never fails the parse: every field is taken as a scalar, then judged by name, so that the
//! reason says which field is wrong and what is allowed. The format is docs/events.md.

mod encode;
pub(crate) mod raw;
pub(crate) mod refusal;
pub(crate) mod scalar;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

pub use encode::{encode_count, encode_fence, encode_like, encode_reset, encode_set};
use raw::Raw;
use refusal::refuse;
pub use refusal::{Reason, Refusal};
use scalar::Scalar;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use crate::kinds::LIKE;
use crate::model::{Kind, Metric, Micros, Target, TargetId, UserId};
use crate::partition::PartitionBy;
use crate::rules::Rules;

/// An event's largest JSON in bytes. Real events have about 120.
pub const BODY_BYTES_MAX: usize = 64 * 1024;

/// A body that is a list of events: its largest size in bytes.
pub const LIST_BYTES_MAX: usize = 1 << 20;

/// A body that is a list of events: how many it may hold.
pub const LIST_EVENTS_MAX: usize = 1_000;

/// The largest id: MySQL's and most languages' signed 64-bit maximum.
pub const ID_MAX: u64 = i64::MAX as u64;

/// The largest `delta`, and without its sign the least.
pub const DELTA_MAX: u64 = 1 << 31;

/// The largest `value`, and without its sign the least: every whole number up to it is one in JavaScript and in Lua.
pub const VALUE_MAX: u64 = 1 << 53;

/// Characters that an `event_id` has at most.
pub const EVENT_ID_MAX: usize = 64;

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// A user likes a target, or does no longer.
    Like(LikeEvent),
    /// A number of a target changes.
    Count(CountEvent),
    /// A number of a target becomes a value.
    Set(SetEvent),
    /// The marker of a reconcile: once its number is committed, so is every event published before it.
    Fence(u64),
}

impl Message {
    /// The message, unless it is one that tallyd alone sends.
    ///
    /// # Errors
    /// It is a fence.
    pub fn of_publisher(self) -> Result<Self, Refusal> {
        if matches!(self, Self::Fence(_)) { Err(not_a_fence()) } else { Ok(self) }
    }
}

/// `like` and `unlike`: they *set* a state, they never flip it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LikeEvent {
    /// What is liked.
    pub target: Target,
    /// Who likes it.
    pub user: UserId,
    /// When, by Redis' clock: of two events the newer one wins.
    pub at: Micros,
    /// The state that is set: true for `like`.
    pub liked: bool,
}

/// `count`: a number changes by so much, once for each `event_id`, however often the event comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountEvent {
    pub target: Target,
    /// Which one; never `like`, which follows from who likes the target.
    pub metric: Metric,
    /// What is added: -2^31 to 2^31.
    pub delta: i64,
    /// When, by the producer: the same each time that the event is sent.
    pub at: Micros,
    /// Which event it is.
    pub id: EventId,
}

/// `set`, and `reset`, which sets to zero: of a number the newest one wins, and what was counted until then is void.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetEvent {
    pub target: Target,
    /// Which one; its rule is `settable`.
    pub metric: Metric,
    /// What it becomes: -2^53 to 2^53.
    pub value: i64,
    /// When, by the clock that counts of this number have their `at` from.
    pub at: Micros,
}

/// What stands for an `event_id` in the ledger: the first 16 bytes of the SHA-256 of the target, the metric and the id, so that two numbers
/// of one happening may share its id. Two of a million million events are the same with a probability of 10^-15.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub [u8; 16]);

impl EventId {
    /// Of that text, for a number of that target.
    pub fn of(target: Target, metric: Metric, text: &str) -> Self {
        let of = format!("{}:{}:{}:{text}", target.kind.0, target.id.0, metric.0);
        let digest: [u8; 32] = Sha256::digest(of.as_bytes()).into();
        let mut id = [0; 16];
        id.copy_from_slice(&digest[..16]);
        Self(id)
    }
}

/// What events are judged by.
#[derive(Clone, Debug)]
pub struct Terms {
    /// `[kinds]`.
    pub kinds: BTreeMap<String, u8>,
    /// `[metrics]`.
    pub metrics: BTreeMap<String, u8>,
    /// How far ahead of now an `at` may be: further ahead it would win against every later event of its row.
    pub future_max: Duration,
    /// How far back the `at` of a count or set may be: so long the ledger remembers which were applied.
    pub applied_event_keep: Duration,
    /// Which metrics may be set.
    pub rules: Rules,
    /// What chooses the partition of a like, where one is sent again.
    pub partition_by: PartitionBy,
}

/// Judges a message's body, which holds one event or a list of up to [`LIST_EVENTS_MAX`]: `each` gets every verdict, with
/// where in the body its event stands. An event of a list is judged by itself: one that is refused harms no other.
pub fn decode_all(
    body: &[u8],
    terms: &Terms,
    now: Micros,
    mut each: impl FnMut(Result<Message, Refusal>, Range<usize>),
) {
    if body.trim_ascii_start().first() != Some(&b'[') {
        return each(decode(body, terms, now), 0..body.len());
    }
    match split(body) {
        Err(refusal) => each(Err(refusal), 0..body.len()),
        Ok(events) => {
            for event in events {
                let event = event.get().as_bytes();
                // The event is a part of the body, so its address says where.
                let from = (event.as_ptr() as usize).saturating_sub(body.as_ptr() as usize);
                each(decode(event, terms, now).and_then(Message::of_publisher), from..from + event.len());
            }
        }
    }
}

/// The events of a body that is a list.
///
/// # Errors
/// It is no JSON, or it is too large.
pub fn split(body: &[u8]) -> Result<Vec<&RawValue>, Refusal> {
    if body.len() > LIST_BYTES_MAX {
        let error = format!("the list has {} bytes, at most {LIST_BYTES_MAX} are taken", body.len());
        return Err(refuse(Reason::TooLarge, error));
    }
    let events: Vec<&RawValue> =
        serde_json::from_slice(body).map_err(|error| refuse(Reason::MalformedJson, error.to_string()))?;
    if events.len() > LIST_EVENTS_MAX {
        let error = format!("the list has {} events, at most {LIST_EVENTS_MAX} are taken", events.len());
        return Err(refuse(Reason::TooLarge, error));
    }
    Ok(events)
}

/// Judges one event.
///
/// # Errors
/// A [`Refusal`] for whatever can never be applied; never for anything that another try could change.
pub fn decode(body: &[u8], terms: &Terms, now: Micros) -> Result<Message, Refusal> {
    if body.len() > BODY_BYTES_MAX {
        return Err(refuse(
            Reason::TooLarge,
            format!("the body has {} bytes, at most {BODY_BYTES_MAX} are taken", body.len()),
        ));
    }
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err(refuse(Reason::MalformedJson, "the body is no JSON object".to_owned()));
    }
    // Of the fields that are ignored a parser would not look at the bytes.
    let text = std::str::from_utf8(body).map_err(|error| {
        refuse(Reason::MalformedJson, format!("the body is no UTF-8 from byte {} on", error.valid_up_to()))
    })?;
    let raw: Raw<'_> = serde_json::from_str(text).map_err(|error| refuse(Reason::MalformedJson, error.to_string()))?;
    judge(&raw, terms, now)
}

/// The fence's number, where a body is a fence.
pub fn fence_of(body: &[u8]) -> Option<u64> {
    let raw: Raw<'_> = serde_json::from_slice(body).ok().filter(|_| body.len() <= BODY_BYTES_MAX)?;
    match (raw.event_type.text(), &raw.fence) {
        (Some("fence"), Scalar::Unsigned(number)) => Some(*number),
        _ => None,
    }
}

/// Judges fields.
pub(crate) fn judge(raw: &Raw<'_>, terms: &Terms, now: Micros) -> Result<Message, Refusal> {
    match raw.event_type.text() {
        Some("like") => like(raw, true, terms, now),
        Some("unlike") => like(raw, false, terms, now),
        Some("count") => count(raw, terms, now),
        Some("set") => set(raw, &raw.value, terms, now),
        Some("reset") => set(raw, &Scalar::Unsigned(0), terms, now),
        Some("fence") => fence(&raw.fence),
        named => {
            let reason = if named.is_some() { Reason::UnknownType } else { Reason::NoType };
            let allowed = "allowed are \"like\", \"unlike\", \"count\", \"set\" and \"reset\"";
            Err(refuse(reason, format!("type is {}, {allowed}", raw.event_type)))
        }
    }
}

/// The body of a like or an unlike that has no `at`, with this one. `None` for any other body.
pub fn with_at(body: &[u8], at: Micros) -> Option<Vec<u8>> {
    let raw: Raw<'_> = serde_json::from_slice(body).ok()?;
    let lacks_at = matches!(raw.event_type.text(), Some("like" | "unlike")) && matches!(raw.at, Scalar::Missing);
    let rest = body.trim_ascii_start().strip_prefix(b"{").filter(|_| lacks_at)?;
    Some([format!("{{\"at\":{at},").as_bytes(), rest].concat())
}

fn like(raw: &Raw<'_>, liked: bool, terms: &Terms, now: Micros) -> Result<Message, Refusal> {
    let target = target(raw, terms)?;
    let user = id_of_user(&raw.user_id)?;
    let at = at(&raw.at, now, terms.future_max)?;
    Ok(Message::Like(LikeEvent { target, user, at, liked }))
}

fn count(raw: &Raw<'_>, terms: &Terms, now: Micros) -> Result<Message, Refusal> {
    let target = target(raw, terms)?;
    let metric = metric(raw, terms)?;
    let delta = raw.delta.integer().filter(|delta| delta.unsigned_abs() <= DELTA_MAX);
    let Some(delta) = delta else {
        let error = format!("delta is {}, allowed is an integer, -{DELTA_MAX} to {DELTA_MAX}", raw.delta);
        return Err(refuse(Reason::DeltaOutOfRange, error));
    };
    let id = raw.event_id.text().filter(|id| (1..=EVENT_ID_MAX).contains(&id.chars().count()));
    let Some(id) = id.map(|id| EventId::of(target, metric, id)) else {
        let error = format!("event_id is {}, allowed is text of 1 to {EVENT_ID_MAX} characters", raw.event_id);
        return Err(refuse(Reason::EventIdOutOfRange, error));
    };
    let at = at_kept(raw, terms, now)?;
    Ok(Message::Count(CountEvent { target, metric, delta, at, id }))
}

fn set(raw: &Raw<'_>, value: &Scalar<'_>, terms: &Terms, now: Micros) -> Result<Message, Refusal> {
    let target = target(raw, terms)?;
    let metric = metric(raw, terms)?;
    if !terms.rules.of(target.kind, metric).settable {
        let error = format!("metric is {}, which no [[rule]] of config.toml makes settable for the kind", raw.metric);
        return Err(refuse(Reason::NotSettable, error));
    }
    let Some(value) = value.integer().filter(|value| value.unsigned_abs() <= VALUE_MAX) else {
        let error = format!("value is {value}, allowed is an integer, -{VALUE_MAX} to {VALUE_MAX}");
        return Err(refuse(Reason::ValueOutOfRange, error));
    };
    let at = at_kept(raw, terms, now)?;
    Ok(Message::Set(SetEvent { target, metric, value, at }))
}

fn metric(raw: &Raw<'_>, terms: &Terms) -> Result<Metric, Refusal> {
    let metric = raw.metric.text().filter(|name| *name != LIKE).and_then(|name| terms.metrics.get(name));
    metric.map(|code| Metric(*code)).ok_or_else(|| {
        let error = match raw.metric.text() {
            Some(LIKE) => "metric is \"like\", which events of the types like and unlike count".to_owned(),
            _ => format!("metric is {}, which is not in [metrics] of config.toml", raw.metric),
        };
        refuse(Reason::UnknownMetric, error)
    })
}

/// The `at` of what is remembered for `applied_event_keep`.
fn at_kept(raw: &Raw<'_>, terms: &Terms, now: Micros) -> Result<Micros, Refusal> {
    let at = at(&raw.at, now, terms.future_max)?;
    if at < now.before(terms.applied_event_keep) {
        let keep = terms.applied_event_keep.as_secs();
        let error = format!(
            "at is {:.1} s ago, and which events were applied is remembered for {keep} s ([consumer] applied_event_keep)",
            micros_as_s(now.0 - at.0)
        );
        return Err(refuse(Reason::AtTooOld, error));
    }
    Ok(at)
}

fn target(raw: &Raw<'_>, terms: &Terms) -> Result<Target, Refusal> {
    let Some(kind) = raw.kind.text().and_then(|name| terms.kinds.get(name)) else {
        let error = format!("kind is {}, which is not in [kinds] of config.toml", raw.kind);
        return Err(refuse(Reason::UnknownKind, error));
    };
    let id = id(&raw.target_id, "target_id", Reason::TargetIdOutOfRange)?;
    Ok(Target { kind: Kind(*kind), id: TargetId(id) })
}

fn fence(number: &Scalar<'_>) -> Result<Message, Refusal> {
    match number {
        Scalar::Unsigned(number) => Ok(Message::Fence(*number)),
        _ => Err(not_a_fence()),
    }
}

fn not_a_fence() -> Refusal {
    refuse(Reason::UnknownType, "a fence is sent by tallyd alone, straight to a queue and with its number".to_owned())
}

fn id(value: &Scalar<'_>, field: &str, reason: Reason) -> Result<u64, Refusal> {
    let id = match value {
        Scalar::Unsigned(id) => Some(*id),
        Scalar::Text(text) => decimal(text),
        _ => None,
    };
    id.filter(|id| (1..=ID_MAX).contains(id)).ok_or_else(|| {
        refuse(reason, format!("{field} is {value}, allowed is an integer or a decimal string, 1 to {ID_MAX}"))
    })
}

fn id_of_user(value: &Scalar<'_>) -> Result<UserId, Refusal> {
    id(value, "user_id", Reason::UserIdOutOfRange).map(UserId)
}

/// Digits alone: no sign, no space, no leading zero, so that one id has one spelling.
fn decimal(text: &str) -> Option<u64> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    if digits && !text.starts_with('0') { text.parse().ok() } else { None }
}

fn at(value: &Scalar<'_>, now: Micros, future_max: Duration) -> Result<Micros, Refusal> {
    let at = match value {
        Scalar::Unsigned(at) => i64::try_from(*at).ok().filter(|at| (1..=Micros::MAX.0).contains(at)),
        _ => None,
    };
    let Some(at) = at else {
        let error =
            format!("at is {value}, allowed are microseconds since the epoch as an integer, 1 to {}", Micros::MAX);
        return Err(refuse(Reason::AtOutOfRange, error));
    };
    let ahead = at.saturating_sub(now.0);
    if u128::try_from(ahead).is_ok_and(|ahead| ahead > future_max.as_micros()) {
        let error = format!(
            "at is {:.1} s ahead of this daemon's clock, allowed are {} s",
            micros_as_s(ahead),
            future_max.as_secs()
        );
        return Err(refuse(Reason::AtInFuture, error));
    }
    Ok(Micros(at))
}

#[expect(clippy::cast_precision_loss, reason = "shown with one digit after the point")]
fn micros_as_s(micros: i64) -> f64 {
    micros as f64 / 1e6
}

#[cfg(test)]
mod tests;
