//! Erases a user with likes on many targets, while other users continue to like.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use sqlx::AssertSqlSafe;
use tallyd_base::jobs::run::{self, RunOptions};
use tallyd_base::jobs::runner::Ran;
use tallyd_base::runtime::progress::ProgressSink;
use tallyd_base::servers::Servers;
use tallyd_core::model::UserId;
use tallyd_filters::Filters;
use tallyd_redis::keys::KindNames;
use tallyd_redis::recent::Seen;
use tokio_util::sync::CancellationToken;

use super::{Likes, METRICS, USER, erase, named, report};
use crate::common::scripts::ApiServer;
use crate::common::{Dice, Model, World, as_api, body, event_of, target};

/// The number of other users.
const OTHERS: u64 = 50;

const TARGETS: u64 = 2_500;

/// Makes the likes before the erase. The user likes every third target, and then unlikes some of these targets. Other
/// users like all targets.
fn before() -> Likes {
    let (mut likes, mut dice) = (Likes::new(), Dice::of_run(7));
    for id in 1..=TARGETS {
        likes.add(target(id), UserId(1 + dice.below(OTHERS)));
        if id % 3 == 0 {
            likes.add(target(id), USER);
        }
        if id % 30 == 0 {
            likes.set(target(id), USER, false);
        }
    }
    likes
}

/// An import whose query needs a row of `is_bad` that is 0.
const IMPORT: &str = "[[import]]\nname = \"old\"\nkind = \"video\"\nkeeps_deleted = true\nquery = \"\"\"SELECT target, user, (SELECT is_bad * 5 FROM bad) AS deleted \
    FROM old_like WHERE target > :after_target OR (target = :after_target AND user > :after_user) ORDER BY target, user LIMIT :rows\"\"\"\n";

