//! Commands for dead letters: list, show, replay, purge. The consumer stores dead letters (see [`crate::letter`]).
//! Messages that the broker dead-lettered are first moved from the queue of returned messages into the table
//! (`returned`).
//!
//! The races, and the decision in each race:
//!
//! * A: a letter is replayed, and the broker confirms it. B: the command is killed before it records the replay. The
//!   letter is still open and can be replayed once more. This is harmless, because applying an event twice changes
//!   nothing.
//! * A: a letter is replayed. B: the consumer immediately refuses the replayed event, and marks the letter as open
//!   again. C: the command records the replay. The command records the replay only if the letter's `refusals` has not
//!   changed since the letter was read. In this race `refusals` has changed, so the letter stays open.
//! * A: a message is taken from the queue of returned messages and written. B: the command is killed before it
//!   acknowledges the message. The broker delivers the message again. The message has the same digest, so it is written
//!   to the same row.
//! * A: letters are selected for deletion because they were replayed. B: the consumer refuses the event of a selected
//!   letter again, and marks this letter as open. The DELETE statement checks again that a letter was replayed.
//!
//! The commands must never acknowledge a message that is not committed. The commands must not take a message that MySQL
//! cannot store, because the broker drops messages that are requeued often. The commands must not delete a letter that
//! was not replayed, unless the operator requested the deletion of such letters.

pub mod preview;
pub(crate) mod purge;
pub(crate) mod replay;
pub(crate) mod returned;

use std::fmt;

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

use crate::letter::text::{hex_dump, instant, pretty_json, printable, printable_bytes, printable_lines};
use preview::{Judge, Preview};
use returned::Returned;
use tallyd_base::runtime::progress::counted;
use tallyd_core::model::Micros;
use tallyd_core::traceparent;
use tallyd_mysql::Store;
use tallyd_mysql::letters::{Letter, Selection, Total};

const PAGE: usize = 500;

const ERROR_SHOWN: usize = 160;

