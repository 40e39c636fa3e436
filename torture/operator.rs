//! Does an operator's work as docs/operations/ describes it: saves boards, restores lost boards, replays dead letters.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::checker::PAST;
use crate::history::{Micros, now};
use crate::site::Site;

/// Exit code of a command if another process holds the lock, or a server is unreachable.
const TRY_LATER: i32 = 75;

const PAUSE: Duration = Duration::from_millis(300);

/// Time limit for the retries of a command.
const DEADLINE: Duration = Duration::from_secs(120);

/// Reasons for which valid events become dead letters: a daemon's clock was wrong, or the broker delivered a message
/// too often.
const SENT_AGAIN: [&str; 3] = ["at-in-future", "at-too-old", "returned-by-broker"];

/// A fence (a job's marker in the queues) is not an event of a producer.
const FENCE: &str = "%\"fence\"%";

pub struct Operator<'a>(pub &'a Site);

impl Operator<'_> {
    /// Retries a command until it is done or reports a permanent failure. Returns its exit code and output.
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
                bail!("tallyd {} still exits with 75 (try later) after {DEADLINE:?}", arguments.join(" "));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn done(&self, arguments: &[&str]) -> Result<String> {
        match self.run(arguments).await? {
            (0, text) => Ok(text),
            (code, text) => bail!("tallyd {} exited with {code}: {text}", arguments.join(" ")),
        }
    }

    /// Saves all boards and the late writes. Returns the time when the save started. The saved boards can lack scores
    /// that were added after this time.
    pub async fn save_boards(&self) -> Result<Micros> {
        let began = now();
        self.done(&["archive"]).await?;
        self.done(&["board", "snapshot"]).await?;
        Ok(began)
    }

    /// Restores boards that Redis lost.
    pub async fn restore_boards(&self) -> Result<()> {
        for (board, period) in self.boards().await? {
            // If Redis has not lost a board, the command only reports this and does not restore the board.
            let (code, text) = self.run(&["board", "restore", &board, &period, "--yes", "--format", "json"]).await?;
            if code != 0 && !text.contains("is not restored") {
                println!("tallyd board restore {board} {period} exited with {code}: {}", text.trim());
            }
        }
        Ok(())
    }

    /// Returns all saved boards, and the days that still accept writes. An archived board may already be missing in
    /// Redis. The daemon does not report this as a loss.
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

    /// Replays dead letters that were rejected for a reason that no longer exists. Returns how many. Fences of finished
    /// reconciles need no replay.
    pub async fn replay(&self) -> Result<u64> {
        // This command stores the messages that the broker dead-lettered.
        self.done(&["dead", "list", "--format", "json"]).await?;
        let mut all = 0;
        for reason in SENT_AGAIN {
            let open = "SELECT COUNT(*) FROM dead_letter WHERE reason = ? AND replayed_at IS NULL AND body NOT LIKE ? \
                        AND body NOT LIKE '%letter-%'";
            let open: i64 = sqlx::query_scalar(open).bind(reason).bind(FENCE).fetch_one(self.0.pool()).await?;
            if open > 0 {
                // Exit code 1 is no error here. The command does not replay two types of letters: fences, and
                // messages that tallyd would refuse again.
                let (code, text) = self.run(&["dead", "replay", "--reason", reason]).await?;
                if code > 1 {
                    bail!("tallyd dead replay exited with {code}: {text}");
                }
                all += open.unsigned_abs();
            }
        }
        Ok(all)
    }

    /// Runs one full reconcile. Returns its report.
    pub async fn reconcile(&self) -> Result<Value> {
        let text = self.done(&["reconcile", "--full", "--format", "json"]).await?;
        serde_json::from_str(&text).context("read the report of the reconcile")
    }

    /// Archives closed periods. If a period can't be archived, the command fails, but the run continues. The comparison
    /// reports the missing period later.
    pub async fn archive(&self) -> Result<()> {
        let (code, text) = self.run(&["archive"]).await?;
        if code != 0 {
            eprintln!("tallyd archive exited with {code} ({PAST} and others): {}", text.trim());
        }
        Ok(())
    }
}
