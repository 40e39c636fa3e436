//! Erases a member from boards. The run holds the archiver's lock and claims each board. The member is deleted from
//! zsets and snapshots. In a verified archive and its frozen zset, it is renamed and keeps its score.
//!
//! Redis and the archive sort equal scores by the bytes of the names, so other members can move by one place. The
//! frozen zset stays equal to its archive, which can still be restored.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::iter;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::{Erasing, LOOK_EVERY};
use crate::sql;
use crate::sql::erase::boards::{Moved, Place};
use tallyd_base::config::Rules;
use tallyd_base::jobs::JobError;
use tallyd_base::jobs::run::{KEEP, RunHead, RunReport, has_run_head};
use tallyd_base::jobs::runner::{LockRequest, Ran, run_once};
use tallyd_base::runtime::fault;
use tallyd_core::archive::{PeriodRow, PeriodState};
use tallyd_core::erase::{Subject, placeholder};
use tallyd_core::model::{BoardMember, BoardPeriod};
use tallyd_core::period::{LOOK_BACK, Period};
use tallyd_mysql::StoreError;
use tallyd_redis::boards::Changed;
use tallyd_redis::erase::BoardZset;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Members {
    zsets: u64,
    places: u64,
    saved: u64,
    #[serde(flatten)]
    head: RunHead,
}

type Found = BTreeMap<BoardPeriod, (Vec<Place>, Vec<BoardZset>, bool)>;

impl Erasing<'_, '_> {
    pub(super) async fn erase_members(&mut self) -> Result<()> {
        let boards = self.boards();
        if boards.is_empty() {
            return Ok(());
        }
        let Members { zsets, places, saved, .. } = match self.run.options.dry_run {
            true => self.foresee_members(&boards).await?,
            false => self.erase_under_lock(&boards).await?,
        };
        self.run.report.zsets = zsets;
        self.run.report.places = places;
        self.run.report.saved = saved;
        Ok(())
    }

    /// For a target also the boards to which rules add targets of its kind.
    fn boards(&self) -> Vec<String> {
        let mut boards: BTreeSet<String> = self.on.boards.iter().cloned().collect();
        if let Subject::Target { target, .. } = &self.on.subject {
            let (rules, metrics) = (Rules::from(&self.on.config), self.on.config.metrics.codes());
            boards.extend(metrics.into_iter().filter_map(|metric| rules.board(target.kind, metric).map(str::to_owned)));
        }
        boards.into_iter().collect()
    }

    async fn erase_under_lock(&self, boards: &[String]) -> Result<Members> {
        let began = Instant::now();
        let keep = KEEP;
        let job = LockRequest { name: tallyd_mysql::boards::JOB, mode: "erase", owner: &self.run.servers.owner, keep };
        loop {
            let ran = run_once(&self.run.servers.store, job, |number| self.erase_boards(number, boards)).await?;
            match ran {
                Ran::Ended(members) => return Ok(members),
                Ran::Held { owner, .. } if began.elapsed() > self.on.config.reconcile.fence_max.0 => {
                    let text = format!("{owner} is archiving boards: try again when the archive run has ended");
                    return Err(JobError::NotNow(text).into());
                }
                Ran::Held { .. } => self.run.unless_stopped(tokio::time::sleep(LOOK_EVERY)).await?,
            }
        }
    }

    async fn foresee_members(&self, boards: &[String]) -> Result<Members> {
        let mut members = Members::default();
        for board in boards {
            for (at, (places, zsets, is_saved)) in self.find_members(board).await? {
                let verified = self.verified(&at).await?;
                let is_verified = |place: &&Place| verified.is_some_and(|row| row.copy == Some(place.copy));
                members.places += places.iter().filter(is_verified).count() as u64;
                members.zsets += zsets.len() as u64;
                members.saved += u64::from(is_saved);
            }
        }
        Ok(members)
    }

    async fn erase_boards(&self, run: u64, boards: &[String]) -> Result<Members> {
        let (store, cache) = (&self.run.servers.store, &self.run.servers.cache);
        let mut members = Members::default();
        for board in boards {
            cache.claim_board(board, run, &store.frozen_periods(board).await?).await?;
            for (at, (places, zsets, is_saved)) in self.find_members(board).await? {
                self.erase_archived(run, &at, &places, &mut members).await.with_context(|| format!("erase in {at}"))?;
                for zset in zsets {
                    self.erase_zset(run, &at, &zset, &mut members).await?;
                }
                if is_saved {
                    sql::erase::boards::erase_saved(store, run, &at, self.on.subject.member().as_bytes()).await?;
                    members.saved += 1;
                }
            }
        }
        Ok(members)
    }

