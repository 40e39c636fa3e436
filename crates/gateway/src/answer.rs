//! Errors that concern a whole request, not one of its events.

use axum::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;
use tracing::debug;

use tallyd_base::http::json;
use tallyd_client::ClientError;
use tallyd_core::chain::Chain;

pub(super) type Answer<T> = Result<T, Refused>;

/// The body of an error.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct ErrorBody {
    pub error: ErrorText,
}

/// An error that concerns the whole request.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct ErrorText {
    /// For programs.
    pub code: String,
    /// For people: the problem, and the allowed values.
    pub message: String,
}

#[derive(Debug)]
pub(super) struct Refused {
    status: StatusCode,
    code: &'static str,
    message: String,
}

impl Refused {
    pub(super) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into() }
    }

    pub(super) fn bad(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, message)
    }

    pub(super) fn busy() -> Self {
        let message = "too many requests in flight ([gateway] requests_max): retry";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "busy", message)
    }

    pub(super) fn no_token() -> Self {
        let message = "send the token of [gateway] token_file: Authorization: Bearer TOKEN";
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
    }

    /// Rejects a request for data that does not exist, or a request for which a server did not answer. The causes are
    /// only logged, because a cause can contain an address.
    pub(super) fn of_client(error: &ClientError) -> Self {
        match error {
            ClientError::UnknownName { what: "kind", .. } => return Self::bad("unknown-kind", error.to_string()),
            ClientError::UnknownName { .. } => return Self::bad("unknown-metric", error.to_string()),
            ClientError::NoBoard { .. } => return Self::new(StatusCode::NOT_FOUND, "unknown-board", error.to_string()),
            ClientError::Pruned(_) | ClientError::Lost(_) => {
                return Self::new(StatusCode::NOT_FOUND, "no-board", error.to_string());
            }
            ClientError::Period(_) => return Self::bad("no-period", error.to_string()),
            ClientError::Archived(_) => return Self::bad("archived", error.to_string()),
            _ => {}
        }
        debug!(event = "gateway-server-failed", "{}", Chain(error));
        let code = match error {
            ClientError::Redis(_) => "redis-unavailable",
            ClientError::MySql(_) => "mysql-unavailable",
            ClientError::NoCard => "no-site-card",
            ClientError::Broker(_) => "broker-unavailable",
            _ => "server-failed",
        };
        let kind = match error {
            ClientError::MySql(error) => error.io_kind().map(|kind| format!(": {kind}")),
            _ => None,
        };
        Self::new(StatusCode::SERVICE_UNAVAILABLE, code, format!("{error}{}: retry", kind.unwrap_or_default()))
    }
}

impl From<Refused> for Response {
    fn from(Refused { status, code, message }: Refused) -> Self {
        let mut answer = json(status, &ErrorBody { error: ErrorText { code: code.to_owned(), message } });
        let headers = answer.headers_mut();
        if status.is_server_error() {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        answer
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        self.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_of_the_gateway_says_when_to_come_again() {
        let asks_again = |status| Response::from(Refused::new(status, "x", "y")).headers().contains_key(RETRY_AFTER);
        assert!(asks_again(StatusCode::INTERNAL_SERVER_ERROR) && asks_again(StatusCode::SERVICE_UNAVAILABLE));
        assert!(!asks_again(StatusCode::BAD_REQUEST));
    }
}
