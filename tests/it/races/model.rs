//! Tests a site with random faults, while reconciles run and crash. In the end MySQL and Redis must be equal to the
//! model, and each repair must have been right.

use std::collections::{BTreeMap, HashMap};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlx::Row as _;
use tallyd_core::model::{Micros, Target, UserId};
use tokio::task::JoinSet;

use super::proof::{Act, Row, first_wrong};
use crate::common::scripts::{ApiServer, Counted};
use crate::common::{Daemon, Dice, Model, World, as_api, target};

/// The number of concurrent tasks. Each task clicks for 20 users, on a few busy targets and many quiet targets.
const CLICKERS: u64 = 10;
const HOT: u64 = 2;
const COLD: u64 = 150;

/// The value of `publish_grace`. Each run waits for this duration, so the test uses a short duration.
const GRACE: Duration = Duration::from_millis(300);

/// The test starts this number of reconcile runs, one after another.
const ROUNDS: u64 = 10;

/// The seeds of the tests. With the same seed a test makes the same random choices, but the order of its events can
/// differ.
const SEEDS: [u64; 2] = [2_203, 9_011];

/// Defines what happens to a click.
#[derive(Clone, Copy, Debug)]
enum Luck {
    Good,
    /// The click is counted and never published.
    Lost,
    /// The answer of Redis is lost, so the API server counts the click again, but publishes the event only once.
    Twice,
    /// The click is published, and later published again.
    Repeated,
    /// The event is published this long after Redis has counted it.
    Stalled(Duration),
}

impl Luck {
    fn draw(dice: &mut Dice, long_stalls: bool) -> Self {
        let percent = |percent| GRACE * u32::try_from(percent).unwrap() / 100;
        match dice.below(100) {
            0..=1 => Self::Lost,
            2..=3 => Self::Twice,
            4..=9 => Self::Repeated,
            10..=15 => Self::Stalled(percent(10 + dice.below(60))),
            16..=18 if long_stalls => Self::Stalled(percent(210 + dice.below(200))),
            _ => Self::Good,
        }
    }
}

/// One of the concurrent tasks that click.
struct Clicker {
    client: Arc<ApiServer>,
    dice: Dice,
    long_stalls: bool,
    acts: Vec<Act>,
    /// The last clicks that this task has published.
    published: Vec<Counted>,
}

impl Clicker {
    async fn click_until(mut self, first_user: u64, stop: Arc<AtomicBool>) -> Vec<Act> {
        let mut likes: HashMap<(Target, UserId), bool> = HashMap::new();
        while !stop.load(Ordering::Relaxed) {
            let user = UserId(first_user + self.dice.below(20));
            let hot = self.dice.percent(40);
            let target = target(if hot { 1 + self.dice.below(HOT) } else { 100 + self.dice.below(COLD) });
            let liked = likes.entry((target, user)).or_default();
            *liked = !*liked;
            let luck = Luck::draw(&mut self.dice, self.long_stalls);
            self.click(target, user, *liked, luck).await;
            // The task pauses between clicks to leave time for the other programs.
            tokio::time::sleep(Duration::from_millis(self.dice.below(20))).await;
        }
        self.acts
    }

    async fn click(&mut self, target: Target, user: UserId, liked: bool, luck: Luck) {
        let counted = self.client.count(target, user, liked, &[]).await.unwrap();
        match luck {
            Luck::Good => self.publish(counted).await,
            Luck::Lost => self.acts.push(Act { event: counted.event, published: None }),
            Luck::Twice => {
                self.acts.push(Act { event: counted.event, published: None });
                let again = self.client.count(target, user, liked, &[]).await.unwrap();
                self.publish(again).await;
            }
            Luck::Repeated => {
                self.publish(counted).await;
                let old = self.dice.below(self.published.len() as u64) as usize;
                self.client.publish_counted(&self.published[old]).await.unwrap();
            }
            Luck::Stalled(stall) => {
                tokio::time::sleep(stall).await;
                self.publish(counted).await;
            }
        }
    }

    async fn publish(&mut self, counted: Counted) {
        self.client.publish_counted(&counted).await.unwrap();
        // Redis runs on the same machine, so this time comes from the same clock as the event's `at`.
        self.acts.push(Act { event: counted.event, published: Some(tallyd_base::runtime::clock::now()) });
        self.published.push(counted);
    }
}

/// Runs reconciles, and kills programs at random moments.
struct Operator {
    world: World,
    daemon: Option<Daemon>,
    dice: Dice,
}

impl Operator {
    /// Runs one reconcile after another. At random moments it kills the reconcile or the daemon.
    async fn work(&mut self) {
        for round in 0..ROUNDS {
            let mode = if round % 2 == 0 { "--full" } else { "--changed" };
            let run_dies = self.moment(35);
            // The first value is the time until the daemon crashes. The second value is the time from the crash to the
            // next start of the daemon.
            let daemon_dies = self.moment(40).map(|moment| (moment, Duration::from_millis(self.dice.below(1_200))));
            let (world, daemon) = (&self.world, &mut self.daemon);
            tokio::join!(reconcile(world, mode, run_dies), async {
                if let Some((moment, pause)) = daemon_dies {
                    tokio::time::sleep(moment).await;
                    daemon.take().unwrap().kill();
                    tokio::time::sleep(pause).await;
                    *daemon = Some(world.daemon());
                }
            });
        }
    }