    /// In the periods that have data in MySQL, the current one, and those directly before it.
    async fn find_members(&self, board: &str) -> Result<Found> {
        let (store, member) = (&self.run.servers.store, self.on.subject.member());
        let mut periods: BTreeSet<String> =
            sql::erase::boards::known_periods(store, board).await?.into_iter().collect();
        let known: Vec<String> = periods.iter().cloned().collect();
        let now = store.clock().await?.0;
        for configured in self.on.config.boards.iter().filter(|configured| configured.name == board) {
            let calendar = configured.calendar(jiff::tz::db()).context("read the time zone of a board")?;
            let open = Period::containing(configured.period, now, &calendar);
            let all = iter::successors(Some(open), |period| period.previous()).take(LOOK_BACK);
            periods.extend(all.map(|period| period.to_string()));
        }
        let at = |period: &String| BoardPeriod { board: board.to_owned(), period: period.clone() };
        let mut zsets = Vec::new();
        for at in periods.iter().map(at) {
            zsets.extend([BoardZset::Live, BoardZset::Frozen, BoardZset::Filling].map(|zset| (at.clone(), zset)));
        }
        let mut found = Found::new();
        for at in known.iter().map(at) {
            let tags = store.board_period(&at).await?.map(|row| row.tag()).into_iter();
            let tags = tags.chain(store.snapshot(&at).await?.map(|snapshot| snapshot.tag()));
            zsets.extend(tags.map(|tag| (at.clone(), BoardZset::Restored(tag))));
            let places = sql::erase::boards::places_of(store, &at, member.as_bytes()).await?;
            let is_saved = sql::erase::boards::is_saved(store, &at, member.as_bytes()).await?;
            if is_saved || !places.is_empty() {
                found.insert(at, (places, Vec::new(), is_saved));
            }
        }
        for (at, zset) in self.run.servers.cache.zsets_with(zsets, member.as_bytes()).await? {
            found.entry(at).or_default().1.push(zset);
        }
        Ok(found)
    }

    async fn verified(&self, at: &BoardPeriod) -> Result<Option<PeriodRow>> {
        let row = self.run.servers.store.board_period(at).await?;
        Ok(row.filter(|row| row.copy.is_some() && row.state != PeriodState::Pruned))
    }

    async fn erase_archived(&self, run: u64, at: &BoardPeriod, places: &[Place], members: &mut Members) -> Result<()> {
        let (store, cache) = (&self.run.servers.store, &self.run.servers.cache);
        if places.is_empty() {
            return Ok(());
        }
        let verified = self.verified(at).await?;
        let by = placeholder(&sql::erase::boards::placeholders_of(store, at).await?);
        for place in places {
            match verified {
                Some(row) if row.copy == Some(place.copy) => {
                    let former = self.on.subject.member();
                    let to = sql::erase::boards::place_for(store, at, *place, &by).await?;
                    let named = |member: &[u8]| BoardMember { member: member.to_vec(), score: place.score };
                    let after = row.tally.replaced(&named(former.as_bytes()), &named(&by));
                    // First, so that a run after a crash finds the member in MySQL and chooses the same name.
                    let zset = (at, &BoardZset::Frozen);
                    let changed = cache.erase_member(run, zset, former.as_bytes(), Some(&by)).await?;
                    members.zsets += taken(changed)?;
                    fault::point("erase:renamed");
                    let moved = Moved {
                        from: *place,
                        to,
                        member: former.as_bytes(),
                        by: &by,
                        former: row.tally.checksum,
                        new: after.checksum,
                    };
                    if !sql::erase::boards::move_member(store, run, at, moved).await? {
                        bail!("another process changed the archive of {at}: try again");
                    }
                    members.places += 1;
                }
                _ => sql::erase::boards::rename_unverified(store, run, at, *place, &by).await?,
            }
        }
        Ok(())
    }

    async fn erase_zset(&self, run: u64, at: &BoardPeriod, zset: &BoardZset, members: &mut Members) -> Result<()> {
        let cache = &self.run.servers.cache;
        members.zsets += match zset {
            // Left by an unfinished restore from the archive. The next restore creates the zset again.
            BoardZset::Restored(tag) if tag.starts_with('a') => {
                cache.drop_zset(at, zset).await?;
                1
            }
            _ => taken(cache.erase_member(run, (at, zset), self.on.subject.member().as_bytes(), None).await?)?,
        };
        Ok(())
    }
}

fn taken(changed: Changed) -> Result<u64> {
    match changed {
        Changed::Done(_) | Changed::Put(_) => Ok(1),
        // An earlier run has already renamed the member.
        Changed::Absent | Changed::Lost => Ok(0),
        Changed::Refused => Err(StoreError::TakenOver("the board".to_owned()).into()),
    }
}

impl RunReport for Members {
    has_run_head!();
}

impl fmt::Display for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { zsets, places, saved, .. } = self;
        write!(f, "a member was erased from {zsets} zsets, {places} archive rows and {saved} snapshot rows")
    }
}
