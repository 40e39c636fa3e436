//! Reads the resource usage of this process from Linux. The fields are the same as in Prometheus's own libraries.

use std::fs;

/// The current values. A value that /proc does not have is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Process {
    pub resident_bytes: u64,
    pub cpu_s: f64,
    pub open_fds: u64,
    pub fds_max: u64,
    pub threads: u64,
}

/// Ticks per second in /proc: USER_HZ, which is 100 on every Linux that tallyd runs on (man 5 proc).
const TICKS_S: f64 = 100.0;

impl Process {
    pub fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |text: &str, name: &str, place: usize| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().nth(place)?.parse().ok()
        };
        let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
        Self {
            resident_bytes: field(&status, "VmRSS:", 0).unwrap_or(0) * 1024,
            cpu_s: cpu_s(&fs::read_to_string("/proc/self/stat").unwrap_or_default()).unwrap_or(0.0),
            open_fds: fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count() as u64),
            fds_max: field(&limits, "Max open files", 0).unwrap_or(0),
            threads: field(&status, "Threads:", 0).unwrap_or(0),
        }
    }
}

/// Fields 14 and 15 are utime and stime. The process's name can contain any character, even a space. So the code finds
/// the end of the name, and counts the fields from there.
fn cpu_s(stat: &str) -> Option<f64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let ticks: u64 = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    Some(ticks as f64 / TICKS_S)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_read_behind_whatever_the_process_is_called() {
        let stat = "42 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 150 250 0 0 20";
        assert_eq!(cpu_s(stat), Some(4.0));
        assert_eq!(cpu_s("42 (a"), None);
    }

    #[test]
    fn a_process_has_memory_files_and_threads() {
        let process = Process::now();
        assert!(process.resident_bytes > 1 << 20 && process.open_fds > 2 && process.threads > 0, "{process:?}");
        assert!(process.fds_max >= process.open_fds, "{process:?}");
    }
}
