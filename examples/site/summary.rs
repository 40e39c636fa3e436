//! Prints the summary: the clicks, next to the content of MySQL and Redis.

use crate::compare::{Compared, Comparison, View};
use crate::ending::Ended;
use crate::hall::{Hall, Stage};
use crate::model::{TARGETS, USERS};
use crate::play::Played;
use crate::screen::{Screen, counted, grouped};
use crate::traffic::{ARTICLE, VIDEO, name};
use crate::week::Week;

/// Prints the summary. Returns whether everything matches the clicks.
pub fn print(screen: &Screen, played: &Played, ended: &Ended, found: &Comparison) -> bool {
    screen.line("");
    tell(screen, played);
    screen.line("");
    for kind in &found.kinds {
        table(screen, kind);
    }
    for difference in &found.named {
        screen.line(&format!("  {difference}"));
    }
    let stores = found.kinds.iter().flat_map(|found| [&found.rows, &found.counters, &found.redis]);
    let checks = [
        stores.map(|view| view.different).sum::<u64>() == 0,
        repairs(screen, &found.kinds),
        dead_letters(screen, played, found),
        week(screen, played.week.as_ref(), found),
        hall(screen, played.hall.as_ref(), found),
        end(screen, ended),
    ];
    screen.line("");
    let good = checks.iter().all(|check| *check);
    let text = if good {
        "EQUAL: MySQL and Redis match the clicks, to the last like."
    } else {
        "NOT EQUAL: see the differences above, and tallyd.log in the folder of the demo's configuration."
    };
    screen.line(&screen.bold(&screen.verdict(good, text)));
    good
}

fn tell(screen: &Screen, Played { clicks, harm, seconds, .. }: &Played) {
    screen.line(&format!(
        "In {seconds:.0} s {} users clicked {} times on {targets} videos and {targets} articles: likes and unlikes.",
        grouped(USERS),
        grouped(clicks + harm.lost),
        targets = grouped(TARGETS.into())
    ));
    screen.line(&format!(
        "  {:>8} of these clicks were lost before they reached RabbitMQ. MySQL can't know them, so they are not among\n  \
         {:8} \"clicked\" below. Redis had counted them, and tallyd corrected Redis to MySQL's numbers.",
        grouped(harm.lost),
        ""
    ));
    screen
        .line(&format!("  {:>8} likes were counted twice in Redis, and tallyd repaired them.", grouped(harm.doubled)));
}

fn table(screen: &Screen, found: &Compared) {
    let Compared { kind, clicked, rows, counters, redis, .. } = found;
    let name = name(*kind);
    let line = |name: &str, cells: [String; 4]| {
        let [clicked, rows, counters, redis] = cells;
        format!("  {name:<25} {clicked:>10} {rows:>14} {counters:>16} {redis:>12}")
    };
    let heads = ["clicked", "MySQL rows", "MySQL counters", "Redis"].map(str::to_owned);
    screen.line(&screen.bold(&line(&format!("{name}s"), heads)));
    let pairs = [Some(clicked), Some(rows), None, None];
    let pairs = pairs.map(|view| view.map_or_else(|| "-".to_owned(), |view| grouped(view.pairs)));
    screen.line(&line(&format!("pairs of user and {name}"), pairs));
    let all = [clicked, rows, counters, redis];
    screen.line(&line("current likes", all.map(|view| signed(view.likes))));
    screen.line(&line(&format!("{name}s with likes"), all.map(|view| grouped(view.targets))));
    let verdict = |view: &View, width: usize| {
        let text = if view.different == 0 { "EQUAL".to_owned() } else { format!("{} DIFFER", grouped(view.different)) };
        screen.verdict(view.different == 0, &format!("{text:>width$}"))
    };
    let (rows, counters, redis) = (verdict(rows, 14), verdict(counters, 16), verdict(redis, 12));
    screen.line(&format!("  {:<25} {:>10} {rows} {counters} {redis}", "each compared", ""));
    screen.line("");
}

/// The demo's faults change only articles. A repair of a video would show that tallyd counted it wrong.
fn repairs(screen: &Screen, kinds: &[Compared]) -> bool {
    let of = |kind| kinds.iter().filter(|found| found.kind == kind).map(|found| found.repairs).sum::<u64>();
    let good = of(VIDEO) == 0;
    let (videos, articles) = (grouped(of(VIDEO)), grouped(of(ARTICLE)));
    let text = format!(
        "repairs: {videos} of videos, which tallyd counts, and {articles} of articles, which API servers count"
    );
    say(screen, good, &text);
    good
}

fn dead_letters(screen: &Screen, played: &Played, found: &Comparison) -> bool {
    let good = found.dead_letters == played.harm.malformed;
    let sent = counted(played.harm.malformed, "malformed message");
    say(screen, good, &format!("{sent} sent, {} rows in dead_letter", grouped(found.dead_letters)));
    good
}

fn week(screen: &Screen, week: Option<&Week>, found: &Comparison) -> bool {
    let (Some(week), Some(archived)) = (week, &found.archived) else { return true };
    let good = archived.done && archived.different == 0;
    let state = if archived.done { "verified" } else { "NOT VERIFIED" };
    let text = format!(
        "week {}: {} members when it closed, {} in Redis' frozen zset, {} rows archived and {state}, {} different",
        week.period,
        grouped(week.scores.len() as u64),
        grouped(archived.zset as u64),
        grouped(archived.rows as u64),
        grouped(archived.different as u64)
    );
    say(screen, good, &text);
    good
}

fn hall(screen: &Screen, hall: Option<&Hall>, found: &Comparison) -> bool {
    let (Some(hall), Some(different)) = (hall, found.hall) else { return true };
    let good = different == 0 && hall.stage != Stage::Lost;
    let became = match hall.stage {
        Stage::Filled => "never lost: the demo was too short",
        Stage::Lost => "LOST",
        Stage::Restored => "lost and restored",
    };
    let members = counted(hall.scores.len() as u64, "member");
    say(screen, good, &format!("board of all time: {became}, {members}, {} different", grouped(different)));
    good
}

fn end(screen: &Screen, ended: &Ended) -> bool {
    let good = ended.is_good();
    let text = format!(
        "the last dry run of a reconcile found {}; tallyd exited with {}",
        counted(ended.verified.drifted, "drifted counter"),
        ended.daemon
    );
    say(screen, good, &text);
    good
}

fn say(screen: &Screen, good: bool, text: &str) {
    let mark = screen.verdict(good, if good { "   ok" } else { "WRONG" });
    screen.line(&format!("  {mark}  {text}"));
}

fn signed(number: i64) -> String {
    format!("{}{}", if number < 0 { "-" } else { "" }, grouped(number.unsigned_abs()))
}
