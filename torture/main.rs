//! A chaos test. Users click through the client, while servers, connections and daemons fail according to a seeded
//! plan. Then a checker compares the stored data with every answer that the users got. `dev/torture` runs this program.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a run ends at its first internal error")]

mod args;
mod audit;
mod checker;
mod faults;
mod history;
mod operator;
mod plan;
mod plot;
mod resources;
mod run;
mod shrink;
mod site;
mod table;
mod truth;
mod users;
mod watch;

use std::process::ExitCode;

use clap::Parser;
use tallyd_testkit::{accounts, dice, proxy};
use tokio::signal::unix::{SignalKind, signal};

use args::Args;

/// The same exit code as `tallyd`.
const USAGE: u8 = 64;

#[tokio::main]
async fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let chosen = match args.chosen() {
        Ok(chosen) => chosen,
        Err(error) => {
            eprintln!("dev/torture: {error}");
            return ExitCode::from(USAGE);
        }
    };
    let seed = args.seed.unwrap_or_else(|| history::now().unsigned_abs() % 1_000_000);
    if args.list {
        for fault in faults::all() {
            println!("{:30} {}", fault.name, fault.about);
        }
        return ExitCode::SUCCESS;
    }
    if args.plan {
        run::print_plan(seed, args.length(), &run::items(&chosen));
        return ExitCode::SUCCESS;
    }
    let run = async {
        match &args.try_alone {
            Some(names) => faults::try_one::run(names).await.map(|()| true),
            None => run::run(&args, seed).await,
        }
    };
    let mut terminate = signal(SignalKind::terminate()).unwrap();
    // When the run is dropped, all daemons are killed, including frozen ones.
    let done = tokio::select! {
        done = run => done,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        _ = terminate.recv() => Err(anyhow::anyhow!("terminated")),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("dev/torture: seed {seed}: {error:#}");
            ExitCode::FAILURE
        }
    }
}
