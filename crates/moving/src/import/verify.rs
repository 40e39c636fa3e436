//! The code of `--verify`, which compares the site and tallyd while both change.
//!
//! The servers count the rows of each range and calculate a checksum. A range that differs is compared again in pieces,
//! and only pieces that still differ are read. A few seconds later, when in-flight events have arrived, the differing
//! rows are checked again. Only a difference that remains is reported.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::Importing;
use super::numbers::Numbers;
use super::report::TargetReport;
use super::sides::{Sides, Step};
use super::sums::{Compared, SumComparison};
use crate::sql;
use crate::sql::source::LikeColumns;
use tallyd_base::jobs::JobError;
use tallyd_base::jobs::run::LISTED_MAX;
use tallyd_connect::pace::pace;
use tallyd_core::import::{Differing, FIRST, Key, Side, differing};
use tallyd_core::model::TargetId;
use tallyd_core::site_query::Query;

const LOOKS: usize = 3;

const PAUSE: Duration = Duration::from_secs(3);

/// In pages of an import. It can be large, because the servers return only sums.
pub(super) const RANGE_PAGES: usize = 4;

/// If only one row is in flight, the run reads only its piece of a differing range.
const PIECES: usize = 16;

/// A few MiB. The scan pauses while more rows wait for their next check.
const ROWS_MAX: usize = 100_000;
const NUMBERS_MAX: usize = 10_000;

const MORE: usize = 8;

struct Suspect {
    range: Differing,
    looks: usize,
    due: Instant,
}

#[derive(Default)]
struct Found {
    /// The rows that only the site has, and those that only tallyd has.
    listed: BTreeMap<TargetId, (u64, u64)>,
    last: Option<TargetId>,
    count: u64,
}

impl Found {
    fn note(&mut self, (target, _): Key, side: Side) {
        if self.last != Some(target) {
            (self.last, self.count) = (Some(target), self.count + 1);
        }
        if self.listed.len() < LISTED_MAX || self.listed.contains_key(&target) {
            let (missing, extra) = self.listed.entry(target).or_default();
            *(if side == Side::Site { missing } else { extra }) += 1;
        }
    }
}

#[derive(Default)]
struct Looks {
    waiting: VecDeque<Suspect>,
    found: Found,
}

impl Looks {
    fn add(&mut self, range: Differing, looks: usize) {
        let now = Instant::now();
        match looks {
            _ if range.rows.is_empty() => {}
            0..LOOKS => self.waiting.push_back(Suspect { range, looks, due: now + pace(PAUSE) }),
            _ => range.rows.into_iter().for_each(|(key, side)| self.found.note(key, side)),
        }
    }

    fn pop(&mut self) -> Option<Suspect> {
        self.waiting.pop_front()
    }

    fn rows(&self) -> usize {
        self.waiting.iter().map(|suspect| suspect.range.rows.len()).sum()
    }

    fn is_due(&self) -> bool {
        self.waiting.front().is_some_and(|first| first.due <= Instant::now())
    }

    fn clear(&mut self) {
        self.waiting.clear();
    }
}

impl Importing<'_, '_> {
    pub(super) async fn verify_likes(&mut self, query: &Query) -> Result<(), JobError> {
        let (columns, plan) = self.on.like_columns(query).await?;
        self.plan(&plan);
        let (site, stop) = ((query, &columns), self.run.stop);
        let mut sums = SumComparison::new(self.on, site, FIRST);
        let mut looks = Looks::default();
        loop {
            if !self.run.next_page().await? {
                break;
            }
            let began = Instant::now();
            let compared = loop {
                match stop.run_until_cancelled(sums.next(self.run.page_size())).await.transpose() {
                    Err(error) if self.waits_after(&error).await => {}
                    compared => break compared?,
                }
            };
            self.outage.over();
            let Some(compared) = compared.flatten() else { break };
            self.run.report.pages += 1;
            self.run.report.rows += compared.site.count;
            self.run.report.here += compared.here.count;
            self.show(compared.until);
            self.run.note_page(compared.answered, began.elapsed());
            if compared.differs() {
                stop.run_until_cancelled(self.narrow(site, &compared, &mut looks)).await.transpose()?;
            }
            while looks.is_due() || looks.rows() > ROWS_MAX {
                self.look(site, &mut looks).await?;
            }
        }
        while looks.rows() > 0 {
            self.look(site, &mut looks).await?;
        }
        self.run.report.differing = looks.found.count;
        for (id, (missing, extra)) in looks.found.listed {
            let here = sql::imports::count_likes(&self.on.store, self.on.kind, id).await?;
            let site = here + missing.cast_signed() - extra.cast_signed();
            self.run.report.targets.push(TargetReport { target: self.name(id), site, here, missing, extra });
        }
        Ok(self.run.check_stop()?)
    }

    async fn narrow(
        &mut self,
        site: (&Query, &LikeColumns),
        range: &Compared,
        looks: &mut Looks,
    ) -> Result<(), JobError> {
        let mut sums = SumComparison::new(self.on, site, range.after);
        let limit = (range.answered / PIECES).max(PIECES);
        while let Some(piece) = sums.next(limit).await? {
            let until = piece.until.min(range.until);
            if piece.differs() {
                self.read_rows(site, (piece.after, until), piece.rows(), looks).await?;
            }
            if until == range.until || self.run.is_over() {
                break;
            }
        }
        Ok(())
    }

