//! This machine's clock.

use std::time::SystemTime;

use tallyd_core::model::Micros;

/// Returns the time of this machine's clock. Compare it with other machines' clocks only if an error of minutes does
/// not matter.
pub fn now() -> Micros {
    Micros::from(SystemTime::now())
}
