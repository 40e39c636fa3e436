//! The site that moves to tallyd, with its table, keys, worker, API servers and users.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use redis::aio::MultiplexedConnection;
use serde_json::{Value, json};
use sqlx::mysql::MySqlPoolOptions;
use sqlx::{AssertSqlSafe, MySqlPool, Row};
use tallyd_core::event::{LikeEvent, encode_count};
use tallyd_core::model::{TargetId, UserId};
use tallyd_rabbitmq::{Broker, Publisher};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::common::private::Private;
use crate::common::{Dice, body, eventually, stack, target};

pub const TARGETS: u64 = 20;
const USERS: u64 = 200;

/// Users who liked long ago and never click again.
pub const QUIET: std::ops::Range<u64> = 1_000..1_050;

/// The id of a post whose like count in Redis is wrong, and the number by which the count is too high.
pub const WRONG: (u64, i64) = (3, 5);

/// The ids of deleted posts, which no longer have rows but still have keys. A reconcile repairs so many targets only
/// with `--force`.
const DELETED: std::ops::Range<u64> = 1_001..1_151;

/// The pause between two clicks.
const CLICK_EVERY: Duration = Duration::from_millis(10);

/// Defines how the API servers process a click.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Servers {
    /// The servers publish likes. They do not publish views, but count them in Redis.
    #[default]
    Counting,
    /// The servers publish likes and views.
    Publishing,
    /// The servers publish events in tallyd's own format.
    Own,
}

/// Records all clicks of the users.
#[derive(Default)]
pub struct Clicks {
    pub servers: Servers,
    pub likes: BTreeSet<(u64, u64)>,
    pub views: BTreeMap<u64, i64>,
    /// Maps a post to the number of its published views.
    pub views_published: BTreeMap<u64, i64>,
    /// The number of published likes and unlikes.
    pub published: u64,
}

/// The parts of the site.
pub struct OldSite {
    pub database: String,
    pub exchange: String,
    pub queue: String,
    /// The exchange for events in tallyd's own format.
    own_exchange: String,
    pub redis: Private,
    pub pool: MySqlPool,
    broker: Broker,
    /// While a test holds this lock, users can't click.
    pub clicks: Arc<Mutex<Clicks>>,
    users: Option<(CancellationToken, JoinHandle<()>)>,
    worker: Option<(CancellationToken, JoinHandle<()>)>,
    /// The number of likes and unlikes that the worker has written.
    written: Arc<AtomicU64>,
}

impl OldSite {
    /// Starts a site that already has likes, with its worker and with users who click.
    pub async fn open(database: &str, own_exchange: String, broker: &Broker) -> Self {
        let admin = MySqlPool::connect(&format!("{}mysql", stack("MYSQL_URL"))).await.unwrap();
        sqlx::query(AssertSqlSafe(format!("CREATE DATABASE {database}"))).execute(&admin).await.unwrap();
        admin.close().await;
        let url = format!("{}{database}", stack("MYSQL_URL"));
        let pool = MySqlPoolOptions::new().max_connections(3).connect(&url).await.unwrap();
        let table = "CREATE TABLE likes (post_id BIGINT, user_id BIGINT, created_at DATETIME NOT NULL DEFAULT (UTC_TIMESTAMP), PRIMARY KEY (post_id, user_id))";
        sqlx::query(table).execute(&pool).await.unwrap();
        let exchange = format!("{database}.events");
        let queue = format!("{database}.worker");
        let link = broker.connect("test").await.unwrap();
        crate::map::declare_exchange(&link, &exchange).await;
        let mut site = Self {
            database: database.to_owned(),
            exchange,
            queue,
            own_exchange,
            redis: Private::start(&[]).await,
            pool,
            broker: broker.clone(),
            clicks: Arc::default(),
            users: None,
            worker: None,
            written: Arc::default(),
        };
        site.like_long_ago().await;
        site.start_worker().await;
        site.let_users_click().await;
        site
    }

    /// Adds old likes and views, and writes their counts into keys of Redis. Some of these keys expire soon.
    async fn like_long_ago(&self) {
        let mut clicks = self.clicks.lock().await;
        let mut redis = self.redis.connect().await;
        let mut pipeline = redis::pipe();
        for post in 1..=TARGETS {
            let rows: Vec<String> = QUIET.map(|user| format!("({post}, {user}, '2024-05-06 07:08:09')")).collect();
            let sql = format!("INSERT INTO likes VALUES {}", rows.join(","));
            sqlx::query(AssertSqlSafe(sql)).execute(&self.pool).await.unwrap();
            clicks.likes.extend(QUIET.map(|user| (post, user)));
            let likes = i64::try_from(QUIET.count()).unwrap() + if post == WRONG.0 { WRONG.1 } else { 0 };
            pipeline.cmd("SET").arg(format!("like:count:{post}")).arg(likes).arg("EX").arg(900).ignore();
            pipeline.cmd("SET").arg(format!("view:count:{post}")).arg(post * 100).arg("EX").arg(900).ignore();
            clicks.views.insert(post, i64::try_from(post * 100).unwrap());
        }
        let () = pipeline.query_async(&mut redis).await.unwrap();
    }

