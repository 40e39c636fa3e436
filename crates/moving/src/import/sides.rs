//! Reads the site's table and `like_record` side by side, page by page, both in the order of their keys. Only one page
//! of each side is in memory.

use std::collections::VecDeque;

use anyhow::Result;

use super::Importer;
use crate::sql;
use crate::sql::imports::Liked;
use crate::sql::source::LikeColumns;
use tallyd_base::jobs::JobError;
use tallyd_core::import::Key;
use tallyd_core::site_query::Query;

pub(super) struct Sides<'a> {
    on: &'a Importer,
    site: (&'a Query, &'a LikeColumns),
    end: Key,
    reached: Key,
    site_range: Buffer<Key>,
    here: Buffer<Liked>,
}

struct Buffer<T> {
    rows: VecDeque<T>,
    until: Key,
}

pub(super) struct Step {
    pub until: Key,
    pub site: Vec<Key>,
    pub here: Vec<Liked>,
}

impl<T> Buffer<T> {
    fn take(&mut self, until: Key, key: impl Fn(&T) -> Key) -> Vec<T> {
        let count = self.rows.partition_point(|row| key(row) <= until);
        self.rows.drain(..count).collect()
    }
}

impl<'a> Sides<'a> {
    pub(super) fn new(on: &'a Importer, site: (&'a Query, &'a LikeColumns), (after, end): (Key, Key)) -> Self {
        let buffer = || Buffer { rows: VecDeque::new(), until: after };
        Self {
            on,
            site,
            end,
            reached: after,
            site_range: buffer(),
            here: Buffer { rows: VecDeque::new(), until: after },
        }
    }

    pub(super) async fn next(&mut self, limit: usize) -> Result<Option<Step>, JobError> {
        if self.reached >= self.end {
            return Ok(None);
        }
        let (end, after) = (self.end, self.reached);
        let reads_site = self.site_range.until == after;
        let reads_here = self.here.until == after;
        let site = async { if reads_site { self.on.likes(self.site, after, limit).await.map(Some) } else { Ok(None) } };
        let here = async {
            let rows = sql::imports::liked_rows(&self.on.store, self.on.kind, (after, end), limit);
            if reads_here { rows.await.map(Some).map_err(JobError::from) } else { Ok(None) }
        };
        let (site, here) = tokio::try_join!(site, here)?;
        if let Some(page) = site {
            if let Some(fault) = page.fault {
                return Err(self.on.refused(fault));
            }
            let last = page.rows.last().map_or(end, |row| row.key.min(end));
            self.site_range.until = last;
            self.site_range.rows.extend(page.rows.iter().filter(|row| row.liked && row.key <= last).map(|row| row.key));
        }
        if let Some(rows) = here {
            self.here.until = rows.last().filter(|_| rows.len() == limit).map_or(end, |row| row.key);
            self.here.rows.extend(rows);
        }
        let until = self.site_range.until.min(self.here.until);
        self.reached = until;
        Ok(Some(Step {
            until,
            site: self.site_range.take(until, |key| *key),
            here: self.here.take(until, |row| row.key),
        }))
    }
}
