//! What all commands share: exit codes, formats, and the rule for commands that destroy.

pub mod check;
pub mod consent;
mod exit;
mod shared;
mod start;

pub use exit::{
    EXIT_CONFIG, EXIT_DONE, EXIT_DRIFT, EXIT_FAILED, EXIT_TRY_LATER, EXIT_USAGE, Own, TryLater, Usage, exit_code,
    fate_of,
};
pub use shared::{Format, are_paused, ended, parse_since, parse_target, parse_time, print, progress_sink};
pub use start::{start_log, start_runtime};
