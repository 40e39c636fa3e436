//! A daemon's status for a terminal. Problems come first, each with the command that shows more. Tables follow.

mod table;

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use super::Status;
use crate::runtime::progress::spoken;
use crate::runtime::waits::Wait;
use crate::telemetry::{ActiveRun, DaemonState, Job, ReportedOutcome, ServerStatus};
use table::{Cell, Style, Table};

const RECONCILES_SHOWN: usize = 5;

#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    pub status: &'a Status,
    /// True if the text uses a terminal's colours. The words contain the same information as the colours.
    pub colour: bool,
}

impl Display for Status {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Text { status: self, colour: false }.fmt(f)
    }
}

impl Display for Text<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { status, .. } = *self;
        self.write_head(f)?;
        self.write_troubles(f)?;
        writeln!(f)?;
        self.write_events(f)?;
        let tables = [
            status.servers(),
            status.partitions(),
            status.jobs(),
            status.boards(),
            status.reconciles(),
            status.dead_letters(),
            status.waits(),
        ];
        for table in tables.iter().filter(|table| !table.is_empty()) {
            writeln!(f)?;
            table.write(f, self.colour)?;
        }
        Ok(())
    }
}

impl Text<'_> {
    fn write_head(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { status, colour } = *self;
        let state = match status.state {
            DaemonState::Starting => "is starting",
            DaemonState::Running => "is running",
            DaemonState::Draining => "is stopping",
        };
        let (up, megabytes) = (status.ago(status.started_at), status.memory_bytes / 1_000_000);
        let (version, owner) = (printable(&status.version), printable(&status.owner));
        writeln!(f, "tallyd {version} on {owner} {state}, up {up}, {megabytes} MB")?;
        let ready = match (status.ready, status.state) {
            (true, _) => Cell::new("ready: events are written").style(Style::Good),
            (false, DaemonState::Starting) => Cell::new("not ready: the daemon is starting").style(Style::Mild),
            (false, DaemonState::Draining) => {
                Cell::new("not ready: the daemon is stopping and writes the open batches").style(Style::Mild)
            }
            (false, DaemonState::Running) => Cell::new("NOT READY: events are not written").style(Style::Grave),
        };
        writeln!(f, "{}", ready.shown(colour))
    }

    fn write_troubles(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { status, colour } = *self;
        for trouble in &status.troubles {
            let (mark, style) = if trouble.grave { ("!!", Style::Grave) } else { ("! ", Style::Mild) };
            let since = trouble.since.map_or_else(String::new, |since| format!(" (for {})", status.ago(since)));
            let line = Cell::new(format!("{mark} {}{since}", trouble.what)).style(style);
            writeln!(f, "{}", line.shown(colour))?;
            if let Some(command) = &trouble.command {
                writeln!(f, "   {}", printable(command))?;
            }
        }
        Ok(())
    }

    fn write_events(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { status, .. } = *self;
        match &status.rate {
            None => write!(f, "events   rate not known yet")?,
            Some(rate) => {
                write!(f, "events   {:.0} per second", rate.events_s)?;
                if let (Some(half), Some(most)) = (rate.lag_p50_s, rate.lag_p99_s) {
                    write!(f, ", lag {} (p50), {} (p99)", seconds(half), seconds(most))?;
                }
            }
        }
        writeln!(f, ", {} since the start", status.events_committed)?;
        match status.seen.outbox_rows {
            Some(0) => writeln!(f, "outbox   empty: Redis has all counts of the daemon"),
            Some(rows) => writeln!(f, "outbox   {rows} rows are not in Redis yet"),
            None => Ok(()),
        }
    }
}

impl Status {
    fn servers(&self) -> Table {
        let rows = self.seen.servers.iter().map(|ServerStatus { server, up, reason, since, look_s }| {
            [
                Cell::new(server.name()),
                Cell::new(if *up { "up" } else { "DOWN" }).style_if(!up, Style::Grave),
                Cell::new(self.ago(*since)),
                Cell::or(up.then(|| seconds(*look_s)), "-"),
                Cell::or(reason.as_ref(), ""),
            ]
        });
        Table::new(["SERVER", "STATUS", "FOR", "LATENCY", "REASON"], rows)
    }

