//! A clock that a fault can change. `torture/clock.c` reads an offset from a file, and adds this offset to the clock of
//! a server or a daemon.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The path of the library that each process preloads. `dev/torture` builds this library.
const LIBRARY: &str = "TALLYD_STACK_CLOCK";

/// The environment variable that contains the path of a process's clock file.
const FILE: &str = "TALLYD_CLOCK";

pub struct Clock(PathBuf);

impl Clock {
    pub fn new(file: PathBuf) -> Self {
        Self(file)
    }

    /// Sets the clock ahead by this many seconds. A negative number sets the clock back, and 0 corrects the clock.
    pub fn step(&self, seconds: i64) -> Result<()> {
        // Overwrites the file in place, because the process has mapped the file into memory.
        let file = OpenOptions::new().create(true).write(true).truncate(false).open(&self.0);
        let file = file.with_context(|| format!("open {}", self.0.display()))?;
        Ok(file.write_all_at(&(seconds * 1_000_000).to_ne_bytes(), 0)?)
    }

    /// Returns the environment variables that make a process use this clock.
    pub fn environment(&self) -> Vec<(&'static str, PathBuf)> {
        let library = std::env::var_os(LIBRARY).map(|library| ("LD_PRELOAD", PathBuf::from(library)));
        library.into_iter().chain([(FILE, self.file().to_owned())]).collect()
    }

    fn file(&self) -> &Path {
        &self.0
    }
}
