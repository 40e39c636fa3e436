//! `GET /v1/counters/video/42`: a target's counters, as `tallyd show` prints them.

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;

use super::{Asked, busy, json, refused};
use tallyd_base::servers::numbers;
use tallyd_core::event::ID_MAX;
use tallyd_core::model::{Target, TargetId};
use tallyd_mysql::StoreError;
use tallyd_redis::CacheError;

pub(super) async fn show(State(asked): State<Asked>, Path((kind, id)): Path<(String, String)>) -> Response {
    let config = asked.live.current();
    let Some(kind) = config.kinds.named(&kind) else {
        let known: Vec<&str> = config.kinds.0.keys().map(String::as_str).collect();
        return refused(StatusCode::NOT_FOUND, &format!("unknown kind: use one of {}", known.join(", ")));
    };
    let Some(id) = id.parse().ok().filter(|id| (1..=ID_MAX).contains(id)) else {
        return refused(StatusCode::BAD_REQUEST, &format!("the id must be a number from 1 to {ID_MAX}"));
    };
    let Ok(_asking) = asked.asking.try_acquire() else {
        return busy("too many requests in flight: retry");
    };
    let target = Target { kind, id: TargetId(id) };
    match numbers::of(&config, &asked.store, &asked.cache.named(&config.metrics), target).await {
        Ok(shown) => json(StatusCode::OK, &shown),
        Err(error) => busy(&reason(&error)),
    }
}

/// Returns the names of the failed server and the failed operation. Leaves out the causes of the error, because a cause
/// can contain an address.
fn reason(error: &anyhow::Error) -> String {
    let server = if error.chain().any(|cause| cause.is::<StoreError>()) {
        "MySQL"
    } else if error.chain().any(|cause| cause.is::<CacheError>()) {
        "Redis"
    } else {
        "tallyd"
    };
    format!("{server}: {error}")
}
