//! Reads the two sides of a comparison: the older site's counts and the table `counter`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Result, anyhow};

use super::{PAGE_TARGETS, Source, Subject};
use crate::jobs::JobError;
use crate::servers::Servers;
use tallyd_core::model::{CounterKey, Target, TargetId};
use tallyd_core::site_query::Query;
use tallyd_core::template::Template;
use tallyd_mysql::ranges::LAST;
use tallyd_mysql::recounts::{Answer, Question};
use tallyd_mysql::site_query::{QueryError, Statement};
use tallyd_redis::scan::{Held, ScanCursor};

/// Time limit of the query for one page.
const QUERY_MAX: Duration = Duration::from_secs(30);

const ACTION: &str = "search for the site's keys";

/// The two counts of a target that one check has read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Look {
    /// The older site's count, or `None` if the site has no count.
    pub old: Option<i64>,
    /// The count in `counter`, or `None` if there is no row.
    pub counted: Option<i64>,
}

impl Look {
    /// Returns the difference of the two counts. It is positive if tallyd's count is higher.
    pub(super) fn drift(&self) -> i64 {
        self.counted.unwrap_or(0).saturating_sub(self.old.unwrap_or(0))
    }
}

/// The counts that one check has read for a group of targets.
#[derive(Default)]
pub(super) struct Page {
    pub looks: BTreeMap<TargetId, Look>,
    /// The last target that the page covers.
    pub until: TargetId,
    /// The number of keys whose content is not a number.
    pub unreadable: u64,
}

pub(super) struct Sides<'a> {
    servers: &'a Servers,
    subject: &'a Subject,
    /// The pages of the query's result that contain suspects. For each page, a pair contains the target before the
    /// page, and the last target of the page.
    pages: Vec<(TargetId, TargetId)>,
}

impl<'a> Sides<'a> {
    pub(super) fn new(servers: &'a Servers, subject: &'a Subject) -> Self {
        Self { servers, subject, pages: Vec::new() }
    }

    /// Reads the next targets after `after`. These are the targets in `counter` and, if there is a query, in the
    /// query's result.
    pub(super) async fn page(&mut self, after: TargetId, limit: usize) -> Result<Page> {
        match &self.subject.source {
            Source::Keys(template) => {
                let (kind, metric) = (self.subject.kind.1, self.subject.metric.1);
                let range = self.servers.store.list_range(kind, after, limit).await?;
                let counters = range.counters.iter().filter(|counted| counted.number.1 == metric);
                let counted = counters.map(|counted| (counted.number.0.id, counted.value)).collect();
                self.beside_keys(template, counted, range.until).await
            }
            Source::Query(query) => {
                let page = self.ask(query, after, LAST).await?;
                if page.looks.values().any(|look| look.drift() != 0) {
                    self.pages.push((after, page.until));
                }
                Ok(page)
            }
        }
    }

    /// Starts the scan for keys of targets without a row in `counter`. A comparison with a query needs no scan, because
    /// the query also returns targets without a row in `counter`.
    pub(super) async fn begin_search(&self) -> Result<Option<ScanCursor>> {
        match &self.subject.source {
            Source::Keys(_) => Ok(self.servers.cache.begin_scan().await?),
            Source::Query(_) => Ok(None),
        }
    }

    /// Reads some keys of targets without a row in `counter`. Also returns the position for the next call.
    pub(super) async fn search(&self, from: ScanCursor) -> Result<(Page, Option<ScanCursor>)> {
        let (kind, metric) = (&self.subject.kind, &self.subject.metric);
        let Source::Keys(template) = &self.subject.source else { return Ok((Page::default(), None)) };
        let (pattern, mut next) = (template.pattern(&kind.0, &metric.0), Some(from));
        let mut ids = BTreeSet::new();
        while ids.len() < PAGE_TARGETS
            && let Some(from) = next
        {
            let names;
            (names, next) = self.servers.cache.scan_names(ACTION, &pattern, from).await?;
            let target = |name: &String| template.target(name, (&kind.0, kind.1), &metric.0);
            ids.extend(
                names.iter().filter_map(target).map(|target| target.id).filter(|id| (1..=LAST.0).contains(&id.0)),
            );
        }
        let mut counted = self.counted(ids).await?;
        counted.retain(|(_, counted)| counted.is_none());
        let page = self.held(template, counted).await?;
        Ok((page, next))
    }

