//! First the API servers of a site count the likes, then the daemon counts the likes, and then the API servers again.
//! Users click during both changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use tallyd_client::{Clicked, Client};
use tallyd_core::event::LikeEvent;
use tallyd_core::kinds::LIKE;
use tallyd_core::model::{Micros, Target, UserId};
use tallyd_core::rules::Writes;
use tallyd_core::writers;
use tokio::task::JoinHandle;

use crate::common;
use common::proxy::Proxy;
use common::{Daemon, Dice, Model, World, body, eventually, target};

const BY_DAEMON: &str = "";
const BY_API: &str = "[[rule]]\nmetric = \"like\"\nwriter = \"api\"\n";

/// Likes or unlikes a target, and applies the click to the model.
async fn click(server: &Client, (target, user, liked): (Target, UserId, bool), model: &mut Model) {
    let clicked = match liked {
        true => server.like(target, user, &[]).await,
        false => server.unlike(target, user, &[]).await,
    };
    match clicked.unwrap() {
        Clicked::Published(event) => model.apply(&event),
        Clicked::Counted(counted) => model.apply(&counted.event),
        Clicked::Same { at, .. } => model.apply(&LikeEvent { target, user, at, liked }),
        Clicked::Limited { .. } => panic!("no user is limited"),
    }
}

/// Users who click. Each click goes to one of two API servers, at random. During a switch, the two servers can have
/// different rules.
struct Users {
    stop: Arc<AtomicBool>,
    clicks: Arc<AtomicU64>,
    task: JoinHandle<Model>,
}

