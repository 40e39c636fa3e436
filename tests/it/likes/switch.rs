//! Another side begins to count likes in Redis, by the steps of docs/counters.md. Users click during all steps. In the
//! end the numbers, and the filters that readers ask, are exact.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use redis::AsyncCommands;
use tallyd_client::LikedBy;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Target, UserId};
use tokio::sync::RwLock;
use tokio::task::JoinHandle;

use crate::common::scripts::Clicked;
use crate::common::{ApiServer, Daemon, Dice, Model, World, as_api, client_of, eventually, target};

const USERS: u64 = 40;
const TARGETS: u64 = 20;

/// About half of the users like each target, so each target has a filter.
const FILTERS: &str = "[filter]\nlikes_min = 8\nasked = true\ncron = \"* * * * * *\"\n";

/// Users who click. Each click goes to the API server, which the test can replace.
struct Users {
    server: Arc<RwLock<ApiServer>>,
    stop: Arc<AtomicBool>,
    clicks: Arc<AtomicU64>,
    task: JoinHandle<Model>,
}

impl Users {
    fn of(server: ApiServer) -> Self {
        let (stop, clicks) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let server = Arc::new(RwLock::new(server));
        let (ends, made, asked) = (Arc::clone(&stop), Arc::clone(&clicks), Arc::clone(&server));
        let task = tokio::spawn(async move {
            let (mut dice, mut model) = (Dice::of_run(7), Model::default());
            let mut likes: HashMap<(Target, UserId), bool> = HashMap::new();
            while !ends.load(Ordering::Relaxed) {
                let (target, user) = (target(1 + dice.below(TARGETS)), UserId(1 + dice.below(USERS)));
                // A repeated like would repeat an old event, and the status would show the age of this event as a lag.
                let liked = *likes.entry((target, user)).and_modify(|liked| *liked = !*liked).or_insert(true);
                let server = asked.read().await;
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
                made.fetch_add(1, Ordering::Relaxed);
                drop(server);
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            model
        });
        Self { server, stop, clicks, task }
    }

    async fn clicked(&self, more: u64) {
        let until = self.clicks.load(Ordering::Relaxed) + more;
        eventually("users click", || async { self.clicks.load(Ordering::Relaxed) >= until }).await;
    }

    /// Replaces the API server after its last click has ended.
    async fn deploy(&self, server: ApiServer) {
        *self.server.write().await = server;
    }

    async fn end(self) -> Model {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap()
    }
}

fn socket(world: &World) -> String {
    format!("unix:{}/status.sock", world.folder.path().display())
}

async fn consuming(world: &World) -> Daemon {
    world.consuming_with(&[("TALLYD__ADMIN__LISTEN", &socket(world))]).await
}

/// The last three steps, which are the same in both directions.
async fn settle(world: &World) {
    const LAST_RUN: &str =
        "SELECT CAST(COALESCE(MAX(run), 0) AS SIGNED) FROM job_run WHERE job = 'filters' AND outcome = 'done'";
    eventually("the lag is below a second", || async {
        let status = world.report(&["status", "--url", &socket(world)]);
        status["rate"]["lag_p99_s"].as_f64().is_some_and(|lag_s| lag_s < 1.0)
    })
    .await;
    world.succeeds(&["reconcile", "--changed", "--force", "--yes"]).await;
    world.succeeds(&["admin", "filters", "rebuild"]).await;
    let before = world.count(LAST_RUN).await;
    // The first of these runs can have begun before the command.
    eventually("the filters are rebuilt", || async { world.count(LAST_RUN).await >= before + 2 }).await;
}

/// Fails unless readers find exactly the likes of the model, and learn some of them from filters alone.
async fn assert_readers_know(world: &World, model: &Model) {
    let mut redis = world.redis().await;
    // A recent click would hide that its like is missing in the filter.
    let recent: Vec<String> = redis.keys(format!("{}:recent:*", world.name)).await.unwrap();
    if !recent.is_empty() {
        let () = redis.del(recent).await.unwrap();
    }
    let (reader, targets) = (client_of(&world.api), (1..=TARGETS).map(target).collect::<Vec<Target>>());
    let mut by_filter = 0;
    for user in (1..=USERS).map(UserId) {
        for (target, known) in targets.iter().zip(reader.likes_of(user, &targets).await.unwrap()) {
            let liked = model.rows.get(&(*target, user)).is_some_and(|(_, is_del)| !is_del);
            assert_eq!(known.liked, liked, "{user} and {target:?}, known by {:?}", known.by);
            by_filter += u64::from(known.by == LikedBy::Redis);
        }
    }
    assert!(by_filter > 0, "no filter was asked");
}

async fn end(world: World, users: Users, daemon: Daemon) {
    users.clicked(300).await;
    let model = users.end().await;
    world.drained(&world.publisher().await).await;
    world.assert_equals(&model).await;
    assert_readers_know(&world, &model).await;
    assert!(daemon.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn api_servers_take_over_the_counting_while_users_click() {
    let (by_daemon, by_api) = (FILTERS.to_owned(), as_api(FILTERS));
    let mut world = World::new("switch_to_api", &by_daemon).await;
    let daemon = consuming(&world).await;
    let users = Users::of(world.api_server());
    users.clicked(500).await;
    world.set(&by_api);
    users.deploy(world.api_server()).await;
    users.clicked(300).await;
    assert!(daemon.stop().success());
    let daemon = consuming(&world).await;
    users.clicked(300).await;
    settle(&world).await;
    end(world, users, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_daemon_takes_over_the_counting_while_users_click() {
    let (by_daemon, by_api) = (FILTERS.to_owned(), as_api(FILTERS));
    let mut world = World::new("switch_to_daemon", &by_api).await;
    let daemon = consuming(&world).await;
    let users = Users::of(world.api_server());
    users.clicked(500).await;
    world.set(&by_daemon);
    assert!(daemon.stop().success());
    let daemon = consuming(&world).await;
    users.clicked(300).await;
    users.deploy(world.api_server()).await;
    users.clicked(300).await;
    settle(&world).await;
    end(world, users, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_that_would_change_who_counts_is_refused() {
    let world = World::new("switch_reload", "").await;
    let daemon = world.consuming().await;
    world.write(&as_api(""));
    daemon.signal("HUP");
    daemon.logged("\"reload-refused\"").await;
    let log = daemon.log();
    assert!(log.contains("the writer of video:like") && log.contains("docs/counters.md"), "{log}");
}
