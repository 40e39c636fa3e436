//! Plans when each fault begins. The same seed, time and faults always give the same plan. Pure.
//!
//! Rounds follow each other until the time is over. In each round every fault begins once, in a random order. Some
//! faults begin while another fault lasts, if the two faults hit different servers. Between other faults there is a
//! quiet time, so the recovery can be measured.

use std::time::Duration;

use crate::dice::Dice;

/// The first fault begins after this number of seconds. Before the first fault, users begin to click, and the first
/// reconcile and the first archive run take place.
const LEAD_S: u64 = 15;

/// Shortest and longest time from the end of a fault until the next fault begins, in seconds.
const QUIET_S: (u64, u64) = (3, 9);

/// Beginning and undoing a fault takes about this time, because servers restart.
const OVERHEAD_S: u64 = 3;

/// Percentage of faults that begin while the previous fault lasts.
const OVERLAP_PERCENT: u64 = 30;

/// The plan needs these properties of each fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    pub name: &'static str,
    /// The affected server. Two faults of the same server never overlap.
    pub hits: &'static str,
    /// Shortest and longest duration of the fault, in seconds.
    pub hold: (u64, u64),
    /// True if the fault must not overlap with another fault, because it would be unclear which of the two faults
    /// caused a loss.
    pub is_alone: bool,
}

/// A planned injection of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The earliest time at which the fault can begin, measured from the start of the run.
    pub start: Duration,
    /// The fault's index in the list of items.
    pub item: usize,
    pub hold: Duration,
    /// True if the fault begins while the previous fault lasts.
    pub overlaps: bool,
}

impl Step {
    fn end(&self) -> Duration {
        self.start + self.hold + Duration::from_secs(OVERHEAD_S)
    }
}

/// Plans the faults of a run of `length`, in the order in which they begin. If a plan with random durations lacks a
/// fault, each fault lasts for its shortest time.
pub fn plan(seed: u64, length: Duration, items: &[Item]) -> Vec<Step> {
    let steps = plan_rounds(seed, length, items, false);
    if left_out(&steps, items).is_empty() { steps } else { plan_rounds(seed, length, items, true) }
}

fn plan_rounds(seed: u64, length: Duration, items: &[Item], is_tight: bool) -> Vec<Step> {
    let mut dice = Dice::new(seed ^ 0x9A3C_F00D);
    let mut steps: Vec<Step> = Vec::new();
    if items.is_empty() {
        return steps;
    }
    let mut now = Duration::from_secs(LEAD_S);
    loop {
        for item in shuffled(items.len(), &mut dice) {
            let (hold, quiet) = (items[item].hold, QUIET_S);
            let hold = if is_tight { hold.0 } else { between(&mut dice, hold) };
            let quiet = if is_tight { quiet.0 } else { between(&mut dice, quiet) };
            let hold = Duration::from_secs(hold);
            let wants_overlap = dice.below(100) < OVERLAP_PERCENT;
            let part = dice.below(50) + 25;
            let last = steps.last();
            let overlaps = wants_overlap && last.is_some_and(|last| may_meet(last, items, item));
            let start = match last {
                Some(last) if overlaps => last.start + last.hold.mul_f64(part as f64 / 100.0),
                _ => now,
            };
            let step = Step { start: whole_ms(start), item, hold, overlaps };
            if step.end() > length {
                return steps;
            }
            now = now.max(step.end() + Duration::from_secs(quiet));
            steps.push(step);
        }
    }
}

/// Deals the items into three parts whose shortest times are about equal, and returns the part of `number`. Three
/// consecutive numbers have all items, each once.
pub fn third(number: u64, items: &[Item]) -> Vec<usize> {
    let least = |place: usize| items[place].hold.0 + OVERHEAD_S + QUIET_S.0;
    let mut longest_first: Vec<usize> = (0..items.len()).collect();
    longest_first.sort_by_key(|place| std::cmp::Reverse(least(*place)));
    let (mut parts, mut times) = ([const { Vec::new() }; 3], [0; 3]);
    for place in longest_first {
        let part = (0..3).min_by_key(|part| times[*part]).unwrap_or_default();
        times[part] += least(place);
        parts[part].push(place);
    }
    let mut part = std::mem::take(&mut parts[(number % 3) as usize]);
    part.sort_unstable();
    part
}

