//! Scans all keys that match a pattern, on every server, page by page. Also reads the numbers in the site's own keys.

use redis::{Pipeline, Value};

use super::{Cache, CacheError, Context, Result, Servers, text};

/// Keys per SCAN. One SCAN of this size takes a few hundred microseconds.
const SCANNED_KEYS: usize = 1_000;

#[derive(Clone, Debug)]
pub struct ScanCursor {
    /// The masters that are not completely searched yet. The last of them is the current master. `None` without a
    /// Cluster.
    nodes: Vec<Option<String>>,
    cursor: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SiteValue {
    Nothing,
    Number(i64),
    Other,
}

impl Cache {
    pub async fn begin_scan(&self) -> Result<Option<ScanCursor>> {
        let nodes = match &self.servers {
            Servers::One(_) | Servers::Found(_) => vec![None],
            Servers::Cluster(cluster) => {
                cluster.masters().await.context("list the masters")?.into_iter().map(Some).collect()
            }
        };
        Ok(Some(ScanCursor { nodes, cursor: "0".to_owned() }))
    }

    /// Returns the next keys that match the pattern, and the next position (`None` at the end). A key can appear twice.
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
            // Keys with names that are not text are skipped, because tallyd has no such keys.
            Some((text(next)?.to_owned(), keys.iter().filter_map(text).map(str::to_owned).collect()))
        };
        let (cursor, keys): (String, Vec<String>) = page().ok_or_else(|| CacheError::unexpected(action, &answer))?;
        if cursor == "0" {
            nodes.pop();
        }
        Ok((keys, (!nodes.is_empty()).then_some(ScanCursor { nodes, cursor })))
    }

    pub async fn read_site_values(&self, keys: &[String]) -> Result<Vec<SiteValue>> {
        const ACTION: &str = "read the site's keys";
        let mut values = Vec::with_capacity(keys.len());
        for piece in keys.chunks(super::PIPELINE_COMMANDS_MAX) {
            // Each key is read with a separate command, because on a Cluster the keys are in many slots.
            let mut pipeline = Pipeline::with_capacity(piece.len());
            for key in piece {
                pipeline.cmd("GET").arg(key);
            }
            for answer in self.run(ACTION, &pipeline).await? {
                values.push(match answer {
                    Ok(Value::Nil) => SiteValue::Nothing,
                    Ok(value) => {
                        text(&value).and_then(|text| text.parse().ok()).map_or(SiteValue::Other, SiteValue::Number)
                    }
                    Err(error) if error.code() == Some("WRONGTYPE") => SiteValue::Other,
                    Err(error) => return Err(error).context(ACTION),
                });
            }
        }
        Ok(values)
    }
}

pub fn read_scan(answer: &Value) -> Option<(&str, &[Value])> {
    let Value::Array(parts) = answer else { return None };
    let [cursor, Value::Array(found) | Value::Set(found)] = parts.as_slice() else { return None };
    Some((text(cursor)?, found))
}
