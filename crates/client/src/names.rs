//! Finds kinds and metrics by their names.

use std::collections::BTreeMap;

use super::site::{Known, Unchecked};
use super::{Client, ClientError, Event, Result};
use tallyd_core::kinds::LIKE;
use tallyd_core::model::{Kind, Metric};
use tallyd_core::rules::{Ruled, Writes};

impl Client {
    /// Returns the kind with this name. If the card lacks the name, the client reads the card again first. If the card
    /// has the name, the call asks no server, so call it for each request.
    ///
    /// If the client has never seen a card, each name has a kind, which serves only to publish.
    ///
    /// # Errors
    /// [`ClientError::UnknownName`].
    pub async fn kind(&self, name: &str) -> Result<Kind> {
        self.code("kind", name, &self.unchecked_kinds, |known| &known.site.kinds.0).await.map(Kind)
    }

    /// Does the same as [`Client::kind`] for a metric.
    ///
    /// # Errors
    /// [`ClientError::UnknownName`].
    pub async fn metric(&self, name: &str) -> Result<Metric> {
        self.code("metric", name, &self.unchecked_metrics, |known| &known.site.metrics.0).await.map(Metric)
    }

    async fn code(
        &self,
        what: &'static str,
        name: &str,
        unchecked: &Unchecked,
        of: fn(&Known) -> &BTreeMap<String, u8>,
    ) -> Result<u8> {
        let mut known = self.sites.current().await;
        if !known.site.is_known || !of(&known).contains_key(name) {
            known = self.sites.refreshed().await;
        }
        let code = if known.site.is_known { of(&known).get(name).copied() } else { unchecked.code(name) };
        let has = || of(&known).keys().cloned().collect();
        code.ok_or_else(|| ClientError::UnknownName { what, name: name.to_owned(), has: has() })
    }

    pub(crate) fn kind_name(&self, known: &Known, kind: Kind) -> Result<String> {
        let name = name(known, &known.site.kinds.0, self.unchecked_kinds.name(kind.0), kind.0);
        name.ok_or(ClientError::NoKind(kind))
    }

    pub(crate) fn metric_name(&self, known: &Known, metric: Metric) -> Result<String> {
        let name = name(known, &known.site.metrics.0, self.unchecked_metrics.name(metric.0), metric.0);
        name.ok_or(ClientError::NoMetric(metric))
    }

    /// Fails if API servers count the number in Redis, because an event that was not counted there would be missing
    /// until a reconcile.
    pub(crate) fn is_by_daemon(&self, known: &Known, event: &Event) -> Result<()> {
        let (target, metric) = match event {
            Event::Like(like) => (like.target, LIKE.to_owned()),
            Event::Change(changed) => (changed.target, self.metric_name(known, changed.metric)?),
        };
        let kind = self.kind_name(known, target.kind)?;
        match known.ruled(&kind, &metric).is_some_and(|ruled| ruled.writer == Writes::Api) {
            true => Err(ClientError::CountedByApi(format!("{kind}:{metric}"))),
            false => Ok(()),
        }
    }
}

impl Known {
    /// Returns the rule of a number. The names count, because a code that the caller got without a card is not the
    /// card's code. Returns `None` without a card: then the daemon checks the rules.
    pub(crate) fn ruled(&self, kind: &str, metric: &str) -> Option<Ruled> {
        let site = Some(&self.site).filter(|site| site.is_known)?;
        Some(site.ruled(site.kinds.named(kind)?, site.metrics.named(metric)?))
    }
}

/// Returns the name of a code: in the card, or as the caller named it without a card. Returns `None` if both names
/// exist and differ, because it is unknown which one the caller means.
fn name(known: &Known, card: &BTreeMap<String, u8>, unchecked: Option<String>, code: u8) -> Option<String> {
    let in_card = card.iter().find(|(_, known)| **known == code).map(|(name, _)| name);
    match (in_card, unchecked) {
        (Some(name), None) => Some(name.clone()),
        (Some(name), Some(unchecked)) => Some(unchecked).filter(|unchecked| unchecked == name),
        (None, unchecked) => unchecked.filter(|name| !known.site.is_known || card.contains_key(name)),
    }
}
