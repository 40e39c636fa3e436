//! What somebody should look at, the worst first. Pure: said once here, for the page, the command and whoever reads the JSON.

use serde::{Deserialize, Serialize};

use super::tell::ELSEWHERE;
use super::{Board, Job, Server, State, Status};

/// A message that waits for its commit longer than this is told: a batch takes no second, and a MySQL that is away is told by itself.
const UNACKED_MAX_S: f64 = 60.0;

/// Of a partition's part of the dead letters; the alert begins there, too.
const NEARLY_FULL: f64 = 0.8;

/// What was seen of the servers is old after so many microseconds: they are looked at every five seconds, and a look may take four.
const LOOK_MAX: i64 = 30_000_000;

/// Something that somebody should look at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trouble {
    /// Events are not written, or something may be lost. Otherwise it can wait for the morning.
    pub grave: bool,
    /// A sentence.
    pub what: String,
    /// Since when, where that is known.
    pub since: Option<i64>,
    /// The command that shows more of it, or mends it.
    pub command: Option<String>,
}

impl Trouble {
    fn grave(what: String, since: Option<i64>) -> Self {
        Self { grave: true, what, since, command: None }
    }

    fn mild(what: String, since: Option<i64>) -> Self {
        Self { grave: false, what, since, command: None }
    }

    fn with(self, command: String) -> Self {
        Self { command: Some(command), ..self }
    }
}

/// All there is, in the order in which it should be looked at.
pub(super) fn troubles(told: &Status) -> Vec<Trouble> {
    let mut found = not_ready(told);
    found.extend(told.servers.iter().filter(|server| is_away(server) && server.server == "redis").map(|redis| {
        let what = format!("redis is away: {}. Events are written without it", why(redis));
        Trouble::grave(what, Some(redis.since))
    }));
    if told.servers.iter().all(|server| server.up || server.server == "redis") {
        // Otherwise the server is the reason of most of them.
        let waits = told.waits.iter().map(|wait| {
            Trouble::mild(format!("{} fails and is tried again: {}", wait.what, wait.reason), Some(wait.since))
        });
        found.extend(waits);
    }
    found.extend(went_back(told));
    found.extend(told.boards.iter().flat_map(|board| of_board(board, told.now)));
    found.extend(told.jobs.iter().filter_map(of_job));
    found.extend(too_few(told));
    found.extend(abandoned(told));
    found.extend(of_messages(told));
    if let Some((at, wrong)) = &told.reload_refused {
        let what = format!("the last reload was refused, the configuration before it is in force: {wrong}");
        found.push(Trouble::mild(what, Some(*at)).with("tallyd check-config".to_owned()));
    }
    if let Some(at) = told.observed_at.filter(|at| told.now - at > LOOK_MAX) {
        found.push(Trouble::mild(
            "the servers were not looked at lately: what is told of them is old".to_owned(),
            Some(at),
        ));
    }
    found.sort_by_key(|trouble| !trouble.grave);
    found
}

/// Its reasons. A start and a stop are no trouble.
fn not_ready(told: &Status) -> Vec<Trouble> {
    let since = |reason: &str| {
        let away = |server: &&Server| is_away(server) && reason.starts_with(&format!("{} is away", server.server));
        told.servers.iter().find(away).map(|server| server.since)
    };
    let is_life = |reason: &&String| told.state == State::Running || since(reason).is_some();
    told.not_ready.iter().filter(is_life).map(|reason| Trouble::grave(reason.clone(), since(reason))).collect()
}

fn is_away(server: &Server) -> bool {
    !server.up
}

fn why(server: &Server) -> &str {
    server.reason.as_deref().unwrap_or("no reason is known")
}

fn of_board(board: &Board, now: i64) -> Vec<Trouble> {
    let mut found = Vec::new();
    let label = &board.board;
    for period in &board.lost {
        let name = label.split('/').next().unwrap_or(label);
        let lost = Trouble::grave(format!("board {label}: Redis has lost {period}"), None);
        found.push(lost.with(format!("tallyd board restore {name} {period} --dry-run")));
    }
    if !board.unarchived.is_empty() {
        let what = format!("board {label}: closed and not archived: {}", board.unarchived.join(", "));
        let since = board.oldest_unarchived_at.filter(|at| *at < now);
        found.push(Trouble::mild(what, since).with("tallyd archive --dry-run".to_owned()));
    }
    found
}

/// Until a full reconcile that began after it is done.
fn went_back(told: &Status) -> Option<Trouble> {
    let at = told.mysql_went_back_at?;
    let is_since = |job: &&Job| {
        let last = job.last.as_ref().filter(|last| last.outcome == "done" && last.started_at > at);
        (job.job.as_str(), job.mode.as_str()) == ("reconcile", "full") && last.is_some()
    };
    if told.jobs.iter().any(|job| is_since(&job)) {
        return None;
    }
    let what = "MySQL went back to an older state, and Redis has counts that it lacks: the numbers differ until a full reconcile";
    Some(Trouble::mild(what.to_owned(), Some(at)).with("tallyd reconcile --full".to_owned()))
}

