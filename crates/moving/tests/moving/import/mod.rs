//! Imports a site's own table, while users like and while the site's own worker writes to the table.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod killed;
mod live;
mod missing;
mod numbers;
mod refused;
mod schemas;
mod verified;

use std::collections::BTreeSet;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::SystemTime;

use sqlx::{AssertSqlSafe, Row};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Micros, UserId};
use tallyd_rabbitmq::Publisher;

use crate::common;
use common::{World, body, eventually, signal, stderr, target};

/// The three types of tables that a site can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Schema {
    /// An unlike keeps the row, and sets its column `deleted`. The row contains the time of its last change.
    SoftDelete,
    /// An unlike deletes the row. Each row contains the time of its insert.
    HardDelete,
    /// An unlike deletes the row. Rows contain no time.
    Timeless,
}

impl Schema {
    const ALL: [Self; 3] = [Self::SoftDelete, Self::HardDelete, Self::Timeless];

    fn columns(self) -> &'static str {
        match self {
            Self::SoftDelete => "post_id AS target, user_id AS user, deleted, changed_at AS at",
            Self::HardDelete => "post_id AS target, user_id AS user, changed_at AS at",
            Self::Timeless => "post_id AS target, user_id AS user",
        }
    }

    fn query(self) -> String {
        format!(
            "SELECT {} FROM old_like WHERE post_id > :after_target OR (post_id = :after_target AND user_id > :after_user) \
             ORDER BY post_id, user_id LIMIT :rows",
            self.columns()
        )
    }

    /// Returns the configuration of an import of this table. `more` is added to the `[[import]]` block.
    fn settings(self, more: &str) -> String {
        let keeps_deleted = if self == Self::SoftDelete { "keeps_deleted = true\n" } else { "" };
        block(&self.query(), &format!("{keeps_deleted}{more}"))
    }
}

fn block(query: &str, more: &str) -> String {
    format!(
        "[metrics]\nlike = 1\nview = 2\n[[import]]\nname = \"old\"\nkind = \"video\"\nquery = \"\"\"{query}\"\"\"\n{more}\n"
    )
}

const TABLE: &str = "CREATE TABLE old_like (user_id BIGINT UNSIGNED NOT NULL, post_id BIGINT UNSIGNED NOT NULL, \
                     deleted BOOLEAN NOT NULL DEFAULT 0, changed_at DATETIME NOT NULL DEFAULT '2024-05-06 07:08:09', \
                     PRIMARY KEY (post_id, user_id))";

/// Makes a test environment in which the site's table is empty.
async fn world(name: &str, settings: &str) -> World {
    let world = World::new(name, settings).await.hurried();
    world.publisher().await;
    run(&world, TABLE).await;
    world
}

async fn run(world: &World, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&world.pool).await.unwrap();
}

/// Writes likes to the site's table, as the site's own worker does.
async fn old_likes(world: &World, pairs: impl IntoIterator<Item = (u64, u64)>) {
    let rows: Vec<String> = pairs.into_iter().map(|(post, user)| format!("({post},{user})")).collect();
    for rows in rows.chunks(5_000) {
        let sql = format!(
            "INSERT INTO old_like (post_id, user_id) VALUES {} ON DUPLICATE KEY UPDATE deleted = 0",
            rows.join(",")
        );
        run(world, &sql).await;
    }
}

/// Returns the rows of a query, each as a target and a user.
async fn pairs(world: &World, sql: &'static str) -> BTreeSet<(u64, u64)> {
    let rows = sqlx::query(sql).fetch_all(&world.pool).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Returns the likes in the site's table.
async fn on_site(world: &World) -> BTreeSet<(u64, u64)> {
    pairs(world, "SELECT post_id, user_id FROM old_like WHERE deleted = 0").await
}

/// Returns the likes in tallyd's tables.
async fn here(world: &World) -> BTreeSet<(u64, u64)> {
    pairs(world, "SELECT target_id, user_id FROM like_record WHERE kind = 1 AND is_del = 0").await
}

/// Checks that each like counter is equal to the number of its rows in `like_record`.
async fn counters_equal_rows(world: &World) {
    let off = "SELECT COUNT(*) FROM (SELECT target_id, CAST(SUM(value) AS SIGNED) AS counted FROM counter WHERE metric = 1 GROUP BY target_id) AS c \
               LEFT JOIN (SELECT target_id, COUNT(*) AS likes FROM like_record WHERE is_del = 0 GROUP BY target_id) AS l USING (target_id) \
               WHERE counted <> COALESCE(likes, 0)";
    assert_eq!(world.count(off).await, 0, "some counters differ from the number of their rows");
    let sums = "SELECT (SELECT CAST(COALESCE(SUM(value), 0) AS SIGNED) FROM counter WHERE metric = 1) - (SELECT COUNT(*) FROM like_record WHERE is_del = 0)";
    assert_eq!(world.count(sums).await, 0, "some likes have no counter");
}

/// Checks that the site's table and tallyd's tables have the same likes, and that the counters match these likes.
async fn assert_brought_over(world: &World) {
    assert_eq!(here(world).await, on_site(world).await);
    counters_equal_rows(world).await;
}

/// Runs an import that must exit with this code, and returns its report.
fn report(world: &World, code: i32, arguments: &[&str]) -> serde_json::Value {
    let output = world.tallyd(&[&["import"], arguments, &["--format", "json"]].concat());
    assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Publishes clicks with the current time.
async fn publish(world: &World, publisher: &Publisher, events: impl IntoIterator<Item = (u64, u64, bool)>) {
    let event = |(post, user, liked): (u64, u64, bool)| {
        let at = Micros::from(SystemTime::now());
        body(&LikeEvent { target: target(post), user: UserId(user), at, liked })
    };
    world.publish(publisher, &events.into_iter().map(event).collect::<Vec<_>>()).await;
}

/// Starts an import, and waits until it has stopped itself at the pause point `point`.
async fn paused_at(world: &World, arguments: &[&str], point: &str) -> Child {
    let mut import = world.command();
    import.arg("import").args(arguments).args(["--format", "json"]).env("TALLYD_PAUSE_POINT", point);
    let child = import.stdout(Stdio::piped()).stderr(File::create(log_of_paused(world)).unwrap()).spawn().unwrap();
    let stat = format!("/proc/{}/stat", child.id());
    eventually("the import has paused at the given pause point", || async {
        std::fs::read_to_string(&stat).unwrap().rsplit(") ").next().unwrap().starts_with('T')
    })
    .await;
    child
}

/// Returns the log file of an import that [`paused_at`] has started.
fn log_of_paused(world: &World) -> PathBuf {
    world.folder.path().join("import.log")
}

/// Lets the import continue to its end, and returns its report.
fn resumed(child: Child) -> serde_json::Value {
    signal(&child, "CONT");
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", output.status);
    serde_json::from_slice(&output.stdout).unwrap()
}
