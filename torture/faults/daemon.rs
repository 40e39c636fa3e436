//! Faults of daemons: they crash, freeze, stop, start and reload.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::{Instant, sleep, sleep_until};

use super::{Allows, Fault, Server, then_undo};
use crate::dice::Dice;
use crate::site::{Daemon, Site};

/// A reload changes these settings in only one daemon, so the settings must not affect the final data.
const CHANGES: [(&str, &str); 5] = [
    ("changed_cron = \"5,15,25,35,45,55 * * * * *\"", "changed_cron = \"*/7 * * * * *\""),
    ("snapshot_every = \"5s\"", "snapshot_every = \"3s\""),
    ("page_targets = 200", "page_targets = 17"),
    ("page_members = 50", "page_members = 3"),
    ("cron = \"*/15 * * * * *\"", "cron = \"*/4 * * * * *\""),
];

/// The mean number of calls between two faults of each kind (`tallyd_connect::fault`).
const FAULTS: &str = "first-death=12,death=3000,depth=3,commit=30,script=10";

/// The board in the rule for views.
const BOARD: &str = "board = \"seen\"\n";

/// The two writers in the rule for likes.
const WRITERS: [&str; 2] =
    ["[[rule]]\nmetric = \"like\"\nwriter = \"daemon\"\n", "[[rule]]\nmetric = \"like\"\nwriter = \"api\"\n"];

/// Within this time after a pause, Redis has all rows of the outboxes. Daemons read the end of a pause once a second.
const BACKLOG_MAX: Duration = Duration::from_secs(120);

pub fn all() -> Vec<Fault> {
    vec![
        Fault::new(Server::Daemon, "daemon-killed", "one daemon after the other gets SIGKILL", |site, dice, hold| {
            Box::pin(killed(site, dice, hold))
        }),
        Fault::new(
            Server::Daemon,
            "daemon-frozen",
            "a daemon is frozen with SIGSTOP until other daemons have taken over its partitions",
            |site, dice, hold| Box::pin(frozen(site, dice, hold)),
        )
        .hold(14, 25),
        Fault::new(
            Server::Daemon,
            "daemon-restarted",
            "one daemon after the other gets SIGTERM and is started again",
            |site, dice, hold| Box::pin(restarted(site, dice, hold)),
        ),
        Fault::new(
            Server::Daemon,
            "daemons-leave",
            "daemons are stopped one by one until none is left; then all are started again",
            |site, dice, hold| Box::pin(leave(site, dice, hold)),
        ),
        Fault::new(
            Server::Daemon,
            "daemons-faulty",
            "daemons die at any step; queues claim to be empty, COMMITs come late, and scripts run twice",
            |site, dice, hold| Box::pin(faulty(site, dice, hold)),
        )
        .hold(10, 30),
        Fault::new(
            Server::Daemon,
            "reloads",
            "daemons get SIGHUP with other settings, and with invalid settings",
            |site, dice, hold| Box::pin(reloads(site, dice, hold)),
        ),
        Fault::new(
            Server::Daemon,
            "outbox-paused",
            "an operator pauses the outbox, so its rows are added later",
            |site, _, hold| Box::pin(outbox_paused(site, hold)),
        )
        .hold(20, 150),
        Fault::new(
            Server::Daemon,
            "daemon-without-board",
            "one daemon's rule for views names no board; other daemons restart, so this daemon gets their partitions",
            |site, dice, hold| Box::pin(without_board(site, dice, hold)),
        )
        .allows(Allows::WhatNoRuleNames),
        Fault::new(
            Server::Daemon,
            "daemon-with-other-writer",
            "one daemon's rule for likes names the other writer; other daemons restart, so this daemon gets their partitions",
            |site, dice, hold| Box::pin(other_writer(site, dice, hold)),
        ),
    ]
}

/// Returns a random daemon.
pub fn any<'a>(site: &'a Site, dice: &mut Dice) -> &'a Daemon {
    let number = dice.below(site.daemons.len() as u64);
    &site.daemons[usize::try_from(number).unwrap()]
}

async fn killed(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let until = Instant::now() + hold;
    while Instant::now() < until {
        let daemon = any(site, &mut dice);
        // The daemon gets the signal at a random moment, during its start or later.
        sleep(Duration::from_millis(dice.below(2_500))).await;
        daemon.kill().await?;
    }
    Ok(())
}

async fn frozen(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let daemon = any(site, &mut dice);
    let begun = async {
        daemon.signal("STOP").await?;
        sleep(hold).await;
        Ok(())
    };
    then_undo(begun, daemon.signal("CONT")).await
}

/// Starts all daemons again with faults in their program, one after the other.
async fn faulty(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let begun = async {
        for daemon in &site.daemons {
            daemon.kill_for(Some(FAULTS)).await?;
            sleep(Duration::from_millis(dice.below(2_500))).await;
        }
        sleep(hold).await;
        Ok(())
    };
    let back = async {
        for daemon in &site.daemons {
            daemon.kill_for(None).await?;
        }
        Ok(())
    };
    then_undo(begun, back).await
}

