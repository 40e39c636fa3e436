//! The verdict on each event, and the status of the answer. Pure.

use std::time::Duration;

use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;

use tallyd_base::http::json;
use tallyd_core::event::Refusal;
use tallyd_core::model::Micros;

/// The verdicts on all events of a request, in the order of the events.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Verdicts {
    pub events: Vec<Verdict>,
}

/// The verdict on an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(tag = "verdict", rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// The broker has the event on disk.
    Confirmed {
        /// The event's time, as published.
        at: i64,
    },
    /// The event can never be applied, so it was not published.
    Refused {
        /// For programs: a reason of docs/events.md, "Refused events", or `counted-by-api`.
        reason: String,
        /// For people: the problem, and the allowed values.
        message: String,
    },
    /// The event might have been published. Send it again with this `at`.
    Unconfirmed {
        /// The event's time. If a client sends the event again, the event must still have this time.
        at: i64,
        /// The reason.
        message: String,
    },
    /// The user clicks too often. Nothing was published.
    Limited {
        /// Milliseconds after which the event can be sent again.
        wait_ms: u64,
    },
}

impl Verdict {
    pub(super) fn confirmed(at: Micros) -> Self {
        Self::Confirmed { at: at.0 }
    }

    pub(super) fn refused(reason: &str, message: impl Into<String>) -> Self {
        Self::Refused { reason: reason.to_owned(), message: message.into() }
    }

    pub(super) fn unconfirmed(at: Micros, message: impl Into<String>) -> Self {
        Self::Unconfirmed { at: at.0, message: message.into() }
    }

    pub(super) fn limited(wait: Duration) -> Self {
        Self::Limited { wait_ms: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX) }
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Confirmed { .. } => "confirmed",
            Self::Refused { .. } => "refused",
            Self::Unconfirmed { .. } => "unconfirmed",
            Self::Limited { .. } => "limited",
        }
    }
}

impl From<Refusal> for Verdict {
    fn from(Refusal { reason, error }: Refusal) -> Self {
        Self::refused(reason.code(), error)
    }
}

impl From<Verdicts> for Response {
    fn from(verdicts: Verdicts) -> Self {
        let (status, retry_after) = outcome(&verdicts.events);
        let mut answer = json(status, &verdicts);
        if let Some(seconds) = retry_after {
            answer.headers_mut().insert(RETRY_AFTER, seconds.into());
        }
        answer
    }
}

fn outcome(events: &[Verdict]) -> (StatusCode, Option<u64>) {
    let has = |name: &str| events.iter().any(|verdict| verdict.name() == name);
    if has("unconfirmed") {
        return (StatusCode::SERVICE_UNAVAILABLE, Some(1));
    }
    if has("refused") {
        return (StatusCode::BAD_REQUEST, None);
    }
    let waits = events.iter().filter_map(|verdict| match verdict {
        Verdict::Limited { wait_ms } => Some(wait_ms.div_ceil(1_000).max(1)),
        _ => None,
    });
    match waits.max() {
        Some(seconds) => (StatusCode::TOO_MANY_REQUESTS, Some(seconds)),
        None => (StatusCode::ACCEPTED, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{json, to_value};

    #[test]
    fn only_a_request_of_confirmed_events_is_accepted() {
        let confirmed = Verdict::confirmed(Micros(5));
        let (refused, unconfirmed) = (Verdict::refused("no-type", "x"), Verdict::unconfirmed(Micros(5), "x"));
        let limited = |ms| Verdict::limited(Duration::from_millis(ms));
        for (events, status, retry_after) in [
            (vec![confirmed.clone(), confirmed.clone()], 202, None),
            (vec![confirmed.clone(), limited(1), limited(1_001)], 429, Some(2)),
            (vec![limited(0)], 429, Some(1)),
            (vec![limited(5_000), refused.clone(), confirmed.clone()], 400, None),
            (vec![refused, confirmed, limited(5_000), unconfirmed], 503, Some(1)),
        ] {
            let (code, after) = outcome(&events);
            assert_eq!((code.as_u16(), after), (status, retry_after), "{events:?}");
        }
    }

    #[test]
    fn a_verdict_is_written_as_the_contract_has_it() {
        let written = |verdict: Verdict| to_value(verdict).unwrap();
        assert_eq!(written(Verdict::confirmed(Micros(5))), json!({ "verdict": "confirmed", "at": 5 }));
        let limited = json!({ "verdict": "limited", "wait_ms": 20 });
        assert_eq!(written(Verdict::limited(Duration::from_millis(20))), limited);
        let unconfirmed = json!({ "verdict": "unconfirmed", "at": 5, "message": "x" });
        assert_eq!(written(Verdict::unconfirmed(Micros(5), "x")), unconfirmed);
    }
}
