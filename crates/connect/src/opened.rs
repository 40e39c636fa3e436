//! The number of connections that this process has opened.

use std::sync::atomic::{AtomicU64, Ordering};

pub struct Opened {
    pub mysql: Count,
    pub redis: Count,
    pub rabbitmq: Count,
}

pub struct Count(AtomicU64);

impl Count {
    pub fn add_one(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Global, because the metrics show the sum over all pools of the process, whoever has made a pool.
pub static OPENED: Opened =
    Opened { mysql: Count(AtomicU64::new(0)), redis: Count(AtomicU64::new(0)), rabbitmq: Count(AtomicU64::new(0)) };
