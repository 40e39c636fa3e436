//! Erases likes, one page of rows at a time. For each row that is a like, the run publishes an ordinary unlike event.
//! When the unlikes are committed, the run deletes the rows.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize};
use tracing::info;

use super::Erasing;
use super::report::Report;
use crate::sql;
use crate::sql::erase::LikeRow;
use tallyd_base::jobs::run::Job;
use tallyd_base::partitions::InUse;
use tallyd_base::runtime::fault;
use tallyd_base::servers::Servers;
use tallyd_core::erase::Subject;
use tallyd_core::event::{LikeEvent, Terms, encode_like};
use tallyd_core::model::{Kind, Micros, Target, TargetId, UserId};
use tallyd_mysql::Store;
use tallyd_mysql::ranges::LAST;

const PAGE_ROWS: usize = 2_000;

/// One statement searches a user's rows for these. It takes tens of milliseconds.
const PAGE_TARGETS: usize = 2_000;

const AT_ONCE: usize = 64;

const PACE_EVERY: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Cursor {
    kind: u8,
    target_id: u64,
    user_id: u64,
    ended: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Checkpoint {
    /// The next successful run deletes the checkpoint with this name.
    of: String,
    cursor: Cursor,
    unlikes: u64,
    rows: u64,
    liked_again: u64,
}

struct Rows<'a> {
    store: &'a Store,
    subject: &'a Subject,
    kinds: Vec<Kind>,
    index: Option<String>,
    cursor: Cursor,
}

impl<'a> Erasing<'a, '_> {
    pub(super) async fn erase_likes(&mut self) -> Result<()> {
        let cursor = self.resumed().await?;
        let mut rows = self.rows(cursor).await?;
        while !rows.cursor.ended {
            self.run.check_stop()?;
            let page = rows.next().await?;
            if self.run.options.dry_run {
                self.run.report.rows += page.len() as u64;
                self.run.report.unlikes += page.iter().filter(|row| row.liked).count() as u64;
                let targets: BTreeSet<Target> = page.iter().map(|row| row.target).collect();
                if matches!(self.on.subject, Subject::User(_)) {
                    self.drop_filters(&targets.into_iter().collect::<Vec<_>>()).await?;
                }
            } else if !page.is_empty() {
                self.erase_page(&page).await.with_context(self.context("erase likes"))?;
            }
            let (cursor, rows) = (rows.cursor, self.run.report.rows);
            self.run.show(|progress| progress.note(rows, cursor.kind));
            if !self.run.options.dry_run {
                self.note_checkpoint(cursor).await?;
                fault::point("erase:page");
            }
        }
        Ok(())
    }

    /// Counts rows that appeared after their page was erased. Leaves those to the next erase that only a scan would
    /// find.
    pub(super) async fn look_again(&mut self) -> Result<()> {
        let mut rows = self.rows(Cursor::default()).await?;
        if self.run.options.dry_run || !rows.is_cheap() {
            return Ok(());
        }
        self.run.report.liked_again = rows.next().await?.len() as u64;
        Ok(())
    }

    async fn rows(&self, cursor: Cursor) -> Result<Rows<'a>> {
        let (store, subject) = (&self.run.servers.store, &self.on.subject);
        let kinds = self.kinds.all().map(|(kind, _)| kind).collect();
        Ok(Rows { store, subject, kinds, index: sql::erase::index_by_user(store).await?, cursor })
    }

    async fn erase_page(&mut self, page: &[LikeRow]) -> Result<()> {
        self.unlike(page).await?;
        fault::point("erase:published");
        // Needed even if all rows are unlikes: an older like in flight could create the row again after its deletion.
        self.fence().await?;
        fault::point("erase:fenced");
        let pairs: Vec<(Target, UserId)> = page.iter().map(|row| (row.target, row.user)).collect();
        let erased = sql::erase::erase_unlikes(&self.run.servers.store, self.run.number, &pairs).await?;
        fault::point("erase:deleted");
        self.run.report.rows += erased;
        self.run.report.liked_again += (pairs.len() as u64).saturating_sub(erased);
        for cache in &self.caches {
            self.run.report.redis_keys += cache.forget_clicks(&self.kinds, &pairs).await?;
        }
        // A target's filter is dropped once, at the end.
        if matches!(self.on.subject, Subject::User(_)) {
            let targets: BTreeSet<Target> = pairs.into_iter().map(|(target, _)| target).collect();
            self.drop_filters(&targets.into_iter().collect::<Vec<_>>()).await?;
        }
        Ok(())
    }

    async fn unlike(&mut self, page: &[LikeRow]) -> Result<()> {
        self.keep_pace().await?;
        let now = self.run.servers.cache.now().await?;
        let (exchange, terms) = (self.run.servers.broker.exchange(), Terms::from(&self.on.config));
        let publisher = &self.fences.publisher;
        let unlikes: Vec<(String, Vec<u8>)> = page
            .iter()
            .filter(|row| row.liked)
            .filter_map(|row| {
                // It must be later than the row, even if clocks differ.
                let at = now.max(Micros(row.at.0.saturating_add(1)));
                let LikeRow { target, user, .. } = *row;
                let event = LikeEvent { target, user, at, liked: false };
                let kind = self.kinds.get(target.kind)?;
                Some((terms.partition_by.routing_key(target, user), encode_like(&event, kind, None)))
            })
            .collect();
        let exchange = &exchange;
        stream::iter(&unlikes)
            .map(|(key, body)| publisher.publish(exchange, key, body))
            .buffered(AT_ONCE)
            .try_collect::<Vec<()>>()
            .await
            .context("publish unlikes")?;
        self.run.report.unlikes += unlikes.len() as u64;
        Ok(())
    }

    /// Events of the site have priority.
    async fn keep_pace(&mut self) -> Result<()> {
        let Servers { store, broker, .. } = self.run.servers;
        let max = self.on.config.reconcile.queue_depth_max;
        if max == 0 {
            return Ok(());
        }
        loop {
            let mut waiting = 0;
            for (_, queue) in InUse::read(store, broker).await?.partitions.queues() {
                waiting += self.backlog.of(&self.fences.publisher, queue).await?.0;
            }
            if waiting <= max {
                return Ok(());
            }
            let reason = format!("{waiting} messages are in the queues, and the limit is {max}");
            info!(event = "erase-waiting", waiting, "waiting, live traffic goes first: {reason}");
            let shown = self.run.waits(reason.clone());
            self.run.unless_stopped(tokio::time::sleep(PACE_EVERY)).await?;
            drop(shown);
            let waited = &mut self.run.report.head.waited;
            waited.waited_s += PACE_EVERY.as_secs();
            waited.waits.queue_depth += 1;
            waited.waited_for = Some(reason);
        }
    }

    async fn resumed(&mut self) -> Result<Cursor> {
        // A dry run counts everything, because its checkpoint would be that of a real run.
        if !self.run.options.resume || self.run.options.dry_run {
            return Ok(Cursor::default());
        }
        let last = self.run.last_checkpoint::<Checkpoint>(&self.on.mode(), true).await?;
        let Some((run, checkpoint)) = last.filter(|(_, checkpoint)| checkpoint.of == self.on.name()) else {
            return Ok(Cursor::default());
        };
        self.run.report.resumed_run = Some(run);
        self.run.report.unlikes = checkpoint.unlikes;
        self.run.report.rows = checkpoint.rows;
        self.run.report.liked_again = checkpoint.liked_again;
        Ok(checkpoint.cursor)
    }

    async fn note_checkpoint(&self, cursor: Cursor) -> Result<()> {
        let Report { unlikes, rows, liked_again, .. } = self.run.report;
        let checkpoint = Checkpoint { of: self.on.name(), cursor, unlikes, rows, liked_again };
        self.run.note_checkpoint(&checkpoint).await
    }
}

