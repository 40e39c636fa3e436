//! Compares the counts in an older site's keys with tallyd's counts (the table `counter`), while both systems count. It
//! reports how many targets differ, and by how much.
//!
//! A page of targets is read from both sides. Targets with different counts are *suspects*, and are checked again
//! `LOOKS_APART` later. A target *differs* if both checks find a difference in the same direction, and the smaller
//! difference is reported. An in-flight event reaches one side first, so it usually causes a difference in only one
//! check. A target that users like all the time can have in-flight events in both checks.
//!
//! The run first reads the keys of all targets in `counter`, and then scans Redis for keys of targets without a row. It
//! must never change a count or a key.

pub mod report;
mod sides;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::info;

use report::{Progress, Report};
use sides::{Look, LookPage, Sides};
use tallyd_base::config::{Config, Reconcile as Limits};
use tallyd_base::jobs::pages::PageLimits;
use tallyd_base::jobs::run::{Job, Run};
use tallyd_connect::pace::pace;
use tallyd_core::control::Task;
use tallyd_core::model::{Kind, Metric, TargetId};
use tallyd_core::template::Template;
use tallyd_mysql::ranges::LAST;

pub(crate) const LOOKS_APART: Duration = Duration::from_secs(5);

const SUSPECTS_MAX: usize = 10_000;

const PAGE_TARGETS: usize = 10_000;

pub struct Comparer {
    pub subject: Subject,
    pub limits: Limits,
}

#[derive(Clone, Debug)]
pub struct Subject {
    pub keys: Template,
    pub kind: (String, Kind),
    pub metric: (String, Metric),
}

struct Comparison<'a, 'r> {
    sides: Sides<'a>,
    run: &'a mut Run<'r, Comparer>,
    suspects: BTreeMap<TargetId, Look>,
}

impl Job for Comparer {
    const NAME: &'static str = "compare";
    type Report = Report;
    type Progress = Progress;

    fn needs(&self, _: &Config) -> &'static [Task] {
        &[]
    }

    fn mode(&self) -> Cow<'_, str> {
        Cow::Owned(format!("{}:{}", self.subject.kind.0, self.subject.metric.0))
    }

    fn begin(&self) -> (Report, Progress) {
        (Report::new(&self.subject), Progress::default())
    }

    async fn work(&self, run: &mut Run<'_, Self>) -> Result<()> {
        let (limits, replicas) = (self.limits.clone(), Vec::new());
        run.limit_pages(PageLimits { replicas, site: None, limits, page_max: PAGE_TARGETS, log_wait }).await?;
        let sides = Sides { servers: run.servers, subject: &self.subject };
        let compared = Comparison { sides, run, suspects: BTreeMap::new() }.compare_all().await;
        run.report.keep_worst();
        compared?;
        // A stop during the last recheck leaves suspects without a result.
        run.check_stop()
    }
}

impl Comparison<'_, '_> {
    async fn compare_all(&mut self) -> Result<()> {
        let mut after = TargetId(0);
        while after < LAST && self.run.next_page().await? {
            let began = Instant::now();
            let page = self.sides.page(after, self.run.page_size()).await?;
            self.run.note_page(page.looks.len(), began.elapsed());
            after = page.until;
            self.take(page).await?;
        }
        let mut next = self.sides.begin_search().await?;
        while let Some(from) = next
            && self.run.next_page().await?
        {
            let found;
            (found, next) = self.sides.search(from).await?;
            self.take(found).await?;
        }
        self.look_again().await
    }

    async fn take(&mut self, page: LookPage) -> Result<()> {
        let LookPage { looks, unreadable, .. } = page;
        self.run.report.unreadable += unreadable;
        for (id, look) in looks {
            if look.drift() != 0 && self.suspects.insert(id, look).is_some() {
                continue;
            }
            self.run.report.checked += 1;
            self.run.report.equal += u64::from(look.drift() == 0);
        }
        self.show();
        if self.suspects.len() >= SUSPECTS_MAX { self.look_again().await } else { Ok(()) }
    }

    async fn look_again(&mut self) -> Result<()> {
        let suspects = std::mem::take(&mut self.suspects);
        if suspects.is_empty()
            || self.run.stop.run_until_cancelled(tokio::time::sleep(pace(LOOKS_APART))).await.is_none()
        {
            return Ok(());
        }
        let again = self.sides.again(&suspects).await?;
        for (id, first) in &suspects {
            let second = again.get(id).copied().unwrap_or_default();
            self.run.report.judge(&self.sides.subject.kind.0, *id, first, &second);
        }
        self.show();
        Ok(())
    }

    fn show(&self) {
        let Report { checked, differ, .. } = self.run.report;
        let pending = self.suspects.len() as u64;
        self.run.show(|shown| *shown = Progress { checked, differ, pending });
    }
}

fn log_wait(reason: &str) {
    info!(event = "compare-waiting", reason, "waiting, live traffic goes first: {reason}");
}
