//! The commands: what each prints and how it exits.

mod board;
mod check;
mod complete;
mod configuration;
mod dead;
mod edit;
mod exit;
mod healthcheck;
mod layout;
mod port;
mod recount;
mod status;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::{Args, Parser, Subcommand, ValueEnum};
use exit::exit_code;
pub use exit::{EXIT_CONFIG, EXIT_DONE, EXIT_DRIFT, EXIT_FAILED, EXIT_TRY_LATER, EXIT_USAGE, Usage};
use serde::Serialize;
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

use crate::app::{self, Servers};
use crate::config::{self, Config, ConfigError, Kinds, Log, LogFormat};
use crate::jobs::archive::Scope;
use crate::jobs::filters;
use crate::jobs::reconcile::report::End;
use crate::jobs::reconcile::{Mode, RunOptions};
use crate::jobs::runner::Ran;
use crate::model::{Target, TargetId};
use crate::runtime::progress::ProgressSink;
use crate::runtime::{dump, log, process, shutdown};
use crate::show;

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
    Reconcile(ReconcileArgs),
    /// Compares `counter` with the tables that [[recount]] names, and corrects it.
    Recount(recount::RecountArgs),
    /// Archives the boards of closed periods, and ends those that were archived long enough ago.
    Archive(ArchiveArgs),
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

#[derive(Debug, Default, Args)]
struct ReconcileArgs {
    /// Recounts every target (the default).
    #[arg(long, conflicts_with_all = ["scrub", "changed", "target"])]
    full: bool,
    /// Recounts the next slice of all targets, of which there are [reconcile] scrub_parts.
    #[arg(long, conflicts_with_all = ["changed", "target"])]
    scrub: bool,
    /// Compares what changed since the last run.
    #[arg(long, conflicts_with = "target")]
    changed: bool,
    /// Compares this target alone; may be given several times.
    #[arg(long, value_name = "KIND:ID")]
    target: Vec<String>,
    /// Changes nothing; exits with 2 when something has drifted.
    #[arg(long)]
    dry_run: bool,
    /// Repairs however much it is: the limits repair_targets_max_percent and repair_abs_max don't hold.
    #[arg(long)]
    force: bool,
    /// Ends after so long, between two pages: 90s, 30m, 2h. What was not looked at is said, and --resume goes on there.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    run_time: Option<Duration>,
    /// Goes on where the last full run ended that was not done: it was stopped, killed, or its time was over.
    #[arg(long, conflicts_with_all = ["scrub", "changed", "target", "dry_run"])]
    resume: bool,
    /// Make all numbers in Redis unknown and load them from MySQL again. Use it where most numbers are wrong: readers ask MySQL meanwhile.
    #[arg(long, conflicts_with_all = ["full", "scrub", "changed", "target", "dry_run", "resume"])]
    reload: bool,
    /// How the report looks.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Args)]
struct ArchiveArgs {
    /// Only this board.
    #[arg(long, value_name = "NAME")]
    board: Option<String>,
    /// Only this period: 2026-11-21, 2026-W47 or 2026-11.
    #[arg(long)]
    period: Option<String>,
    /// Changes nothing; says what would be archived and ended, and why the others not.
    #[arg(long)]
    dry_run: bool,
    /// How the report looks.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people.
    #[default]
    Text,
    /// For programs: one object.
    Json,
}

/// Runs the command that the process was started with.
pub fn main() -> u8 {
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
    dump::forbid();
    match process::with_room(|| run(cli)).unwrap_or_else(|| Err(anyhow!("there is no room for a thread"))) {
        Ok(code) => code,
        Err(error) => {
            // stderr may be closed; the exit code says it too.
            let _ = writeln!(std::io::stderr(), "tallyd: {error:#}");
            exit_code(&error)
        }
    }
}

fn run(cli: Cli) -> Result<u8> {
    let command = match cli.command {
        Some(Any::Alone(command)) => return run_alone(command, &cli.config),
        Some(Any::Configured(command)) => Some(command),
        None => None,
    };
    let config = config::load(&cli.config)?;
    start_log(&config.log).map_err(|error| ConfigError(vec![format!("[log] {error:#}")]))?;
    start_runtime()?.block_on(async {
        match command {
            None if cli.reconcile_once => reconcile(&config, &ReconcileArgs::default()).await,
            None => {
                process::check_stacks();
                app::run(&cli.config, config).await.map(|()| EXIT_DONE)
            }
            Some(Command::Reconcile(args)) => reconcile(&config, &args).await,
            Some(Command::Recount(args)) => recount::run(&config, &args).await,
            Some(Command::Archive(args)) => archive(&config, args).await,
            Some(Command::Board(command)) => board::run(&config, command).await,
            Some(Command::Dead(command)) => dead::run(&config, command).await,
            Some(Command::Show { target, format }) => show_target(&config, &target, format).await,
            Some(Command::RebuildFilters) => rebuild_filters(&config).await,
            Some(Command::Layout(command)) => layout::run(&config, command).await,
            Some(Command::Migrate) => migrate(&config).await,
        }
    })
}

/// Starts logging as `[log]` says.
fn start_log(log: &Log) -> Result<()> {
    let format = match log.format {
        LogFormat::Auto => log::Format::of_stderr(),
        LogFormat::Text => log::Format::Text,
        LogFormat::Json => log::Format::Json,
        LogFormat::Journald => log::Format::Journald,
    };
    log::start(log::filter(&log.level)?, format)
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
        Alone::ConfigSchema => configuration::print_schema(),
        Alone::Completions { shell } => complete::completions(shell),
        Alone::Man { dir } => complete::man(dir.as_deref()),
    }
}

