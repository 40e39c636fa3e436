//! `POST /v1/events`: one event, or a list. The steps: read the head, read the body, judge, publish, answer.

mod judge;
mod publish;
mod verdict;

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use tracing::error;

use super::answer::{Answer, Refused};
use super::{Gate, Shared};
use tallyd_base::runtime::clock;
use tallyd_core::event::LIST_BYTES_MAX;
use tallyd_core::traceparent::HEADER;
pub(super) use verdict::Verdicts;

/// A body of at most this number of bytes needs no permit for large bodies.
pub(super) const BODY_SMALL: usize = 16 << 10;

const BODY_MAX: Duration = Duration::from_secs(10);

pub(super) async fn publish(State(gate): Shared, request: Request) -> Answer<Response> {
    let length = body_length(request.headers())?;
    let traceparent = request.headers().get(HEADER).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let body = {
        // A slow body must not occupy a permit for requests in flight.
        let _room = match length {
            0..=BODY_SMALL => None,
            _ => Some(gate.bodies.try_acquire().map_err(|_| Refused::busy())?),
        };
        read(request).await?
    };
    let entered = gate.may_publish()?;
    // A separate task does the work, because the task continues even if the client disconnects. Otherwise clients that
    // disconnect would end the connection to the broker that other requests wait for.
    let answering = tokio::spawn(async move {
        let _entered = entered;
        tallyd_client::traced(traceparent.as_deref(), answer(&gate, &body)).await
    });
    answering.await.unwrap_or_else(|error| {
        error!(event = "gateway-request-panicked", "a request panicked: {error}");
        let message = "the gateway failed: send the request again";
        Err(Refused::new(StatusCode::INTERNAL_SERVER_ERROR, "internal-error", message))
    })
}

async fn answer(gate: &Arc<Gate>, body: &[u8]) -> Answer<Response> {
    let mut site = gate.client.site().await;
    let mut events = judge::judge(body, &site.terms, clock::now())?;
    // A newer card can allow what the last one forbids.
    if events.iter().any(|event| publish::rests_on_card(&site, event)) {
        site = gate.client.site_refreshed().await;
        events = judge::judge(body, &site.terms, clock::now())?;
    }
    let verdicts = publish::publish(gate, &site, events).await;
    verdicts.iter().for_each(|verdict| gate.metrics.judged(verdict.name(), 1));
    Ok(Verdicts { events: verdicts }.into())
}

fn body_length(headers: &HeaderMap) -> Answer<usize> {
    let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        let message = "Content-Type must be application/json";
        return Err(Refused::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported-media-type", message));
    }
    let length = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    match length {
        None => {
            let message = "Content-Length is missing";
            Err(Refused::new(StatusCode::LENGTH_REQUIRED, "length-required", message))
        }
        Some(length) if length > LIST_BYTES_MAX => {
            let message = format!("the body must have at most {LIST_BYTES_MAX} bytes");
            Err(Refused::new(StatusCode::PAYLOAD_TOO_LARGE, "too-large", message))
        }
        Some(length) => Ok(length),
    }
}

async fn read(request: Request) -> Answer<Bytes> {
    match tokio::time::timeout(BODY_MAX, to_bytes(request.into_body(), LIST_BYTES_MAX)).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(_)) => Err(Refused::bad("incomplete-body", "the body is incomplete")),
        Err(_) => {
            let message = format!("the body took longer than {} s", BODY_MAX.as_secs());
            Err(Refused::new(StatusCode::REQUEST_TIMEOUT, "request-timeout", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_json_of_a_length_that_is_known_and_allowed() {
        let status = |headers: &[(&'static str, &str)]| {
            let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
            match body_length(&headers) {
                Ok(length) => length,
                Err(refused) => usize::from(Response::from(refused).status().as_u16()),
            }
        };
        let json = ("content-type", "application/json");
        assert_eq!(status(&[json, ("content-length", "7")]), 7);
        assert_eq!(status(&[json, ("content-length", "1048576")]), 1_048_576);
        assert_eq!(status(&[("content-type", "Application/JSON; charset=utf-8"), ("content-length", "7")]), 7);
        assert_eq!(status(&[json, ("content-length", "1048577")]), 413);
        assert_eq!(status(&[json]), 411);
        assert_eq!(status(&[("content-length", "7")]), 415);
        assert_eq!(status(&[("content-type", "text/plain"), ("content-length", "7")]), 415);
    }
}
