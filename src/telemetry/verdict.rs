//! A reconcile's verdict on a target, for reports and metrics.

use serde::Serialize;

macro_rules! verdicts {
    ($($(#[$about:meta])* $verdict:ident = $word:literal, $why:literal;)+) => {
        /// A report's verdict on one target.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        pub enum Verdict { $($(#[$about])* #[serde(rename = $word)] $verdict),+ }

        impl Verdict {
            /// All verdicts.
            pub const ALL: &'static [Self] = &[$(Self::$verdict),+];

            /// The verdict's name in reports.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$verdict => $word),+ }
            }

            /// The verdict's meaning, for reports.
            pub(crate) fn why(self) -> &'static str {
                match self { $(Self::$verdict => $why),+ }
            }
        }
    };
}

verdicts! {
    /// Redis is right.
    Exact = "exact", "Redis is right";
    /// Redis was wrong at both cuts (instants of comparison), and the difference was added.
    Repaired = "repaired", "Redis was wrong at two cuts, and the difference was added";
    /// In a dry run, Redis is wrong at both cuts.
    Drifted = "drifted", "Redis is wrong at two cuts; a dry run adds nothing";
    /// Redis was wrong at the first cut. At the second cut, Redis was either right, or wrong in the opposite direction.
    Transient = "transient", "the difference was gone or reversed at the second cut: an event was in flight, and nothing was added";
    /// At each cut, it was unknown whether Redis was right.
    Undecided = "undecided", "events arrived so close to each cut that their order is unknown; the next run checks again";
    /// Redis does not have the counter.
    Unknown = "unknown", "Redis has lost the bucket, or the field has no valid counters; a run without --target loads them";
    /// Redis is wrong at both cuts, and was not repaired.
    Left = "left", "Redis is wrong, but the bucket changed meanwhile or the counter would drop below zero: run again";
}
