//! This machine's clock.

use std::time::{SystemTime, UNIX_EPOCH};

use tallyd_core::model::Micros;

/// The time by this machine's clock. Only for what is compared with other machines' clocks within minutes.
pub fn now() -> Micros {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Micros(i64::try_from(since_epoch.as_micros()).unwrap_or(Micros::MAX.0))
}
