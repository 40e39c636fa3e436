//! The unit in which a site writes its times: of a `[[map]]`, an `[[import]]` and an `[[export]]`. Pure.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::Micros;

/// In which unit an integer counts the time since 1970.
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
    /// How many microseconds it has.
    pub fn micros(self) -> i64 {
        match self {
            Self::S => 1_000_000,
            Self::Ms => 1_000,
            Self::Us => 1,
        }
    }

    /// Whether two events that follow each other can have the same time.
    pub fn is_coarse(self) -> bool {
        self != Self::Us
    }

    /// The last microsecond of the unit that begins then.
    pub(crate) fn end(self, from: Micros) -> Micros {
        // The largest time begins a unit and may end none.
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
