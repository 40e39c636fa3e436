//! Describes the machine on which the measurements run.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};
use serde::Serialize;
use sqlx::MySqlPool;

use super::world::stack;

/// The machine and its servers, for the result file.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub memory_gib: f64,
    pub kernel: String,
    pub mysql: String,
    pub rabbitmq: String,
    /// The machine's load average over one minute, read before the first measurement.
    pub load_before: f64,
}

impl Machine {
    pub async fn look() -> Result<Self> {
        let pool = MySqlPool::connect(&format!("{}mysql", stack("MYSQL_URL")?)).await.context("connect to MySQL")?;
        let mysql: String = sqlx::query_scalar("SELECT VERSION()").fetch_one(&pool).await?;
        pool.close().await;
        let read = |path: &str| fs::read_to_string(path).with_context(|| format!("read {path}"));
        let (cpuinfo, meminfo, load) = (read("/proc/cpuinfo")?, read("/proc/meminfo")?, read("/proc/loadavg")?);
        let after = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).and_then(|line| line.split_once(':'));
            line.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
        };
        let memory_kib: f64 = after(&meminfo, "MemTotal").trim_end_matches(" kB").parse().unwrap_or(0.0);
        Ok(Self {
            cpu: after(&cpuinfo, "model name"),
            cores: cores(),
            memory_gib: (memory_kib / 1024.0 / 1024.0).round(),
            kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            mysql,
            rabbitmq: rabbitmq_version(),
            load_before: load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0),
        })
    }
}

/// Returns the number of cores.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

fn rabbitmq_version() -> String {
    let script = tallyd_testkit::root().join("dev/rabbitmqctl");
    let version = Command::new(script).arg("version").output().ok().filter(|output| output.status.success());
    version.map_or_else(|| "unknown".to_owned(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
