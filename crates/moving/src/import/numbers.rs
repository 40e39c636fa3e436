//! Imports opening balances: the site's counts without like rows. The counts come from a column, or from keys in Redis.

use std::time::Instant;

use anyhow::Result;

use super::checkpoint::Checkpoint;
use super::{Importer, Importing};
use crate::config::Reads;
use crate::site_keys;
use crate::site_keys::SiteKeys;
use crate::sql;
use crate::sql::source::NumberColumns;
use tallyd_base::jobs::JobError;
use tallyd_base::runtime::fault;
use tallyd_core::model::{TargetId, UserId};
use tallyd_core::site_query::Query;
use tallyd_core::template::Template;
use tallyd_redis::scan::ScanCursor;

#[derive(Clone, Copy)]
pub(super) enum Numbers<'a> {
    Table(&'a Query, NumberColumns),
    Keys(&'a Template),
}

pub(super) enum Cursor {
    After(TargetId),
    Scan(ScanCursor),
}

pub(super) struct NumberPage {
    pub numbers: Vec<(TargetId, i64)>,
    ignored: u64,
    pub next: Option<Cursor>,
}

impl Importer {
    fn site_keys<'a>(&'a self, template: &'a Template) -> SiteKeys<'a> {
        SiteKeys { template, kind: (&self.import.kind, self.kind), metric: &self.import.metric }
    }

    /// A scan of keys always starts from the beginning, because Redis' positions are not valid in a later run.
    pub(super) async fn numbers_from(&self, of: Numbers<'_>, after: TargetId) -> Result<Option<Cursor>, JobError> {
        match of {
            Numbers::Table(..) => Ok(Some(Cursor::After(after))),
            Numbers::Keys(_) => Ok(self.cache.begin_scan().await.map_err(anyhow::Error::from)?.map(Cursor::Scan)),
        }
    }

    pub(super) async fn numbers_page(
        &self,
        of: Numbers<'_>,
        from: Cursor,
        limit: usize,
    ) -> Result<NumberPage, JobError> {
        let (numbers, ignored, next, fault) = match (of, from) {
            (Numbers::Table(query, columns), Cursor::After(after)) => {
                let page = self.numbers((query, columns), after, limit).await?;
                let last = page.rows.last().map(|(target, _)| *target);
                (page.rows, 0, last.map(Cursor::After), page.fault)
            }
            (Numbers::Keys(template), Cursor::Scan(from)) => {
                let found = site_keys::scan_site_keys(&self.cache, self.site_keys(template), from)
                    .await
                    .map_err(anyhow::Error::from)?;
                (found.numbers, found.ignored, found.next.map(Cursor::Scan), found.fault)
            }
            (Numbers::Table(..), Cursor::Scan(_)) | (Numbers::Keys(_), Cursor::After(_)) => (Vec::new(), 0, None, None),
        };
        match fault {
            Some(fault) => Err(self.refused(fault)),
            None => Ok(NumberPage { numbers, ignored, next }),
        }
    }

    pub(super) async fn number_of(&self, of: Numbers<'_>, target: TargetId) -> Result<Option<i64>, JobError> {
        let found = match of {
            Numbers::Table(query, columns) => self.numbers((query, columns), TargetId(target.0 - 1), 1).await?.rows,
            Numbers::Keys(template) => {
                site_keys::site_numbers(&self.cache, self.site_keys(template), &[target])
                    .await
                    .map_err(anyhow::Error::from)?
                    .0
            }
        };
        Ok(found.first().filter(|(id, _)| *id == target).map(|(_, number)| *number))
    }
}

impl<'a> Importing<'a, '_> {
    pub(super) async fn import_numbers(&mut self) -> Result<(), JobError> {
        let of = self.source_of_numbers().await?;
        let checkpoint = self.begin().await?;
        let mut next = self.on.numbers_from(of, TargetId(checkpoint.after.0)).await?;
        while let Some(from) = next {
            if !self.run.next_page().await? {
                return Ok(());
            }
            let began = Instant::now();
            let page = self.run.unless_stopped(self.on.numbers_page(of, from, self.run.page_size())).await??;
            fault::point("import:numbers-read");
            if !self.run.options.dry_run && !page.numbers.is_empty() {
                let reached = page.numbers.last().map_or(0, |(target, _)| target.0);
                let after = if matches!(of, Numbers::Table(..)) { (reached, 0) } else { (0, 0) };
                let done = Checkpoint { after, ..checkpoint };
                let (which, number) = ((self.on.kind, self.on.metric), self.run.number);
                let text = done.text()?;
                self.run.report.changed +=
                    sql::imports::level_numbers(&self.on.store, number, which, &page.numbers, &text).await?;
                fault::point("import:numbers-written");
            }
            self.note_numbers(&page);
            self.run.note_page(page.numbers.len(), began.elapsed());
            next = page.next;
        }
        Ok(())
    }

    pub(super) fn note_numbers(&mut self, page: &NumberPage) {
        self.run.report.pages += 1;
        self.run.report.rows += page.numbers.len() as u64;
        self.run.report.ignored += page.ignored;
        if let Some((last, _)) = page.numbers.last() {
            self.show((*last, UserId(0)));
        }
    }

    pub(super) async fn source_of_numbers(&mut self) -> Result<Numbers<'a>, JobError> {
        match &self.on.reads {
            Reads::Numbers(query) | Reads::Likes(query) => {
                let (columns, plan) = self.on.number_columns(query).await?;
                self.plan(&plan);
                Ok(Numbers::Table(query, columns))
            }
            Reads::Keys(template) => Ok(Numbers::Keys(template)),
        }
    }
}
