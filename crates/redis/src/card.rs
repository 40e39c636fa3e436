//! Reads and writes the site card (`tallyd_core::card`). Only daemons write it.

use redis::{Pipeline, Value};

use super::{Cache, Context, Result, text};

impl Cache {
    pub async fn site_card(&self) -> Result<Option<String>> {
        const ACTION: &str = "read the site card";
        let mut pipeline = Pipeline::new();
        pipeline.cmd("GET").arg(self.keys.site_card());
        let answer = match self.run(ACTION, &pipeline).await?.pop().unwrap_or(Ok(Value::Nil)) {
            Err(error) if error.code() == Some("WRONGTYPE") => return Ok(None),
            answer => answer.context(ACTION)?,
        };
        Ok(text(&answer).map(str::to_owned))
    }

    pub async fn write_site_card(&self, card: &str) -> Result<()> {
        const ACTION: &str = "write the site card";
        let mut pipeline = Pipeline::new();
        pipeline.cmd("SET").arg(self.keys.site_card()).arg(card);
        for answer in self.run(ACTION, &pipeline).await? {
            answer.context(ACTION)?;
        }
        Ok(())
    }
}
