//! The commands: their options, output and exit codes.

mod after_restore;
mod board;
mod complete;
mod configuration;
mod control;
mod dead;
mod edit;
mod exit;
mod healthcheck;
mod layout;
mod map;
mod names;
mod once;
mod partitions;
mod port;
mod port_check;
mod rare;
mod reconcile;
pub mod rules;
mod status;
mod verbosity;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use futures_util::FutureExt;

use exit::exit_code;
use rare::Admin;
use tallyd_base::cli::check::{Needs, Question};
pub use tallyd_base::cli::{EXIT_CONFIG, EXIT_DONE, EXIT_DRIFT, EXIT_FAILED, EXIT_TRY_LATER, EXIT_USAGE, Usage};
use tallyd_base::cli::{
    Format, are_paused, ended, parse_since, parse_target, parse_time, print, progress_sink, start_log, start_runtime,
};
use tallyd_base::config::{self, Config, ConfigError};
use tallyd_base::runtime::process;
use tallyd_base::version;
use verbosity::Verbosity;

/// Keep like counts correct: write like events to MySQL, repair Redis counters, archive leaderboards.
///
/// Without a command and without a terminal, run the daemon as `tallyd run` does.
#[derive(Debug, Parser)]
#[command(name = "tallyd", version = version::LONG, after_help = EXIT_CODES)]
struct Cli {
    /// Read the configuration from this file. The default is /etc/tallyd/config.toml, or /etc/tallyd/gateway.toml for
    /// the command `gateway`.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,

    #[command(flatten)]
    verbosity: Verbosity,

    /// Run one full reconcile and exit, as `tallyd reconcile` does.
    #[arg(long)]
    reconcile_once: bool,

    #[command(subcommand)]
    command: Option<Any>,
}

const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed, 2 drift found (--dry-run, --verify), 64 usage, \
                          75 try later (lock held, server unreachable), 78 configuration, schema or account";

#[derive(Debug, Subcommand)]
enum Any {
    #[command(flatten)]
    Configured(Command),
    #[command(flatten)]
    Alone(Alone),
    /// Rare work: other counters, old sites, layouts, names, filters, partitions.
    #[command(subcommand)]
    Admin(Admin),
}

/// Commands that need a valid configuration.
#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon until SIGTERM or SIGINT.
    Run,
    /// Compare the counters in Redis with MySQL once, and repair drift.
    Reconcile(reconcile::ReconcileArgs),
    /// Copy an old table into tallyd, or compare it with tallyd.
    Import(tallyd_moving::command::import::ImportArgs),
    /// Archive the boards of finished periods, and remove expired boards from Redis.
    Archive(board::ArchiveArgs),
    /// List, show, replay and delete dead letters: messages that could not be applied.
    #[command(subcommand)]
    Dead(dead::DeadCommand),
    /// List, show, save and restore boards.
    #[command(subcommand)]
    Board(board::BoardCommand),
    /// Print the counters of a target from Redis, from `counter` and from the like records.
    Show {
        /// Show this target, for example video:42.
        #[arg(value_name = "KIND:ID")]
        target: String,
        /// Print the report as text or as JSON.
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Create or update the tables in MySQL, with an account that has the right to create tables.
    Migrate,
}

/// Commands that need no valid configuration, or only a part of the configuration.
#[derive(Debug, Subcommand)]
enum Alone {
    Init(tallyd_setup::init::InitArgs),
    /// Check, show and describe the configuration.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Show the status of a daemon: its problems, servers, partitions, jobs, boards and dead letters.
    Status(status::StatusArgs),
    #[command(flatten)]
    Control(control::ControlCommand),
    /// Serve the HTTP API until SIGTERM: publish events, read numbers, likes and boards.
    Gateway {
        /// Print the description of the API (OpenAPI 3.1) instead of serving it.
        #[arg(long)]
        openapi: bool,
    },
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Check the configuration and its servers. Change nothing.
    Check(tallyd_setup::check::CheckArgs),
    /// Print the configuration with the environment and the defaults applied, without secrets.
    Show(configuration::ShowArgs),
    /// Print the JSON Schema of the configuration, for editors.
    Schema,
}

