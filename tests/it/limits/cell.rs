//! A control group with a memory limit. systemd makes the same type of group for `MemoryMax=`. If a process exceeds the
//! limit, the kernel kills it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::Daemon;

/// `folder` is `None` if the user of the tests can't make control groups. In each case the tests also check the highest
/// memory use that the kernel recorded.
pub struct Cell {
    folder: Option<PathBuf>,
    /// True for version 1 of control groups, and false for version 2.
    first: bool,
}

impl Cell {
    pub fn new(name: &str, mib: u64) -> Self {
        let first = Path::new("/sys/fs/cgroup/memory").is_dir();
        let root = if first { "/sys/fs/cgroup/memory" } else { "/sys/fs/cgroup" };
        let folder = Path::new(root).join(format!("tallyd-{name}"));
        let limit = folder.join(if first { "memory.limit_in_bytes" } else { "memory.max" });
        let made = fs::create_dir(&folder).and_then(|()| fs::write(limit, (mib << 20).to_string()));
        if let Err(error) = &made {
            eprintln!("{}: {error}: the test can't set a memory limit in the kernel", folder.display());
            let _ = fs::remove_dir(&folder);
        }
        Self { folder: made.is_ok().then_some(folder), first }
    }

    pub fn holds(&self, daemon: &Daemon) {
        if let Some(folder) = &self.folder {
            fs::write(folder.join("cgroup.procs"), daemon.child.id().to_string()).unwrap();
        }
    }

    pub fn was_never_full(&self) {
        let Some(folder) = &self.folder else { return };
        let (file, name) =
            if self.first { ("memory.oom_control", "oom_kill ") } else { ("memory.events", "oom_kill ") };
        let text = fs::read_to_string(folder.join(file)).unwrap();
        assert!(text.lines().any(|line| line == format!("{name}0")), "{text}");
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            let _ = fs::remove_dir(folder);
        }
    }
}
