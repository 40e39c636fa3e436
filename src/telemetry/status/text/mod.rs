//! A daemon's status for people at a terminal: what is wrong comes first, with the command that shows more; then all the rest, in tables.

mod table;

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use super::{Board, Job, Outcome, Partition, Run, ServerStatus, State, Status, Wait};
use crate::runtime::progress::spoken;
use table::{Cell, Style, Table};

const RECONCILES_SHOWN: usize = 5;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Text<'a> {
    pub status: &'a Status,
    /// Whether a terminal's colours say again what the words say.
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
            State::Starting => "starts",
            State::Running => "runs",
            State::Draining => "stops",
        };
        let (up, megabytes) = (status.ago(status.started_at), status.memory_bytes / 1_000_000);
        let (version, owner) = (printable(&status.version), printable(&status.owner));
        writeln!(f, "tallyd {version} on {owner} {state}, up {up}, {megabytes} MB")?;
        let ready = match (status.ready, status.state) {
            (true, _) => Cell::new("ready: events are written").style(Style::Good),
            (false, State::Starting) => Cell::new("not ready: it starts").style(Style::Mild),
            (false, State::Draining) => Cell::new("not ready: it writes what is open, and ends").style(Style::Mild),
            (false, State::Running) => Cell::new("NOT READY: events are not written").style(Style::Grave),
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
            None => write!(f, "events   no rate is known yet")?,
            Some(rate) => {
                write!(f, "events   {:.0} a second", rate.events_s)?;
                if let (Some(half), Some(most)) = (rate.lag_p50_s, rate.lag_p99_s) {
                    write!(f, ", written {} (p50), {} (p99) after they happened", seconds(half), seconds(most))?;
                }
            }
        }
        writeln!(f, ", {} since the start", status.events_committed)?;
        match status.outbox_rows {
            Some(0) => writeln!(f, "outbox   empty: Redis has all that the daemon counts"),
            Some(rows) => writeln!(f, "outbox   {rows} rows are not in Redis yet"),
            None => Ok(()),
        }
    }
}

impl Status {
    fn servers(&self) -> Table {
        let mut table = Table::new(["SERVER", "STANDS", "FOR", "ANSWERS IN", "REASON"]);
        for ServerStatus { server, up, reason, since, look_s } in &self.servers {
            let stands = if *up { Cell::new("up") } else { Cell::new("AWAY").style(Style::Grave) };
            let answers = if *up { seconds(*look_s) } else { "-".to_owned() };
            let reason = reason.as_deref().unwrap_or("");
            table.row([
                Cell::new(server.name()),
                stands,
                Cell::new(self.ago(*since)),
                Cell::new(answers),
                Cell::new(reason),
            ]);
        }
        table
    }

    fn partitions(&self) -> Table {
        let header = ["PARTITION", "STANDS", "QUEUED", "CONSUMERS", "OLDEST UNACKED", "WRITTEN BY", "FOR", "EPOCH"];
        let mut table = Table::new(header);
        for one in &self.partitions {
            let Partition {
                partition, standing, owner, epoch, taken_at, messages, consumers, oldest_unacked_s, ..
            } = one;
            let known =
                |count: &Option<u64>| Cell::new(count.map_or_else(|| "?".to_owned(), |count| count.to_string()));
            let stands =
                Cell::new(standing.to_string()).style(if standing.is_well() { Style::Plain } else { Style::Grave });
            let oldest = if *oldest_unacked_s > 0.0 { seconds(*oldest_unacked_s) } else { "-".to_owned() };
            // Nobody has one that was given back in order: since when, nobody has noted.
            let since = taken_at.filter(|_| owner.is_some()).map_or_else(|| "-".to_owned(), |at| self.ago(at));
            let epoch = epoch.map_or_else(|| "-".to_owned(), |epoch| epoch.to_string());
            let owner = owner.as_deref().unwrap_or("nobody");
            table.row([
                Cell::new(partition.to_string()),
                stands,
                known(messages),
                known(consumers),
                Cell::new(oldest),
                Cell::new(owner),
                Cell::new(since),
                Cell::new(epoch),
            ]);
        }
        table
    }

