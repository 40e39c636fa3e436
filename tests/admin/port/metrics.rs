//! The metrics for Prometheus.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tallyd_core::event::Reason;

use super::common::{World, eventually};
use super::{ANY, address, get, like, send};

/// Maps each sample's name and labels to the sample's value.
pub fn samples(text: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(of, value)| (of.to_owned(), value.parse().unwrap()))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_label_set_is_there_from_the_start_and_counts_what_happened() {
    let world =
        World::new("metrics", &format!("{ANY}[[board]]\nname = \"likes\"\nperiod = \"week\"\n")).await.hurried();
    let daemon = world.daemon();
    let address = address(&daemon).await;
    let told = || async { samples(&get(&address, "/metrics").await.body) };
    let at_start = told().await;
    for reason in Reason::ALL {
        assert_eq!(at_start.get(&format!("tallyd_dead_letters_total{{reason=\"{}\"}}", reason.code())), Some(&0.0));
    }
    for of in [
        "tallyd_events_received_total{type=\"unlike\"}",
        "tallyd_batches_total{closed=\"stop\"}",
        "tallyd_batch_retries_total{code=\"1213\"}",
        "tallyd_batch_write_duration_seconds_count{step=\"commit\"}",
        "tallyd_config_reloads_total{result=\"refused\"}",
        "tallyd_draining",
        "tallyd_reconcile_targets_total{mode=\"changed\",verdict=\"repaired\"}",
        "tallyd_repairs_total{job_name=\"reconcile\",store=\"redis\",outcome=\"below-zero\"}",
        "tallyd_log_messages_total{level=\"error\"}",
    ] {
        assert_eq!(at_start.get(of), Some(&0.0), "{of}");
    }
    assert_eq!(at_start.get("tallyd_config_last_reload_successful"), Some(&1.0));
    assert!(at_start["tallyd_log_messages_total{level=\"info\"}"] > 0.0, "{at_start:?}");
    assert!(at_start["process_resident_memory_bytes"] > 1e6 && at_start["process_open_fds"] > 3.0, "{at_start:?}");

    let publisher = world.publisher().await;
    let garbage = (like(1, 1).0, b"{".to_vec());
    // The second event is a duplicate of the first event.
    world.publish(&publisher, &[like(42, 1), like(42, 1), garbage]).await;
    eventually("the events are counted", || async {
        let told = told().await;
        told["tallyd_events_committed_total"] == 2.0
            && told["tallyd_dead_letters_total{reason=\"malformed-json\"}"] == 1.0
    })
    .await;
    let now = told().await;
    for (of, value) in [
        ("tallyd_messages_received_total", 3.0),
        ("tallyd_messages_redelivered_total", 0.0),
        ("tallyd_events_received_total{type=\"like\"}", 2.0),
        ("tallyd_dead_letters_total{reason=\"malformed-json\"}", 1.0),
        ("tallyd_event_lag_seconds_count", 2.0),
        ("tallyd_event_lag_seconds_bucket{le=\"+Inf\"}", 2.0),
        ("tallyd_partition_active{partition=\"0\"}", 1.0),
        ("tallyd_partition_takeovers_total{partition=\"0\"}", 1.0),
    ] {
        assert_eq!(now.get(of), Some(&value), "{of}");
    }
    let batches = now["tallyd_batch_events_count"];
    assert!((1.0..=3.0).contains(&batches), "{batches} batches");
    assert_eq!(now["tallyd_batch_write_duration_seconds_count{step=\"commit\"}"], batches);
    eventually("the servers are up", || async {
        let now = told().await;
        let is = |of: &str, value: f64| now.get(of) == Some(&value);
        is("tallyd_ready", 1.0)
            && ["mysql", "redis", "rabbitmq"].iter().all(|it| is(&format!("tallyd_server_up{{server=\"{it}\"}}"), 1.0))
            && is("tallyd_queue_consumers{partition=\"0\"}", 1.0)
            && is("tallyd_dead_letters_open{reason=\"malformed-json\"}", 1.0)
            && is("tallyd_dead_letters_open{reason=\"unknown-kind\"}", 0.0)
            && is("tallyd_board_unarchived_periods{board=\"likes\"}", 0.0)
            && is("tallyd_job_running{job_name=\"reconcile\",mode=\"full\"}", 0.0)
    })
    .await;
    let never = "tallyd_job_last_success_timestamp_seconds{job_name=\"reconcile\",mode=\"changed\"}";
    assert_eq!(told().await.get(never), None, "no run has ended");
    assert!(!get(&address, "/metrics").await.body.contains("\"42\""), "ids must not be labels");
}

