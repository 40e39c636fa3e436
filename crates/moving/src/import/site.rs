//! Reads the site's table page by page.

use anyhow::Result;

use super::Importer;
use crate::sql;
use crate::sql::source::{Bounds, LikeColumns, NumberColumns, SitePage};
use crate::sql::sums::SiteSums;
use tallyd_base::jobs::JobError;
use tallyd_base::runtime::clock;
use tallyd_core::import::{FIRST, Key, SiteLike, before};
use tallyd_core::model::{TargetId, UserId};
use tallyd_core::site_query::Query;
use tallyd_mysql::Store;
use tallyd_mysql::site_query::{Plan, QueryError, Statement};

impl Importer {
    pub(super) fn site_store(&self) -> &Store {
        self.source.as_ref().unwrap_or(&self.store)
    }

    fn statement(&self, query: &Query, values: &[u64]) -> Statement {
        Statement {
            sql: query.sql(values),
            query_max: self.import.query_max.0,
            page_key: "page_rows",
            url_key: if self.source.is_some() { "url of the [server] of the import" } else { "[mysql] url" },
        }
    }

    fn of_likes(&self, query: &Query, (target, user): Key, limit: usize) -> Statement {
        self.statement(query, &[target.0, user.0, limit as u64])
    }

    fn of_numbers(&self, query: &Query, after: TargetId, limit: usize) -> Statement {
        self.statement(query, &[after.0, limit as u64])
    }

    fn bounds(&self, after: Key, limit: usize) -> Bounds {
        Bounds { after, limit, latest: clock::now().after(self.future_max) }
    }

    /// Also returns how the server would execute the query. [`JobError::Refused`] if the query is wrong.
    pub(super) async fn like_columns(&self, query: &Query) -> Result<(LikeColumns, Vec<Plan>), JobError> {
        let statement = self.of_likes(query, FIRST, self.import.page_rows);
        let found = sql::source::like_columns(self.site_store(), &statement, self.import.unit).await;
        let (columns, plan) = found.map_err(|error| self.job_error(error))?;
        let wrong = match (columns.has_deleted(), self.import.keeps_deleted) {
            (true, None) => "set keeps_deleted to true if a row stays when its user unlikes. Otherwise set it to false",
            (false, Some(true)) => "keeps_deleted is true, but the query has no column deleted",
            _ => return Ok((columns, plan)),
        };
        Err(self.refused(wrong))
    }

    pub(super) async fn number_columns(&self, query: &Query) -> Result<(NumberColumns, Vec<Plan>), JobError> {
        let statement = self.of_numbers(query, TargetId(0), self.import.page_rows);
        sql::source::number_columns(self.site_store(), &statement).await.map_err(|error| self.job_error(error))
    }

    /// [`JobError::Refused`] if the query or a row is wrong.
    pub(super) async fn likes(
        &self,
        (query, columns): (&Query, &LikeColumns),
        after: Key,
        limit: usize,
    ) -> Result<SitePage<SiteLike>, JobError> {
        let statement = self.of_likes(query, after, limit);
        let page = sql::source::site_likes(self.site_store(), &statement, columns, self.bounds(after, limit));
        page.await.map_err(|error| self.job_error(error))
    }

    /// The sums of a page. [`JobError::Refused`] if the query is wrong.
    pub(super) async fn site_sums(
        &self,
        (query, columns): (&Query, &LikeColumns),
        after: Key,
        limit: usize,
    ) -> Result<SiteSums, JobError> {
        let statement = self.of_likes(query, after, limit);
        let sums = sql::sums::site_sums(self.site_store(), &statement, columns, limit);
        sums.await.map_err(|error| self.job_error(error))
    }

    pub(super) async fn has_like(&self, site: (&Query, &LikeColumns), key: Key) -> Result<bool, JobError> {
        let page = self.likes(site, before(key), 1).await?;
        Ok(page.rows.first().is_some_and(|row| row.key == key && row.liked))
    }

    pub(super) async fn numbers(
        &self,
        (query, columns): (&Query, NumberColumns),
        after: TargetId,
        limit: usize,
    ) -> Result<SitePage<(TargetId, i64)>, JobError> {
        let statement = self.of_numbers(query, after, limit);
        let page =
            sql::source::site_numbers(self.site_store(), &statement, columns, self.bounds((after, UserId(0)), limit));
        page.await.map_err(|error| self.job_error(error))
    }

    pub(super) fn refused(&self, sentence: impl std::fmt::Display) -> JobError {
        JobError::Refused(format!("[[import]] {}: {sentence}", self.import.name))
    }

    fn job_error(&self, error: QueryError) -> JobError {
        match error {
            QueryError::Query(sentence) => self.refused(sentence),
            QueryError::Store(error) => JobError::Other(anyhow::Error::from(error).context("read the site's table")),
        }
    }
}
