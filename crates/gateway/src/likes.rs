//! `GET /v1/likes?user=7&kind=video&ids=1,2,3`: the likes of a user. First the target's Bloom filter answers, then
//! MySQL.

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;

use super::Shared;
use super::answer::{Answer, Refused};
use super::query::{Query, id};
use tallyd_base::http::json;
use tallyd_client::{ClientError, Liked, LikedBy};
use tallyd_core::model::{Target, TargetId, UserId};

/// One user's likes. The targets have the order of the request.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Likes {
    /// The user's id.
    pub user: String,
    pub kind: String,
    pub likes: Vec<Like>,
}

/// Whether the user likes a target.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Like {
    /// The target's id.
    pub id: String,
    pub liked: bool,
    pub source: LikeSource,
}

/// The source of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum LikeSource {
    /// MySQL's row, as of the last commit.
    Mysql,
    /// Redis: the target's Bloom filter does not have the user, or (with `writer = "api"`) Redis remembers the click.
    Redis,
}

pub(super) async fn show(State(gate): Shared, RawQuery(query): RawQuery) -> Answer<Response> {
    let query = Query::parse(query.as_deref(), ["user", "kind", "ids"])?;
    let user = UserId(id("user", query.must("user")?)?);
    let (name, ids) = (query.must("kind")?, query.ids()?);
    let _permit = gate.may_read()?;
    let failed = |error| Refused::of_client(&error);
    if !gate.client.site().await.is_known {
        return Err(failed(ClientError::NoCard));
    }
    let kind = gate.client.kind(name).await.map_err(failed)?;
    let targets: Vec<Target> = ids.into_iter().map(|id| Target { kind, id: TargetId(id) }).collect();
    let liked = gate.client.likes_of(user, &targets).await.map_err(failed)?;
    let likes = targets.iter().zip(liked).map(|(target, liked)| like(target.id, liked)).collect();
    Ok(json(StatusCode::OK, &Likes { user: user.to_string(), kind: name.to_owned(), likes }))
}

fn like(id: TargetId, Liked { liked, by }: Liked) -> Like {
    let source = match by {
        LikedBy::Mysql => LikeSource::Mysql,
        LikedBy::Redis => LikeSource::Redis,
    };
    Like { id: id.to_string(), liked, source }
}
