//! The faults. A fault begins, lasts for a while, and is undone.

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
    /// No call that was answered with success is lost.
    Nothing,
    /// Events that were published but were not in MySQL yet.
    WhatWasQueued,
    /// Data that only Redis had: points on boards since their last snapshot, and the users' last clicks. Redis's
    /// counters are restored.
    WhatOnlyRedisKnew,
    /// Nothing is lost. Events whose `at` is in the future wait as dead letters until that time.
    WhatIsAhead,
    /// Rows that MySQL got after the restored copy was taken.
    WhatMysqlKnew,
    /// Counts of views on their board, because a daemon's rule does not name this board.
    WhatNoRuleNames,
}

type Inject = dyn for<'a> Fn(&'a Site, Dice, Duration) -> BoxFuture<'a, Result<()>> + Send + Sync;

#[derive(Clone)]
pub struct Fault {
    /// The name for `--faults`.
    pub name: &'static str,
    /// A short description.
    pub about: &'static str,
    /// The affected server. Two faults of the same server never overlap, because each fault undoes only its own
    /// changes.
    pub hits: Server,
    /// Returns the reason if this machine can't run the fault.
    pub needs: fn(&Site) -> Option<String>,
    pub allows: Allows,
    /// Shortest and longest duration of the fault, in seconds.
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

    /// Begins the fault, waits for about `hold`, and undoes the fault. The call takes longer if a server restarts
    /// slowly.
    ///
    /// # Errors
    /// Fails if the fault could not be begun or undone. This is a failure of the run, not of tallyd.
    pub async fn run(&self, site: &Site, dice: Dice, hold: Duration) -> Result<()> {
        site.disturb(self.name);
        let done = (self.inject)(site, dice, hold).await;
        site.mend(self.name);
        done
    }
}

/// Returns all faults.
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

/// Begins a fault, then undoes the fault. The function also undoes a fault that failed to begin.
async fn then_undo(begun: impl Future<Output = Result<()>>, undo: impl Future<Output = Result<()>>) -> Result<()> {
    let begun = begun.await;
    let undone = undo.await;
    begun.and(undone)
}

/// Sends SIGKILL, and starts the server again after the duration of the fault.
async fn killed(site: &Site, _: Dice, hold: Duration, server: Server) -> Result<()> {
    let begun = async {
        site.stack.kill(server).await?;
        sleep(hold).await;
        Ok(())
    };
    then_undo(begun, site.stack.start(&[server])).await
}

/// Sends SIGSTOP, and sends SIGCONT after the duration of the fault.
async fn frozen(site: &Site, _: Dice, hold: Duration, server: Server) -> Result<()> {
    let begun = async {
        site.stack.signal(server, "STOP").await?;
        sleep(hold).await;
        Ok(())
    };
    then_undo(begun, site.stack.signal(server, "CONT")).await
}
