//! Runs the main part of the demo: users click, faults happen, a week closes, and a status line appears once a second.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::daemon::{Daemon, Reconciled, Tallyd};
use crate::faults::{Faults, Harm};
use crate::hall::{HALL, Hall, Stage};
use crate::log::Fact;
use crate::screen::{Screen, Status, counted, grouped, span};
use crate::servers::Servers;
use crate::traffic::{Site, VIDEO};
use crate::week::{self, Week};

/// The time between two reads of the daemon's log.
const LOOK: Duration = Duration::from_millis(100);

/// The number of reads of the daemon's log between two status lines.
const LOOKS_PER_STATUS: u32 = 10;

const FIRST_FAULTS: Duration = Duration::from_secs(3);

/// The demo causes no faults in this time before the end, so that the viewer sees the repair of the last faults.
const LAST_FAULTS: Duration = Duration::from_secs(6);

/// The time from the start until last week's board closes.
const WEEK_CLOSES: Duration = Duration::from_secs(7);

/// The demo fills the all-time board at `HALL_OPENS` after the start. Redis loses this board at `HALL_LOST` or later.
const HALL_OPENS: Duration = Duration::from_secs(4);
const HALL_LOST: Duration = Duration::from_secs(9);

/// The totals at the end of the traffic.
#[derive(Default)]
pub struct Played {
    pub clicks: u64,
    pub harm: Harm,
    pub committed: u64,
    pub batches: u64,
    pub dead: u64,
    pub repaired: u64,
    pub week: Option<Week>,
    pub hall: Option<Hall>,
    pub seconds: f32,
}

/// The state of the running demo.
pub struct Play<'a> {
    site: &'a Arc<Site>,
    servers: &'a Servers,
    screen: &'a Screen,
    tallyd: &'a Tallyd,
    daemon: &'a mut Daemon,
    played: Played,
    /// Whether the all-time board has a snapshot.
    hall_saved: bool,
    /// The values counted since the last status line.
    second: Status,
    clicks_before: u64,
    /// Whether a reconcile is running.
    reconciling: bool,
    faults_every: Duration,
}

impl<'a> Play<'a> {
    pub fn new(
        site: &'a Arc<Site>,
        servers: &'a Servers,
        screen: &'a Screen,
        tallyd: &'a Tallyd,
        daemon: &'a mut Daemon,
        faults_every: Duration,
    ) -> Self {
        Self {
            site,
            servers,
            screen,
            tallyd,
            daemon,
            played: Played::default(),
            hall_saved: false,
            second: Status::default(),
            clicks_before: 0,
            reconciling: false,
            faults_every,
        }
    }

    /// Runs the demo for this time, or until `stop`. Then waits until all published events are committed.
    pub async fn run(&mut self, play_for: Option<Duration>, stop: &CancellationToken) -> Result<Played> {
        self.screen.legend();
        let enough = stop.child_token();
        let mut users = self.site.start(&enough);
        let played = self.until_enough(play_for, stop, &mut users).await;
        enough.cancel();
        while let Some(ended) = users.join_next().await {
            ended.context("a user panicked")??;
        }
        played?;
        self.close_week().await?;
        self.drain().await?;
        Ok(std::mem::take(&mut self.played))
    }

