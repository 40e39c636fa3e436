//! `[client]`: what API servers hold each user's clicks to.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pause::Pause;

/// `[client]`: for API servers, the daemon doesn't use it.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ClickLimits {
    /// How long a click is remembered in Redis at least: longer than an event takes into MySQL.
    pub recent_keep: Pause,
    /// How many clicks a user may make in a window; zero for any number.
    pub rate_likes_max: u32,
    /// How long a window lasts, from its first click on.
    pub rate_window: Pause,
}

impl Default for ClickLimits {
    fn default() -> Self {
        Self { recent_keep: Pause::from_secs(120), rate_likes_max: 0, rate_window: Pause::from_secs(60) }
    }
}