    fn moment(&mut self, percent: u64) -> Option<Duration> {
        self.dice.percent(percent).then(|| Duration::from_millis(self.dice.below(2_000)))
    }
}

/// Runs a reconcile. If the reconcile has not ended after the time `dies`, kills it.
async fn reconcile(world: &World, mode: &str, dies: Option<Duration>) {
    let mut command = tokio::process::Command::from(world.command());
    command.args(["reconcile", mode, "--force", "--yes", "--format", "json"]).kill_on_drop(true);
    let run = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let output = match dies {
        None => run.wait_with_output().await,
        Some(moment) => match tokio::time::timeout(moment, run.wait_with_output()).await {
            Ok(output) => output,
            Err(_) => {
                // The timeout dropped the handle of the process, and this killed the process. The lease of its run
                // would end much later, so the test ends the lease now.
                let end = "UPDATE job_lock SET lease_until = NOW(6) WHERE job = 'reconcile'";
                sqlx::query(end).execute(&world.pool).await.unwrap();
                return;
            }
        },
    };
    let output = output.unwrap();
    let code = output.status.code();
    assert!(matches!(code, Some(0 | 75)), "{code:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the repairs in Redis for each target, in order. Fails if a run corrected a counter in MySQL.
async fn repairs(world: &World) -> BTreeMap<Target, Vec<Row>> {
    let rows = sqlx::query(
        "SELECT target_id, store, before_it, added, repair.outcome, \
         CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', started_at) AS SIGNED), \
         CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', repaired_at) AS SIGNED) \
         FROM repair JOIN job_run USING (run) ORDER BY pass",
    );
    let mut repairs: BTreeMap<_, Vec<Row>> = BTreeMap::new();
    for row in rows.fetch_all(&world.pool).await.unwrap() {
        assert_eq!(row.get::<String, _>(1), "redis", "a counter differed from its rows");
        repairs.entry(target(row.get(0))).or_default().push(Row {
            before: row.get(2),
            added: row.get(3),
            outcome: row.get(4),
            began: Micros(row.get(5)),
            noted: Micros(row.get(6)),
        });
    }
    repairs
}

/// Fails if a repair was wrong. Returns the number of repairs.
fn assert_right(acts: &[Act], repairs: &BTreeMap<Target, Vec<Row>>, seed: u64) -> usize {
    let mut by_target: BTreeMap<Target, Vec<Act>> = BTreeMap::new();
    for act in acts {
        by_target.entry(act.event.target).or_default().push(*act);
    }
    for (target, rows) in repairs {
        let acts = by_target.get(target).map(Vec::as_slice).unwrap_or_default();
        if let Some(wrong) = first_wrong(acts, rows, GRACE.as_micros() as i64) {
            let near = |act: &&Act| act.event.at > Micros(wrong.began.0 - 1_000_000) && act.event.at < wrong.noted;
            let acts: Vec<&Act> = acts.iter().filter(near).collect();
            panic!(
                "seed {seed}: a repair of {target:?} is wrong: {wrong:?}; all repairs of the target: {rows:?}; its last acts: {acts:?}"
            );
        }
    }
    repairs.values().map(Vec::len).sum()
}

async fn everything_goes_wrong(name: &str, seed: u64, long_stalls: bool) {
    let settings =
        "[amqp]\npartitions = 2\n[reconcile]\npublish_grace = \"300ms\"\npage_targets = 40\nthreads_running_max = 0";
    let world = World::new(name, &as_api(settings)).await;
    let publisher = world.publisher().await;
    let client = Arc::new(world.api_server());
    let daemon = Some(world.daemon());
    assert!(world.tallyd(&["reconcile"]).status.success());
    let (mut users, stop) = (JoinSet::new(), Arc::<AtomicBool>::default());
    for number in 0..CLICKERS {
        let (client, dice) = (Arc::clone(&client), Dice::of_run(seed + 1 + number));
        let clicker = Clicker { client, dice, long_stalls, acts: Vec::new(), published: Vec::new() };
        users.spawn(clicker.click_until(1 + number * 20, Arc::clone(&stop)));
    }
    let mut operator = Operator { world, daemon, dice: Dice::of_run(seed) };
    operator.work().await;
    stop.store(true, Ordering::Relaxed);
    let acts = users.join_all().await.concat();
    let Operator { world, daemon, .. } = operator;
    world.drained(&publisher).await;

    let last = world.report(&["reconcile", "--full", "--force", "--yes"]);
    let again = world.report(&["reconcile", "--full"]);
    assert_eq!(
        (&again["drifted"], &again["left"], &again["unknown"], &again["transient"]),
        (&0.into(), &0.into(), &0.into(), &0.into()),
        "seed {seed}: {last} {again}"
    );
    let mut model = Model::default();
    for act in acts.iter().filter(|act| act.published.is_some()) {
        model.apply(&act.event);
    }
    world.assert_equals(&model).await;
    let repaired = assert_right(&acts, &repairs(&world).await, seed);
    assert!(repaired > 20, "seed {seed}: after {} clicks the runs made only {repaired} repairs", acts.len());
    assert!(daemon.unwrap().stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_lost_or_counted_twice_every_repair_is_right_and_the_end_is_exact() {
    everything_goes_wrong("model", SEEDS[0], false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_stall_longer_than_twice_the_grace_change_nothing_in_the_end() {
    everything_goes_wrong("model_stalls", SEEDS[1], true).await;
}
