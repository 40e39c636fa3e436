//! Lists a daemon's problems, the worst first, for the page, the command and the JSON. Pure: the list depends on the
//! status only.

use serde::{Deserialize, Serialize};

use super::readiness::NotReady;
use super::runbook::Runbook;
use super::{Partition, Status};
use crate::runtime::progress::counted;
use crate::telemetry::{Board, ConsumerState, DaemonState, Job, ReportedOutcome, Server};

/// If a message waits longer than this time for its commit, this is a problem. A batch takes less than a second. An
/// unreachable MySQL is a separate problem.
const UNACKED_MAX_S: f64 = 60.0;

/// If dead letters use this share of a partition's quota or more, this is a problem. The alert has the same threshold.
const NEARLY_FULL: f64 = 0.8;

/// The data from the servers is old after this many microseconds. Servers are checked every five seconds, and a check
/// can take four seconds.
const LOOK_MAX: i64 = 30_000_000;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trouble {
    /// True if the problem is grave: events are not written, or data may be lost. Other problems can wait until the
    /// morning.
    pub grave: bool,
    pub what: String,
    pub since: Option<i64>,
    pub command: Option<String>,
    pub runbook: Option<String>,
}

impl Trouble {
    fn grave(what: String, since: Option<i64>) -> Self {
        Self { grave: true, what, since, ..Self::default() }
    }

    fn mild(what: String, since: Option<i64>) -> Self {
        Self { grave: false, what, since, ..Self::default() }
    }

    fn with(self, command: String) -> Self {
        Self { command: Some(command), ..self }
    }

    fn see(self, runbook: Runbook) -> Self {
        Self { runbook: Some(runbook.url()), ..self }
    }
}