/// A run that goes on may mend it.
fn of_job(job: &Job) -> Option<Trouble> {
    let last = job
        .last
        .as_ref()
        .filter(|last| !matches!(last.outcome.as_str(), "done" | "stopped") && job.running.is_none())?;
    let what = match last.outcome.as_str() {
        "braked" => "was stopped by its own limits",
        "refused" => "could not be run as it is configured",
        _ => "failed",
    };
    let why = last.reason.as_deref().map_or_else(String::new, |reason| format!(": {reason}"));
    Some(Trouble::mild(format!("the last {} {} {what}{why}", job.job, job.mode), Some(last.ended_at)))
}

/// Other daemons have more partitions: a deployment that is not over, or was forgotten here.
fn too_few(told: &Status) -> Option<Trouble> {
    let missing: Vec<u16> =
        told.partitions.iter().filter(|it| it.standing == ELSEWHERE).map(|it| it.partition).collect();
    let in_use = told.partitions_in_use.filter(|_| !missing.is_empty())?;
    let known = usize::from(in_use).saturating_sub(missing.len());
    let what = format!(
        "[amqp] partitions is {known} here, and {in_use} are in use: this daemon leaves the others, and the jobs that wait for all of them, to other daemons"
    );
    Some(Trouble::mild(what, None).with("tallyd check-config".to_owned()))
}

/// Queues that only other daemons know, and none of them is there: what comes to them stays there.
fn abandoned(told: &Status) -> Option<Trouble> {
    let nobody: Vec<String> = told
        .partitions
        .iter()
        .filter(|it| it.standing == ELSEWHERE && it.consumers == Some(0))
        .map(|it| it.partition.to_string())
        .collect();
    (!nobody.is_empty()).then(|| {
        let what = format!(
            "nobody listens to the queues of partitions {}: their events wait until a daemon runs with the larger [amqp] partitions",
            nobody.join(", ")
        );
        Trouble::grave(what, None).with("tallyd check-config".to_owned())
    })
}

