//! `tallyd admin completions` and `tallyd admin man`: completion scripts and manual pages for packages, generated from the command
//! line's definition.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use clap::{CommandFactory, ValueEnum};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};

use super::{Cli, EXIT_CODES, EXIT_DONE};
use tallyd_base::config;

const VERSION: &str = concat!("tallyd ", env!("CARGO_PKG_VERSION"));

/// A shell for which tallyd can make a completion script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Shell {
    /// Install the script as /usr/share/bash-completion/completions/tallyd.
    Bash,
    /// Install the script as /usr/share/zsh/vendor-completions/_tallyd.
    Zsh,
    /// Install the script as /usr/share/fish/vendor_completions.d/tallyd.fish.
    Fish,
}

pub(super) fn completions(shell: Shell) -> Result<u8> {
    let shell = match shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "tallyd", &mut script);
    io::stdout().write_all(&script).context("print the completions")?;
    Ok(EXIT_DONE)
}

pub(super) fn man(folder: Option<&Path>) -> Result<u8> {
    // Leaves out the `help` commands, which would add a page for each command.
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    match folder {
        Some(folder) => {
            fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
            write_pages(&command, None, folder)?;
        }
        None => io::stdout().write_all(&page(&command, None)?).context("print the manual page")?,
    }
    Ok(EXIT_DONE)
}

fn write_pages(command: &clap::Command, above: Option<&str>, folder: &Path) -> Result<()> {
    let name = display_name(command);
    let path = folder.join(format!("{name}.1"));
    fs::write(&path, page(command, above)?).with_context(|| format!("write {}", path.display()))?;
    shown(command).try_for_each(|below| write_pages(below, Some(name), folder))
}

fn shown(command: &clap::Command) -> impl Iterator<Item = &clap::Command> {
    command.get_subcommands().filter(|command| !command.is_hide_set())
}

fn display_name(command: &clap::Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

fn page(command: &clap::Command, above: Option<&str>) -> io::Result<Vec<u8>> {
    let man = Man::new(command.clone()).source(VERSION).manual("tallyd's manual");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    let mut roff = Roff::new();
    if above.is_none() {
        whole_program(&mut roff);
    }
    roff.control("SH", ["EXIT STATUS"]).text([roman(EXIT_CODES.trim_start_matches("Exit codes: "))]);
    see_also(command, above, &mut roff);
    roff.to_writer(&mut page)?;
    Ok(page)
}

fn whole_program(roff: &mut Roff) {
    let sections = [
        (
            "SIGNALS",
            vec![
                ("SIGTERM, SIGINT", "Finish open batches and runs, and exit."),
                (
                    "SIGHUP",
                    "Read the configuration again. If the configuration is invalid, log that and change nothing.",
                ),
            ],
        ),
        (
            "FILES",
            vec![
                (config::DEFAULT_PATH, "The configuration."),
                (tallyd_gateway::config::GATEWAY_PATH, "The gateway's configuration."),
            ],
        ),
        (
            "ENVIRONMENT",
            vec![
                (
                    "TALLYD__SECTION__KEY",
                    "The value of any configuration key, instead of the value in the file: TALLYD__AMQP__PARTITIONS=4.",
                ),
                ("RUST_LOG", "The log filter, used instead of [log] level. The options -v and -q override it."),
                (
                    "CREDENTIALS_DIRECTORY",
                    "The folder of password files that have relative paths. systemd sets it. Without it: /etc/credstore, /run/credentials/tallyd.service, /run/secrets.",
                ),
            ],
        ),
    ];
    for (title, entries) in sections {
        roff.control("SH", [title]);
        for (name, text) in entries {
            roff.control("TP", []).text([bold(name)]).text([roman(text)]);
        }
    }
}

fn see_also(command: &clap::Command, above: Option<&str>, roff: &mut Roff) {
    let pages: Vec<&str> = above.into_iter().chain(shown(command).map(display_name)).collect();
    if !pages.is_empty() {
        let line = pages.into_iter().flat_map(|page| [roman(", "), bold(page), roman("(1)")]).skip(1);
        roff.control("SH", ["SEE ALSO"]).text(line.collect::<Vec<Inline>>());
    }
}
