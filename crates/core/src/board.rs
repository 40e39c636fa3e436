//! `[[board]]`: a leaderboard, one zset per period.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use jiff::tz::TimeZoneDatabase;

use crate::card;
use crate::kinds::LIKE;
use crate::pause::Pause;
use crate::period::{Calendar, PeriodKind, WeekStart};
use crate::score::{Packing, Rule, SECOND_BITS_MAX, Tie};

/// A board with periods of one length.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Board {
    /// Name in keys, tables and commands: 1 to 32 of a-z, 0-9, - and _.
    pub name: String,
    /// Length of a period. Each period has its own zset.
    pub period: PeriodKind,
    /// Time zone in which days begin: an IANA name.
    #[serde(default = "utc")]
    pub time_zone: String,
    /// First day of a week.
    #[serde(default)]
    pub week_starts: WeekStart,
    /// Metric that ranks members. `tie = "second"` needs a second metric.
    #[serde(default = "like")]
    pub score: Vec<String>,
    /// Order of equal scores. Don't change this order while Redis has the board.
    #[serde(default)]
    pub tie: Tie,
    /// How many of a score's 53 bits the second metric gets. 20 bits allow a million, and leave eight billion for the
    /// first metric.
    #[serde(default = "twenty")]
    #[schemars(range(min = 1, max = SECOND_BITS_MAX))]
    pub second_bits: u32,
    /// How long the archiver waits for late writes after a period ends.
    #[serde(default = "hour")]
    pub archive_grace: Pause,
    /// Number of top places to archive. 0: all. The other places are lost when Redis deletes the board.
    #[serde(default)]
    pub archive_top: u32,
    /// How long MySQL keeps an archive. 0: forever.
    #[serde(default)]
    pub archive_keep: Pause,
    /// How long an archived board stays in Redis. 0 deletes it immediately.
    #[serde(default = "month")]
    pub expire_after: Pause,
    /// How often an open board is copied to MySQL. 0: never. If Redis loses the board, writes since the last copy are
    /// lost.
    #[serde(default = "hour")]
    pub snapshot_every: Pause,
}

impl Board {
    pub fn calendar(&self, zones: &TimeZoneDatabase) -> Result<Calendar, jiff::Error> {
        Ok(Calendar::new(zones.get(&self.time_zone)?, self.week_starts))
    }

    pub fn rule(&self) -> Rule {
        let low_bits = match self.tie {
            Tie::Member => 0,
            Tie::Second => self.second_bits,
            Tie::Earliest => self.period.time_bits(),
        };
        Rule { tie: self.tie, packing: Packing::new(low_bits) }
    }
}

impl From<&card::Board> for Board {
    fn from(board: &card::Board) -> Self {
        let mut score: Vec<(&String, &u8)> = board.score.iter().collect();
        score.sort_by_key(|(_, place)| **place);
        Self {
            name: board.name.clone(),
            period: board.period,
            time_zone: board.time_zone.clone(),
            week_starts: board.week_starts,
            score: score.into_iter().map(|(name, _)| name.clone()).collect(),
            tie: board.tie,
            second_bits: board.second_bits,
            archive_grace: hour(),
            archive_top: 0,
            archive_keep: Pause::default(),
            expire_after: month(),
            snapshot_every: hour(),
        }
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;

    fn board(more: Value) -> Board {
        let mut all = json!({ "name": "top", "period": "week" });
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(all).unwrap()
    }

    #[test]
    fn a_board_with_only_a_name_ranks_likes_of_weeks_in_utc() {
        let board = board(json!({}));
        assert_eq!((board.time_zone.as_str(), board.score.as_slice()), ("UTC", ["like".to_owned()].as_slice()));
        assert_eq!((board.second_bits, board.archive_top, board.archive_keep.0), (20, 0, Duration::ZERO));
        assert_eq!([board.archive_grace.0, board.snapshot_every.0], [Duration::from_secs(3_600); 2]);
        assert_eq!(board.expire_after.0, Duration::from_secs(30 * 86_400));
    }

    #[test]
    fn the_tie_decides_how_many_low_bits_a_score_has() {
        for (more, tie, bits) in [
            (json!({}), Tie::Member, 0),
            (json!({ "tie": "second", "second_bits": 12 }), Tie::Second, 12),
            (json!({ "tie": "earliest" }), Tie::Earliest, PeriodKind::Week.time_bits()),
        ] {
            assert_eq!(board(more).rule(), Rule { tie, packing: Packing::new(bits) }, "{tie:?}");
        }
    }
}
