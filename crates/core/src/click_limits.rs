//! `[client]`: how API servers limit each user's clicks.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pause::Pause;

/// `[client]`: for API servers. The daemon does not use it.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ClickLimits {
    /// Minimum time that Redis remembers a click. An event must reach MySQL within this time.
    pub recent_keep: Pause,
    /// Maximum number of likes and unlikes of a user per window. 0: no limit.
    pub rate_likes_max: u32,
    /// Length of a window, from the user's first click.
    pub rate_window: Pause,
}

impl Default for ClickLimits {
    fn default() -> Self {
        Self { recent_keep: Pause::from_secs(120), rate_likes_max: 0, rate_window: Pause::from_secs(60) }
    }
}
