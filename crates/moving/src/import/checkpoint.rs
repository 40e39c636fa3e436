//! The progress of an import, in `job_run.checkpoint`.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::{Importing, Pass};
use tallyd_base::jobs::JobError;
use tallyd_base::jobs::run::Job;
use tallyd_base::runtime::clock;
use tallyd_core::import::{Key, Start};
use tallyd_core::model::{TargetId, UserId};

/// `start` keeps the value of the first run, so later runs can recognize the imported rows.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Checkpoint {
    pub start: Start,
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

impl Importing<'_, '_> {
    /// Later runs keep the time of the first start.
    pub(super) async fn begin(&mut self) -> Result<Checkpoint, JobError> {
        let (on, name) = (self.on, &self.on.import.name);
        let first = self.run.last_checkpoint::<Checkpoint>(name, false).await?;
        let start = match (first, on.pass) {
            (Some((_, checkpoint)), _) => checkpoint.start,
            (None, Pass::Rows) => Start::at(clock::now()),
            (None, _) => {
                return Err(on.refused(format!("there is nothing to remove before `tallyd import {name}` has run")));
            }
        };
        let mut checkpoint = Checkpoint { start, after: (0, 0) };
        if self.run.options.resume {
            let last = self.run.last_checkpoint::<Checkpoint>(&on.mode(), true).await?;
            let (run, last) = last
                .ok_or_else(|| on.refused("there is nothing to resume: the last run succeeded, or there was no run"))?;
            checkpoint.after = last.after;
            self.run.report.resumed_run = Some(run);
        }
        self.began_at = Some(checkpoint);
        self.note(&checkpoint).await?;
        Ok(checkpoint)
    }

    pub(super) async fn forget_position(&self) -> Result<(), JobError> {
        match self.began_at {
            Some(checkpoint) => self.note(&Checkpoint { after: (0, 0), ..checkpoint }).await,
            None => Ok(()),
        }
    }

    pub(super) async fn note(&self, checkpoint: &Checkpoint) -> Result<(), JobError> {
        if !self.run.options.dry_run {
            self.run.note_checkpoint(checkpoint).await?;
        }
        Ok(())
    }
}

pub(super) fn raw((target, user): Key) -> (u64, u64) {
    (target.0, user.0)
}
