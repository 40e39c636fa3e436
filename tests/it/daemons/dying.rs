//! One after another, daemons crash, freeze or lose their network, while users click and reconcile runs compare
//! counters.

use std::cell::OnceCell;

use crate::common::proxy::Proxy;
use crate::common::site::{Site, all_held, owners, taken_from};
use crate::common::{Daemon, World, eventually};

const SETTINGS: &str = "[amqp]\npartitions = 4\nheartbeat_s = 1\n[consumer]\ndatabase_away_max = \"1s\"\n\
    [reconcile]\nfull_cron = \"*/2 * * * * *\"\n";

/// A daemon that reaches each server through a proxy.
struct Host {
    daemon: Daemon,
    mysql: Proxy,
    rabbitmq: Proxy,
    redis: Proxy,
}

impl Host {
    async fn new(world: &World) -> Self {
        let (rabbitmq, amqp_url) = Proxy::before(world.config.amqp.url.expose()).await;
        let (mysql, mysql_url) = Proxy::before(world.config.mysql.url.expose()).await;
        let (redis, redis_url) = Proxy::before(world.config.redis.url.expose()).await;
        let urls = [
            ("TALLYD__AMQP__URL", amqp_url.as_str()),
            ("TALLYD__MYSQL__URL", mysql_url.as_str()),
            ("TALLYD__REDIS__URL", redis_url.as_str()),
        ];
        Self { daemon: world.daemon_with(&urls), mysql, rabbitmq, redis }
    }
}

/// Waits until a running daemon holds the first partition. Then removes that daemon from `hosts`, and returns it.
async fn holder(world: &World, hosts: &mut Vec<Host>) -> Host {
    let found = OnceCell::new();
    eventually("a running daemon has the first partition", || async {
        let owners = owners(world).await;
        let Some(owner) = owners.get(&0) else { return false };
        let place = hosts.iter().position(|host| owner.ends_with(&format!(":{}", host.daemon.child.id())));
        place.is_some_and(|place| found.set(place).is_ok())
    })
    .await;
    hosts.remove(*found.get().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn daemons_that_die_freeze_and_are_cut_off_in_turn_lose_and_double_nothing() {
    let world = World::new("dying", SETTINGS).await;
    world.publisher().await;
    assert!(world.tallyd(&["reconcile"]).status.code() == Some(0));
    let mut hosts = vec![Host::new(&world).await, Host::new(&world).await, Host::new(&world).await];
    let site = Site::open(&world);
    all_held(&world).await;
    let mut dead = holder(&world, &mut hosts).await;
    dead.daemon.signal("KILL");
    dead.daemon.wait();
    taken_from(&world, &dead.daemon).await;
    hosts.push(Host::new(&world).await);
    site.clicked(200).await;

    let frozen = holder(&world, &mut hosts).await;
    frozen.daemon.signal("STOP");
    taken_from(&world, &frozen.daemon).await;
    frozen.daemon.signal("CONT");
    hosts.push(frozen);
    site.clicked(200).await;

    // First the daemon loses its connection to the broker. Then the daemon loses MySQL, so that another daemon gets its
    // partitions.
    let networks: [fn(&Host) -> &Proxy; 2] = [|host| &host.rabbitmq, |host| &host.mysql];
    for network in networks {
        let silent = holder(&world, &mut hosts).await;
        network(&silent).hold();
        taken_from(&world, &silent.daemon).await;
        network(&silent).release();
        network(&silent).cut();
        hosts.push(silent);
        site.clicked(200).await;
    }

    let cut = holder(&world, &mut hosts).await;
    cut.redis.cut();
    cut.mysql.cut();
    cut.rabbitmq.cut();
    hosts.push(cut);
    site.clicked(200).await;
    site.end(&world).await;
    assert_eq!(world.count("SELECT COUNT(*) FROM repair").await, 0, "all counters must be right");
    assert!(world.count("SELECT COUNT(*) FROM job_run").await > 2, "daemons must have run reconciles");
    for host in hosts {
        assert!(host.daemon.stop().success());
    }
}
