//! Causes faults that real sites have. An API server that counts likes itself crashes between counting and publishing.
//! Another one counts twice after a timeout. A third one sends a message that is not an event.

use anyhow::{Context, Result};
use tallyd_core::model::Target;
use tallyd_rabbitmq::Publisher;

use crate::dice::Dice;
use crate::traffic::{ARTICLE, Site};

/// The number of faults of each kind in one burst. Bursts are small, so that a slow machine's reconcile does not reach
/// the safety limit: a run can always repair 100 counters.
const LOST: u64 = 10;
const DOUBLED: u64 = 10;
const MALFORMED: u64 = 8;

/// The numbers of faults so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Harm {
    /// The number of clicks that count in Redis but were never published.
    pub lost: u64,
    /// The number of likes that count twice in Redis.
    pub doubled: u64,
    /// The number of sent messages that are not events.
    pub malformed: u64,
}

/// Causes faults.
pub struct Faults {
    publisher: Publisher,
    dice: Dice,
    pub harm: Harm,
}

impl Faults {
    pub async fn new(site: &Site) -> Result<Self> {
        let publisher = site.broker.connect_publisher("demo").await?;
        Ok(Self { publisher, dice: Dice::new(u64::from(u32::MAX)), harm: Harm::default() })
    }

    /// Causes a burst of all kinds of faults, and returns the number of faults of each kind.
    pub async fn strike(&mut self, site: &Site) -> Result<Harm> {
        for _ in 0..LOST {
            self.lose(site).await?;
        }
        for _ in 0..DOUBLED {
            self.count_twice(site).await.context("count a like twice")?;
        }
        for number in 0..MALFORMED {
            let body = malformed(self.harm.malformed + number);
            self.publisher.publish(&site.broker.exchange(), "1", body.as_bytes()).await?;
        }
        let burst = Harm { lost: LOST, doubled: DOUBLED, malformed: MALFORMED };
        self.harm.lost += burst.lost;
        self.harm.doubled += burst.doubled;
        self.harm.malformed += burst.malformed;
        Ok(burst)
    }

    /// Counts a click on an article without publishing it. Returns the article.
    pub async fn lose(&mut self, site: &Site) -> Result<Target> {
        let (pair, liked) = site.choose(ARTICLE, &mut self.dice);
        let counted = site.server.count(pair.target, pair.user, liked, &[]).await;
        counted.context("count a click without publishing it")?;
        site.model().lost(pair);
        Ok(pair.target)
    }

    async fn count_twice(&mut self, site: &Site) -> Result<()> {
        let pair = loop {
            let (pair, liked) = site.choose(ARTICLE, &mut self.dice);
            if liked {
                break pair;
            }
            site.model().cancel(pair);
        };
        site.server.count(pair.target, pair.user, true, &[]).await?;
        let counted = site.count(pair, true).await?;
        site.publish(&counted.event).await
    }
}

/// Returns a malformed message. All these messages differ, because dead_letter keeps equal messages as one row.
fn malformed(number: u64) -> String {
    match number % 5 {
        0 => format!("{{\"type\":\"like\",\"kind\":\"video\",\"target_id\":\"{number}"),
        1 => format!("<like video=\"{number}\"/>"),
        2 => format!(r#"{{"type":"like","kind":"vidoe","target_id":"7","user_id":"{number}","at":1}}"#),
        3 => format!(r#"{{"type":"like","kind":"video","target_id":"-{number}","user_id":"7","at":1}}"#),
        _ => format!(r#"{{"type":"like","kind":"video","target_id":"7","user_id":"7","at":92233720{number:011}}}"#),
    }
}
