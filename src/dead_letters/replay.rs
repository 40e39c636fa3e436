//! Replays dead letters. If a letter came through a map, the replay publishes the letter to the queue of the map. The
//! replay publishes all other letters in the same way as a producer. Each replay is recorded after the broker's
//! confirm.

use std::fmt;

use anyhow::{Context, Result};
use futures_util::{StreamExt, stream};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::preview::Judge;
use super::{PAGE, Which, all_there};
use crate::letter;
use crate::letter::text::{instant, printable};
use tallyd_base::runtime::clock;
use tallyd_base::runtime::fault;
use tallyd_core::traceparent;
use tallyd_mysql::Store;
use tallyd_mysql::letters::Letter;
use tallyd_rabbitmq::{Broker, BrokerError, Publisher};

const AT_ONCE: usize = 64;

/// Maximum bytes of letters in memory, not counting the last letter.
const BYTES_AT_ONCE: u64 = 4 << 20;

const LEFT_NAMED_MAX: usize = 1_000;

pub(crate) struct Replay<'a> {
    pub store: &'a Store,
    pub broker: &'a Broker,
    pub judge: &'a Judge,
    /// Whether Bloom filters are configured. If so, the filters must be rebuilt after likes are replayed.
    pub has_filters: bool,
    pub force: bool,
    pub dry_run: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Report {
    pub dry_run: bool,
    pub found: u64,
    pub replayed: u64,
    /// The count of replayed letters that could not be recorded as replayed. Either the consumer refused these letters
    /// again immediately, or they were deleted.
    pub open_again: u64,
    pub left: u64,
    pub left_because: Vec<Left>,
    pub filters: Option<&'static str>,
    pub stopped: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Left {
    pub id: u64,
    pub because: String,
}

/// If API servers count likes, a replay adds no likes to the Bloom filters, which get only likes that lua/like.lua
/// counted recently.
const REBUILD: &str =
    "the replayed letters contain likes: after the daemon has written these likes, run `tallyd admin filters rebuild`";

impl Replay<'_> {
    /// Replays at most `limit` letters, in the order in which they were stored. Skipped letters don't count towards the
    /// limit.
    ///
    /// # Errors
    /// If a named letter does not exist, fails with [`super::NoLetter`] before anything is sent. Also fails if a server
    /// fails. Letters that were replayed before the failure are recorded as replayed.
    pub(crate) async fn run(&self, which: &Which, limit: Option<u64>, stop: &CancellationToken) -> Result<Report> {
        let mut report = Report { dry_run: self.dry_run, ..Report::default() };
        if let Which::Ids(ids) = which {
            all_there(self.store, ids).await?;
        }
        let publisher = self.connect().await?;
        let done = self.pages(which, limit.unwrap_or(u64::MAX), publisher.as_ref(), &mut report, stop).await;
        done.with_context(|| {
            format!(
                "{} dead letters were replayed before this failure, and the remaining letters are unchanged",
                report.replayed
            )
        })?;
        Ok(report)
    }

    pub(crate) async fn edited(&self, letter: &Letter, body: Vec<u8>) -> Result<Report> {
        let mut report = Report { found: 1, ..Report::default() };
        let publisher = self.connect().await?;
        let changed = Letter { body, ..letter.clone() };
        self.send(vec![changed], publisher.as_ref(), &mut report).await?;
        Ok(report)
    }

    async fn connect(&self) -> Result<Option<Publisher>> {
        Ok(if self.dry_run { None } else { Some(self.broker.connect_publisher("replay").await?) })
    }

    async fn pages(
        &self,
        which: &Which,
        limit: u64,
        publisher: Option<&Publisher>,
        report: &mut Report,
        stop: &CancellationToken,
    ) -> Result<()> {
        // A letter that is refused again during the run keeps its id, so it is not sent again. Letters that are stored
        // during the run are not included.
        let until = self.store.newest_dead_letter().await?;
        let mut after = 0;
        loop {
            let wanted = limit.saturating_sub(report.replayed).min(PAGE as u64);
            let page = match which {
                Which::Ids(ids) => page_of(self.store, ids, after, wanted).await?,
                Which::All(selection) => self.store.dead_letters_after(selection, (after, until), wanted).await?,
            };
            let Some((last, _)) = page.last() else { return Ok(()) };
            after = *last;
            for piece in pieces(&page) {
                if stop.is_cancelled() {
                    report.stopped = true;
                    return Ok(());
                }
                let letters = self.store.whole_dead_letters(&piece).await?;
                report.found += letters.len() as u64;
                self.send(letters, publisher, report).await?;
            }
        }
    }

    async fn send(&self, letters: Vec<Letter>, publisher: Option<&Publisher>, report: &mut Report) -> Result<()> {
        let mut chosen = Vec::new();
        for letter in letters {
            let preview = self.judge.judge(&letter, &letter.body, clock::now());
            let because = match letter.replayed_at {
                // No run waits for this fence message any more, and a replay could send it to a different partition.
                _ if preview.is_fence => Some(preview.words()),
                Some(at) if !self.force => Some(format!("it was replayed at {}; --force sends it again", instant(at))),
                _ if !self.force && !preview.is_taken() => Some(preview.words()),
                _ => None,
            };
            match because {
                Some(because) => report.leave(letter.id, because),
                None => {
                    if preview.has_likes && self.has_filters {
                        report.filters = Some(REBUILD);
                    }
                    chosen.push(match preview.map_queue {
                        Some(queue) => (letter, String::new(), queue),
                        None => (letter, self.broker.exchange(), preview.routing_key),
                    });
                }
            }
        }
        let Some(publisher) = publisher else {
            report.replayed += chosen.len() as u64;
            return Ok(());
        };
        let sent: Vec<(&Letter, Result<(), BrokerError>)> = stream::iter(&chosen)
            .map(|(letter, exchange, key)| async move {
                let traceparent = letter.traceparent.as_deref().and_then(traceparent::parse);
                // Only letters of maps are published directly. A map may read their headers.
                let properties = letter::replayed(traceparent, exchange.is_empty().then_some(letter.headers.as_str()));
                (letter, publisher.publish_with(exchange, key, &letter.body, properties).await)
            })
            .buffered(AT_ONCE)
            .collect()
            .await;
        fault::point("dead:confirmed");
        let confirmed: Vec<(u64, u32)> =
            sent.iter().filter(|(_, sent)| sent.is_ok()).map(|(letter, _)| (letter.id, letter.refusals)).collect();
        report.replayed += confirmed.len() as u64;
        let noted = self.store.note_replayed(&confirmed, clock::now()).await?;
        report.open_again += (confirmed.len() as u64).saturating_sub(noted);
        match sent.into_iter().find_map(|(letter, sent)| Some((letter.id, sent.err()?))) {
            Some((id, error)) => Err(error).with_context(|| format!("replay dead letter {id}")),
            None => Ok(()),
        }
    }
}

