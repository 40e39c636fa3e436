//! Removes the subject from rows that also contain data about other users or targets. The other data of such a row
//! stays.

use anyhow::Result;

use super::Erasing;
use crate::sql;
use crate::sql::erase::traces::{NamedRow, NamedRun};
use tallyd_core::erase::{Cleared, Subject, replaced};
use tallyd_mysql::letters::Selection;

const LETTERS_PAGE: u64 = 500;

/// Read by one call. A body can have a few megabytes.
const LETTERS_AT_ONCE: usize = 16;

const NAMED_MAX: usize = 1_000;

impl Erasing<'_, '_> {
    pub(super) async fn erase_traces(&mut self) -> Result<()> {
        self.erase_outbox().await?;
        self.erase_letters().await?;
        self.erase_reports().await
    }

    /// Safe, because Redis has the additions of these rows, and the offsets of its buckets are above their numbers.
    async fn erase_outbox(&mut self) -> Result<()> {
        let store = &self.run.servers.store;
        for (partition, _) in store.outbox_numbers().await?.iter() {
            let mut after = 0;
            loop {
                let (named, last) =
                    sql::erase::traces::outbox_naming(store, partition, after, &self.on.subject).await?;
                for row in named {
                    let body = self.on.subject.clear_outbox(&row.body);
                    if body == row.body {
                        continue;
                    }
                    self.run.report.outbox_rows += match self.run.options.dry_run {
                        true => 1,
                        // MySQL leaves rows that were added after the wait for the outbox to the next erase.
                        false => {
                            sql::erase::traces::rewrite_outbox(store, self.run.number, &NamedRow { body, ..row })
                                .await?
                        }
                    };
                }
                let Some(last) = last else { break };
                after = last;
            }
        }
        Ok(())
    }

    async fn erase_letters(&mut self) -> Result<()> {
        let store = &self.run.servers.store;
        let (until, all) = (store.newest_dead_letter().await?, Selection::default());
        let mut after = 0;
        loop {
            self.run.check_stop()?;
            let page = store.dead_letters_after(&all, (after, until), LETTERS_PAGE).await?;
            let Some((last, _)) = page.last() else { break };
            after = *last;
            let ids: Vec<u64> = page.into_iter().map(|(id, _)| id).collect();
            for piece in ids.chunks(LETTERS_AT_ONCE) {
                for letter in store.whole_dead_letters(piece).await? {
                    self.erase_letter(letter.id, &letter.body, &letter.headers).await?;
                }
            }
        }
        Ok(())
    }

    async fn erase_letter(&mut self, id: u64, former: &[u8], headers: &str) -> Result<()> {
        let (store, dry_run) = (&self.run.servers.store, self.run.options.dry_run);
        let Cleared { removed, body, unclear } = self.on.subject.clear(former);
        let stays_named = body.is_some() && self.on.subject.is_in_headers(headers);
        if (unclear || stays_named) && self.run.report.unclear_letters.len() < NAMED_MAX {
            self.run.report.unclear_letters.push(id);
        }
        match body {
            _ if removed == 0 => {}
            None if dry_run => self.run.report.letters_deleted += 1,
            None => self.run.report.letters_deleted += store.delete_dead_letters(&[id], &Selection::default()).await?,
            Some(_) if dry_run => self.run.report.letters_rewritten += 1,
            Some(body) => {
                self.run.report.letters_rewritten +=
                    u64::from(sql::erase::traces::rewrite_dead_letter(store, id, former, &body).await?);
            }
        }
        Ok(())
    }

    /// A report can list a drifted target or name a refused row. A checkpoint whose last position is the subject moves
    /// to before the subject, where the run can also continue.
    async fn erase_reports(&mut self) -> Result<()> {
        let (store, subject) = (&self.run.servers.store, &self.on.subject);
        for NamedRun { run, report, checkpoint } in
            sql::erase::traces::runs_naming(store, self.run.number, &subject.member()).await?
        {
            let cleared = NamedRun {
                run,
                report: clear_report(subject, &report),
                checkpoint: clear_checkpoint(subject, &checkpoint),
            };
            if (&cleared.report, &cleared.checkpoint) == (&report, &checkpoint) {
                continue;
            }
            self.run.report.runs += 1;
            if !self.run.options.dry_run {
                sql::erase::traces::rewrite_run(store, self.run.number, &cleared).await?;
            }
        }
        Ok(())
    }
}

fn clear_report(subject: &Subject, report: &str) -> String {
    let of_row = format!("{} {}", subject.word(), subject.member());
    let report = replaced(report, &of_row, &format!("erased {}", subject.word())).unwrap_or_else(|| report.to_owned());
    match subject {
        Subject::User(_) => report,
        Subject::Target { target, kind } => {
            replaced(&report, &format!("{kind}:{}", target.id), &format!("{kind}:erased")).unwrap_or(report)
        }
    }
}

fn clear_checkpoint(subject: &Subject, checkpoint: &str) -> String {
    let mut checkpoint = subject.clear_position(checkpoint).unwrap_or_else(|| checkpoint.to_owned());
    if let Subject::Target { target, kind } = subject {
        let (id, before) = (target.id.0, target.id.0.saturating_sub(1));
        let mut names = vec![(format!("{kind}:{id}"), format!("{kind}:{before}"))];
        if checkpoint.contains(&format!("\"kind\":{},", target.kind)) {
            names.push((format!("\"target_id\":{id}"), format!("\"target_id\":{before}")));
        }
        for (name, by) in names {
            checkpoint = replaced(&checkpoint, &name, &by).unwrap_or(checkpoint);
        }
    }
    checkpoint
}