impl Users {
    fn click(servers: [Arc<Client>; 2], mut model: Model, seed: u64) -> Self {
        let (stop, clicks) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (ends, made) = (Arc::clone(&stop), Arc::clone(&clicks));
        let task = tokio::spawn(async move {
            let mut dice = Dice::of_run(seed);
            while !ends.load(Ordering::Relaxed) {
                let server = &servers[usize::from(dice.percent(50))];
                let (target, user) = (target(1 + dice.below(9)), UserId(1 + dice.below(5)));
                let liked = dice.percent(60);
                click(server, (target, user, liked), &mut model).await;
                made.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            model
        });
        Self { stop, clicks, task }
    }

    async fn clicked(&self, more: u64) {
        let until = self.clicks.load(Ordering::Relaxed) + more;
        eventually("users click", || async { self.clicks.load(Ordering::Relaxed) >= until }).await;
    }

    async fn end(self) -> Model {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap()
    }
}

/// Reloads the daemon with these settings, and waits until the daemon and both API servers use the settings.
async fn change(world: &mut World, daemon: &Daemon, servers: &[Arc<Client>; 2], (settings, writer): (&str, Writes)) {
    world.write(settings);
    daemon.signal("HUP");
    daemon.logged("\"reloaded\"").await;
    world.set(settings);
    let (kind, like) = (target(1).kind, world.config.metrics.named(LIKE).unwrap());
    eventually("both API servers use the new writer", || async {
        let (one, other) = tokio::join!(servers[0].writers(), servers[1].writers());
        [one, other].iter().all(|writers| writers.of(kind, like) == writer)
    })
    .await;
}

/// Checks that all counters in Redis are right after a `changed` reconcile.
async fn exact(world: &World, model: &Model) {
    world.drained(&world.publisher().await).await;
    world.outbox_added().await;
    let report = world.reconcile("--changed").await;
    assert_eq!((&report["left"], &report["counters_off"]), (&0.into(), &0.into()), "{report}");
    world.assert_equals(model).await;
    world.assert_redis_equals(model).await;
}

async fn changed(name: &str, before: (&str, Writes), after: (&str, Writes)) {
    let mut world = World::new(name, before.0).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    let servers = [Arc::new(world.client()), Arc::new(world.client())];
    let users = Users::click([Arc::clone(&servers[0]), Arc::clone(&servers[0])], Model::default(), 7);
    users.clicked(300).await;
    // The second API server connected later than the first, so it also switches to the new writer later.
    let model = users.end().await;
    let users = Users::click(servers.clone(), model, 9);
    users.clicked(300).await;
    change(&mut world, &daemon, &servers, after).await;
    users.clicked(300).await;
    let model = users.end().await;
    exact(&world, &model).await;
    // After this point all counters must stay right.
    let users = Users::click(servers, model, 8);
    users.clicked(300).await;
    let model = users.end().await;
    world.drained(&world.publisher().await).await;
    world.assert_equals(&model).await;
    assert!(daemon.stop().success());
    world.close().await;
}

#[tokio::test]
async fn api_servers_take_over_the_counting_while_users_click() {
    changed("switch_to_api", (BY_DAEMON, Writes::Daemon), (BY_API, Writes::Api)).await;
}

#[tokio::test]
async fn the_daemon_takes_over_the_counting_while_users_click() {
    changed("switch_to_daemon", (BY_API, Writes::Api), (BY_DAEMON, Writes::Daemon)).await;
}

#[tokio::test]
async fn clients_start_to_count_at_the_announced_instant() {
    let world = World::new("switch_instant", BY_DAEMON).await;
    let (kind, like) = (target(1).kind, world.config.metrics.named(LIKE).unwrap());
    let now = || Micros::from(SystemTime::now());
    let from = now().after(Duration::from_secs(3));
    let text = format!(r#"{{"api":[],"since":1,"next":["video:like"],"from":{}}}"#, from.0);
    world.cache.announce_writers(&text).await.unwrap();
    for server in [world.client(), world.client()] {
        eventually("the client counts", || async {
            let (before, writer) = (now(), server.writers().await.of(kind, like));
            assert!(writer == Writes::Daemon || now() >= from, "the client counts too early");
            assert!(writer == Writes::Api || before < from, "the client counts too late");
            writer == Writes::Api
        })
        .await;
    }
    world.close().await;
}

#[tokio::test]
async fn clients_that_learn_of_a_switch_at_different_times_hide_no_click() {
    let mut world = World::new("switch_learnt", BY_DAEMON).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    let mut model = Model::default();
    let at = |liked| (target(1), UserId(1), liked);
    let late = Arc::new(world.client());
    // After this click, the client reads the next announcement only ten seconds later.
    click(&late, (target(2), UserId(1), true), &mut model).await;
    let before = world.cache.writers().await.unwrap();
    world.write(BY_API);
    daemon.signal("HUP");
    eventually("the switch is announced", || async { world.cache.writers().await.unwrap() != before }).await;
    let early = Arc::new(world.client());
    click(&early, at(true), &mut model).await;
    click(&late, at(false), &mut model).await;
    change(&mut world, &daemon, &[Arc::clone(&early), late], (BY_API, Writes::Api)).await;
    exact(&world, &model).await;
    // Redis must not remember that the user likes the target.
    click(&early, at(false), &mut model).await;
    world.drained(&world.publisher().await).await;
    world.assert_equals(&model).await;
    assert!(daemon.stop().success());
    world.close().await;
}

#[tokio::test]
async fn a_second_daemon_keeps_the_announced_instant() {
    let world = World::new("switch_second", BY_DAEMON).await;
    let daemons = [world.daemon(), world.daemon()];
    for daemon in &daemons {
        daemon.logged("\"consuming\"").await;
    }
    let mut first = String::new();
    for (settings, change) in [(BY_API, r#""next":["video:like"]"#), (BY_DAEMON, r#""next":[]"#)] {
        world.write(settings);
        for daemon in &daemons {
            let reloads = || daemon.log().matches(r#""event":"reloaded""#).count();
            let before = reloads();
            daemon.signal("HUP");
            eventually("the daemon has reloaded", || async { reloads() > before }).await;
            let announced = || async { world.cache.writers().await.unwrap().unwrap() };
            eventually("the change is announced", || async { announced().await.contains(change) }).await;
            let text = announced().await;
            if first.contains(change) {
                assert_eq!(first, text, "the second daemon announced another instant");
            }
            first = text;
        }
    }
    for daemon in daemons {
        assert!(daemon.stop().success());
    }
    assert_eq!(Some(first), world.cache.writers().await.unwrap(), "the second daemon announced another instant");
    world.close().await;
}

#[tokio::test]
async fn counting_is_not_handed_over_while_many_events_wait() {
    let world = World::new("switch_waiting", BY_DAEMON).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    let publisher = world.publisher().await;
    world
        .publish(&publisher, &[body(&LikeEvent { target: target(1), user: UserId(1), at: Micros(1), liked: false })])
        .await;
    let mut held = world.pool.begin().await.unwrap();
    sqlx::query("SELECT epoch FROM partition_owner FOR UPDATE").fetch_all(&mut *held).await.unwrap();
    let event = |user| LikeEvent { target: target(1), user: UserId(user), at: Micros(1), liked: true };
    // The test publishes more events than the daemon receives before its first commit.
    let bodies: Vec<_> = (1..=40_000).map(|user| body(&event(user))).collect();
    world.publish(&publisher, &bodies).await;
    world.write(BY_API);
    daemon.signal("HUP");
    daemon.logged("events wait in the queues").await;
    daemon.logged("\"reload-refused\"").await;
    let announced = world.cache.writers().await.unwrap().unwrap();
    assert!(
        announced.starts_with(r#"{"api":[],"#),
        "the daemon announced a switch, although it did not switch: {announced}"
    );
    held.rollback().await.unwrap();
    assert!(daemon.stop().success());
    world.close().await;
}

/// Waits until the daemon has announced that API servers count the metrics in `api`. Returns the time of this decision.
async fn announced(world: &World, api: &str, after: Micros) -> Micros {
    let since = std::cell::Cell::new(None);
    eventually("the switch is announced", || async {
        let text = world.cache.writers().await.unwrap().unwrap_or_default();
        let of_text = writers::since(&text).filter(|since| *since > after);
        since.set(of_text.filter(|_| text.starts_with(&format!("{{\"api\":[{api}],"))));
        since.get().is_some()
    })
    .await;
    since.get().unwrap()
}

#[tokio::test]
async fn an_announcement_that_is_older_is_replaced_again() {
    let mut world = World::new("switch_older", BY_API).await;
    let daemon = world.daemon();
    let since = announced(&world, "\"video:like\"", Micros(0)).await;
    // Redis has an old announcement, as if it had lost its newest data.
    world.cache.announce_writers(r#"{"api":[],"since":1795251385004538}"#).await.unwrap();
    assert_eq!(announced(&world, "\"video:like\"", Micros(0)).await, since);
    world.set(BY_DAEMON);
    let other = world.daemon();
    announced(&world, "", since).await;
    assert!(daemon.stop().success());
    assert!(other.stop().success());
    world.close().await;
}

#[tokio::test]
async fn a_reload_whose_announcement_fails_is_taken_back() {
    let world = World::new("switch_fails", BY_DAEMON).await;
    let (proxy, url) = Proxy::before(world.config.redis.url.expose()).await;
    let daemon = world.daemon_with(&[("TALLYD__REDIS__URL", url.as_str())]);
    daemon.logged("\"consuming\"").await;
    let since = announced(&world, "", Micros(0)).await;
    proxy.mute();
    world.write(BY_API);
    daemon.signal("HUP");
    daemon.logged("\"reload-refused\"").await;
    proxy.clear();
    // Redis receives the announcement of the failed reload late.
    let late = since.after(Duration::from_micros(1));
    world.cache.announce_writers(&format!(r#"{{"api":["video:like"],"since":{}}}"#, late.0)).await.unwrap();
    announced(&world, "", late).await;
    assert!(daemon.stop().success());
    world.close().await;
}
