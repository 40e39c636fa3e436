//! This machine's clock.

use std::time::SystemTime;

use tallyd_core::model::Micros;

/// The time by this machine's clock. Only for what is compared with other machines' clocks within minutes.
pub fn now() -> Micros {
    Micros::from(SystemTime::now())
}
