//! Parses an event's JSON. No other code depends on this format. docs/events.md describes the format. The result of
//! parsing an event is a like, a count, a set, a fence, or a refusal with a stable reason. Pure: the current time is an
//! argument.
//!
//! A field of the wrong type never makes the parser fail. The parser first reads every field as a scalar, and then
//! checks the field's type and value. So a refusal can say which field is wrong and which values are allowed.

mod encode;
mod list;
pub(crate) mod raw;
pub(crate) mod refusal;
pub(crate) mod scalar;
mod time;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

pub use encode::{encode_count, encode_fence, encode_like, encode_reset, encode_set};
pub use list::{list_of, traceparent_of, with_traceparent};
use raw::Raw;
use refusal::refuse;
pub use refusal::{Reason, Refusal};
use scalar::Scalar;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
pub(crate) use time::unit_hint;
use time::{at, at_kept};

use crate::kinds::LIKE;
use crate::model::{Kind, Metric, Micros, Target, TargetId, UserId};
use crate::partition::PartitionBy;
use crate::rules::Rules;

/// The maximum size of an event's JSON, in bytes. Real events have about 120 bytes.
pub const BODY_BYTES_MAX: usize = 64 * 1024;

pub const LIST_BYTES_MAX: usize = 1 << 20;

pub const LIST_EVENTS_MAX: usize = 1_000;

/// The largest id: the maximum of signed 64-bit integers in MySQL and most languages.
pub const ID_MAX: u64 = i64::MAX as u64;

pub const DELTA_MAX: u64 = 1 << 31;

/// The largest absolute value of `value`. JavaScript and Lua represent every integer up to this limit exactly.
pub const VALUE_MAX: u64 = 1 << 53;

pub const EVENT_ID_MAX: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    Like(LikeEvent),
    Count(CountEvent),
    Set(SetEvent),
    /// A fence: a marker message with a number, which a job sends to a queue. When a fence is committed, every event
    /// that was published before the fence is also committed.
    Fence(u64),
}

impl Message {
    /// Returns the message if a producer is allowed to send it. Only tallyd is allowed to send fences.
    pub fn of_publisher(self) -> Result<Self, Refusal> {
        if matches!(self, Self::Fence(_)) { Err(not_a_fence()) } else { Ok(self) }
    }
}

/// `like` and `unlike`: they *set* a state and never toggle it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LikeEvent {
    pub target: Target,
    pub user: UserId,
    /// The time of the click by Redis' clock if `writer = "api"`, otherwise by the sender's clock. The newer event
    /// wins.
    pub at: Micros,
    pub liked: bool,
}

/// `count`: changes a counter by `delta`. Each `event_id` is applied once, even if the event arrives many times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountEvent {
    pub target: Target,
    /// The metric. The metric is never `like`, because only `like` and `unlike` events change that metric.
    pub metric: Metric,
    /// The amount to add: -2^31 to 2^31.
    pub delta: i64,
    /// The producer's time. If a producer sends the event again, this time must not change.
    pub at: Micros,
    pub id: EventId,
}

/// `set` sets a counter to a value, and `reset` sets it to zero. The newest of these events wins, and overrides all
/// `count` events with an earlier or equal `at`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetEvent {
    pub target: Target,
    /// The metric. A rule must make this metric `settable`.
    pub metric: Metric,
    /// The new value: -2^53 to 2^53.
    pub value: i64,
    /// The producer's time. This time and the `at` of the counter's `count` events must come from the same clock.
    pub at: Micros,
}

/// The ledger's key for an `event_id`: the first 16 bytes of the SHA-256 over target, metric and `event_id`. So `count`
/// events for different counters can have the same `event_id`. The probability that two of 10^12 events have the same
/// key is 10^-15.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub [u8; 16]);

impl EventId {
    pub fn of(target: Target, metric: Metric, text: &str) -> Self {
        let of = format!("{}:{}:{}:{text}", target.kind.0, target.id.0, metric.0);
        let digest: [u8; 32] = Sha256::digest(of.as_bytes()).into();
        let mut id = [0; 16];
        id.copy_from_slice(&digest[..16]);
        Self(id)
    }
}

#[derive(Clone, Debug)]
pub struct Terms {
    /// Whether the names of kinds and metrics, and the rules, are checked. A client without a site card checks neither.
    pub is_checked: bool,
    pub kinds: BTreeMap<String, u8>,
    pub metrics: BTreeMap<String, u8>,
    /// The earliest `at`. A time in a wrong unit is far earlier.
    pub at_min: Micros,
    /// The maximum time by which an `at` can be in the future. Without this limit, an event with a wrong `at` in the
    /// far future would win against all correct events of its row.
    pub future_max: Duration,
    /// The maximum age of a count or set event. The ledger keeps applied events for this duration.
    pub applied_event_keep: Duration,
    pub rules: Rules,
    pub partition_by: PartitionBy,
}

impl Terms {
    /// Returns the code of a name. If names are not checked, an unknown name has the code 0, which no site uses.
    fn code(&self, codes: &BTreeMap<String, u8>, name: &str) -> Option<u8> {
        codes.get(name).copied().or((!self.is_checked).then_some(0))
    }
}

