//! Runs a chaos test: users, planned faults, a quiet time, one reconcile, and the comparison.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde_json::json;
use tallyd_core::rules::Writes;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use crate::args::Args;
use crate::audit::Audit;
use crate::checker::{self, State, Violation};
use crate::dice::Dice;
use crate::faults::{Allows, Fault};
use crate::history::{History, Loses, Micros, Recorder, Window, now};
use crate::operator::Operator;
use crate::plan::{Item, Step, left_out, plan};
use crate::plot;
use crate::resources::{self, Resources};
use crate::shrink;
use crate::site::{Options, Site, Surprise};
use crate::table::{self, Injected};
use crate::truth;
use crate::users::Crowd;
use crate::watch::Watch;

/// After a fault, all that was accepted is in MySQL and added to Redis within this time. Otherwise the run is not green.
const EXACT_MAX: Duration = Duration::from_secs(90);

/// Time limit for the users' last calls. Each call of the client, including all its retries, takes less time than this
/// limit.
const USERS_END_MAX: Duration = Duration::from_secs(120);

/// The plan has no extra time for slow restarts, so a run can take longer. The run ends when it has lasted for this
/// multiple of its planned length.
const LATE_MAX: f64 = 1.3;

/// The run prints the calls for at most this number of violations.
const TOLD_MAX: usize = 12;

pub fn items(faults: &[Fault]) -> Vec<Item> {
    let item = |fault: &Fault| Item {
        name: fault.name,
        hits: fault.hits.name(),
        hold: fault.hold,
        is_alone: fault.allows != Allows::Nothing,
    };
    faults.iter().map(item).collect()
}

/// Prints the plan.
pub fn print_plan(seed: u64, length: Duration, items: &[Item]) {
    let steps = plan(seed, length, items);
    for Step { start, item, hold, overlaps } in &steps {
        let overlaps = if *overlaps { "  while the previous fault lasts" } else { "" };
        println!("+{:7.1} s  {:30} for {:2} s{overlaps}", start.as_secs_f64(), items[*item].name, hold.as_secs());
    }
    for name in left_out(&steps, items) {
        println!("NO ROOM for {name}: the run is too short. Use more --minutes.");
    }
}

/// The run replays all open dead letters, at most this number of times.
const REPLAYS_MAX: u32 = 5;

/// Runs the chaos test. Returns true if the comparison found no violation.
///
/// # Errors
/// Fails if the run itself failed: a server didn't start, or nothing could be compared.
pub async fn run(args: &Args, seed: u64) -> Result<bool> {
    let likes_by = if seed.is_multiple_of(2) { Writes::Daemon } else { Writes::Api };
    let options =
        Options { daemons: usize::from(args.daemons), likes_by, folder: args.folder.clone(), ..Options::default() };
    let site = Site::start(&options).await.context("start the site")?;
    let (faults, mut not_run) = possible(args.chosen()?, &site);
    let items = items(&faults);
    let steps = plan(seed, args.length(), &items);
    let no_room = |name| format!("{name}: does not fit into {} minutes", args.minutes);
    not_run.extend(left_out(&steps, &items).into_iter().map(no_room));
    println!(
        "seed {seed}: {} faults of {} kinds in {} minutes, {} daemons; {} count likes",
        steps.len(),
        items.len(),
        args.minutes,
        args.daemons,
        if likes_by == Writes::Daemon { "they" } else { "API servers" }
    );

    let recorder = Arc::clone(&site.recorder);
    let began = now();
    let watch = Arc::new(Watch::start(&site.direct_config(), &recorder)?);
    let resources = Resources::start(Arc::clone(&site));
    let audit = Audit::start(site.pool());
    let crowd = Crowd::start(&site, args.clients, seed, &recorder)?;
    let driver =
        Driver { site: Arc::clone(&site), watch: Arc::clone(&watch), recorder: Arc::clone(&recorder), faults, seed };
    let (injected, late) = driver.drive(&steps, args.length()).await;
    let is_enough = !injected.is_empty() && injected.len() * 2 >= steps.len();
    not_run.extend(late);
    drop(driver);
    let ended = end(&site, crowd, watch, args.quiet()).await;
    let looks = resources.end().await;
    let (audits, mut violations) = audit.end().await;
    let history = recorder.history();
    if let Err(error) = &ended {
        println!("NOT SETTLED: {error:#}");
    }
    let state = truth::read(&site).await.context("read the stored data")?;
    violations.extend(checker::check(&history, &state));
    let surprises = site.surprises();
    let is_green = ended.is_ok()
        && violations.is_empty()
        && surprises.is_empty()
        && audits > 0
        && recorder.calls() > 0
        && is_enough
        && injected.iter().all(|one| one.error.is_none() && (one.recovery.is_some() || one.has_met));
    let mut figures = table::figures(&injected, &violations, &history);
    figures["daemons"] = resources::summary(&looks);
    figures["surprises"] = json!(surprises.len());
    figures["audits"] = json!(audits);
    figures["seed"] = json!(seed);
    figures["minutes"] = json!(args.minutes);
    figures["not_run"] = json!(not_run);
    let text = serde_json::to_string_pretty(&json!({ "figures": figures }))?;
    write(&args.folder.join(format!("{seed}.json")), &text)?;
    write(&args.folder.join(format!("{seed}.svg")), &plot::svg(&looks))?;
    tell(seed, began, (&history, &state), &injected, &violations, &surprises);
    if !is_enough {
        println!("TOO FEW FAULTS: {} of {}", injected.len(), steps.len());
    }
    println!("\n{}", verdict(is_green, &not_run));
    if !is_green {
        println!("seed {seed}; the daemons' logs and configurations are in {}", args.folder.display());
    }
    site.end().await?;
    Ok(is_green)
}