fn of_messages(told: &Status) -> Vec<Trouble> {
    let mut found = Vec::new();
    for partition in told.partitions.iter().filter(|partition| partition.oldest_unacked_s > UNACKED_MAX_S) {
        let since = told.now - (partition.oldest_unacked_s * 1e6) as i64;
        found.push(Trouble::mild(
            format!("partition {}: a message waits for its commit", partition.partition),
            Some(since),
        ));
    }
    let letters: Vec<String> =
        told.dead_letters.iter().flatten().map(|(reason, count)| format!("{reason} {count}")).collect();
    if !letters.is_empty() {
        let what = format!("dead letters are open, events that could not be applied: {}", letters.join(", "));
        found.push(Trouble::mild(what, None).with("tallyd dead list --open".to_owned()));
    }
    if let Some(full) = told.dead_letters_full.filter(|full| *full >= NEARLY_FULL) {
        let percent = (full * 100.0).floor();
        let then = if full < 1.0 { "" } else { ": what comes now goes to the queue of returned messages" };
        let what = format!(
            "dead letters: a partition has {percent} % of those that [consumer] dead_letters_max leaves it{then}"
        );
        let trouble = if full < 1.0 { Trouble::mild(what, None) } else { Trouble::grave(what, None) };
        found.push(trouble.with("tallyd dead list --summary".to_owned()));
    }
    if let Some(count) = told.returned.filter(|count| *count > 0) {
        let what = format!(
            "{count} messages wait in the queue of returned ones: the broker set them aside, or there was no room for them"
        );
        found.push(Trouble::mild(what, None).with("tallyd dead list".to_owned()));
    }
    found
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::telemetry::status::{Ended, Partition, Wait};

    fn server(name: &str, reason: Option<&str>) -> Server {
        Server {
            server: name.to_owned(),
            up: reason.is_none(),
            reason: reason.map(str::to_owned),
            since: 5,
            look_s: 0.0,
        }
    }

    fn ended(outcome: &str) -> Job {
        let last =
            Ended { outcome: outcome.to_owned(), reason: Some("refused".to_owned()), ended_at: 7, ..Ended::default() };
        Job { job: "archive".to_owned(), mode: "closed".to_owned(), last: Some(last), ..Job::default() }
    }

    fn sentences(told: &Status) -> Vec<String> {
        troubles(told).into_iter().map(|trouble| trouble.what).collect()
    }

    #[test]
    fn what_is_grave_comes_first() {
        let told = Status {
            now: 100_000_000,
            state: State::Running,
            observed_at: Some(99_000_000),
            not_ready: vec!["mysql is away: gone".to_owned()],
            servers: vec![server("mysql", Some("gone")), server("redis", Some("full")), server("rabbitmq", None)],
            waits: vec![Wait { what: "writing partition 0".to_owned(), ..Wait::default() }],
            jobs: vec![ended("failed"), ended("done")],
            boards: vec![Board {
                board: "likes/week".to_owned(),
                period: "2026-W47".to_owned(),
                state: "lost".to_owned(),
                lost: vec!["2026-W47".to_owned()],
                unarchived: vec!["2026-W46".to_owned()],
                ..Board::default()
            }],
            dead_letters: Some(BTreeMap::from([("malformed-json".to_owned(), 2)])),
            dead_letters_full: Some(0.81),
            partitions: vec![Partition { oldest_unacked_s: 61.0, ..Partition::default() }],
            ..Status::default()
        };
        let found = troubles(&told);
        let words: Vec<(&str, bool)> = found.iter().map(|it| (it.what.split(':').next().unwrap(), it.grave)).collect();
        let expected = [
            ("mysql is away", true),
            ("redis is away", true),
            ("board likes/week", true),
            ("board likes/week", false),
            ("the last archive closed failed", false),
            ("partition 0", false),
            ("dead letters are open, events that could not be applied", false),
            ("dead letters", false),
        ];
        assert_eq!(words, expected);
        assert_eq!((found[0].since, found[4].since, found[5].since), (Some(5), Some(7), Some(39_000_000)));
        assert_eq!(found[2].command.as_deref(), Some("tallyd board restore likes 2026-W47 --dry-run"));
    }

    #[test]
    fn a_daemon_that_knows_of_fewer_partitions_says_so() {
        let partition = |standing: &str| Partition { standing: standing.to_owned(), ..Partition::default() };
        let mut told = Status {
            partitions: vec![partition("writing"), partition("elsewhere"), partition("elsewhere")],
            partitions_in_use: Some(3),
            ..Status::default()
        };
        let found = troubles(&told);
        assert!(found[0].what.starts_with("[amqp] partitions is 1 here, and 3 are in use"), "{}", found[0].what);
        // Of the last one nobody is there.
        told.partitions[1].consumers = Some(1);
        told.partitions[2] = Partition { partition: 2, consumers: Some(0), ..partition("elsewhere") };
        let found = troubles(&told);
        assert!(found[0].grave && found[0].what.contains("partitions 2: their events wait"), "{}", found[0].what);
        assert_eq!(found.len(), 2);
        told.partitions.truncate(1);
        assert_eq!(troubles(&told), []);
    }

    #[test]
    fn what_fails_is_told_where_no_server_explains_it() {
        let wait = Wait { what: "writing partition 0".to_owned(), reason: "read-only".to_owned(), ..Wait::default() };
        let told = Status { servers: vec![server("mysql", None)], waits: vec![wait], ..Status::default() };
        assert_eq!(sentences(&told), ["writing partition 0 fails and is tried again: read-only"]);
    }

    #[test]
    fn a_mysql_that_went_back_is_told_until_a_full_reconcile() {
        let full = |started_at, outcome: &str| {
            let last = Ended { outcome: outcome.to_owned(), started_at, ..Ended::default() };
            Job { job: "reconcile".to_owned(), mode: "full".to_owned(), last: Some(last), ..Job::default() }
        };
        let told = |job| Status { mysql_went_back_at: Some(5), jobs: vec![job], ..Status::default() };
        for job in [full(4, "done"), full(6, "stopped"), Job { mode: "changed".to_owned(), ..full(6, "done") }] {
            let found = troubles(&told(job));
            assert_eq!(found[0].command.as_deref(), Some("tallyd reconcile --full"), "{found:?}");
        }
        assert_eq!(troubles(&told(full(6, "done"))), []);
    }

    #[test]
    fn a_daemon_that_starts_or_stops_has_no_trouble_by_that() {
        for state in [State::Starting, State::Draining] {
            let told = Status { state, not_ready: vec!["it was told to stop".to_owned()], ..Status::default() };
            assert_eq!(sentences(&told), Vec::<String>::new());
        }
    }

    #[test]
    fn a_daemon_that_goes_by_what_is_old_says_so() {
        let told = Status {
            now: 40_000_000,
            observed_at: Some(1),
            reload_refused: Some((2, "[kinds] is empty".to_owned())),
            jobs: vec![ended("done")],
            ..Status::default()
        };
        let expected = [
            "the last reload was refused, the configuration before it is in force: [kinds] is empty",
            "the servers were not looked at lately: what is told of them is old",
        ];
        assert_eq!(sentences(&told), expected);
    }
}
