//! The event's JSON: the only code that knows it. One message in, one verdict out: an event, a fence, or a refusal
//! with a stable reason. Pure: "now" is an argument.
//!
//! A field's *shape* never fails the parse: every field is taken as a scalar, then judged by name, so that the
//! reason says which field is wrong and what is allowed. The format is docs/events.md.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
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

/// Any JSON value, kept only as far as a field may use it. Borrowed from the body where it has no escapes.
#[derive(Debug, Default)]
enum Scalar<'a> {
    #[default]
    Missing,
    Unsigned(u64),
    Negative(i64),
    Text(Cow<'a, str>),
    /// A fraction, a boolean, null, a list or an object: its JSON name.
    Other(&'static str),
}

impl Scalar<'_> {
    fn integer(&self) -> Option<i64> {
        match self {
            Self::Unsigned(number) => i64::try_from(*number).ok(),
            Self::Negative(number) => Some(*number),
            _ => None,
        }
    }
}

impl fmt::Display for Scalar<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("missing"),
            Self::Unsigned(number) => number.fmt(f),
            Self::Negative(number) => number.fmt(f),
            // The start is enough to find it; the whole body stands in dead_letter.
            Self::Text(text) => write!(f, "{:?}", text.chars().take(40).collect::<String>()),
            Self::Other(name) => f.write_str(name),
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Scalar<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ScalarVisitor).map(|scalar| match scalar {
            Scalar::Missing => Scalar::Other("null"),
            other => other,
        })
    }
}

struct ScalarVisitor;

