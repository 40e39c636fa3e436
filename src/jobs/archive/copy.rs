//! Copies the frozen zset to rows, and proves that zset and rows are equal. Only a few pieces are in memory at a time.

use futures_util::stream::{self, StreamExt};
use tokio::task::JoinError;
use tokio_util::task::AbortOnDropHandle;

use crate::jobs::board_run::backup::check_storable;
use crate::jobs::board_run::{BoardRun, Halt, Reason, Step};
use tallyd_base::runtime::fault;
use tallyd_core::archive::PeriodRow;
use tallyd_core::model::{BoardMember, BoardPeriod};
use tallyd_core::tally::Tally;
use tallyd_mysql::Store;
use tallyd_mysql::archive_rows::Places;
use tallyd_redis::Cache;

/// Maximum number of pages that one transaction writes. Each commit waits for the disk, so fewer commits are faster.
const COMMIT_PAGES: u64 = 10;

const COMMIT_MEMBERS: u64 = 5_000;

const PIECES: usize = 3;

pub(super) struct Copier<'a> {
    run: &'a BoardRun<'a>,
    page_members: usize,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Copied {
    pub tally: Tally,
    pub left_out: u64,
}

impl<'a> Copier<'a> {
    pub(super) fn new(run: &'a BoardRun<'a>, page_members: usize) -> Self {
        Self { run, page_members }
    }

    /// Overwrites existing rows. Copies pieces in parallel, because reading, writing and comparing take CPU time.
    pub(super) async fn copy(&self, at: &BoardPeriod, copy: u8, top: u64) -> Step<Copied> {
        let run = self.run.number;
        let (_, members) = self.run.cache.count_board(at).await?;
        let wanted = members.min(top);
        self.run.show(at, "copied", wanted);
        let pair = self.pair(at, copy);
        let length = COMMIT_MEMBERS.min(COMMIT_PAGES * self.page_members as u64);
        let starts = (0..).map(|piece| piece * length).take_while(|after| *after < wanted);
        let begin =
            |after| AbortOnDropHandle::new(tokio::spawn(pair.clone().copy(run, after, wanted.min(after + length))));
        let mut pieces = stream::iter(starts.map(begin)).buffered(PIECES);
        let mut tally = Tally::default();
        while let Some(piece) = pieces.next().await {
            let until = wanted.min(tally.members + length);
            tally.add(joined(piece)?);
            if tally.members < until {
                break;
            }
            self.run.check_stop()?;
            self.run.show_done(tally.members);
        }
        // Redis keeps no empty zsets, so Redis has lost this zset or a part of it. In this case the rows must not be
        // trimmed.
        if tally.members == 0 || tally.members < wanted {
            return Err(Halt::Kept(Reason::FrozenGone));
        }
        Ok(Copied { tally, left_out: members - tally.members })
    }

    pub(super) async fn trim(&self, at: &BoardPeriod, copy: u8, members: u64) -> Step<()> {
        let BoardRun { store, number, .. } = *self.run;
        let last = store.last_place(at, copy).await?;
        let mut after = members;
        while after < last {
            self.run.check_stop()?;
            after = store.trim_places(number, at, copy, after, last).await?;
        }
        Ok(())
    }

    /// All earlier places were compared during the copy.
    pub(super) async fn verify_end(&self, at: &BoardPeriod, copy: u8, copied: Copied) -> Step<()> {
        let before = copied.tally.members + copied.left_out;
        let (_, now) = self.run.cache.count_board(at).await?;
        if now != before {
            return Err(Halt::Kept(Reason::Changed { before, now }));
        }
        let beyond = self.run.store.archived_page(at, copy, copied.tally.members, 1).await?;
        match beyond.first() {
            Some((place, _)) => Err(Halt::Kept(Reason::Differs(*place))),
            None => Ok(()),
        }
    }

    pub(super) async fn verify_again(&self, at: &BoardPeriod, row: PeriodRow) -> Step<Tally> {
        // If all members were archived, this also checks that no rows follow.
        let until = if row.left_out == 0 { u64::MAX } else { row.tally.members };
        self.run.show(at, "verified", row.tally.members);
        let tally = tokio::select! {
            tally = self.pair(at, row.copy.unwrap_or(0)).verify(until) => tally?,
            () = self.run.stop.cancelled() => return Err(Halt::Stopped),
        };
        if tally.members == 0 { Err(Halt::Kept(Reason::FrozenGone)) } else { Ok(tally) }
    }

    fn pair(&self, at: &BoardPeriod, copy: u8) -> Pair {
        let BoardRun { store, cache, .. } = *self.run;
        Pair { store: store.clone(), cache: cache.clone(), page_members: self.page_members, at: at.clone(), copy }
    }
}

