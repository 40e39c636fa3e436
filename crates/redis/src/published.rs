//! Remembers clicks that gateways have published, for a minute. So an answer to a user includes the user's clicks even
//! before MySQL contains these clicks. This module counts nothing.

use std::collections::BTreeMap;

use redis::Pipeline;
use tallyd_core::event::LikeEvent;
use tallyd_core::keys::KindNames;
use tallyd_core::model::{Micros, Target, UserId};

use super::{Cache, CacheError, Call, Context, GATEWAY_REMEMBER, Result, text};

/// How long a click is remembered, in seconds. An event usually reaches MySQL in less time.
const REMEMBERED_S: u64 = 60;

/// The maximum number of remembered clicks of a user.
const REMEMBERED_MAX: u64 = 2_000;

/// The last click of a user on a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// When the user clicked.
    pub at: Micros,
    /// Whether the click was a like.
    pub liked: bool,
}

impl Cache {
    /// Remembers clicks that the broker has accepted, from any number of users. A click never replaces a newer click of
    /// the same user and target.
    pub async fn remember_published(&self, kinds: &KindNames, clicks: &[LikeEvent]) -> Result<()> {
        let mut of_users: BTreeMap<u64, Vec<&LikeEvent>> = BTreeMap::new();
        for click in clicks {
            of_users.entry(click.user.0).or_default().push(click);
        }
        let calls: Vec<Call> = of_users
            .into_iter()
            .map(|(user, clicks)| {
                let call = Call::new(&GATEWAY_REMEMBER, self.keys.published(UserId(user)));
                clicks.into_iter().fold(call.number(REMEMBERED_S).number(REMEMBERED_MAX), |call, click| {
                    let LikeEvent { target, at, liked, .. } = click;
                    let call = call.arg(field(kinds, *target));
                    call.arg(format!("{at}{}", if *liked { '+' } else { '-' }))
                })
            })
            .collect();
        self.eval("remember published likes", &calls).await.map(drop)
    }

    /// Returns the last remembered click of a user on each of `targets`, in the order of `targets`.
    pub async fn published(
        &self,
        kinds: &KindNames,
        user: UserId,
        targets: &[Target],
    ) -> Result<Vec<Option<Published>>> {
        const ACTION: &str = "read published likes";
        if targets.is_empty() {
            return Ok(Vec::new());
        }
        let fields: Vec<String> = targets.iter().map(|target| field(kinds, *target)).collect();
        let mut pipeline = Pipeline::new();
        pipeline.cmd("HMGET").arg(self.keys.published(user)).arg(fields);
        let answer = self.run(ACTION, &pipeline).await?.pop().unwrap_or(Ok(redis::Value::Nil)).context(ACTION)?;
        match &answer {
            redis::Value::Array(clicks) => Ok(clicks.iter().map(|click| parse(text(click)?)).collect()),
            _ => Err(CacheError::unexpected(ACTION, &answer)),
        }
    }
}

fn field(kinds: &KindNames, target: Target) -> String {
    format!("{}:{}", kinds.get(target.kind).unwrap_or_default(), target.id)
}

fn parse(click: &str) -> Option<Published> {
    let (at, liked) = match click.strip_suffix('+') {
        Some(at) => (at, true),
        None => (click.strip_suffix('-')?, false),
    };
    Some(Published { at: Micros(at.parse().ok()?), liked })
}