#[derive(Debug, thiserror::Error)]
#[error("there is no dead letter {}", .0.iter().map(u64::to_string).collect::<Vec<_>>().join(", "))]
pub struct NoLetter(pub Vec<u64>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    Ids(Vec<u64>),
    All(Selection),
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct List {
    pub returned: Option<Returned>,
    pub letters: Vec<Row>,
    pub more: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    pub id: u64,
    pub first_seen: String,
    pub replayed_at: Option<String>,
    pub refusals: u32,
    pub reason: String,
    pub error: String,
    pub queue: String,
    pub traceparent: Option<String>,
    pub bytes: u64,
    pub body: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    pub returned: Option<Returned>,
    pub reasons: Vec<OfReason>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OfReason {
    pub reason: String,
    pub open: u64,
    pub replayed: u64,
    pub oldest: String,
    pub newest: String,
}

pub async fn list(store: &Store, selection: &Selection, limit: u64, returned: Option<Returned>) -> Result<List> {
    let mut found = store.dead_letters(selection, limit + 1).await?;
    let more = found.len() as u64 > limit;
    if more {
        found.pop();
    }
    Ok(List { returned, letters: found.into_iter().map(Row::from).collect(), more })
}

pub async fn summary(store: &Store, selection: &Selection, returned: Option<Returned>) -> Result<Summary> {
    let of = |total: Total| OfReason {
        reason: total.reason,
        open: total.open,
        replayed: total.replayed,
        oldest: instant(total.oldest),
        newest: instant(total.newest),
    };
    Ok(Summary { returned, reasons: store.dead_letter_totals(selection).await?.into_iter().map(of).collect() })
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Shown(pub Vec<Whole>);

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Whole {
    #[serde(flatten)]
    pub row: Row,
    pub headers: Value,
    /// The body in hex, if the body is not UTF-8. If it is UTF-8, `body` contains the whole body.
    pub body_hex: Option<String>,
    pub now: Now,
    #[serde(skip)]
    raw: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Now {
    pub taken: usize,
    pub refused: usize,
    pub words: String,
    pub routing_key: String,
}

pub(crate) async fn show(judge: &Judge, store: &Store, ids: &[u64], now: Micros) -> Result<Shown> {
    let mut shown = Vec::new();
    for id in ids {
        let letter = whole(store, *id).await?;
        let preview = judge.judge(&letter, &letter.body, now);
        shown.push(Whole::new(letter, preview));
    }
    Ok(Shown(shown))
}

pub async fn whole(store: &Store, id: u64) -> Result<Letter> {
    store.whole_dead_letters(&[id]).await?.pop().ok_or_else(|| NoLetter(vec![id]).into())
}

async fn all_there(store: &Store, ids: &[u64]) -> Result<()> {
    let mut missing = Vec::new();
    for page in ids.chunks(PAGE) {
        let there = store.dead_letters_of(page).await?;
        missing.extend(page.iter().filter(|id| there.binary_search_by_key(id, |(there, _)| there).is_err()));
    }
    if missing.is_empty() { Ok(()) } else { Err(NoLetter(missing).into()) }
}

impl From<Letter> for Row {
    fn from(letter: Letter) -> Self {
        Self {
            id: letter.id,
            first_seen: instant(letter.first_seen),
            replayed_at: letter.replayed_at.map(instant),
            refusals: letter.refusals,
            body: printable_bytes(&letter.body, letter.bytes > letter.body.len() as u64),
            reason: letter.reason,
            error: letter.error,
            queue: letter.queue,
            traceparent: letter.traceparent.as_deref().and_then(traceparent::parse).map(str::to_owned),
            bytes: letter.bytes,
        }
    }
}

impl Whole {
    fn new(letter: Letter, preview: Preview) -> Self {
        let raw = letter.body.clone();
        // tallyd writes headers as JSON. Headers that were changed manually and are no longer JSON are shown as text.
        let headers = serde_json::from_str(&letter.headers).unwrap_or_else(|_| Value::String(letter.headers.clone()));
        let now = Now {
            taken: preview.taken,
            refused: preview.refused,
            words: preview.words(),
            routing_key: preview.routing_key,
        };
        let mut row = Row::from(letter);
        let body_hex = match std::str::from_utf8(&raw) {
            Ok(text) => {
                text.clone_into(&mut row.body);
                None
            }
            Err(_) => Some(raw.iter().map(|byte| format!("{byte:02x}")).collect()),
        };
        Self { row, headers, body_hex, now, raw }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, first_seen, replayed_at, reason, error, traceparent, bytes, body, .. } = self;
        let state = replayed_at.as_ref().map_or_else(|| "open".to_owned(), |at| format!("replayed {at}"));
        let short: String = error.chars().take(ERROR_SHOWN).collect();
        let goes_on = if short.len() < error.len() { "…" } else { "" };
        writeln!(f, "{id}  {first_seen}  {}  {state}", printable(reason))?;
        writeln!(f, "    {}{goes_on}", printable(&short))?;
        if let Some(traceparent) = traceparent {
            writeln!(f, "    traceparent {traceparent}")?;
        }
        write!(f, "    {body} ({bytes} bytes)")
    }
}

impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let returned = self.returned.as_ref().map(ToString::to_string).filter(|words| !words.is_empty());
        let mut parts: Vec<String> = returned.into_iter().collect();
        parts.extend(self.letters.iter().map(ToString::to_string));
        if self.letters.is_empty() {
            parts.push("no dead letters".to_owned());
        }
        if self.more {
            parts.push("there are more: raise --limit, or use --summary".to_owned());
        }
        f.write_str(&parts.join("\n"))
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let returned = self.returned.as_ref().map(ToString::to_string).filter(|words| !words.is_empty());
        if let Some(words) = returned {
            writeln!(f, "{words}")?;
        }
        write!(f, "{:<28}{:>10}{:>10}  {:<29}newest", "reason", "open", "replayed", "oldest")?;
        for OfReason { reason, open, replayed, oldest, newest } in &self.reasons {
            write!(f, "\n{:<28}{open:>10}{replayed:>10}  {oldest:<29}{newest}", printable(reason))?;
        }
        Ok(())
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&parts.join("\n\n"))
    }
}

impl fmt::Display for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { id, first_seen, replayed_at, refusals, reason, error, queue, traceparent, bytes, .. } = &self.row;
        writeln!(f, "dead letter {id}")?;
        writeln!(f, "  reason      {}", printable(reason))?;
        writeln!(f, "  error       {}", printable(error))?;
        writeln!(f, "  queue       {}", printable(queue))?;
        writeln!(f, "  first seen  {first_seen}")?;
        writeln!(f, "  refused     {}", counted(u64::from(*refusals), "time", "times"))?;
        writeln!(f, "  replayed    {}", replayed_at.as_deref().unwrap_or("no"))?;
        if let Some(traceparent) = traceparent {
            writeln!(f, "  traceparent {traceparent}")?;
        }
        writeln!(f, "  headers     {}", printable(&self.headers.to_string()))?;
        writeln!(f, "  now         {}", printable(&self.now.words))?;
        writeln!(f, "  body        {bytes} bytes")?;
        match (pretty_json(&self.raw), std::str::from_utf8(&self.raw)) {
            (Some(pretty), _) => f.write_str(&printable_lines(&pretty)),
            (None, Ok(text)) => f.write_str(&printable_lines(text)),
            (None, Err(_)) => f.write_str(&hex_dump(&self.raw)),
        }
    }
}
