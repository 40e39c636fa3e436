//! The second pass. If two checks find that a row is missing on the site, the pass removes the row from MySQL. The pass
//! removes a row only if the import wrote the row and no event has changed the row since then.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::Result;
use tracing::info;

use super::sides::{Sides, Step};
use super::{Checkpoint, Run, raw};
use crate::jobs::JobError;
use crate::runtime::fault;
use tallyd_core::coalesce::Pair;
use tallyd_core::import::{Key, LAST, Side, differences, is_too_many};
use tallyd_core::model::{Micros, Target};
use tallyd_core::site_query::Query;
use tallyd_mysql::moving::imports::Liked;
use tallyd_mysql::moving::source::LikeColumns;

/// Maximum number of rows that wait for their second check. The scan pauses while more rows wait.
const HELD_MAX: usize = 100_000;

/// Maximum number of rows that one transaction removes. The number is small, because consumers wait for the locks of
/// the transaction.
const TAKEN_OUT_MAX: usize = 500;

/// A row that was missing on the site, and the time of the first check.
struct Missed {
    row: Liked,
    seen: Instant,
}

impl Run<'_> {
    pub(super) async fn take_out_missing(&mut self, query: &Query) -> Result<(), JobError> {
        if self.on.import.keeps_deleted == Some(true) {
            return Err(self.on.refused(
                "the table keeps its deleted rows (keeps_deleted = true): run the import again without --deletions",
            ));
        }
        let (columns, plan) = self.on.like_columns(query).await?;
        self.plan(&plan);
        let checkpoint = self.begin().await?;
        let imported = self.on.store.imported_likes(self.on.kind, self.on.metric).await?;
        let site = (query, &columns);
        let mut sides = Sides::new(self.on, site, (checkpoint.key(), LAST));
        let mut held: VecDeque<Missed> = VecDeque::new();
        let mut reached = checkpoint.key();
        loop {
            self.wait().await?;
            if self.is_over() {
                return Ok(());
            }
            let began = Instant::now();
            let step = loop {
                match self.stop.run_until_cancelled(sides.next(self.pace.page())).await.transpose() {
                    Err(error) if self.waits_after(&error).await => {}
                    step => break step?,
                }
            };
            self.outage.over();
            let Some(step) = step.flatten() else { break };
            let count = step.site.len().max(step.here.len());
            self.report.pages += 1;
            self.report.rows += step.site.len() as u64;
            reached = step.until;
            held.extend(self.missed(step, &checkpoint, &columns));
            self.check_limit(is_too_many(self.report.missed, imported, self.on.limits.repair_targets_max_percent))?;
            self.pace.note(count, began.elapsed());
            self.show(reached);
            while held.len() > HELD_MAX || held.front().is_some_and(|first| self.is_due(first)) {
                self.look_again(site, &mut held, reached, &checkpoint).await?;
            }
            if held.is_empty() && !self.options.dry_run {
                let done = Checkpoint { after: raw(reached), ..checkpoint };
                self.on.store.note_checkpoint(self.number, &done.text()?).await?;
            }
        }
        let is_whole = self.options.resume || self.report.rows > 0;
        self.check_limit(!is_whole && !held.is_empty())?;
        if !held.is_empty() {
            let (rows, seconds) = (held.len(), self.options.look_again_after.as_secs());
            info!(
                event = "import-looks-again",
                rows, seconds, "the site's table lacks {rows} imported rows: checking again after {seconds} s"
            );
        }
        while !held.is_empty() && !self.is_over() {
            self.look_again(site, &mut held, reached, &checkpoint).await?;
        }
        if self.stop.is_cancelled() {
            self.end_stopped();
        }
        Ok(())
    }

    /// # Errors
    /// Fails if the limit is exceeded, so that a wrong query or a table that is not whole removes nothing more.
    fn check_limit(&self, is_exceeded: bool) -> Result<(), JobError> {
        let (missed, rows) = (self.report.missed, self.report.rows);
        match is_exceeded && !self.options.force && !self.options.dry_run {
            true => Err(self.on.refused(format!(
                "{missed} imported likes are missing among {rows} likes of the query, more than [reconcile] \
                 repair_targets_max_percent allows. Check the query and its server; if this is correct, add --force"
            ))),
            false => Ok(()),
        }
    }

    /// Returns the imported rows that are missing on the site.
    fn missed(&mut self, step: Step, checkpoint: &Checkpoint, columns: &LikeColumns) -> Vec<Missed> {
        let seen = Instant::now();
        let here = step.here.iter().map(|row| row.key);
        let mut only_here =
            differences(step.site, here).filter(|(_, side)| *side == Side::Here).map(|(key, _)| key).peekable();
        let mut missed = Vec::new();
        for row in &step.here {
            if only_here.next_if_eq(&row.key).is_some() && checkpoint.start.is_of_import(row.at, columns.has_times()) {
                missed.push(Missed { row: *row, seen });
            }
        }
        self.report.missed += missed.len() as u64;
        fault::point("import:missed");
        missed
    }

    fn is_due(&self, missed: &Missed) -> bool {
        missed.seen.elapsed() >= self.options.look_again_after
    }

    /// Waits until the second check of the oldest rows is due, and checks these rows. Removes the rows that are still
    /// missing on the site.
    async fn look_again(
        &mut self,
        site: (&Query, &LikeColumns),
        held: &mut VecDeque<Missed>,
        reached: Key,
        checkpoint: &Checkpoint,
    ) -> Result<(), JobError> {
        let Some(first) = held.front() else { return Ok(()) };
        let left = self.options.look_again_after.saturating_sub(first.seen.elapsed());
        if self.stop.run_until_cancelled(tokio::time::sleep(left)).await.is_none() {
            held.clear();
            return Ok(());
        }
        let mut gone: Vec<(Pair, Micros)> = Vec::new();
        let mut last = first.row.key;
        for _ in 0..TAKEN_OUT_MAX {
            if !held.front().is_some_and(|first| self.is_due(first)) {
                break;
            }
            let Some(Missed { row, .. }) = held.pop_front() else { break };
            last = row.key;
            if !self.on.has_like(site, row.key).await? {
                let target = Target { kind: self.on.kind, id: row.key.0 };
                gone.push(((target, row.key.1), row.at));
            }
        }
        if self.options.dry_run {
            self.report.taken_out += gone.len() as u64;
            return Ok(());
        }
        // All rows that still wait for their second check are after this position.
        let after = raw(if held.is_empty() { reached } else { last });
        let done = Checkpoint { after, ..*checkpoint };
        fault::point("import:taking-out");
        self.report.taken_out += self.on.store.take_out(self.number, self.on.metric, &gone, &done.text()?).await?;
        fault::point("import:taken-out");
        Ok(())
    }
}
