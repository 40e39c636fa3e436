//! A fault: a publisher sends valid events with headers that only the broker should set, and with random priorities.

use std::time::Duration;

use anyhow::{Result, ensure};
use lapin::BasicProperties;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldArray, FieldTable};
use tallyd_core::event::LikeEvent;
use tallyd_core::event::encode_like;
use tallyd_core::model::{Micros, Target, TargetId, UserId};
use tallyd_rabbitmq::{Broker, Link};
use tokio::time::{Instant, sleep};

use super::{Fault, Server};
use crate::checker::mark;
use crate::dice::Dice;
use crate::history::{Answer, Call, What, now};
use crate::site::Site;
use crate::users::VIDEO;

/// Only this publisher uses targets with this id or higher ids.
const FIRST: u64 = 2_000_000;

const TARGETS: u64 = 50;
const USERS: u64 = 20;

/// Length of a header that is too long for the column in MySQL.
const LONG: usize = 70_000;

/// Pause between two messages.
const PAUSE: Duration = Duration::from_millis(5);

/// This publisher sends messages that can't be applied, and gives them numbers from this number upwards. All other
/// messages that can't be applied have lower numbers.
const LETTERS: u64 = 1 << 60;

pub fn all() -> Vec<Fault> {
    vec![Fault::new(
        Server::Rabbitmq,
        "rabbitmq-copied-headers",
        "a publisher copies x-delivery-count, x-death and x-first-death-*, with priorities 0 to 9",
        |site, dice, hold| Box::pin(copied(site, dice, hold)),
    )]
}

async fn copied(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let until = Instant::now() + hold;
    let broker = Broker::new(&site.direct_config().amqp)?;
    let link = broker.connect("torture").await?;
    link.call("switch confirms on", link.channel.confirm_select(ConfirmSelectOptions::default())).await?;
    while Instant::now() < until {
        let begin = now();
        let (what, body) = message(&mut dice, begin);
        let routing_key = if let What::Like { user, .. } = what { user } else { 0 };
        let address = (broker.exchange(), routing_key.to_string());
        let published = publish(&link, address, &body, properties(&mut dice)).await;
        let at = if matches!(what, What::Like { .. }) { begin } else { 0 };
        let answer = if published.is_ok() { Answer::Done { at } } else { Answer::NotConfirmed { at } };
        site.recorder.call(Call { begin, end: now(), who: u32::MAX, what, answer });
        published?;
        sleep(PAUSE).await;
    }
    Ok(())
}

/// Makes a like or an unlike, and sometimes a message that can't be parsed.
fn message(dice: &mut Dice, at: i64) -> (What, Vec<u8>) {
    if dice.percent(5) {
        let letter = LETTERS | at.unsigned_abs();
        return (What::Letter { letter, reason: "malformed-json" }, format!("{{ {}", mark(letter)).into_bytes());
    }
    let (target, user, liked) = (FIRST + dice.below(TARGETS), 1 + dice.below(USERS), dice.percent(60));
    let of = Target { kind: VIDEO, id: TargetId(target) };
    let event = LikeEvent { target: of, user: UserId(user), liked, at: Micros(at) };
    (What::Like { target, user, liked }, encode_like(&event, "video", None))
}

fn properties(dice: &mut Dice) -> BasicProperties {
    let mut headers = FieldTable::default();
    if dice.percent(50) {
        headers.insert("x-delivery-count".into(), AMQPValue::LongLongInt(dice.below(2_000).cast_signed()));
    }
    if dice.percent(50) {
        let mut death = FieldTable::default();
        death.insert("queue".into(), AMQPValue::LongString("another".into()));
        death.insert("reason".into(), AMQPValue::LongString("delivery_limit".into()));
        death.insert("count".into(), AMQPValue::LongLongInt(20));
        headers.insert("x-death".into(), AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::FieldTable(death)])));
    }
    if dice.percent(50) {
        let reason = if dice.percent(20) { "r".repeat(LONG) } else { "expired".to_owned() };
        headers.insert("x-first-death-reason".into(), AMQPValue::LongString(reason.into()));
        headers.insert("x-first-death-queue".into(), AMQPValue::LongString("another".into()));
        headers.insert("x-first-death-exchange".into(), AMQPValue::LongString("another".into()));
    }
    let priority = u8::try_from(dice.below(10)).unwrap();
    BasicProperties::default().with_delivery_mode(2).with_priority(priority).with_headers(headers)
}

async fn publish(
    link: &Link,
    (exchange, routing_key): (String, String),
    body: &[u8],
    properties: BasicProperties,
) -> Result<()> {
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    let sent = async {
        link.channel.basic_publish(exchange.into(), routing_key.into(), options, body, properties).await?.await
    };
    let confirmed = link.call("publish", sent).await?;
    ensure!(matches!(confirmed, lapin::Confirmation::Ack(None)), "RabbitMQ did not confirm a message: {confirmed:?}");
    Ok(())
}