    /// Starts the worker. If the worker's queue is missing, the worker declares it.
    pub async fn start_worker(&mut self) {
        let link = self.broker.connect("test").await.unwrap();
        let (queue, durable) = (self.queue.as_str(), QueueDeclareOptions::durable());
        link.channel.queue_declare(queue.into(), durable, FieldTable::default()).await.unwrap();
        let (exchange, bind) = (self.exchange.as_str(), QueueBindOptions::default());
        link.channel
            .queue_bind(queue.into(), exchange.into(), "like.#".into(), bind, FieldTable::default())
            .await
            .unwrap();
        link.channel.basic_qos(20, BasicQosOptions::default()).await.unwrap();
        let consume = BasicConsumeOptions::default();
        let mut messages =
            link.channel.basic_consume(queue.into(), "worker".into(), consume, FieldTable::default()).await.unwrap();
        let (stop, pool, mut redis) = (CancellationToken::new(), self.pool.clone(), self.redis.connect().await);
        let (stopped, written) = (stop.clone(), Arc::clone(&self.written));
        let work = async move {
            while let Some(Some(message)) = stopped.run_until_cancelled(messages.next()).await {
                let message = message.unwrap();
                work(&pool, &mut redis, &serde_json::from_slice(&message.data).unwrap()).await;
                message.ack(BasicAckOptions::default()).await.unwrap();
                written.fetch_add(1, Ordering::Relaxed);
            }
            // When the channel closes, RabbitMQ requeues the messages that the worker has not written.
            link.channel.close(200, "stopped".into()).await.unwrap();
        };
        self.worker = Some((stop, tokio::spawn(work)));
    }

    pub async fn stop_worker(&mut self) {
        let (stop, worker) = self.worker.take().unwrap();
        stop.cancel();
        worker.await.unwrap();
    }

    async fn let_users_click(&mut self) {
        let publisher = self.broker.connect_publisher("test").await.unwrap();
        let (clicks, stop) = (Arc::clone(&self.clicks), CancellationToken::new());
        let exchanges = [self.exchange.clone(), self.own_exchange.clone()];
        let mut ways = Ways { publisher, exchanges, redis: self.redis.connect().await };
        let stopped = stop.clone();
        let users = async move {
            let (mut dice, mut every) = (Dice::of_run(53), tokio::time::interval(CLICK_EVERY));
            while stopped.run_until_cancelled(every.tick()).await.is_some() {
                click(&mut *clicks.lock().await, &mut dice, &mut ways).await;
            }
        };
        self.users = Some((stop, tokio::spawn(users)));
    }

    /// Waits until users have published `more` further likes and unlikes.
    pub async fn clicked(&self, more: u64) {
        let until = self.clicks.lock().await.published + more;
        eventually("users click", || async { self.clicks.lock().await.published >= until }).await;
    }

    /// Deletes a row of the old table, and publishes no event.
    pub async fn delete_silently(&self, post: u64, user: u64) {
        sqlx::query("DELETE FROM likes WHERE post_id = ? AND user_id = ?")
            .bind(post)
            .bind(user)
            .execute(&self.pool)
            .await
            .unwrap();
        self.clicks.lock().await.likes.remove(&(post, user));
        let () = redis::cmd("DECR")
            .arg(format!("like:count:{post}"))
            .query_async(&mut self.redis.connect().await)
            .await
            .unwrap();
    }

    /// Waits until the worker has written all events that are already published.
    pub async fn worker_has_all(&self) {
        let published = self.clicks.lock().await.published;
        eventually("the old worker has written all clicks", || async {
            self.written.load(Ordering::Relaxed) >= published
        })
        .await;
    }

    /// Makes keys for posts that were deleted long ago.
    pub async fn leave_keys_of_deleted_posts(&self) {
        let mut pipeline = redis::pipe();
        for post in DELETED {
            pipeline.cmd("SET").arg(format!("like:count:{post}")).arg(3).ignore();
        }
        let () = pipeline.query_async(&mut self.redis.connect().await).await.unwrap();
    }

    /// Returns how many keys of deleted posts have at least one like.
    pub async fn deleted_posts_that_are_liked(&self) -> usize {
        let keys: Vec<String> = DELETED.map(|post| format!("like:count:{post}")).collect();
        let numbers: Vec<i64> =
            redis::cmd("MGET").arg(keys).query_async(&mut self.redis.connect().await).await.unwrap();
        numbers.iter().filter(|number| **number != 0).count()
    }

    /// Returns the likes in the old table.
    pub async fn table(&self) -> BTreeSet<(u64, u64)> {
        let sql = "SELECT CAST(post_id AS UNSIGNED), CAST(user_id AS UNSIGNED) FROM likes";
        let rows = sqlx::query(sql).fetch_all(&self.pool).await.unwrap();
        rows.iter().map(|row| (row.get(0), row.get(1))).collect()
    }

