//! Kills servers of the stack, and changes their settings. A guard undoes each change, even if the test fails. Only one
//! test at a time can kill a server. Also asks RabbitMQ about queues, and makes the leader of a queue silent.

use std::cell::Cell;
use std::fs::OpenOptions;
use std::io::Write;
use std::process::Command;

use tallyd_core::event::encode_fence;
use tallyd_core::fence::Depth;

use super::{World, eventually, root};

/// A server that a test has killed. Dropping the `Killed` starts the server.
#[must_use]
pub struct Killed(&'static str);

pub fn kill(server: &'static str) -> Killed {
    run("dev/down", &["--kill", server]);
    Killed(server)
}

impl Killed {
    pub fn start(self) {
        run("dev/up", &[self.0]);
        std::mem::forget(self);
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = script("dev/up").arg(self.0).output();
    }
}

/// A setting of the broker that a test has changed. Dropping the `Changed` restores the setting.
#[must_use]
pub struct Changed(Vec<String>);

pub fn change(arguments: &[&str], back: &[&str]) -> Changed {
    let changed = Changed(back.iter().map(|argument| (*argument).to_owned()).collect());
    rabbitmqctl(arguments);
    changed
}

impl Drop for Changed {
    fn drop(&mut self) {
        let output = script("dev/rabbitmqctl").args(&self.0).output().unwrap();
        // A panic while the test panics would hide the test's failure.
        assert!(output.status.success() || std::thread::panicking(), "{:?} failed", self.0);
    }
}

pub fn rabbitmqctl(arguments: &[&str]) {
    run("dev/rabbitmqctl", arguments);
}

/// Reports that the current test can't run on these servers, although it passes for the runner. `dev/test` prints the
/// reports after the runner's summary.
pub fn not_run(why: &str) {
    let line = format!("NOT RUN: {}: {why}\n", std::thread::current().name().unwrap_or("a test"));
    match std::env::var("TALLYD_TEST_NOT_RUN") {
        Ok(file) => OpenOptions::new().append(true).open(file).unwrap().write_all(line.as_bytes()).unwrap(),
        Err(_) => eprint!("{line}"),
    }
}

fn run(name: &str, arguments: &[&str]) {
    let output = script(name).args(arguments).output().unwrap();
    // dev/up prints its messages to stdout.
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{name} {arguments:?}: {}: {}", output.status, String::from_utf8_lossy(&text));
}

fn script(name: &str) -> Command {
    Command::new(root().join(name))
}

impl World {
    /// Waits until the queue has no consumer, and returns the number of its messages. RabbitMQ states no fact about a
    /// queue without consumers and messages. So this publishes a fence, which the next daemon drops.
    pub async fn unconsumed(&self, queue: &str) -> u32 {
        let publisher = self.broker.connect_publisher("test").await.unwrap();
        publisher.publish_behind(queue, &encode_fence(0)).await.unwrap();
        let seen = Cell::new(0);
        eventually("the queue has no consumer", async || match publisher.depth(queue).await.unwrap() {
            Depth::Known { messages, consumers: 0 } => {
                seen.set(messages - 1);
                true
            }
            _ => false,
        })
        .await;
        seen.get()
    }
}

/// While this value exists, the leader of a queue is silent. So RabbitMQ says that the queue has no messages and no
/// consumers, and confirms nothing.
pub struct SilentLeader(String);

impl SilentLeader {
    pub fn of(queue: &str) -> Self {
        to_leader(queue, "suspend");
        Self(queue.to_owned())
    }
}

impl Drop for SilentLeader {
    fn drop(&mut self) {
        to_leader(&self.0, "resume");
    }
}

fn to_leader(queue: &str, action: &str) {
    let name = format!("rabbit_misc:r(<<\"/\">>, queue, <<\"{queue}\">>)");
    let leader = format!("{{ok, Q}} = rabbit_amqqueue:lookup({name}), ok = sys:{action}(amqqueue:get_pid(Q)).");
    rabbitmqctl(&["eval", &leader]);
}
