//! `[client]`: how API servers limit each user's clicks.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pause::Pause;

/// `[client]`: for API servers. The daemon does not use it.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ClickLimits {
    /// The minimum time that Redis remembers a click. It must be longer than an event needs to reach MySQL.
    pub recent_keep: Pause,
    /// The maximum number of clicks per user and window. 0 means no limit.
    pub rate_likes_max: u32,
    /// The length of a window. It begins with the user's first click.
    pub rate_window: Pause,
}

impl Default for ClickLimits {
    fn default() -> Self {
        Self { recent_keep: Pause::from_secs(120), rate_likes_max: 0, rate_window: Pause::from_secs(60) }
    }
}
