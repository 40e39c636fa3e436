//! Converts a site's JSON to events. The converter finds each field by its JSON pointer, and gives it the field's name
//! in tallyd's events. Then it checks the field with the same rules as in tallyd's own events. A refusal names the
//! field by its pointer.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::Value;
use serde_json::value::RawValue;

use super::place::Envelope;
use super::{Map, Source, TYPES, Time, no_toggle, no_uuid};
use crate::event::raw::Raw;
use crate::event::refusal::refuse;
use crate::event::scalar::Scalar;
use crate::event::{
    BODY_BYTES_MAX, LIST_BYTES_MAX, Message, Reason, Refusal, Terms, judge, place_in, split, unit_hint, without_mark,
};
use crate::model::Micros;

struct On<'a> {
    map: &'a Map,
    envelope: &'a Envelope,
    terms: &'a Terms,
    now: Micros,
}

/// Checks a body that is one event or a list, with the headers and properties of its message. Calls `each` for every
/// event, with the result and the event's place in the body. Leaves out events whose type the map ignores.
pub fn decode_all(
    body: &[u8],
    (map, envelope): (&Map, &Envelope),
    terms: &Terms,
    now: Micros,
    mut each: impl FnMut(Result<Message, Refusal>, Range<usize>),
) {
    let (on, text) = (On { map, envelope, terms, now }, without_mark(body));
    let mut take = |event: &[u8]| {
        if let Some(verdict) = decode(event, &on).transpose() {
            each(verdict, place_in(body, event));
        }
    };
    match list_of(text, map).and_then(|list| list.map(split).transpose()) {
        Ok(None) => take(text),
        Ok(Some(events)) => events.into_iter().for_each(|event| take(event.get().as_bytes())),
        Err(refusal) => each(Err(refusal), 0..body.len()),
    }
}

fn list_of<'a>(body: &'a [u8], map: &Map) -> Result<Option<&'a [u8]>, Refusal> {
    if body.len() > LIST_BYTES_MAX {
        let error = format!("the body has {} bytes, at most {LIST_BYTES_MAX} are allowed", body.len());
        return Err(refuse(Reason::TooLarge, error));
    }
    if is_list(body) {
        return Ok((!map.single).then_some(body));
    }
    let Some(pointer) = &map.list else { return Ok(None) };
    let malformed = |error: serde_json::Error| refuse(Reason::MalformedJson, error.to_string());
    let mut value: &RawValue = serde_json::from_slice(body).map_err(malformed)?;
    for name in pointer.split('/').skip(1) {
        if !value.get().starts_with('{') {
            return Ok(None);
        }
        let name = name.replace("~1", "/").replace("~0", "~");
        let fields: BTreeMap<Cow<'_, str>, &RawValue> = serde_json::from_str(value.get()).map_err(malformed)?;
        let Some(inner) = fields.get(name.as_str()) else { return Ok(None) };
        value = inner;
    }
    let list = value.get().as_bytes();
    Ok(is_list(list).then_some(list))
}

fn is_list(body: &[u8]) -> bool {
    body.trim_ascii_start().first() == Some(&b'[')
}

fn decode(body: &[u8], on: &On<'_>) -> Result<Option<Message>, Refusal> {
    if body.len() > BODY_BYTES_MAX {
        let error = format!("the event has {} bytes, at most {BODY_BYTES_MAX} are allowed", body.len());
        return Err(refuse(Reason::TooLarge, error));
    }
    let map = on.map;
    let event: Value =
        serde_json::from_slice(body).map_err(|error| refuse(Reason::MalformedJson, error.to_string()))?;
    if !(event.is_object() || map.single && event.is_array()) {
        return Err(refuse(Reason::MalformedJson, "the event is not a JSON object".to_owned()));
    }
    let field = |name, source, reason| mapped((&event, on.envelope), name, source, reason);
    let event_type = match field("type", Some(&map.event_type), Reason::UnknownType) {
        Err(_) if map.ignore_other_types && has_type(&event, on) => return Ok(None),
        found => found?,
    };
    let id = |scalar| if map.lenient { lenient(scalar) } else { scalar };
    let raw = Raw {
        event_type,
        kind: field("kind", Some(&map.kind), Reason::UnknownKind)?,
        target_id: id(field("target_id", Some(&map.target_id), Reason::TargetIdOutOfRange)?),
        user_id: id(field("user_id", map.user_id.as_ref(), Reason::UserIdOutOfRange)?),
        at: at(map.at.pointer.find(&event, on.envelope), &map.at, on.now)?,
        metric: field("metric", map.metric.as_ref(), Reason::UnknownMetric)?,
        delta: number(field("delta", map.delta.as_ref(), Reason::DeltaOutOfRange)?),
        value: number(field("value", map.value.as_ref(), Reason::ValueOutOfRange)?),
        event_id: as_text(field("event_id", map.event_id.as_ref(), Reason::EventIdOutOfRange)?),
        fence: Scalar::Missing,
        unit: map.at.unit,
    };
    let event_type = raw.event_type.text().unwrap_or_default();
    if !TYPES.contains(&event_type) {
        let reason = if raw.event_type.text().is_some() { Reason::UnknownType } else { Reason::NoType };
        let why = no_toggle(event_type).unwrap_or("add its meaning to `values`");
        let error = format!("{} is {}: {why}", described("type", Some(&map.event_type)), raw.event_type);
        return Err(refuse(reason, error));
    }
    if map.at.unit.is_coarse() && matches!(event_type, "set" | "reset") {
        let error = format!(
            "{event_type} needs times in microseconds, but the times of the map {} are {}",
            map.name, map.at.unit
        );
        return Err(refuse(Reason::NotSettable, error));
    }
    judge(&raw, on.terms, on.now).map(Some).map_err(|refusal| with_place(refusal, map, &raw))
}

