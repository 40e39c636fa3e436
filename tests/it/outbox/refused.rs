//! Someone replaces a key of the outbox by a key of another type. All other keys get their numbers.

use redis::{AsyncCommands, cmd};
use tallyd_base::runtime::clock;
use tallyd_core::event::{LikeEvent, encode_count};
use tallyd_core::model::{Metric, Target, TargetId, UserId};
use tallyd_redis::keys::KindNames;

use super::VIEW;
use super::common::{World, body, target};

const SETTINGS: &str = "[redis]\nbucket_bits = 12\n\
    [filter]\nlikes_min = 1000\nasked = true\ncron = \"\"\n\
    [metrics]\nlike = 1\nview = 3\n[[rule]]\nmetric = \"view\"\nboard = \"seen\"\n\
    [[board]]\nname = \"seen\"\nperiod = \"total\"\nscore = [\"view\"]\n";

type Redis = redis::aio::MultiplexedConnection;

/// Returns the likes and the views of a target.
async fn numbers(world: &World, target: Target) -> [i64; 2] {
    let names = KindNames::new(&world.config.kinds);
    let samples = world.cache.sample(&names, &[(target, Metric(1)), (target, VIEW)]).await.unwrap();
    [0, 1].map(|place| samples[place].as_ref().unwrap().value)
}

/// Makes a config as if the target had a filter, so that likes are noted beside it.
async fn has_filter(world: &World, redis: &mut Redis, target: Target) {
    let [_, config, _] = world.cache.keys.filter("video", target);
    let _: i64 = redis.hset(config, "size", 1_000).await.unwrap();
}

/// Publishes a like and a view of each target.
async fn round(world: &World, publisher: &tallyd_rabbitmq::Publisher, number: u64, targets: &[Target]) {
    let events = targets.iter().flat_map(|target| {
        let (user, at) = (UserId(number), clock::now());
        let view = encode_count(target.id, ("video", "view"), 1, at, &format!("{}-{number}", target.id), None);
        [body(&LikeEvent { target: *target, user, at, liked: true }), (user, view)]
    });
    world.publish(publisher, &events.collect::<Vec<_>>()).await;
    world.counted(publisher).await;
}

#[tokio::test]
async fn a_key_of_another_type_holds_up_no_other_key() {
    let world = World::new("outbox_refused", SETTINGS).await;
    let mut redis = world.redis().await;
    let (damaged, keys) = (target(1), &world.cache.keys);
    let apart = |id: &u64| keys.bucket(target(*id)) != keys.bucket(damaged);
    let others: Vec<Target> = (2..).filter(apart).take(3).map(target).collect();
    let targets = [&[damaged], &others[..]].concat();
    has_filter(&world, &mut redis, others[0]).await;
    let [_, config, added] = keys.filter("video", damaged);
    let (board, places) = (keys.board("seen", "total"), keys.board_added("seen"));
    let bucket = keys.counters("video", keys.bucket(damaged));
    let of_boards = [board.clone(), places];
    let (daemon, publisher) = (world.consuming().await, world.publisher().await);
    round(&world, &publisher, 1, &targets).await;
    let (mut rounds, mut on_board) = (1, 1);
    for key in [&bucket, &config, &added].into_iter().chain(&of_boards) {
        has_filter(&world, &mut redis, damaged).await;
        let kept = redis.exists(key).await.unwrap();
        if kept {
            let _: String = redis.rename(key, format!("{key}:kept")).await.unwrap();
        }
        let _: i64 = redis.rpush(key, "a hand").await.unwrap();
        rounds += 1;
        round(&world, &publisher, rounds, &targets).await;
        on_board += i64::from(!of_boards.contains(key));
        for target in &others {
            assert_eq!(numbers(&world, *target).await, [rounds.cast_signed(); 2], "{key}");
        }
        let noted: u64 = redis.scard(&keys.filter("video", others[0])[2]).await.unwrap();
        assert_eq!(noted, rounds, "{key}");
        // A filter that lacks a user would give a wrong "no".
        let left: u64 = redis.exists(&[&config, &added]).await.unwrap();
        assert_eq!(left > 0, ![&config, &added].contains(&key), "{key}");
        let _: i64 = redis.del(key).await.unwrap();
        if kept {
            let _: String = redis.rename(format!("{key}:kept"), key).await.unwrap();
        }
        let score: i64 =
            cmd("ZSCORE").arg(&board).arg(TargetId(others[0].id.0).0).query_async(&mut redis).await.unwrap();
        assert_eq!(score, on_board, "{key}");
    }
    let log = daemon.log();
    for event in ["outbox-left", "filter-refused", "board-refused"] {
        assert!(log.contains(event), "{event} is missing in {log}");
    }
}