    fn partitions(&self) -> Table {
        let header = ["PARTITION", "STATUS", "WAITING", "CONSUMERS", "OLDEST UNACKED", "WRITER", "FOR", "EPOCH"];
        let rows = self.partitions.iter().map(|it| {
            let oldest = Some(it.oldest_unacked_s).filter(|oldest| *oldest > 0.0);
            // A released partition has no writer. MySQL does not store when a daemon released a partition.
            let since = it.taken_at.filter(|_| it.owner.is_some());
            [
                match &it.map {
                    Some(map) => Cell::new(format!("map {map}")),
                    None => Cell::new(it.partition),
                },
                Cell::new(it.standing).style_if(!it.standing.is_well(), Style::Grave),
                Cell::or(it.waiting(), "?"),
                Cell::or(it.consumers, "?"),
                Cell::or(oldest.map(seconds), "-"),
                Cell::or(it.owner.as_ref(), "none"),
                Cell::or(since.map(|at| self.ago(at)), "-"),
                Cell::or(it.epoch, "-"),
            ]
        });
        Table::new(header, rows)
    }

    fn jobs(&self) -> Table {
        let rows = self.seen.jobs.iter().map(|Job { job, mode, running, last, last_success_at, next_at }| {
            let now = running.as_ref().map(|run| {
                let progress = run.progress.map_or_else(String::new, |part| format!(", {:.0} %", part * 100.0));
                let waits = run.waits_words.as_ref().map_or_else(String::new, |words| format!(", waits: {words}"));
                let ActiveRun { run, owner, started_at, .. } = run;
                format!("run {run} for {}{progress} on {owner}{waits}", self.ago(*started_at))
            });
            let ended = last.as_ref().map(|last| {
                let took = seconds(between(last.started_at, last.ended_at).as_secs_f64());
                format!("{} {} ago, took {took}", last.outcome, self.ago(last.ended_at))
            });
            let was_done = last.as_ref().is_none_or(|last| last.outcome == ReportedOutcome::Done);
            [
                Cell::new(format!("{job} {mode}")),
                Cell::or(now, "-"),
                Cell::or(ended, "never").style_if(!was_done, Style::Mild),
                Cell::or(last_success_at.map(|at| format!("{} ago", self.ago(at))), "never"),
                Cell::or(next_at.map(|at| format!("in {}", self.until(at))), "no schedule"),
            ]
        });
        Table::new(["JOB", "NOW", "LAST RUN", "LAST SUCCESS", "NEXT RUN"], rows)
    }

    fn boards(&self) -> Table {
        let header = ["BOARD", "PERIOD", "STATUS", "MEMBERS", "ENDS", "LAST ARCHIVED", "NOT ARCHIVED"];
        let rows = self.seen.boards.iter().map(|it| {
            let archived = it.archived.as_ref().map(|(period, rows)| format!("{period}, {rows} rows"));
            [
                Cell::new(&it.board),
                Cell::new(&it.period),
                Cell::new(&it.state).style_if(it.lost.contains(&it.period), Style::Grave),
                Cell::new(it.members),
                Cell::or(it.ends_at.map(|at| format!("in {}", self.until(at))), "never"),
                Cell::or(archived, "-"),
                Cell::new(it.unarchived.join(", ")).style(Style::Mild),
            ]
        });
        Table::new(header, rows)
    }

    fn reconciles(&self) -> Table {
        let rows = self.seen.reconciles.iter().rev().take(RECONCILES_SHOWN).map(|run| {
            [
                Cell::new(&run.mode),
                Cell::new(format!("{} ago", self.ago(run.ended_at))),
                Cell::new(run.outcome).style_if(run.outcome != ReportedOutcome::Done, Style::Mild),
                Cell::new(run.checked),
                Cell::new(run.drifted).style_if(run.drifted > 0, Style::Mild),
                Cell::new(run.repaired),
            ]
        });
        Table::new(["RECONCILE", "ENDED", "OUTCOME", "CHECKED", "DRIFTED", "REPAIRED"], rows)
    }

    fn dead_letters(&self) -> Table {
        let rows = self.seen.dead_letters.iter().flatten().map(|(reason, count)| [Cell::new(reason), Cell::new(count)]);
        Table::new(["OPEN DEAD LETTERS", "COUNT"], rows)
    }