    /// After the first key, up to and including the second key. About `rows` rows are expected.
    async fn read_rows(
        &mut self,
        site: (&Query, &LikeColumns),
        range: (Key, Key),
        rows: usize,
        looks: &mut Looks,
    ) -> Result<(), JobError> {
        let mut sides = Sides::new(self.on, site, range);
        while let Some(step) = sides.next(rows.saturating_add(MORE).min(self.on.import.page_rows)).await? {
            self.differing(step).into_iter().for_each(|range| looks.add(range, 0));
            while looks.rows() > ROWS_MAX {
                self.look(site, looks).await?;
            }
            if !self.run.next_page().await? {
                break;
            }
        }
        Ok(())
    }

    fn differing(&mut self, step: Step) -> Vec<Differing> {
        self.run.report.read += step.site.len().max(step.here.len()) as u64;
        let here: Vec<Key> = step.here.iter().map(|row| row.key).collect();
        differing(&step.site, &here)
    }

    /// Waits until the next check is due. Keeps the rows that still differ.
    async fn look(&mut self, site: (&Query, &LikeColumns), looks: &mut Looks) -> Result<(), JobError> {
        let Some(Suspect { range, looks: count, due }) = looks.pop() else { return Ok(()) };
        let (left, stop) = (due.saturating_duration_since(Instant::now()), self.run.stop);
        if stop.run_until_cancelled(tokio::time::sleep(left)).await.is_none() {
            looks.clear();
            return Ok(());
        }
        let mut sides = Sides::new(self.on, site, (range.after, range.until));
        let mut still: BTreeSet<(Key, Side)> = BTreeSet::new();
        loop {
            let limit = (range.size + MORE).min(self.on.import.page_rows);
            let step = stop.run_until_cancelled(sides.next(limit)).await.transpose()?;
            match step {
                None => return Ok(()),
                Some(None) => break,
                Some(Some(step)) => still.extend(self.differing(step).into_iter().flat_map(|range| range.rows)),
            }
        }
        let rows = range.rows.intersection(&still).copied().collect();
        looks.add(Differing { rows, ..range }, count + 1);
        Ok(())
    }

    pub(super) async fn verify_numbers(&mut self) -> Result<(), JobError> {
        let of = self.source_of_numbers().await?;
        let which = (self.on.kind, self.on.metric);
        let mut suspects: BTreeSet<TargetId> = BTreeSet::new();
        let mut next = self.on.numbers_from(of, TargetId(0)).await?;
        while let Some(from) = next {
            if !self.run.next_page().await? {
                break;
            }
            let began = Instant::now();
            let page = self.run.stop.run_until_cancelled(self.on.numbers_page(of, from, self.run.page_size())).await;
            let Some(page) = page.transpose()? else { break };
            let targets: Vec<TargetId> = page.numbers.iter().map(|(target, _)| *target).collect();
            let here = sql::imports::numbers_of(&self.on.store, which, &targets).await?;
            let off = page.numbers.iter().zip(&here).filter(|((_, site), here)| site != *here);
            suspects.extend(off.map(|((target, _), _)| *target));
            self.run.report.here += here.len() as u64;
            self.note_numbers(&page);
            self.run.note_page(page.numbers.len(), began.elapsed());
            next = page.next;
            if suspects.len() >= NUMBERS_MAX {
                self.recheck_numbers(of, &mut suspects).await?;
            }
        }
        self.recheck_numbers(of, &mut suspects).await?;
        Ok(self.run.check_stop()?)
    }

    async fn recheck_numbers(&mut self, of: Numbers<'_>, suspects: &mut BTreeSet<TargetId>) -> Result<(), JobError> {
        let mut off: BTreeMap<TargetId, (i64, i64)> = suspects.iter().map(|target| (*target, (0, 0))).collect();
        suspects.clear();
        for _ in 0..LOOKS {
            if off.is_empty() || self.run.stop.run_until_cancelled(tokio::time::sleep(pace(PAUSE))).await.is_none() {
                break;
            }
            let mut right = Vec::new();
            for (target, numbers) in &mut off {
                let site = self.on.number_of(of, *target).await?.unwrap_or(0);
                let here = sql::imports::numbers_of(&self.on.store, (self.on.kind, self.on.metric), &[*target]).await?;
                *numbers = (site, here.first().copied().unwrap_or(0));
                if numbers.0 == numbers.1 {
                    right.push(*target);
                }
            }
            off.retain(|target, _| !right.contains(target));
        }
        if self.run.stop.is_cancelled() {
            return Ok(());
        }
        self.run.report.differing += off.len() as u64;
        let room = LISTED_MAX.saturating_sub(self.run.report.targets.len());
        for (target, (site, here)) in off.into_iter().take(room) {
            let target = self.name(target);
            self.run.report.targets.push(TargetReport { target, site, here, missing: 0, extra: 0 });
        }
        Ok(())
    }

    fn name(&self, target: TargetId) -> String {
        format!("{}:{target}", self.on.import.kind)
    }
}
