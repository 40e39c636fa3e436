//! Checks that RabbitMQ answers and has everything that the daemon needs, and that the account has its rights.

use tallyd_base::config::{Config, Map};
use tallyd_base::partitions::queue_of;
use tallyd_core::chain::Chain;
use tallyd_rabbitmq::probe::Found;
use tallyd_rabbitmq::{Broker, BrokerError, Link};

use tallyd_base::cli::check::{Check, What};

const AWAY: &str = "start RabbitMQ, or correct [amqp] url; meanwhile the daemon waits";

const SILENT: &str = "look at the state of RabbitMQ (rabbitmqctl status), and check again";

const ALARM: &str = "look for a memory or disk alarm, which blocks all publishers (rabbitmqctl status), free memory or disk space, and check again";

const REFUSED: &str = "correct the password; if the account does not exist, run accounts.sh of `tallyd init`, or rabbitmqctl add_vhost, \
                       add_user and set_permissions as docs/operations/security.md says";

pub(super) async fn check(config: &Config, broker: &Broker) -> Vec<Check> {
    let (link, mut checks) = match nodes(broker).await {
        Ok(found) => found,
        Err(failed) => return failed,
    };
    if broker.partitions() > 1 {
        checks.push(match broker.probe_plugin().await {
            Ok(true) => Check::ok(What::RabbitmqPlugin, "RabbitMQ has the exchange type x-consistent-hash"),
            Ok(false) => Check::error(
                What::RabbitmqPlugin,
                format!("RabbitMQ lacks the plugin that spreads events over {} partitions", broker.partitions()),
                "run `rabbitmq-plugins enable rabbitmq_consistent_hash_exchange`, or set [amqp] partitions = 1",
            ),
            Err(error) => Check::unanswered(What::RabbitmqPlugin, error, SILENT),
        });
    }
    let mut refused = Vec::new();
    let exchanges = broker.probe_exchanges(&link).await;
    let is_there = matches!(&exchanges, Ok(found) if found.first().is_some_and(|(_, found)| *found != Found::Missing));
    for (what, found) in
        [(What::RabbitmqExchanges, exchanges), (What::RabbitmqQueues, broker.probe_queues(&link).await)]
    {
        match found {
            Ok(found) => things(config.amqp.declare, what, found, &mut checks, &mut refused),
            Err(error) => {
                checks.push(Check::unanswered(what, error, SILENT));
                // The server is silent, so each remaining check would also wait until its time limit.
                return checks;
            }
        }
    }
    for map in &config.maps {
        if let Err(error) = of_map(config, broker, &link, map, &mut checks, &mut refused).await {
            checks.push(Check::unanswered(What::RabbitmqQueues, error, SILENT));
            return checks;
        }
    }
    permissions(broker, &link, is_there, &mut checks, &mut refused).await;
    checks
}

async fn of_map(
    config: &Config,
    broker: &Broker,
    link: &Link,
    map: &Map,
    checks: &mut Vec<Check>,
    refused: &mut Vec<String>,
) -> Result<(), BrokerError> {
    let queue = queue_of(map, broker);
    let Map { name, exchange, .. } = map;
    checks.push(match broker.probe_map_exchange(link, &queue).await? {
        Found::Right => Check::ok(What::RabbitmqExchanges, format!("{exchange} of the map {name}")),
        Found::Missing => Check::error(
            What::RabbitmqExchanges,
            format!("the exchange {exchange} of the map {name} is missing, and tallyd never declares it"),
            "correct `exchange` of [[map]], or declare the exchange first",
        ),
        Found::Different(text) | Found::Refused(text) => Check::error(
            What::RabbitmqPermissions,
            format!("the account has no right to bind a queue to {exchange} of the map {name}: {text}"),
            "give the account the right to read the exchange, as docs/moving-reference.md says",
        ),
    });
    let found = broker.probe_map_queue(link, &queue).await?;
    things(config.amqp.declare, What::RabbitmqQueues, vec![(queue.queue, found)], checks, refused);
    Ok(())
}

async fn nodes(broker: &Broker) -> Result<(Link, Vec<Check>), Vec<Check>> {
    let (mut links, mut failed) = (Vec::new(), Vec::new());
    for (name, asked) in broker.probe_nodes().await {
        match asked {
            Ok(link) => links.push((name, link)),
            Err(error) => failed.push((name, error)),
        }
    }
    let names: Vec<String> = links.iter().map(|(name, _)| name.clone()).collect();
    let Some((_, link)) = links.into_iter().next() else {
        let problem = |(name, error): (String, BrokerError)| {
            Check::failed(What::RabbitmqAnswers, anyhow::Error::from(error).context(name), AWAY, REFUSED)
        };
        return Err(failed.into_iter().map(problem).collect());
    };
    let found = format!("{}, vhost \"{}\"", names.join(" and "), broker.vhost());
    let mut checks = vec![Check::ok(What::RabbitmqAnswers, found)];
    let away = |(name, error): (String, BrokerError)| {
        let advice = "start that node, or correct [amqp] url and seeds; meanwhile tallyd uses the other nodes";
        Check::warning(What::RabbitmqAnswers, format!("{name}: {}", Chain(&error)), advice)
    };
    checks.extend(failed.into_iter().map(away));
    Ok((link, checks))
}

fn things(declare: bool, what: What, found: Vec<(String, Found)>, checks: &mut Vec<Check>, refused: &mut Vec<String>) {
    let (mut right, mut missing) = (Vec::new(), Vec::new());
    for (name, found) in found {
        match found {
            Found::Right => right.push(name),
            Found::Missing => missing.push(name),
            Found::Refused(text) => refused.push(text),
            Found::Different(text) => {
                let advice = "delete it once it is empty, and the daemon declares it again; or set [amqp] declare = false; or keep its old \
                              settings ([amqp] queue_type)";
                checks.push(Check::error(
                    what,
                    format!("{name} has other settings than tallyd declares: {text}"),
                    advice,
                ));
            }
        }
    }
    let missing = missing.join(", ");
    match (missing.is_empty(), declare) {
        (true, _) if right.is_empty() => {}
        (true, _) => checks.push(Check::ok(what, right.join(", "))),
        (false, true) => checks.push(Check::ok(what, format!("the daemon will declare {missing}"))),
        (false, false) => checks.push(Check::error(
            what,
            format!("missing, and [amqp] declare is false: {missing}"),
            "declare them as docs/operations/security.md says, or set [amqp] declare = true",
        )),
    }
}

async fn permissions(broker: &Broker, link: &Link, is_there: bool, checks: &mut Vec<Check>, refused: &mut Vec<String>) {
    // tallyd publishes fence messages to the exchange with the empty name. Producers and `tallyd dead replay` publish
    // to the exchange of the events.
    let mut may = Vec::new();
    let events = broker.exchange();
    for exchange in [Some(""), is_there.then_some(events.as_str())].into_iter().flatten() {
        match broker.probe_publish(link, exchange).await {
            Ok(Found::Refused(text)) => refused.push(text),
            Ok(_) => may.push(if exchange.is_empty() { "amq.default" } else { exchange }),
            Err(error) => {
                checks.push(Check::unanswered(What::RabbitmqPermissions, error, ALARM));
                may.clear();
                break;
            }
        }
    }
    if !refused.is_empty() {
        let advice = "run `rabbitmqctl set_permissions`, as docs/operations/security.md says";
        checks.push(Check::error(What::RabbitmqPermissions, refused.join("; "), advice));
    } else if !may.is_empty() {
        let found = format!("the account can publish to {}", may.join(" and "));
        checks.push(Check::ok(What::RabbitmqPermissions, found));
    }
}
