//! Reads and writes the text in Redis that says which program counts each number (`tallyd_core::writers`). Daemons
//! write this text.

use redis::{Pipeline, Value};

use super::{Cache, Context, Result, text};

impl Cache {
    /// Returns the announced text, or `None` if Redis has no announcement.
    pub async fn writers(&self) -> Result<Option<String>> {
        const ACTION: &str = "read who counts which numbers";
        let mut pipeline = Pipeline::new();
        pipeline.cmd("GET").arg(self.keys.writers());
        let answer = self.run(ACTION, &pipeline).await?.pop().unwrap_or(Ok(Value::Nil)).context(ACTION)?;
        Ok(text(&answer).map(str::to_owned))
    }

    /// Replaces the announced text.
    pub async fn announce_writers(&self, writers: &str) -> Result<()> {
        const ACTION: &str = "announce who counts which numbers";
        let mut pipeline = Pipeline::new();
        pipeline.cmd("SET").arg(self.keys.writers()).arg(writers);
        for answer in self.run(ACTION, &pipeline).await? {
            answer.context(ACTION)?;
        }
        Ok(())
    }
}
