//! Compares the sums of a range of rows in the site's table and in `like_record`. The servers calculate the sums.

use super::Importer;
use crate::sql;
use crate::sql::source::LikeColumns;
use tallyd_base::jobs::JobError;
use tallyd_core::import::{Key, LAST, Sums};
use tallyd_core::site_query::Query;

/// A range ends where a page of the site's query ends. While tallyd's server sums a range, the site's sums the next.
pub(super) struct SumComparison<'a> {
    on: &'a Importer,
    site: (&'a Query, &'a LikeColumns),
    reached: Key,
    next: Option<SiteRange>,
}

#[derive(Clone, Copy)]
struct SiteRange {
    after: Key,
    until: Key,
    answered: usize,
    /// `None` if a row is invalid or the rows are in the wrong order.
    sums: Option<Sums>,
}

pub(super) struct Compared {
    pub after: Key,
    pub until: Key,
    pub answered: usize,
    pub site: Sums,
    pub here: Sums,
    /// If not, the rows count as different, and are read one by one.
    has_sums: bool,
}

impl Compared {
    pub(super) fn differs(&self) -> bool {
        !self.has_sums || self.site != self.here
    }

    pub(super) fn rows(&self) -> usize {
        self.answered.max(usize::try_from(self.here.count).unwrap_or(usize::MAX))
    }
}

impl<'a> SumComparison<'a> {
    pub(super) fn new(on: &'a Importer, site: (&'a Query, &'a LikeColumns), after: Key) -> Self {
        Self { on, site, reached: after, next: None }
    }

    pub(super) async fn next(&mut self, limit: usize) -> Result<Option<Compared>, JobError> {
        let this = match self.next.take() {
            Some(next) => next,
            None if self.reached >= LAST => return Ok(None),
            None => self.site_range(self.reached, limit).await?,
        };
        let following =
            async { if this.until < LAST { self.site_range(this.until, limit).await.map(Some) } else { Ok(None) } };
        let here = async {
            sql::sums::liked_sums(&self.on.store, self.on.kind, (this.after, this.until)).await.map_err(JobError::from)
        };
        let (here, following) = tokio::try_join!(here, following)?;
        (self.reached, self.next) = (this.until, following);
        let SiteRange { after, until, answered, sums } = this;
        let (site, has_sums) = (sums.unwrap_or_default(), sums.is_some());
        Ok(Some(Compared { after, until, answered, site, here, has_sums }))
    }

    async fn site_range(&self, after: Key, limit: usize) -> Result<SiteRange, JobError> {
        let page = self.on.site_sums(self.site, after, limit).await?;
        if page.answered == 0 {
            return Ok(SiteRange { after, until: LAST, answered: 0, sums: Some(page.sums) });
        }
        match page.last.filter(|last| *last > after) {
            Some(until) => Ok(SiteRange { after, until, answered: page.answered, sums: Some(page.sums) }),
            None => {
                let rows = self.on.likes(self.site, after, limit).await?;
                if let Some(fault) = rows.fault {
                    return Err(self.on.refused(fault));
                }
                let last = rows.rows.last().map_or(LAST, |row| row.key);
                Ok(SiteRange { after, until: last, answered: rows.answered, sums: None })
            }
        }
    }
}
