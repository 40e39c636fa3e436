//! Prints the summary: the clicks, next to the content of MySQL and Redis.

use crate::compare::{Comparison, View};
use crate::ending::Ended;
use crate::hall::{Hall, Stage};
use crate::model::{USERS, VIDEOS};
use crate::play::Played;
use crate::screen::{Screen, counted, grouped};
use crate::week::Week;

/// Prints the summary. Returns whether everything matches the clicks.
pub fn print(screen: &Screen, played: &Played, ended: &Ended, found: &Comparison) -> bool {
    screen.line("");
    tell(screen, played, ended);
    screen.line("");
    table(screen, found);
    for difference in &found.named {
        screen.line(&format!("  {difference}"));
    }
    screen.line("");
    let checks = [
        [&found.rows, &found.counters, &found.redis].iter().all(|view| view.different == 0),
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

fn tell(screen: &Screen, played: &Played, ended: &Ended) {
    let Played { clicks, harm, repaired, reconciles, .. } = played;
    screen.line(&format!(
        "In {:.0} s {} users clicked {} times on {} videos: likes and unlikes.",
        played.seconds,
        grouped(USERS),
        grouped(clicks + harm.lost),
        grouped(VIDEOS.into())
    ));
    screen.line(&format!(
        "  {:>8} of these clicks were lost before they reached RabbitMQ. MySQL can't know them, so they are not among\n  \
         {:8} \"clicked\" below. Redis had counted them, and tallyd corrected Redis to MySQL's numbers.",
        grouped(harm.lost),
        ""
    ));
    screen
        .line(&format!("  {:>8} likes were counted twice in Redis, and tallyd repaired them.", grouped(harm.doubled)));
    screen.line(&format!(
        "  {:>8} repairs of drifted counters in {}.",
        grouped(repaired + ended.last.repaired),
        counted(reconciles + 1, "reconcile")
    ));
}

fn table(screen: &Screen, found: &Comparison) {
    let Comparison { clicked, rows, counters, redis, .. } = found;
    let line = |name: &str, cells: [String; 4]| {
        let [clicked, rows, counters, redis] = cells;
        format!("  {name:<22} {clicked:>10} {rows:>14} {counters:>16} {redis:>12}")
    };
    let heads = ["clicked", "MySQL rows", "MySQL counters", "Redis"].map(str::to_owned);
    screen.line(&screen.bold(&line("", heads)));
    let pairs = [Some(clicked), Some(rows), None, None];
    let pairs = pairs.map(|view| view.map_or_else(|| "-".to_owned(), |view| grouped(view.pairs)));
    screen.line(&line("pairs of user and video", pairs));
    let all = [clicked, rows, counters, redis];
    screen.line(&line("current likes", all.map(|view| signed(view.likes))));
    screen.line(&line("videos with likes", all.map(|view| grouped(view.videos))));
    let verdict = |view: &View, width: usize| {
        let text = if view.different == 0 { "EQUAL".to_owned() } else { format!("{} DIFFER", grouped(view.different)) };
        screen.verdict(view.different == 0, &format!("{text:>width$}"))
    };
    let (rows, counters, redis) = (verdict(rows, 14), verdict(counters, 16), verdict(redis, 12));
    screen.line(&format!("  {:<22} {:>10} {rows} {counters} {redis}", "each compared", ""));
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
