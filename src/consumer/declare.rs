//! Declares the queues and exchanges that a session needs, and checks that the partition's map is not stopped.

use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use super::Partition;
use tallyd_base::config::Map;
use tallyd_base::partitions::{InUse, noted, queue_of};
use tallyd_core::mapping::Trial;
use tallyd_rabbitmq::Link;
use tallyd_rabbitmq::probe::Found;

#[derive(Clone, Copy)]
pub(super) struct Declared {
    pub partitions: u16,
    /// The definition of the partition's map, while its trial continues.
    pub trial: Option<[u8; 32]>,
}

impl Partition {
    /// For all partitions in use, also if this daemon is configured with fewer. Additional partitions are recorded in
    /// MySQL before they are declared. Forgets which fences jobs left here.
    pub(super) async fn declare(&self, link: &Link) -> Result<Declared> {
        self.declare_numbered(link).await?;
        let trial = match &self.map {
            Some(map) => self.declare_map(link, map).await?,
            None => None,
        };
        // MySQL or the broker may have lost data since these fences were recorded. From now on no job needs them.
        self.store.forget_fences(self.number, None).await?;
        Ok(Declared { partitions: InUse::read(&self.store, &self.broker).await?.partitions.count(), trial })
    }

    /// Declares the map's queue and binds it, after the map is recorded in MySQL. Returns the map's definition if its
    /// trial continues. Fails if the map is stopped.
    async fn declare_map(&self, link: &Link, map: &Map) -> Result<Option<[u8; 32]>> {
        let queue = queue_of(map, &self.broker);
        match self.broker.probe_map_exchange(link, &queue).await.context("check the exchange of the map")? {
            Found::Right => {}
            Found::Missing => bail!(
                "[[map]] {}: the exchange {} does not exist, and tallyd never declares it: declare it, or correct `exchange`",
                map.name,
                map.exchange
            ),
            Found::Different(text) | Found::Refused(text) => bail!(
                "[[map]] {}: the account has no right to bind a queue to the exchange {}: {text}; docs/moving-reference.md lists the rights",
                map.name,
                map.exchange
            ),
        }
        let noted = noted(map, &self.broker, &self.owner);
        if let Some(problem) = noted.conflict(&self.store.note_map(&noted).await?) {
            bail!(problem);
        }
        self.broker
            .declare_map(link, &queue)
            .await
            .with_context(|| format!("declare the queue of the map {}", map.name))?;
        let definition = Sha256::digest(serde_json::to_vec(map).context("describe the map")?).into();
        // A daemon that still has the former definition must not begin its trial again.
        let begins = !self.has_tried.load(Ordering::Relaxed);
        let trial = self.store.map_trial(map.number, definition, begins).await?;
        self.has_tried.store(true, Ordering::Relaxed);
        if let Some(trial) = trial {
            ensure!(!trial.is_stopped, stopped_map(&map.name, trial));
        }
        Ok(trial.filter(|trial| !trial.is_over()).map(|_| definition))
    }

    async fn declare_numbered(&self, link: &Link) -> Result<()> {
        loop {
            let partitions = self.store.note_partitions(self.broker.partitions(), &self.owner).await?;
            self.broker.declare_for(link, partitions).await?;
            // Another daemon can add partitions and remove a binding after this daemon read the count. Then this daemon
            // can restore the removed binding by mistake. So this daemon reads the count again.
            let noted = self.store.noted_partitions().await?;
            // A count below `partitions` comes from a MySQL server that lags, and is ignored.
            if noted.is_none_or(|noted| noted.partitions <= partitions) {
                return Ok(());
            }
        }
    }
}

pub(super) fn stopped_map(name: &str, Trial { taken, refused, .. }: Trial) -> String {
    let all = taken + refused;
    format!(
        "the map {name} is stopped, because {refused} of its first {all} events were refused: correct the map and restart the \
         daemons, or run `tallyd admin map resume {name}`; `tallyd dead list` shows the events"
    )
}
