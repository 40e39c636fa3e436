//! The first pass: writes pages of the site's rows as like records and counters.

use std::time::Instant;

use anyhow::Result;

use super::checkpoint::{Checkpoint, raw};
use super::{Importing, WARNINGS_MAX};
use crate::sql;
use crate::sql::imports::Written;
use crate::sql::source::{LikeColumns, SitePage};
use tallyd_base::jobs::JobError;
use tallyd_base::jobs::run::millis_since;
use tallyd_base::runtime::fault;
use tallyd_core::coalesce::{LikeState, Pair};
use tallyd_core::import::{Key, SiteLike, Start};
use tallyd_core::model::Target;
use tallyd_core::site_query::Query;

impl Importing<'_, '_> {
    pub(super) async fn import_rows(&mut self, query: &Query) -> Result<(), JobError> {
        let (columns, plan) = self.on.like_columns(query).await?;
        self.plan(&plan);
        let checkpoint = self.begin().await?;
        let site = (query, &columns);
        let mut page = self.read(site, checkpoint.key()).await?;
        while let Some((rows, next)) = page {
            self.judge(&rows)?;
            if !self.run.next_page().await? {
                return Ok(());
            }
            let began = Instant::now();
            let count = rows.answered;
            let done =
                Checkpoint { after: rows.rows.last().map_or(checkpoint.after, |row| raw(row.key)), ..checkpoint };
            // Only the import signs its rows, unless the table has the times of deletions, which a row keeps.
            let is_signed = self.on.import.keeps_deleted != Some(true) || !columns.has_times();
            let states: Vec<(Pair, LikeState)> =
                rows.rows.into_iter().map(|row| self.state(row, checkpoint.start)).collect();
            // A failed read must not abort the transaction of the other page.
            let (mut written, mut following) =
                tokio::join!(self.write((&states, is_signed), &done), self.read(site, next));
            while let Err(error) = &written
                && self.waits_after(error).await
            {
                written = self.write((&states, is_signed), &done).await;
            }
            self.note_written(written?);
            while let Err(error) = &following
                && self.waits_after(error).await
            {
                following = self.read(site, next).await;
            }
            self.outage.over();
            self.run.note_page(count, began.elapsed());
            fault::point("import:written");
            self.show(done.key());
            page = following?;
        }
        Ok(())
    }

    fn state(&self, SiteLike { key: (target, user), liked, at }: SiteLike, start: Start) -> (Pair, LikeState) {
        let target = Target { kind: self.on.kind, id: target };
        let at = start.version(at, self.on.import.keeps_deleted == Some(true));
        ((target, user), LikeState { at, liked })
    }

    async fn write(&self, rows: (&[(Pair, LikeState)], bool), done: &Checkpoint) -> Result<Written, JobError> {
        if self.run.options.dry_run || rows.0.is_empty() {
            return Ok(Written::default());
        }
        fault::point("import:writing");
        let began = Instant::now();
        let written =
            sql::imports::write_import(&self.on.store, self.run.number, self.on.metric, rows, &done.text()?).await;
        self.write_ms.set(self.write_ms.get() + millis_since(began));
        Ok(written?)
    }

    fn note_written(&mut self, Written { added, changed, kept, likes }: Written) {
        let report = &mut self.run.report;
        report.added += added;
        report.changed += changed;
        report.kept += kept;
        report.counted += likes;
    }

    /// With the key of the last row, or `None` at the end. Only an empty page is the end of the table: a query can
    /// bound its pages in other ways than by `:rows`.
    async fn read(
        &self,
        site: (&Query, &LikeColumns),
        after: Key,
    ) -> Result<Option<(SitePage<SiteLike>, Key)>, JobError> {
        let (limit, began) = (self.run.page_size(), Instant::now());
        let page = self.run.unless_stopped(self.on.likes(site, after, limit)).await??;
        self.read_ms.set(self.read_ms.get() + millis_since(began));
        fault::point("import:read");
        if page.answered == 0 {
            return Ok(None);
        }
        match page.rows.last().map(|row| row.key) {
            Some(last) => Ok(Some((page, last))),
            None => {
                let fault = page.fault.unwrap_or_default();
                Err(self
                    .on
                    .refused(format!("a page has no row that comes after the last row of the previous page: {fault}")))
            }
        }
    }

    /// Fails if rows are in the wrong order. A dry run only counts them.
    fn judge(&mut self, page: &SitePage<SiteLike>) -> Result<(), JobError> {
        if let (Some(fault), false) = (&page.fault, self.run.options.dry_run) {
            return Err(self.on.refused(fault));
        }
        let report = &mut self.run.report;
        report.pages += 1;
        report.rows += page.answered as u64;
        report.repeated += page.repeated;
        report.unordered += page.unordered;
        report.likes += page.rows.iter().filter(|row| row.liked).count() as u64;
        for at in page.rows.iter().filter_map(|row| row.at) {
            report.oldest = Some(report.oldest.map_or(at, |oldest| oldest.min(at)));
            report.newest = Some(report.newest.map_or(at, |newest| newest.max(at)));
        }
        if let Some(fault) = page.fault.as_ref().filter(|_| report.warnings.len() < WARNINGS_MAX) {
            report.warnings.push(fault.clone());
        }
        Ok(())
    }
}
