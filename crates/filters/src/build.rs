//! Builds new filters beside the former filters, and then replaces the former filters.

use anyhow::Result;
use tracing::debug;

use super::{Keeper, lua};
use crate::lua::Built;
use tallyd_base::jobs::JobError;
use tallyd_base::runtime::fault;
use tallyd_core::model::{Target, UserId};
use tallyd_redis::bloom::{Shape, Window};

/// In bytes. A larger filter is built in parts (at most 32), and each part reads all users who like the target. One
/// part has room for 2.8 million users.
const WINDOW_BYTES: usize = 16 << 20;

const LIKERS_PAGE: u64 = 10_000;

impl Keeper<'_, '_> {
    /// All filters share the fence, because it is slow.
    pub(super) async fn build_all(&mut self, targets: &[(Target, u64)]) -> Result<()> {
        if targets.is_empty() || self.run.stop.is_cancelled() {
            return Ok(());
        }
        if let Some(reason) = &self.run.report.left_because {
            return Err(JobError::NotNow(reason.clone()).into());
        }
        let on = self.on;
        let names: Vec<Target> = targets.iter().map(|(target, _)| *target).collect();
        let begun = lua::begin_filters(&self.cache, &on.names, self.run.number, &names).await?;
        fault::point("filters:begun");
        if begun < names.len() {
            return Err(JobError::NotNow("another run builds filters".to_owned()).into());
        }
        self.fence().await?;
        fault::point("filters:fenced");
        for (target, expected) in targets {
            match self.build(*target, *expected).await? {
                Some(users) => {
                    self.run.report.built += 1;
                    self.run.report.users += users;
                    self.run.show(|shown| shown.clone_from(&self.run.report));
                }
                None if self.run.stop.is_cancelled() => return Ok(()),
                None => self.run.report.left += 1,
            }
        }
        Ok(())
    }

    async fn fence(&mut self) -> Result<()> {
        let fences = match &mut self.fences {
            Some(fences) => fences,
            none => none.insert(self.run.fences(self.on.fence_max).await?),
        };
        let number = self.run.next_number();
        self.run.unless_stopped(fences.pass(number)).await?
    }

    /// Returns the count of users in the filter; `None` if Redis lost the unfinished filter, or at the stop.
    async fn build(&mut self, target: Target, expected: u64) -> Result<Option<u64>> {
        let (on, run) = (self.on, self.run.number);
        let shape = Shape::of(expected, self.wish.false_positive);
        let (mut from, mut users, mut others) = (0, 0, 0);
        while from < shape.bytes() {
            let bytes = usize::try_from(shape.bytes() - from).unwrap_or(usize::MAX).min(WINDOW_BYTES);
            let mut window = Window::new(from, bytes);
            let Some(read) = self.read(target, shape, &mut window).await? else { return Ok(None) };
            (users, others) = read;
            fault::point("filters:read");
            if !lua::write_filter(&self.cache, &on.names, run, target, from, window.bytes()).await? {
                return Ok(None);
            }
            fault::point("filters:written");
            from += bytes as u64;
        }
        let (false_positive, epoch) = (self.wish.false_positive, self.wish.epoch);
        let built = Built { run, shape, expected, false_positive, users, others, epoch };
        if !lua::swap_filter(&self.cache, &on.names, target, &built).await? {
            return Ok(None);
        }
        fault::point("filters:swapped");
        let (kind, target_id) = (on.names.get(target.kind).unwrap_or_default(), target.id.0);
        debug!(
            event = "filter-built",
            kind,
            target_id,
            users,
            expected,
            "built the filter of {kind}:{target_id}: {users} users, room for {expected}"
        );
        self.fold(target, shape).await?;
        fault::point("filters:folded");
        Ok(Some(users))
    }

    /// Returns the counts of rows and of remembered clicks; `None` at the stop.
    async fn read(&self, target: Target, shape: Shape, window: &mut Window) -> Result<Option<(u64, u64)>> {
        let on = self.on;
        // First: if Redis forgets a click during the reads, its like is already in MySQL.
        let mut others = 0;
        let remembered = |user| {
            others += 1;
            window.add(shape, user);
        };
        lua::recent_likers(&self.cache, &on.names, target, remembered).await?;
        let (mut after, mut rows) = (0, 0);
        loop {
            if self.run.stop.is_cancelled() {
                return Ok(None);
            }
            let users = self.run.servers.store.likers(target, after, LIKERS_PAGE).await?;
            users.iter().for_each(|user| window.add(shape, *user));
            rows += users.len() as u64;
            match users.last() {
                Some(UserId(last)) if users.len() as u64 == LIKERS_PAGE => after = *last,
                _ => return Ok(Some((rows, others))),
            }
            // Setting bits is CPU work without waiting, and other tasks need the thread, too.
            tokio::task::yield_now().await;
        }
    }
}
