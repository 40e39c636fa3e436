//! A Galera cluster. Every node accepts writes, and a node does not see the locks of other nodes.

use std::process::id;
use std::sync::Arc;
use std::time::Duration;

use sqlx::mysql::{MySqlConnection, MySqlPool};
use sqlx::{AssertSqlSafe, Connection};
use tallyd_base::config::Config;
use tallyd_core::coalesce::LikeState;
use tallyd_core::model::{Addition, Difference, Metric, Micros, UserId};
use tallyd_mysql::jobs::{self, Lock};
use tallyd_mysql::repairs::{Intent, RedisFollows};
use tallyd_mysql::{Store, StoreError, Text, likes, outbox, partitions};

use super::common::ports::free_ports;
use super::common::proxy::Proxy;
use super::common::{Model, World, eventually, target};
use super::servers::{Server, Template, number, run, text};
use super::{publish_lists, stream_of_likes};

/// The nodes of a Galera cluster.
struct Galera {
    /// The ports at which the nodes reach each other.
    groups: Vec<u16>,
    nodes: Vec<Server>,
    pools: Vec<MySqlPool>,
}

impl Galera {
    async fn start(count: usize) -> Self {
        let template = Template::new();
        let mut galera = Self { groups: Vec::new(), nodes: Vec::new(), pools: Vec::new() };
        for _ in 0..count {
            let [group, increment, copy] = free_ports();
            // The first node has no other node to join, so it starts the cluster.
            let mut arguments = arguments([group, increment, copy]);
            arguments
                .push(galera.groups.first().map_or("--wsrep-cluster-address=gcomm://".to_owned(), |port| join(*port)));
            let node = Server::start(&template, &arguments);
            galera.pools.push(node.pool().await);
            galera.nodes.push(node);
            galera.groups.push(group);
            galera.is_whole(galera.nodes.len()).await;
        }
        galera
    }

    /// Waits until each node knows that the cluster has `count` nodes, and until each node has all data of the cluster.
    async fn is_whole(&self, count: usize) {
        for pool in &self.pools {
            eventually("the node is in the cluster", || async {
                let status = "SELECT CONCAT(GROUP_CONCAT(VARIABLE_VALUE ORDER BY VARIABLE_NAME)) FROM information_schema.GLOBAL_STATUS \
                              WHERE VARIABLE_NAME IN ('wsrep_cluster_size', 'wsrep_local_state_comment')";
                text(pool, status).await == format!("{count},Synced")
            })
            .await;
        }
    }

    fn url(&self, node: usize, world: &World) -> String {
        format!("{}{}", self.nodes[node].admin_url(), world.name)
    }
}

fn join(group: u16) -> String {
    format!("--wsrep-cluster-address=gcomm://127.0.0.1:{group}")
}

fn arguments([group, increment, copy]: [u16; 3]) -> Vec<String> {
    let provider = ["/usr/lib/galera/libgalera_smm.so", "/usr/lib64/galera-4/libgalera_smm.so"];
    let provider = provider.iter().find(|path| std::path::Path::new(path).exists()).expect("galera-4 is installed");
    let options = format!(
        "base_port={group};ist.recv_addr=127.0.0.1:{increment};gcache.size=16M;gmcast.listen_addr=tcp://127.0.0.1:{group}"
    );
    vec![
        "--wsrep-on=ON".to_owned(),
        format!("--wsrep-provider={provider}"),
        format!("--wsrep-provider-options={options}"),
        format!("--wsrep-cluster-name=t{}", id()),
        format!("--wsrep-node-address=127.0.0.1:{group}"),
        "--wsrep-sst-method=rsync".to_owned(),
        format!("--wsrep-sst-receive-address=127.0.0.1:{copy}"),
        "--innodb-autoinc-lock-mode=2".to_owned(),
        "--innodb-flush-log-at-trx-commit=0".to_owned(),
    ]
}

/// Cuts a node off from the other nodes, or reconnects it.
async fn isolate(node: &MySqlPool, on: bool) {
    let on = u8::from(on);
    let all = format!("SET GLOBAL wsrep_provider_options = 'gmcast.isolate={on}'");
    if sqlx::raw_sql(AssertSqlSafe(all)).execute(node).await.is_err() {
        // Later versions of MariaDB instead have a separate variable for each option.
        run(node, &format!("SET GLOBAL wsrep_provider_gmcast_isolate = {on}")).await;
    }
}

