//! What a person does, as docs/operations.md tells: saves boards, puts lost ones back, sends dead letters again.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::checker::PAST;
use crate::history::{Micros, now};
use crate::site::Site;

/// Somebody else holds the lock, or a server is away.
const TRY_LATER: i32 = 75;

const PAUSE: Duration = Duration::from_millis(300);

/// How long a command may be in vain.
const DEADLINE: Duration = Duration::from_secs(120);

/// Dead letters that are none: a daemon's clock was wrong, or the broker had given a message out too often.
const SENT_AGAIN: [&str; 3] = ["at-in-future", "at-too-old", "returned-by-broker"];

/// What is no event of a producer.
const FENCE: &str = "%\"fence\"%";

pub struct Operator<'a>(pub &'a Site);

impl Operator<'_> {
    /// Runs a command until it is done, or says itself that it can't be: what it prints.
    async fn run(&self, arguments: &[&str]) -> Result<(i32, String)> {
        let until = tokio::time::Instant::now() + DEADLINE;
        loop {
            let output = self.0.tallyd(arguments).await?;
            let code = output.status.code().unwrap_or(-1);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            if code != TRY_LATER {
                let stderr = String::from_utf8_lossy(&output.stderr);
                return Ok((code, if text.is_empty() { stderr.into_owned() } else { text }));
            }
            if tokio::time::Instant::now() > until {
                bail!("tallyd {} says to try later for {DEADLINE:?}", arguments.join(" "));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn done(&self, arguments: &[&str]) -> Result<String> {
        match self.run(arguments).await? {
            (0, text) => Ok(text),
            (code, text) => bail!("tallyd {} ends with {code}: {text}", arguments.join(" ")),
        }
    }

    /// Saves all boards, and what was written late; says since when what they have gained is not saved.
    ///
    /// # Errors
    /// It can't be done.
    pub async fn save_boards(&self) -> Result<Micros> {
        let began = now();
        self.done(&["archive"]).await?;
        self.done(&["board", "snapshot"]).await?;
        Ok(began)
    }

    /// Puts back what Redis has lost of boards.
    ///
    /// # Errors
    /// It can't be done.
    pub async fn restore_boards(&self) -> Result<()> {
        for (board, period) in self.boards().await? {
            // What is not lost is not put back, and says so.
            let (code, text) = self.run(&["board", "restore", &board, &period, "--format", "json"]).await?;
            if code != 0 && !text.contains("is not restored") {
                println!("tallyd board restore {board} {period} ends with {code}: {}", text.trim());
            }
        }
        Ok(())
    }

    /// All that were saved, and the days that may still be written to. An archived one may be gone from Redis by now, and be known so.
    async fn boards(&self) -> Result<BTreeSet<(String, String)>> {
        let mut boards: BTreeSet<(String, String)> =
            sqlx::query_as("SELECT DISTINCT board, period FROM leaderboard_snapshot")
                .fetch_all(self.0.pool())
                .await?
                .into_iter()
                .collect();
        let archived: Vec<(String, String)> =
            sqlx::query_as("SELECT board, period FROM leaderboard_period WHERE board = ? ORDER BY period LIMIT 3")
                .bind(PAST)
                .fetch_all(self.0.pool())
                .await?;
        boards.extend(archived);
        Ok(boards)
    }

    /// Sends again what was refused for a reason that has passed; says how many. Fences of reconciles that are over are not, and need not be.
    ///
    /// # Errors
    /// It can't be done.
    pub async fn replay(&self) -> Result<u64> {
        // Takes in what the broker has set aside.
        self.done(&["dead", "list", "--format", "json"]).await?;
        let mut all = 0;
        for reason in SENT_AGAIN {
            let open = "SELECT COUNT(*) FROM dead_letter WHERE reason = ? AND replayed_at IS NULL AND body NOT LIKE ? \
                        AND body NOT LIKE '%letter-%'";
            let open: i64 = sqlx::query_scalar(open).bind(reason).bind(FENCE).fetch_one(self.0.pool()).await?;
            if open > 0 {
                // It says no more than that it has left the fences, and what the users meant to be refused.
                let (code, text) = self.run(&["dead", "replay", "--reason", reason]).await?;
                if code > 1 {
                    bail!("tallyd dead replay ends with {code}: {text}");
                }
                all += open.unsigned_abs();
            }
        }
        Ok(all)
    }

    /// One full reconcile. Gives its report.
    ///
    /// # Errors
    /// It fails.
    pub async fn reconcile(&self) -> Result<Value> {
        let text = self.done(&["reconcile", "--full", "--format", "json"]).await?;
        serde_json::from_str(&text).context("read the report of the reconcile")
    }

    /// Archives what is closed. One that is kept fails it, and shows in the end.
    ///
    /// # Errors
    /// It can't be started.
    pub async fn archive(&self) -> Result<()> {
        let (code, text) = self.run(&["archive"]).await?;
        if code != 0 {
            eprintln!("tallyd archive ends with {code} ({PAST} and others): {}", text.trim());
        }
        Ok(())
    }
}
