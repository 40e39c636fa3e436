//! SIGHUP: reads the configuration again from the same file. A valid configuration is applied. Otherwise the old
//! configuration stays in force.
//!
//! A: the new configuration is in force. B: `reloaded` is logged. C: a producer publishes an event of a new metric. The
//! daemon judges every event that it receives after C by the new configuration, and those before A by the old one.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use tokio::signal::unix::Signal;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::startup;
use tallyd_base::config::{self, Config, ConfigError, Reload};
use tallyd_base::runtime::{log, systemd};
use tallyd_base::servers::code_registry;
use tallyd_base::telemetry::telemetry;
use tallyd_mysql::Store;

pub(super) struct Reloader {
    pub path: PathBuf,
    pub sender: watch::Sender<Arc<Config>>,
    pub store: Store,
    pub hangups: Signal,
}

impl Reloader {
    pub(super) async fn run(mut self, stop: CancellationToken) {
        while let Some(Some(())) = stop.run_until_cancelled(self.hangups.recv()).await {
            systemd::reloading();
            if let Err(error) = self.reload().await {
                let problems = match error.downcast::<ConfigError>() {
                    Ok(ConfigError(problems)) => problems.join("; "),
                    Err(error) => format!("{error:#}"),
                };
                telemetry().reloaded(Some(problems.clone()));
                warn!(
                    event = "reload-refused",
                    problems, "the reload was rejected, and the previous configuration stays in force: {problems}"
                );
            }
            systemd::ready();
        }
    }

    async fn reload(&self) -> Result<()> {
        // `config::load` blocks its thread while it reads files, and the tasks need theirs.
        let path = self.path.clone();
        let new = tokio::task::spawn_blocking(move || config::load(&path)).await??;
        let now = Arc::clone(&self.sender.borrow());
        let filter = log::filter(&new.log.level).map_err(|error| ConfigError(vec![format!("[log] {error:#}")]))?;
        let Reload { config, changed, needs_restart } = now.reloaded(new)?;
        if [&config.kinds.0, &config.metrics.0] != [&now.kinds.0, &now.metrics.0] {
            let noted = code_registry::agree(&self.store, &config).await;
            startup::log_changes(&noted.map_err(|error| match error.is::<ConfigError>() {
                true => error,
                false => anyhow!("the meaning of codes could not be read from MySQL: {error:#}"),
            })?);
        }
        log::change(filter);
        // Succeeds even if no task listens for changes. Tasks read the configuration when they need it.
        self.sender.send_replace(Arc::new(config));
        if !needs_restart.is_empty() {
            let keys = needs_restart.join(", ");
            warn!(event = "reload-needs-restart", keys, "these keys take effect at the next start: {keys}");
        }
        let keys = if changed.is_empty() { "nothing".to_owned() } else { changed.join(", ") };
        let later = match needs_restart.is_empty() {
            true => String::new(),
            false => format!("; at the next start: {}", needs_restart.join(", ")),
        };
        telemetry().reloaded(None);
        info!(event = "reloaded", changed = keys, "the configuration was reloaded, changed: {keys}{later}");
        Ok(())
    }
}
