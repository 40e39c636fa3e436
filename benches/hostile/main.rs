//! Measures the speed of good events while half of the messages, or nine in ten messages, can't be applied.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde::Serialize;
use tallyd_core::event::LikeEvent;
use tokio::time::Instant;

use common::contender::Contender;
use common::cpu::Processes;
use common::machine::Machine;
use common::model::Model;
use common::preload;
use common::report::{Aim, Results, median, number, print_figures, print_table};
use common::workload::{USERS, Workload};
use common::world::{Setup, World, stack};
use tallyd_benches as common;

const TALLYD: Contender = Contender::tallyd("hostile", 1);

/// The name of the case, the percentage of bad messages, and the quota of dead letters. Dead letters within the quota
/// are stored. All other bad messages are only counted. A flood of bad messages fills the default quota within seconds.
/// The case `at the bound` shows the rate when the quota is full.
const FLOODS: [(&str, u64, u64); 4] =
    [("none", 0, ROOM), ("half", 50, ROOM), ("half, at the bound", 50, 1_000), ("nine of ten", 90, ROOM)];

/// The default quota of the configuration.
const ROOM: u64 = 100_000;

/// The rates are compared with the rate of a queue without bad messages, which is the partition's limit. If nine of ten
/// messages are bad, good events can have at most a tenth of this rate.
const AIMS: [(&str, Aim); 3] = [
    ("good_rate_half_rubbish", Aim::AtLeast(0.5)),
    ("good_rate_half_rubbish_at_the_bound", Aim::AtLeast(0.5)),
    ("messages_rate_nine_of_ten_rubbish", Aim::AtLeast(0.5)),
];

/// Drain queues that contain good events and bad messages, and check every row and counter. Each bad message has a
/// different body.
#[derive(Clone, Debug, Parser)]
struct Arguments {
    /// Number of messages in each queue.
    #[arg(long, default_value_t = 400_000)]
    messages: u64,

    /// Number of rounds. Each figure is the median of all rounds.
    #[arg(long, default_value_t = 3)]
    rounds: usize,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, Serialize)]
struct Drained {
    good_per_second: f64,
    messages_per_second: f64,
    dead_letters: i64,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let machine = Machine::look().await?;
    let mut runs: BTreeMap<&str, Vec<Drained>> = BTreeMap::new();
    for round in 1..=arguments.rounds {
        for (name, percent, room) in FLOODS {
            let drained =
                run(arguments.messages, percent, room).await.with_context(|| format!("{name}, round {round}"))?;
            println!("{name}, round {round}: {:.0} messages/s", drained.messages_per_second);
            runs.entry(name).or_default().push(drained);
        }
    }
    let of = |name: &str, what: fn(&Drained) -> f64| median(runs[name].iter().map(what));
    let row = |(name, ..): &(&str, u64, u64)| {
        let letters = of(name, |run| run.dead_letters as f64);
        let (good, all) = (of(name, |run| run.good_per_second), of(name, |run| run.messages_per_second));
        vec![(*name).to_owned(), number(all), number(good), number(letters)]
    };
    print_table(
        &["rubbish", "messages/s", "good events/s", "dead letters"],
        &FLOODS.iter().map(row).collect::<Vec<_>>(),
    );
    let usual = of("none", |run| run.good_per_second);
    let ratio = |name: &str, what: fn(&Drained) -> f64| of(name, what) / usual;
    let figures = BTreeMap::from([
        ("good_rate_half_rubbish".to_owned(), ratio("half", |run| run.good_per_second)),
        ("good_rate_half_rubbish_at_the_bound".to_owned(), ratio("half, at the bound", |run| run.good_per_second)),
        ("good_rate_nine_of_ten_rubbish".to_owned(), ratio("nine of ten", |run| run.good_per_second)),
        ("messages_rate_half_rubbish".to_owned(), ratio("half", |run| run.messages_per_second)),
        ("messages_rate_nine_of_ten_rubbish".to_owned(), ratio("nine of ten", |run| run.messages_per_second)),
    ]);
    print_figures(&figures, &AIMS);
    let arguments = std::env::args().skip(1).collect();
    Results { figures, machine, arguments, missing: BTreeMap::new(), results: runs }.write("hostile")
}

async fn run(messages: u64, percent: u64, dead_letters_max: u64) -> Result<Drained> {
    let world = World::new("hostile", Setup { dead_letters_max, ..Setup::default() }).await?;
    let drained = run_in(&world, messages, percent).await;
    world.close(drained).await
}

async fn run_in(world: &World, messages: u64, percent: u64) -> Result<Drained> {
    let servers = Processes::of_stack(Path::new(&stack("DIR")?))?;
    let good = messages * (100 - percent) / 100;
    let events = || Workload::new(1).take(usize::try_from(good).unwrap_or(usize::MAX));
    preload::preload_messages(world, mixed(events(), messages, percent)).await?;
    preload::rest(servers).await?;
    let mut running = TALLYD.start(world, &[])?.refusing();
    running.consuming(1).await?;
    let began = Instant::now();
    running.committed(good).await?;
    let seconds = began.elapsed().as_secs_f64();
    TALLYD.end(running, world, &Model::of(events()), USERS).await?;
    let letters: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM dead_letter").fetch_one(&world.pool).await?;
    let (rubbish, room) = (messages - good, world.config.consumer.dead_letters_max / 2);
    ensure!(
        letters.unsigned_abs() == rubbish.min(room),
        "{letters} dead letters from {rubbish} bad messages, with a quota of {room}"
    );
    Ok(Drained {
        good_per_second: good as f64 / seconds,
        messages_per_second: messages as f64 / seconds,
        dead_letters: letters,
    })
}

/// Returns the messages, each as a routing key and a body. Good messages are spread evenly among the bad messages, and
/// the last message is good.
fn mixed(
    mut good: impl Iterator<Item = LikeEvent>,
    messages: u64,
    percent: u64,
) -> impl Iterator<Item = (String, Vec<u8>)> {
    let is_good = move |number: u64| number * (100 - percent) / 100 > (number - 1) * (100 - percent) / 100;
    // A bad body is almost as long as the body of an event, but it ends inside a field. A faulty producer could send
    // such a body.
    let rubbish = |number: u64| {
        let body = format!(
            r#"{{"type":"like","kind":"video","target_id":"{number}","user_id":"{number}","at":17900000{number:08},"co"#
        );
        (number.to_string(), body.into_bytes())
    };
    (1..=messages).filter_map(move |number| match is_good(number) {
        true => good.next().map(|event| preload::message(&event)),
        false => Some(rubbish(number)),
    })
}
