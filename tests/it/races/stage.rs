//! A quiet site. A reconcile run pauses itself at given points. During each pause, the test publishes events or changes
//! counters.

use std::fs;
use std::process::{Child, Output, Stdio};

use serde_json::Value;
use tallyd_core::model::{Target, UserId};
use tallyd_rabbitmq::Publisher;

use crate::common::scripts::{ApiServer, Counted};
use crate::common::{Daemon, Model, World, as_api, event_of, eventually, signal, stderr, target};

/// The number of targets. Each of the users 1 to 3 likes all targets.
pub const TARGETS: u64 = 5;

/// A test environment with a daemon, with all counters loaded, and with some likes in Redis and MySQL.
pub struct Stage {
    /// This field comes before `world`, so that the daemon is dropped first. The daemon's log is in the world's folder.
    pub daemon: Daemon,
    pub world: World,
    pub client: ApiServer,
    pub model: Model,
    publisher: Publisher,
}

/// A row of `repair`: the target, the store, the added amount, and the outcome.
pub type Repair = (u64, String, i64, Option<String>);

impl Stage {
    pub async fn new(name: &str, settings: &str) -> Self {
        let world = World::new(name, &as_api(settings)).await;
        let publisher = world.publisher().await;
        let client = world.api_server();
        let daemon = world.daemon();
        assert!(world.tallyd(&["reconcile"]).status.success());
        let mut stage = Self { world, client, daemon, model: Model::default(), publisher };
        for id in 1..=TARGETS {
            for user in 1..=3 {
                stage.like(id, user).await;
            }
        }
        stage.world.drained(&stage.publisher).await;
        stage
    }

    pub async fn like(&mut self, id: u64, user: u64) {
        let counted = self.client.like(target(id), UserId(user), &[]).await.unwrap();
        self.model.apply(&event_of(counted));
    }

    pub async fn unlike(&mut self, id: u64, user: u64) {
        let counted = self.client.unlike(target(id), UserId(user), &[]).await.unwrap();
        self.model.apply(&event_of(counted));
    }

    /// Counts a like in Redis without publishing it.
    pub async fn count(&self, id: u64, user: u64) -> Counted {
        self.client.count(target(id), UserId(user), true, &[]).await.unwrap()
    }

    pub async fn publish(&mut self, counted: &Counted) {
        self.client.publish_counted(counted).await.unwrap();
        self.model.apply(&counted.event);
    }

    pub async fn drained(&self) {
        self.world.drained(&self.publisher).await;
    }

    /// Waits until MySQL has the model's count for a target, which means that all published events of the target are
    /// written.
    pub async fn applied(&self, id: u64) {
        let count = self.model.counters()[&target(id)];
        eventually("the likes are in MySQL", || async { self.world.counters().await.get(&target(id)) == Some(&count) })
            .await;
    }

    /// Starts a reconcile run that stops itself at each of these points, and waits for the first stop.
    pub async fn paused(&self, arguments: &[&str], points: &[&str]) -> Run {
        let mut run = Run::start(&self.world, arguments, &[("TALLYD_PAUSE_POINT", &points.join(","))]);
        run.paused().await;
        run
    }

    /// Ends the lease of a killed run.
    pub async fn end_lease(&self) {
        sqlx::query("UPDATE job_lock SET lease_until = NOW(6) WHERE job = 'reconcile'")
            .execute(&self.world.pool)
            .await
            .unwrap();
    }

    /// Returns the rows of `repair`, in order.
    pub async fn repairs(&self) -> Vec<Repair> {
        sqlx::query_as("SELECT target_id, store, added, outcome FROM repair ORDER BY pass, target_id")
            .fetch_all(&self.world.pool)
            .await
            .unwrap()
    }

    /// Returns all data that a reconcile can change: the counters in Redis and MySQL, and the rows of `repair`.
    pub async fn everything(&self) -> (Numbers, Numbers, Vec<Repair>) {
        (self.world.redis_counters().await, self.world.counters().await, self.repairs().await)
    }

    /// Checks that no repair is necessary, and that Redis, `counter` and the like records are equal to the model. Ends
    /// the stage.
    pub async fn close(self) {
        self.drained().await;
        self.world.assert_equals(&self.model).await;
        let report = self.world.report(&["reconcile"]);
        assert_numbers(&report, &[("drifted", 0), ("transient", 0), ("counters_off", 0), ("unknown", 0)]);
        assert!(self.daemon.stop().success());
    }
}

/// Counters by target.
pub type Numbers = std::collections::BTreeMap<Target, i64>;

/// Makes the row that a run writes for a repair in Redis.
pub fn repair(id: u64, added: i64, outcome: Option<&str>) -> Repair {
    (id, "redis".to_owned(), added, outcome.map(str::to_owned))
}

pub fn assert_numbers(report: &Value, expected: &[(&str, i64)]) {
    for (name, number) in expected {
        assert_eq!(report[name], *number, "{name} in {report}");
    }
}

/// A running `tallyd reconcile`.
pub struct Run(Option<Child>);

impl Run {
    pub fn start(world: &World, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = world.command();
        command.arg("reconcile").args(arguments).args(["--format", "json"]).envs(environment.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(Some(command.spawn().unwrap()))
    }

    fn id(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }

    /// Returns the state of the process from /proc. T means that the process is stopped, and Z means that it has ended.
    fn state(&self) -> char {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.id())).unwrap();
        stat.rsplit(") ").next().unwrap().chars().next().unwrap()
    }

    /// Waits until the run has paused itself at the next of its pause points.
    pub async fn paused(&mut self) {
        eventually("the run pauses at a pause point, or its process ends", || async {
            matches!(self.state(), 'T' | 'Z')
        })
        .await;
        if self.state() == 'Z' {
            let output = self.0.take().unwrap().wait_with_output().unwrap();
            panic!("the run ended before its point: {}", stderr(&output));
        }
    }

    pub fn resume(&self) {
        signal(self.0.as_ref().unwrap(), "CONT");
    }

    /// Resumes the run until its next point.
    pub async fn next(&mut self) {
        self.resume();
        self.paused().await;
    }

    /// Waits for the end of the run.
    pub async fn ended(mut self) -> Output {
        let child = self.0.take().unwrap();
        tokio::task::spawn_blocking(move || child.wait_with_output().unwrap()).await.unwrap()
    }

    /// Resumes the run until its end. Returns its report.
    pub async fn report(self) -> Value {
        self.resume();
        let output = self.ended().await;
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", stderr(&output)))
    }

    /// Sends SIGKILL.
    pub fn kill(self) {
        drop(self);
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