impl Report {
    fn leave(&mut self, id: u64, because: String) {
        self.left += 1;
        if self.left_because.len() < LEFT_NAMED_MAX {
            self.left_because.push(Left { id, because });
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.left == 0 && self.open_again == 0 && !self.stopped
    }
}

async fn page_of(store: &Store, ids: &[u64], after: u64, limit: u64) -> Result<Vec<(u64, u64)>> {
    let mut next: Vec<u64> = ids.iter().copied().filter(|id| *id > after).collect();
    next.sort_unstable();
    next.dedup();
    next.truncate(usize::try_from(limit).unwrap_or(PAGE));
    Ok(store.dead_letters_of(&next).await?)
}

/// Splits a page into groups of ids whose bodies are read together. Each group is limited in count and in bytes.
fn pieces(page: &[(u64, u64)]) -> Vec<Vec<u64>> {
    let mut pieces: Vec<Vec<u64>> = Vec::new();
    let mut bytes = 0;
    for (id, length) in page {
        match pieces.last_mut() {
            Some(piece) if piece.len() < AT_ONCE && bytes < BYTES_AT_ONCE => piece.push(*id),
            _ => {
                bytes = 0;
                pieces.push(vec![*id]);
            }
        }
        bytes += length;
    }
    pieces
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.dry_run { "would be replayed" } else { "replayed" };
        write!(f, "{} of {} dead letters {what}", self.replayed, self.found)?;
        if self.open_again > 0 {
            write!(f, "\n{} of the replayed letters were immediately refused again, or deleted", self.open_again)?;
        }
        for Left { id, because } in &self.left_because {
            write!(f, "\n{id} was skipped: {}", printable(because))?;
        }
        let unnamed = self.left.saturating_sub(self.left_because.len() as u64);
        if unnamed > 0 {
            write!(f, "\n{unnamed} more were skipped")?;
        }
        if let Some(filters) = self.filters {
            write!(f, "\n{filters}")?;
        }
        if self.stopped {
            write!(f, "\nstopped: the remaining letters are unchanged")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_are_read_in_pieces_of_few_and_not_too_long_ones() {
        let short: Vec<(u64, u64)> = (1..=130).map(|id| (id, 100)).collect();
        let lengths: Vec<usize> = pieces(&short).iter().map(Vec::len).collect();
        assert_eq!(lengths, [64, 64, 2]);
        let long: Vec<(u64, u64)> = (1..=9).map(|id| (id, 1 << 20)).collect();
        let lengths: Vec<usize> = pieces(&long).iter().map(Vec::len).collect();
        assert_eq!(lengths, [4, 4, 1]);
        assert_eq!(pieces(&long).concat(), (1..=9).collect::<Vec<_>>());
        assert!(pieces(&[]).is_empty());
    }
}
