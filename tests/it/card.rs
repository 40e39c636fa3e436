//! Tests the site card. Daemons agree on one card in MySQL, and keep its copy in Redis.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::time::{Duration, Instant};

use serde_json::Value;
use tallyd_core::card::{Card, NUMBER_MAX};
use tallyd_mysql::Store;
use tallyd_mysql::card::CardRow;

use crate::common;
use common::proxy::Proxy;
use common::{Daemon, World, eventually, stdout};

const ADMIN: &str = "[admin]\nlisten = \"127.0.0.1:0\"\n";
const WITH_VIEWS: &str = "[admin]\nlisten = \"127.0.0.1:0\"\n[metrics]\nlike = 1\nview = 2\n";

/// The time within which daemons repair the key in Redis: one check and a slow machine.
const BACK_MAX: Duration = Duration::from_secs(15);

fn store(world: &World) -> Store {
    Store::new(&world.config.mysql, 2).unwrap()
}

/// Returns the row and its card.
async fn row(world: &World) -> Option<(CardRow, Card)> {
    let row = store(world).site_card().await.unwrap()?;
    let card = Card::decode(&row.text).unwrap();
    assert_eq!(row.number, card.number);
    Some((row, card))
}

/// Waits until the row has the world's settings, and Redis has the row's card. Returns the row and the card.
async fn settled(world: &World) -> (CardRow, Card) {
    let own = Card::from(&world.config);
    eventually("MySQL and Redis have the card", || async {
        let Some((row, card)) = row(world).await else { return false };
        own.differences(&card).is_empty() && world.cache.site_card().await.unwrap() == Some(row.text)
    })
    .await;
    row(world).await.unwrap()
}

/// Reloads the daemon with these settings.
async fn reload(world: &World, daemon: &Daemon, settings: &str) {
    let reloads = || daemon.log().matches("\"event\":\"reloaded\"").count();
    let before = reloads();
    world.write(settings);
    daemon.signal("HUP");
    eventually("the daemon has reloaded", || async { reloads() > before }).await;
}

/// Returns the URL of the daemon's admin port.
async fn url(daemon: &Daemon) -> String {
    daemon.logged("\"admin-listening\"").await;
    let log = daemon.log();
    let line = log.lines().find(|line| line.contains("\"admin-listening\"")).unwrap();
    format!("http://{}", serde_json::from_str::<Value>(line).unwrap()["address"].as_str().unwrap())
}