/// Returns whether the fault can overlap with the last planned fault. At most two faults overlap, because with three
/// faults the cause of an outage would be unclear.
fn may_meet(last: &Step, items: &[Item], item: usize) -> bool {
    let (last_item, item) = (&items[last.item], &items[item]);
    !last.overlaps && !last_item.is_alone && !item.is_alone && last_item.hits != item.hits
}

fn between(dice: &mut Dice, (least, most): (u64, u64)) -> u64 {
    least + dice.below(most.saturating_sub(least) + 1)
}

fn whole_ms(time: Duration) -> Duration {
    Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// Fisher-Yates.
fn shuffled(length: usize, dice: &mut Dice) -> Vec<usize> {
    let mut order: Vec<usize> = (0..length).collect();
    for place in (1..length).rev() {
        order.swap(place, dice.below(place as u64 + 1) as usize);
    }
    order
}

/// Returns the faults that do not fit into the plan.
pub fn left_out(steps: &[Step], items: &[Item]) -> Vec<&'static str> {
    let is_planned = |place: usize| steps.iter().any(|step| step.item == place);
    items.iter().enumerate().filter(|(place, _)| !is_planned(*place)).map(|(_, item)| item.name).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SERVERS: [&str; 4] = ["daemon", "mysql", "redis", "rabbitmq"];

    fn items(count: usize) -> Vec<Item> {
        const NAMES: [&str; 12] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];
        let item = |place: usize| Item {
            name: NAMES[place],
            hits: SERVERS[place % SERVERS.len()],
            hold: (2 + place as u64 % 3, 4 + place as u64),
            is_alone: place % 5 == 4,
        };
        (0..count).map(item).collect()
    }

    #[test]
    fn three_numbers_in_a_row_have_every_fault_once() {
        for number in 0..9 {
            let mut places: Vec<usize> = (number..number + 3).flat_map(|number| third(number, &items(11))).collect();
            places.sort_unstable();
            assert_eq!(places, (0..11).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_same_seed_makes_the_same_plan_and_another_one_another() {
        let length = Duration::from_secs(600);
        assert_eq!(plan(1, length, &items(9)), plan(1, length, &items(9)));
        assert_ne!(plan(1, length, &items(9)), plan(2, length, &items(9)));
        assert!(plan(1, length, &[]).is_empty());
    }

    #[test]
    fn faults_last_longer_only_if_each_fault_has_room() {
        let items = items(9);
        let is_shortest = |step: &Step| step.hold.as_secs() == items[step.item].hold.0;
        for seed in 0..100 {
            assert!(plan(seed, Duration::from_secs(80), &items).iter().all(is_shortest));
            assert!(!plan(seed, Duration::from_secs(300), &items).iter().all(is_shortest));
        }
    }

    proptest! {
        #[test]
        fn every_fault_comes_where_there_is_room_and_no_two_at_once_hit_one_server(seed: u64, count in 1_usize..12, minutes in 1_u64..40) {
            let (items, length) = (items(count), Duration::from_secs(minutes * 60));
            let steps = plan(seed, length, &items);
            let least: u64 = items.iter().map(|item| item.hold.0 + OVERHEAD_S + QUIET_S.1).sum();
            prop_assert!(LEAD_S + least > length.as_secs() || left_out(&steps, &items).is_empty(), "{steps:?}");
            for (place, step) in steps.iter().enumerate() {
                let item = &items[step.item];
                prop_assert!((item.hold.0..=item.hold.1).contains(&step.hold.as_secs()));
                prop_assert!(step.end() <= length);
                let others = steps[..place].iter().filter(|other| other.end() > step.start);
                for other in others {
                    let met = &items[other.item];
                    prop_assert!(step.overlaps && met.hits != item.hits && !met.is_alone && !item.is_alone, "{steps:?}");
                }
                prop_assert!(place == 0 || steps[place - 1].start <= step.start, "{steps:?}");
            }
        }
    }
}
