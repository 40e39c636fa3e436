//! The packages choose between the gateway and RabbitMQ for each event. A package uses the gateway if API servers count
//! the event's metric, and RabbitMQ if no gateway answers.

use futures_util::future::join_all;
use serde_json::{Value, json};

use super::{Driver, Package};
use crate::common::proxy::{Proxy, behind};
use crate::common::{World, eventually};
use crate::stalling::{Stall, Stalling};

const SETTINGS: &str = "[metrics]\nlike = 1\nview = 2\nshare = 3\n[gateway]\nlisten = \"127.0.0.1:0\"\n\
     [[rule]]\nmetric = \"like\"\nwriter = \"api\"\n[[rule]]\nmetric = \"share\"\nwriter = \"api\"\n";

/// A client of one package, and the target of its clicks.
struct Site<'a> {
    world: &'a World,
    driver: Driver,
    target: u64,
}

impl Site<'_> {
    async fn open(&self, servers: Value, deadline_s: u64) {
        let config = &self.world.config;
        let mut options = json!({
            "prefix": self.world.name, "key_prefix": config.redis.key_prefix, "bucket_bits": config.redis.bucket_bits,
            "metrics": {"like": 1, "view": 2, "share": 3}, "deadline_s": deadline_s,
        });
        options.as_object_mut().unwrap().extend(servers.as_object().unwrap().clone());
        self.driver.call("open", json!([]), options).await.unwrap();
    }

    /// Returns the addresses of all servers. The gateway's address is `gateway`.
    fn servers(&self, gateway: Option<&str>) -> Value {
        let api = &self.world.api;
        let mut servers = json!({"amqp_url": api.amqp.url.expose(), "redis_url": api.redis.url.expose()});
        if let Some(gateway) = gateway {
            servers["gateway"] = gateway.into();
        }
        servers
    }

    async fn like(&self, user: u64) -> Value {
        self.driver.done("like", json!(["video", self.target, user])).await
    }

    async fn number(&self, metric: &str) -> Value {
        let read = self.driver.done("counts", json!(["video", [self.target], metric])).await;
        read[0][1].clone()
    }

    /// The target's rows in MySQL.
    async fn rows(&self) -> i64 {
        let sql = "SELECT COUNT(*) FROM like_record WHERE target_id = ? AND is_del = 0";
        sqlx::query_scalar(sql).bind(self.target).fetch_one(&self.world.pool).await.unwrap()
    }

    async fn written(&self, rows: i64) {
        eventually("the likes are in MySQL", || async { self.rows().await == rows }).await;
    }
}

