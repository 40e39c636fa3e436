//! The second pass. If two checks find that a row is missing on the site, the pass removes the row from MySQL. The pass
//! removes a row only if the import wrote the row and no event has changed the row since then.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::info;

use super::Importing;
use super::checkpoint::{Checkpoint, raw};
use super::sides::{Sides, Step};
use crate::sql;
use crate::sql::imports::Liked;
use crate::sql::source::LikeColumns;
use tallyd_base::jobs::JobError;
use tallyd_base::runtime::fault;
use tallyd_core::coalesce::Pair;
use tallyd_core::import::{Key, LAST, Side, differences, is_too_many};
use tallyd_core::model::{Micros, Target};
use tallyd_core::site_query::Query;

/// The scan pauses while more rows wait for their second check.
const WAITING_MAX: usize = 100_000;

/// Small, because consumers wait for the locks of the transaction.
const TAKEN_OUT_MAX: usize = 500;

struct Missed {
    row: Liked,
    due: Instant,
}

impl Missed {
    fn is_due(&self) -> bool {
        self.due <= Instant::now()
    }
}

impl Importing<'_, '_> {
    pub(super) async fn take_out_missing(&mut self, query: &Query, look_again_after: Duration) -> Result<(), JobError> {
        if self.on.import.keeps_deleted == Some(true) {
            return Err(self.on.refused(
                "the table keeps its deleted rows (keeps_deleted = true): run the import again without --deletions",
            ));
        }
        let (columns, plan) = self.on.like_columns(query).await?;
        self.plan(&plan);
        let checkpoint = self.begin().await?;
        let imported = sql::imports::imported_likes(&self.on.store, self.on.kind, self.on.metric).await?;
        let site = (query, &columns);
        let mut sides = Sides::new(self.on, site, (checkpoint.key(), LAST));
        let mut waiting: VecDeque<Missed> = VecDeque::new();
        let mut reached = checkpoint.key();
        loop {
            if !self.run.next_page().await? {
                return Ok(());
            }
            let began = Instant::now();
            let step = loop {
                let read = self.run.unless_stopped(sides.next(self.run.page_size())).await;
                match read.map_err(JobError::from).flatten() {
                    Err(error) if self.waits_after(&error).await => {}
                    step => break step?,
                }
            };
            self.outage.over();
            let Some(step) = step else { break };
            let count = step.site.len().max(step.here.len());
            self.run.report.pages += 1;
            self.run.report.rows += step.site.len() as u64;
            reached = step.until;
            waiting.extend(self.missed(step, look_again_after, &checkpoint, &columns));
            let limit = self.on.limits.repair_targets_max_percent;
            self.check_limit(is_too_many(self.run.report.missed, imported, limit))?;
            self.run.note_page(count, began.elapsed());
            self.show(reached);
            while waiting.len() > WAITING_MAX || waiting.front().is_some_and(Missed::is_due) {
                self.look_again(site, &mut waiting, reached, &checkpoint).await?;
            }
            if waiting.is_empty() {
                self.note(&Checkpoint { after: raw(reached), ..checkpoint }).await?;
            }
        }
        let is_whole = self.run.options.resume || self.run.report.rows > 0;
        self.check_limit(!is_whole && !waiting.is_empty())?;
        if !waiting.is_empty() {
            let (rows, seconds) = (waiting.len(), look_again_after.as_secs());
            info!(
                event = "import-looks-again",
                rows, seconds, "the site's table lacks {rows} imported rows: checking again after {seconds} s"
            );
        }
        while !waiting.is_empty() && !self.run.is_over() {
            self.look_again(site, &mut waiting, reached, &checkpoint).await?;
        }
        Ok(())
    }

    /// So that a wrong query or a table that is not whole removes nothing more.
    fn check_limit(&self, is_exceeded: bool) -> Result<(), JobError> {
        let (missed, rows) = (self.run.report.missed, self.run.report.rows);
        match is_exceeded && !self.run.options.force && !self.run.options.dry_run {
            true => Err(self.on.refused(format!(
                "{missed} imported likes are missing among {rows} likes of the query, more than [reconcile] \
                 repair_targets_max_percent allows. Check the query and its server; if this is correct, add --force"
            ))),
            false => Ok(()),
        }
    }

    fn missed(&mut self, step: Step, after: Duration, checkpoint: &Checkpoint, columns: &LikeColumns) -> Vec<Missed> {
        let due = Instant::now() + after;
        let here = step.here.iter().map(|row| row.key);
        let mut only_here =
            differences(step.site, here).filter(|(_, side)| *side == Side::Here).map(|(key, _)| key).peekable();
        let mut missed = Vec::new();
        for row in &step.here {
            if only_here.next_if_eq(&row.key).is_some() && checkpoint.start.is_of_import(row.at, columns.has_times()) {
                missed.push(Missed { row: *row, due });
            }
        }
        self.run.report.missed += missed.len() as u64;
        fault::point("import:missed");
        missed
    }

    /// Waits until the second check of the oldest rows is due. Removes the rows that are still missing.
    async fn look_again(
        &mut self,
        site: (&Query, &LikeColumns),
        waiting: &mut VecDeque<Missed>,
        reached: Key,
        checkpoint: &Checkpoint,
    ) -> Result<(), JobError> {
        let Some(first) = waiting.front() else { return Ok(()) };
        self.run.unless_stopped(tokio::time::sleep_until(first.due.into())).await?;
        let mut gone: Vec<(Pair, Micros)> = Vec::new();
        let mut last = first.row.key;
        for _ in 0..TAKEN_OUT_MAX {
            if !waiting.front().is_some_and(Missed::is_due) {
                break;
            }
            let Some(Missed { row, .. }) = waiting.pop_front() else { break };
            last = row.key;
            if !self.on.has_like(site, row.key).await? {
                let target = Target { kind: self.on.kind, id: row.key.0 };
                gone.push(((target, row.key.1), row.at));
            }
        }
        if self.run.options.dry_run {
            self.run.report.taken_out += gone.len() as u64;
            return Ok(());
        }
        // All rows that still wait are after this position.
        let after = raw(if waiting.is_empty() { reached } else { last });
        let done = Checkpoint { after, ..*checkpoint };
        fault::point("import:taking-out");
        let removed =
            sql::imports::take_out(&self.on.store, self.run.number, self.on.metric, &gone, &done.text()?).await?;
        self.run.report.taken_out += removed;
        fault::point("import:taken-out");
        Ok(())
    }
}
