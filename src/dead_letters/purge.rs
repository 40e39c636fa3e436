//! Deletes dead letters that are no longer needed.

use std::fmt;

use anyhow::Result;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::{Which, all_there};
use tallyd_base::runtime::fault;
use tallyd_mysql::Store;
use tallyd_mysql::letters::Selection;

/// Maximum number of letters that one statement deletes. These letters have at most 100 MiB together.
const AT_ONCE: usize = 100;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Report {
    pub dry_run: bool,
    pub deleted: u64,
    pub open_left: u64,
    pub stopped: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Meant {
    pub all: u64,
    pub open: u64,
    pub open_left: u64,
}

pub(crate) async fn count(store: &Store, which: &Which) -> Result<Meant> {
    match which {
        Which::Ids(ids) => {
            all_there(store, ids).await?;
            Ok(Meant { all: ids.len() as u64, ..Meant::default() })
        }
        Which::All(selection) => {
            let totals = store.dead_letter_totals(&Selection { replayed: None, ..selection.clone() }).await?;
            let open = totals.iter().map(|total| total.open).sum();
            let replayed: u64 = totals.iter().map(|total| total.replayed).sum();
            Ok(match selection.replayed {
                Some(true) => Meant { all: replayed, open: 0, open_left: open },
                Some(false) => Meant { all: open, open, open_left: 0 },
                None => Meant { all: replayed + open, open, open_left: 0 },
            })
        }
    }
}

pub(crate) async fn purge(store: &Store, which: &Which, meant: Meant, stop: &CancellationToken) -> Result<Report> {
    let mut report = Report { open_left: meant.open_left, ..Report::default() };
    let until = store.newest_dead_letter().await?;
    let (mut after, mut rest) = (0, which.clone());
    loop {
        let (page, selection) = match &mut rest {
            Which::Ids(ids) => (ids.split_off(ids.len().saturating_sub(AT_ONCE)), Selection::default()),
            Which::All(selection) => {
                let page = store.dead_letters_after(selection, (after, until), AT_ONCE as u64).await?;
                (page.into_iter().map(|(id, _)| id).collect(), selection.clone())
            }
        };
        let Some(last) = page.last() else { return Ok(report) };
        if stop.is_cancelled() {
            return Ok(Report { stopped: true, ..report });
        }
        after = *last;
        // If the consumer refuses a letter again after this page was read, the letter no longer matches `selection`.
        // Then the DELETE statement keeps the letter.
        report.deleted += store.delete_dead_letters(&page, &selection).await?;
        fault::point("dead:deleted");
    }
}

impl Report {
    pub(crate) fn dry(meant: Meant) -> Self {
        Self { dry_run: true, deleted: meant.all, open_left: meant.open_left, stopped: false }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dry_run, deleted, open_left, stopped } = self;
        write!(f, "{deleted} dead letters {}", if *dry_run { "would be deleted" } else { "deleted" })?;
        if *open_left > 0 {
            write!(f, "\n{open_left} more were never replayed and are kept: --open includes them")?;
        }
        if *stopped {
            write!(f, "\nstopped: the remaining letters are unchanged")?;
        }
        Ok(())
    }
}
