//! The site card: the settings that clients of a site need. Daemons keep the card as JSON in MySQL and Redis. Pure.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::board;
use crate::kinds::{Kinds, Metrics};
use crate::layout::Form;
use crate::model::{Kind, Metric};
use crate::partition::PartitionBy;
use crate::period::{PeriodKind, WeekStart};
use crate::rules::{Ruled, Rules};
use crate::score::Tie;

pub const VERSION: u32 = 1;

/// The largest number of a card. JavaScript holds integers up to this number exactly.
pub const NUMBER_MAX: u64 = (1 << 53) - 1;

/// The site card. Clients ignore unknown fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Card {
    /// Version of the format. A card of an unknown version is unreadable. New fields don't change the version.
    #[schemars(extend("const" = VERSION))]
    pub version: u32,
    /// Number of the card, which grows with each change. It becomes smaller only if MySQL was restored.
    #[schemars(range(max = NUMBER_MAX))]
    pub number: u64,
    /// Layout from which clients read counters.
    pub layout: Layout,
    /// Second layout, in which the site also counts. Absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Layout")]
    pub also: Option<Layout>,
    /// Kinds of targets, with their codes (1 to 255).
    pub kinds: BTreeMap<String, u8>,
    /// Metrics, with their codes (1 to 255).
    pub metrics: BTreeMap<String, u8>,
    /// Numbers that API servers count in Redis, each as `kind:metric`. The daemon counts all others.
    pub api: Vec<String>,
    /// Leaderboards, one entry for each board and period.
    pub boards: Vec<Board>,
    /// Name of the exchange for events.
    pub exchange: String,
    /// Routing key of likes.
    pub partition_by: PartitionBy,
    /// Number of queues that share the events.
    pub partitions: u16,
    /// Whether clients ask Bloom filters before MySQL.
    pub has_filters: bool,
    /// Numbers for which `set` and `reset` events are accepted, each as `kind:metric`.
    pub settable: Vec<String>,
    /// Numbers that can be negative, each as `kind:metric`.
    pub below_zero: Vec<String>,
    /// Earliest `at` of events, in seconds since 1970.
    pub at_min_s: u64,
    /// Seconds that an event's `at` can be in the future.
    pub future_max_s: u64,
    /// Seconds for which the daemon remembers `count` events. Older events are rejected.
    pub applied_event_keep_s: u64,
}

/// The place of the counters in Redis.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Layout {
    /// Type of key that holds the counters.
    pub form: Form,
    /// Each kind has 2^`bucket_bits` buckets.
    pub bucket_bits: u8,
    /// Key names behind the prefix. Absent if `form` is `packed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub counter_key: Option<String>,
}

/// A leaderboard with periods of one length.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Board {
    /// Name in keys.
    pub name: String,
    /// Metrics of the score. The metric with the value 1 ranks members, and the metric with the value 2 orders members
    /// with equal scores.
    pub score: BTreeMap<String, u8>,
    /// Length of a period.
    pub period: PeriodKind,
    /// Time zone in which days begin: an IANA name.
    pub time_zone: String,
    /// First day of a week.
    pub week_starts: WeekStart,
    /// Order of members with equal scores.
    pub tie: Tie,
    /// Bits of a score for the second metric, if `tie` is `second`.
    pub second_bits: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum CardError {
    #[error("the site card is invalid: {0}")]
    Invalid(#[from] serde_json::Error),
    #[error("the site card has the format version {0}, and this program reads only version {VERSION}")]
    Version(u32),
    #[error("the site card is invalid: {0}")]
    Wrong(String),
}

/// The only field that all versions of the format have in common.
#[derive(Deserialize)]
struct Head {
    version: u32,
}

impl Card {
    pub fn encode(&self) -> String {
        // Maps with text as keys, lists and numbers can always be converted to JSON.
        serde_json::to_string(self).unwrap_or_default()
    }

    pub fn decode(text: &str) -> Result<Self, CardError> {
        match serde_json::from_str(text)? {
            Head { version: VERSION } => Ok(serde_json::from_str(text)?),
            Head { version } => Err(CardError::Version(version)),
        }
    }

    pub fn differences(&self, other: &Self) -> Vec<String> {
        let (mine, theirs) = (self.fields(), other.fields());
        let names: BTreeSet<&String> = mine.keys().chain(theirs.keys()).collect();
        let differs = |name: &&String| *name != "number" && mine.get(*name) != theirs.get(*name);
        names.into_iter().filter(differs).cloned().collect()
    }

    fn fields(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => fields,
            _ => Map::new(),
        }
    }
}

impl Layout {
    /// Creates the layout from the keys in `[redis]`. If `counter_key` is empty, the layout has the default key names.
    pub fn new(form: Form, bucket_bits: u8, counter_key: &str) -> Self {
        let counter_key = match (form, counter_key) {
            (Form::Packed, _) => None,
            (_, "") => Some(form.default_template().to_owned()),
            (_, given) => Some(given.to_owned()),
        };
        Self { form, bucket_bits, counter_key }
    }
}

impl From<&board::Board> for Board {
    fn from(board: &board::Board) -> Self {
        Self {
            name: board.name.clone(),
            score: board.score.iter().cloned().zip(1..).collect(),
            period: board.period,
            time_zone: board.time_zone.clone(),
            week_starts: board.week_starts,
            tie: board.tie,
            second_bits: board.second_bits,
        }
    }
}

