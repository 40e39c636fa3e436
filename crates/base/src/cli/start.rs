//! How a command starts: its log and its runtime.

use anyhow::{Context, Result};
use tokio::runtime::{Builder, Runtime};

use crate::config::Log;
use crate::runtime::{log, process};

pub fn start_log(log: &Log) -> Result<()> {
    log::start(log::filter(&log.level)?, log.format)
}

pub fn start_runtime() -> Result<Runtime> {
    // Connections to all three servers use this cryptography provider. This call fails only if a test has already
    // installed a provider.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Builder::new_multi_thread()
        .enable_all()
        .thread_stack_size(process::WORKER_BYTES)
        .build()
        .context("start the runtime")
}
