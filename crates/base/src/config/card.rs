//! The site card of a configuration.

use super::{Config, Ruled, Rules, Writes};
use tallyd_core::card::{self, Board, Card, Layout, VERSION};

impl From<&Config> for Card {
    /// Returns the card with the number 0, which no written card has.
    fn from(config: &Config) -> Self {
        let Config { amqp, redis, consumer, kinds, metrics, .. } = config;
        let rules = Rules::from(config);
        let numbers = |has: fn(Ruled) -> bool| card::numbers(kinds, metrics, &rules, has);
        Self {
            version: VERSION,
            number: 0,
            layout: Layout::new(redis.layout, redis.bucket_bits, &redis.counter_key),
            also: redis.also.as_ref().map(|also| Layout::new(also.layout, also.bucket_bits, &also.counter_key)),
            kinds: kinds.0.clone(),
            metrics: metrics.0.clone(),
            api: numbers(|ruled| ruled.writer == Writes::Api),
            boards: config.boards.iter().map(Board::from).collect(),
            exchange: format!("{}.events", amqp.prefix),
            partition_by: amqp.partition_by,
            partitions: amqp.partitions,
            has_filters: config.filter.asked,
            settable: numbers(|ruled| ruled.settable),
            below_zero: numbers(|ruled| ruled.below_zero),
            at_min_s: consumer.at_min.begins().0.unsigned_abs() / 1_000_000,
            // A client must not refuse what the daemon accepts, so a part of a second counts as a second.
            future_max_s: consumer.future_max.0.as_millis().div_ceil(1_000).try_into().unwrap_or(u64::MAX),
            applied_event_keep_s: consumer.applied_event_keep.0.as_secs(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_card_names_what_clients_need_of_the_configuration() {
        let text = "[kinds]\nvideo = 1\narticle = 2\n[metrics]\nlike = 1\nview = 2\n\
                    [redis]\nlayout = \"string\"\n[redis.also]\nbucket_bits = 16\n[amqp]\npartitions = 4\n\
                    [consumer]\nfuture_max = \"59500ms\"\n[[rule]]\nmetric = \"like\"\nkind = \"article\"\nwriter = \"api\"\n\
                    [[rule]]\nmetric = \"view\"\nsettable = true\nbelow_zero = true\n\
                    [[board]]\nname = \"hot\"\nperiod = \"week\"\nscore = [\"view\", \"like\"]\ntie = \"second\"\n";
        let config = crate::config::parse(text, "test", []).unwrap();
        let card = serde_json::to_value(Card::from(&config)).unwrap();
        let expected = json!({
            "version": 1,
            "number": 0,
            "layout": { "form": "string", "bucket_bits": 13, "counter_key": "counter:{id}:{metric}" },
            "also": { "form": "packed", "bucket_bits": 16 },
            "kinds": { "video": 1, "article": 2 },
            "metrics": { "like": 1, "view": 2 },
            "api": ["article:like"],
            "boards": [{
                "name": "hot", "score": { "view": 1, "like": 2 }, "period": "week", "time_zone": "UTC",
                "week_starts": "monday", "tie": "second", "second_bits": 20,
            }],
            "exchange": "tally.events",
            "partition_by": "user",
            "partitions": 4,
            "has_filters": false,
            "settable": ["article:view", "video:view"],
            "below_zero": ["article:view", "video:view"],
            "at_min_s": 1_262_304_000,
            "future_max_s": 60,
            "applied_event_keep_s": 604_800,
        });
        assert_eq!(card, expected);
    }
}