    fn jobs(&self) -> Table {
        let mut table = Table::new(["JOB", "NOW", "LAST RUN", "LAST DONE", "NEXT RUN"]);
        for Job { job, mode, running, last, last_success_at, next_at } in &self.jobs {
            let now = running.as_ref().map_or_else(
                || "-".to_owned(),
                |run| {
                    let progress = run.progress.map_or_else(String::new, |part| format!(", {:.0} %", part * 100.0));
                    let waits = run.waits_words.as_ref().map_or_else(String::new, |words| format!(", waits: {words}"));
                    let Run { run, owner, started_at, .. } = run;
                    format!("run {run} for {}{progress} on {owner}{waits}", self.ago(*started_at))
                },
            );
            let last = last.as_ref().map_or_else(
                || Cell::new("never"),
                |last| {
                    let took = seconds(between(last.started_at, last.ended_at).as_secs_f64());
                    let said = format!("{} {} ago, took {took}", last.outcome, self.ago(last.ended_at));
                    Cell::new(said).style(if last.outcome == Outcome::Done { Style::Plain } else { Style::Mild })
                },
            );
            let done = last_success_at.map_or_else(|| "never".to_owned(), |at| format!("{} ago", self.ago(at)));
            let next = next_at.map_or_else(|| "no schedule".to_owned(), |at| format!("in {}", self.until(at)));
            table.row([Cell::new(format!("{job} {mode}")), Cell::new(now), last, Cell::new(done), Cell::new(next)]);
        }
        table
    }

    fn boards(&self) -> Table {
        let mut table = Table::new(["BOARD", "PERIOD", "STANDS", "MEMBERS", "ENDS", "LAST ARCHIVED", "NOT ARCHIVED"]);
        for Board { board, period, state, members, ends_at, lost, unarchived, archived, .. } in &self.boards {
            let ends = ends_at.map_or_else(|| "never".to_owned(), |at| format!("in {}", self.until(at)));
            let archived =
                archived.as_ref().map_or_else(|| "-".to_owned(), |(period, rows)| format!("{period}, {rows} rows"));
            table.row([
                Cell::new(board),
                Cell::new(period),
                Cell::new(state).style(if lost.contains(period) { Style::Grave } else { Style::Plain }),
                Cell::new(members.to_string()),
                Cell::new(ends),
                Cell::new(archived),
                Cell::new(unarchived.join(", ")).style(Style::Mild),
            ]);
        }
        table
    }

    fn reconciles(&self) -> Table {
        let mut table = Table::new(["DRIFT", "ENDED", "OUTCOME", "CHECKED", "DRIFTED", "REPAIRED"]);
        for run in self.reconciles.iter().rev().take(RECONCILES_SHOWN) {
            let drifted = if run.drifted > 0 { Style::Mild } else { Style::Plain };
            table.row([
                Cell::new(&run.mode),
                Cell::new(format!("{} ago", self.ago(run.ended_at))),
                Cell::new(run.outcome.to_string()).style(if run.outcome == Outcome::Done {
                    Style::Plain
                } else {
                    Style::Mild
                }),
                Cell::new(run.checked.to_string()),
                Cell::new(run.drifted.to_string()).style(drifted),
                Cell::new(run.repaired.to_string()),
            ]);
        }
        table
    }

    fn dead_letters(&self) -> Table {
        let mut table = Table::new(["OPEN DEAD LETTERS", "COUNT"]);
        for (reason, count) in self.dead_letters.iter().flatten() {
            table.row([Cell::new(reason), Cell::new(count.to_string())]);
        }
        table
    }

