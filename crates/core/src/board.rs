//! `[[board]]`: a leaderboard, one zset per period.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use jiff::tz::TimeZoneDatabase;

use crate::kinds::LIKE;
use crate::pause::Pause;
use crate::period::{Calendar, PeriodKind, WeekStart};
use crate::score::{Packing, Rule, SECOND_BITS_MAX, Tie};

/// One board and length of period.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Board {
    /// Its name in keys, tables and commands.
    pub name: String,
    /// How long one zset lasts.
    pub period: PeriodKind,
    /// Where its days begin: an IANA name.
    #[serde(default = "utc")]
    pub time_zone: String,
    /// The day that its weeks begin with, where `period` is `week`.
    #[serde(default)]
    pub week_starts: WeekStart,
    /// What is ranked by, and what is the second number: one or two names of `[metrics]`.
    #[serde(default = "like")]
    pub score: Vec<String>,
    /// What decides between equals.
    #[serde(default)]
    pub tie: Tie,
    /// How many of a score's 53 bits the second number has.
    #[serde(default = "twenty")]
    #[schemars(range(min = 1, max = SECOND_BITS_MAX))]
    pub second_bits: u32,
    /// How long after a period's end late writes are waited for.
    #[serde(default = "hour")]
    pub archive_grace: Pause,
    /// How many places are archived; zero for all.
    #[serde(default)]
    pub archive_top: u32,
    /// How long an archive is kept in MySQL; zero for ever.
    #[serde(default)]
    pub archive_keep: Pause,
    /// How long an archived board stays in Redis.
    #[serde(default = "month")]
    pub expire_after: Pause,
    /// How often what Redis has is copied to MySQL until it is archived; zero for never.
    #[serde(default = "hour")]
    pub snapshot_every: Pause,
}

impl Board {
    /// Where its periods begin, with its zone as of `zones`.
    ///
    /// # Errors
    /// The zone is not known: a checked configuration has none such.
    pub fn calendar(&self, zones: &TimeZoneDatabase) -> Result<Calendar, jiff::Error> {
        Ok(Calendar::new(zones.get(&self.time_zone)?, self.week_starts))
    }

    /// How its scores are made.
    pub fn rule(&self) -> Rule {
        let low_bits = match self.tie {
            Tie::Member => 0,
            Tie::Second => self.second_bits,
            Tie::Earliest => self.period.time_bits(),
        };
        Rule { tie: self.tie, packing: Packing::new(low_bits) }
    }
}

fn utc() -> String {
    "UTC".to_owned()
}

fn like() -> Vec<String> {
    vec![LIKE.to_owned()]
}

fn twenty() -> u32 {
    20
}

fn hour() -> Pause {
    Pause::from_secs(3_600)
}

fn month() -> Pause {
    Pause::from_secs(30 * 86_400)
}
