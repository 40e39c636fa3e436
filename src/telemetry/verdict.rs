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
    /// Off at two cuts; the difference was added.
    Repaired = "repaired", "Redis was off at two cuts, and the difference was added";
    /// Off at two cuts, in a dry run.
    Drifted = "drifted", "Redis is off at two cuts; a dry run adds nothing";
    /// Off at one cut only.
    Transient = "transient", "Redis was off at one cut only, because an event was in flight; nothing was added";
    /// No cut could be judged.
    Undecided = "undecided", "events arrived so close to each cut that their order is unknown; the next run checks again";
    /// The right number is unknown.
    Unknown = "unknown", "Redis has lost the bucket, or the field holds no numbers; a run without --target loads it";
    /// Off at two cuts, and not repaired.
    Left = "left", "Redis is off, but the bucket changed meanwhile or the number would drop below zero: run again";
}
