//! `tallyd admin healthcheck`: reports whether a daemon is ready, for containers and scripts.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use axum::http::StatusCode;
use clap::Args;

use super::port::{PortArgs, refusal};
use super::{EXIT_DONE, EXIT_FAILED};
use crate::admin::ask;
use crate::admin::health::{Live, Ready};
use tallyd_base::health::printable;

#[derive(Debug, Args)]
pub(super) struct HealthcheckArgs {
    #[command(flatten)]
    port: PortArgs,
    /// Check only whether the process makes progress. A daemon that can't write events can still pass this check.
    #[arg(long)]
    live: bool,
}

pub(super) async fn run(config: &Path, args: &HealthcheckArgs) -> Result<u8> {
    let port = args.port.port(config)?;
    let answer = ask::get(&port, if args.live { "/livez" } else { "/readyz" }).await?;
    let checked = if answer.body.is_empty() {
        Ok(code_lines(answer.status, if args.live { "live" } else { "ready" }))
    } else if args.live {
        serde_json::from_str(&answer.body).map(|Live { live, stuck }| live_lines(live, &stuck))
    } else {
        serde_json::from_str(&answer.body).map(|ready: Ready| ready_lines(&ready))
    };
    let (well, lines) = checked.unwrap_or_else(|_| (false, vec![refusal(&port, &answer)]));
    let mut out = std::io::stdout();
    lines.iter().try_for_each(|line| writeln!(out, "{}", printable(line))).context("print")?;
    Ok(if well { EXIT_DONE } else { EXIT_FAILED })
}

/// If a request has no token, the port's answer is only the status code.
fn code_lines(status: StatusCode, word: &str) -> (bool, Vec<String>) {
    let why = if status.is_success() {
        word.to_owned()
    } else {
        format!("the daemon is not {word}: add --token-file to see why")
    };
    (status.is_success(), vec![why])
}

fn live_lines(live: bool, stuck: &[String]) -> (bool, Vec<String>) {
    let lines = stuck.iter().map(|task| format!("the {task} makes no progress"));
    (live, if live { vec!["live".to_owned()] } else { lines.collect() })
}

fn ready_lines(ready: &Ready) -> (bool, Vec<String>) {
    if !ready.ready {
        return (false, ready.reasons.clone());
    }
    // A daemon can be ready although a server is unreachable.
    let away = ready.servers.iter().filter(|server| !server.up);
    let away = away.map(|server| format!("{} is unreachable: {}", server.server.name(), server.why()));
    (true, std::iter::once("ready".to_owned()).chain(away).collect())
}
