//! A site has its own JSON format and its own exchange. tallyd consumes the site's events while the site's old worker
//! still runs.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod command;
mod fences;
mod letters;
#[cfg(feature = "fault-points")]
mod order;
mod refused;
mod traffic;
mod wrong;

use lapin::ExchangeKind;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use serde_json::{Value, json};
use tallyd_rabbitmq::{Link, Publisher};

use crate::common::{Daemon, World, eventually};

/// A site with its exchange, and with the queue of its old worker.
struct Site {
    world: World,
    exchange: String,
    link: Link,
    publisher: Publisher,
}

/// Declares an exchange, as the site does.
pub(crate) async fn declare_exchange(link: &Link, exchange: &str) {
    let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    let declare = link.channel.exchange_declare(exchange.into(), ExchangeKind::Topic, durable, FieldTable::default());
    declare.await.unwrap();
}

/// Returns settings with a map that reads from `exchange`. `unit` is the unit of the times in the events.
fn settings(exchange: &str, unit: &str) -> String {
    format!(
        "[kinds]\nvideo = 1\nfilm = 2\n[metrics]\nlike = 1\nview = 2\n\
         [[map]]\nname = \"site\"\nnumber = 7\nexchange = \"{exchange}\"\nbinding_keys = [\"user.*\"]\nlist = \"/events\"\n\
         type = {{ pointer = \"/action\", values = {{ LIKE = \"like\", UNLIKE = \"unlike\", VIEW = \"count\" }} }}\n\
         kind = {{ pointer = \"/object/kind\", values = {{ \"1\" = \"video\" }} }}\n\
         target_id = {{ pointer = \"/object/id\" }}\nuser_id = {{ pointer = \"/actor/id\" }}\n\
         at = {{ pointer = \"/ts\", unit = \"{unit}\" }}\nmetric = {{ constant = \"view\" }}\n\
         delta = {{ constant = \"1\" }}\nevent_id = {{ pointer = \"/uid\" }}\n"
    )
}

impl Site {
    async fn new(name: &str, unit: &str) -> Self {
        let world = World::new(name, &settings("{world}.site", unit)).await;
        let exchange = format!("{}.site", world.name);
        let link = world.broker.connect("test").await.unwrap();
        declare_exchange(&link, &exchange).await;
        let old = format!("{exchange}.worker");
        let durable = QueueDeclareOptions::durable();
        link.channel.queue_declare(old.as_str().into(), durable, FieldTable::default()).await.unwrap();
        let bind = QueueBindOptions::default();
        let bound =
            link.channel.queue_bind(old.into(), exchange.as_str().into(), "#".into(), bind, FieldTable::default());
        bound.await.unwrap();
        let publisher = world.broker.connect_publisher("test").await.unwrap();
        Self { world, exchange, link, publisher }
    }

    /// Starts a daemon, and waits until it consumes events and the map's queue.
    async fn daemon(&self) -> Daemon {
        let daemon = self.world.daemon();
        eventually("the queue is bound", || async { daemon.log().matches("\"consuming\"").count() == 2 }).await;
        daemon
    }

    /// Publishes a message with events, as the site's servers do.
    async fn publish(&self, body: &Value) {
        self.publisher.publish(&self.exchange, "user.7", body.to_string().as_bytes()).await.unwrap();
    }

    fn queue(&self) -> String {
        self.world.broker.map_queue("site")
    }

    /// Returns the number of messages in the old worker's queue.
    async fn of_the_old_worker(&self) -> u32 {
        self.link.depth(&format!("{}.worker", self.exchange)).await.unwrap().messages().unwrap()
    }

    async fn close(self) {
        let channel = &self.link.channel;
        for queue in [self.queue(), format!("{}.worker", self.exchange)] {
            let _ = channel.queue_delete(queue.into(), Default::default()).await;
        }
        channel.exchange_delete(self.exchange.as_str().into(), Default::default()).await.unwrap();
    }
}

/// Makes an event of the site, with `ts` in the map's unit.
fn event(action: &str, video: u64, user: u64, ts: i64) -> Value {
    json!({ "v": 3, "action": action, "object": { "kind": 1, "id": video.to_string() }, "actor": { "id": user }, "ts": ts,
            "uid": format!("{action}-{video}-{user}-{ts}") })
}

/// Now in milliseconds.
fn now_ms() -> i64 {
    tallyd_base::runtime::clock::now().0 / 1_000
}
