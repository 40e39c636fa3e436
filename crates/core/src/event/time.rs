//! Checks the time of an event.

use super::raw::Raw;
use super::refusal::refuse;
use super::scalar::Scalar;
use super::{Reason, Refusal, Terms, decimal};
use crate::model::Micros;
use crate::unit::Unit;

pub(super) fn at_kept(raw: &Raw<'_>, terms: &Terms, now: Micros) -> Result<Micros, Refusal> {
    let at = at(raw, terms, now)?;
    if at < now.before(terms.applied_event_keep) {
        let keep = terms.applied_event_keep.as_secs();
        let error = format!(
            "the event's at is {:.1} s old, but the ledger keeps events only {keep} s ([consumer] applied_event_keep)",
            micros_as_s(now.0 - at.0)
        );
        return Err(refuse(Reason::AtTooOld, error));
    }
    Ok(at)
}

pub(super) fn at(raw: &Raw<'_>, terms: &Terms, now: Micros) -> Result<Micros, Refusal> {
    let value = &raw.at;
    let at = match value {
        Scalar::Unsigned(at) => i64::try_from(*at).ok(),
        Scalar::Text(text) => decimal(text).and_then(|at| i64::try_from(at).ok()),
        _ => None,
    };
    let Some(at) = at.filter(|at| (1..=Micros::MAX.0).contains(at)) else {
        let error =
            format!("at is {value}, allowed are microseconds since the epoch as an integer, 1 to {}", Micros::MAX);
        return Err(refuse(Reason::AtOutOfRange, error));
    };
    if Micros(at) < terms.at_min {
        let error = format!(
            "at is {}, which is before {} ([consumer] at_min){}",
            instant(Micros(at)),
            instant(terms.at_min),
            unit_hint(raw.unit.number(Micros(at)), raw.unit, now)
        );
        return Err(refuse(Reason::AtTooEarly, error));
    }
    let ahead = at.saturating_sub(now.0);
    if u128::try_from(ahead).is_ok_and(|ahead| ahead > terms.future_max.as_micros()) {
        let error = format!(
            "at is {:.1} s ahead of this daemon's clock, at most {} s are allowed",
            micros_as_s(ahead),
            terms.future_max.as_secs()
        );
        return Err(refuse(Reason::AtInFuture, error));
    }
    Ok(Micros(at))
}

/// If the number is a time of these years in another unit, returns the end of a sentence that says so.
pub(crate) fn unit_hint(number: i128, unit: Unit, now: Micros) -> String {
    match Unit::likely(number, now) {
        Some(likely) if likely != unit => format!(": the number looks like {likely}, but it is read as {unit}"),
        _ => String::new(),
    }
}

fn instant(at: Micros) -> String {
    jiff::Timestamp::from_microsecond(at.0).map_or_else(|_| at.to_string(), |at| at.to_string())
}

#[expect(clippy::cast_precision_loss, reason = "shown with one digit after the point")]
fn micros_as_s(micros: i64) -> f64 {
    micros as f64 / 1e6
}