fn has_type(event: &Value, on: &On<'_>) -> bool {
    let places = on.map.event_type.pointer.as_ref();
    places.and_then(|places| places.find(event, on.envelope)).is_some_and(|value| !value.is_null())
}

fn mapped<'a>(
    (event, envelope): (&'a Value, &'a Envelope),
    name: &'static str,
    source: Option<&'a Source>,
    reason: Reason,
) -> Result<Scalar<'a>, Refusal> {
    let Some(source) = source else { return Ok(Scalar::Missing) };
    let Some(places) = &source.pointer else {
        return Ok(source.constant.as_deref().map_or(Scalar::Missing, |text| Scalar::Text(Cow::Borrowed(text))));
    };
    let found = places.find(event, envelope);
    if source.values.is_empty() {
        return Ok(found.map_or(Scalar::Missing, scalar));
    }
    let key = match found {
        Some(Value::String(text)) => Some(Cow::Borrowed(text.as_str())),
        Some(value @ (Value::Number(_) | Value::Bool(_) | Value::Null)) => Some(Cow::Owned(value.to_string())),
        _ => None,
    };
    let value = key.as_deref().and_then(|key| source.values.get(key));
    value.map(|value| Scalar::Text(Cow::Borrowed(value))).ok_or_else(|| {
        let is = match found.map_or(Scalar::Missing, scalar) {
            // For a boolean or null, the message shows the value. The type would not help: `values` can contain `true`
            // but lack `false`.
            Scalar::Other(_) => key.map_or_else(|| "an object or a list".to_owned(), Cow::into_owned),
            scalar => scalar.to_string(),
        };
        refuse(reason, format!("{name} from {places} is {is}, which is not in its `values`"))
    })
}

fn scalar(value: &Value) -> Scalar<'_> {
    match value {
        Value::Null => Scalar::Other("null"),
        Value::Bool(_) => Scalar::Other("a boolean"),
        Value::Array(_) => Scalar::Other("a list"),
        Value::Object(_) => Scalar::Other("an object"),
        Value::String(text) => Scalar::Text(Cow::Borrowed(text)),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => Scalar::Unsigned(number),
            (None, Some(number)) => Scalar::Negative(number),
            _ => number.as_f64().map_or(Scalar::Other("too large a number"), Scalar::of),
        },
    }
}

fn number(scalar: Scalar<'_>) -> Scalar<'_> {
    match scalar.text().and_then(|text| text.parse::<i64>().ok()) {
        Some(number) => u64::try_from(number).map_or(Scalar::Negative(number), Scalar::Unsigned),
        None => scalar,
    }
}

fn as_text(scalar: Scalar<'_>) -> Scalar<'_> {
    match scalar {
        Scalar::Unsigned(number) => Scalar::Text(Cow::Owned(number.to_string())),
        Scalar::Negative(number) => Scalar::Text(Cow::Owned(number.to_string())),
        scalar => scalar,
    }
}

fn lenient(scalar: Scalar<'_>) -> Scalar<'_> {
    match scalar.text().map(|text| text.trim().trim_start_matches('0')) {
        Some(text) => Scalar::Text(Cow::Owned(text.to_owned())),
        None => scalar,
    }
}

fn at<'a>(found: Option<&Value>, time: &Time, now: Micros) -> Result<Scalar<'a>, Refusal> {
    let found = found.map_or(Scalar::Missing, scalar);
    let (pointer, unit) = (&time.pointer, time.unit);
    if let Some(at) = time.read(&found).filter(|at| (1..=Micros::MAX.0).contains(&at.0)) {
        return Ok(Scalar::Unsigned(unit.floor(at).0.unsigned_abs()));
    }
    let mut error = format!(
        "at from {pointer} is {found}, allowed are {unit} since the epoch, 1 to {}, and a time with an offset such as 2026-01-31T10:00:00Z",
        unit.number(Micros::MAX)
    );
    let whole = match &found {
        Scalar::Unsigned(number) => Some(i128::from(*number)),
        Scalar::Text(text) => text.parse().ok(),
        _ => None,
    };
    if let Some(number) = whole {
        error.push_str(&unit_hint(number, unit, now));
    } else if found.text().is_some_and(|text| text.contains(':')) && time.zone.is_none() {
        error.push_str(" (add `zone` to the map if your times have no offset)");
    }
    Err(refuse(Reason::AtOutOfRange, error))
}

fn described(name: &str, source: Option<&Source>) -> String {
    match source.map(|source| source.pointer.as_ref()) {
        Some(Some(places)) => format!("{name} from {places}"),
        Some(None) => format!("{name} (a constant)"),
        None => format!("{name}, which the map does not have,"),
    }
}

fn with_place(Refusal { reason, error }: Refusal, map: &Map, raw: &Raw<'_>) -> Refusal {
    let fields = map.fields().map(|(name, source)| (name, described(name, source)));
    let at = ("at", format!("at from {}", map.at.pointer));
    let named = fields.into_iter().chain([at]).find_map(|(name, described)| {
        let rest = error.strip_prefix(name).filter(|rest| rest.starts_with(" is "))?;
        Some(format!("{described}{rest}"))
    });
    let uuid = match reason {
        Reason::TargetIdOutOfRange => raw.target_id.text().and_then(no_uuid),
        Reason::UserIdOutOfRange => raw.user_id.text().and_then(no_uuid),
        _ => None,
    };
    let error = named.unwrap_or(error);
    Refusal { reason, error: uuid.map_or_else(|| error.clone(), |why| format!("{error}; {why}")) }
}

#[cfg(test)]
mod tests;
