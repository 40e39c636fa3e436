//! The verdicts of a reconcile on a target, in reports and in metrics.

use serde::Serialize;

macro_rules! verdicts {
    ($($(#[$about:meta])* $verdict:ident = $word:literal, $why:literal;)+) => {
        /// A report's verdict on one target.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        pub enum Verdict { $($(#[$about])* #[serde(rename = $word)] $verdict),+ }

        impl Verdict {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$verdict),+];

            /// Its word in reports.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$verdict => $word),+ }
            }

            /// Its meaning, in words.
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
    Repaired = "repaired", "Redis was off at two cuts, and got the difference added";
    /// Off at two cuts, in a dry run.
    Drifted = "drifted", "Redis is off at two cuts; a dry run adds nothing";
    /// Off at one cut only.
    Transient = "transient", "Redis was off at one cut only: an event was on its way; nothing was added";
    /// No cut could be judged.
    Undecided = "undecided", "events came so close to each cut that their order is unknown; the next run looks again";
    /// The right number is unknown.
    Unknown = "unknown", "Redis has lost its bucket, or its field holds no numbers; a run without --target loads it";
    /// Off at two cuts, and not repaired.
    Left = "left", "Redis is off, but its bucket changed meanwhile or the number would go below zero: run again";
}
