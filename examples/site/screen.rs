//! Prints one status line a second, and a line for each thing that happens. The lines have colours only on a terminal.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// The header is repeated after this number of lines.
const HEADER_EVERY: u32 = 20;

const BOLD: &str = "1";
const DIM: &str = "2";
const RED: &str = "31";
const GREEN: &str = "32";
const YELLOW: &str = "33";
const CYAN: &str = "36";

const COLUMNS: [(&str, &str); 8] = [
    ("clicks/s", "likes and unlikes whose events RabbitMQ has confirmed"),
    ("commits/s", "events that tallyd has committed to MySQL"),
    ("batch", "events in one transaction, on average"),
    ("lag ms", "the longest time from click to commit in this second"),
    ("queue", "events that are published but not committed yet: they are in RabbitMQ or in tallyd"),
    ("drifted", "counters of articles in Redis that differ from the clicks; the demo compares all of them"),
    ("repaired", "counters that tallyd has repaired, so far"),
    ("dead", "malformed messages that tallyd has dead-lettered in the table dead_letter, so far"),
];

/// The values of one status line.
#[derive(Clone, Copy, Debug, Default)]
pub struct Status {
    pub clicks: u64,
    pub committed: u64,
    pub batches: u64,
    pub lag_ms: i64,
    pub queue: u64,
    pub drifted: u64,
    pub repaired: u64,
    pub dead: u64,
}

/// The standard output. If the reader closes the output, the demo stops.
pub struct Screen {
    colours: bool,
    started: Instant,
    lines: Mutex<u32>,
    stop: CancellationToken,
}

impl Screen {
    pub fn new(stop: CancellationToken) -> Self {
        let colours = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Self { colours, started: Instant::now(), lines: Mutex::default(), stop }
    }

    pub fn line(&self, text: &str) {
        if writeln!(std::io::stdout(), "{text}").is_err() {
            self.stop.cancel();
        }
    }

    fn paint(&self, colour: &str, text: &str) -> String {
        if self.colours { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub fn bold(&self, text: &str) -> String {
        self.paint(BOLD, text)
    }

    /// Returns the text in green if `good`, otherwise in red.
    pub fn verdict(&self, good: bool, text: &str) -> String {
        self.paint(if good { GREEN } else { RED }, text)
    }

    /// Prints the meaning of each column.
    pub fn legend(&self) {
        for (name, meaning) in COLUMNS {
            self.line(&format!("  {} {meaning}", self.bold(&format!("{name:<10}"))));
        }
        self.line("");
    }

    pub fn status(&self, status: &Status) {
        self.header();
        let Status { clicks, committed, batches, lag_ms, queue, drifted, repaired, dead } = *status;
        let batch = committed.checked_div(batches).unwrap_or_default();
        let [clicks, committed, batch, queue, repaired, dead] =
            [clicks, committed, batch, queue, repaired, dead].map(grouped);
        let lag = grouped(lag_ms.max(0).unsigned_abs());
        let drifted = self.verdict(drifted == 0, &format!("{:>8}", grouped(drifted)));
        let time = self.clock();
        self.line(&format!(
            "{time} {clicks:>9} {committed:>10} {batch:>7} {lag:>8} {queue:>7} {drifted} {repaired:>9} {dead:>6}"
        ));
    }

    fn header(&self) {
        let Ok(mut lines) = self.lines.lock() else { return };
        if lines.is_multiple_of(HEADER_EVERY) {
            let names = format!(
                "{:>6} {:>9} {:>10} {:>7} {:>8} {:>7} {:>8} {:>9} {:>6}",
                "time", "clicks/s", "commits/s", "batch", "lag ms", "queue", "drifted", "repaired", "dead"
            );
            self.line(&self.bold(&names));
        }
        *lines += 1;
    }

    /// Prints a line about something that happened.
    pub fn happened(&self, what: &str, text: &str) {
        let colour = match what {
            "faults" | "tallyd" => YELLOW,
            "warning" => RED,
            _ => CYAN,
        };
        let label = self.paint(colour, &format!("{what:>9}:"));
        self.line(&format!("{} {label} {text}", self.clock()));
    }

    /// Prints an event that needs no attention.
    pub fn routine(&self, what: &str, text: &str) {
        self.line(&self.paint(DIM, &format!("{} {what:>9}: {text}", self.clock())));
    }

    /// Returns the seconds since the start, as text.
    fn clock(&self) -> String {
        format!("{:>4} s", self.started.elapsed().as_secs())
    }
}

/// `12,345`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 counter`, `2 counters`.
pub fn counted(number: u64, noun: &str) -> String {
    format!("{} {noun}{}", grouped(number), if number == 1 { "" } else { "s" })
}

/// `31 days`, `5 h`, `40 s`.
pub fn span(length: Duration) -> String {
    match length.as_secs() {
        seconds if seconds >= 2 * 86_400 => format!("{} days", (seconds + 43_200) / 86_400),
        seconds if seconds >= 2 * 3_600 => format!("{} h", (seconds + 1_800) / 3_600),
        seconds => format!("{seconds} s"),
    }
}
