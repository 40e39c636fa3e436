//! This machine's clock.

use std::time::SystemTime;

use tallyd_core::model::Micros;

/// The time by this machine's clock. Compare it with other machines' clocks only where a difference of minutes does not matter.
pub fn now() -> Micros {
    Micros::from(SystemTime::now())
}