async fn reconcile(config: &Config, args: &ReconcileArgs) -> Result<u8> {
    let mode = match (args, args.target.as_slice()) {
        (ReconcileArgs { reload: true, .. }, _) => Mode::Rebuild,
        (ReconcileArgs { changed: true, .. }, _) => Mode::Changed,
        (ReconcileArgs { scrub: true, .. }, _) => Mode::Scrub,
        (_, []) => Mode::Full,
        (_, targets) => {
            Mode::Targets(targets.iter().map(|text| parse_target(text, &config.kinds)).collect::<Result<_>>()?)
        }
    };
    let stop = CancellationToken::new();
    shutdown::on_signals(&stop)?;
    let servers = Servers::new(config)?;
    servers.check(config).await?;
    let ReconcileArgs { dry_run, force, run_time: run_time_max, resume, reload, .. } = *args;
    let options = RunOptions { mode, dry_run, force, resume, reload, run_time_max, wait_max: None };
    let ran = servers.reconcile(config, &options, to_whom(), &stop).await?;
    let Some(report) = ended(ran)? else { return Ok(EXIT_TRY_LATER) };
    print(&report, args.format)?;
    Ok(match report {
        _ if matches!(report.ended, End::Stopped | End::LimitExceeded) => EXIT_FAILED,
        // What is unknown would be loaded.
        _ if args.dry_run && report.drifted + report.counters_off + report.unknown > 0 => EXIT_DRIFT,
        _ => EXIT_DONE,
    })
}

fn parse_time(text: &str) -> Result<Duration, String> {
    config::parse_pause(text).map(|pause| pause.0).map_err(|error| format!("write it as 90s, 30m or 2h ({error})"))
}

async fn archive(config: &Config, args: ArchiveArgs) -> Result<u8> {
    let scope = Scope { board: args.board, period: args.period, dry_run: args.dry_run };
    let stop = CancellationToken::new();
    shutdown::on_signals(&stop)?;
    let servers = Servers::new(config)?;
    servers.check(config).await?;
    let ran = servers.archive(config, &scope, to_whom(), &stop).await?;
    board::report(ran, args.dry_run, args.format)
}

/// A bar for someone at a terminal, else lines in the log.
fn to_whom() -> ProgressSink {
    if std::io::stderr().is_terminal() { ProgressSink::Bar } else { ProgressSink::Log }
}

async fn rebuild_filters(config: &Config) -> Result<u8> {
    if config.filter.likes_min == 0 {
        return Err(Usage("there are no filters: [filter] likes_min is 0".to_owned()).into());
    }
    let servers = Servers::new(config)?;
    servers.check(config).await?;
    // Without one before it the next run trusts no filter.
    servers.store.forget_marks(filters::JOB, filters::MODE).await?;
    writeln!(std::io::stdout(), "the daemon's next run takes all filters away and builds them anew")
        .context("print")?;
    Ok(EXIT_DONE)
}

async fn show_target(config: &Config, target: &str, format: Format) -> Result<u8> {
    let target = parse_target(target, &config.kinds)?;
    let servers = Servers::new(config)?;
    servers.check(config).await?;
    print(&show::show(config, &servers.store, &servers.cache, target).await?, format)?;
    Ok(EXIT_DONE)
}

async fn migrate(config: &Config) -> Result<u8> {
    let steps = Servers::new(config)?.store.migrate().await?;
    let text = match steps {
        0 => "the schema is up to date".to_owned(),
        steps => format!("the schema is up to date after {steps} steps"),
    };
    writeln!(std::io::stdout(), "{text}").context("print")?;
    Ok(EXIT_DONE)
}

/// The report of a run that ended; says who holds the lock where another one runs.
fn ended<R>(ran: Ran<R>) -> Result<Option<R>> {
    match ran {
        Ran::Ended(report) => Ok(Some(report)),
        Ran::Held { owner, lease_s } => {
            let text =
                format!("tallyd: {owner} is at it (its lease runs for another {lease_s} s unless renewed): try later");
            writeln!(std::io::stderr(), "{text}").context("print")?;
            Ok(None)
        }
    }
}

fn print(report: &(impl Serialize + std::fmt::Display), format: Format) -> Result<()> {
    let text = match format {
        Format::Text => format!("{report:#}"),
        Format::Json => serde_json::to_string(report).context("write the report")?,
    };
    writeln!(std::io::stdout(), "{text}").context("print the report")
}

fn parse_target(text: &str, kinds: &Kinds) -> Result<Target> {
    let target = text.split_once(':').and_then(|(kind, id)| {
        let id = id.parse().ok().filter(|id| (1..=crate::event::ID_MAX).contains(id))?;
        Some(Target { kind: kinds.named(kind)?, id: TargetId(id) })
    });
    target.ok_or_else(|| {
        let known: Vec<&str> = kinds.0.keys().map(String::as_str).collect();
        Usage(format!("{text} is no target: write KIND:ID, for instance video:42; the kinds are {}", known.join(", ")))
            .into()
    })
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
