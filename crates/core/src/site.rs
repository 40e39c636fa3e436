//! A client's view of a site: the settings that a site card contains, in the types of this crate. Pure.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use crate::board::Board;
use crate::card::{Card, CardError};
use crate::day::Day;
use crate::event::Terms;
use crate::keys::KindNames;
use crate::kinds::{Kinds, LIKE, Metrics};
use crate::layout::{BUCKET_BITS_MAX, Form, Layout};
use crate::model::{Kind, Metric, Micros};
use crate::partition::PartitionBy;
use crate::rules::{Ruled, Rules, Writes};
use crate::score::SECOND_BITS_MAX;

#[derive(Clone, Debug)]
pub struct Site {
    /// Whether the settings come from a card. If not, the names of kinds and metrics are not checked.
    pub is_known: bool,
    pub kinds: Kinds,
    pub names: KindNames,
    pub metrics: Metrics,
    pub boards: Vec<Board>,
    pub layout: Layout,
    pub exchange: String,
    pub has_filters: bool,
    pub terms: Terms,
}

impl Default for Site {
    fn default() -> Self {
        let (kinds, metrics) = (Kinds::default(), Metrics::default());
        Self {
            is_known: false,
            names: KindNames::new(&kinds),
            boards: Vec::new(),
            layout: Layout { form: Form::Packed, bucket_bits: 13, template: None },
            exchange: "tally.events".to_owned(),
            has_filters: false,
            terms: Terms {
                is_checked: false,
                kinds: kinds.0.clone(),
                metrics: metrics.0.clone(),
                at_min: Day::first_of(2010).begins(),
                future_max: Duration::MAX,
                applied_event_keep: Duration::MAX,
                rules: Rules::default(),
                partition_by: PartitionBy::User,
            },
            kinds,
            metrics,
        }
    }
}

impl Site {
    pub fn ruled(&self, kind: Kind, metric: Metric) -> Ruled {
        self.terms.rules.of(kind, metric)
    }
}

impl TryFrom<&Card> for Site {
    type Error = CardError;

    fn try_from(card: &Card) -> Result<Self, CardError> {
        let wrong = |problem: &str| CardError::Wrong(problem.to_owned());
        let is_code = |codes: &BTreeMap<String, u8>| codes.values().all(|code| *code > 0);
        if !is_code(&card.kinds) || !is_code(&card.metrics) {
            return Err(wrong("a code is 0"));
        }
        if !card.metrics.contains_key(LIKE) {
            return Err(wrong("the metric like is missing"));
        }
        if card.layout.bucket_bits > BUCKET_BITS_MAX {
            return Err(wrong("bucket_bits is too large"));
        }
        if card.boards.iter().any(|board| !(1..=SECOND_BITS_MAX).contains(&board.second_bits)) {
            return Err(wrong("second_bits of a board is too large"));
        }
        let template = card.layout.counter_key.as_deref().unwrap_or_default();
        let layout = Layout::new(card.layout.form, card.layout.bucket_bits, template)
            .map_err(|error| CardError::Wrong(format!("counter_key {template} {error}")))?;
        let (kinds, metrics) = (Kinds(card.kinds.clone()), Metrics(card.metrics.clone()));
        Ok(Self {
            is_known: true,
            names: KindNames::new(&kinds),
            boards: card.boards.iter().map(Board::from).collect(),
            layout,
            exchange: card.exchange.clone(),
            has_filters: card.has_filters,
            terms: Terms {
                is_checked: true,
                kinds: card.kinds.clone(),
                metrics: card.metrics.clone(),
                at_min: Micros(i64::try_from(card.at_min_s).unwrap_or(i64::MAX).saturating_mul(1_000_000)),
                future_max: Duration::from_secs(card.future_max_s),
                applied_event_keep: Duration::from_secs(card.applied_event_keep_s),
                rules: rules(card, &kinds, &metrics),
                partition_by: card.partition_by,
            },
            kinds,
            metrics,
        })
    }
}

