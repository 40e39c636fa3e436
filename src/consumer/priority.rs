//! Which of several daemons should have a partition. Pure: each computes it for itself, and nobody knows who else is there.
//!
//! With `[amqp] consumer_priority` each daemon listens to every queue with a priority that is made of its own name and the partition's number. The broker, which sees all of
//! them, gives the partition to the highest: rendezvous hashing. So partitions spread over the daemons by chance; one that comes takes
//! from the others only what it keeps, and what one leaves is spread over all that are left.
//!
//! RabbitMQ 4 gives a quorum queue to a consumer of higher priority that comes later, once the former one has acknowledged what it holds. A
//! broker before that, and a classic queue, leave it where it is: there whoever came first has a partition, until it goes.

use sha2::{Digest, Sha256};

/// What a daemon is called: the same after a restart, and another one for each daemon, also of one machine. `owner` is its host and process,
/// `listen` its admin port, of which each on a machine has its own. One without such a port is called by its process, too: it gets
/// other partitions after a restart.
pub fn name(owner: &str, listen: &str) -> String {
    match owner.rsplit_once(':') {
        // Port 0 is any.
        Some((host, _)) if !listen.is_empty() && !listen.ends_with(":0") => format!("{host} {listen}"),
        _ => owner.to_owned(),
    }
}

/// How much that daemon should have the partition, from 1 up: 0 is a consumer that says nothing.
pub fn priority(name: &str, partition: u16) -> i32 {
    // A checksum won't do: with two names it differs by the same bits for every partition, so one of them would win nearly all.
    let digest = Sha256::new().chain_update(name).chain_update([0]).chain_update(partition.to_be_bytes()).finalize();
    let bytes = digest.iter().take(4).fold(0_u32, |bytes, byte| bytes << 8 | u32::from(*byte));
    i32::try_from(bytes >> 1).unwrap_or(i32::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::collection::btree_set;
    use proptest::prelude::*;

    use super::*;

    /// Who has each partition.
    fn holders(names: &[String], partitions: u16) -> Vec<String> {
        let highest = |partition| names.iter().max_by_key(|name| priority(name, partition)).unwrap().clone();
        (0..partitions).map(highest).collect()
    }

    fn names() -> impl Strategy<Value = Vec<String>> {
        btree_set("[a-z]{1,8}[0-9]{0,3}", 2..8).prop_map(|names| names.into_iter().collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn who_leaves_moves_its_own_partitions_alone(names in names(), gone in any::<prop::sample::Index>()) {
            let gone = gone.get(&names).clone();
            let before = holders(&names, 128);
            let left: Vec<String> = names.into_iter().filter(|name| *name != gone).collect();
            for (before, after) in before.into_iter().zip(holders(&left, 128)) {
                prop_assert!(before == gone || before == after);
                prop_assert!(after != gone);
            }
        }

        #[test]
        fn who_comes_takes_partitions_for_itself_alone(names in names(), new in "[A-Z]{1,8}") {
            let before = holders(&names, 128);
            let more: Vec<String> = names.into_iter().chain([new.clone()]).collect();
            for (before, after) in before.into_iter().zip(holders(&more, 128)) {
                prop_assert!(after == new || before == after);
            }
        }

        #[test]
        fn partitions_spread_over_daemons_as_chance_does(names in names()) {
            let mut shares: BTreeMap<String, u32> = BTreeMap::new();
            holders(&names, 1024).into_iter().for_each(|name| *shares.entry(name).or_default() += 1);
            // Six standard deviations.
            let mean = 1024.0 / names.len() as f64;
            let most = 6.0 * (mean * (1.0 - 1.0 / names.len() as f64)).sqrt();
            for name in &names {
                let share = f64::from(shares.get(name).copied().unwrap_or_default());
                prop_assert!((share - mean).abs() < most, "{name} has {share} of {mean}");
            }
        }

        #[test]
        fn a_priority_is_above_that_of_who_says_nothing(name in ".*", partition in any::<u16>()) {
            prop_assert!(priority(&name, partition) > 0);
        }
    }

    #[test]
    fn a_daemon_is_called_the_same_after_a_restart() {
        assert_eq!(name("host:7", "127.0.0.1:9464"), name("host:8", "127.0.0.1:9464"));
        assert_ne!(name("host:7", "127.0.0.1:9464"), name("host:7", "127.0.0.1:9465"));
        assert_ne!(name("host:7", "127.0.0.1:9464"), name("other:7", "127.0.0.1:9464"));
        assert_ne!(name("host:7", ""), name("host:8", ""));
        assert_ne!(name("host:7", "127.0.0.1:0"), name("host:8", "127.0.0.1:0"));
    }
}
