//! Keeps the site card in MySQL and Redis, so that clients know the site's settings (`tallyd_core::card`).
//!
//! The row in MySQL decides. After its start and after each reload, a daemon replaces the row if its own settings
//! differ. Every ten seconds, each daemon copies the row's card to Redis if Redis has another text. So Redis' text and
//! its number never prevent this copy.
//!
//! * A: two daemons start, and read the row. B: the first daemon replaces the row. C: the second daemon tries the same.
//!   The row's number decides: C changes nothing, and the second daemon reads the row again.
//! * A: a daemon reads the row. B: another daemon replaces the row, and writes the new card to Redis. C: the first
//!   daemon writes the former card to Redis. A daemon reads Redis before the row, so C happens only if Redis had no card
//!   or a wrong card before B. The next check writes the new card again.

use std::time::Duration;

use anyhow::{Result, bail};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use tallyd_base::config::ConfigHandle;
use tallyd_base::runtime::liveness::Heartbeat;
use tallyd_base::runtime::retry::Outage;
use tallyd_base::servers::Servers;
use tallyd_base::telemetry::telemetry;
use tallyd_connect::pace::pace;
use tallyd_core::card::{Card, CardError, next_number};
use tallyd_mysql::card::CardRow;

const EVERY: Duration = Duration::from_secs(10);

const TRIES_MAX: u32 = 10;

pub(super) async fn run(servers: Servers, mut live: ConfigHandle, beat: Heartbeat, stop: CancellationToken) {
    let mut outage = Outage::new("keeping the site card in MySQL and Redis");
    // Until the daemon has compared its settings with the row.
    let mut decides = true;
    while !stop.is_cancelled() {
        let own = Card::from(&*live.current());
        let pause = match beat.during(keep(&servers, &own, &mut decides)).await {
            Ok(()) => {
                outage.over();
                pace(EVERY)
            }
            Err(error) => outage.failed(&format!("{error:#}")),
        };
        tokio::select! {
            () = beat.pause(pause, &stop) => {}
            () = live.changed() => decides = true,
        }
    }
}

/// If `decides`, the daemon's own settings become the site's settings.
async fn keep(servers: &Servers, own: &Card, decides: &mut bool) -> Result<()> {
    let in_redis = servers.cache.site_card().await;
    let row = row(servers, own, *decides).await?;
    *decides = false;
    warn_differences(own, &row);
    if in_redis?.as_deref() != Some(row.text.as_str()) {
        servers.cache.write_site_card(&row.text).await?;
    }
    Ok(())
}

/// Replaces the row first if it is missing or holds no card, or if this daemon decides.
async fn row(servers: &Servers, own: &Card, decides: bool) -> Result<CardRow> {
    for _ in 0..TRIES_MAX {
        let former = servers.store.site_card().await?;
        let former = match former {
            Some(row) if differences(own, &row).is_some_and(|fields| fields.is_empty() || !decides) => return Ok(row),
            former => former.map(|row| row.number),
        };
        let number = former.map_or(1, next_number);
        let text = Card { number, ..own.clone() }.encode();
        let row = CardRow { number, text, by: servers.owner.clone() };
        if servers.store.replace_site_card(former, &row).await? {
            return Ok(row);
        }
    }
    bail!("other daemons keep replacing the site card in MySQL")
}

/// The names of the differing fields; `None` if the row holds no card.
fn differences(own: &Card, row: &CardRow) -> Option<Vec<String>> {
    match Card::decode(&row.text) {
        Ok(card) => Some(own.differences(&card)),
        Err(CardError::Version(_)) => Some(vec!["version".to_owned()]),
        Err(_) => None,
    }
}

fn warn_differences(own: &Card, row: &CardRow) {
    let fields = differences(own, row).unwrap_or_default().join(", ");
    let how = (!fields.is_empty()).then(|| format!("{fields} (card of {})", row.by));
    if telemetry().site_differs(how) {
        let by = &row.by;
        warn!(
            event = "site-differs",
            fields, by, "this daemon's settings differ from the site card, which {by} wrote and clients read: {fields}"
        );
    }
}
