//! This machine's clock.

use std::time::SystemTime;

use tallyd_core::model::Micros;

/// Compare it with another machine's time only if an error of minutes does not matter.
pub fn now() -> Micros {
    Micros::from(SystemTime::now())
}
