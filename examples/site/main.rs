//! The program of the demo. It simulates users who like and unlike videos, and causes faults. At the end it compares
//! the clicks with MySQL and Redis. `dev/demo` starts this program, on separate servers.
//!
//! The steps: empty servers (`servers`) -> the daemon as a child (`daemon`) -> clicks through the client (`traffic`,
//! noted in `model`), faults every few seconds (`faults`), a week that closes (`week`), one line a second (`play`) ->
//! the traffic ends, a last reconcile, the daemon stops (`ending`) -> everything is compared (`compare`, `summary`).

mod compare;
mod daemon;
mod dice;
mod ending;
mod faults;
mod hall;
mod log;
mod model;
mod play;
mod screen;
mod servers;
mod summary;
mod traffic;
mod week;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use daemon::Tallyd;
use play::Play;
use screen::Screen;
use servers::Servers;
use traffic::Site;

/// The exit code if a signal arrives before there are clicks to compare: 128 + SIGINT, as in shells.
const INTERRUPTED: u8 = 130;

/// Signals within this time count as one signal. Ctrl-C reaches the whole process group, and dev/demo also sends the
/// signal.
const ONE_SIGNAL: Duration = Duration::from_secs(1);

struct Args {
    config: PathBuf,
    tallyd: PathBuf,
    /// `None` if the demo runs until a signal.
    play_for: Option<Duration>,
    clicks_a_second: u32,
    faults_every: Duration,
}

#[tokio::main]
async fn main() -> ExitCode {
    let stop = CancellationToken::new();
    match run(&stop).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(_) if stop.is_cancelled() => ExitCode::from(INTERRUPTED),
        Err(error) => {
            // stderr may be closed. The exit code reports the failure, too.
            let _ = writeln!(std::io::stderr(), "demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns whether MySQL and Redis match the clicks.
async fn run(stop: &CancellationToken) -> Result<bool> {
    let args = parse(std::env::args().skip(1))?;
    stop_on_signals(stop)?;
    let config = tallyd_base::config::load(&args.config)?;
    let screen = Screen::new(stop.clone());
    let servers = Servers::empty(&config).await?;
    let tallyd = Tallyd::new(&args.tallyd, &args.config)?;
    tallyd.migrate()?;
    let mut daemon = tallyd.start(config.amqp.partitions, stop).await?;
    let site = Arc::new(Site::new(&config, args.clicks_a_second)?);
    let mut play = Play::new(&site, &servers, &screen, &tallyd, &mut daemon, args.faults_every);
    let played = play.run(args.play_for, stop).await?;
    if played.clicks == 0 {
        bail!("no user clicked, so there is nothing to compare");
    }
    let ended = ending::end(&site, &servers, &screen, &tallyd, daemon, &played).await?;
    let comparison = compare::compare(&site, &servers, &played).await?;
    Ok(summary::print(&screen, &played, &ended, &comparison))
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Args> {
    let (mut config, mut tallyd, mut play_for) = (None, None, None);
    let (mut clicks_a_second, mut faults_every) = (3_000, Duration::from_secs(7));
    while let Some(word) = words.next() {
        let value = words.next().with_context(|| format!("{word} needs a value"))?;
        match word.as_str() {
            "--config" => config = Some(value.into()),
            "--tallyd" => tallyd = Some(value.into()),
            "--seconds" => play_for = Some(Duration::from_secs(value.parse().context("read --seconds")?)),
            "--clicks-a-second" => clicks_a_second = value.parse().context("read --clicks-a-second")?,
            "--faults-every" => faults_every = Duration::from_secs(value.parse().context("read --faults-every")?),
            _ => bail!("unknown option {word}: start the demo with dev/demo"),
        }
    }
    let (Some(config), Some(tallyd)) = (config, tallyd) else {
        bail!("--config and --tallyd are required: start the demo with dev/demo");
    };
    Ok(Args { config, tallyd, play_for, clicks_a_second, faults_every })
}

/// The first signal ends the traffic, and the demo compares everything. A second signal ends the process.
fn stop_on_signals(stop: &CancellationToken) -> Result<()> {
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut hang_up = signal(SignalKind::hangup()).context("listen for SIGHUP")?;
    let stop = stop.clone();
    tokio::spawn(async move {
        let mut first: Option<Instant> = None;
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hang_up.recv() => {}
            }
            if first.get_or_insert_with(Instant::now).elapsed() > ONE_SIGNAL {
                // dev/demo then finds the daemon by its pid file, and stops it.
                std::process::exit(INTERRUPTED.into());
            }
            stop.cancel();
        }
    });
    Ok(())
}
