//! The faults. Each one begins, is held for a while, and is undone.

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

/// The losses that docs/ allows after a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allows {
    /// Nothing that was answered with success.
    Nothing,
    /// Events that were published and are not in MySQL yet.
    WhatWasQueued,
    /// Data that only Redis had: points on boards since their last snapshot, and that a click was the user's last one.
    /// Its counters are restored.
    WhatOnlyRedisKnew,
    /// Nothing, but events whose `at` is ahead wait as dead letters until then.
    WhatIsAhead,
    /// Rows that were written to MySQL and confirmed after its copy was taken.
    WhatMysqlKnew,
}

type Inject = dyn for<'a> Fn(&'a Site, Dice, Duration) -> BoxFuture<'a, Result<()>> + Send + Sync;

#[derive(Clone)]
pub struct Fault {
    /// As in `--faults`.
    pub name: &'static str,
    /// A short description.
    pub about: &'static str,
    /// Two faults of one server are never injected together, because each undoes only its own changes.
    pub hits: Server,
    /// The reason why this machine can't run it, if any.
    pub needs: fn(&Site) -> Option<String>,
    pub allows: Allows,
    /// It is held for this many seconds, at least and at most.
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

    /// Begins it, holds it for about that long, and undoes it. This takes longer where a server is slow to restart.
    ///
    /// # Errors
    /// Fails if the fault could not be begun or undone, which is a failure of the run, not of tallyd.
    pub async fn run(&self, site: &Site, dice: Dice, hold: Duration) -> Result<()> {
        site.disturb(self.name);
        let done = (self.inject)(site, dice, hold).await;
        site.mend(self.name);
        done
    }
}

/// All faults.
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

/// Undoes the fault, also when its begin failed.
async fn then_undo(begun: impl Future<Output = Result<()>>, undo: impl Future<Output = Result<()>>) -> Result<()> {
    let begun = begun.await;
    let undone = undo.await;
    begun.and(undone)
}

/// Sends SIGKILL, and starts the server after that time.
async fn killed(site: &Site, _: Dice, hold: Duration, server: Server) -> Result<()> {
    let begun = async {
        site.stack.kill(server).await?;
        sleep(hold).await;
        Ok(())
    };
    then_undo(begun, site.stack.start(&[server])).await
}

/// Sends SIGSTOP, and SIGCONT after that time.
async fn frozen(site: &Site, _: Dice, hold: Duration, server: Server) -> Result<()> {
    let begun = async {
        site.stack.signal(server, "STOP").await?;
        sleep(hold).await;
        Ok(())
    };
    then_undo(begun, site.stack.signal(server, "CONT")).await
}
