//! `GET /openapi.json`: the description of this API in OpenAPI 3.1.

#[cfg(test)]
mod document;

use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

/// The description of the API. A test generates it.
pub const DOCUMENT: &str = include_str!("../../../../docs/openapi.json");

pub(super) async fn show() -> Response {
    ([(CONTENT_TYPE, HeaderValue::from_static("application/json"))], DOCUMENT).into_response()
}
