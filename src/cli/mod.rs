//! The commands: what each prints and how it exits.

mod board;
pub mod check;
mod complete;
mod configuration;
mod dead;
mod edit;
mod exit;
mod healthcheck;
mod layout;
mod once;
mod port;
mod reconcile;
mod recount;
mod shared;
mod status;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use clap::{Parser, Subcommand};
use tokio::runtime::{Builder, Runtime};

use crate::config::{self, Config, ConfigError, Log};
use crate::gateway;
use crate::runtime::{log, process};
use exit::exit_code;
pub use exit::{EXIT_CONFIG, EXIT_DONE, EXIT_DRIFT, EXIT_FAILED, EXIT_TRY_LATER, EXIT_USAGE, Usage};
use shared::{Format, ended, parse_target, parse_time, print, progress_sink};

/// Keeps like counts true: writes like events to MySQL, repairs Redis counters, archives leaderboards.
///
/// Without a command it runs as a daemon until SIGTERM.
#[derive(Debug, Parser)]
#[command(name = "tallyd", version, after_help = EXIT_CODES)]
struct Cli {
    /// The configuration file.
    #[arg(long, global = true, value_name = "FILE", default_value = config::DEFAULT_PATH)]
    config: PathBuf,

    /// Does one full reconcile and exits: the same as `tallyd reconcile`.
    #[arg(long)]
    reconcile_once: bool,

    #[command(subcommand)]
    command: Option<Any>,
}

const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed, 2 drift found (--dry-run), 64 usage, \
                          75 try later (lock held, server away), 78 configuration or schema";

#[derive(Debug, Subcommand)]
enum Any {
    #[command(flatten)]
    Configured(Command),
    #[command(flatten)]
    Alone(Alone),
}

