//! One scenario for all packages, with real servers that stall, crash and reject, and the real daemon. At the end
//! MySQL's rows, MySQL's counters and Redis must have each click exactly once.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use redis::AsyncCommands;
use serde_json::{Value, json};
use sqlx::Row;

use super::{Driver, Failure, Package};
use crate::common::proxy::Proxy;
use crate::common::{World, eventually, lose};
use crate::quickstart::logged_in;
use crate::stalling::{Stall, Stalling};

/// Calls that must succeed have this deadline, also on a loaded machine. The client detects a stalled broker within
/// half of this deadline.
const DEADLINE_S: u64 = 8;
/// The deadline of calls that must fail.
const SHORT_S: u64 = 1;
/// Extra time for a loaded machine.
const SLACK: Duration = Duration::from_secs(20);
const ALL: usize = usize::MAX;

/// A package with its test world, and the likes that must exist at the end.
struct Site {
    world: World,
    driver: Driver,
    likes: BTreeSet<(i64, i64)>,
}

impl Site {
    async fn open(&self, amqp: &str, redis: &str, deadline_s: u64) {
        let key_prefix = &self.world.config.redis.key_prefix;
        let options = json!({"amqp_url": amqp, "redis_url": redis, "key_prefix": key_prefix, "deadline_s": deadline_s});
        self.driver.call("open", json!([]), options).await.unwrap();
    }

    fn amqp(&self) -> &str {
        self.world.api.amqp.url.expose()
    }

    fn redis(&self) -> &str {
        self.world.api.redis.url.expose()
    }

    async fn like(&mut self, target: i64, user: i64) {
        self.driver.done("like", json!(["video", target, user])).await;
        self.likes.insert((target, user));
    }

    async fn unlike(&mut self, target: i64, user: i64) {
        self.driver.done("unlike", json!(["video", target, user])).await;
        self.likes.remove(&(target, user));
    }

    async fn numbers(&self, targets: &[i64], metric: &str) -> Vec<Value> {
        let read = self.driver.done("counts", json!(["video", targets, metric])).await;
        let pairs = read.as_array().unwrap();
        assert!(pairs.iter().map(|pair| pair[0].as_i64().unwrap()).eq(targets.iter().copied()), "{read}");
        pairs.iter().map(|pair| pair[1].clone()).collect()
    }
}