/// Waits until the daemon has announced the writers.
async fn announced(world: &World) {
    let numbers = r#"{"api":["video:like","video:share"],"#;
    eventually("the daemon announces the writers", || async {
        world.cache.writers().await.unwrap().is_some_and(|text| text.starts_with(numbers))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn packages_count_by_the_gateway_where_api_servers_count() {
    let world = World::new("followed", SETTINGS).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    world.reconcile("--full").await;
    announced(&world).await;
    let gateway = world.gateway().await;
    let url = format!("http://{}", gateway.address);

    for (target, package) in (42..).zip([Package::Threads, Package::Asyncio, Package::Node]) {
        let folder = package.install();
        let site = Site { world: &world, driver: package.start(folder.path()), target };
        counted_at_once(&site, &url).await;
        gateway_without_answers(&site, &url).await;
        without_gateway(&site).await;
        gateway_alone(&site, &url).await;
        site.driver.close().await;
    }

    world.drained(&world.publisher().await).await;
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 0);
    assert_eq!(world.count("SELECT CAST(SUM(value) AS SIGNED) FROM counter WHERE metric = 3").await, 3 * 7);
    // A reconcile adds the events that were not counted. Then all agree.
    world.reconcile("--full").await;
    let report = world.report(&["reconcile", "--dry-run"]);
    assert_eq!((&report["drifted"], &report["counters_off"]), (&0.into(), &0.into()), "{report}");
    let likes: Vec<i64> = world.redis_counters().await.into_values().collect();
    assert_eq!(likes, [22, 22, 22]);
    assert!(gateway.process.stop().success());
    assert!(daemon.stop().success());
    world.close().await;
}

/// The gateway counts an event before the gateway answers the request to publish it.
async fn counted_at_once(site: &Site<'_>, gateway: &str) {
    site.open(site.servers(Some(gateway)), 8).await;
    // Each user sends two likes, and all likes are sent at the same time.
    join_all((0..20).map(|click| site.like(click % 10 + 1))).await;
    assert_eq!(site.number("like").await, 10);
    site.driver.done("unlike", json!(["video", site.target, 1])).await;
    assert_eq!(site.number("like").await, 9);
    let liked = site.like(2).await;
    assert_eq!(
        &site.driver.done("publish", json!([liked])).await["at"],
        &liked["at"],
        "the repeated like must keep the `at` of the first like"
    );

    let event = |metric: &str| json!({"type": "count", "kind": "video", "target_id": site.target, "metric": metric, "delta": 2});
    let mut list = vec![event("share"), event("view")];
    list.extend(
        (11..=20).map(|user| json!({"type": "like", "kind": "video", "target_id": site.target, "user_id": user})),
    );
    let published = site.driver.done("publish_many", json!([list])).await;
    let published = published.as_array().unwrap();
    assert_eq!((&published[0]["metric"], &published[1]["metric"]), (&json!("share"), &json!("view")));
    assert!(published[2..].iter().all(|event| event["at"].is_i64()), "{published:?}");
    assert_eq!((site.number("like").await, site.number("share").await), (19.into(), 2.into()));
    eventually("the daemon counts views", || async { site.number("view").await == 2 }).await;
    site.written(19).await;
}

/// The client waits for the gateway's answer until half of the deadline has passed. Then the client publishes to
/// RabbitMQ.
async fn gateway_without_answers(site: &Site<'_>, gateway: &str) {
    let (proxy, url) = Proxy::before(gateway).await;
    site.open(site.servers(Some(&url)), 4).await;
    proxy.fail();
    site.like(21).await;
    site.written(20).await;
    proxy.lead(behind(&proxy.address.to_string()));
    assert_eq!(site.number("like").await, 19, "only a reconcile counts the like");

    // The gateway counts an event of the metric `share`, but the gateway's answer is lost.
    let stalling = Stalling::before(gateway, Stall { after: "share", callers: 1 }).await;
    site.open(site.servers(Some(&stalling.url)), 4).await;
    let share = site.driver.done("count", json!(["video", site.target, "share", 5])).await;
    assert_eq!((stalling.stalled(), &share["delta"]), (1, &json!(5)));
    assert_eq!(site.number("share").await, 7, "the share counts once");
}

/// Without a gateway the client publishes to RabbitMQ.
async fn without_gateway(site: &Site<'_>) {
    site.open(site.servers(None), 8).await;
    site.like(22).await;
    site.written(21).await;
    assert_eq!(site.number("like").await, 19, "only a reconcile counts the like");
}

/// Clients without RabbitMQ.
async fn gateway_alone(site: &Site<'_>, gateway: &str) {
    site.open(json!({"gateway": gateway}), 8).await;
    site.like(23).await;
    assert_eq!(site.number("like").await, 20);
    let like = |kind: &str| json!({"type": "like", "kind": kind, "target_id": site.target, "user_id": 23});
    let partly = site.driver.fails("publish_many", json!([[like("video"), like("song")]])).await;
    assert_eq!((partly.class.as_str(), &partly.event), ("PublishManyError", &json!([])), "{partly:?}");
    assert!(partly.message.contains("1 of 2 events were not confirmed (RefusedError 1)"), "{partly:?}");
    let below = site.driver.fails("count", json!(["video", site.target, "share", -8])).await;
    assert!(below.class == "RefusedError" && below.message.contains("below-zero"), "{below:?}");

    // The gateway does not answer.
    let (proxy, url) = Proxy::before(gateway).await;
    proxy.fail();
    site.open(json!({"gateway": url}), 1).await;
    let late = site.driver.fails("like", json!(["video", site.target, 24])).await;
    assert!(late.class == "UnconfirmedError" && late.event["user_id"] == "24", "{late:?}");
}
