//! `tallyd status`: prints the status that a daemon reports.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use axum::http::StatusCode;
use clap::Args;
use terminal_size::{Height, Width, terminal_size};

use super::port::{PortArgs, refusal};
use super::{EXIT_DONE, Format};
use crate::admin::ask::{self, Port};
use tallyd_base::health::{Status, Text, printable};
use tallyd_base::runtime::shutdown;

const WATCH_EVERY: Duration = Duration::from_secs(2);

/// The size to assume if the terminal does not report its size.
const SIZE: (Width, Height) = (Width(80), Height(24));

const HOME: &str = "\u{1b}[H";
const CLEAR: &str = "\u{1b}[2J";
const REST_OF_LINE: &str = "\u{1b}[K";
const REST_OF_SCREEN: &str = "\u{1b}[J";

#[derive(Debug, Args)]
pub(super) struct StatusArgs {
    /// Repeat every two seconds, until Ctrl-C.
    #[arg(long)]
    watch: bool,
    /// Print the report as text or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    #[command(flatten)]
    port: PortArgs,
}

pub(super) async fn run(config: &Path, args: &StatusArgs) -> Result<u8> {
    let port = args.port.port(config)?;
    let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let text = asked(&port, args.format, colour).await?;
    if args.watch {
        watch(&port, args.format, colour, text).await?;
    } else {
        write!(std::io::stdout(), "{text}").context("print")?;
    }
    Ok(EXIT_DONE)
}

async fn asked(port: &Port, format: Format, colour: bool) -> Result<String> {
    let answer = ask::get(port, "/v1/status").await?;
    let status: Option<Status> = serde_json::from_str(&answer.body).ok().filter(|_| answer.status == StatusCode::OK);
    let status = status.ok_or_else(|| anyhow!(refusal(port, &answer)))?;
    Ok(match format {
        Format::Json => format!("{}\n", answer.body.trim_end()),
        Format::Text => Text { status: &status, colour }.to_string(),
    })
}

async fn watch(port: &Port, format: Format, colour: bool, first: String) -> Result<()> {
    let stop = shutdown::on_signals()?;
    let mut out = std::io::stdout();
    let is_screen = out.is_terminal() && format == Format::Text;
    let mut known = first;
    if is_screen {
        write!(out, "{CLEAR}")?;
    }
    let mut shown = known.clone();
    loop {
        let text = match (is_screen, format) {
            (true, _) => framed(&shown, terminal_size().unwrap_or(SIZE)),
            (false, Format::Json) => shown.clone(),
            (false, Format::Text) => format!("{shown}{}\n", "-".repeat(80)),
        };
        write!(out, "{text}").and_then(|()| out.flush()).context("print")?;
        if stop.run_until_cancelled(tokio::time::sleep(WATCH_EVERY)).await.is_none() {
            return Ok(());
        }
        let Some(answer) = stop.run_until_cancelled(asked(port, format, colour)).await else { return Ok(()) };
        shown = match (answer, format) {
            (Ok(text), _) => {
                known.clone_from(&text);
                text
            }
            (Err(error), Format::Text) => format!("{}\nbefore that:\n\n{known}", printable(&format!("{error:#}"))),
            (Err(error), Format::Json) => format!("{}\n", serde_json::json!({ "error": format!("{error:#}") })),
        };
    }
}

fn framed(text: &str, (Width(width), Height(height)): (Width, Height)) -> String {
    let all: Vec<&str> = text.lines().collect();
    // The last line stays empty, because a line feed there would scroll the screen.
    let room = usize::from(height).saturating_sub(1);
    let shown = if all.len() > room { room.saturating_sub(1) } else { all.len() };
    let more = (shown < all.len()).then(|| format!("... {} more lines", all.len() - shown));
    let lines = all.iter().take(shown).copied().chain(more.as_deref());
    let lines: String = lines.map(|line| format!("{}{REST_OF_LINE}\n", cut(line, usize::from(width)))).collect();
    format!("{HOME}{lines}{REST_OF_SCREEN}")
}

/// Returns the first characters of a line, and all colour codes of the line, because colour codes take no space.
fn cut(line: &str, width: usize) -> String {
    let (mut kept, mut room, mut is_code) = (String::with_capacity(line.len()), width, false);
    for character in line.chars() {
        is_code |= character == '\u{1b}';
        if is_code {
            kept.push(character);
            is_code = character != 'm';
        } else if room > 0 {
            kept.push(character);
            room -= 1;
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_gets_what_it_holds_with_its_colours_whole() {
        let text = "\u{1b}[1;31mabcdef\u{1b}[0m\nsecond\nthird\n";
        let shown = framed(text, (Width(5), Height(4)));
        assert_eq!(shown, "\u{1b}[H\u{1b}[1;31mabcde\u{1b}[0m\u{1b}[K\nsecon\u{1b}[K\nthird\u{1b}[K\n\u{1b}[J");
        let shown = framed(text, (Width(80), Height(3)));
        assert_eq!(shown, "\u{1b}[H\u{1b}[1;31mabcdef\u{1b}[0m\u{1b}[K\n... 2 more lines\u{1b}[K\n\u{1b}[J");
    }
}
