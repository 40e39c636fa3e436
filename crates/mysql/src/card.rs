//! The site card (`tallyd_core::card`): one row, which decides which settings clients read.

use super::{Context, Result, Store};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardRow {
    pub number: u64,
    pub text: String,
    pub by: String,
}

impl Store {
    pub async fn site_card(&self) -> Result<Option<CardRow>> {
        const ACTION: &str = "read the site card";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let query = sqlx::query_as("SELECT number, card, `by` FROM site_card WHERE one = 1");
            let row: Option<(u64, String, String)> = query.fetch_optional(connection).await.context(ACTION)?;
            Ok(row.map(|(number, text, by)| CardRow { number, text, by }))
        })
        .await
    }

    pub async fn replace_site_card(&self, former: Option<u64>, new: &CardRow) -> Result<bool> {
        const ACTION: &str = "replace the site card";
        // One statement is one transaction.
        let sql = match former {
            None => "INSERT INTO site_card (number, card, `by`, since, one) VALUES (?, ?, ?, NOW(6), 1)",
            Some(_) => {
                "UPDATE site_card SET number = ?, card = ?, `by` = ?, since = NOW(6) WHERE one = 1 AND number = ?"
            }
        };
        let mut conn = self.acquire().await?;
        let replaced = conn.limit(ACTION, |connection| async move {
            let query = sqlx::query(sql).bind(new.number).bind(&new.text).bind(&new.by);
            let query = match former {
                None => query,
                Some(former) => query.bind(former),
            };
            Ok(query.execute(connection).await.context(ACTION)?.rows_affected() > 0)
        });
        match replaced.await {
            Err(error) if error.is_contention() => Ok(false),
            replaced => replaced,
        }
    }
}