    fn waits(&self) -> Table {
        let rows = self.waits.iter().map(|Wait { what, reason, since, tries }| {
            [Cell::new(what).style(Style::Mild), Cell::new(self.ago(*since)), Cell::new(tries), Cell::new(reason)]
        });
        Table::new(["RETRYING", "FOR", "TRIES", "REASON"], rows)
    }

    fn ago(&self, then: i64) -> String {
        spoken(between(then, self.now))
    }

    fn until(&self, then: i64) -> String {
        spoken(between(self.now, then))
    }
}

fn between(from: i64, until: i64) -> Duration {
    Duration::from_micros(until.saturating_sub(from).max(0).unsigned_abs())
}

fn seconds(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 1.0 => format!("{:.0} ms", seconds * 1e3),
        seconds if seconds < 60.0 => format!("{seconds:.1} s"),
        seconds => spoken(Duration::from_secs_f64(seconds.min(1e12))),
    }
}

/// Replaces control characters, because they could change the terminal's state.
pub fn printable(text: &str) -> String {
    text.chars().map(|character| if character.is_control() { ' ' } else { character }).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status() -> Status {
        serde_json::from_value(json!({
            "version": "1",
            "owner": "host:1",
            "now": 100_000_000,
            "state": "running",
            "troubles": [
                { "grave": true, "what": "mysql is unreachable: no\u{1b}", "since": 0 },
                { "command": "tallyd dead list --open" },
            ],
            "servers": [{ "server": "mysql", "up": false, "reason": "no\u{1b}", "since": 0, "look_s": 0.0 }],
            "partitions": [
                { "standing": "writing", "owner": "host:1", "epoch": 7, "taken_at": 60_000_000, "messages": 3, "held": 4 },
                { "partition": 1, "standing": "elsewhere", "epoch": 2, "taken_at": 60_000_000 },
            ],
            "jobs": [{
                "job": "reconcile", "mode": "full", "next_at": 160_000_000,
                "last": { "outcome": "failed", "ended_at": 90_000_000 },
            }],
            "boards": [{ "board": "likes", "unarchived": ["2026-W46"] }],
            "waits": [{ "what": "writing", "reason": "refused", "since": 40_000_000, "tries": 7 }],
        }))
        .unwrap()
    }

    #[test]
    fn what_is_wrong_comes_first_and_the_rest_is_aligned() {
        let text = status().to_string();
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        let expected = "\
tallyd 1 on host:1 is running, up 1 min 40 s, 0 MB
NOT READY: events are not written
!! mysql is unreachable: no  (for 1 min 40 s)
!
   tallyd dead list --open

events   rate not known yet, 0 since the start

SERVER  STATUS  FOR         LATENCY  REASON
mysql   DOWN    1 min 40 s  -        no

PARTITION  STATUS     WAITING  CONSUMERS  OLDEST UNACKED  WRITER  FOR   EPOCH
        0  writing          7          ?  -               host:1  40 s      7
        1  elsewhere        ?          ?  -               none    -         2

JOB             NOW  LAST RUN                          LAST SUCCESS  NEXT RUN
reconcile full  -    failed 10 s ago, took 1 min 30 s  never         in 1 min 0 s

BOARD  PERIOD  STATUS  MEMBERS  ENDS   LAST ARCHIVED  NOT ARCHIVED
likes                        0  never  -              2026-W46

RETRYING  FOR        TRIES  REASON
writing   1 min 0 s      7  refused";
        assert_eq!(lines.join("\n"), expected);
    }

    #[test]
    fn colours_add_nothing_but_themselves_and_reasons_have_none() {
        let status = status();
        let coloured = Text { status: &status, colour: true }.to_string();
        assert!(coloured.contains("\u{1b}[1;31m!! mysql is unreachable: no  (for 1 min 40 s)\u{1b}[0m"), "{coloured}");
        let plain: String = coloured
            .split('\u{1b}')
            .enumerate()
            .map(|(place, part)| if place == 0 { part } else { part.split_once('m').unwrap().1 })
            .collect();
        assert_eq!(plain, status.to_string());
        assert!(!plain.contains('\u{1b}'));
    }
}
