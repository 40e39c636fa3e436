//! What can go wrong, one thing at a time: each fault begins, is held for a while, and is undone.

mod clock;
mod daemon;
mod disk;
mod mysql;
mod network;
mod older;
mod publisher;
mod rabbitmq;
mod redis;
pub mod try_one;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use futures_util::future::BoxFuture;
use tokio::time::sleep;

use crate::dice::Dice;
pub use crate::site::Server;
use crate::site::Site;

/// What may be gone after a fault, by what docs/ says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allows {
    /// Nothing that was answered with success.
    Nothing,
    /// Events that were published and not in MySQL yet.
    WhatWasQueued,
    /// What Redis alone had: points on boards since their last snapshot, and that a click was the user's last one. Its counters come back.
    WhatOnlyRedisKnew,
    /// Nothing; but what got an `at` that is ahead waits as a dead letter until then.
    WhatIsAhead,
    /// What was written to MySQL and confirmed since its copy was taken.
    WhatMysqlKnew,
}

type Inject = dyn for<'a> Fn(&'a Site, Dice, Duration) -> BoxFuture<'a, Result<()>> + Send + Sync;

/// One thing that can go wrong.
#[derive(Clone)]
pub struct Fault {
    /// As in `--faults`.
    pub name: &'static str,
    /// What is done, in a few words.
    pub about: &'static str,
    /// Two faults of one server are never injected at once: each undoes what it knows of.
    pub hits: Server,
    /// Why it can't be done here, if so.
    pub needs: fn(&Site) -> Option<String>,
    pub allows: Allows,
    /// The seconds that it is held: at least, and at most.
    pub hold: (u64, u64),
    inject: Arc<Inject>,
}

impl Fault {
    fn new<F>(hits: Server, name: &'static str, about: &'static str, inject: F) -> Self
    where
        F: for<'a> Fn(&'a Site, Dice, Duration) -> BoxFuture<'a, Result<()>> + Send + Sync + 'static,
    {
        Self { name, about, hits, needs: |_| None, allows: Allows::Nothing, hold: (5, 15), inject: Arc::new(inject) }
    }

    fn needs(self, needs: fn(&Site) -> Option<String>) -> Self {
        Self { needs, ..self }
    }

    fn allows(self, allows: Allows) -> Self {
        Self { allows, ..self }
    }

    fn hold(self, least_s: u64, most_s: u64) -> Self {
        Self { hold: (least_s, most_s), ..self }
    }

    /// Begins it, holds it for about that long, and undoes it. Longer where a server takes its time to come back.
    ///
    /// # Errors
    /// It could not be begun or undone: the run's own failure, not tallyd's.
    pub async fn run(&self, site: &Site, dice: Dice, hold: Duration) -> Result<()> {
        site.disturb(self.name);
        let done = (self.inject)(site, dice, hold).await;
        site.mend(self.name);
        done
    }
}

/// Everything that can be injected.
pub fn all() -> Vec<Fault> {
    [
        daemon::all(),
        clock::all(),
        mysql::all(),
        disk::all(),
        rabbitmq::all(),
        redis::all(),
        network::all(),
        older::all(),
        publisher::all(),
    ]
    .concat()
}

/// Undoes what was begun, also when that has failed.
async fn then_undo(begun: impl Future<Output = Result<()>>, undo: impl Future<Output = Result<()>>) -> Result<()> {
    let begun = begun.await;
    let undone = undo.await;
    begun.and(undone)
}

/// SIGKILL, and a start after that time.
async fn killed(site: &Site, _: Dice, hold: Duration, server: Server) -> Result<()> {
    let begun = async {
        site.stack.kill(server).await?;
        sleep(hold).await;
        Ok(())
    };
    then_undo(begun, site.stack.start(&[server])).await
}

/// SIGSTOP, and SIGCONT after that time.
async fn frozen(site: &Site, _: Dice, hold: Duration, server: Server) -> Result<()> {
    let begun = async {
        site.stack.signal(server, "STOP").await?;
        sleep(hold).await;
        Ok(())
    };
    then_undo(begun, site.stack.signal(server, "CONT")).await
}
