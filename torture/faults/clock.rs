//! A daemon whose clock is stepped while it runs.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use tokio::time::{Instant, sleep};

use super::{Fault, Server, daemon, then_undo};
use crate::dice::Dice;
use crate::site::Site;

/// Debian's package libfaketime.
const LIBRARY: &str = "faketime/libfaketimeMT.so.1";

/// Steps to either side, in seconds: at most a quarter of an hour, so that some events seem to be ahead by more than `future_max`.
const STEP_MAX: u64 = 900;

pub fn all() -> Vec<Fault> {
    let stepped = Fault::new(
        Server::Daemon,
        "clock-stepped",
        "a daemon's clock jumps back and forth by minutes",
        |site, dice, hold| Box::pin(stepped(site, dice, hold)),
    );
    let needs = |_: &Site| library().is_none().then(|| "Debian's package libfaketime is not installed".to_owned());
    vec![stepped.needs(needs).hold(10, 20)]
}

fn library() -> Option<PathBuf> {
    let folders = std::fs::read_dir("/usr/lib").ok()?;
    folders.filter_map(|folder| Some(folder.ok()?.path().join(LIBRARY))).find(|path| path.exists())
}

async fn stepped(site: &Site, mut dice: Dice, hold: Duration) -> Result<()> {
    let daemon = daemon::any(site, &mut dice);
    let file = daemon.config.with_extension("clock");
    let Some(library) = library() else { return Ok(()) };
    std::fs::write(&file, "+0")?;
    daemon.stop().await?;
    daemon.set_environment(&[
        ("LD_PRELOAD", library.to_str().unwrap()),
        ("FAKETIME_TIMESTAMP_FILE", file.to_str().unwrap()),
        // Read at each look at the clock.
        ("FAKETIME_NO_CACHE", "1"),
        // What a step of the clock leaves alone in a real kernel, too.
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
    ]);
    daemon.start().await;
    let until = Instant::now() + hold;
    let stepping = async {
        while Instant::now() < until {
            sleep(Duration::from_millis(500 + dice.below(2_500))).await;
            let sign = if dice.percent(50) { '+' } else { '-' };
            // Written beside it and moved: a reader never sees half of it.
            let new = file.with_extension("clock.new");
            std::fs::write(&new, format!("{sign}{}", dice.below(STEP_MAX)))?;
            std::fs::rename(&new, &file)?;
        }
        Ok(())
    };
    let back = async {
        daemon.stop().await?;
        daemon.set_environment(&[]);
        daemon.start().await;
        Ok(())
    };
    then_undo(stepping, back).await
}
