//! Tries faults one by one. During each try, users like a few targets every second, and one fault happens. Then the
//! test checks the likes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tallyd_core::model::{Kind, Micros, Target, TargetId, UserId};
use tokio::task::JoinSet;

use super::{Allows, Fault, all};
use crate::dice::Dice;
use crate::site::{Options, Site};
use tallyd_testkit::scripts::{ApiServer, Clicked};

const CLICKERS: u64 = 4;

/// A fault lasts this number of seconds, unless the fault's own minimum is higher or its own maximum is lower.
const HOLD_S: u64 = 8;

/// How long to wait until everything works again after a fault.
const SETTLE_MAX: Duration = Duration::from_secs(90);

/// Dead letters that are fences (markers of jobs) are never replayed.
const NOT_REPLAYED: &str = "SELECT COUNT(*) FROM dead_letter WHERE replayed_at IS NULL AND body NOT LIKE '%\"fence\"%'";

/// Maps a target and a user to the newest click: its `at`, and true for a like. `None` after an error, because the
/// state is unknown then.
type Clicks = HashMap<(u64, u64), Option<(Micros, bool)>>;

/// Returns the faults that the list `names` selects. Each entry is `all`, a fault's name, or the beginning of a fault's
/// name.
fn chosen(names: &str) -> Result<Vec<Fault>> {
    let mut chosen = Vec::new();
    for name in names.split(',') {
        let found: Vec<Fault> =
            all().into_iter().filter(|fault| name == "all" || fault.name.starts_with(name)).collect();
        if found.is_empty() {
            bail!("there is no fault '{name}'");
        }
        chosen.extend(found);
    }
    Ok(chosen)
}

