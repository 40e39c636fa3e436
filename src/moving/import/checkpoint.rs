//! The progress of an import, in `job_run.checkpoint`.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::report::End;
use super::{Pass, Run};
use crate::jobs::JobError;
use crate::runtime::clock;
use tallyd_core::import::{Key, Start};
use tallyd_core::model::{TargetId, UserId};
use tallyd_mysql::moving::imports::JOB;

/// The progress of an import. `start` keeps the value of the first run, so later runs can recognize the imported rows.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Checkpoint {
    pub start: Start,
    /// The last finished target and user.
    pub after: (u64, u64),
}

impl Checkpoint {
    pub(super) fn key(&self) -> Key {
        (TargetId(self.after.0), UserId(self.after.1))
    }

    pub(super) fn text(&self) -> Result<String> {
        serde_json::to_string(self).context("write the checkpoint")
    }
}

impl Run<'_> {
    /// Stores and returns the position from which this run starts. Later runs keep the time of the first start.
    pub(super) async fn begin(&mut self) -> Result<Checkpoint, JobError> {
        let (store, mode) = (&self.on.store, self.on.mode(self.options.pass));
        let parse = |(run, text): (u64, String)| {
            Ok::<_, anyhow::Error>((run, serde_json::from_str::<Checkpoint>(&text).context("read the checkpoint")?))
        };
        let first =
            store.last_checkpoint(JOB, &self.on.mode(Pass::Rows), self.number, false).await?.map(parse).transpose()?;
        let start = match (first, self.options.pass) {
            (Some((_, checkpoint)), _) => checkpoint.start,
            (None, Pass::Rows) => Start::at(clock::now()),
            (None, _) => {
                let name = &self.on.import.name;
                return Err(self
                    .on
                    .refused(format!("there is nothing to remove before `tallyd import {name}` has run")));
            }
        };
        let mut checkpoint = Checkpoint { start, after: (0, 0) };
        if self.options.resume {
            let last = store.last_checkpoint(JOB, &mode, self.number, true).await?.map(parse).transpose()?;
            let (run, last) = last.ok_or_else(|| {
                self.on.refused("there is nothing to resume: the last run succeeded, or there was no run")
            })?;
            checkpoint.after = last.after;
            self.report.resumed_run = Some(run);
        }
        if !self.options.dry_run {
            store.note_checkpoint(self.number, &checkpoint.text()?).await?;
        }
        Ok(checkpoint)
    }

    /// Removes the last row's ids from the checkpoint of a complete pass. Later runs need only its start.
    pub(super) async fn forget_position(&self) -> Result<(), JobError> {
        let store = &self.on.store;
        let is_complete = self.report.ended == End::Done && self.options.pass != Pass::Verify;
        if is_complete
            && !self.options.dry_run
            && let Some((_, text)) =
                store.last_checkpoint(JOB, &self.on.mode(self.options.pass), self.number + 1, false).await?
        {
            let last: Checkpoint = serde_json::from_str(&text).context("read the checkpoint")?;
            store.note_checkpoint(self.number, &Checkpoint { after: (0, 0), ..last }.text()?).await?;
        }
        Ok(())
    }
}

pub(super) fn raw((target, user): Key) -> (u64, u64) {
    (target.0, user.0)
}
