//! A reconcile's verdict on a target, for reports and metrics.

use serde::Serialize;

macro_rules! verdicts {
    ($($verdict:ident = $word:literal, $why:literal;)+) => {
        /// A report's verdict on one target.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        pub enum Verdict { $(#[serde(rename = $word)] $verdict),+ }

        impl Verdict {
            pub const ALL: &'static [Self] = &[$(Self::$verdict),+];

            pub fn as_str(self) -> &'static str {
                match self { $(Self::$verdict => $word),+ }
            }

            pub fn why(self) -> &'static str {
                match self { $(Self::$verdict => $why),+ }
            }
        }
    };
}

verdicts! {
    Exact = "exact", "Redis is right";
    Repaired = "repaired", "Redis was wrong at two cuts, and the difference was added";
    Drifted = "drifted", "Redis is wrong at two cuts; a dry run adds nothing";
    Transient = "transient", "the difference was gone or reversed at the second cut: an event was in flight, and nothing was added";
    Undecided = "undecided", "events arrived so close to each cut that their order is unknown; the next run checks again";
    Unknown = "unknown", "Redis has lost the bucket, or the field has no valid counters; a run without --target loads them";
    Left = "left", "Redis is wrong, but the bucket changed meanwhile or the counter would drop below zero: run again";
}
