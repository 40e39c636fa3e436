//! Faults that set the clocks of running servers and daemons forward or back.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::{Instant, sleep};

use super::{Allows, Fault, Server, daemon, then_undo};
use crate::dice::Dice;
use crate::site::Site;

/// The fault sets a daemon's clock ahead or back by at most this number of seconds. If the clock is far behind, some
/// events are more than `future_max` ahead of this clock.
const STEP_MAX: u64 = 900;

/// A server's clock is wrong by a random number of hours in this range.
const HOURS: (u64, u64) = (1, 6);

const HOUR: i64 = 3_600;

/// Jobs that the daemons run every few seconds.
const JOBS: [&str; 3] = ["reconcile", "archive", "filters"];

/// After a clock was corrected, each of these jobs must finish a new run within this time. Another fault can be active
/// at that time.
const JOBS_MAX: Duration = Duration::from_secs(150);

pub fn all() -> Vec<Fault> {
    let stepped = Fault::new(
        Server::Daemon,
        "clock-stepped",
        "a daemon's clock jumps back and forth by minutes",
        |site, dice, hold| Box::pin(stepped(site, dice, hold)),
    );
    let ahead = "the server's clock goes ahead by hours, and is corrected";
    let back = "the server's clock goes back by hours, and is corrected";
    vec![
        stepped.hold(10, 20),
        off("mysql-clock-ahead", ahead, Server::Mysql, 1),
        off("mysql-clock-back", back, Server::Mysql, -1),
        off("redis-clock-ahead", ahead, Server::Redis, 1).allows(Allows::WhatIsAhead),
        off("redis-clock-back", back, Server::Redis, -1),
    ]
}

fn off(name: &'static str, about: &'static str, server: Server, sign: i64) -> Fault {
    Fault::new(server, name, about, move |site, dice, hold| Box::pin(hours(site, dice, hold, server, sign)))
        .hold(10, 20)
}

async fn stepped(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let clock = &daemon::any(site, &mut dice).clock;
    let until = Instant::now() + hold;
    let stepping = async {
        while Instant::now() < until {
            let sign = if dice.percent(50) { 1 } else { -1 };
            clock.step(sign * dice.below(STEP_MAX).cast_signed())?;
            sleep(Duration::from_millis(500 + dice.below(2_500))).await;
        }
        Ok(())
    };
    then_undo(stepping, async { clock.step(0) }).await
}

async fn hours(site: &Site, mut dice: Dice, hold: Duration, server: Server, sign: i64) -> Result<()> {
    let clock = site.stack.clock(server);
    let hours = HOURS.0 + dice.below(HOURS.1 - HOURS.0 + 1);
    let begun = async {
        let seconds = sign * hours.cast_signed() * HOUR;
        clock.step(seconds)?;
        let off = site.stack.clock_of(server).await? - crate::history::now() / 1_000_000;
        ensure!(
            (off - seconds).abs() < 60,
            "the clock of {} is wrong by {off} s instead of {seconds} s",
            server.name()
        );
        sleep(hold).await;
        Ok(())
    };
    let right = async {
        clock.step(0)?;
        jobs_run(site).await
    };
    then_undo(begun, right).await
}

/// Waits until each job has started and finished a new run. Even if a clock was wrong before, jobs must run again.
async fn jobs_run(site: &Site) -> Result<()> {
    let last = "SELECT CAST(COALESCE(MAX(run), 0) AS UNSIGNED) FROM job_run";
    let last: u64 = sqlx::query_scalar(last).fetch_one(site.pool()).await?;
    let until = Instant::now() + JOBS_MAX;
    let mut missing = JOBS.to_vec();
    while !missing.is_empty() {
        ensure!(
            Instant::now() < until,
            "{JOBS_MAX:?} after the clock was corrected, no run of {missing:?} has finished"
        );
        sleep(Duration::from_millis(200)).await;
        let done = "SELECT DISTINCT job FROM job_run WHERE outcome = 'done' AND run > ?";
        // Another fault can keep MySQL from answering.
        let Ok(done) = sqlx::query_scalar::<_, String>(done).bind(last).fetch_all(site.pool()).await else { continue };
        missing.retain(|job| !done.iter().any(|done| done == job));
    }
    Ok(())
}
