//! Runs the daemon as a child and ignores its log.

use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::world::World;

/// Killed when dropped.
pub struct Daemon(Child);

impl Daemon {
    /// Starts the release binary. Variables in `environment` override the configuration file.
    pub fn start(world: &World, environment: &[(&str, &str)]) -> Result<Self> {
        let mut command = Command::new(tallyd_testkit::program());
        command.arg("--config").arg(world.config_path()).arg("run").envs(tallyd_testkit::unit_environment());
        command.envs(environment.iter().copied());
        command.env_remove("RUST_LOG").stdin(Stdio::null()).stderr(Stdio::null());
        Ok(Self(command.spawn().context("start tallyd")?))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    pub fn signal(&self, name: &str) -> Result<()> {
        let sent = Command::new("kill").arg(format!("-{name}")).arg(self.pid().to_string()).status()?;
        ensure!(sent.success(), "kill -{name}");
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