pub(super) fn troubles(status: &Status, not_ready: &[NotReady<'_>]) -> Vec<Trouble> {
    let mut found = of_readiness(status.state, not_ready);
    found.extend(status.seen.servers.iter().filter(|server| !server.up && server.server == Server::Redis).map(
        |redis| {
            let what = format!("redis is unreachable: {}. Events are written without it", redis.why());
            Trouble::grave(what, Some(redis.since)).see(Runbook::ServerDown)
        },
    ));
    if status.seen.servers.iter().all(|server| server.up || server.server == Server::Redis) {
        // An unreachable server is the reason for most failing operations. So the operations are listed only if all
        // servers except Redis are reachable.
        let waits = status.waits.iter().map(|wait| {
            Trouble::mild(format!("{} fails and is retried: {}", wait.what, wait.reason), Some(wait.since))
                .see(Runbook::OutageGoesOn)
        });
        found.extend(waits);
    }
    found.extend(
        status
            .orders
            .iter()
            .map(|order| Trouble::mild(order.to_string(), Some(order.since.0)).with(order.undo()).see(Runbook::Paused)),
    );
    found.extend(went_back(status));
    found.extend(status.seen.boards.iter().flat_map(|board| of_board(board, status.now)));
    found.extend(status.seen.jobs.iter().filter_map(of_job));
    found.extend(too_few(status));
    found.extend(abandoned(status));
    found.extend(abandoned_maps(status));
    found.extend(of_messages(status));
    if let Some((at, wrong)) = &status.reload_refused {
        let what = format!("the last reload was rejected, and the previous configuration stays in force: {wrong}");
        found.push(Trouble::mild(what, Some(*at)).with("tallyd config check".to_owned()).see(Runbook::ReloadRefused));
    }
    if let Some((since, how)) = &status.site_differs {
        let what = format!("this daemon's settings differ from the site card, which clients read: {how}");
        found.push(Trouble::mild(what, Some(*since)).with("tallyd config show".to_owned()).see(Runbook::SiteDiffers));
    }
    if let Some(at) = status.seen.at.filter(|at| status.now - at > LOOK_MAX) {
        found.push(
            Trouble::mild("the servers have not been checked recently, so their data is old".to_owned(), Some(at))
                .see(Runbook::ServerSlow),
        );
    }
    found.sort_by_key(|trouble| !trouble.grave);
    found
}

/// While a daemon starts or stops, the only possible problem is an unreachable server.
fn of_readiness(state: DaemonState, not_ready: &[NotReady<'_>]) -> Vec<Trouble> {
    // Runbook::NotReady says that MySQL and RabbitMQ answer.
    let is_away = not_ready.iter().any(|reason| matches!(reason, NotReady::Away(_)));
    let runbook = if is_away { Runbook::ServerDown } else { Runbook::NotReady };
    let trouble = |reason: &NotReady<'_>| match reason {
        NotReady::Away(server) => Some(Trouble::grave(reason.to_string(), Some(server.since)).see(Runbook::ServerDown)),
        _ => (state == DaemonState::Running).then(|| Trouble::grave(reason.to_string(), None).see(runbook)),
    };
    not_ready.iter().filter_map(trouble).collect()
}

fn of_board(board: &Board, now: i64) -> Vec<Trouble> {
    let mut found = Vec::new();
    let label = &board.board;
    for period in &board.lost {
        let name = label.split('/').next().unwrap_or(label);
        let lost = Trouble::grave(format!("board {label}: Redis has lost {period}"), None);
        found.push(lost.with(format!("tallyd board restore {name} {period} --dry-run")).see(Runbook::BoardLost));
    }
    if !board.unarchived.is_empty() {
        let what = format!("board {label}: closed periods are not archived: {}", board.unarchived.join(", "));
        let since = board.oldest_unarchived_at.filter(|at| *at < now);
        found
            .push(Trouble::mild(what, since).with("tallyd archive --dry-run".to_owned()).see(Runbook::BoardUnarchived));
    }
    found
}

/// Reports that MySQL went back to an older state. The report ends when a later full reconcile has succeeded.
fn went_back(status: &Status) -> Option<Trouble> {
    let at = status.mysql_went_back_at?;
    let is_since = |job: &&Job| {
        let last = job.last.as_ref().filter(|last| last.outcome == ReportedOutcome::Done && last.started_at > at);
        (job.job.as_str(), job.mode.as_str()) == ("reconcile", "full") && last.is_some()
    };
    if status.seen.jobs.iter().any(|job| is_since(&job)) {
        return None;
    }
    let what =
        "MySQL went back to an older state and lacks counts that Redis has: the counters differ until a full reconcile";
    Some(
        Trouble::mild(what.to_owned(), Some(at))
            .with("tallyd admin after-restore".to_owned())
            .see(Runbook::RestoredMysql),
    )
}

/// Reports a failed run, but not while the job runs again, because the new run can succeed.
fn of_job(job: &Job) -> Option<Trouble> {
    let last = job.last.as_ref().filter(|_| job.running.is_none())?;
    let (what, runbook) = match last.outcome {
        ReportedOutcome::Done | ReportedOutcome::Stopped => return None,
        ReportedOutcome::Braked => ("was aborted by its safety limits", Runbook::Brake),
        ReportedOutcome::Refused => ("needs an operator", Runbook::JobFailed),
        ReportedOutcome::Failed => ("failed", Runbook::JobFailed),
    };
    let why = last.reason.as_deref().map_or_else(String::new, |reason| format!(": {reason}"));
    Some(Trouble::mild(format!("the last {} {} {what}{why}", job.job, job.mode), Some(last.ended_at)).see(runbook))
}

fn elsewhere(status: &Status) -> impl Iterator<Item = &Partition> {
    status.partitions.iter().filter(|it| it.standing == ConsumerState::Elsewhere)
}

/// Reports that other daemons have more partitions. Either a deployment has not finished, or it did not include this
/// daemon.
fn too_few(status: &Status) -> Option<Trouble> {
    let missing: Vec<u16> = elsewhere(status).filter(|it| it.map.is_none()).map(|it| it.partition).collect();
    let in_use = status.seen.partitions_in_use.filter(|_| !missing.is_empty())?;
    let known = usize::from(in_use).saturating_sub(missing.len());
    let what = format!(
        "[amqp] partitions is {known} here, but {in_use} partitions are in use: this daemon does not write the other partitions or run jobs that wait for all partitions"
    );
    Some(Trouble::mild(what, None).with("tallyd config check".to_owned()).see(Runbook::MorePartitions))
}

/// Reports queues without a consumer that are not in this daemon's configuration. Their messages stay in the queue.
fn abandoned(status: &Status) -> Option<Trouble> {
    let nobody: Vec<String> = elsewhere(status)
        .filter(|it| it.map.is_none() && it.consumers == Some(0))
        .map(|it| it.partition.to_string())
        .collect();
    (!nobody.is_empty()).then(|| {
        let what = format!(
            "no daemon consumes the queues of partitions {}: their events wait until a daemon with a larger [amqp] partitions runs",
            nobody.join(", ")
        );
        Trouble::grave(what, None).with("tallyd config check".to_owned()).see(Runbook::PartitionWithoutConsumer)
    })
}

fn abandoned_maps(status: &Status) -> impl Iterator<Item = Trouble> {
    elsewhere(status).filter(|it| it.consumers == Some(0)).filter_map(|it| {
        let map = it.map.as_ref()?;
        let what = format!(
            "no daemon consumes {}, the queue of the map {map}: its events wait until a daemon has this [[map]] again, or the map is removed",
            it.queue
        );
        let trouble = Trouble::grave(what, None).with(format!("tallyd admin map remove {map} --dry-run"));
        Some(trouble.see(Runbook::PartitionWithoutConsumer))
    })
}

fn of_messages(status: &Status) -> Vec<Trouble> {
    let mut found = Vec::new();
    // If the commit fails, its reason is listed already.
    let is_stuck = |it: &&Partition| it.oldest_unacked_s > UNACKED_MAX_S && it.standing != ConsumerState::Failing;
    for partition in status.partitions.iter().filter(is_stuck) {
        let since = status.now - (partition.oldest_unacked_s * 1e6) as i64;
        found.push(
            Trouble::mild(format!("{}: a message has not been committed yet", partition.name()), Some(since))
                .see(Runbook::PartitionStuck),
        );
    }
    let letters: Vec<String> =
        status.seen.dead_letters.iter().flatten().map(|(reason, count)| format!("{reason} {count}")).collect();
    if !letters.is_empty() {
        let what = format!("dead letters are open (events that could not be applied): {}", letters.join(", "));
        found.push(Trouble::mild(what, None).with("tallyd dead list --open".to_owned()).see(Runbook::DeadLettersOpen));
    }
    if let Some(full) = status.seen.dead_letters_full.filter(|full| *full >= NEARLY_FULL) {
        let percent = (full * 100.0).floor();
        let then = if full < 1.0 { "" } else { ": new dead letters go to the queue of returned messages" };
        let what = format!(
            "dead letters: a partition uses {percent} % of its quota, which is its share of [consumer] dead_letters_max{then}"
        );
        let trouble = if full < 1.0 { Trouble::mild(what, None) } else { Trouble::grave(what, None) };
        found.push(trouble.with("tallyd dead list --summary".to_owned()).see(Runbook::DeadLettersFull));
    }
    if let Some(count) = status.seen.returned.filter(|count| *count > 0) {
        let wait = counted(count, "message waits", "messages wait");
        let what = format!(
            "{wait} in the queue of returned messages: dead-lettered by the broker, or left there by a full dead-letter quota"
        );
        found.push(Trouble::mild(what, None).with("tallyd dead list".to_owned()).see(Runbook::Returned));
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::health::readiness::not_ready;

    fn all(status: Value) -> Vec<Trouble> {
        let status: Status = serde_json::from_value(status).unwrap();
        let found = troubles(&status, &not_ready(&status));
        assert!(found.iter().all(|trouble| trouble.runbook.is_some()), "without a runbook: {found:?}");
        found
    }

    fn sentences(status: Value) -> Vec<String> {
        all(status).into_iter().map(|trouble| trouble.what).collect()
    }

    fn server(server: &str, reason: Option<&str>) -> Value {
        json!({ "server": server, "up": reason.is_none(), "reason": reason, "since": 5, "look_s": 0.0 })
    }

    fn ended(outcome: &str) -> Value {
        let last = json!({ "outcome": outcome, "reason": "refused", "ended_at": 7 });
        json!({ "job": "archive", "mode": "closed", "last": last })
    }

    #[test]
    fn what_is_grave_comes_first() {
        let found = all(json!({
            "now": 100_000_000,
            "state": "running",
            "observed_at": 99_000_000,
            "servers": [server("mysql", Some("gone")), server("redis", Some("full")), server("rabbitmq", None)],
            "waits": [{ "what": "writing partition 0", "since": 99_000_000 }],
            "jobs": [ended("failed"), ended("done")],
            "boards": [{
                "board": "likes/week", "period": "2026-W47", "state": "lost",
                "lost": ["2026-W47"], "unarchived": ["2026-W46"],
            }],
            "dead_letters": { "malformed-json": 2 },
            "dead_letters_full": 0.81,
            "partitions": [{ "oldest_unacked_s": 61.0, "standing": "writing" }],
        }));
        let of = ["mysql", "redis", "board", "board", "archive", "partition", "dead letters", "dead letters"];
        assert!(found.iter().zip(of).all(|(it, of)| it.what.contains(of)) && found.len() == of.len(), "{found:?}");
        let grave: Vec<bool> = found.iter().map(|it| it.grave).collect();
        assert_eq!(grave, [true, true, true, false, false, false, false, false]);
        assert_eq!((found[0].since, found[4].since, found[5].since), (Some(5), Some(7), Some(39_000_000)));
        assert_eq!(found[2].command.as_deref(), Some("tallyd board restore likes 2026-W47 --dry-run"));
    }

    #[test]
    fn beside_a_server_that_is_away_no_runbook_says_that_it_answers() {
        let found = |mysql: Option<&str>| {
            all(json!({
                "state": "running",
                "servers": [server("mysql", mysql)],
                "waits": [{ "what": "writing partition 0", "reason": "refused" }],
                "partitions": [{ "standing": "failing", "oldest_unacked_s": 61.0 }],
            }))
        };
        let runbooks = |found: Vec<Trouble>| found.into_iter().filter_map(|it| it.runbook).collect::<Vec<_>>();
        assert_eq!(runbooks(found(Some("refused"))), [Runbook::ServerDown.url(), Runbook::ServerDown.url()]);
        assert_eq!(runbooks(found(None)), [Runbook::NotReady.url(), Runbook::OutageGoesOn.url()]);
    }

    #[test]
    fn a_daemon_that_knows_of_fewer_partitions_says_so() {
        let (here, elsewhere) = (json!({ "standing": "writing" }), json!({ "standing": "elsewhere" }));
        let of = |partitions: &[&Value]| all(json!({ "partitions": partitions, "partitions_in_use": 3 }));
        let found = of(&[&here, &elsewhere, &elsewhere]);
        assert!(
            found[0].what.starts_with("[amqp] partitions is 1 here, but 3 partitions are in use"),
            "{}",
            found[0].what
        );
        let other = json!({ "standing": "elsewhere", "consumers": 1 });
        let nobodys = json!({ "partition": 2, "standing": "elsewhere", "consumers": 0 });
        let found = of(&[&here, &other, &nobodys]);
        assert!(found[0].grave && found[0].what.contains("partitions 2: their events wait"), "{}", found[0].what);
        assert_eq!(found.len(), 2);
        assert_eq!(of(&[&here]), []);
    }

    #[test]
    fn what_fails_is_told_where_no_server_explains_it() {
        let wait = json!({ "what": "writing partition 0", "reason": "read-only" });
        let found = sentences(json!({ "servers": [server("mysql", None)], "waits": [wait] }));
        assert_eq!(found, ["writing partition 0 fails and is retried: read-only"]);
    }

    #[test]
    fn a_mysql_that_went_back_is_told_until_a_full_reconcile() {
        let after = |mode: &str, started_at: i64, outcome: &str| {
            let last = json!({ "outcome": outcome, "started_at": started_at });
            all(json!({ "mysql_went_back_at": 5, "jobs": [{ "job": "reconcile", "mode": mode, "last": last }] }))
        };
        for found in [after("full", 4, "done"), after("full", 6, "stopped"), after("changed", 6, "done")] {
            assert_eq!(found[0].command.as_deref(), Some("tallyd admin after-restore"), "{found:?}");
        }
        assert_eq!(after("full", 6, "done"), []);
    }

    #[test]
    fn a_daemon_that_starts_or_stops_has_no_trouble_by_that() {
        for state in ["starting", "draining"] {
            assert_eq!(sentences(json!({ "state": state })), Vec::<String>::new());
        }
    }

    #[test]
    fn a_daemon_whose_settings_clients_do_not_read_says_so() {
        let found = all(json!({ "site_differs": [3, "api (card of a:1)"] }));
        let expected = "this daemon's settings differ from the site card, which clients read: api (card of a:1)";
        assert_eq!((found[0].what.as_str(), found[0].since, found.len()), (expected, Some(3), 1));
    }

    #[test]
    fn a_daemon_that_goes_by_what_is_old_says_so() {
        let found = sentences(json!({
            "now": 40_000_000,
            "observed_at": 1,
            "reload_refused": [2, "[kinds] is empty"],
            "jobs": [ended("done")],
        }));
        let expected = [
            "the last reload was rejected, and the previous configuration stays in force: [kinds] is empty",
            "the servers have not been checked recently, so their data is old",
        ];
        assert_eq!(found, expected);
    }
}
