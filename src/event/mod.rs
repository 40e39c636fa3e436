//! The event's JSON: the only code that knows it. One message in, one verdict out: an event, a fence, or a refusal
//! with a stable reason. Pure: "now" is an argument.
//!
//! A field's *shape* never fails the parse: every field is taken as a scalar, then judged by name, so that the
//! reason says which field is wrong and what is allowed. The format is docs/events.md.

mod scalar;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use scalar::Scalar;
use serde_json::value::RawValue;

use crate::model::{Kind, Micros, Target, TargetId, UserId};

/// An event's largest JSON in bytes. Real events have about 120.
pub const BODY_BYTES_MAX: usize = 64 * 1024;

/// A body that is a list of events: its largest size in bytes.
pub const LIST_BYTES_MAX: usize = 1 << 20;

/// A body that is a list of events: how many it may hold.
pub const LIST_EVENTS_MAX: usize = 1_000;

/// The largest id: MySQL's and most languages' signed 64-bit maximum.
pub const ID_MAX: u64 = i64::MAX as u64;

/// What a message says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// A user likes a target, or does no longer. With the target's number in Redis after it, where the producer says it.
    Like(LikeEvent, Option<i64>),
    /// The marker of a reconcile: once its number is committed, so is every event published before it.
    Fence(u64),
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

/// Why an event can never be applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Stable, for machines: a column of `dead_letter`.
    pub reason: Reason,
    /// A sentence for a person: what is wrong and what is allowed.
    pub error: String,
}

/// The stable codes of [`Refusal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// The body is larger than [`BODY_BYTES_MAX`].
    TooLarge,
    /// Not JSON, not UTF-8, not an object, or a field stands twice.
    MalformedJson,
    /// `type` is missing or not one this version takes.
    UnknownType,
    /// `kind` is missing or not in `[kinds]`.
    UnknownKind,
    /// `target_id` is missing or not 1 to 2^63-1.
    TargetIdOutOfRange,
    /// `user_id` is missing or not 1 to 2^63-1.
    UserIdOutOfRange,
    /// `at` is missing or no time that a `DATETIME(6)` holds.
    AtOutOfRange,
    /// `at` is further ahead of this machine's clock than `future_max`.
    AtInFuture,
    /// The database refuses this event's row, and no other of its batch.
    RefusedByDatabase,
}

impl Reason {
    /// Every reason, in the order of the checks.
    pub const ALL: [Self; 9] = [
        Self::TooLarge,
        Self::MalformedJson,
        Self::UnknownType,
        Self::UnknownKind,
        Self::TargetIdOutOfRange,
        Self::UserIdOutOfRange,
        Self::AtOutOfRange,
        Self::AtInFuture,
        Self::RefusedByDatabase,
    ];

    /// The code as it stands in `dead_letter.reason`, in logs and metrics.
    pub fn code(self) -> &'static str {
        match self {
            Self::TooLarge => "too-large",
            Self::MalformedJson => "malformed-json",
            Self::UnknownType => "unknown-type",
            Self::UnknownKind => "unknown-kind",
            Self::TargetIdOutOfRange => "target-id-out-of-range",
            Self::UserIdOutOfRange => "user-id-out-of-range",
            Self::AtOutOfRange => "at-out-of-range",
            Self::AtInFuture => "at-in-future",
            Self::RefusedByDatabase => "refused-by-database",
        }
    }
}

/// Judges a message's body, which holds one event or a list of up to [`LIST_EVENTS_MAX`]: `each` gets every verdict, with
/// where in the body its event stands. An event of a list is judged by itself: one that is refused harms no other.
///
/// `kinds`, `now` and `future_max` as in [`decode`].
pub fn decode_all(
    body: &[u8],
    kinds: &BTreeMap<String, u8>,
    now: Micros,
    future_max: Duration,
    mut each: impl FnMut(Result<Message, Refusal>, Range<usize>),
) {
    if body.trim_ascii_start().first() != Some(&b'[') {
        return each(decode(body, kinds, now, future_max), 0..body.len());
    }
    match split(body) {
        Err(refusal) => each(Err(refusal), 0..body.len()),
        Ok(events) => {
            for event in events {
                let event = event.get().as_bytes();
                // The event is a part of the body, so its address says where.
                let from = (event.as_ptr() as usize).saturating_sub(body.as_ptr() as usize);
                let verdict = match decode(event, kinds, now, future_max) {
                    Ok(Message::Fence(_)) => Err(refuse(Reason::UnknownType, "a fence within a list".to_owned())),
                    verdict => verdict,
                };
                each(verdict, from..from + event.len());
            }
        }
    }
}

