//! `GET /livez` shows whether a daemon must be restarted. `GET /readyz` shows whether it writes events.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use super::{Asked, json};
use tallyd_base::health::Status;
use tallyd_base::runtime::systemd::STUCK_AFTER;
use tallyd_base::telemetry::{DaemonState, ServerStatus};
use tallyd_connect::pace::pace;

/// The answer to `GET /livez`. The answer says whether the process works and which loops are stuck. An unreachable
/// server is no reason to restart the process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Live {
    pub live: bool,
    pub stuck: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    pub ready: bool,
    pub state: DaemonState,
    pub reasons: Vec<String>,
    /// The status of each server. If Redis is unreachable, the daemon still writes events.
    pub servers: Vec<ServerStatus>,
}

pub(super) async fn livez(State(asked): State<Asked>) -> Response {
    let stuck = asked.liveness.stuck(pace(STUCK_AFTER));
    let status = if stuck.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json(status, &Live { live: stuck.is_empty(), stuck })
}

pub(super) async fn readyz(State(asked): State<Asked>) -> Response {
    let Status { ready, state, not_ready: reasons, seen, .. } = asked.status();
    let code = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json(code, &Ready { ready, state, reasons, servers: seen.servers })
}