/// What stands on the configuration.
#[derive(Debug, Subcommand)]
enum Command {
    /// Compares Redis' counters with MySQL once, and repairs what has drifted.
    Reconcile(reconcile::ReconcileArgs),
    /// Compares `counter` with the tables that [[recount]] names, and corrects it.
    Recount(recount::RecountArgs),
    /// Archives the boards of closed periods, and ends those that were archived long enough ago.
    Archive(board::ArchiveArgs),
    /// Shows messages that could not be applied, sends them again, deletes them.
    #[command(subcommand)]
    Dead(dead::DeadCommand),
    /// Shows boards, saves them and puts them back.
    #[command(subcommand)]
    Board(board::BoardCommand),
    /// Prints a target's numbers as Redis, `counter` and the like records have them.
    Show {
        /// The target, for instance video:42.
        #[arg(value_name = "KIND:ID")]
        target: String,
        /// How it looks.
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Has all Bloom filters built anew, for instance after likes came into MySQL that lua/like.lua has not counted.
    RebuildFilters,
    /// Says how counters should be laid out in Redis, and moves them.
    #[command(subcommand)]
    Layout(layout::LayoutCommand),
    /// Makes or updates the tables in MySQL. Needs an account that may create tables.
    Migrate,
}

/// What does without a configuration that is right, or with little of it.
#[derive(Debug, Subcommand)]
enum Alone {
    /// Checks the configuration and, unless --offline, the servers that it names. Changes nothing.
    CheckConfig(check::CheckArgs),
    /// Prints the configuration as it is in force: the file with the environment over it, and the defaults. Secrets are left out.
    ShowConfig(configuration::ShowArgs),
    /// Shows how a daemon stands: what is wrong, servers, partitions, jobs, boards, dead letters.
    Status(status::StatusArgs),
    /// Says whether a daemon is ready: exits with 0 if it is, with 1 if not.
    Healthcheck(healthcheck::HealthcheckArgs),
    /// Takes events over HTTP and publishes them, and reads numbers, likes and boards there, until SIGTERM.
    Gateway {
        /// Prints the description of the API (OpenAPI 3.1) instead.
        #[arg(long)]
        openapi: bool,
    },
    /// Prints the JSON Schema of the configuration, for editors.
    ConfigSchema,
    /// Prints the script with which a shell completes this command line.
    Completions {
        /// The shell.
        #[arg(value_enum)]
        shell: complete::Shell,
    },
    /// Prints the manual page.
    Man {
        /// Writes it into this folder instead, and a page for each command.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

pub fn main<F>(daemon: impl FnOnce(PathBuf, Config) -> F + Send + 'static) -> u8
where
    F: Future<Output = Result<()>>,
{
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // --help and --version are no errors; the library would exit with 2 on the others.
            let code = if error.use_stderr() { EXIT_USAGE } else { EXIT_DONE };
            return if error.print().is_ok() { code } else { EXIT_FAILED };
        }
    };
    if cli.reconcile_once && cli.command.is_some() {
        let _ =
            writeln!(std::io::stderr(), "tallyd: --reconcile-once is a command of its own: leave the other one out");
        return EXIT_USAGE;
    }
    process::forbid_dumps();
    match process::with_room(|| run(cli, daemon)).unwrap_or_else(|| Err(anyhow!("there is no room for a thread"))) {
        Ok(code) => code,
        Err(error) => {
            // stderr may be closed; the exit code says it too.
            let _ = writeln!(std::io::stderr(), "tallyd: {error:#}");
            exit_code(&error)
        }
    }
}

fn run<F>(cli: Cli, daemon: impl FnOnce(PathBuf, Config) -> F) -> Result<u8>
where
    F: Future<Output = Result<()>>,
{
    let command = match cli.command {
        Some(Any::Alone(command)) => return run_alone(command, &cli.config),
        Some(Any::Configured(command)) => Some(command),
        None => None,
    };
    let config = config::load(&cli.config)?;
    start_log(&config.log).map_err(|error| ConfigError(vec![format!("[log] {error:#}")]))?;
    start_runtime()?.block_on(async {
        match command {
            None if cli.reconcile_once => reconcile::run(&config, &reconcile::ReconcileArgs::default()).await,
            None => {
                process::check_stacks();
                daemon(cli.config, config).await.map(|()| EXIT_DONE)
            }
            Some(Command::Reconcile(args)) => reconcile::run(&config, &args).await,
            Some(Command::Recount(args)) => recount::run(&config, &args).await,
            Some(Command::Archive(args)) => board::archive(&config, args).await,
            Some(Command::Board(command)) => board::run(&config, command).await,
            Some(Command::Dead(command)) => dead::run(&config, command).await,
            Some(Command::Show { target, format }) => once::show(&config, &target, format).await,
            Some(Command::RebuildFilters) => once::rebuild_filters(&config).await,
            Some(Command::Layout(command)) => layout::run(&config, command).await,
            Some(Command::Migrate) => once::migrate(&config).await,
        }
    })
}

fn start_log(log: &Log) -> Result<()> {
    log::start(log::filter(&log.level)?, log.format)
}

fn start_runtime() -> Result<Runtime> {
    // One provider of cryptography for all three servers' connections. Fails only where a test installed it before.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Builder::new_multi_thread()
        .enable_all()
        .thread_stack_size(process::WORKER_BYTES)
        .build()
        .context("start the runtime")
}

fn run_alone(command: Alone, path: &Path) -> Result<u8> {
    match command {
        Alone::CheckConfig(args) => check::run(path, &args),
        Alone::ShowConfig(args) => configuration::show(path, &args),
        Alone::Status(args) => start_runtime()?.block_on(status::run(path, &args)),
        Alone::Healthcheck(args) => start_runtime()?.block_on(healthcheck::run(path, &args)),
        Alone::Gateway { openapi: true } => {
            writeln!(std::io::stdout(), "{}", gateway::openapi()?).context("print the description of the API")?;
            Ok(EXIT_DONE)
        }
        Alone::Gateway { openapi: false } => {
            let config = config::load(path)?;
            start_log(&config.log).map_err(|error| ConfigError(vec![format!("[log] {error:#}")]))?;
            start_runtime()?.block_on(gateway::run(&config)).map(|()| EXIT_DONE)
        }
        Alone::ConfigSchema => configuration::print_schema(),
        Alone::Completions { shell } => complete::completions(shell),
        Alone::Man { dir } => complete::man(dir.as_deref()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
