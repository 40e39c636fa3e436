//! Reads the two sides of a comparison: the older site's counts and the table `counter`.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use super::{PAGE_TARGETS, Subject};
use tallyd_base::servers::Servers;
use tallyd_core::model::{CounterKey, Target, TargetId};
use tallyd_mysql::ranges::LAST;
use tallyd_redis::scan::{ScanCursor, SiteValue};

const ACTION: &str = "search for the site's keys";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Look {
    pub old: Option<i64>,
    pub counted: Option<i64>,
}

impl Look {
    /// Positive if tallyd's count is higher.
    pub(super) fn drift(&self) -> i64 {
        self.counted.unwrap_or(0).saturating_sub(self.old.unwrap_or(0))
    }
}

#[derive(Default)]
pub(super) struct LookPage {
    pub looks: BTreeMap<TargetId, Look>,
    pub until: TargetId,
    pub unreadable: u64,
}

pub(super) struct Sides<'a> {
    pub(super) servers: &'a Servers,
    pub(super) subject: &'a Subject,
}

impl Sides<'_> {
    pub(super) async fn page(&self, after: TargetId, limit: usize) -> Result<LookPage> {
        let (kind, metric) = (self.subject.kind.1, self.subject.metric.1);
        let range = self.servers.store.list_range(kind, after, limit).await?;
        let counters = range.counters.iter().filter(|counted| counted.number.1 == metric);
        let counted = counters.map(|counted| (counted.number.0.id, Some(counted.value))).collect();
        Ok(LookPage { until: range.until, ..self.read_old(counted).await? })
    }

    pub(super) async fn begin_search(&self) -> Result<Option<ScanCursor>> {
        Ok(self.servers.cache.begin_scan().await?)
    }

    pub(super) async fn search(&self, from: ScanCursor) -> Result<(LookPage, Option<ScanCursor>)> {
        let Subject { keys, kind, metric } = self.subject;
        let (pattern, mut next) = (keys.pattern(&kind.0, &metric.0), Some(from));
        let mut ids = BTreeSet::new();
        while ids.len() < PAGE_TARGETS
            && let Some(from) = next
        {
            let names;
            (names, next) = self.servers.cache.scan_names(ACTION, &pattern, from).await?;
            let target = |name: &String| keys.target(name, (&kind.0, kind.1), &metric.0);
            ids.extend(
                names.iter().filter_map(target).map(|target| target.id).filter(|id| (1..=LAST.0).contains(&id.0)),
            );
        }
        let mut counted = self.counted(ids).await?;
        counted.retain(|(_, counted)| counted.is_none());
        Ok((self.read_old(counted).await?, next))
    }

    pub(super) async fn again(&self, suspects: &BTreeMap<TargetId, Look>) -> Result<BTreeMap<TargetId, Look>> {
        let counted = self.counted(suspects.keys().copied()).await?;
        Ok(self.read_old(counted).await?.looks)
    }

    async fn read_old(&self, counted: Vec<(TargetId, Option<i64>)>) -> Result<LookPage> {
        let Subject { keys, kind, metric } = self.subject;
        let names: Vec<String> = counted.iter().map(|(id, _)| keys.name(&kind.0, *id, &metric.0)).collect();
        let values = self.servers.cache.read_site_values(&names).await?;
        let mut page = LookPage::default();
        for ((id, counted), value) in counted.into_iter().zip(values) {
            let old = match value {
                SiteValue::Nothing => None,
                SiteValue::Number(number) => Some(number),
                SiteValue::Other => {
                    page.unreadable += 1;
                    continue;
                }
            };
            page.looks.insert(id, Look { old, counted });
        }
        Ok(page)
    }

    async fn counted(&self, ids: impl IntoIterator<Item = TargetId>) -> Result<Vec<(TargetId, Option<i64>)>> {
        let (kind, metric) = (self.subject.kind.1, self.subject.metric.1);
        let keys: Vec<CounterKey> = ids.into_iter().map(|id| (Target { kind, id }, metric)).collect();
        let (truths, _) = self.servers.store.truths(&keys, None, None).await?;
        let counted = |key: &CounterKey| truths.get(key).filter(|truth| truth.update_at.is_some()).map(|it| it.counted);
        Ok(keys.iter().map(|key| (key.0.id, counted(key))).collect())
    }
}
