//! Checks during the run that, in every committed state, each target's counter equals the number of its rows.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlx::MySqlPool;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::checker::{About, Class, Violation};
use crate::history::now;

const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Time limit of one check. The result of a check that takes longer is not used.
const LOOK_MAX: Duration = Duration::from_secs(10);

/// One statement reads one snapshot of both tables.
const SQL: &str = "SELECT target_id, CAST(SUM(likes) AS SIGNED), CAST(SUM(counted) AS SIGNED) FROM (\
     SELECT target_id, SUM(is_del = 0) AS likes, 0 AS counted FROM like_record GROUP BY target_id \
     UNION ALL SELECT target_id, 0, SUM(value) FROM counter WHERE metric = 1 GROUP BY target_id\
     ) AS both_of GROUP BY target_id HAVING SUM(likes) <> SUM(counted)";

#[derive(Default)]
struct Seen {
    looks: usize,
    found: Vec<Violation>,
}

pub struct Audit {
    seen: Arc<Mutex<Seen>>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Audit {
    pub fn start(pool: &MySqlPool) -> Self {
        let (seen, stop) = (Arc::new(Mutex::new(Seen::default())), CancellationToken::new());
        let task = tokio::spawn(watch(pool.clone(), Arc::clone(&seen), stop.clone()));
        Self { seen, stop, task }
    }

    /// Ends the checks. Returns the number of checks, and the violations. The list contains at most one violation for
    /// each target.
    pub async fn end(self) -> (usize, Vec<Violation>) {
        self.stop.cancel();
        let _ = self.task.await;
        let mut seen = self.seen.lock().unwrap();
        (seen.looks, std::mem::take(&mut seen.found))
    }
}

async fn watch(pool: MySqlPool, seen: Arc<Mutex<Seen>>, stop: CancellationToken) {
    let mut told = BTreeSet::new();
    while !stop.is_cancelled() {
        let look = sqlx::query_as::<_, (u64, i64, i64)>(SQL).fetch_all(&pool);
        if let Ok(Ok(rows)) = tokio::time::timeout(LOOK_MAX, look).await {
            let mut seen = seen.lock().unwrap();
            seen.looks += 1;
            for (target, rows, counter) in rows {
                if told.insert(target) {
                    let class = if counter < rows { Class::Lost } else { Class::Doubled };
                    let says = format!(
                        "in a committed state, at {}: `counter` of target {target} is {counter}, but {rows} rows exist",
                        now()
                    );
                    seen.found.push(Violation { class, about: About::Likes { target }, says });
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            () = stop.cancelled() => {}
        }
    }
}
