//! All keys of a pattern, on every server, page by page; and the numbers that keys of the site hold.

use redis::{Pipeline, Value};

use super::{Cache, CacheError, Context, Result, Servers, text};

/// Keys that one SCAN looks at: some hundred microseconds.
const SCANNED_KEYS: usize = 1_000;

/// Where a search for keys goes on.
#[derive(Clone, Debug)]
pub struct ScanCursor {
    /// The masters that are not searched yet, the current one last. `None` without a Cluster.
    nodes: Vec<Option<String>>,
    /// The server's own.
    cursor: String,
}

/// What a key of the site holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// There is no such key.
    Nothing,
    Number(i64),
    /// Something else.
    Other,
}

impl Cache {
    /// Where a search begins: at the first key of the first server.
    pub async fn begin_scan(&self) -> Result<Option<ScanCursor>> {
        let nodes = match &self.servers {
            Servers::One(_) => vec![None],
            Servers::Cluster(cluster) => {
                cluster.masters().await.context("list the masters")?.into_iter().map(Some).collect()
            }
        };
        Ok(Some(ScanCursor { nodes, cursor: "0".to_owned() }))
    }

    /// The next keys of the pattern, and where to go on; `None` at the end. A key may come twice.
    pub async fn scan_names(
        &self,
        action: &'static str,
        pattern: &str,
        from: ScanCursor,
    ) -> Result<(Vec<String>, Option<ScanCursor>)> {
        let ScanCursor { mut nodes, cursor } = from;
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(SCANNED_KEYS);
        let answer = match (&self.servers, nodes.last()) {
            (Servers::Cluster(cluster), Some(Some(node))) => cluster.ask(node, &scan).await.context(action)?,
            _ => {
                let mut pipeline = Pipeline::new();
                pipeline.add_command(scan);
                self.run(action, &pipeline).await?.pop().unwrap_or(Ok(Value::Nil)).context(action)?
            }
        };
        let page = || {
            let Value::Array(parts) = &answer else { return None };
            let [next, Value::Array(keys)] = parts.as_slice() else { return None };
            // Names that are no text are nobody's here.
            Some((text(next)?.to_owned(), keys.iter().filter_map(text).map(str::to_owned).collect()))
        };
        let (cursor, keys): (String, Vec<String>) = page().ok_or_else(|| CacheError::unexpected(action, &answer))?;
        if cursor == "0" {
            nodes.pop();
        }
        Ok((keys, (!nodes.is_empty()).then_some(ScanCursor { nodes, cursor })))
    }

    /// What these keys hold, in their order.
    pub async fn read_held(&self, keys: &[String]) -> Result<Vec<Held>> {
        const ACTION: &str = "read the site's keys";
        let mut held = Vec::with_capacity(keys.len());
        for piece in keys.chunks(super::PIPELINE_COMMANDS_MAX) {
            // Each by a command of its own: on a Cluster they are in many slots.
            let mut pipeline = Pipeline::with_capacity(piece.len());
            for key in piece {
                pipeline.cmd("GET").arg(key);
            }
            for answer in self.run(ACTION, &pipeline).await? {
                held.push(match answer {
                    Ok(Value::Nil) => Held::Nothing,
                    Ok(value) => text(&value).and_then(|text| text.parse().ok()).map_or(Held::Other, Held::Number),
                    Err(error) if error.code() == Some("WRONGTYPE") => Held::Other,
                    Err(error) => return Err(error).context(ACTION),
                });
            }
        }
        Ok(held)
    }
}
