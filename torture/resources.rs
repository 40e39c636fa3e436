//! Measures the daemons' memory, open files and threads.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::history::{Micros, now};
use crate::site::Site;

const LOOK_EVERY: Duration = Duration::from_secs(5);

/// One measurement of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    pub at: Micros,
    pub pid: u32,
    pub rss_kib: u64,
    pub files: u64,
    pub threads: u64,
}

pub struct Resources {
    looks: Arc<Mutex<Vec<Look>>>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Resources {
    pub fn start(site: Arc<Site>) -> Self {
        let (looks, stop) = (Arc::new(Mutex::new(Vec::new())), CancellationToken::new());
        let task = tokio::spawn(watch(site, Arc::clone(&looks), stop.clone()));
        Self { looks, stop, task }
    }

    pub async fn end(self) -> Vec<Look> {
        self.stop.cancel();
        let _ = self.task.await;
        let mut looks = self.looks.lock().unwrap();
        std::mem::take(&mut *looks)
    }
}

async fn watch(site: Arc<Site>, looks: Arc<Mutex<Vec<Look>>>, stop: CancellationToken) {
    while !stop.is_cancelled() {
        let seen: Vec<Look> = site.pids().into_iter().filter_map(look).collect();
        looks.lock().unwrap().extend(seen);
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            () = stop.cancelled() => {}
        }
    }
}

/// Measures a process. Returns `None` if the process has ended.
fn look(pid: u32) -> Option<Look> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    };
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64;
    Some(Look { at: now(), pid, rss_kib: field("VmRSS:")?, files, threads: field("Threads:")? })
}

/// Returns three values of each resource: the median in the first quarter of the run, the median in the last quarter,
/// and the maximum.
pub fn summary(looks: &[Look]) -> Value {
    let (Some(first), Some(last)) = (looks.first(), looks.last()) else { return Value::Null };
    let quarter = (last.at - first.at) / 4;
    let of = |number: fn(&Look) -> u64| {
        let early = median(looks.iter().filter(|look| look.at <= first.at + quarter).map(number));
        let late = median(looks.iter().filter(|look| look.at >= last.at - quarter).map(number));
        json!({ "first_quarter": early, "last_quarter": late, "most": looks.iter().map(number).max() })
    };
    json!({ "rss_kib": of(|look| look.rss_kib), "files": of(|look| look.files), "threads": of(|look| look.threads) })
}

fn median(numbers: impl Iterator<Item = u64>) -> u64 {
    let mut numbers: Vec<u64> = numbers.collect();
    numbers.sort_unstable();
    numbers.get(numbers.len() / 2).copied().unwrap_or(0)
}