#[tokio::test(flavor = "multi_thread")]
async fn prometheus_gets_the_format_that_it_accepts() {
    let world = World::new("metrics_formats", ANY).await.hurried();
    let daemon = world.daemon();
    let address = address(&daemon).await;
    let ask = |accept: &str| {
        let request = format!("GET /metrics HTTP/1.1\r\nHost: localhost\r\n{accept}\r\n");
        let address = address.clone();
        async move { send(&address, &request).await }
    };
    let old = ask("").await;
    assert!(old.head.contains("content-type: text/plain; version=0.0.4"), "{}", old.head);
    assert!(old.body.contains("# TYPE tallyd_events_committed_total counter\n") && !old.body.contains("# EOF"));
    let new = ask("Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n").await;
    assert!(new.head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{}", new.head);
    assert!(new.body.contains("# TYPE tallyd_events_committed counter\n") && new.body.ends_with("# EOF\n"));
    // A partition or a queue can appear between the two requests.
    eventually("both formats have the same samples", || async {
        let (old, new) = (ask("").await, ask("Accept: application/openmetrics-text;version=1.0.0\r\n").await);
        samples(&old.body).keys().eq(samples(&new.body).keys())
    })
    .await;
}

/// Maps each metric's name to the metric's type, meaning, and labels without `le`.
fn described(text: &str) -> BTreeMap<String, (String, String, BTreeSet<String>)> {
    let mut all: BTreeMap<String, (String, String, BTreeSet<String>)> = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|line| line.split_once(' ')) {
            all.entry(name.to_owned()).or_default().1 = help.to_owned();
        } else if let Some((name, of)) = line.strip_prefix("# TYPE ").and_then(|line| line.split_once(' ')) {
            all.entry(name.to_owned()).or_default().0 = of.to_owned();
        } else if let Some((name, labels)) = line.split_once('{') {
            let parts = ["_bucket", "_sum", "_count"].into_iter().filter_map(|part| name.strip_suffix(part));
            let name = parts.chain([name]).find(|name| all.contains_key(*name)).unwrap();
            let labels = labels.split_once('}').unwrap().0.split(',');
            let labels = labels.map(|label| label.split_once('=').unwrap().0.to_owned()).filter(|label| label != "le");
            all.get_mut(name).unwrap().2.extend(labels);
        }
    }
    all
}

/// Returns the page with the type and the help text of each metric as the daemon exports them.
fn with_help(page: &str, told: &BTreeMap<String, (String, String, BTreeSet<String>)>) -> String {
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let (of, help, _) = told.get(cells.get(1)?.trim_matches('`'))?;
        Some(format!("| {} | {of} | {} | {help} |", cells[1], cells[3]))
    };
    page.lines().map(|line| row(line).unwrap_or_else(|| line.to_owned()) + "\n").collect()
}

/// With `TALLYD_UPDATE_SNAPSHOT=1` the test first writes types and help texts into the page.
#[tokio::test(flavor = "multi_thread")]
async fn the_documented_metrics_are_those_that_are_told() {
    let settings = "[reconcile]\nwatch_every = \"1s\"\n[archive]\ncron = \"0 0 1 1 *\"\n\
                    [[board]]\nname = \"likes\"\nperiod = \"week\"\n";
    let world = World::new("metrics_docs", &format!("{ANY}{settings}")).await.hurried();
    let daemon = world.daemon();
    let address = address(&daemon).await;
    let text = || async { get(&address, "/metrics").await.body };
    eventually("the daemon exports all states of its servers", || async {
        let text = text().await;
        let last = [
            "tallyd_board_members{",
            "tallyd_reconcile_last_run_targets{",
            "tallyd_queue_messages{",
            "tallyd_dead_letters_open{",
            "tallyd_returned_messages ",
        ];
        last.iter().all(|name| text.contains(name)) && text.contains("tallyd_outbox_rows ")
    })
    .await;
    let told = described(&text().await);
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operations/metrics.md");
    if std::env::var_os("TALLYD_UPDATE_SNAPSHOT").is_some() {
        std::fs::write(&page, with_help(&std::fs::read_to_string(&page).unwrap(), &told)).unwrap();
    }
    let mut documented = BTreeMap::new();
    for row in std::fs::read_to_string(&page).unwrap().lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let labels = cells[3].split(", ").map(|label| label.trim_matches('`').to_owned()).filter(|it| !it.is_empty());
        let entry = (cells[2].to_owned(), cells[4].to_owned(), labels.collect());
        documented.insert(cells[1].trim_matches('`').to_owned(), entry);
    }
    // This metric has no label yet, because no run has scanned buckets.
    let mut told_too = told.clone();
    told_too.get_mut("tallyd_bucket_fields_max").unwrap().2.insert("kind".to_owned());
    // These metrics have no label yet, because no period has ended.
    for name in ["tallyd_board_oldest_unarchived_timestamp_seconds", "tallyd_board_archived_rows"] {
        told_too.get_mut(name).unwrap().2.insert("board".to_owned());
    }
    let names: BTreeSet<&String> = documented.keys().chain(told_too.keys()).collect();
    let differ = |name: &&&String| documented.get(**name) != told_too.get(**name);
    let wrong: Vec<String> = names
        .iter()
        .filter(differ)
        .map(|name| match (documented.get(*name), told_too.get(*name)) {
            (None, _) => format!("docs/operations/metrics.md lacks {name}"),
            (_, None) => format!("{name} is missing in the daemon's metrics"),
            (documented, told) => format!("{name}: documented {documented:?}, exported {told:?}"),
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for (name, (of, _, _)) in &told {
        assert_eq!(name.ends_with("_total"), of == "counter", "{name} is a {of}");
    }
}