/// Waits until a node has applied all commits of the other nodes. When one node confirms a commit, another node may not
/// have applied this commit yet.
async fn has_caught_up(node: &MySqlPool) {
    sqlx::raw_sql(
        "SET SESSION wsrep_sync_wait = 1; SELECT COUNT(*) FROM information_schema.SCHEMATA; SET SESSION wsrep_sync_wait = DEFAULT",
    )
    .execute(node)
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_daemons_on_two_nodes_lose_and_double_nothing_while_nodes_are_cut_off_and_killed() {
    if !super::servers::are_here() {
        return;
    }
    let mut galera = Galera::start(3).await;
    let world =
        World::on(galera.nodes[2].admin_url(), "galera", "[amqp]\npartitions = 2\n[consumer]\nbatch_events_max = 200")
            .await;
    for pool in &galera.pools {
        has_caught_up(pool).await;
    }
    let (publisher, client) = (world.publisher().await, world.client());
    let proxy = Proxy::to(galera.nodes[0].address()).await;
    let moving = format!("mysql://root@{}/{}", proxy.address, world.name);
    // The first daemon is configured with only the first partition. So the second daemon, which uses another node, gets
    // the second partition.
    let one = world.daemon_with(&[
        ("TALLYD__MYSQL__URL", moving.as_str()),
        ("TALLYD__AMQP__PARTITIONS", "1"),
        ("TALLYD__AMQP__DECLARE", "false"),
    ]);
    one.logged("consuming").await;
    // The two daemons write rows in different ways.
    let there = galera.url(1, &world);
    let two = world.daemon_with(&[("TALLYD__MYSQL__URL", there.as_str()), ("TALLYD__CONSUMER__READS_FIRST", "true")]);
    two.logged("consuming").await;
    let mut likes = stream_of_likes(21);
    let mut model = Model::default();
    publish_lists(&client, &mut likes, 4_000, &mut model).await;
    for daemon in [&one, &two] {
        daemon.logged("partition-taken").await;
    }
    // The test cuts the first node off from the other nodes, so this node answers every statement with an error. New
    // connections now lead to another node, but connections to the first node stay open.
    isolate(&galera.pools[0], true).await;
    proxy.lead(galera.nodes[2].address());
    publish_lists(&client, &mut likes, 4_000, &mut model).await;
    world.drained(&publisher).await;
    has_caught_up(&world.pool).await;
    world.assert_equals(&model).await;
    isolate(&galera.pools[0], false).await;
    galera.is_whole(3).await;
    // The address leads to the first node again, and then this node is killed.
    proxy.lead(galera.nodes[0].address());
    proxy.cut();
    publish_lists(&client, &mut likes, 2_000, &mut model).await;
    galera.nodes[0].kill();
    publish_lists(&client, &mut likes, 2_000, &mut model).await;
    proxy.lead(galera.nodes[2].address());
    world.drained(&publisher).await;
    has_caught_up(&world.pool).await;
    world.assert_equals(&model).await;
    galera.nodes[0].start_again(join(galera.groups[1]));
    galera.pools[0] = galera.nodes[0].pool().await;
    galera.is_whole(3).await;
    let report = world.report(&["reconcile"]);
    assert_eq!(report["ended"], "done", "{report}");
    let sum = format!("SELECT CAST(SUM(value) AS SIGNED) FROM {}.counter", world.name);
    let sums = [number(&galera.pools[0], &sum).await, number(&galera.pools[1], &sum).await];
    assert_eq!(
        sums,
        [model.counters().values().sum::<i64>(); 2],
        "the first node must have the data of the other nodes"
    );
    assert!(one.stop().success() && two.stop().success());
}

/// A daemon has begun a transaction on the first node when another daemon takes over on the second node. This
/// transaction must not commit, whether its COMMIT arrives before or after the takeover.
#[tokio::test(flavor = "multi_thread")]
async fn who_was_overtaken_on_another_node_commits_nothing() {
    if !super::servers::are_here() {
        return;
    }
    const TRIES: u64 = 8;
    let galera = Galera::start(2).await;
    let world = World::on(galera.nodes[0].admin_url(), "galera_fence", "").await;
    has_caught_up(&galera.pools[1]).await;
    let (here, there) = (store(&world.config, galera.url(0, &world)), store(&world.config, galera.url(1, &world)));
    let mut one = MySqlConnection::connect(&galera.url(0, &world)).await.unwrap();
    let mut two = MySqlConnection::connect(&galera.url(1, &world)).await.unwrap();
    sqlx::query("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").execute(&mut one).await.unwrap();
    partitions::take_partition(&mut one, 0, 1, "one").await.unwrap();
    for user in 1..=TRIES {
        let sql = "SELECT COUNT(*) FROM partition_owner";
        eventually("the other node has the row", || async {
            number(&MySqlPool::connect(&galera.url(1, &world)).await.unwrap(), sql).await == 1
        })
        .await;
        let mut batch = one.begin().await.unwrap();
        partitions::lock_owner(&mut batch, 0).await.unwrap().unwrap();
        let row = ((target(1), UserId(user)), LikeState { at: Micros(1_790_000_000_000_000), liked: true });
        likes::insert_states(&mut batch, &[row]).await.unwrap();
        partitions::take_partition(&mut two, 0, user + 1, "two").await.unwrap();
        assert!(batch.commit().await.is_err(), "the batch of a former owner must not be committed");
    }
    for user in 1..=TRIES {
        let Lock::Taken(run) = here.take_job("reconcile", "full", "one").await.unwrap() else {
            panic!("the lock is held")
        };
        let expired = "UPDATE job_lock SET lease_until = NOW(6) - INTERVAL 1 SECOND";
        sqlx::query(expired).execute(&mut one).await.unwrap();
        let mut write = one.begin().await.unwrap();
        jobs::require_lock(&mut write, "reconcile", run).await.unwrap();
        let row = ((target(2), UserId(user)), LikeState { at: Micros(1_790_000_000_000_000), liked: true });
        likes::insert_states(&mut write, &[row]).await.unwrap();
        let taken = eventually_taken(&there).await;
        assert!(taken > run);
        assert!(write.commit().await.is_err(), "the write of a former run must not be committed");
        let late = here.correct_counters(("reconcile", run, run << 24), RedisFollows::SameRun, &[intent()]).await;
        assert!(matches!(late, Err(StoreError::TakenOver(_))), "{late:?}");
        sqlx::query(expired).execute(&mut two).await.unwrap();
        let known = format!("SELECT CAST(run AS SIGNED) FROM {}.job_lock WHERE lease_until < NOW(6)", world.name);
        eventually("the first node has the row", || async {
            sqlx::query_scalar::<_, i64>(AssertSqlSafe(known.clone()))
                .fetch_optional(&galera.pools[0])
                .await
                .unwrap()
                .is_some_and(|run| run.unsigned_abs() == taken)
        })
        .await;
    }
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record").await, 0);
}

/// Another node writes the partition's row every few milliseconds, so many batches are rolled back between two statements.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_a_commit_elsewhere_aborts_leaves_no_part() {
    if !super::servers::are_here() {
        return;
    }
    const TRIES: usize = 4_000;
    let galera = Galera::start(2).await;
    let world = World::on(galera.nodes[0].admin_url(), "galera_abort", "").await;
    has_caught_up(&galera.pools[1]).await;
    let there = store(&world.config, galera.url(1, &world));
    let mut one = MySqlConnection::connect(&galera.url(0, &world)).await.unwrap();
    partitions::take_partition(&mut one, 0, 1, "one").await.unwrap();
    has_caught_up(&galera.pools[1]).await;
    let rival = tokio::spawn(async move {
        loop {
            let _ = sqlx::raw_sql("UPDATE partition_owner SET batches = batches + 1").execute(&mut one).await;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    let mut committed = 0;
    for _ in 0..TRIES {
        let mut conn = there.acquire().await.unwrap();
        let batch = async |connection: &mut MySqlConnection| {
            let owner = partitions::begin(connection, 0, false).await?.unwrap();
            let mut text = Text::default();
            let addition = Addition { target: target(1), metric: Metric(1), delta: 1 };
            let difference = Difference { target: target(1), metric: Metric(1), delta: 1, at: owner.now };
            likes::add_differences(&mut text, 0, &[difference]);
            outbox::append_after(&mut text, 0, owner.outbox, &[addition], &[]);
            text.run(connection, "add to counters").await?;
            partitions::commit(connection).await
        };
        let ended = conn
            .limit("write a batch", async |connection| {
                let ended = batch(connection).await;
                tallyd_mysql::or_rollback(connection, ended).await
            })
            .await;
        committed += i64::from(ended.is_ok());
    }
    rival.abort();
    has_caught_up(&galera.pools[1]).await;
    let of = async |sql: &str| number(&galera.pools[1], &sql.replace("{}", &world.name)).await;
    let counted = of("SELECT CAST(SUM(value) AS SIGNED) FROM {}.counter").await;
    let rows = of("SELECT COUNT(*) FROM {}.outbox").await;
    assert!((100..TRIES as i64 - 100).contains(&committed), "{committed}");
    assert_eq!((counted, rows), (committed, committed));
}

/// Retries, because the other node can see the new end of the lease only a moment later.
async fn eventually_taken(store: &Store) -> u64 {
    let run = Arc::new(std::sync::Mutex::new(0));
    eventually("another run begins", || async {
        match store.take_job("reconcile", "full", "two").await {
            Ok(Lock::Taken(taken)) => {
                *run.lock().unwrap() = taken;
                true
            }
            _ => false,
        }
    })
    .await;
    *run.lock().unwrap()
}

fn store(config: &Config, url: String) -> Store {
    let mut config = config.mysql.clone();
    config.url = url.as_str().into();
    Store::new(&config, 2).unwrap()
}

fn intent() -> Intent {
    Intent { number: (target(1), Metric(1)), before: 0, added: 1 }
}
