//! The label values of this process's metrics. Each enum lists all values of a label, so a sample with another value
//! does not compile. [`Code`] and [`Named`] are for values from a configuration, a server or another crate.

use std::fmt;
use std::hash::Hash;

use prometheus_client::encoding::{EncodeLabel, EncodeLabelSet, LabelSetEncoder};

pub trait Label: Copy + Eq + Hash + EncodeLabelSet + fmt::Debug + Send + Sync + 'static {
    const ALL: &'static [Self];
}

macro_rules! labels {
    ($($(#[$about:meta])* $label:ident, $key:literal { $($value:ident = $word:literal),+ })+) => { $(
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        pub enum $label { $(#[serde(rename = $word)] $value),+ }

        impl $label {
            pub fn name(self) -> &'static str {
                match self { $(Self::$value => $word),+ }
            }
        }

        impl Label for $label {
            const ALL: &'static [Self] = &[$(Self::$value),+];
        }

        impl EncodeLabelSet for $label {
            fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
                ($key, self.name()).encode(encoder.encode_label())
            }
        }
    )+ };
}

labels! {
    EventType, "type" { Like = "like", Unlike = "unlike", Count = "count", Set = "set" }

    Close, "closed" { Size = "size", Linger = "linger", Stop = "stop" }

    /// The steps of writing a batch, in order. In the step `Lend`, the batch waits for a connection to MySQL. In the
    /// step `Lock`, the batch waits for the partition's row.
    Step, "step" {
        Lend = "lend", Lock = "lock", Rows = "rows", Counters = "counters", Commit = "commit", Acknowledge = "acknowledge"
    }

    Reload, "result" { Applied = "applied", Refused = "refused" }

    Server, "server" { Mysql = "mysql", Redis = "redis", Rabbitmq = "rabbitmq" }

    /// Why a run waits. `Fence`: in-flight events must reach MySQL. `Pace`: a server is busy. `Lock`: another process
    /// runs the job.
    WaitsFor, "reason" { Fence = "fence", Pace = "pace", Lock = "lock" }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Code {
    pub key: &'static str,
    pub code: &'static str,
}

impl EncodeLabelSet for Code {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        (self.key, self.code).encode(encoder.encode_label())
    }
}

pub type Named<const N: usize> = [(&'static str, String); N];
