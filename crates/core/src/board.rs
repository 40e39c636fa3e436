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
    /// The name in keys, tables and commands.
    pub name: String,
    /// The length of a period. Each period has its own zset.
    pub period: PeriodKind,
    /// The time zone whose midnight begins a day: an IANA name.
    #[serde(default = "utc")]
    pub time_zone: String,
    /// The first day of the week, if `period` is `week`.
    #[serde(default)]
    pub week_starts: WeekStart,
    /// The metrics of the score: one or two names of `[metrics]`. The first one ranks the members.
    #[serde(default = "like")]
    pub score: Vec<String>,
    /// How equal scores are ordered.
    #[serde(default)]
    pub tie: Tie,
    /// The number of bits for the second metric, of a score's 53 bits.
    #[serde(default = "twenty")]
    #[schemars(range(min = 1, max = SECOND_BITS_MAX))]
    pub second_bits: u32,
    /// How long to wait for late writes after a period ends.
    #[serde(default = "hour")]
    pub archive_grace: Pause,
    /// The number of places to archive. 0 archives all.
    #[serde(default)]
    pub archive_top: u32,
    /// How long MySQL keeps an archive. 0 keeps it forever.
    #[serde(default)]
    pub archive_keep: Pause,
    /// How long an archived board stays in Redis.
    #[serde(default = "month")]
    pub expire_after: Pause,
    /// How often a board is copied from Redis to MySQL before it is archived. 0 disables this.
    #[serde(default = "hour")]
    pub snapshot_every: Pause,
}

impl Board {
    /// The board's calendar, with the time zone from `zones`.
    ///
    /// # Errors
    /// Fails if the zone is unknown. A checked configuration has no unknown zone.
    pub fn calendar(&self, zones: &TimeZoneDatabase) -> Result<Calendar, jiff::Error> {
        Ok(Calendar::new(zones.get(&self.time_zone)?, self.week_starts))
    }

    /// The rule for the board's scores.
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