/// Imports an old table whose last row is the user's, and then fails at this row. Both runs stay in `job_run`.
async fn imported(world: &World) {
    let sql = "CREATE TABLE bad (is_bad INT); INSERT INTO bad VALUES (0); \
               CREATE TABLE old_like (target BIGINT, user BIGINT, PRIMARY KEY (target, user)); INSERT INTO old_like VALUES (3, ?)";
    let run = async |sql: String| {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    };
    run(sql.replace('?', &USER.to_string())).await;
    assert_eq!(world.tallyd(&["import"]).status.code(), Some(0));
    run("UPDATE bad SET is_bad = 1".to_owned()).await;
    assert_eq!(world.tallyd(&["import"]).status.code(), Some(1));
    run("DROP TABLE old_like".to_owned()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_of_a_user_while_others_go_on_liking() {
    let world = World::new("erase_user", &format!("{METRICS}{IMPORT}")).await;
    let publisher = world.publisher().await;
    let mut likes = before();
    likes.publish(&world, &publisher).await;
    let _daemon = world.daemon();
    world.drained(&publisher).await;
    assert!(!named(&world, USER.0).await.is_empty());

    imported(&world).await;
    let counted = report(&erase(&world, &["--user", &USER.to_string(), "--dry-run"]), 0);
    assert_eq!((counted["rows"].as_u64(), counted["unlikes"].as_u64()), (Some(833), Some(750)));
    world.assert_equals(&likes.model).await;

    let stop = Arc::new(AtomicBool::new(false));
    let going = Arc::clone(&stop);
    let (site, others) = (world.publisher().await, world.broker.exchange());
    let clicking = tokio::spawn(async move {
        let mut dice = Dice::of_run(8);
        while !going.load(Ordering::Relaxed) {
            let user = UserId(1 + dice.below(OTHERS));
            likes.set(target(1 + dice.below(TARGETS)), user, dice.percent(70));
            for event in std::mem::take(&mut likes.events) {
                site.publish(&others, &user.to_string(), &body(&event).1).await.unwrap();
            }
        }
        likes
    });
    let output = tokio::task::block_in_place(|| erase(&world, &["--user", &USER.to_string()]));
    stop.store(true, Ordering::Relaxed);
    let mut likes = clicking.await.unwrap();
    let erased = report(&output, 0);
    assert_eq!((erased["rows"].as_u64(), erased["unlikes"].as_u64()), (Some(833), Some(750)));
    assert_eq!(erased["liked_again"], 0);

    likes.model.rows.retain(|(_, user), _| *user != USER);
    world.drained(&publisher).await;
    world.outbox_added().await;
    assert_eq!(named(&world, USER.0).await, [] as [String; 0]);
    world.assert_equals(&likes.model).await;

    let again = report(&erase(&world, &["--user", &USER.to_string()]), 0);
    for count in ["rows", "unlikes", "redis_keys", "outbox_rows", "letters_deleted", "zsets", "places", "saved"] {
        assert_eq!(again[count], 0, "{count}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_by_user_is_used_and_finds_the_same() {
    let world = World::new("erase_user_index", METRICS).await;
    let sql = "ALTER TABLE like_record ADD KEY like_record_user (user_id, kind, is_del, update_at)";
    sqlx::query(sql).execute(&world.pool).await.unwrap();
    let publisher = world.publisher().await;
    let mut likes = before();
    likes.publish(&world, &publisher).await;
    let _daemon = world.daemon();
    world.drained(&publisher).await;

    let erased = report(&erase(&world, &["--user", &USER.to_string()]), 0);
    assert_eq!((erased["rows"].as_u64(), erased["unlikes"].as_u64()), (Some(833), Some(750)));
    likes.model.rows.retain(|(_, user), _| *user != USER);
    assert_eq!(named(&world, USER.0).await, [] as [String; 0]);
    world.assert_equals(&likes.model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn where_api_servers_count_a_reconcile_takes_the_unlikes_off() {
    let world = World::new("erase_api", &as_api("")).await;
    let _daemon = world.daemon();
    let publisher = world.publisher().await;
    assert_eq!(world.reconcile("--full").await["ended"], "done");
    let client = ApiServer::new(&world.api);
    let mut model = Model::default();
    for id in 1..=30 {
        for user in [USER, UserId(1), UserId(2)] {
            let clicked = client.like(target(id), user, &[]).await.unwrap();
            model.apply(&event_of(clicked));
        }
    }
    world.drained(&publisher).await;
    let before = named(&world, USER.0).await;
    assert!(before.iter().any(|key| key.contains(":recent:")), "{before:?}");

    let erased = report(&erase(&world, &["--user", &USER.to_string()]), 0);
    assert_eq!((&erased["unlikes"], &erased["redis_follows"]), (&json!(30), &json!(true)));
    assert_eq!(named(&world, USER.0).await, [] as [String; 0]);
    model.rows.retain(|(_, user), _| *user != USER);
    world.assert_rows_equal(&model).await;
    world.reconcile("--changed").await;
    world.assert_redis_equals(&model).await;
    // The erased user returns, and likes a target again.
    let clicked = client.like(target(1), USER, &[]).await.unwrap();
    assert!(clicked.counted().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_is_built_again_without_the_erased_user() {
    let world = World::new("erase_filter", &format!("{METRICS}[filter]\nlikes_min = 20\ncron = \"\"\n")).await;
    let publisher = world.publisher().await;
    let mut likes = Likes::new();
    (1..=40).for_each(|user| likes.add(target(1), UserId(user)));
    likes.add(target(1), USER);
    likes.publish(&world, &publisher).await;
    let _daemon = world.daemon();
    world.drained(&publisher).await;
    world.outbox_added().await;
    run_filters(&world).await;
    assert!(matches!(by_filter(&world).await, Some(Seen::Unknown(_))), "the filter has the user");

    let erased = report(&erase(&world, &["--user", &USER.to_string()]), 0);
    assert_eq!(erased["filters"], 1);
    assert_eq!(by_filter(&world).await, None, "no filter with the user is left");
    assert_eq!(named(&world, USER.0).await, [] as [String; 0]);
    run_filters(&world).await;
    assert_eq!(by_filter(&world).await, Some(Seen::Known(false)));
}

/// Waits until no other run holds the lock. Then runs the filters' job once.
async fn run_filters(world: &World) {
    let servers = Servers::new(&world.config).unwrap();
    let (filters, options, stop) = (Filters::new(&world.config), RunOptions::default(), CancellationToken::new());
    let ran = run::once(&servers, &world.config, &filters, options, ProgressSink::Log, &stop).await.unwrap();
    assert!(matches!(ran, Ran::Ended(_)), "another run holds the lock");
}

/// Returns the Bloom filter's answer for the user, or `None` if the target has no filter.
async fn by_filter(world: &World) -> Option<Seen> {
    let kinds = KindNames::new(&world.config.kinds);
    let shape = world.cache.filter_states(&kinds, &[target(1)]).await.unwrap().pop()??.shape;
    let epoch = world.cache.filter_epoch().await.unwrap();
    world.cache.filtered_likes(&kinds, USER, &epoch, &[(target(1), shape)]).await.unwrap().pop()
}