impl<'de> Visitor<'de> for ScalarVisitor {
    type Value = Scalar<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_u64<E>(self, number: u64) -> Result<Self::Value, E> {
        Ok(Scalar::Unsigned(number))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Self::Value, E> {
        Ok(Scalar::Negative(number))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
        Ok(Scalar::Other("a fraction or too large a number"))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(Scalar::Other("a boolean"))
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Scalar::Other("null"))
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Scalar::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Scalar::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other("a list"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
        while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Scalar::Other("an object"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOW: Micros = Micros(1_764_000_000_000_000);
    const FUTURE_MAX: Duration = Duration::from_secs(300);

    fn judge(body: &str) -> Result<Message, Refusal> {
        let kinds = BTreeMap::from([("video".to_owned(), 1), ("post".to_owned(), 2)]);
        decode(body.as_bytes(), &kinds, NOW, FUTURE_MAX)
    }

    fn reason(body: &str) -> Reason {
        judge(body).expect_err("the body must be refused").reason
    }

    #[test]
    fn ids_may_be_integers_or_strings() {
        let event = LikeEvent {
            target: Target { kind: Kind(1), id: TargetId(42) },
            user: UserId(9_223_372_036_854_775_807),
            at: NOW,
            liked: true,
        };
        let expected = Message::Like(event, Some(7));
        for (target, user) in [("42", "9223372036854775807"), ("\"42\"", "\"9223372036854775807\"")] {
            let body = format!(
                r#"{{"type":"like","kind":"video","target_id":{target},"user_id":{user},"at":{NOW},"count":7,"new":[{{}}]}}"#
            );
            assert_eq!(judge(&body), Ok(expected.clone()));
        }
    }

    #[test]
    fn a_count_that_is_no_integer_is_as_if_it_were_not_there() {
        for (count, expected) in
            [("7", Some(7)), ("-7", Some(-7)), ("null", None), ("\"7\"", None), ("7.5", None), ("[7]", None)]
        {
            let body = format!(r#"{{"type":"like","kind":"video","target_id":1,"user_id":2,"at":3,"count":{count}}}"#);
            let Ok(Message::Like(_, said)) = judge(&body) else { panic!("{count} is refused") };
            assert_eq!(said, expected, "{count}");
        }
    }

    #[test]
    fn each_fault_has_its_reason() {
        let good = |field: &str, value: &str| {
            let mut fields = BTreeMap::from([
                ("type", "\"like\""),
                ("kind", "\"video\""),
                ("target_id", "1"),
                ("user_id", "2"),
                ("at", "3"),
            ]);
            fields.insert(field, value);
            let fields: Vec<String> = fields.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
            format!("{{{}}}", fields.join(","))
        };
        assert!(judge(&good("at", "3")).is_ok());
        for (field, value, expected) in [
            ("type", "\"count\"", Reason::UnknownType),
            ("type", "null", Reason::UnknownType),
            ("kind", "\"film\"", Reason::UnknownKind),
            ("kind", "1", Reason::UnknownKind),
            ("target_id", "0", Reason::TargetIdOutOfRange),
            ("target_id", "-1", Reason::TargetIdOutOfRange),
            ("target_id", "1.0", Reason::TargetIdOutOfRange),
            ("target_id", "9223372036854775808", Reason::TargetIdOutOfRange),
            ("target_id", "\"007\"", Reason::TargetIdOutOfRange),
            ("target_id", "\" 7\"", Reason::TargetIdOutOfRange),
            ("target_id", "[1]", Reason::TargetIdOutOfRange),
            ("user_id", "\"\"", Reason::UserIdOutOfRange),
            ("user_id", "{\"a\":1}", Reason::UserIdOutOfRange),
            ("at", "0", Reason::AtOutOfRange),
            ("at", "\"3\"", Reason::AtOutOfRange),
            ("at", "253402300800000000", Reason::AtOutOfRange),
            ("at", "1764000300000001", Reason::AtInFuture),
        ] {
            assert_eq!(reason(&good(field, value)), expected, "{field} = {value}");
        }
        assert!(judge(&good("at", "1764000300000000")).is_ok(), "exactly future_max ahead is taken");
    }

    #[test]
    fn what_is_no_object_is_malformed() {
        for body in ["", "nonsense", "[]", "7", "{\"type\":\"like\"", "{\"type\":\"like\",\"type\":\"like\"}", "{} {}"]
        {
            assert_eq!(reason(body), Reason::MalformedJson, "{body}");
        }
        let kinds = BTreeMap::new();
        let refused = |body: &[u8]| decode(body, &kinds, NOW, FUTURE_MAX).expect_err("refused").reason;
        assert_eq!(refused(b"{\"type\":\"\xff\"}"), Reason::MalformedJson);
        assert_eq!(refused(&vec![b'['; 60_000]), Reason::MalformedJson);
        assert_eq!(refused(&vec![b' '; BODY_BYTES_MAX + 1]), Reason::TooLarge);
    }

    fn judge_all(body: &str) -> Vec<(Result<Message, Reason>, &str)> {
        let kinds = BTreeMap::from([("video".to_owned(), 1)]);
        let mut verdicts = Vec::new();
        decode_all(body.as_bytes(), &kinds, NOW, FUTURE_MAX, |verdict, range| {
            verdicts.push((verdict.map_err(|refusal| refusal.reason), &body[range]));
        });
        verdicts
    }

    #[test]
    fn each_event_of_a_list_is_judged_by_itself() {
        let event = |user: u64| LikeEvent {
            target: Target { kind: Kind(1), id: TargetId(7) },
            user: UserId(user),
            at: Micros(user as i64),
            liked: true,
        };
        let json = |user| String::from_utf8(encode_like(&event(user), "video", Some(1))).expect("JSON is UTF-8");
        let (first, second) = (json(1), json(2));
        let body = format!(" [{first},\n {{\"type\":\"like\"}}, 5, {second}, {{\"type\":\"fence\",\"fence\":3}}]");
        let expected = [
            (Ok(Message::Like(event(1), Some(1))), first.as_str()),
            (Err(Reason::UnknownKind), "{\"type\":\"like\"}"),
            (Err(Reason::MalformedJson), "5"),
            (Ok(Message::Like(event(2), Some(1))), second.as_str()),
            (Err(Reason::UnknownType), "{\"type\":\"fence\",\"fence\":3}"),
        ];
        assert_eq!(judge_all(&body), expected);
        assert_eq!(judge_all(&first), [(Ok(Message::Like(event(1), Some(1))), first.as_str())]);
    }

    #[test]
    fn a_list_that_is_broken_or_too_long_is_refused_whole() {
        assert_eq!(judge_all("[]"), []);
        let long = format!("[{}1]", "1,".repeat(LIST_EVENTS_MAX));
        let large = format!("[\"{}\"]", "x".repeat(LIST_BYTES_MAX));
        for (body, reason) in [
            ("[{\"type\":\"like\"", Reason::MalformedJson),
            ("[1] [2]", Reason::MalformedJson),
            (long.as_str(), Reason::TooLarge),
            (large.as_str(), Reason::TooLarge),
        ] {
            assert_eq!(judge_all(body), [(Err(reason), body)]);
        }
    }

    #[test]
    fn codes_are_unique() {
        let codes: std::collections::BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.code()).collect();
        assert_eq!(codes.len(), Reason::ALL.len());
    }

    proptest! {
        #[test]
        fn any_bytes_get_a_verdict(body in proptest::collection::vec(any::<u8>(), 0..300)) {
            decode_all(&body, &BTreeMap::new(), NOW, FUTURE_MAX, |_, range| assert!(range.end <= body.len()));
        }

        #[test]
        fn what_the_client_encodes_is_decoded(target in 1..=ID_MAX, user in 1..=ID_MAX, at in 1..=NOW.0, liked: bool, count: Option<i64>) {
            let event = LikeEvent { target: Target { kind: Kind(1), id: TargetId(target) }, user: UserId(user), at: Micros(at), liked };
            let body = encode_like(&event, "video", count);
            prop_assert_eq!(judge(std::str::from_utf8(&body).expect("JSON is UTF-8")), Ok(Message::Like(event, count)));
        }

        #[test]
        fn a_fence_keeps_its_number(number: u64) {
            let body = encode_fence(number);
            prop_assert_eq!(judge(std::str::from_utf8(&body).expect("JSON is UTF-8")), Ok(Message::Fence(number)));
        }
    }
}