/// Returns the faults that this machine can run, and the reasons why it can't run other faults.
fn possible(mut faults: Vec<Fault>, site: &Site) -> (Vec<Fault>, Vec<String>) {
    let mut not_run = Vec::new();
    faults.retain(|fault| {
        let why = (fault.needs)(site);
        not_run.extend(why.as_ref().map(|why| format!("{}: {why}", fault.name)));
        why.is_none()
    });
    (faults, not_run)
}

/// Returns the last lines of the output: the faults that were not run, then the verdict.
fn verdict(is_green: bool, not_run: &[String]) -> String {
    let lines: String = not_run.iter().map(|what| format!("NOT RUN: {what}\n")).collect();
    let but = if not_run.is_empty() { String::new() } else { format!(", but {} faults were not run", not_run.len()) };
    format!("{lines}{}{but}", if is_green { "GREEN" } else { "NOT GREEN" })
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

/// Injects the planned faults.
struct Driver {
    site: Arc<Site>,
    watch: Arc<Watch>,
    recorder: Arc<Recorder>,
    faults: Vec<Fault>,
    seed: u64,
}

impl Driver {
    /// Returns the result of each fault, and the faults that were skipped because the machine was too slow.
    async fn drive(&self, steps: &[Step], length: Duration) -> (Vec<Injected>, Vec<String>) {
        let (began, mut late) = (Instant::now(), Vec::new());
        let (mut running, mut injected): (Vec<JoinHandle<Injected>>, Vec<Injected>) = (Vec::new(), Vec::new());
        for (number, step) in steps.iter().enumerate() {
            if !step.overlaps {
                for one in running.drain(..) {
                    injected.push(one.await.expect("a fault panicked"));
                }
            }
            sleep_until(began + step.start).await;
            if began.elapsed() > length.mul_f64(LATE_MAX) {
                late.push(format!("{}: this machine is too slow for the plan", self.faults[step.item].name));
                continue;
            }
            let fault = self.faults[step.item].clone();
            let (elapsed, calls) = (began.elapsed(), self.recorder.calls());
            println!("+{:6.1} s  {} for {} s; {calls} calls", elapsed.as_secs_f64(), fault.name, step.hold.as_secs());
            let has_met = step.overlaps || steps.get(number + 1).is_some_and(|next| next.overlaps);
            let dice = Dice::new(self.seed.wrapping_mul(7_919).wrapping_add(number as u64 + 1));
            running.push(tokio::spawn(inject(
                Arc::clone(&self.site),
                Arc::clone(&self.watch),
                Arc::clone(&self.recorder),
                fault,
                dice,
                step.hold,
                has_met,
            )));
        }
        for one in running {
            injected.push(one.await.expect("a fault panicked"));
        }
        sleep_until(began + length).await;
        (injected, late)
    }
}

async fn inject(
    site: Arc<Site>,
    watch: Arc<Watch>,
    recorder: Arc<Recorder>,
    fault: Fault,
    dice: Dice,
    hold: Duration,
    has_met: bool,
) -> Injected {
    let mut loses_since = now();
    if fault.allows != Allows::Nothing {
        // Waits until all accepted events are in MySQL, so that the fault can lose only later events.
        watch.well_after(loses_since, EXACT_MAX).await;
    }
    let mut error = None;
    if fault.allows == Allows::WhatOnlyRedisKnew {
        match Operator(&site).save_boards().await {
            Ok(since) => loses_since = since,
            Err(why) => error = Some(format!("save the boards before the fault: {why:#}")),
        }
    }
    let begin = now();
    if error.is_none() {
        error = fault.run(&site, dice, hold).await.err().map(|why| format!("{why:#}"));
    }
    let end = now();
    let well = watch.well_after(end, EXACT_MAX).await;
    if fault.allows == Allows::WhatOnlyRedisKnew
        && let Err(why) = Operator(&site).restore_boards().await
    {
        error.get_or_insert(format!("restore the boards: {why:#}"));
    }
    let loses = match fault.allows {
        Allows::Nothing => Loses::Nothing,
        Allows::WhatWasQueued => Loses::Queued,
        Allows::WhatOnlyRedisKnew => Loses::Boards,
        Allows::WhatIsAhead => Loses::Ahead,
        Allows::WhatMysqlKnew => Loses::Tables,
        Allows::WhatNoRuleNames => Loses::BoardOfViews,
    };
    let loses_until = match fault.allows {
        // Scores that users add before the boards are restored may be lost.
        Allows::WhatOnlyRedisKnew => now(),
        Allows::WhatMysqlKnew => site.lost_at.load(Ordering::Relaxed),
        _ => end,
    };
    recorder.window(Window { fault: fault.name, begin, end, loses, loses_since, loses_until });
    if let Some(error) = &error {
        println!("NOT DONE: {}: {error}", fault.name);
    }
    let outage = watch.longest(begin, well.unwrap_or_else(now));
    Injected { fault: fault.name, outage, recovery: well.map(|well| since(end, well)), has_met, error }
}

fn since(from: Micros, to: Micros) -> Duration {
    Duration::from_micros((to - from).max(0).unsigned_abs())
}

/// Stops the users and undoes all faults. Replays dead letters, waits for the quiet time, and runs one archive and one
/// reconcile.
async fn end(site: &Arc<Site>, crowd: Crowd, watch: Arc<Watch>, quiet: Duration) -> Result<()> {
    let users = crowd.end(USERS_END_MAX).await;
    if let Ok(watch) = Arc::try_unwrap(watch).map_err(|_| ()) {
        watch.end().await;
    }
    site.settle(EXACT_MAX).await?;
    users?;
    let operator = Operator(site);
    // A dead letter that every replay rejects stays open, and the comparison finds it.
    for _ in 0..REPLAYS_MAX {
        if operator.replay().await? == 0 {
            break;
        }
        site.settle(EXACT_MAX).await?;
    }
    sleep(quiet).await;
    site.settle(EXACT_MAX).await?;
    operator.archive().await?;
    let report = operator.reconcile().await?;
    site.stack.nobody_was_refused().await?;
    println!(
        "the last reconcile: checked {}, drifted {}, repaired {}",
        report["checked"], report["drifted"], report["repaired"]
    );
    Ok(())
}

fn tell(
    seed: u64,
    began: Micros,
    (history, state): (&History, &State),
    injected: &[Injected],
    violations: &[Violation],
    surprises: &[Surprise],
) {
    println!("\n{}", table::text(injected, violations, history));
    for surprise in surprises.iter().take(TOLD_MAX) {
        let at = surprise.at.duration_since(UNIX_EPOCH).map_or(0, |at| at.as_micros());
        let at = shrink::seconds(Micros::try_from(at).unwrap_or(Micros::MAX) - began);
        println!("SURPRISE at +{at:.3} s of daemon {}: {}", surprise.daemon, surprise.what.trim());
    }
    if violations.is_empty() {
        return;
    }
    println!("seed {seed}; faults:");
    for window in &history.windows {
        let (begin, end) = (shrink::seconds(window.begin - began), shrink::seconds(window.end - began));
        println!("  +{begin:8.3} s to +{end:8.3} s  {}", window.fault);
    }
    for violation in violations.iter().take(TOLD_MAX) {
        println!("\n{}", shrink::tell(violation, history, state, began));
    }
    if violations.len() > TOLD_MAX {
        println!("and {} more", violations.len() - TOLD_MAX);
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn half_an_hour_can_pause_the_outbox_for_minutes() {
        let items = items(&crate::faults::all());
        let paused_s = |seed| {
            let steps = plan(seed, Duration::from_secs(30 * 60), &items);
            assert_eq!(left_out(&steps, &items), Vec::<&str>::new(), "seed {seed}");
            let pauses = steps.iter().filter(|step| items[step.item].name == "outbox-paused");
            pauses.map(|step| step.hold.as_secs()).max().unwrap()
        };
        let long = (0..1_000).filter(|seed| paused_s(*seed) > 60).count();
        assert!(long > 700, "{long} of 1000 seeds");
    }

    #[test]
    fn each_fault_fits_into_one_of_three_landings_with_any_seed() {
        let ci = include_str!("../.ci/run");
        let minutes = ci.lines().find_map(|line| line.strip_prefix("TORTURE_MINUTES=")).unwrap();
        let length = Duration::from_secs(minutes.parse::<u64>().unwrap() * 60);
        let landing: u64 = include_str!("landing").trim().parse().unwrap();
        let all = crate::faults::all();
        let mut injected = Vec::new();
        for number in landing..landing + 3 {
            let args = Args { third: Some(number), ..Args::parse_from(["dev/torture"]) };
            let items = items(&args.chosen().unwrap());
            for seed in 0..1_000 {
                assert_eq!(left_out(&plan(seed, length, &items), &items), Vec::<&str>::new(), "{number}, seed {seed}");
            }
            injected.extend(items.iter().map(|item| item.name));
        }
        injected.sort_unstable();
        let mut names: Vec<&str> = all.iter().map(|fault| fault.name).collect();
        names.sort_unstable();
        assert_eq!(injected, names);
    }
}