/// Tries each of these faults alone.
///
/// # Errors
/// Fails if the site doesn't start or doesn't settle, or if the likes in MySQL are wrong at the end.
pub async fn run(names: &str) -> Result<()> {
    let faults = chosen(names)?;
    let seed = std::env::var("TALLYD_TORTURE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let site = Site::start(&Options::default()).await?;
    println!("{} daemons run, logs in {}", site.daemons.len(), site.daemons[0].log.parent().unwrap().display());
    let mut wrong = Vec::new();
    for (number, fault) in faults.iter().enumerate() {
        if let Some(why) = (fault.needs)(&site) {
            println!("{:32} NOT RUN: {why}", fault.name);
            continue;
        }
        println!("{:32} {}: {}", fault.name, fault.hits.name(), fault.about);
        let seen = site.surprises().len();
        if let Err(error) = try_fault(&site, fault, number as u64, Dice::new(seed + number as u64)).await {
            println!("{:32} WRONG: {error:#}", fault.name);
            wrong.push(fault.name);
        }
        for surprise in &site.surprises()[seen..] {
            let at = jiff::Timestamp::try_from(surprise.at)?;
            println!("{:32} SURPRISE of daemon {} at {at}: {}", fault.name, surprise.daemon, surprise.what);
            wrong.push(fault.name);
        }
    }
    site.end().await?;
    if wrong.is_empty() { Ok(()) } else { bail!("wrong: {wrong:?}") }
}

/// Tries a fault. Each fault has its own users. `number` determines the ids of these users.
async fn try_fault(site: &Arc<Site>, fault: &Fault, number: u64, dice: Dice) -> Result<()> {
    let (stop, clicks) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let client = Arc::new(ApiServer::new(&site.config()));
    let mut users = JoinSet::new();
    for clicker in 0..CLICKERS {
        users.spawn(click(Arc::clone(&client), number * CLICKERS + clicker, Arc::clone(&stop), Arc::clone(&clicks)));
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = clicks.load(Ordering::Relaxed);
    let begun = Instant::now();
    let hold = Duration::from_secs(HOLD_S.clamp(fault.hold.0, fault.hold.1));
    fault.run(site, dice, hold).await.context("inject it")?;
    let (undone, during) = (Instant::now(), clicks.load(Ordering::Relaxed));
    tokio::time::sleep(Duration::from_secs(3)).await;
    stop.store(true, Ordering::Relaxed);
    let mut all = Clicks::new();
    while let Some(clicks) = users.join_next().await {
        all.extend(clicks?);
    }
    let after = clicks.load(Ordering::Relaxed);
    let settled = Instant::now();
    site.settle(SETTLE_MAX).await?;
    let settled = settled.elapsed();
    replay(site, fault).await?;
    println!(
        "{:32} took {:5.1} s; clicks: {before} before the fault, {} during it, {} in the 3 s after it; settled {:.1} s after the users ended; unknown {}",
        fault.name,
        (undone - begun).as_secs_f64(),
        during - before,
        after - during,
        settled.as_secs_f64(),
        all.values().filter(|click| click.is_none()).count(),
    );
    compare(site, fault, &all).await
}

/// Makes clicks until the caller sets `stop`. No other task clicks as these users.
async fn click(client: Arc<ApiServer>, clicker: u64, stop: Arc<AtomicBool>, answered: Arc<AtomicU64>) -> Clicks {
    let (mut dice, mut clicks) = (Dice::new(clicker + 1), Clicks::new());
    while !stop.load(Ordering::Relaxed) {
        let (id, user) = (1 + dice.below(100), 1 + clicker * 1_000 + dice.below(50));
        let target = Target { kind: Kind(1), id: TargetId(id) };
        let likes = !matches!(clicks.get(&(id, user)), Some(Some((_, true))));
        let answer = if likes {
            client.like(target, UserId(user), &[]).await
        } else {
            client.unlike(target, UserId(user), &[]).await
        };
        let click = clicks.entry((id, user)).or_insert(Some((Micros(0), false)));
        match answer {
            Ok(Clicked::Published(event)) => *click = click.map(|_| (event.at, likes)),
            Ok(Clicked::Counted(counted)) => *click = click.map(|_| (counted.event.at, likes)),
            // If the user already had this state, the client published the event again.
            Ok(Clicked::Same { at, .. }) => *click = click.map(|_| (at, likes)),
            Ok(Clicked::Limited { .. }) => {}
            Err(_) => *click = None,
        }
        answered.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    clicks
}

/// Replays the dead letters of a fault, as an operator would.
async fn replay(site: &Site, fault: &Fault) -> Result<()> {
    site.tallyd(&["dead", "list"]).await?;
    let letters: Vec<(String, i64)> =
        sqlx::query_as("SELECT reason, COUNT(*) FROM dead_letter WHERE replayed_at IS NULL GROUP BY reason")
            .fetch_all(site.pool())
            .await?;
    if letters.is_empty() {
        return Ok(());
    }
    println!("{:32} dead letters: {letters:?}", fault.name);
    // The command does not replay fences of finished runs. If there are such fences, the command exits with 1.
    site.tallyd(&["dead", "replay", "--all"]).await?;
    site.tallyd(&["dead", "list"]).await?;
    site.settle(SETTLE_MAX).await
}

async fn compare(site: &Site, fault: &Fault, clicks: &Clicks) -> Result<()> {
    let mut reports = Vec::new();
    while reports.len() < 3 {
        let output = site.tallyd(&["reconcile", "--full", "--format", "json"]).await?;
        match output.status.code() {
            Some(0) => reports.push(serde_json::from_slice::<serde_json::Value>(&output.stdout)?),
            Some(75) => tokio::time::sleep(Duration::from_millis(500)).await,
            code => bail!("tallyd reconcile: {code:?}: {}", String::from_utf8_lossy(&output.stderr)),
        }
    }
    let first = &reports[0];
    println!(
        "{:32} drifted {}, counters_off {}, phantoms {}",
        "", first["drifted"], first["counters_off"], first["phantoms"]
    );
    let last = &reports[2];
    for name in ["drifted", "left", "counters_off", "unknown"] {
        anyhow::ensure!(last[name] == 0, "the third reconcile reports {name}: {}", last[name]);
    }
    anyhow::ensure!(first["counters_off"] == 0, "values in `counter` differed from the number of their rows");
    if fault.allows != Allows::Nothing {
        return Ok(());
    }
    let rows: Vec<(u64, u64, bool, i64)> = sqlx::query_as(
        "SELECT target_id, user_id, is_del, CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', update_at) AS SIGNED) FROM like_record WHERE kind = 1",
    )
    .fetch_all(site.pool())
    .await?;
    let rows: HashMap<(u64, u64), (i64, bool)> =
        rows.into_iter().map(|(id, user, is_del, at)| ((id, user), (at, !is_del))).collect();
    let mut known = 0;
    for (pair, click) in clicks {
        let Some((at, likes)) = click else { continue };
        if at.0 == 0 {
            continue;
        }
        known += 1;
        let row = rows.get(pair);
        anyhow::ensure!(
            row == Some(&(at.0, *likes)),
            "target and user {pair:?}: answered {at:?} {likes}, in MySQL {row:?}"
        );
    }
    let dead: i64 = sqlx::query_scalar(NOT_REPLAYED).fetch_one(site.pool()).await?;
    anyhow::ensure!(dead == 0, "{dead} dead letters");
    println!("{:32} {known} of {} pairs match the answers", "", clicks.len());
    Ok(())
}
