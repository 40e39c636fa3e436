//! `GET /livez`, `GET /readyz`: for those who restart a daemon, and those who wait for it.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::{Asked, json};
use crate::telemetry::status::{Server, State as Life};

/// A loop that hasn't beaten for so long is stuck: when systemd's watchdog is no longer fed.
pub const STUCK_AFTER: Duration = crate::runtime::systemd::STUCK_AFTER;

/// Whether the process works: a server that is away is no reason to restart it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Live {
    /// It does.
    pub live: bool,
    /// Loops that make no progress.
    pub stuck: Vec<String>,
}

/// Whether events are written.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ready {
    /// They are.
    pub ready: bool,
    /// `starting`, `running` or `draining`.
    pub state: Life,
    /// Why they aren't, a sentence for each reason.
    pub reasons: Vec<String>,
    /// Each server and how it stands. Without Redis events are written all the same.
    pub servers: Vec<Server>,
}

pub(super) async fn livez(State(asked): State<Asked>) -> Response {
    let stuck = asked.liveness.stuck(STUCK_AFTER);
    let status = if stuck.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json(status, &Live { live: stuck.is_empty(), stuck })
}

pub(super) async fn readyz(State(asked): State<Asked>) -> Response {
    let told = asked.told();
    let status = if told.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json(status, &Ready { ready: told.ready, state: told.state, reasons: told.not_ready, servers: told.servers })
}
