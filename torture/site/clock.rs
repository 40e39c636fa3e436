//! A clock that a fault steps: the file that `torture/clock.c` adds to the time of day of a server or a daemon.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The library that is preloaded; `dev/torture` builds it.
const LIBRARY: &str = "TALLYD_STACK_CLOCK";

/// What a process reads its clock's file from.
const FILE: &str = "TALLYD_CLOCK";

pub struct Clock(PathBuf);

impl Clock {
    pub fn new(file: PathBuf) -> Self {
        Self(file)
    }

    /// Sets the clock ahead by so many seconds, or back where there are fewer than none. Zero is right.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn step(&self, seconds: i64) -> Result<()> {
        // In place: the process has mapped the file.
        let file = OpenOptions::new().create(true).write(true).truncate(false).open(&self.0);
        let file = file.with_context(|| format!("open {}", self.0.display()))?;
        Ok(file.write_all_at(&(seconds * 1_000_000).to_ne_bytes(), 0)?)
    }

    /// What makes a process read it.
    pub fn environment(&self) -> Vec<(&'static str, PathBuf)> {
        let library = std::env::var_os(LIBRARY).map(|library| ("LD_PRELOAD", PathBuf::from(library)));
        library.into_iter().chain([(FILE, self.file().to_owned())]).collect()
    }

    fn file(&self) -> &Path {
        &self.0
    }
}