fn split(body: &[u8]) -> Result<Vec<&RawValue>, Refusal> {
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
/// `kinds` are the names of `[kinds]`; an `at` later than `now` + `future_max` is refused, because it would win
/// against every later event of its row.
///
/// # Errors
/// A [`Refusal`] for whatever can never be applied; never for anything that another try could change.
pub fn decode(
    body: &[u8],
    kinds: &BTreeMap<String, u8>,
    now: Micros,
    future_max: Duration,
) -> Result<Message, Refusal> {
    if body.len() > BODY_BYTES_MAX {
        return Err(refuse(
            Reason::TooLarge,
            format!("the body has {} bytes, at most {BODY_BYTES_MAX} are taken", body.len()),
        ));
    }
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err(refuse(Reason::MalformedJson, "the body is no JSON object".to_owned()));
    }
    let raw: Raw<'_> =
        serde_json::from_slice(body).map_err(|error| refuse(Reason::MalformedJson, error.to_string()))?;
    let liked = match raw.kind_of_event() {
        Some("like") => true,
        Some("unlike") => false,
        Some("fence") => return fence(&raw.fence),
        _ => {
            let error = format!("type is {}, allowed are \"like\" and \"unlike\"", raw.event_type);
            return Err(refuse(Reason::UnknownType, error));
        }
    };
    let kind = match &raw.kind {
        Scalar::Text(name) => kinds.get(name.as_ref()).map(|code| Kind(*code)),
        _ => None,
    };
    let Some(kind) = kind else {
        return Err(refuse(
            Reason::UnknownKind,
            format!("kind is {}, which is not in [kinds] of config.toml", raw.kind),
        ));
    };
    let id = id(&raw.target_id, "target_id", Reason::TargetIdOutOfRange)?;
    let user = id_of_user(&raw.user_id)?;
    let at = at(&raw.at, now, future_max)?;
    let event = LikeEvent { target: Target { kind, id: TargetId(id) }, user, at, liked };
    Ok(Message::Like(event, raw.count.integer()))
}

/// A fence's body. Sent straight to each partition's queue by a reconcile.
pub fn encode_fence(number: u64) -> Vec<u8> {
    format!("{{\"type\":\"fence\",\"fence\":{number}}}").into_bytes()
}

/// An event's body, as producers send it. `kind` is the name of the target's kind, `count` its number in Redis after the
/// event, where that is known.
pub fn encode_like(event: &LikeEvent, kind: &str, count: Option<i64>) -> Vec<u8> {
    let event_type = if event.liked { "like" } else { "unlike" };
    // Ids as strings: JavaScript's numbers lose 64-bit integers.
    let mut body = serde_json::json!({
        "type": event_type,
        "kind": kind,
        "target_id": event.target.id.to_string(),
        "user_id": event.user.to_string(),
        "at": event.at.0,
    });
    if let (Some(count), Some(fields)) = (count, body.as_object_mut()) {
        fields.insert("count".to_owned(), count.into());
    }
    body.to_string().into_bytes()
}

fn refuse(reason: Reason, error: String) -> Refusal {
    Refusal { reason, error }
}

fn fence(number: &Scalar<'_>) -> Result<Message, Refusal> {
    match number {
        Scalar::Unsigned(number) => Ok(Message::Fence(*number)),
        _ => Err(refuse(Reason::UnknownType, "a fence without its number; fences are sent by tallyd alone".to_owned())),
    }
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

/// The fields this version reads; any other is ignored, so that producers may add some.
#[derive(serde::Deserialize)]
struct Raw<'a> {
    #[serde(rename = "type", default, borrow)]
    event_type: Scalar<'a>,
    #[serde(default, borrow)]
    kind: Scalar<'a>,
    #[serde(default, borrow)]
    target_id: Scalar<'a>,
    #[serde(default, borrow)]
    user_id: Scalar<'a>,
    #[serde(default, borrow)]
    at: Scalar<'a>,
    #[serde(default, borrow)]
    count: Scalar<'a>,
    #[serde(default, borrow)]
    fence: Scalar<'a>,
}

impl Raw<'_> {
    fn kind_of_event(&self) -> Option<&str> {
        match &self.event_type {
            Scalar::Text(name) => Some(name),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
