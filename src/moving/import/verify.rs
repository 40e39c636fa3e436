//! `--verify`: both sides beside each other, while both change. What differs is looked at again, some seconds later: events on their way have
//! come by then, and a difference that stays is one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::Run;
use super::numbers::Numbers;
use super::report::{LISTED_MAX, TargetReport};
use super::sides::{Sides, Step};
use crate::jobs::JobError;
use tallyd_core::import::{FIRST, Key, LAST, Side, differences};
use tallyd_core::model::TargetId;
use tallyd_core::site_query::Query;
use tallyd_mysql::moving::source::LikeColumns;

/// How often what differs is looked at again.
const LOOKS: usize = 3;

/// Before each of these looks.
const PAUSE: Duration = Duration::from_secs(3);

/// Ranges that differ, rows that do in them, and numbers, before these are looked at again: some MiB.
const RANGES_MAX: usize = 100;
const ROWS_MAX: usize = 100_000;
const NUMBERS_MAX: usize = 10_000;

/// A range of rows in which the sides differ.
struct Differing {
    after: Key,
    until: Key,
    rows: BTreeSet<(Key, Side)>,
}

/// What differs of targets, in their order.
#[derive(Default)]
struct Found {
    /// The first ones: how many rows only one side has.
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

impl Run<'_> {
    pub(super) async fn verify_likes(&mut self, query: &Query) -> Result<(), JobError> {
        let (columns, plan) = self.on.like_columns(query).await?;
        self.plan(&plan);
        let site = (query, &columns);
        let mut sides = Sides::new(self.on, site, (FIRST, LAST));
        let (mut ranges, mut found) = (Vec::new(), Found::default());
        loop {
            self.wait().await?;
            if self.is_over() {
                break;
            }
            let began = Instant::now();
            let step = self.stop.run_until_cancelled(sides.next(self.pace.page())).await.transpose()?;
            let Some(step) = step.flatten() else { break };
            let count = step.site.len().max(step.here.len());
            self.report.pages += 1;
            self.report.rows += step.site.len() as u64;
            self.report.here += step.here.len() as u64;
            self.show(step.until);
            ranges.extend(differing(step));
            self.pace.note(count, began.elapsed());
            let rows: usize = ranges.iter().map(|range: &Differing| range.rows.len()).sum();
            if ranges.len() >= RANGES_MAX || rows >= ROWS_MAX {
                self.settle(site, &mut ranges, &mut found).await?;
            }
        }
        self.settle(site, &mut ranges, &mut found).await?;
        self.report.differing = found.count;
        for (id, (missing, extra)) in found.listed {
            let here = self.on.store.count_likes(self.on.kind, id).await?;
            let site = here + missing.cast_signed() - extra.cast_signed();
            self.report.targets.push(TargetReport { target: self.name(id), site, here, missing, extra });
        }
        if self.stop.is_cancelled() {
            self.end_stopped();
        }
        Ok(())
    }

    /// Looks at the ranges again, and keeps what differs each time.
    async fn settle(
        &mut self,
        site: (&Query, &LikeColumns),
        ranges: &mut Vec<Differing>,
        found: &mut Found,
    ) -> Result<(), JobError> {
        for _ in 0..LOOKS {
            if ranges.is_empty() || self.stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await.is_none() {
                break;
            }
            for range in ranges.iter_mut() {
                let mut sides = Sides::new(self.on, site, (range.after, range.until));
                let mut still = BTreeSet::new();
                while let Some(step) = sides.next(self.on.import.page_rows).await? {
                    still.extend(differing(step).into_iter().flat_map(|range| range.rows));
                }
                range.rows.retain(|row| still.contains(row));
            }
            ranges.retain(|range| !range.rows.is_empty());
        }
        let rows = ranges.drain(..).flat_map(|range| range.rows);
        if !self.stop.is_cancelled() {
            rows.for_each(|(key, side)| found.note(key, side));
        }
        Ok(())
    }

    pub(super) async fn verify_numbers(&mut self) -> Result<(), JobError> {
        let of = self.source_of_numbers().await?;
        let which = (self.on.kind, self.on.metric);
        let mut suspects: BTreeSet<TargetId> = BTreeSet::new();
        let mut next = self.on.numbers_from(of, TargetId(0)).await?;
        while let Some(from) = next {
            self.wait().await?;
            if self.is_over() {
                break;
            }
            let began = Instant::now();
            let page = self.stop.run_until_cancelled(self.on.numbers_page(of, from, self.pace.page())).await;
            let Some(page) = page.transpose()? else { break };
            let targets: Vec<TargetId> = page.numbers.iter().map(|(target, _)| *target).collect();
            let here = self.on.store.numbers_of(which, &targets).await?;
            let off = page.numbers.iter().zip(&here).filter(|((_, site), here)| site != *here);
            suspects.extend(off.map(|((target, _), _)| *target));
            self.report.here += here.len() as u64;
            self.note_numbers(&page);
            self.pace.note(page.numbers.len(), began.elapsed());
            next = page.next;
            if suspects.len() >= NUMBERS_MAX {
                self.settle_numbers(of, &mut suspects).await?;
            }
        }
        self.settle_numbers(of, &mut suspects).await?;
        if self.stop.is_cancelled() {
            self.end_stopped();
        }
        Ok(())
    }

    /// Looks at numbers again, and keeps those that are never the same.
    async fn settle_numbers(&mut self, of: Numbers<'_>, suspects: &mut BTreeSet<TargetId>) -> Result<(), JobError> {
        let mut off: BTreeMap<TargetId, (i64, i64)> = suspects.iter().map(|target| (*target, (0, 0))).collect();
        suspects.clear();
        for _ in 0..LOOKS {
            if off.is_empty() || self.stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await.is_none() {
                break;
            }
            let mut right = Vec::new();
            for (target, numbers) in &mut off {
                let site = self.on.number_of(of, *target).await?.unwrap_or(0);
                let here = self.on.store.numbers_of((self.on.kind, self.on.metric), &[*target]).await?;
                *numbers = (site, here.first().copied().unwrap_or(0));
                if numbers.0 == numbers.1 {
                    right.push(*target);
                }
            }
            off.retain(|target, _| !right.contains(target));
        }
        if self.stop.is_cancelled() {
            return Ok(());
        }
        self.report.differing += off.len() as u64;
        let room = LISTED_MAX.saturating_sub(self.report.targets.len());
        for (target, (site, here)) in off.into_iter().take(room) {
            let target = self.name(target);
            self.report.targets.push(TargetReport { target, site, here, missing: 0, extra: 0 });
        }
        Ok(())
    }

    fn name(&self, target: TargetId) -> String {
        format!("{}:{target}", self.on.import.kind)
    }
}

/// The range, where the sides differ.
fn differing(Step { after, until, site, here }: Step) -> Option<Differing> {
    let rows: BTreeSet<(Key, Side)> = differences(site, here.iter().map(|row| row.key)).collect();
    (!rows.is_empty()).then_some(Differing { after, until, rows })
}