async fn unlink(world: &World) {
    let key = world.cache.keys.site_card();
    let deleted: i64 = redis::cmd("UNLINK").arg(key).query_async(&mut world.redis().await).await.unwrap();
    assert_eq!(deleted, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_writes_a_card_with_all_its_settings() {
    let settings = "[amqp]\npartitions = 2\n[kinds]\nvideo = 1\npost = 2\n[metrics]\nlike = 1\nview = 2\n\
                    [redis.also]\nbucket_bits = 5\n[[rule]]\nmetric = \"view\"\nsettable = true\n\
                    [[rule]]\nmetric = \"like\"\nkind = \"post\"\nwriter = \"api\"\n\
                    [[board]]\nname = \"likes\"\nperiod = \"week\"\n";
    let world = World::new("card_settings", settings).await;
    let daemon = world.daemon();
    let (row, card) = settled(&world).await;
    assert_eq!((row.number, card.exchange), (1, world.broker.exchange()));
    assert_eq!((card.api, card.partitions, card.boards.len()), (vec!["post:like".to_owned()], 2, 1));
    assert!(row.by.ends_with(&format!(":{}", daemon.child.id())), "{}", row.by);
    // An API server reads the card with its account.
    let api = redis::Client::open(world.api.redis.url.expose()).unwrap();
    let mut api = api.get_multiplexed_async_connection().await.unwrap();
    let text: String = redis::cmd("GET").arg(world.cache.keys.site_card()).query_async(&mut api).await.unwrap();
    assert_eq!(text, row.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_card_that_redis_loses_is_back_within_15_seconds() {
    let world = World::new("card_lost", "").await;
    let _daemon = world.daemon();
    let (before, _) = settled(&world).await;
    let mut redis = world.redis().await;
    for value in [None, Some("{"), Some("{\"version\":2}")] {
        unlink(&world).await;
        if let Some(value) = value {
            let key = world.cache.keys.site_card();
            let () = redis::cmd("SET").arg(key).arg(value).query_async(&mut redis).await.unwrap();
        }
        let began = Instant::now();
        let (after, _) = settled(&world).await;
        assert!(began.elapsed() < BACK_MAX, "{value:?}: {:?}", began.elapsed());
        assert_eq!(after, before, "a copy to Redis must not change the row");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_card_from_the_future_blocks_no_later_card() {
    let mut world = World::new("card_future", ADMIN).await.hurried();
    let daemon = world.daemon();
    let (_, card) = settled(&world).await;
    for number in [NUMBER_MAX, u64::MAX] {
        world.cache.write_site_card(&Card { number, ..card.clone() }.encode()).await.unwrap();
        assert_eq!(settled(&world).await.0.number, 1, "{number}");
    }
    let text = Card { number: u64::MAX, ..card }.encode();
    let future = CardRow { number: u64::MAX, text, by: "a:1".to_owned() };
    assert!(store(&world).replace_site_card(Some(1), &future).await.unwrap());
    reload(&world, &daemon, WITH_VIEWS).await;
    world.set(WITH_VIEWS);
    let (row, card) = settled(&world).await;
    assert_eq!((row.number, card.metrics.len()), (1, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_whose_metrics_differ_warns_until_it_agrees() {
    let mut world = World::new("card_differs", ADMIN).await.hurried();
    let first = world.daemon();
    settled(&world).await;
    world.set(WITH_VIEWS);
    let second = world.daemon();
    let (row, _) = settled(&world).await;
    first.logged("\"site-differs\"").await;
    let url = url(&first).await;
    let status = || stdout(&world.tallyd(&["status", "--url", &url]));
    let trouble = format!("differ from the site card, which clients read: metrics (card of {})", row.by);
    eventually("the status has the difference", || async { status().contains(&trouble) }).await;
    // The daemon checks the card again before it repairs the key.
    unlink(&world).await;
    settled(&world).await;
    reload(&world, &first, WITH_VIEWS).await;
    eventually("the status has no difference", || async { !status().contains(&trouble) }).await;
    for (daemon, warnings) in [(&first, 1), (&second, 0)] {
        assert_eq!(daemon.log().matches("\"site-differs\"").count(), warnings, "{}", daemon.log());
    }
    assert_eq!(settled(&world).await.0, row, "a reload with the same settings must not change the card");
    for daemon in [first, second] {
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_daemons_that_start_at_once_leave_one_card() {
    let world = World::new("card_start", "").await;
    let daemons = [world.daemon(), world.daemon()];
    for daemon in &daemons {
        daemon.logged("\"consuming\"").await;
    }
    assert_eq!(settled(&world).await.0.number, 1);
    assert_eq!(world.count("SELECT COUNT(*) FROM site_card").await, 1);
    for daemon in daemons {
        assert!(!daemon.log().contains("\"site-differs\""), "{}", daemon.log());
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_daemons_that_replace_a_card_only_one_wins() {
    let world = World::new("card_race", "").await;
    let store = store(&world);
    for former in [None, Some(1), Some(2)] {
        let number = former.map_or(1, |former| former + 1);
        let row = |by: &str| CardRow { number, text: "{}".to_owned(), by: by.to_owned() };
        let (one, other) = (row("a:1"), row("b:1"));
        let (first, second) =
            tokio::join!(store.replace_site_card(former, &one), store.replace_site_card(former, &other));
        assert_ne!(first.unwrap(), second.unwrap(), "{former:?}");
        assert!([one, other].contains(&store.site_card().await.unwrap().unwrap()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_with_other_settings_changes_the_card_once() {
    let mut world = World::new("card_reload", "").await;
    let daemons = [world.daemon(), world.daemon()];
    settled(&world).await;
    let settings = "[metrics]\nlike = 1\nview = 2\n";
    for daemon in &daemons {
        reload(&world, daemon, settings).await;
    }
    world.set(settings);
    let (row, card) = settled(&world).await;
    assert_eq!((row.number, card.metrics.len()), (2, 2));
    for daemon in daemons {
        assert!(daemon.stop().success());
    }
    assert_eq!(settled(&world).await.0, row);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_starts_without_redis_writes_the_card_later() {
    let world = World::new("card_away", "").await;
    let (proxy, url) = Proxy::before(world.config.redis.url.expose()).await;
    proxy.silence();
    let _daemon = world.consuming_with(&[("TALLYD__REDIS__URL", url.as_str())]).await;
    eventually("MySQL has the card", || async { row(&world).await.is_some() }).await;
    assert_eq!(world.cache.site_card().await.unwrap(), None);
    proxy.clear();
    settled(&world).await;
}