    /// Checks the suspects a second time.
    pub(super) async fn again(&mut self, suspects: &BTreeMap<TargetId, Look>) -> Result<BTreeMap<TargetId, Look>> {
        match &self.subject.source {
            Source::Keys(template) => {
                let counted = self.counted(suspects.keys().copied()).await?;
                Ok(self.held(template, counted).await?.looks)
            }
            Source::Query(query) => {
                let mut looks = BTreeMap::new();
                for (mut after, until) in std::mem::take(&mut self.pages) {
                    // If targets were added since the first check, the targets after `after` can need more than one
                    // page.
                    while after < until {
                        let page = self.ask(query, after, until).await?;
                        looks.extend(page.looks.into_iter().filter(|(id, _)| suspects.contains_key(id)));
                        after = page.until;
                    }
                }
                Ok(looks)
            }
        }
    }

    async fn beside_keys(&self, template: &Template, counted: Vec<(TargetId, i64)>, until: TargetId) -> Result<Page> {
        let counted = counted.into_iter().map(|(id, counted)| (id, Some(counted))).collect();
        Ok(Page { until, ..self.held(template, counted).await? })
    }

    /// Reads the keys of these targets, and combines them with the counts of `counter`.
    async fn held(&self, template: &Template, counted: Vec<(TargetId, Option<i64>)>) -> Result<Page> {
        let (kind, metric) = (&self.subject.kind.0, &self.subject.metric.0);
        let names: Vec<String> = counted.iter().map(|(id, _)| template.name(kind, *id, metric)).collect();
        let held = self.servers.cache.read_held(&names).await?;
        let mut page = Page::default();
        for ((id, counted), held) in counted.into_iter().zip(held) {
            let old = match held {
                Held::Nothing => None,
                Held::Number(number) => Some(number),
                Held::Other => {
                    page.unreadable += 1;
                    continue;
                }
            };
            page.looks.insert(id, Look { old, counted });
        }
        Ok(page)
    }

    /// Reads the counts of these targets from `counter`.
    async fn counted(&self, ids: impl IntoIterator<Item = TargetId>) -> Result<Vec<(TargetId, Option<i64>)>> {
        let (kind, metric) = (self.subject.kind.1, self.subject.metric.1);
        let keys: Vec<CounterKey> = ids.into_iter().map(|id| (Target { kind, id }, metric)).collect();
        let (truths, _) = self.servers.store.truths(&keys, None, None).await?;
        let counted = |key: &CounterKey| truths.get(key).filter(|truth| truth.update_at.is_some()).map(|it| it.counted);
        Ok(keys.iter().map(|key| (key.0.id, counted(key))).collect())
    }

    async fn ask(&self, query: &Query, after: TargetId, until: TargetId) -> Result<Page> {
        let statement = Statement {
            sql: query.sql(&[after.0, PAGE_TARGETS as u64]),
            query_max: QUERY_MAX,
            page_key: "its pages",
            url_key: "[mysql] url",
        };
        let question = Question { statement, after, limit: PAGE_TARGETS };
        let which = (self.subject.kind.1, self.subject.metric.1);
        let Answer { truths, counters, until } =
            self.servers.store.ask_recount(which, &question, until).await.map_err(refused)?;
        let mut page = Page { until, ..Page::default() };
        for (id, old) in truths {
            page.looks.entry(id).or_default().old = Some(old);
        }
        for (id, counted, _) in counters {
            page.looks.entry(id).or_default().counted = Some(counted);
        }
        Ok(page)
    }
}

fn refused(error: QueryError) -> anyhow::Error {
    match error {
        QueryError::Query(sentence) => JobError::Refused(format!("--query: {sentence}")).into(),
        QueryError::Store(error) => anyhow!(error),
    }
}
