//! Arguments to exit code, nothing else.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(tallyd::cli::main(tallyd::app::run))
}
