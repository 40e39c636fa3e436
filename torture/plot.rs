//! Draws the daemons' memory over the time of a run. Each process has one line. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::history::Micros;
use crate::resources::Look;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 300.0;
/// Space beside the plot, for the labels of the axes.
const LEFT: f64 = 60.0;
const BELOW: f64 = 36.0;
const ABOVE: f64 = 12.0;

/// Longest time between two measurements of a running process, in microseconds.
const SILENCE_MAX: Micros = 60_000_000;

/// A process with fewer measurements was killed right after its start, and gets no line.
const LOOKS_MIN: usize = 3;

/// Maximum number of steps on an axis.
const STEPS_MAX: f64 = 8.0;

#[expect(clippy::cast_precision_loss, reason = "for people")]
pub fn svg(looks: &[Look]) -> String {
    let (Some(first), Some(last)) = (looks.first(), looks.last()) else { return String::new() };
    let minutes = |at: Micros| (at - first.at) as f64 / 60e6;
    let mebibytes = |look: &Look| look.rss_kib as f64 / 1024.0;
    let (length, most) = (minutes(last.at).max(0.1), looks.iter().map(mebibytes).fold(1.0, f64::max));
    let (step_x, step_y) = (step(length), step(most));
    let top = (most / step_y).ceil() * step_y;
    let x = |minutes: f64| LEFT + minutes / length * (WIDTH - LEFT - 10.0);
    let y = |mebibytes: f64| ABOVE + (1.0 - mebibytes / top) * (HEIGHT - ABOVE - BELOW);

    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <title>Resident memory of each daemon, MiB over minutes</title>\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    for (at, text) in ticks(top, step_y) {
        let at = y(at);
        let _ = writeln!(svg, "<path d=\"M{LEFT} {at:.1}H{:.1}\" stroke=\"#ddd\"/>", WIDTH - 10.0);
        let _ =
            writeln!(svg, "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text} MiB</text>", LEFT - 4.0, at + 4.0);
    }
    for (at, text) in ticks(length, step_x) {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{text} min</text>",
            x(at),
            HEIGHT - BELOW + 16.0
        );
    }
    for (number, looks) in lives(looks).into_iter().filter(|looks| looks.len() >= LOOKS_MIN).enumerate() {
        let points: Vec<String> =
            looks.iter().map(|look| format!("{:.1},{:.1}", x(minutes(look.at)), y(mebibytes(look)))).collect();
        // The factor gives consecutive lines clearly different colours.
        let hue = number * 137 % 360;
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"hsl({hue},70%,40%)\" stroke-width=\"1.2\"/>",
            points.join(" ")
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// Groups the measurements by process. Two processes can have the same id, because the system reuses ids.
fn lives(looks: &[Look]) -> Vec<Vec<&Look>> {
    let mut lives: BTreeMap<u32, Vec<Vec<&Look>>> = BTreeMap::new();
    for look in looks {
        let of_pid = lives.entry(look.pid).or_default();
        match of_pid.last_mut().filter(|life| life.last().is_some_and(|last| look.at - last.at < SILENCE_MAX)) {
            Some(life) => life.push(look),
            None => of_pid.push(vec![look]),
        }
    }
    lives.into_values().flatten().collect()
}

/// Returns the length of a step: 1, 2 or 5 times a power of ten.
fn step(most: f64) -> f64 {
    let mut step = 0.01;
    for factor in [2.0, 2.5, 2.0].into_iter().cycle() {
        if most / step <= STEPS_MAX {
            break;
        }
        step *= factor;
    }
    step
}

fn ticks(most: f64, step: f64) -> impl Iterator<Item = (f64, String)> {
    let at = move |number: u32| f64::from(number) * step;
    (0..)
        .map(at)
        .take_while(move |at| *at <= most * 1.0001)
        .map(move |at| (at, if step < 1.0 { format!("{at:.2}") } else { format!("{at:.0}") }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_is_a_line_from_its_begin_to_its_end() {
        let look = |tens: i64, pid, mebibytes: u64| Look {
            at: tens * 10_000_000,
            pid,
            rss_kib: mebibytes * 1024,
            files: 1,
            threads: 1,
        };
        let looks: Vec<Look> = (0..=60)
            .flat_map(|tens| (tens < 30).then(|| look(tens, 7, 80)).into_iter().chain([look(tens, 8, 60)]))
            .collect();
        let svg = svg(&looks);
        assert_eq!(svg.matches("<polyline").count(), 2, "{svg}");
        assert!(svg.contains(">80 MiB<") && svg.contains(">10 min<") && !svg.contains(">12 min<"), "{svg}");
        let line = svg.lines().find(|line| line.starts_with("<polyline")).unwrap();
        assert!(line.contains("points=\"60.0,12.0 "), "must begin at the left and have its maximum at the top: {line}");
    }

    #[test]
    fn a_number_that_is_given_again_is_another_process() {
        let look = |second: i64| Look { at: second * 1_000_000, pid: 7, rss_kib: 1024, files: 1, threads: 1 };
        let looks: Vec<Look> = (0..20).chain(200..220).map(look).collect();
        assert_eq!(lives(&looks).iter().map(Vec::len).collect::<Vec<_>>(), [20, 20]);
    }

    #[test]
    fn of_nothing_there_is_no_picture() {
        assert_eq!(svg(&[]), "");
    }
}
