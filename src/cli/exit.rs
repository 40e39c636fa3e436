//! Exit codes of errors that only the daemon's own commands have.

use std::error::Error;

use crate::admin::ask::{NoControl, NoDaemon};
use crate::dead_letters::NoLetter;
use crate::jobs::archive::ScopeError;
use tallyd_base::cli::{self, EXIT_TRY_LATER, EXIT_USAGE};

pub(super) fn exit_code(error: &anyhow::Error) -> u8 {
    cli::exit_code(error, own)
}

fn own(cause: &(dyn Error + 'static)) -> Option<u8> {
    if cause.is::<ScopeError>() || cause.is::<NoLetter>() {
        Some(EXIT_USAGE)
    } else if cause.is::<NoDaemon>() || matches!(cause.downcast_ref(), Some(NoControl::NoDaemon(..))) {
        Some(EXIT_TRY_LATER)
    } else {
        None
    }
}
