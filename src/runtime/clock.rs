//! This machine's clock.

use std::time::SystemTime;

use tallyd_core::model::Micros;

/// Returns the time of this machine's clock. Compare this time with another machine's time only if an error of minutes
/// does not matter.
pub fn now() -> Micros {
    Micros::from(SystemTime::now())
}