    /// Returns each post's count of this metric from the site's keys in Redis, without the counts that are zero.
    pub async fn keys(&self, metric: &str) -> BTreeMap<u64, i64> {
        let mut redis = self.redis.connect().await;
        let mut numbers = BTreeMap::new();
        for post in 1..=TARGETS {
            let found: Option<i64> =
                redis::cmd("GET").arg(format!("{metric}:count:{post}")).query_async(&mut redis).await.unwrap();
            numbers.insert(post, found.unwrap_or_default());
        }
        numbers.retain(|_, number| *number != 0);
        numbers
    }

    /// Returns the number of keys that have an expiry.
    pub async fn keys_that_end(&self) -> usize {
        let mut redis = self.redis.connect().await;
        let mut pipeline = redis::pipe();
        for post in 1..=TARGETS {
            pipeline.cmd("TTL").arg(format!("like:count:{post}")).cmd("TTL").arg(format!("view:count:{post}"));
        }
        let ends: Vec<i64> = pipeline.query_async(&mut redis).await.unwrap();
        ends.iter().filter(|left| **left >= 0).count()
    }

    pub async fn stop_users(&mut self) {
        let (stop, users) = self.users.take().unwrap();
        stop.cancel();
        users.await.unwrap();
    }

    /// Stops the worker, and deletes everything that the test has made.
    pub async fn close(mut self) {
        if self.worker.is_some() {
            self.stop_worker().await;
        }
        let link = self.broker.connect("test").await.unwrap();
        let _ = link.channel.queue_delete(self.queue.as_str().into(), Default::default()).await;
        link.channel.exchange_delete(self.exchange.as_str().into(), Default::default()).await.unwrap();
        sqlx::query(AssertSqlSafe(format!("DROP DATABASE {}", self.database))).execute(&self.pool).await.unwrap();
    }
}

/// Writes a like or unlike as the old worker does. Changes the count in Redis only if a row changes.
async fn work(pool: &MySqlPool, redis: &mut MultiplexedConnection, event: &Value) {
    let post: u64 = event["object"]["id"].as_str().unwrap().parse().unwrap();
    let user = event["actor"]["id"].as_u64().unwrap();
    let (sql, count) = match event["action"].as_str().unwrap() {
        "LIKE" => ("INSERT IGNORE INTO likes (post_id, user_id) VALUES (?, ?)", "INCR"),
        _ => ("DELETE FROM likes WHERE post_id = ? AND user_id = ?", "DECR"),
    };
    if sqlx::query(sql).bind(post).bind(user).execute(pool).await.unwrap().rows_affected() == 1 {
        let () = redis::cmd(count).arg(format!("like:count:{post}")).query_async(redis).await.unwrap();
    }
}

/// The connections that a click needs.
struct Ways {
    publisher: Publisher,
    /// The exchange of the site, and the exchange for events in tallyd's own format.
    exchanges: [String; 2],
    redis: MultiplexedConnection,
}

/// A user clicks, and an API server processes the click.
async fn click(clicks: &mut Clicks, dice: &mut Dice, ways: &mut Ways) {
    let (post, user) = (1 + dice.below(TARGETS), 1 + dice.below(USERS));
    if dice.percent(20) {
        view(clicks.servers, post, ways).await;
        *clicks.views.entry(post).or_default() += 1;
        if clicks.servers != Servers::Counting {
            *clicks.views_published.entry(post).or_default() += 1;
        }
        return;
    }
    let liked = dice.percent(60);
    like(clicks.servers, post, user, liked, ways).await;
    clicks.published += 1;
    match liked {
        true => clicks.likes.insert((post, user)),
        false => clicks.likes.remove(&(post, user)),
    };
}

async fn view(servers: Servers, post: u64, Ways { publisher, exchanges: [exchange, own], redis }: &mut Ways) {
    let at = tallyd_base::runtime::clock::now();
    let id = format!("view-{post}-{}", at.0);
    match servers {
        Servers::Counting => {
            let () = redis::cmd("INCR").arg(format!("view:count:{post}")).query_async(redis).await.unwrap();
        }
        Servers::Publishing => {
            let event = json!({ "action": "VIEW", "object": object(post), "uid": id, "ts": at.0 / 1_000 });
            publisher.publish(exchange, "view.page", event.to_string().as_bytes()).await.unwrap();
        }
        Servers::Own => {
            let event = encode_count(TargetId(post), ("video", "view"), 1, at, &id, None);
            publisher.publish(own, &post.to_string(), &event).await.unwrap();
        }
    }
}

async fn like(servers: Servers, post: u64, user: u64, liked: bool, Ways { publisher, exchanges, .. }: &Ways) {
    let ([exchange, own], at) = (exchanges, tallyd_base::runtime::clock::now());
    if servers == Servers::Own {
        let event = LikeEvent { target: target(post), user: UserId(user), at, liked };
        publisher.publish(own, &user.to_string(), &body(&event).1).await.unwrap();
    } else {
        let action = if liked { "LIKE" } else { "UNLIKE" };
        let event = json!({ "action": action, "object": object(post), "actor": { "id": user }, "ts": at.0 / 1_000 });
        publisher.publish(exchange, "like.button", event.to_string().as_bytes()).await.unwrap();
    }
}

fn object(post: u64) -> Value {
    json!({ "kind": 1, "id": post.to_string() })
}
