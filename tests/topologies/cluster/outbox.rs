//! Tests counters that only the daemon changes, on several masters of a Redis Cluster.

use tallyd_core::event::{LikeEvent, encode_count};
use tallyd_core::model::{Addition, CounterKey, Metric, Target, TargetId, UserId};
use tallyd_mysql::outbox;
use tallyd_redis::Cache;
use tallyd_redis::keys::KindNames;

use super::common::{World, body, eventually, target};
use super::nodes::{MASTERS, Nodes};

const VIEW: Metric = Metric(3);
const TARGETS: u64 = 60;

/// Makes `count` views, for one target after another.
fn views(from: u64, count: u64) -> Vec<(UserId, Vec<u8>)> {
    let view = |number: u64| {
        let id = TargetId(1 + number % TARGETS);
        (
            UserId(number),
            encode_count(id, ("video", "view"), 1, tallyd_base::runtime::clock::now(), &format!("view-{number}"), None),
        )
    };
    (from..from + count).map(view).collect()
}

async fn in_redis(world: &World) -> Vec<i64> {
    let numbers: Vec<CounterKey> = (1..=TARGETS).map(|id| (target(id), VIEW)).collect();
    let samples = world.cache.sample(&KindNames::new(&world.config.kinds), &numbers).await.unwrap();
    samples.into_iter().map(|sample| sample.unwrap().value).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_daemon_counts_is_added_once_though_masters_sleep() {
    let nodes = Nodes::start().await;
    let world =
        World::new("cluster_outbox", &nodes.settings("timeout_ms = 300\n[metrics]\nlike = 1\nview = 3\n")).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    let publisher = world.publisher().await;
    let mut sent = 0;
    for place in 0..MASTERS {
        let (mut other, mut sleep) = (nodes.connect(place).await, redis::cmd("DEBUG"));
        sleep.arg("SLEEP").arg(2);
        let asleep = tokio::spawn(async move { sleep.query_async::<()>(&mut other).await });
        world.publish(&publisher, &views(sent, 3 * TARGETS)).await;
        sent += 3 * TARGETS;
        // The daemon writes to MySQL even while a node of Redis is frozen.
        world.drained(&publisher).await;
        asleep.await.unwrap().unwrap();
    }
    let expected = vec![i64::try_from(sent / TARGETS).unwrap(); usize::try_from(TARGETS).unwrap()];
    eventually("all views are added", || async {
        let rest = "SELECT COUNT(*) FROM partition_owner AS p JOIN outbox_state AS s USING (`partition`) \
                    WHERE p.outbox = s.applied";
        world.count(rest).await == 1
    })
    .await;
    assert_eq!(in_redis(&world).await, expected);
}

/// Freezes two masters while the outbox has more rows than one pass reads, and wakes one of them. All layouts on the
/// awake masters must get their numbers.
async fn silent_master(nodes: &Nodes, name: &str, settings: &str) {
    const LIKE: Metric = Metric(1);
    let settings = format!("timeout_ms = 500\n{settings}\n[metrics]\nlike = 1\nview = 3\n");
    let world = World::new(name, &nodes.settings(&settings)).await;
    let also = world.cache.also(&world.config.redis, &world.config.metrics).unwrap();
    let layouts: Vec<&Cache> = [&world.cache].into_iter().chain(&also).collect();
    // For each layout, the targets whose counters are on each node.
    let mut targets_of = vec![vec![Vec::new(); MASTERS]; layouts.len()];
    for (cache, targets_of) in layouts.iter().zip(&mut targets_of) {
        for target in (1..=TARGETS).map(target) {
            let key = cache.keys.counters("video", cache.keys.bucket(target));
            targets_of[nodes.place_of(&key).await].push(target);
        }
    }
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    let publisher = world.publisher().await;
    nodes.signal(1, "STOP");
    nodes.signal(2, "STOP");
    // The first pass reads 32 of these 40 rows.
    let views: Vec<Addition> = (1..=40_000).map(|id| Addition { target: target(id), metric: VIEW, delta: 1 }).collect();
    let mut tx = world.pool.begin().await.unwrap();
    outbox::append(&mut tx, 0, &views).await.unwrap();
    tx.commit().await.unwrap();
    let likes: Vec<_> = (1..=TARGETS)
        .map(|id| {
            body(&LikeEvent {
                target: target(id),
                user: UserId(7),
                at: tallyd_base::runtime::clock::now(),
                liked: true,
            })
        })
        .collect();
    world.publish(&publisher, &likes).await;
    let names = KindNames::new(&world.config.kinds);
    let are_counted = async |cache: &Cache, targets: &[Target]| {
        let numbers: Vec<CounterKey> = targets.iter().flat_map(|target| [(*target, VIEW), (*target, LIKE)]).collect();
        let samples = cache.sample(&names, &numbers).await.unwrap();
        samples.into_iter().all(|sample| sample.unwrap().value == 1)
    };
    for (place, what) in [(0, "the awake master has all rows"), (2, "the master that woke up has all rows")] {
        nodes.signal(place, "CONT");
        for (cache, targets_of) in layouts.iter().zip(&targets_of) {
            assert!(!targets_of[place].is_empty());
            eventually(what, || are_counted(cache, &targets_of[place])).await;
        }
    }
    assert_eq!(world.count("SELECT COUNT(*) FROM outbox_state WHERE applied > 0").await, 0);
    nodes.signal(1, "CONT");
    world.outbox_added().await;
    for cache in layouts {
        assert!(are_counted(cache, &(1..=TARGETS).map(target).collect::<Vec<_>>()).await);
        let numbers: Vec<CounterKey> = (1..=40_000).map(|id| (target(id), VIEW)).collect();
        let samples = cache.sample(&names, &numbers).await.unwrap();
        assert!(samples.into_iter().all(|sample| sample.unwrap().value == 1));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_master_holds_up_only_its_own_counters() {
    let nodes = Nodes::start().await;
    nodes.be_patient().await;
    silent_master(&nodes, "cluster_silent", "[filter]\nlikes_min = 1000\ncron = \"\"").await;
    silent_master(&nodes, "cluster_silent_also", "[redis.also]\nbucket_bits = 5").await;
}