#[derive(Clone)]
struct Pair {
    store: Store,
    cache: Cache,
    page_members: usize,
    at: BoardPeriod,
    copy: u8,
}

impl Pair {
    /// The committed rows are read back. The returned sums are recorded, so later changes of members are detected.
    async fn copy(self, run: u64, after: u64, until: u64) -> Step<Tally> {
        let Self { store, at, copy, .. } = &self;
        let members = self.read_members(after, until).await?;
        store.copy_places(run, Places::new(at, *copy, after + 1, &members)).await?;
        fault::point("archive:copied-page");
        let mut tally = Tally::default();
        for page in members.chunks(self.page_members) {
            let copied = after + tally.members;
            let rows = store.archived_page(at, *copy, copied, page.len()).await?;
            if let Some(place) = first_difference(copied + 1, page, &rows) {
                return Err(Halt::Kept(Reason::Differs(place)));
            }
            tally.add_members(page);
        }
        Ok(tally)
    }

    async fn read_members(&self, after: u64, until: u64) -> Step<Vec<BoardMember>> {
        let most = usize::try_from(until - after).unwrap_or(usize::MAX);
        let mut members = Vec::new();
        while members.len() < most {
            let limit = self.page_members.min(most - members.len());
            let page = self.cache.frozen_page(&self.at, after + members.len() as u64, limit).await?;
            let is_last = page.len() < limit;
            members.extend(page);
            if is_last {
                break;
            }
        }
        check_storable(&members)?;
        Ok(members)
    }

    async fn verify(self, until: u64) -> Step<Tally> {
        let Self { store, cache, page_members, at, copy } = self;
        let mut tally = Tally::default();
        loop {
            let after = tally.members;
            let limit = page_members.min(usize::try_from(until - after).unwrap_or(usize::MAX));
            if limit == 0 {
                return Ok(tally);
            }
            let (rows_store, period) = (store.clone(), at.clone());
            let rows = tokio::spawn(async move { Ok(rows_store.archived_page(&period, copy, after, limit).await?) });
            let page = cache.frozen_page(&at, after, limit).await?;
            let rows = joined(rows.await)?;
            if let Some(place) = first_difference(after + 1, &page, &rows) {
                let is_gone = cache.count_board(&at).await?.1 == 0;
                return Err(Halt::Kept(if is_gone { Reason::FrozenGone } else { Reason::Differs(place) }));
            }
            if page.is_empty() {
                return Ok(tally);
            }
            tally.add_members(&page);
        }
    }
}

fn joined<T>(ended: Result<Step<T>, JoinError>) -> Step<T> {
    ended.unwrap_or_else(|error| Err(Halt::Failed(anyhow::Error::from(error).context("a task panicked"))))
}

/// Returns the first place at which the stores differ or only one store has a member. Places are counted from `first`.
fn first_difference(first: u64, page: &[BoardMember], rows: &[(u64, BoardMember)]) -> Option<u64> {
    let both = (first..).zip(page).zip(rows);
    let unequal = both.filter(|((place, member), (row_place, row))| place != row_place || *member != row);
    let unequal = unequal.map(|((place, _), _)| place).next();
    let shorter = page.len().min(rows.len()) as u64;
    unequal.or_else(|| (page.len() != rows.len()).then_some(first + shorter))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(scores: &[(&str, f64)]) -> Vec<BoardMember> {
        scores.iter().map(|(member, score)| BoardMember { member: (*member).into(), score: *score }).collect()
    }

    fn rows(first: u64, scores: &[(&str, f64)]) -> Vec<(u64, BoardMember)> {
        (first..).zip(members(scores)).collect()
    }

    #[test]
    fn equal_pages_have_no_difference() {
        let scores = [("a", 3.0), ("b", 0.0), ("c", f64::MIN_POSITIVE)];
        assert_eq!(first_difference(11, &members(&scores), &rows(11, &scores)), None);
        assert_eq!(first_difference(1, &[], &[]), None);
    }

    #[test]
    fn the_first_place_that_differs_is_named() {
        let page = members(&[("a", 3.0), ("b", 2.0)]);
        for (rows, expected) in [
            (rows(11, &[("a", 3.0), ("b", 2.5)]), 12),
            (rows(11, &[("x", 3.0), ("b", 2.0)]), 11),
            (rows(11, &[("a", 3.0)]), 12),
            (rows(11, &[("a", 3.0), ("b", 2.0), ("c", 1.0)]), 13),
            (rows(12, &[("a", 3.0), ("b", 2.0)]), 11),
            (Vec::new(), 11),
        ] {
            assert_eq!(first_difference(11, &page, &rows), Some(expected), "{rows:?}");
        }
        assert_eq!(first_difference(1, &[], &rows(1, &[("a", 1.0)])), Some(1));
    }
}
