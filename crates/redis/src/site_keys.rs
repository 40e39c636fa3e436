//! Numbers of the site's own keys, which an import reads.

use redis::{Pipeline, Value};
use tallyd_core::event::ID_MAX;
use tallyd_core::model::{Kind, TargetId};
use tallyd_core::template::Template;

use super::{Cache, CacheError, Context, Result, text};

const ACTION: &str = "read the site's keys";

/// Keys that one SCAN looks at: some hundred microseconds.
const SCANNED_KEYS: usize = 1_000;

/// Which keys are meant.
#[derive(Clone, Copy, Debug)]
pub struct SiteKeys<'a> {
    pub template: &'a Template,
    pub kind: (&'a str, Kind),
    pub metric: &'a str,
}

/// What some keys hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SiteNumbers {
    /// Sorted by target, each once.
    pub numbers: Vec<(TargetId, i64)>,
    /// Keys that fit the pattern and name no target.
    pub ignored: u64,
    /// A sentence about the first key that holds no number, if there is one.
    pub fault: Option<String>,
    /// Where to go on; `None` at the end.
    pub next: Option<String>,
}

impl Cache {
    /// The numbers of the next keys of a SCAN, which begins at `0`. A key may come again in a later answer.
    pub async fn scan_site_keys(&self, keys: SiteKeys<'_>, from: &str) -> Result<SiteNumbers> {
        let mut pipeline = Pipeline::new();
        let pattern = keys.template.pattern(keys.kind.0, keys.metric);
        pipeline.cmd("SCAN").arg(from).arg("MATCH").arg(pattern).arg("COUNT").arg(SCANNED_KEYS);
        let answer = self.run(ACTION, &pipeline).await?.pop().unwrap_or(Ok(Value::Nil)).context(ACTION)?;
        let Value::Array(parts) = &answer else { return Err(CacheError::unexpected(ACTION, &answer)) };
        let [next, Value::Array(found)] = parts.as_slice() else { return Err(CacheError::unexpected(ACTION, &answer)) };
        let next = text(next).ok_or_else(|| CacheError::unexpected(ACTION, &answer))?;
        let names: Vec<&str> = found.iter().filter_map(text).collect();
        let mut targets: Vec<TargetId> = names.iter().filter_map(|name| keys.target(name)).collect();
        let ignored = (found.len() - targets.len()) as u64;
        targets.sort_unstable();
        targets.dedup();
        let (numbers, fault) = self.site_numbers(keys, &targets).await?;
        Ok(SiteNumbers { numbers, ignored, fault, next: (next != "0").then(|| next.to_owned()) })
    }

    /// The numbers of those targets that have a key, and a sentence about the first key that holds none.
    pub async fn site_numbers(
        &self,
        keys: SiteKeys<'_>,
        targets: &[TargetId],
    ) -> Result<(Vec<(TargetId, i64)>, Option<String>)> {
        let (mut numbers, mut fault) = (Vec::with_capacity(targets.len()), None);
        for piece in targets.chunks(super::PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::with_capacity(piece.len());
            for target in piece {
                pipeline.cmd("GET").arg(keys.name(*target));
            }
            for (target, answer) in piece.iter().zip(self.run(ACTION, &pipeline).await?) {
                let held = match answer {
                    // It has expired since.
                    Ok(Value::Nil) => continue,
                    Ok(value) => text(&value).unwrap_or_default().to_owned(),
                    Err(error) if error.code() == Some("WRONGTYPE") => "no text".to_owned(),
                    Err(error) => return Err(error).context(ACTION),
                };
                match held.parse() {
                    Ok(number) if number >= 0 => numbers.push((*target, number)),
                    _ => {
                        let name = keys.name(*target);
                        fault.get_or_insert_with(|| {
                            format!("the key {name} holds {held}: it must hold a whole number from 0 on")
                        });
                    }
                }
            }
        }
        Ok((numbers, fault))
    }
}

impl SiteKeys<'_> {
    fn name(&self, target: TargetId) -> String {
        self.template.name(self.kind.0, target, self.metric)
    }

    fn target(&self, name: &str) -> Option<TargetId> {
        let target = self.template.target(name, self.kind, self.metric)?.id;
        (1..=ID_MAX).contains(&target.0).then_some(target)
    }
}
