//! The unit of a site's times in a `[[map]]`, an `[[import]]` or an `[[export]]`. Pure.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::Micros;

/// The unit of an integer time. The integer is the number of units since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Seconds.
    S,
    /// Milliseconds.
    Ms,
    /// Microseconds.
    Us,
}

impl Unit {
    /// The number of microseconds in the unit.
    pub fn micros(self) -> i64 {
        match self {
            Self::S => 1_000_000,
            Self::Ms => 1_000,
            Self::Us => 1,
        }
    }

    /// Whether the unit is so coarse that two consecutive events can have the same time.
    pub fn is_coarse(self) -> bool {
        self != Self::Us
    }

    /// Returns the last microsecond of the unit that begins at `from`.
    pub(crate) fn end(self, from: Micros) -> Micros {
        // If `from` is near the largest allowed time, the end of its unit would exceed that time.
        Micros(from.0.saturating_add(self.micros() - 1).min(Micros::MAX.0))
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::S => "seconds",
            Self::Ms => "milliseconds",
            Self::Us => "microseconds",
        })
    }
}