impl Rows<'_> {
    fn is_cheap(&self) -> bool {
        self.index.is_some() || matches!(self.subject, Subject::Target { .. })
    }

    /// Without an index by user, a page has the user's rows for a group of targets, and can be empty.
    async fn next(&mut self) -> Result<Vec<LikeRow>> {
        let Cursor { kind, target_id, user_id, .. } = self.cursor;
        let page = match (self.subject, &self.index) {
            (Subject::Target { target, .. }, _) => {
                sql::erase::likes_of_target(self.store, *target, UserId(user_id), PAGE_ROWS as u64).await?
            }
            (Subject::User(user), Some(index)) => {
                let after = Target { kind: Kind(kind), id: TargetId(target_id) };
                sql::erase::likes_by_index(self.store, index, *user, after, PAGE_ROWS as u64).await?
            }
            (Subject::User(user), None) => return self.scan(*user).await,
        };
        match page.last() {
            Some(last) => {
                let Target { kind: Kind(kind), id: TargetId(target_id) } = last.target;
                self.cursor = Cursor { kind, target_id, user_id: last.user.0, ended: page.len() < PAGE_ROWS };
            }
            None => self.cursor.ended = true,
        }
        Ok(page)
    }

    /// MySQL goes from target to target, so the cost depends on the number of targets, not of rows.
    async fn scan(&mut self, user: UserId) -> Result<Vec<LikeRow>> {
        let Some(kind) = self.kinds.iter().find(|kind| kind.0 >= self.cursor.kind).copied() else {
            self.cursor.ended = true;
            return Ok(Vec::new());
        };
        let after = if kind.0 == self.cursor.kind { TargetId(self.cursor.target_id) } else { TargetId(0) };
        let targets = self.store.liked_targets(kind, after, LAST, PAGE_TARGETS).await?;
        let page = sql::erase::likes_among(self.store, user, kind, &targets).await?;
        self.cursor = match targets.last() {
            Some(last) if targets.len() == PAGE_TARGETS => {
                Cursor { kind: kind.0, target_id: last.0, ..Cursor::default() }
            }
            _ => {
                let next = self.kinds.iter().find(|other| **other > kind);
                Cursor { kind: next.map_or(0, |next| next.0), ended: next.is_none(), ..Cursor::default() }
            }
        };
        Ok(page)
    }
}
