//! `GET /livez` says whether the process works, `GET /readyz` whether it can publish events.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::timeout;

use super::Shared;
use crate::http::json;

/// How long each server may take.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// Whether requests should be sent here.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Ready {
    pub ready: bool,
    /// `running` or `draining`.
    pub state: &'static str,
    /// Each reason for which it is not ready.
    pub reasons: Vec<String>,
    /// Empty; `tallyd healthcheck` reads it of a daemon.
    pub servers: Vec<String>,
}

/// Whether the process works.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Live {
    pub live: bool,
    /// Empty; `tallyd healthcheck` reads it of a daemon.
    pub stuck: Vec<String>,
}

pub(super) async fn livez() -> Response {
    json(StatusCode::OK, &Live { live: true, stuck: Vec::new() })
}

pub(super) async fn readyz(State(gate): Shared) -> Response {
    if gate.stop.is_cancelled() {
        return answer("draining", vec!["it was told to stop".to_owned()]);
    }
    let (broker, redis) = tokio::join!(
        timeout(ANSWER_MAX, gate.client.broker_answers()),
        timeout(ANSWER_MAX, gate.client.redis_answers())
    );
    let reasons = [("RabbitMQ", broker), ("Redis", redis)].into_iter().filter_map(|(server, answered)| {
        let problem = match answered {
            Ok(Ok(())) => return None,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", ANSWER_MAX.as_secs()),
        };
        Some(format!("{server} is unavailable: {problem}"))
    });
    answer("running", reasons.collect())
}

fn answer(state: &'static str, reasons: Vec<String>) -> Response {
    let ready = reasons.is_empty();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json(status, &Ready { ready, state, reasons, servers: Vec::new() })
}
