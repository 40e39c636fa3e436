//! Faults of the connections between users, daemons and servers. Connections are cut, slow or silent, or end in the
//! middle of an answer.

use std::time::Duration;

use anyhow::Result;
use tokio::time::{Instant, sleep, sleep_until};

use super::{Fault, Server};
use crate::dice::Dice;
use crate::proxy::Proxy;
use crate::site::Site;

/// How a connection fails.
#[derive(Clone, Copy)]
enum Harm {
    /// All connections close once.
    Cut,
    /// All connections close every two seconds.
    CutAgain,
    /// Each piece of data is delayed by 50 to 300 ms.
    Delayed,
    /// Connections are accepted and stay open, but transfer nothing.
    Silent,
    /// Each connection ends in the middle of an answer.
    Truncated,
}

/// A fault: the kind of failure, the server, and the fault's name and description.
type Row = (Harm, Server, &'static str, &'static str);

const ROWS: [Row; 15] = [
    (Harm::Cut, Server::Mysql, "mysql-line-cut", "all open connections to MySQL are closed"),
    (Harm::CutAgain, Server::Mysql, "mysql-line-cut-again", "connections to MySQL are closed every two seconds"),
    (Harm::Delayed, Server::Mysql, "mysql-line-delayed", "each piece to and from MySQL takes 50 to 300 ms"),
    (Harm::Silent, Server::Mysql, "mysql-line-half-open", "connections to MySQL are accepted, but transfer nothing"),
    (Harm::Truncated, Server::Mysql, "mysql-line-truncated", "connections to MySQL end in the middle of an answer"),
    (Harm::Cut, Server::Redis, "redis-line-cut", "all open connections to Redis are closed"),
    (Harm::CutAgain, Server::Redis, "redis-line-cut-again", "connections to Redis are closed every two seconds"),
    (Harm::Delayed, Server::Redis, "redis-line-delayed", "each piece to and from Redis takes 50 to 300 ms"),
    (Harm::Silent, Server::Redis, "redis-line-half-open", "connections to Redis are accepted, but transfer nothing"),
    (Harm::Truncated, Server::Redis, "redis-line-truncated", "connections to Redis end in the middle of an answer"),
    (Harm::Cut, Server::Rabbitmq, "rabbitmq-line-cut", "all open connections to RabbitMQ are closed"),
    (
        Harm::CutAgain,
        Server::Rabbitmq,
        "rabbitmq-line-cut-again",
        "connections to RabbitMQ are closed every two seconds",
    ),
    (Harm::Delayed, Server::Rabbitmq, "rabbitmq-line-delayed", "each piece to and from RabbitMQ takes 50 to 300 ms"),
    (
        Harm::Silent,
        Server::Rabbitmq,
        "rabbitmq-line-half-open",
        "connections to RabbitMQ are accepted, but transfer nothing",
    ),
    (
        Harm::Truncated,
        Server::Rabbitmq,
        "rabbitmq-line-truncated",
        "connections to RabbitMQ end in the middle of an answer",
    ),
];

/// Returns the faults. Each fault affects the users' proxy, one daemon's proxy or all proxies, at random.
pub fn all() -> Vec<Fault> {
    let fault = |(harm, server, name, about): Row| {
        let fault =
            Fault::new(server, name, about, move |site, dice, hold| Box::pin(inject(site, dice, hold, server, harm)));
        // The fault lasts longer than two heartbeats, and longer than the time limit of a transaction.
        if matches!(harm, Harm::Silent) { fault.hold(8, 20) } else { fault }
    };
    ROWS.into_iter().map(fault).collect()
}

async fn inject(site: &Site, mut dice: Dice, hold: Duration, server: Server, harm: Harm) -> Result<()> {
    let all = site.all_lines(server);
    let one = usize::try_from(dice.below(all.len() as u64)).unwrap();
    let lines = match dice.below(3) {
        // The users' proxy.
        0 => &all[..1],
        1 => &all[one..=one],
        _ => &all[..],
    };
    let until = Instant::now() + hold;
    match harm {
        Harm::Cut => lines.iter().copied().for_each(Proxy::cut),
        Harm::CutAgain => cut_until(lines, until).await,
        Harm::Delayed => lines.iter().for_each(|line| line.delay(50..300)),
        Harm::Silent => lines.iter().copied().for_each(Proxy::silence),
        Harm::Truncated => lines.iter().for_each(|line| line.truncate(truncated_after(&mut dice))),
    }
    if !matches!(harm, Harm::Cut) {
        sleep_until(until).await;
        lines.iter().copied().for_each(Proxy::clear);
    }
    Ok(())
}

async fn cut_until(lines: &[&Proxy], until: Instant) {
    while Instant::now() < until {
        lines.iter().copied().for_each(Proxy::cut);
        sleep(Duration::from_secs(2)).await;
    }
}

/// Returns the number of bytes after which the connection ends. If the number is small, the connection ends before the
/// server has sent its whole greeting.
fn truncated_after(dice: &mut Dice) -> usize {
    let most = if dice.percent(30) { 100 } else { 20_000 };
    usize::try_from(1 + dice.below(most)).unwrap()
}