fn assert_is(failure: &Failure, class: &str, says: &str) {
    assert!(failure.class == class && failure.message.contains(says), "{failure:?} must be a {class} and say {says}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_package_loses_no_click_and_counts_none_twice() {
    from_the_first_event_to_the_last(Package::Threads).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_asyncio_package_loses_no_click_and_counts_none_twice() {
    from_the_first_event_to_the_last(Package::Asyncio).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_package_loses_no_click_and_counts_none_twice() {
    from_the_first_event_to_the_last(Package::Node).await;
}

async fn from_the_first_event_to_the_last(package: Package) {
    let folder = package.install();
    let settings = "[metrics]\nlike = 1\nview = 2";
    let world = World::new(&format!("package_{}", package.name()), settings).await;
    world.write_card().await;
    let mut site = Site { driver: package.start(folder.path()), world, likes: BTreeSet::new() };
    let mut rejected = refused_logins(&site).await;
    site.open(site.amqp(), site.redis(), DEADLINE_S).await;
    rejected.extend(self::rejected(&site).await);

    let daemon = site.world.daemon();
    daemon.logged("\"consuming\"").await;
    assert!(site.world.tallyd(&["reconcile"]).status.success());
    // The client publishes the rejected events again, unchanged.
    for failure in &rejected {
        let method = if failure.event.is_array() { "publish_many" } else { "publish" };
        site.driver.done(method, json!([failure.event])).await;
    }
    site.likes.extend([(1, 1), (1, 2), (1, 3)]);
    clicks(&mut site).await;
    if package == Package::Threads {
        assert_eq!(site.driver.done("fork", json!([])).await, 0, "the fork's like");
    }
    lists(&mut site).await;
    if package != Package::Threads {
        closed(&mut site).await;
    }
    lost_confirms(&mut site).await;
    dead_and_silent_brokers(&mut site).await;
    reading(&mut site).await;
    end(&site, package).await;
    site.driver.close().await;
}

/// A wrong password is reported immediately, because a retry can't help.
async fn refused_logins(site: &Site) -> Vec<Failure> {
    let [amqp, redis] = [site.amqp(), site.redis()].map(|url| logged_in(url, "tallyd_api", "wrong"));
    site.open(&amqp, &redis, DEADLINE_S).await;
    let began = Instant::now();
    let like = site.driver.fails("like", json!(["video", 1, 1])).await;
    assert_is(&like, "LoginError", "refused the login");
    let list = site.driver.fails("publish_many", json!([likes(1, 2..=3)])).await;
    assert_is(&list, "PublishManyError", "(LoginError 2)");
    assert!(began.elapsed() < Duration::from_secs(DEADLINE_S), "{:?}", began.elapsed());
    assert_is(&site.driver.fails("counts", json!(["video", [1]])).await, "ReadError", "Redis refused the login");
    vec![like, list]
}

/// Publishes without an exchange, without a queue, and to a full queue.
async fn rejected(site: &Site) -> Vec<Failure> {
    let like = || site.driver.fails("like", json!(["video", 1, 1]));
    let link = site.world.broker.connect("test").await.unwrap();
    let none = like().await;
    assert_is(&none, "ReturnedError", "no exchange");
    let exchange = site.world.broker.exchange();
    let (durable, kind) = (ExchangeDeclareOptions { durable: true, ..Default::default() }, lapin::ExchangeKind::Topic);
    let none_yet = FieldTable::default;
    link.channel.exchange_declare(exchange.clone().into(), kind, durable, none_yet()).await.unwrap();
    let returned = like().await;
    assert_is(&returned, "ReturnedError", "no queue takes the event (NO_ROUTE)");

    let queue = format!("{}.full", site.world.name);
    let mut full = FieldTable::default();
    full.insert("x-max-length".into(), AMQPValue::LongInt(0));
    full.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    link.channel.queue_declare(queue.clone().into(), QueueDeclareOptions::default(), full).await.unwrap();
    let options = QueueBindOptions::default();
    let binding = link.channel.queue_bind(queue.clone().into(), exchange.into(), "#".into(), options, none_yet());
    binding.await.unwrap();
    let nacked = like().await;
    assert_is(&nacked, "NackedError", "nack");
    let list = site.driver.fails("publish_many", json!([likes(1, 2..=3)])).await;
    assert_is(&list, "PublishManyError", "2 of 2 events were not confirmed (NackedError 2)");
    assert_eq!(list.event.as_array().unwrap().len(), 2);
    link.channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await.unwrap();
    vec![none, returned, nacked, list]
}

/// Returns a list of likes by these users.
fn likes(target: i64, users: RangeInclusive<i64>) -> Vec<Value> {
    let like = |user: i64| json!({"type": "like", "kind": "video", "target_id": target, "user_id": user.to_string()});
    users.map(like).collect()
}

/// Sends double clicks, unlikes, duplicate counts, and calls that are rejected.
async fn clicks(site: &mut Site) {
    for user in 1..=30 {
        site.likes.insert((42, user));
    }
    // Each user sends two likes, and all likes are sent at the same time.
    let clicks = (0..60).map(|click| site.driver.done("like", json!(["video", 42, click % 30 + 1])));
    join_all(clicks).await;
    site.unlike(42, 7).await;
    site.like(43, 9_007_199_254_740_991).await;
    site.driver.done("like", json!(["video", "9223372036854775807", "9007199254740993"])).await;
    site.likes.insert((i64::MAX, 9_007_199_254_740_993));

    join_all((0..10).map(|_| site.driver.done("count", json!(["video", 42, "view"])))).await;
    let count = site.driver.call("count", json!(["video", 42, "view", 5]), json!({"event_id": "five"})).await.unwrap();
    site.driver.done("publish", json!([count])).await;
    for (method, with, reason) in [
        ("like", json!(["video", 0, 1]), "target-id-out-of-range"),
        ("like", json!(["video", 1, 1.5]), "user-id-out-of-range"),
        ("count", json!(["video", 1, "share"]), "unknown-metric"),
        ("set", json!(["video", 1, "view", 5]), "not-settable"),
        ("publish", json!([{"type": "flip"}]), "unknown-type"),
    ] {
        assert_is(&site.driver.fails(method, with).await, "RefusedError", reason);
    }
}

/// Publishes lists whose confirms arrive, are lost once, or never arrive.
async fn lists(site: &mut Site) {
    let mut list = likes(48, 1..=1_500);
    list.push(json!({"type": "count", "kind": "video", "target_id": 48, "metric": "view", "delta": 2}));
    let published = site.driver.done("publish_many", json!([list])).await;
    let users = published.as_array().unwrap().iter().map(|event| event["user_id"].as_str());
    assert!(users.eq(list.iter().map(|event| event["user_id"].as_str())), "{published}");
    // Publishes the whole list again, unchanged.
    assert_eq!(site.driver.done("publish_many", json!([published])).await, published);

    let once = Stalling::before(site.amqp(), Stall { after: "target_id", callers: 1 }).await;
    site.open(&once.url, site.redis(), DEADLINE_S).await;
    site.driver.done("publish_many", json!([likes(49, 1..=50)])).await;
    assert_eq!((once.stalled(), once.callers()), (1, 2));

    let always = Stalling::before(site.amqp(), Stall { after: "target_id", callers: ALL }).await;
    site.open(&always.url, site.redis(), SHORT_S).await;
    let late = site.driver.fails("publish_many", json!([likes(49, 51..=60)])).await;
    assert_is(&late, "PublishManyError", "10 of 10 events were not confirmed (UnconfirmedError 10)");
    site.open(site.amqp(), site.redis(), DEADLINE_S).await;
    assert_eq!(site.driver.done("publish_many", json!([late.event])).await, late.event);
    site.likes.extend((1..=1_500).map(|user| (48, user)).chain((1..=60).map(|user| (49, user))));
    assert_is(&site.driver.fails("publish_many", json!([[{"type": "flip"}]])).await, "RefusedError", "event 0");
}

/// The client is closed while likes wait for each other: it sends them, but does not wait for their confirm. With threads,
/// nothing shows that they wait already.
async fn closed(site: &mut Site) {
    let key_prefix = &site.world.config.redis.key_prefix;
    let options = json!({
        "amqp_url": site.amqp(), "redis_url": site.redis(), "key_prefix": key_prefix, "deadline_s": 120, "group_ms": 60_000,
    });
    site.driver.call("open", json!([]), options).await.unwrap();
    site.like(50, 1).await;
    let began = Instant::now();
    let waiting = join_all((2..=9).map(|user| site.driver.fails("like", json!(["video", 50, user]))));
    let (failures, ()) = tokio::join!(waiting, site.open(site.amqp(), site.redis(), DEADLINE_S));
    for failure in failures {
        assert_is(&failure, "UnconfirmedError", "the client was closed before RabbitMQ confirmed the event");
    }
    assert!(began.elapsed() < Duration::from_secs(30), "the likes have waited for {:?}", began.elapsed());
    site.likes.extend((2..=9).map(|user| (50, user)));
}

/// The broker accepts an event, but its confirm never arrives.
async fn lost_confirms(site: &mut Site) {
    let began = Instant::now();
    let once = Stalling::before(site.amqp(), Stall { after: "target_id", callers: 1 }).await;
    site.open(&once.url, site.redis(), DEADLINE_S).await;
    site.like(44, 1).await;
    let count = site.driver.call("count", json!(["video", 44, "view"]), json!({})).await.unwrap();
    assert_eq!(count["delta"], 1);
    assert_eq!((once.stalled(), once.callers()), (1, 2), "the client keeps a connection that works");
    assert!(began.elapsed() < Duration::from_secs(DEADLINE_S) + SLACK);

    let always = Stalling::before(site.amqp(), Stall { after: "target_id", callers: ALL }).await;
    site.open(&always.url, site.redis(), SHORT_S).await;
    let late = site.driver.fails("like", json!(["video", 45, 1])).await;
    assert_is(&late, "UnconfirmedError", "confirmed nothing for");
    let counted = site.driver.fails("count", json!(["video", 45, "view", 3])).await;
    assert_is(&counted, "UnconfirmedError", "publish `event` again");

    // The user unlikes, and then the first click is sent again.
    site.open(site.amqp(), site.redis(), DEADLINE_S).await;
    site.unlike(45, 1).await;
    for event in [&late.event, &counted.event, &late.event] {
        assert_eq!(&site.driver.done("publish", json!([event])).await, event);
    }
}

async fn dead_and_silent_brokers(site: &mut Site) {
    // The handshake gets no answer.
    let silent = Stalling::before(site.amqp(), Stall { after: "AMQP", callers: ALL }).await;
    site.open(&silent.url, site.redis(), SHORT_S).await;
    let began = Instant::now();
    assert_is(&site.driver.fails("like", json!(["video", 46, 1])).await, "UnconfirmedError", "did not open");
    // Node counts the time of a timer from the begin of a turn of its event loop.
    let took = began.elapsed() + Duration::from_millis(50);
    assert!((Duration::from_secs(SHORT_S)..Duration::from_secs(SHORT_S) + SLACK).contains(&took), "{took:?}");

    let (proxy, url) = Proxy::before(site.amqp()).await;
    let broker = crate::common::proxy::behind(&proxy.address.to_string());
    site.open(&url, site.redis(), DEADLINE_S).await;
    site.like(46, 2).await;
    // The broker crashes while clicks are in flight, and restarts before their deadline.
    let under_way = (3..=40).map(|user| site.driver.done("like", json!(["video", 46, user])));
    let dies = async {
        proxy.fail();
        tokio::time::sleep(Duration::from_millis(300)).await;
        proxy.lead(broker.clone());
    };
    tokio::join!(join_all(under_way), dies);
    site.likes.extend((3..=40).map(|user| (46, user)));
    // The client's connections break again and again.
    for user in 41..=45 {
        proxy.cut();
        site.like(46, user).await;
    }

    site.open(&url, site.redis(), SHORT_S).await;
    proxy.fail();
    let away = site.driver.fails("like", json!(["video", 46, 46])).await;
    assert_is(&away, "UnconfirmedError", "publish `event` again");
    proxy.lead(broker);
    // The client has reconnected automatically.
    eventually("the broker is back", || async {
        site.driver.call("publish", json!([away.event]), json!({})).await.is_ok()
    })
    .await;
    site.likes.insert((46, 46));
}

/// An unknown count is not zero, and without Redis a read fails.
async fn reading(site: &mut Site) {
    let views = [42, 43, 44, 45];
    let (proxy, url) = Proxy::before(site.redis()).await;
    let redis = crate::common::proxy::behind(&proxy.address.to_string());
    site.open(site.amqp(), &url, DEADLINE_S).await;
    eventually("the views are in Redis", || async {
        site.numbers(&views, "view").await == [json!(15), json!(0), json!(1), json!(3)]
    })
    .await;

    let missing = site.world.cache.keys.missing();
    let () = site.world.redis().await.unlink(&missing).await.unwrap();
    lose(&site.world).await;
    assert_eq!(site.numbers(&views, "view").await, [json!(null), json!(null), json!(null), json!(null)]);
    let noted: BTreeSet<String> = site.world.redis().await.smembers(&missing).await.unwrap();
    let keys = &site.world.cache.keys;
    let expected = views.map(|id| {
        let target = crate::common::target(u64::try_from(id).unwrap());
        keys.bucket_name("video", keys.bucket(target))
    });
    assert_eq!(noted, BTreeSet::from(expected));
    assert!(site.world.tallyd(&["reconcile"]).status.success());
    assert_eq!(site.numbers(&views, "view").await[0], 15);

    proxy.fail();
    assert_is(&site.driver.fails("counts", json!(["video", [42], "view"])).await, "ReadError", "unknown");
    // Publishing needs no Redis.
    site.like(47, 1).await;
    proxy.lead(redis);
    eventually("Redis is back", || async {
        site.driver.call("counts", json!(["video", [42], "view"]), json!({})).await.is_ok()
    })
    .await;

    site.open(site.amqp(), &url, SHORT_S).await;
    assert_eq!(site.numbers(&[44], "view").await, [json!(1)]);
    proxy.silence();
    assert_is(&site.driver.fails("counts", json!(["video", [42], "view"])).await, "ReadError", "unknown");
    proxy.clear();
    // The client must not use a late answer to the earlier call as the answer to this call.
    assert_eq!(site.numbers(&[44, 42], "view").await, [json!(1), json!(15)]);
}

/// Checks the rows and counters in MySQL, and the counters in Redis.
async fn end(site: &Site, package: Package) {
    let world = &site.world;
    world.drained(&world.publisher().await).await;
    let rows = sqlx::query("SELECT target_id, user_id FROM like_record WHERE kind = 1 AND is_del = 0");
    let rows = rows.fetch_all(&world.pool).await.unwrap();
    let id = |row: &sqlx::mysql::MySqlRow, place| i64::try_from(row.get::<u64, _>(place)).unwrap();
    let mut rows: BTreeSet<(i64, i64)> = rows.iter().map(|row| (id(row, 0), id(row, 1))).collect();
    let forked: Vec<(i64, i64)> = rows.extract_if((77, 0)..(78, 0), |_| true).collect();
    assert_eq!(forked.len(), usize::from(package == Package::Threads));
    assert_eq!(rows, site.likes);
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 0);
    let views = "SELECT CAST(SUM(value) AS SIGNED) FROM counter WHERE metric = 2";
    assert_eq!(world.count(views).await, 21);

    // The daemon has added every click, and needed no repair.
    let mut expected = BTreeMap::new();
    for (target, _) in &rows {
        *expected.entry(crate::common::target(u64::try_from(*target).unwrap())).or_insert(0) += 1;
    }
    if package == Package::Threads {
        expected.insert(crate::common::target(77), 1);
    }
    eventually("all likes are in Redis", || async { world.redis_counters().await == expected }).await;
    assert_eq!(
        world.counters().await.into_iter().filter(|(_, likes)| *likes != 0).collect::<BTreeMap<_, _>>(),
        expected
    );
    let report = world.report(&["reconcile", "--dry-run"]);
    assert_eq!((&report["drifted"], &report["counters_off"]), (&0.into(), &0.into()), "{report}");
    assert_eq!(site.numbers(&[1, 42, 43, 44, 45, 48], "like").await, [3, 29, 1, 1, 0, 1_500].map(Value::from));
    let last = site.driver.done("counts", json!(["video", ["9223372036854775807"]])).await;
    assert_eq!(last, json!([["9223372036854775807", 1]]));
    assert_eq!(site.numbers(&[42, 43, 44, 45], "view").await, [15, 0, 1, 3].map(Value::from));
}
