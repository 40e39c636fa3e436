//! The metrics from the daemon's GET /metrics, in the form that Prometheus stores.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::common::{World, eventually};

/// Maps each metric's name to the metric's labels, and each label to its values.
pub type Metrics = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Prometheus adds these labels to each metric, so the daemon's metrics must not have labels with these names.
pub const ADDED: [&str; 2] = ["job", "instance"];

/// Returns the metrics of a daemon. At this time the daemon has connected to its servers, and every metric has a value.
pub async fn metrics(name: &str) -> Metrics {
    let settings = "[admin]\nlisten = \"127.0.0.1:0\"\n[[board]]\nname = \"likes\"\nperiod = \"week\"\n";
    let world = World::new(name, settings).await.hurried();
    let daemon = world.daemon();
    daemon.logged("\"admin-listening\"").await;
    let log = daemon.log();
    let line = log.lines().find(|line| line.contains("\"admin-listening\"")).unwrap();
    let address = serde_json::from_str::<Value>(line).unwrap()["address"].as_str().unwrap().to_owned();
    // The daemon reads jobs, boards, queues and dead letters after all other states.
    let last = ["tallyd_job_running", "tallyd_board_members", "tallyd_queue_messages", "tallyd_dead_letters_open"];
    let said = || async { read(&ask(&address).await) };
    eventually("the daemon knows all states", || async {
        let said = said().await;
        last.iter().all(|name| said.get(*name).is_some_and(|labels| !labels.is_empty()))
    })
    .await;
    let metrics = with_absent(said().await);
    assert!(daemon.stop().success());
    metrics
}

/// Some gauges have no sample until the first run has ended. Adds the labels of these gauges.
fn with_absent(mut metrics: Metrics) -> Metrics {
    let [jobs, verdicts] = ["tallyd_job_running", "tallyd_reconcile_targets_total"].map(|of| metrics[of].clone());
    let kinds = BTreeMap::from([("kind".to_owned(), BTreeSet::from(["video".to_owned()]))]);
    for (name, labels) in &mut metrics {
        let others = match name.as_str() {
            "tallyd_reconcile_last_run_targets" => &verdicts,
            "tallyd_bucket_fields_max" => &kinds,
            name if name.starts_with("tallyd_job_last_") || name.starts_with("tallyd_job_next_") => &jobs,
            _ => continue,
        };
        for (label, values) in others {
            labels.entry(label.clone()).or_default().extend(values.iter().cloned());
        }
    }
    metrics
}

async fn ask(address: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer.split_once("\r\n\r\n").unwrap().1.to_owned()
}

fn read(text: &str) -> Metrics {
    // A gauge without a sample still has a description.
    let described = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let mut metrics: Metrics = described.map(|name| (name.to_owned(), BTreeMap::new())).collect();
    for sample in text.lines().filter(|line| !line.starts_with('#')) {
        let (of, _) = sample.rsplit_once(' ').unwrap();
        let (name, labels) = of.split_once('{').unwrap_or((of, ""));
        let known = metrics.entry(name.to_owned()).or_default();
        for (label, value) in labels.split("\",").filter_map(|pair| pair.split_once("=\"")) {
            assert!(!ADDED.contains(&label), "{name} has a label that Prometheus adds: {label}");
            known.entry(label.to_owned()).or_default().insert(value.trim_end_matches(['"', '}']).to_owned());
        }
    }
    metrics
}
