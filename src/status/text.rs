//! A daemon's status for people at a terminal.

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use super::{Board, Job, Partition, State, Status};
use crate::runtime::show::spoken;

impl Display for Status {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let up = spoken(between(self.started_at, self.now));
        let state = match self.state {
            State::Starting => "starts",
            State::Running => "runs",
            State::Draining => "stops",
        };
        let megabytes = self.memory_bytes / 1_000_000;
        writeln!(f, "tallyd {} on {} {state}, up {up}, {megabytes} MB", self.version, self.owner)?;
        for reason in &self.not_ready {
            writeln!(f, "NOT READY  {reason}")?;
        }
        self.write_rate(f)?;
        self.write_servers(f)?;
        self.partitions.iter().try_for_each(|partition| write_partition(f, partition))?;
        self.write_queues(f)?;
        self.jobs.iter().try_for_each(|job| self.write_job(f, job))?;
        self.boards.iter().try_for_each(|board| self.write_board(f, board))?;
        if let Some(last) = self.reconciles.last() {
            let (checked, drifted, repaired) = (last.checked, last.drifted, last.repaired);
            let ago = self.ago(last.ended_at);
            writeln!(f, "drift      {drifted} of {checked} counters, {repaired} repaired ({}, {ago} ago)", last.mode)?;
        }
        for wait in &self.waits {
            let (since, reason) = (self.ago(wait.since), printable(&wait.reason));
            writeln!(f, "waiting    {} for {since}, {} tries: {reason}", wait.what, wait.tries)?;
        }
        Ok(())
    }
}

impl Status {
    fn write_rate(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(rate) = &self.rate else { return writeln!(f, "events     no rate is known yet") };
        write!(f, "events     {:.0} a second", rate.events_s)?;
        if let (Some(half), Some(most)) = (rate.lag_p50_s, rate.lag_p99_s) {
            write!(f, ", written {} (p50), {} (p99) after they happened", seconds(half), seconds(most))?;
        }
        writeln!(f, ", {} since the start", self.events_committed)
    }

    fn write_servers(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for server in &self.servers {
            let since = self.ago(server.since);
            let name = &server.server;
            match &server.reason {
                None => writeln!(f, "{name:<10} answers in {}, for {since}", seconds(server.look_s))?,
                Some(reason) => writeln!(f, "{name:<10} AWAY for {since}: {}", printable(reason))?,
            }
        }
        Ok(())
    }

    fn write_queues(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if let Some(rows) = self.outbox_rows.filter(|rows| *rows > 0) {
            writeln!(f, "outbox     {rows} rows are not in Redis yet")?;
        }
        if let Some(returned) = self.returned.filter(|returned| *returned > 0) {
            writeln!(f, "returned   {returned} messages came back too often: tallyd dead list")?;
        }
        let Some(letters) = self.dead_letters.as_ref().filter(|letters| !letters.is_empty()) else { return Ok(()) };
        let letters: Vec<String> = letters.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
        writeln!(f, "dead       {} (open)", printable(&letters.join(", ")))
    }

    fn write_job(&self, f: &mut Formatter<'_>, job: &Job) -> fmt::Result {
        let name = format!("{}/{}", job.job, job.mode);
        write!(f, "job        {name:<20} ")?;
        match (&job.running, &job.last) {
            (Some(run), _) => {
                write!(f, "runs for {} on {}", self.ago(run.started_at), run.owner)?;
                if let Some(progress) = run.progress {
                    write!(f, ", {:.0} %", progress * 100.0)?;
                }
                if let Some(words) = &run.waits_words {
                    write!(f, ", waits: {}", printable(words))?;
                }
            }
            (None, Some(last)) => {
                let took = spoken(between(last.started_at, last.ended_at));
                write!(f, "{} {} ago after {took}", last.outcome, self.ago(last.ended_at))?;
                if let Some(reason) = &last.reason {
                    write!(f, ": {}", printable(reason))?;
                }
            }
            (None, None) => write!(f, "has never run")?,
        }
        match job.next_at {
            Some(next) => writeln!(f, ", next in {}", spoken(between(self.now, next))),
            None => writeln!(f),
        }
    }

    fn write_board(&self, f: &mut Formatter<'_>, board: &Board) -> fmt::Result {
        let Board { board: name, period, state, members, .. } = board;
        write!(f, "board      {name:<20} {period} {state}, {members} members")?;
        if let Some(ends) = board.ends_at {
            write!(f, ", ends in {}", spoken(between(self.now, ends)))?;
        }
        if !board.unarchived.is_empty() {
            write!(f, ", NOT ARCHIVED: {}", board.unarchived.join(", "))?;
        }
        writeln!(f)
    }

    fn ago(&self, then: i64) -> String {
        spoken(between(then, self.now))
    }
}

fn write_partition(f: &mut Formatter<'_>, partition: &Partition) -> fmt::Result {
    let Partition { partition: number, standing, owner, messages, consumers, oldest_unacked_s, .. } = partition;
    let known = |count: &Option<u64>| count.map_or_else(|| "?".to_owned(), |count| count.to_string());
    let (messages, consumers) = (known(messages), known(consumers));
    write!(f, "partition  {number} {standing}, {messages} messages wait, {consumers} consumers")?;
    if *oldest_unacked_s > 1.0 {
        write!(f, ", oldest unacknowledged {}", seconds(*oldest_unacked_s))?;
    }
    match owner {
        Some(owner) => writeln!(f, ", written by {}", printable(owner)),
        None => writeln!(f),
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
fn printable(text: &str) -> String {
    text.chars().map(|character| if character.is_control() { ' ' } else { character }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{Ended, Server, Wait};

    #[test]
    fn what_is_wrong_stands_out() {
        let second = 1_000_000;
        let status = Status {
            version: "1".to_owned(),
            owner: "host:1".to_owned(),
            now: 100 * second,
            state: State::Running,
            not_ready: vec!["mysql is away".to_owned()],
            servers: vec![Server {
                server: "mysql".to_owned(),
                reason: Some("no\u{1b}".to_owned()),
                ..Server::default()
            }],
            partitions: vec![Partition { standing: "writing".to_owned(), messages: Some(3), ..Partition::default() }],
            jobs: vec![Job {
                job: "reconcile".to_owned(),
                mode: "full".to_owned(),
                last: Some(Ended { outcome: "failed".to_owned(), ended_at: 90 * second, ..Ended::default() }),
                next_at: Some(160 * second),
                ..Job::default()
            }],
            boards: vec![Board {
                board: "likes".to_owned(),
                unarchived: vec!["2026-W46".to_owned()],
                ..Board::default()
            }],
            waits: vec![Wait {
                what: "writing".to_owned(),
                reason: "refused".to_owned(),
                since: 40 * second,
                tries: 7,
            }],
            ..Status::default()
        };
        let text = status.to_string();
        for line in [
            "tallyd 1 on host:1 runs, up 1 min 40 s, 0 MB",
            "NOT READY  mysql is away",
            "mysql      AWAY for 1 min 40 s: no ",
            "partition  0 writing, 3 messages wait, ? consumers",
            "job        reconcile/full       failed 10 s ago after 1 min 30 s, next in 1 min 0 s",
            ", NOT ARCHIVED: 2026-W46",
            "waiting    writing for 1 min 0 s, 7 tries: refused",
        ] {
            assert!(text.contains(line), "no {line:?} in\n{text}");
        }
        assert!(!text.contains('\u{1b}'));
    }
}
