//! The options `-v` and `-q`, which change the level of the log.

use clap::{ArgAction, Args};

use tallyd_base::runtime::log;

#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Verbosity {
    /// Log more: -v for the level debug, -vv for trace. This overrides RUST_LOG, which overrides [log] level.
    #[arg(short, long, global = true, action = ArgAction::Count, conflicts_with = "quiet")]
    verbose: u8,
    /// Log less: -q for the level warn, -qq for error. This overrides RUST_LOG, which overrides [log] level.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    quiet: u8,
}

impl Verbosity {
    pub(super) fn apply(self) {
        let level = match (self.verbose, self.quiet) {
            (0, 0) => return,
            (0, 1) => "warn",
            (0, _) => "error",
            (1, _) => "debug",
            (_, _) => "trace",
        };
        log::override_level(level);
    }
}
