//! Reads what users like. The order is the same everywhere: clicks that are newer than MySQL's rows, then the target's
//! Bloom filter, then MySQL.
//!
//! Where API servers count likes, Redis remembers the recent clicks of users. lua/like.lua sets the user's bits in the
//! filter before its event is published, so a "no" of the filter is certain.
//!
//! Where the daemon counts likes, it sets the bits after its commit, from the outbox. A: the daemon commits a like. B: a
//! reader asks the filter. C: the daemon sets the bits. The answer to B is the state before A. Usually C follows A
//! within milliseconds. If the outbox is behind, the client stops asking filters at most three seconds after A.

use tokio::time::timeout;

use super::error::require;
use super::gateway::HINT_MAX;
use super::site::Known;
use super::{Client, ClientError, Result};
use tallyd_core::model::{Target, UserId};
use tallyd_core::rules::Writes;
use tallyd_redis::recent::Seen;

/// The largest number of targets of one call of [`Client::liked`]. The pipeline has two commands for each target, or
/// three if there are filters.
pub const STATUS_TARGETS_MAX: usize = 500;

/// The server that knows whether a user likes a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LikedBy {
    /// Redis remembers the click, or the target's Bloom filter does not have the user.
    Redis,
    /// The answer is from the row in MySQL, or MySQL has no row.
    Mysql,
}

/// Whether a user likes a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Liked {
    /// Whether the user likes the target.
    pub liked: bool,
    /// The server that gave the answer.
    pub by: LikedBy,
}

impl Client {
    /// Returns whether the user likes each of up to [`STATUS_TARGETS_MAX`] targets, in the order of `targets`. The call
    /// makes one round trip to Redis, and further ones if there are filters. If Redis does not know some of the targets,
    /// the call also makes one query to MySQL for each kind of these targets.
    ///
    /// # Errors
    /// As [`Client::likes_of`].
    pub async fn liked(&self, user: UserId, targets: &[Target]) -> Result<Vec<bool>> {
        Ok(self.likes_of(user, targets).await?.into_iter().map(|known| known.liked).collect())
    }

    /// Does the same as [`Client::liked`], and also returns the server that gave each answer.
    ///
    /// # Errors
    /// [`ClientError::Invalid`] for more targets; [`ClientError::NoCard`]; [`ClientError::NoKind`];
    /// [`ClientError::MySql`]; [`ClientError::Redis`], but only if API servers count likes.
    pub async fn likes_of(&self, user: UserId, targets: &[Target]) -> Result<Vec<Liked>> {
        let in_range = targets.len() <= STATUS_TARGETS_MAX;
        require(in_range, || format!("a call asks for at most {STATUS_TARGETS_MAX} targets"))?;
        let site = self.known().await?;
        let unnamed = targets.iter().find(|target| site.site.names.get(target.kind).is_none());
        unnamed.map_or(Ok(()), |target| Err(ClientError::NoKind(target.kind)))?;
        let known = self.known_to_redis(&site, user, targets).await?;
        let asked = targets.iter().zip(&known).filter(|(_, known)| known.is_none());
        let asked: Vec<Target> = asked.map(|(target, _)| *target).collect();
        let rows = match asked.is_empty() {
            true => Default::default(),
            false => self.likes_breaker.ask(|| self.store.last_clicks(user, &asked)).await?,
        };
        let liked = |(target, known): (&Target, Option<bool>)| match known {
            Some(liked) => Liked { liked, by: LikedBy::Redis },
            None => Liked { liked: rows.get(target).is_some_and(|row| row.liked), by: LikedBy::Mysql },
        };
        Ok(targets.iter().zip(known).map(liked).collect())
    }

    async fn known_to_redis(&self, site: &Known, user: UserId, targets: &[Target]) -> Result<Vec<Option<bool>>> {
        let metric = site.site.metrics.like();
        let is_by_api = |target: &Target| site.site.ruled(target.kind, metric).writer == Writes::Api;
        let (by_api, by_daemon): (Vec<Target>, Vec<Target>) = targets.iter().copied().partition(is_by_api);
        let mut by_api = self.recent(site, user, &by_api).await?.into_iter();
        // If Redis fails, use only MySQL's rows. These rows lack only clicks that the daemon has not written yet.
        let asked = timeout(HINT_MAX, self.filtered(site, user, &by_daemon)).await;
        let mut by_daemon = asked.ok().and_then(Result::ok).unwrap_or_default().into_iter();
        let known = |target: &Target| if is_by_api(target) { by_api.next() } else { by_daemon.next() };
        Ok(targets.iter().map(known).map(Option::flatten).collect())
    }

    async fn recent(&self, site: &Known, user: UserId, targets: &[Target]) -> Result<Vec<Option<bool>>> {
        if targets.is_empty() {
            return Ok(Vec::new());
        }
        let seen = match site.site.has_filters {
            false => site.cache.recent_likes(&site.site.names, user, targets).await?,
            true => self.ask_filters(site, user, targets, true).await?,
        };
        Ok(seen.into_iter().map(liked).collect())
    }

    async fn filtered(&self, site: &Known, user: UserId, targets: &[Target]) -> Result<Vec<Option<bool>>> {
        if targets.is_empty() || !site.site.has_filters || !self.filters.are_up_to_date(&self.store).await {
            return Ok(Vec::new());
        }
        Ok(self.ask_filters(site, user, targets, false).await?.into_iter().map(liked).collect())
    }

    /// Asks the filters, and before that the recent clicks if they count. If a filter has another shape than the client
    /// knows, asks this filter again.
    async fn ask_filters(
        &self,
        site: &Known,
        user: UserId,
        targets: &[Target],
        with_clicks: bool,
    ) -> Result<Vec<Seen>> {
        let (filters, cache, names) = (&self.filters, &site.cache, &site.site.names);
        let (epoch, asked) = (filters.epoch(cache).await, filters.shapes(targets));
        let mut seen = match with_clicks {
            true => cache.filtered_likes(names, user, &epoch, &asked).await?,
            false => cache.filter_answers(names, user, &epoch, &asked).await?,
        };
        filters.learn(targets, &seen);
        let has_other_shape = |seen: &Seen| matches!(seen, Seen::Unknown(Some(_)));
        let again = targets.iter().zip(&seen).filter(|(_, seen)| has_other_shape(seen));
        let again = filters.shapes(&again.map(|(target, _)| *target).collect::<Vec<_>>());
        // A failure must not discard the answers of the first round. The targets that were asked again stay unknown.
        let answers = cache.filter_answers(names, user, &epoch, &again).await.unwrap_or_default();
        let others = seen.iter_mut().filter(|seen| has_other_shape(seen));
        others.zip(answers).for_each(|(seen, answer)| *seen = answer);
        Ok(seen)
    }

    /// Returns users who like the target, in the order of their ids: at most `limit` users whose id is above `after` (0
    /// for the first page). The call reads MySQL, so likes of the last moments are missing.
    ///
    /// # Errors
    /// [`ClientError::MySql`].
    pub async fn likers(&self, target: Target, after: u64, limit: u64) -> Result<Vec<UserId>> {
        Ok(self.store.likers(target, after, limit).await?)
    }
}

fn liked(seen: Seen) -> Option<bool> {
    if let Seen::Known(liked) = seen { Some(liked) } else { None }
}
