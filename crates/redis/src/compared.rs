//! Stores the instant up to which reconciles have compared Redis with MySQL. This note is stored in Redis. So if Redis
//! goes back to an older state, the note and the counters go back together.

use redis::Pipeline;
use tallyd_core::model::Micros;

use super::{Cache, Context, Result, Servers, text};

/// The number of copies of the note on a Cluster, each in a different slot. With so many copies, every master stores
/// some of them.
const NOTES_ON_CLUSTER: u16 = 1_024;

impl Cache {
    pub async fn compared(&self) -> Result<Option<Micros>> {
        let get = |pipeline: &mut Pipeline, key: String| {
            pipeline.cmd("GET").arg(key);
        };
        let noted = self.of_notes("read the time up to which Redis was compared with MySQL", get).await?;
        Ok(noted.into_iter().flatten().min())
    }

    pub async fn note_compared(&self, cut: Micros) -> Result<()> {
        let set = |pipeline: &mut Pipeline, key: String| {
            pipeline.cmd("SET").arg(key).arg(cut.0);
        };
        self.of_notes("store the time up to which Redis was compared with MySQL", set).await.map(drop)
    }

    async fn of_notes(
        &self,
        action: &'static str,
        command: impl Fn(&mut Pipeline, String),
    ) -> Result<Vec<Option<Micros>>> {
        let notes = if matches!(self.servers, Servers::Cluster(_)) { NOTES_ON_CLUSTER } else { 1 };
        let mut answers = Vec::with_capacity(usize::from(notes));
        for some in (0..notes).collect::<Vec<_>>().chunks(super::PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::new();
            some.iter().for_each(|number| command(&mut pipeline, self.keys.compared(*number)));
            for answer in self.run(action, &pipeline).await? {
                let answer = answer.context(action)?;
                answers.push(text(&answer).and_then(|at| at.parse().ok()).map(Micros));
            }
        }
        Ok(answers)
    }
}