async fn restarted(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let until = Instant::now() + hold;
    while Instant::now() < until {
        let daemon = any(site, &mut dice);
        sleep(Duration::from_millis(dice.below(2_500))).await;
        restart(daemon).await?;
    }
    Ok(())
}

async fn leave(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let until = Instant::now() + hold;
    let first = usize::try_from(dice.below(site.daemons.len() as u64)).unwrap();
    let (before, from) = site.daemons.split_at(first);
    let leaving = async {
        for daemon in from.iter().chain(before) {
            daemon.stop().await?;
            sleep(Duration::from_millis(dice.below(2_000))).await;
        }
        sleep_until(until).await;
        Ok(())
    };
    let back = async {
        for daemon in &site.daemons {
            daemon.start().await;
        }
        Ok(())
    };
    then_undo(leaving, back).await
}

async fn reloads(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let until = Instant::now() + hold;
    let changing = async {
        while Instant::now() < until {
            let daemon = any(site, &mut dice);
            let is_wrong = dice.percent(30);
            let chosen: Vec<_> = CHANGES.into_iter().filter(|_| dice.percent(50)).collect();
            site.configure(daemon, |text| {
                let text = chosen.iter().fold(text, |text, (from, to)| text.replace(from, to));
                if is_wrong { text.replace("page_targets", "targets_of_a_page") + "nonsense" } else { text }
            })?;
            let answer = if is_wrong { "reload-refused" } else { "\"reloaded\"" };
            reload(daemon, answer).await?;
            sleep(Duration::from_millis(dice.below(1_500))).await;
        }
        Ok(())
    };
    let back = async {
        for daemon in &site.daemons {
            site.configure(daemon, |text| text)?;
            reload(daemon, "\"reloaded\"").await?;
        }
        Ok(())
    };
    then_undo(changing, back).await
}

async fn outbox_paused(site: &Site, hold: Duration) -> Result<()> {
    const PAUSE: &str = "REPLACE INTO control (task, command, ordered_at, until_at, ordered_by, reason) \
                         VALUES ('outbox', 'pause', NOW(6), NOW(6) + INTERVAL ? SECOND, 'torture', '')";
    let begun = async {
        sqlx::query(PAUSE).bind(hold.as_secs()).execute(site.pool()).await?;
        sleep(hold).await;
        Ok(())
    };
    let undo = async {
        sqlx::query("DELETE FROM control WHERE task = 'outbox'").execute(site.pool()).await?;
        let until = Instant::now() + BACKLOG_MAX;
        // Users click on, so that the last row of an outbox is new at almost any time.
        let ends = site.outbox_ends().await?;
        while site.outboxes_before(&ends).await? > 0 {
            ensure!(Instant::now() < until, "the outboxes have a backlog {BACKLOG_MAX:?} after their pause");
            sleep(Duration::from_millis(200)).await;
        }
        Ok(())
    };
    then_undo(begun, undo).await
}

async fn without_board(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let daemon = any(site, &mut dice);
    let begun = async {
        site.configure(daemon, |text| text.replace(BOARD, ""))?;
        reload(daemon, "\"reloaded\"").await?;
        restart_others(site, daemon).await?;
        sleep(hold).await;
        Ok(())
    };
    let back = async {
        site.configure(daemon, |text| text)?;
        reload(daemon, "\"reloaded\"").await
    };
    then_undo(begun, back).await
}

/// As during a rolling change of who counts likes. A reload refuses this change, so the daemon restarts.
async fn other_writer(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let daemon = any(site, &mut dice);
    let begun = async {
        site.configure(daemon, |text| {
            let [one, other] = WRITERS;
            if text.contains(one) { text.replace(one, other) } else { text.replace(other, one) }
        })?;
        reload(daemon, "reload-refused").await?;
        restart(daemon).await?;
        restart_others(site, daemon).await?;
        sleep(hold).await;
        Ok(())
    };
    let back = async {
        site.configure(daemon, |text| text)?;
        restart(daemon).await
    };
    then_undo(begun, back).await
}

async fn restart(daemon: &Daemon) -> Result<()> {
    daemon.stop().await?;
    daemon.start().await;
    Ok(())
}

/// Restarts all other daemons. While they are stopped, RabbitMQ gives all partitions to this daemon.
async fn restart_others(site: &Site, daemon: &Daemon) -> Result<()> {
    let others = || site.daemons.iter().filter(|other| other.number != daemon.number);
    let leaving = async {
        for other in others() {
            other.stop().await?;
        }
        Ok(())
    };
    let back = async {
        for other in others() {
            other.start().await;
        }
        Ok(())
    };
    then_undo(leaving, back).await
}

/// Sends SIGHUP and waits until the daemon's log contains `answer`.
pub async fn reload(daemon: &Daemon, answer: &str) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(10);
    let logged = daemon.logged();
    daemon.signal("HUP").await?;
    while !daemon.log_from(logged).contains(answer) {
        ensure!(Instant::now() < until, "daemon {} did not log {answer} after SIGHUP", daemon.number);
        sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}
