//! Reads the CPU time of processes from the kernel.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// The kernel counts times in hundredths of a second (USER_HZ) on every architecture that tallyd runs on.
const TICK_US: u64 = 10_000;

/// CPU times at one moment, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Used {
    pub consumer: u64,
    pub mysql: u64,
    pub rabbitmq: u64,
    pub redis: u64,
    /// All processes of the machine, including the consumer, the servers and the benchmark itself.
    pub machine: u64,
    /// The benchmark itself.
    pub bench: u64,
}

impl Used {
    /// Returns the CPU time that was used since `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            consumer: self.consumer.saturating_sub(before.consumer),
            mysql: self.mysql.saturating_sub(before.mysql),
            rabbitmq: self.rabbitmq.saturating_sub(before.rabbitmq),
            redis: self.redis.saturating_sub(before.redis),
            machine: self.machine.saturating_sub(before.machine),
            bench: self.bench.saturating_sub(before.bench),
        }
    }

    /// Returns the CPU time of the consumer and the servers together.
    pub fn together(self) -> u64 {
        self.consumer + self.mysql + self.rabbitmq + self.redis
    }

    /// Returns the CPU time of all other processes. A large value means that these processes disturbed the measurement.
    pub fn others(self) -> u64 {
        self.machine.saturating_sub(self.together() + self.bench)
    }
}

/// The processes whose CPU time a measurement reads.
#[derive(Clone, Copy, Debug)]
pub struct Processes {
    pub mysql: u32,
    pub rabbitmq: u32,
    pub redis: u32,
}

impl Processes {
    /// Finds the servers of the stack by their pid files.
    pub fn of_stack(folder: &Path) -> Result<Self> {
        let pid = |server: &str| -> Result<u32> {
            let path = folder.join(server).join("pid");
            let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            text.trim().parse().with_context(|| format!("read {}", path.display()))
        };
        Ok(Self { mysql: pid("mysql")?, rabbitmq: pid("rabbitmq")?, redis: pid("redis")? })
    }

    /// Returns the CPU times that the servers, the machine and this consumer have used up to now.
    pub fn used(self, consumer: Option<u32>) -> Result<Used> {
        Ok(Used {
            consumer: consumer.map_or(Ok(0), of_tree)?,
            mysql: of_tree(self.mysql)?,
            rabbitmq: of_tree(self.rabbitmq)?,
            redis: of_tree(self.redis)?,
            machine: of_machine()?,
            bench: of_process(std::process::id())?,
        })
    }
}

/// Returns the peak memory of a process, in MiB (VmHWM).
pub fn peak_rss_mib(pid: u32) -> Result<f64> {
    of_status(pid, "VmHWM:")
}

/// Returns the current memory of a process, in MiB (VmRSS).
pub fn rss_mib(pid: u32) -> Result<f64> {
    of_status(pid, "VmRSS:")
}

fn of_status(pid: u32, name: &str) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).context("read the process's status")?;
    let size = status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB"));
    let kib: f64 = size.with_context(|| format!("no {name} in the process's status"))?.trim().parse()?;
    Ok(kib / 1024.0)
}

/// Returns the CPU time of a process and its running children. The kernel adds the CPU time of ended children to their
/// parent.
fn of_tree(pid: u32) -> Result<u64> {
    let mut sum = of_process(pid)?;
    for thread in fs::read_dir(format!("/proc/{pid}/task")).context("read the process's threads")? {
        // A thread or child can end after it was listed and before it is read.
        let Ok(children) = fs::read_to_string(thread?.path().join("children")) else { continue };
        for child in children.split_ascii_whitespace() {
            sum += child.parse().map_or(0, |child| of_tree(child).unwrap_or(0));
        }
    }
    Ok(sum)
}

fn of_process(pid: u32) -> Result<u64> {
    let stat =
        fs::read_to_string(format!("/proc/{pid}/stat")).with_context(|| format!("read the CPU time of {pid}"))?;
    // The process's name, in parentheses, can contain any characters. After the name, the first field is state, the
    // twelfth is utime, and the next three are stime, cutime and cstime.
    let (_, fields) = stat.rsplit_once(')').context("no name in the process's stat")?;
    let ticks = fields.split_ascii_whitespace().skip(11).take(4).map(|field| field.parse::<u64>().unwrap_or(0));
    Ok(ticks.sum::<u64>() * TICK_US)
}

fn of_machine() -> Result<u64> {
    let stat = fs::read_to_string("/proc/stat").context("read the machine's CPU time")?;
    let line = stat.lines().next().context("/proc/stat is empty")?;
    let fields: Vec<u64> = line.split_ascii_whitespace().skip(1).map(|field| field.parse().unwrap_or(0)).collect();
    // The fields are user, nice, system, (idle, iowait,) irq, softirq and steal.
    let busy = fields.iter().enumerate().filter(|(place, _)| matches!(place, 0..=2 | 5..=7)).map(|(_, ticks)| ticks);
    Ok(busy.sum::<u64>() * TICK_US)
}
