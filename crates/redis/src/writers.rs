//! Reads the text in Redis with which former daemons said which program counts each number.

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
}