    fn waits(&self) -> Table {
        let mut table = Table::new(["FAILS, IS TRIED AGAIN", "FOR", "TRIES", "REASON"]);
        for Wait { what, reason, since, tries } in &self.waits {
            table.row([
                Cell::new(what.to_string()).style(Style::Mild),
                Cell::new(self.ago(*since)),
                Cell::new(tries.to_string()),
                Cell::new(reason),
            ]);
        }
        table
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

/// `3 ms`, `1.2 s`, `4 min 10 s`.
fn seconds(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 1.0 => format!("{:.0} ms", seconds * 1e3),
        seconds if seconds < 60.0 => format!("{seconds:.1} s"),
        seconds => spoken(Duration::from_secs_f64(seconds.min(1e12))),
    }
}

/// Without what could do something to a terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|character| if character.is_control() { ' ' } else { character }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Server;
    use crate::telemetry::status::{Ended, Standing, Trouble};

    fn status() -> Status {
        let second = 1_000_000;
        Status {
            version: "1".to_owned(),
            owner: "host:1".to_owned(),
            now: 100 * second,
            state: State::Running,
            troubles: vec![
                Trouble { grave: true, what: "mysql is away: no\u{1b}".to_owned(), since: Some(0), command: None },
                Trouble { command: Some("tallyd dead list --open".to_owned()), ..Trouble::default() },
            ],
            servers: vec![ServerStatus {
                server: Server::Mysql,
                up: false,
                reason: Some("no\u{1b}".to_owned()),
                since: 0,
                look_s: 0.0,
            }],
            partitions: vec![
                Partition {
                    standing: Standing::Writing,
                    owner: Some("host:1".to_owned()),
                    epoch: Some(7),
                    taken_at: Some(60 * second),
                    messages: Some(3),
                    ..Partition::default()
                },
                Partition {
                    partition: 1,
                    standing: Standing::Elsewhere,
                    epoch: Some(2),
                    taken_at: Some(60 * second),
                    ..Partition::default()
                },
            ],
            jobs: vec![Job {
                job: "reconcile".to_owned(),
                mode: "full".to_owned(),
                last: Some(Ended { outcome: Outcome::Failed, ended_at: 90 * second, ..Ended::default() }),
                next_at: Some(160 * second),
                ..Job::default()
            }],
            boards: vec![Board {
                board: "likes".to_owned(),
                unarchived: vec!["2026-W46".to_owned()],
                ..Board::default()
            }],
            waits: vec![Wait { what: "writing".into(), reason: "refused".to_owned(), since: 40 * second, tries: 7 }],
            ..Status::default()
        }
    }

    #[test]
    fn what_is_wrong_comes_first_and_the_rest_is_aligned() {
        let text = status().to_string();
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        let expected = "\
tallyd 1 on host:1 runs, up 1 min 40 s, 0 MB
NOT READY: events are not written
!! mysql is away: no  (for 1 min 40 s)
!
   tallyd dead list --open

events   no rate is known yet, 0 since the start

SERVER  STANDS  FOR         ANSWERS IN  REASON
mysql   AWAY    1 min 40 s  -           no

PARTITION  STANDS     QUEUED  CONSUMERS  OLDEST UNACKED  WRITTEN BY  FOR   EPOCH
        0  writing         3          ?  -               host:1      40 s      7
        1  elsewhere       ?          ?  -               nobody      -         2

JOB             NOW  LAST RUN                          LAST DONE  NEXT RUN
reconcile full  -    failed 10 s ago, took 1 min 30 s  never      in 1 min 0 s

BOARD  PERIOD  STANDS  MEMBERS  ENDS   LAST ARCHIVED  NOT ARCHIVED
likes                        0  never  -              2026-W46

FAILS, IS TRIED AGAIN  FOR        TRIES  REASON
writing                1 min 0 s      7  refused";
        assert_eq!(lines.join("\n"), expected);
    }

    #[test]
    fn colours_add_nothing_but_themselves_and_reasons_have_none() {
        let status = status();
        let coloured = Text { status: &status, colour: true }.to_string();
        assert!(coloured.contains("\u{1b}[1;31m!! mysql is away: no  (for 1 min 40 s)\u{1b}[0m"), "{coloured}");
        let plain: String = coloured
            .split('\u{1b}')
            .enumerate()
            .map(|(place, part)| if place == 0 { part } else { part.split_once('m').unwrap().1 })
            .collect();
        assert_eq!(plain, status.to_string());
        assert!(!plain.contains('\u{1b}'));
    }
}