pub fn main<F>(daemon: impl FnOnce(PathBuf, Config) -> F + Send + 'static) -> u8
where
    F: Future<Output = Result<()>>,
{
    let parsed = command_line().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            // --help and --version are not errors. For real errors, the library's own exit code would be 2.
            let code = if error.use_stderr() { EXIT_USAGE } else { EXIT_DONE };
            return if error.print().is_ok() { code } else { EXIT_FAILED };
        }
    };
    if cli.reconcile_once && cli.command.is_some() {
        let _ = writeln!(
            std::io::stderr(),
            "tallyd: --reconcile-once can't be combined with a command: remove one of them"
        );
        return EXIT_USAGE;
    }
    if cli.command.is_none() && !cli.reconcile_once && is_typed() {
        let _ = write!(std::io::stderr(), "{}", command_line().render_help());
        return EXIT_USAGE;
    }
    cli.verbosity.apply();
    process::forbid_dumps();
    match process::with_room(|| run(cli, daemon))
        .unwrap_or_else(|| Err(anyhow!("the operating system refused a new thread")))
    {
        Ok(code) => code,
        Err(error) => {
            // The write fails if stderr is closed. This is ignored, because the exit code also reports the error.
            let _ = writeln!(std::io::stderr(), "tallyd: {error:#}");
            exit_code(&error)
        }
    }
}

/// Returns true if a person typed the command. Without this check, a person could start a daemon by mistake, and the
/// daemon would consume events.
fn is_typed() -> bool {
    std::io::stdin().is_terminal() || std::io::stderr().is_terminal()
}

fn run<F>(cli: Cli, daemon: impl FnOnce(PathBuf, Config) -> F) -> Result<u8>
where
    F: Future<Output = Result<()>>,
{
    let command = match cli.command {
        Some(Any::Alone(command)) => return run_alone(command, cli.config.as_deref()),
        Some(Any::Admin(Admin::Alone(command))) => return rare::run_alone(command, cli.config.as_deref()),
        Some(Any::Admin(Admin::Configured(command))) => {
            let path = cli.config.unwrap_or_else(|| config::DEFAULT_PATH.into());
            let config = loaded(&path)?;
            return start_runtime()?.block_on(rare::run(&path, &config, command));
        }
        Some(Any::Configured(command)) => Some(command),
        None => None,
    };
    let path = cli.config.unwrap_or_else(|| config::DEFAULT_PATH.into());
    let config = loaded(&path)?;
    start_runtime()?.block_on(async {
        match command {
            None if cli.reconcile_once => reconcile::run(&config, &reconcile::ReconcileArgs::default()).await,
            None | Some(Command::Run) => {
                process::check_stacks();
                daemon(path, config).await.map(|()| EXIT_DONE)
            }
            Some(Command::Reconcile(args)) => reconcile::run(&config, &args).await,
            Some(Command::Import(args)) => tallyd_moving::command::import::run(&path, &config, &args).await,
            Some(Command::Archive(args)) => board::archive(&config, args).await,
            Some(Command::Board(command)) => board::run(&config, command).await,
            Some(Command::Dead(command)) => dead::run(&config, command).await,
            Some(Command::Show { target, format }) => once::show(&config, &target, format).await,
            Some(Command::Migrate) => once::migrate(&config).await,
        }
    })
}

fn loaded(path: &Path) -> Result<Config> {
    let config = config::load(path)?;
    start_log(&config.log).map_err(|error| ConfigError(vec![format!("[log] {error:#}")]))?;
    Ok(config)
}

