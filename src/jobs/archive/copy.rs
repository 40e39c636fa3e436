//! From the frozen zset to rows, and the proof that they are equal. A few pages are all that is held.

use tokio::task::JoinHandle;

use super::Archiver;
use super::steps::{Halt, Run, Step};
use crate::model::{BoardMember, BoardPeriod};
use crate::runtime::fault;
use crate::store::archive_rows::Places;
use crate::store::boards::PeriodRow;
use tallyd_core::tally::Tally;

const GONE: &str = "its frozen zset went away while it was read: Redis lost it";

/// Pages that one transaction writes: each commit waits for the disk.
const COMMIT_PAGES: usize = 10;

/// After so many members no other page is added to them: a transaction holds the job's lock.
const COMMIT_MEMBERS: usize = 5_000;

/// What was copied, and verified.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Copied {
    /// The rows.
    pub tally: Tally,
    /// Members beyond them, which are not archived.
    pub left_out: u64,
}

impl Run<'_> {
    /// Writes the frozen zset to the places of a copy, the highest score first, up to place `top`, over what is there. The next pages are read while some are written, and those that were are read back from both stores.
    pub(super) async fn copy(&self, at: &BoardPeriod, copy: u8, top: u64) -> Step<Copied> {
        let (_, members) = self.archiver.cache.count_board(at).await?;
        let wanted = members.min(top);
        self.show(at, "copied", wanted);
        let mut tally = Tally::default();
        let mut copied = 0;
        let mut verifying: Option<JoinHandle<Step<Tally>>> = None;
        let mut pages = read_pages(self.archiver.clone(), (at.clone(), copy), 0, wanted).await?;
        while pages.members > 0 {
            self.check_stop()?;
            let after = copied + pages.members;
            // In tasks of their own: taking answers apart and writing statements is work, too.
            let reading = tokio::spawn(read_pages(self.archiver.clone(), (at.clone(), copy), after, wanted));
            self.archiver.store.copy_places(self.number, pages.places).await?;
            let next = joined(reading).await?;
            let verify = tokio::spawn(verify(self.archiver.clone(), (at.clone(), copy), copied, after));
            if let Some(former) = verifying.replace(verify) {
                tally.add(joined(former).await?);
            }
            fault::point("archive:copied-page");
            (copied, pages) = (after, next);
            self.show_done(copied);
        }
        if let Some(last) = verifying {
            tally.add(joined(last).await?);
        }
        // An empty zset is none: nothing may be trimmed for the sake of a zset that Redis has lost.
        if copied == 0 || copied < wanted {
            return Err(Halt::Kept(GONE.to_owned()));
        }
        Ok(Copied { tally, left_out: members - copied })
    }

    /// Deletes the places of a copy beyond the board's end.
    pub(super) async fn trim(&self, at: &BoardPeriod, copy: u8, members: u64) -> Step<()> {
        let store = &self.archiver.store;
        let (mut after, last) = (members, store.last_place(at, copy).await?);
        while after < last {
            self.check_stop()?;
            after = store.trim_places(self.number, at, copy, after, last).await?;
        }
        Ok(())
    }

    /// Whether both stores end where the copy did: all before that was verified as it was written.
    pub(super) async fn verify_end(&self, at: &BoardPeriod, copy: u8, copied: Copied) -> Step<()> {
        let Copied { tally, left_out } = copied;
        let (_, members) = self.archiver.cache.count_board(at).await?;
        if members != tally.members + left_out {
            return Err(Halt::Kept(format!(
                "its frozen zset had {} members while it was copied, and has {members} now",
                tally.members + left_out
            )));
        }
        let beyond = self.archiver.store.archived_page(at, copy, tally.members, 1).await?;
        match beyond.first() {
            Some((place, _)) => Err(Halt::Kept(differ(*place))),
            None => Ok(()),
        }
    }

    /// Reads an archived board back from both stores, as far as it is archived.
    pub(super) async fn verify_again(&self, at: &BoardPeriod, row: PeriodRow) -> Step<Tally> {
        // Its end, too, where there must be none beyond.
        let until = if row.left_out == 0 { u64::MAX } else { row.tally.members };
        self.show(at, "verified", row.tally.members);
        let tally = tokio::select! {
            tally = verify(self.archiver.clone(), (at.clone(), row.copy.unwrap_or(0)), 0, until) => tally?,
            () = self.stop.cancelled() => return Err(Halt::Stopped),
        };
        if tally.members == 0 { Err(Halt::Kept(GONE.to_owned())) } else { Ok(tally) }
    }
}

/// Compares both stores place by place, after the first `from` places up to `until`, or until both end. Equal members and scores in
/// equal order are equal counts and equal checksums; what they come to is kept, so that later changes are seen.
async fn verify(archiver: Archiver, (at, copy): (BoardPeriod, u8), from: u64, until: u64) -> Step<Tally> {
    let mut tally = Tally::default();
    loop {
        let after = from + tally.members;
        let limit = archiver.page_members.min(usize::try_from(until - after).unwrap_or(usize::MAX));
        if limit == 0 {
            return Ok(tally);
        }
        let (store, period) = (archiver.store.clone(), at.clone());
        let rows = tokio::spawn(async move { Ok(store.archived_page(&period, copy, after, limit).await?) });
        let page = archiver.cache.frozen_page(&at, after, limit).await?;
        let rows = joined(rows).await?;
        if let Some(place) = first_difference(after + 1, &page, &rows) {
            let gone = archiver.cache.count_board(&at).await?.1 == 0;
            return Err(Halt::Kept(if gone { GONE.to_owned() } else { differ(place) }));
        }
        if page.is_empty() {
            return Ok(tally);
        }
        tally.add_members(&page);
    }
}

fn differ(place: u64) -> String {
    format!("Redis and leaderboard_archive differ at place {place}")
}

/// What one transaction writes.
struct Pages {
    members: u64,
    places: Places,
}

/// The next pages of the frozen zset up to place `until`, as many as one transaction writes.
async fn read_pages(archiver: Archiver, (at, copy): (BoardPeriod, u8), after: u64, until: u64) -> Step<Pages> {
    let Archiver { cache, page_members, .. } = archiver;
    let most = COMMIT_MEMBERS.min(COMMIT_PAGES * page_members);
    let most = most.min(usize::try_from(until - after).unwrap_or(usize::MAX));
    let mut members = Vec::new();
    while members.len() < most {
        let limit = page_members.min(most - members.len());
        let page = cache.frozen_page(&at, after + members.len() as u64, limit).await?;
        let is_last = page.len() < limit;
        members.extend(page);
        if is_last {
            break;
        }
    }
    if let Some(place) = members.iter().position(|member| !member.score.is_finite()) {
        let place = after + place as u64 + 1;
        return Err(Halt::Kept(format!("the score at place {place} is infinite, which MySQL can't hold")));
    }
    Ok(Pages { members: members.len() as u64, places: Places::new(&at, copy, after + 1, &members) })
}

/// What a task gives. Only a panic gives nothing, and goes on here.
async fn joined<T>(task: JoinHandle<Step<T>>) -> Step<T> {
    task.await.unwrap_or_else(|error| Err(Halt::Failed(anyhow::Error::from(error).context("a task panicked"))))
}

/// The first place from `first` on at which the stores differ, or only one of them has a member.
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
