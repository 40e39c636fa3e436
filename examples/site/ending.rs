//! Ends the demo: runs a last reconcile, runs a dry run that must find nothing, and stops the daemon.

use std::process::ExitStatus;

use anyhow::Result;

use crate::daemon::{Daemon, Reconciled, Tallyd};
use crate::faults::Faults;
use crate::play::Played;
use crate::screen::{Screen, counted, grouped};
use crate::servers::Servers;
use crate::traffic::Site;

/// The maximum number of articles whose count the demo damages for `explain`. If the daemon repairs an article's count
/// before the command runs, the demo damages the count of another article.
const EXPLAINED_MAX: u32 = 5;

/// The result of the demo's last steps.
pub struct Ended {
    pub verified: Reconciled,
    pub daemon: ExitStatus,
}

impl Ended {
    /// Returns true if the dry run found nothing and the daemon exited successfully.
    pub fn is_good(&self) -> bool {
        let Reconciled { drifted, counters_off, unknown, .. } = self.verified;
        drifted + counters_off + unknown == 0 && self.daemon.success()
    }
}

/// Runs the demo's last steps: explains a drift, repairs all drifts, and stops the daemon.
pub async fn end(
    site: &Site,
    servers: &Servers,
    screen: &Screen,
    tallyd: &Tallyd,
    daemon: Daemon,
    played: &Played,
) -> Result<Ended> {
    explain(site, screen, tallyd).await?;
    let Reconciled { checked, drifted, repaired, .. } = tallyd.reconcile(false).await?;
    let now = servers.drifted(site).await?;
    let text = format!(
        "last run: {} checked, {} drifted, {} repaired, {} still drifted",
        counted(checked, "counter"),
        grouped(drifted),
        grouped(repaired),
        grouped(now)
    );
    screen.happened("reconcile", &text);
    let verified = tallyd.reconcile(true).await?;
    let Reconciled { checked, drifted, .. } = verified;
    let text =
        format!("dry run after the last run: {} checked, {} drifted", counted(checked, "counter"), grouped(drifted));
    screen.happened("reconcile", &text);
    let status = daemon.stop().await?;
    let batch = played.committed.checked_div(played.batches).unwrap_or_default();
    let text = format!(
        "SIGTERM: tallyd exited ({status}); it wrote {} in {}, on average {batch} events in each",
        counted(played.committed, "event"),
        counted(played.batches, "transaction")
    );
    screen.happened("end", &text);
    Ok(Ended { verified, daemon: status })
}

/// Loses one more like, and shows what tallyd reports to an operator about the article of this like.
async fn explain(site: &Site, screen: &Screen, tallyd: &Tallyd) -> Result<()> {
    let mut faults = Faults::new(site).await?;
    for _ in 0..EXPLAINED_MAX {
        let target = faults.lose(site).await?;
        let text = tallyd.explain(target).await?;
        // The daemon's reconcile may have repaired the article's count before the command ran.
        if !text.contains("drifted, Redis") {
            continue;
        }
        screen.happened("explain", &format!("tallyd reconcile --dry-run --target article:{}", target.id));
        for line in text.lines().skip(1) {
            screen.happened("explain", line.trim());
        }
        break;
    }
    Ok(())
}
