//! Reads numbers from the site's own keys, for an import.

use tallyd_core::event::ID_MAX;
use tallyd_core::model::{Kind, TargetId};
use tallyd_core::template::Template;

use tallyd_redis::scan::{ScanCursor, SiteValue};
use tallyd_redis::{Cache, Result};

#[derive(Clone, Copy, Debug)]
pub struct SiteKeys<'a> {
    pub template: &'a Template,
    pub kind: (&'a str, Kind),
    pub metric: &'a str,
}

#[derive(Clone, Debug, Default)]
pub struct SiteNumbers {
    pub numbers: Vec<(TargetId, i64)>,
    pub ignored: u64,
    pub fault: Option<String>,
    pub next: Option<ScanCursor>,
}

/// Scans for further keys, and returns the numbers in the found keys. A later call can return the same key again.
pub(crate) async fn scan_site_keys(cache: &Cache, keys: SiteKeys<'_>, from: ScanCursor) -> Result<SiteNumbers> {
    let pattern = keys.template.pattern(keys.kind.0, keys.metric);
    let (names, next) = cache.scan_names("find the site's keys", &pattern, from).await?;
    let mut targets: Vec<TargetId> = names.iter().filter_map(|name| keys.target(name)).collect();
    let ignored = (names.len() - targets.len()) as u64;
    targets.sort_unstable();
    targets.dedup();
    let (numbers, fault) = site_numbers(cache, keys, &targets).await?;
    Ok(SiteNumbers { numbers, ignored, fault, next })
}

pub(crate) async fn site_numbers(
    cache: &Cache,
    keys: SiteKeys<'_>,
    targets: &[TargetId],
) -> Result<(Vec<(TargetId, i64)>, Option<String>)> {
    let names: Vec<String> = targets.iter().map(|target| keys.name(*target)).collect();
    let (mut numbers, mut fault) = (Vec::with_capacity(targets.len()), None);
    for ((target, name), value) in targets.iter().zip(&names).zip(cache.read_site_values(&names).await?) {
        match value {
            // The key has expired since the scan found it.
            SiteValue::Nothing => {}
            SiteValue::Number(number) if number >= 0 => numbers.push((*target, number)),
            SiteValue::Number(_) | SiteValue::Other => {
                fault.get_or_insert_with(|| format!("the key {name} does not hold a whole number >= 0"));
            }
        }
    }
    Ok((numbers, fault))
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
