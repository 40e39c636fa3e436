//! Arguments that several commands take.

use std::time::Duration;

use anyhow::Result;

use super::Usage;
use crate::config::{self, Kinds};
use tallyd_core::model::{Target, TargetId};

/// `90s`, `30m`, `2h`.
pub(super) fn parse_time(text: &str) -> Result<Duration, String> {
    config::parse_pause(text).map(|pause| pause.0).map_err(|error| format!("write it as 90s, 30m or 2h ({error})"))
}

/// `video:42`.
pub(super) fn parse_target(text: &str, kinds: &Kinds) -> Result<Target> {
    let target = text.split_once(':').and_then(|(kind, id)| {
        let id = id.parse().ok().filter(|id| (1..=tallyd_core::event::ID_MAX).contains(id))?;
        Some(Target { kind: kinds.named(kind)?, id: TargetId(id) })
    });
    target.ok_or_else(|| {
        let known: Vec<&str> = kinds.0.keys().map(String::as_str).collect();
        Usage(format!("{text} is no target: write KIND:ID, for instance video:42; the kinds are {}", known.join(", ")))
            .into()
    })
}