/// What `tallyd config check` asks beside the three servers' own questions.
const QUESTIONS: [Question; 4] = [
    Question {
        needs: Needs::Nothing,
        ask: |asked| async move { tallyd_moving::check::check_file(asked.path, asked.config) }.boxed(),
    },
    Question { needs: Needs::Mysql, ask: |asked| tallyd_recount::check::check(asked.config, asked.servers).boxed() },
    Question {
        needs: Needs::Mysql,
        ask: |asked| tallyd_moving::check::check_queries(asked.path, asked.config, asked.servers).boxed(),
    },
    Question { needs: Needs::Network, ask: |asked| port_check::check(&asked.config.admin).boxed() },
];

fn run_alone(command: Alone, given: Option<&Path>) -> Result<u8> {
    let path = given.unwrap_or(Path::new(config::DEFAULT_PATH));
    match command {
        Alone::Init(args) => tallyd_setup::init::run(&args),
        Alone::Config(ConfigCommand::Check(args)) => tallyd_setup::check::run(path, &args, &QUESTIONS),
        Alone::Config(ConfigCommand::Show(args)) => configuration::show(path, &args),
        Alone::Config(ConfigCommand::Schema) => configuration::print_schema(),
        Alone::Status(args) => start_runtime()?.block_on(status::run(path, &args)),
        Alone::Control(command) => start_runtime()?.block_on(control::run(path, command.into())),
        Alone::Gateway { openapi: true } => {
            write!(std::io::stdout(), "{}", tallyd_gateway::DOCUMENT).context("print the description of the API")?;
            Ok(EXIT_DONE)
        }
        Alone::Gateway { openapi: false } => {
            let config =
                tallyd_gateway::config::load(given.unwrap_or(Path::new(tallyd_gateway::config::GATEWAY_PATH)))?;
            start_log(&config.log).map_err(|error| ConfigError(vec![format!("[log] {error:#}")]))?;
            start_runtime()?.block_on(tallyd_gateway::run(&config)).map(|()| EXIT_DONE)
        }
    }
}

/// The commands that `tallyd --help` lists, by what an operator wants.
const GROUPS: [(&str, &[&str]); 4] = [
    ("Run", &["run", "gateway"]),
    ("Look", &["status", "show", "board", "dead"]),
    ("Repair", &["reconcile", "archive", "pause", "resume"]),
    ("Move and set up", &["init", "config", "migrate", "import"]),
];

/// The command line. The library lists all commands under one heading, so the groups are part of the template.
fn command_line() -> clap::Command {
    let command = Cli::command();
    let about = |name: &str| {
        let about = command.find_subcommand(name).and_then(clap::Command::get_about);
        about.map_or_else(String::new, ToString::to_string)
    };
    let line = |name: &str| format!("  {name:<10} {}\n", about(name));
    let group = |(title, names): &(&str, &[&str])| {
        format!("{title}:\n{}\n", names.iter().map(|name| line(name)).collect::<String>())
    };
    let groups: String = GROUPS.iter().map(group).collect();
    let rare = format!("Rare:\n{}", line("admin"));
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{groups}{rare}\nOptions:\n{{options}}{{after-help}}"
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_destructive_command_has_a_dry_run_and_asks() {
        for rule in rules::RULES {
            let mut command = Cli::command();
            for word in rule.command.split(' ').filter(|word| !word.starts_with("--")) {
                command = command.find_subcommand(word).unwrap().clone();
            }
            let has = |name: &str| command.get_arguments().any(|argument| argument.get_long() == Some(name));
            let options = rule.command.split(' ').filter_map(|word| word.strip_prefix("--"));
            assert!(options.chain(["dry-run", "yes"]).all(has), "{}", rule.command);
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        command_line().debug_assert();
    }

    #[test]
    fn the_first_help_lists_each_command_that_is_not_rare_in_one_group() {
        let command = command_line();
        let all = command.get_subcommands().map(clap::Command::get_name).filter(|name| *name != "admin");
        let listed = GROUPS.iter().flat_map(|(_, names)| names.iter().copied());
        assert_eq!(all.collect::<BTreeSet<_>>(), listed.clone().collect());
        assert!(listed.count() <= 14);
    }
}