pub fn numbers(kinds: &Kinds, metrics: &Metrics, rules: &Rules, has: impl Fn(Ruled) -> bool) -> Vec<String> {
    let pairs = kinds.0.iter().flat_map(|kind| metrics.0.iter().map(move |metric| (kind, metric)));
    let of_rule = pairs.filter(|((_, kind), (_, metric))| has(rules.of(Kind(**kind), Metric(**metric))));
    of_rule.map(|((kind, _), (metric, _))| format!("{kind}:{metric}")).collect()
}

pub fn next_number(number: u64) -> u64 {
    if number < NUMBER_MAX { number + 1 } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Rule;
    use proptest::prelude::*;

    fn layouts() -> impl Strategy<Value = Layout> {
        let form = prop::sample::select(vec![Form::Packed, Form::Entity, Form::String]);
        (form, 0..=28_u8, ".{0,9}").prop_map(|(form, bits, key)| Layout::new(form, bits, &key))
    }

    fn boards() -> impl Strategy<Value = Board> {
        let ties = prop::sample::select(vec![Tie::Member, Tie::Second, Tie::Earliest]);
        (".{0,9}", prop::collection::btree_map("[a-z]{1,9}", 1..=2_u8, 1..3), ties).prop_map(|(name, score, tie)| {
            let (period, week_starts) = (PeriodKind::Week, WeekStart::default());
            Board { name, score, period, time_zone: "UTC".to_owned(), week_starts, tie, second_bits: 20 }
        })
    }

    fn codes() -> impl Strategy<Value = BTreeMap<String, u8>> {
        prop::collection::btree_map("[a-z0-9_-]{1,9}", 1..=255_u8, 0..4)
    }

    fn lists() -> impl Strategy<Value = Vec<String>> {
        prop::collection::vec("[a-z]{1,9}:[a-z]{1,9}", 0..3)
    }

    prop_compose! {
        fn cards()(
            (number, partitions, has_filters) in any::<(u64, u16, bool)>(),
            (at_min_s, future_max_s, applied_event_keep_s) in any::<(u64, u64, u64)>(),
            (layout, also) in (layouts(), prop::option::of(layouts())),
            (kinds, metrics) in (codes(), codes()),
            (api, settable, below_zero) in (lists(), lists(), lists()),
            boards in prop::collection::vec(boards(), 0..3),
            exchange in ".{0,9}",
        ) -> Card {
            Card {
                version: VERSION, number, layout, also, kinds, metrics, api, boards, exchange,
                partition_by: PartitionBy::Target, partitions, has_filters, settable, below_zero,
                at_min_s, future_max_s, applied_event_keep_s,
            }
        }
    }

    proptest! {
        #[test]
        fn a_card_is_read_back_with_fields_of_later_daemons(card in cards()) {
            prop_assert_eq!(&Card::decode(&card.encode()).unwrap(), &card);
            let later = card.encode().replacen('{', r#"{"later":[1],"#, 1);
            prop_assert_eq!(Card::decode(&later).unwrap(), card);
        }

        #[test]
        fn cards_are_compared_field_by_field_without_their_numbers(card in cards(), other in cards()) {
            let numbered = Card { number: other.number, ..card.clone() };
            prop_assert_eq!(card.differences(&numbered).len(), 0);
            prop_assert_eq!(card.differences(&other).is_empty(), numbered == other);
            let more = Card { also: None, partitions: card.partitions ^ 1, ..card.clone() };
            let expected: &[&str] = if card.also.is_some() { &["also", "partitions"] } else { &["partitions"] };
            prop_assert_eq!(card.differences(&more), expected);
        }

        #[test]
        fn any_text_is_read_or_refused(text in ".{0,80}") {
            let _ = Card::decode(&text);
        }
    }

    #[test]
    fn a_card_of_another_version_or_without_a_field_is_refused() {
        assert!(matches!(Card::decode(r#"{"version":2}"#), Err(CardError::Version(2))));
        for text in ["", "{}", "[]", r#"{"version":1}"#, r#"{"version":"1"}"#] {
            assert!(matches!(Card::decode(text), Err(CardError::Invalid(_))), "{text}");
        }
    }

    #[test]
    fn a_card_names_each_number_that_has_a_rule() {
        let (kinds, metrics) = (Kinds(codes_of(["post", "video"])), Metrics(codes_of(["like", "view"])));
        let settable = Rule { kind: Some("video".to_owned()), settable: true, ..Rule::of("view") };
        let rules = Rules::new(&kinds, &metrics, &[settable]);
        assert_eq!(numbers(&kinds, &metrics, &rules, |ruled| ruled.settable), ["video:view"]);
        let all = ["post:like", "post:view", "video:like", "video:view"];
        assert_eq!(numbers(&kinds, &metrics, &rules, |_| true), all);
    }

    fn codes_of(names: [&str; 2]) -> BTreeMap<String, u8> {
        names.into_iter().map(str::to_owned).zip(1..).collect()
    }

    #[test]
    fn numbers_grow_and_begin_again_after_the_largest_number() {
        assert_eq!(NUMBER_MAX, 9_007_199_254_740_991, "JavaScript's Number.MAX_SAFE_INTEGER");
        assert_eq!([0, NUMBER_MAX - 1, NUMBER_MAX, u64::MAX].map(next_number), [1, NUMBER_MAX, 1, 1]);
    }
}