    async fn until_enough(
        &mut self,
        play_for: Option<Duration>,
        stop: &CancellationToken,
        users: &mut JoinSet<Result<()>>,
    ) -> Result<()> {
        let started = Instant::now();
        let mut faults = Faults::new(self.site).await?;
        let mut next_faults = FIRST_FAULTS;
        let mut tick = tokio::time::interval(LOOK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut looks = 0;
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                Some(ended) = users.join_next() => ended.context("a user panicked")??,
                _ = tick.tick() => looks += 1,
            }
            let elapsed = started.elapsed();
            let left = play_for.map_or(Duration::MAX, |play_for| play_for.saturating_sub(elapsed));
            self.look().await?;
            if looks >= LOOKS_PER_STATUS {
                looks = 0;
                self.say().await?;
            }
            if left.is_zero() {
                break;
            }
            // Cause no faults during a reconcile. A correct reconcile can miss such faults, but a missed fault would
            // confuse the viewer.
            if elapsed >= next_faults && left > LAST_FAULTS && !self.reconciling {
                next_faults = elapsed + self.faults_every;
                self.strike(&mut faults).await?;
            }
            if elapsed >= WEEK_CLOSES {
                self.close_week().await?;
            }
            self.hall(elapsed).await?;
        }
        self.played.harm = faults.harm;
        self.played.seconds = started.elapsed().as_secs_f32();
        Ok(())
    }

    /// Reads the new lines of the daemon's log.
    async fn look(&mut self) -> Result<()> {
        self.daemon.check()?;
        for fact in self.daemon.log.read()? {
            match fact {
                Fact::Batch { events, refused, lag_ms } => {
                    self.second.committed += events;
                    self.second.batches += 1;
                    self.second.lag_ms = self.second.lag_ms.max(lag_ms);
                    self.played.committed += events;
                    self.played.batches += 1;
                    self.played.dead += refused;
                }
                Fact::Reconciling => self.reconciling = true,
                Fact::Reconciled { run, seconds } => self.reconciled(run, seconds).await?,
                Fact::Failed(text) => {
                    self.reconciling = false;
                    self.screen.happened("warning", &text);
                }
                Fact::Archived { period, members } => self.archived(&period, members).await?,
                Fact::Saved { board } => self.hall_saved |= board == HALL && self.played.hall.is_some(),
                Fact::Lost { board } if board == HALL => self.restore_hall().await?,
                Fact::Lost { board } => self.screen.happened("tallyd", &format!("Redis has lost the board {board}")),
                Fact::Warning(text) => self.screen.happened("tallyd", &text),
                Fact::Consuming => {}
            }
        }
        Ok(())
    }

    /// Prints the status line.
    async fn say(&mut self) -> Result<()> {
        let drifted = self.servers.drifted(self.site).await?;
        let clicks = self.site.published.load(Ordering::Relaxed);
        let status = Status {
            clicks: clicks - self.clicks_before,
            queue: clicks.saturating_sub(self.played.committed),
            drifted,
            repaired: self.played.repaired,
            dead: self.played.dead,
            ..std::mem::take(&mut self.second)
        };
        self.clicks_before = clicks;
        self.screen.status(&status);
        Ok(())
    }

    async fn strike(&mut self, faults: &mut Faults) -> Result<()> {
        let Harm { lost, doubled, malformed } = faults.strike(self.site).await?;
        let drifted = self.servers.drifted(self.site).await?;
        let drifted = counted(drifted, "counter");
        let text = format!(
            "{lost} publishes lost, {doubled} likes counted twice, {malformed} malformed messages; {drifted} drifted now"
        );
        self.screen.happened("faults", &text);
        Ok(())
    }

    async fn reconciled(&mut self, run: u64, seconds: f64) -> Result<()> {
        let report = sqlx::query_scalar("SELECT report FROM job_run WHERE run = ?").bind(run);
        let report: String = report.fetch_one(&self.servers.mysql).await.context("read the reconcile's report")?;
        let report: Reconciled = serde_json::from_str(&report).context("read the reconcile's report")?;
        self.reconciling = false;
        self.played.repaired += report.repaired;
        let Reconciled { checked, drifted, repaired, .. } = report;
        let checked = counted(checked, "counter");
        if drifted == 0 {
            self.screen.routine("reconcile", &format!("{checked} checked in {seconds:.1} s, none drifted"));
        } else {
            let now = self.servers.drifted(self.site).await?;
            let text = format!(
                "{checked} checked in {seconds:.1} s: {} drifted, {} repaired, {} still drifted",
                grouped(drifted),
                grouped(repaired),
                grouped(now)
            );
            self.screen.happened("reconcile", &text);
        }
        Ok(())
    }

    async fn close_week(&mut self) -> Result<()> {
        if self.played.week.is_some() {
            return Ok(());
        }
        let week = Week::close(self.servers).await?;
        let members = counted(week.scores.len() as u64, "video");
        self.screen.happened(
            "week",
            &format!("{} has just closed with {members} on its board (which the demo made up)", week.period),
        );
        self.played.week = Some(week);
        Ok(())
    }

    /// Fills the all-time board. Deletes the board in Redis after the daemon saved it.
    async fn hall(&mut self, elapsed: Duration) -> Result<()> {
        let is_saved = self.hall_saved;
        match &mut self.played.hall {
            None if elapsed >= HALL_OPENS => {
                let hall = Hall::fill(self.servers).await?;
                let members = counted(hall.scores.len() as u64, "user");
                self.screen.happened("board", &format!("the board of all time has {members}; only Redis has it"));
                self.played.hall = Some(hall);
            }
            Some(hall) if hall.stage == Stage::Filled && is_saved && elapsed >= HALL_LOST => {
                let since = hall.lose(self.servers).await?;
                let since = counted(since, "like");
                let text =
                    format!("Redis loses the board of all time, which tallyd has saved; afterwards {since} are added");
                self.screen.happened("faults", &text);
            }
            None | Some(_) => {}
        }
        Ok(())
    }

    /// Restores the board, as an operator does after the report of the loss.
    async fn restore_hall(&mut self) -> Result<()> {
        let Some(hall) = &mut self.played.hall else { return Ok(()) };
        self.screen
            .happened("board", "tallyd logs board-lost; the demo runs the fix: tallyd board restore users total");
        let said = self.tallyd.restore(HALL).await?;
        hall.stage = Stage::Restored;
        self.screen.happened("board", said.lines().next().unwrap_or_default());
        Ok(())
    }

    async fn archived(&mut self, period: &str, members: u64) -> Result<()> {
        let expires = week::expires_s(self.servers, period).await?;
        let expires = expires.map_or_else(String::new, |seconds| {
            format!(", its zset expires in {}", span(Duration::from_secs(seconds)))
        });
        let members = counted(members, "member");
        self.screen.happened("archive", &format!("week {period}: {members} archived and verified{expires}"));
        Ok(())
    }

    /// Waits until all published events are committed, Redis has all likes of videos, and the week is archived. The demo
    /// stops waiting after a minute. The comparison then shows which data is missing.
    async fn drain(&mut self) -> Result<()> {
        const DRAIN_MAX: Duration = Duration::from_secs(60);
        self.played.clicks = self.site.published.load(Ordering::Relaxed);
        let clicks = counted(self.played.clicks, "click");
        self.screen.happened("end", &format!("the traffic ended after {clicks}; waiting until the queue is empty"));
        let started = Instant::now();
        while started.elapsed() < DRAIN_MAX {
            self.look().await?;
            let drained = self.played.committed >= self.played.clicks && self.played.dead >= self.played.harm.malformed;
            let is_lost = self.played.hall.as_ref().is_some_and(|hall| hall.stage == Stage::Lost);
            if drained && !is_lost && self.week_is_done().await? && self.servers.different(self.site, VIDEO).await? == 0
            {
                break;
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    async fn week_is_done(&self) -> Result<bool> {
        match &self.played.week {
            Some(week) => week.is_done(self.servers).await,
            None => Ok(true),
        }
    }
}
