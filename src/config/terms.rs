//! What the configuration says of events and of metrics, in the types that judge them.

use tallyd_core::event::Terms;
use tallyd_core::rules::Rules;

use super::Config;

impl From<&Config> for Rules {
    fn from(config: &Config) -> Self {
        Self::new(&config.kinds, &config.metrics, &config.rules)
    }
}

impl From<&Config> for Terms {
    fn from(config: &Config) -> Self {
        Self {
            kinds: config.kinds.0.clone(),
            metrics: config.metrics.0.clone(),
            future_max: config.consumer.future_max.0,
            applied_event_keep: config.consumer.applied_event_keep.0,
            rules: Rules::from(config),
            partition_by: config.amqp.partition_by,
        }
    }
}