fn rules(card: &Card, kinds: &Kinds, metrics: &Metrics) -> Rules {
    let [api, below_zero, settable] =
        [&card.api, &card.below_zero, &card.settable].map(|numbers| numbers.iter().collect::<HashSet<_>>());
    Rules::of_numbers(kinds, metrics, |name| Ruled {
        writer: if api.contains(name) { Writes::Api } else { Writes::Daemon },
        below_zero: below_zero.contains(name),
        settable: settable.contains(name),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::card::{self, VERSION};

    fn card() -> Card {
        let codes = |names: &[(&str, u8)]| names.iter().map(|(name, code)| ((*name).to_owned(), *code)).collect();
        Card {
            version: VERSION,
            number: 1,
            layout: card::Layout::new(Form::String, 4, "n:{id}:{kind}:{metric}"),
            also: None,
            kinds: codes(&[("article", 3), ("video", 9)]),
            metrics: codes(&[("like", 1), ("view", 2)]),
            api: vec!["article:like".to_owned()],
            boards: Vec::new(),
            exchange: "site.events".to_owned(),
            partition_by: PartitionBy::Target,
            partitions: 4,
            has_filters: true,
            settable: vec!["video:view".to_owned()],
            below_zero: vec!["video:view".to_owned()],
            at_min_s: 1_262_304_000,
            future_max_s: 60,
            applied_event_keep_s: 3_600,
        }
    }

    #[test]
    fn a_site_is_what_its_card_says() {
        let site = Site::try_from(&card()).unwrap();
        assert!(site.is_known && site.has_filters);
        assert_eq!((site.exchange.as_str(), site.layout.to_string().as_str()), ("site.events", "string:4"));
        assert_eq!((site.kinds.named("video"), site.names.get(Kind(3))), (Some(Kind(9)), Some("article")));
        assert_eq!(site.ruled(Kind(3), Metric(1)), Ruled { writer: Writes::Api, ..Ruled::default() });
        let open = Ruled { settable: true, below_zero: true, writer: Writes::Daemon };
        assert_eq!((site.ruled(Kind(9), Metric(2)), site.ruled(Kind(3), Metric(2))), (open, Ruled::default()));
        assert_eq!((site.terms.future_max, site.terms.partition_by), (Duration::from_secs(60), PartitionBy::Target));
    }

    #[test]
    fn a_card_that_no_daemon_writes_is_refused() {
        let changed = |change: fn(&mut Card)| {
            let mut card = card();
            change(&mut card);
            Site::try_from(&card).err().map(|error| error.to_string())
        };
        assert_eq!(changed(|_| {}), None);
        assert_eq!(changed(|card| card.layout.bucket_bits = 28), None);
        fn board(bits: u32) -> card::Board {
            serde_json::from_value(serde_json::json!({
                "name": "hot", "score": { "like": 1 }, "period": "week", "time_zone": "UTC", "week_starts": "monday",
                "tie": "second", "second_bits": bits,
            }))
            .unwrap()
        }
        assert_eq!(changed(|card| card.boards = vec![board(1), board(SECOND_BITS_MAX)]), None);
        for change in [(|card| card.boards = vec![board(0)]) as fn(&mut Card), |card| {
            card.boards = vec![board(1), board(SECOND_BITS_MAX + 1)]
        }] {
            assert!(changed(change).is_some_and(|error| error.contains("second_bits of a board")));
        }
        for change in [
            (|card| card.kinds = [("x".to_owned(), 0)].into()) as fn(&mut Card),
            |card| card.metrics = [("view".to_owned(), 1)].into(),
            |card| card.layout.bucket_bits = 29,
            |card| card.layout.counter_key = Some("n".to_owned()),
        ] {
            assert!(changed(change).is_some_and(|error| error.starts_with("the site card is invalid: ")));
        }
    }
}