/// Calls `each` for every event, with its place in the body. A refused event in a list does not affect the others.
pub fn decode_all(
    body: &[u8],
    terms: &Terms,
    now: Micros,
    mut each: impl FnMut(Result<Message, Refusal>, Range<usize>),
) {
    let text = without_mark(body);
    if text.trim_ascii_start().first() != Some(&b'[') {
        return each(decode(text, terms, now), place_in(body, text));
    }
    match split(text) {
        Err(refusal) => each(Err(refusal), 0..body.len()),
        Ok(events) => {
            for event in events {
                let event = event.get().as_bytes();
                each(decode(event, terms, now).and_then(Message::of_publisher), place_in(body, event));
            }
        }
    }
}

/// Removes a byte order mark, as RFC 8259 allows.
pub(crate) fn without_mark(body: &[u8]) -> &[u8] {
    body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body)
}

pub(crate) fn place_in(body: &[u8], part: &[u8]) -> Range<usize> {
    let from = (part.as_ptr() as usize).saturating_sub(body.as_ptr() as usize);
    from..from + part.len()
}

pub fn split(body: &[u8]) -> Result<Vec<&RawValue>, Refusal> {
    if body.len() > LIST_BYTES_MAX {
        let error = format!("the list has {} bytes, at most {LIST_BYTES_MAX} are allowed", body.len());
        return Err(refuse(Reason::TooLarge, error));
    }
    serde_json::from_slice(body).map_err(|error| refuse(Reason::MalformedJson, error.to_string()))
}

/// Checks one event.
///
/// # Errors
/// Returns a [`Refusal`] if the event can never be applied. A problem that a retry could solve is never a refusal.
pub fn decode(body: &[u8], terms: &Terms, now: Micros) -> Result<Message, Refusal> {
    if body.len() > BODY_BYTES_MAX {
        return Err(refuse(
            Reason::TooLarge,
            format!("the body has {} bytes, at most {BODY_BYTES_MAX} are allowed", body.len()),
        ));
    }
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err(refuse(Reason::MalformedJson, "the body is not a JSON object".to_owned()));
    }
    // This check is needed because the parser does not check whether ignored fields are UTF-8.
    let text = std::str::from_utf8(body).map_err(|error| {
        refuse(Reason::MalformedJson, format!("the body is not valid UTF-8 at byte {}", error.valid_up_to()))
    })?;
    let raw: Raw<'_> = serde_json::from_str(text).map_err(|error| refuse(Reason::MalformedJson, error.to_string()))?;
    judge(&raw, terms, now)
}

pub fn fence_of(body: &[u8]) -> Option<u64> {
    let raw: Raw<'_> = serde_json::from_slice(body).ok().filter(|_| body.len() <= BODY_BYTES_MAX)?;
    match (raw.event_type.text(), &raw.fence) {
        (Some("fence"), Scalar::Unsigned(number)) => Some(*number),
        _ => None,
    }
}

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

/// Adds `at` to the body of a like or unlike that has no `at`. Returns `None` for any other body.
pub fn with_at(body: &[u8], at: Micros) -> Option<Vec<u8>> {
    let raw: Raw<'_> = serde_json::from_slice(body).ok()?;
    let lacks_at = matches!(raw.event_type.text(), Some("like" | "unlike")) && matches!(raw.at, Scalar::Missing);
    let rest = body.trim_ascii_start().strip_prefix(b"{").filter(|_| lacks_at)?;
    Some([format!("{{\"at\":{at},").as_bytes(), rest].concat())
}

fn like(raw: &Raw<'_>, liked: bool, terms: &Terms, now: Micros) -> Result<Message, Refusal> {
    let target = target(raw, terms)?;
    let user = id_of_user(&raw.user_id)?;
    let at = at(raw, terms, now)?;
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
    if terms.is_checked && !terms.rules.of(target.kind, metric).settable {
        let error = format!("metric is {}, and no [[rule]] of config.toml makes it settable for this kind", raw.metric);
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
    let metric = raw.metric.text().filter(|name| *name != LIKE).and_then(|name| terms.code(&terms.metrics, name));
    metric.map(Metric).ok_or_else(|| {
        let error = match raw.metric.text() {
            Some(LIKE) => "metric is \"like\", which only events of the types like and unlike change".to_owned(),
            _ => format!("metric is {}, which is not in [metrics] of config.toml", raw.metric),
        };
        refuse(Reason::UnknownMetric, error)
    })
}

fn target(raw: &Raw<'_>, terms: &Terms) -> Result<Target, Refusal> {
    let Some(kind) = raw.kind.text().and_then(|name| terms.code(&terms.kinds, name)) else {
        let error = format!("kind is {}, which is not in [kinds] of config.toml", raw.kind);
        return Err(refuse(Reason::UnknownKind, error));
    };
    let id = id(&raw.target_id, "target_id", Reason::TargetIdOutOfRange)?;
    Ok(Target { kind: Kind(kind), id: TargetId(id) })
}

fn fence(number: &Scalar<'_>) -> Result<Message, Refusal> {
    match number {
        Scalar::Unsigned(number) => Ok(Message::Fence(*number)),
        _ => Err(not_a_fence()),
    }
}

fn not_a_fence() -> Refusal {
    refuse(Reason::UnknownType, "only tallyd sends fences: each has a number and goes directly to a queue".to_owned())
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

/// Accepts only digits, without a sign, a space or a leading zero. So each id has exactly one spelling.
fn decimal(text: &str) -> Option<u64> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    if digits && !text.starts_with('0') { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests;
