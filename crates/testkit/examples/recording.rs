//! Draws the output of a run of dev/demo as an animated terminal: `recording <LOG >SVG`. Called by `dev/recording`.

use std::fmt::Write;
use std::io::Read;

const ROWS: usize = 26;
const COLUMNS: usize = 104;
const CELL: (f64, f64) = (7.8, 18.0);
const MARGIN: f64 = 14.0;
/// Each frame is shown for `FRAME_S` seconds. The last frame is shown for `LAST_S` seconds.
const FRAME_S: f64 = 0.35;
const LAST_S: f64 = 8.0;

fn main() -> std::io::Result<()> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    print!("{}", svg(&text));
    Ok(())
}

/// Keeps the line with the column titles (`clicks/s`), the line with the verdict (`EQUAL`), and all lines between them.
/// The other lines are about this machine.
fn lines(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().map(|line| line.trim_end_matches('\r')).collect();
    let first = lines.iter().position(|line| line.contains("clicks/s")).unwrap_or_default();
    let last = lines.iter().rposition(|line| line.contains("EQUAL")).map_or(lines.len(), |place| place + 1);
    lines.get(first..last).unwrap_or_default().to_vec()
}

fn svg(text: &str) -> String {
    let lines = lines(text);
    let scrolls = lines.len().saturating_sub(ROWS);
    let seconds = scrolls as f64 * FRAME_S + LAST_S;
    let (width, height) = (COLUMNS as f64 * CELL.0 + 2.0 * MARGIN, ROWS as f64 * CELL.1 + 2.0 * MARGIN);
    let mut svg = format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0} {height:.0}" role="img">
<title>A run of dev/demo: likes, faults, repairs, and an equal end</title>
<style>
text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2933; white-space: pre }}
.back {{ fill: #f5f7fa; stroke: #cbd2d9 }}
.b {{ font-weight: 600 }} .d {{ fill: #7b8794 }} .r {{ fill: #ba2525 }}
.g {{ fill: #207a43 }} .y {{ fill: #946200 }} .c {{ fill: #0b7285 }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e4e7eb }}
.back {{ fill: #1b232c; stroke: #323f4b }}
.d {{ fill: #8693a0 }} .r {{ fill: #ff8a80 }} .g {{ fill: #63d297 }} .y {{ fill: #f0c15c }} .c {{ fill: #6fd3e3 }}
}}
@keyframes scroll {{
"#
    );
    for scroll in 0..=scrolls {
        let (at, up) = (scroll as f64 * FRAME_S / seconds * 100.0, scroll as f64 * CELL.1);
        let _ = writeln!(svg, "{at:.2}% {{ transform: translateY(-{up}px) }}");
    }
    let up = scrolls as f64 * CELL.1;
    let _ = write!(
        svg,
        "100% {{ transform: translateY(-{up}px) }}\n}}\n\
         .screen {{ animation: scroll {seconds:.1}s step-end infinite }}\n\
         @media (prefers-reduced-motion: reduce) {{ .screen {{ animation: none; transform: translateY(-{up}px) }} }}\n\
         </style>\n\
         <clipPath id=\"window\"><rect y=\"{MARGIN}\" width=\"{width:.0}\" height=\"{:.0}\"/></clipPath>\n\
         <rect class=\"back\" x=\"0.5\" y=\"0.5\" width=\"{:.0}\" height=\"{:.0}\" rx=\"8\"/>\n\
         <g clip-path=\"url(#window)\"><g class=\"screen\">\n",
        height - 2.0 * MARGIN,
        width - 1.0,
        height - 1.0
    );
    for (row, line) in lines.iter().enumerate() {
        let y = MARGIN + (row as f64 + 0.75) * CELL.1;
        let _ = writeln!(svg, "<text x=\"{MARGIN}\" y=\"{y}\" xml:space=\"preserve\">{}</text>", spans(line));
    }
    svg.push_str("</g></g>\n</svg>\n");
    svg
}

/// Converts a line's colours to CSS classes. dev/demo uses only these escape sequences.
fn spans(line: &str) -> String {
    let (mut spans, mut left) = (String::new(), COLUMNS);
    for (place, part) in line.split("\x1b[").enumerate() {
        let (code, text) = if place == 0 { ("0", part) } else { part.split_once('m').unwrap_or(("0", part)) };
        let mut text: String = text.chars().take(left).collect();
        left -= text.chars().count();
        if left == 0 && !text.is_empty() {
            text.pop();
            text.push('…');
        }
        let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let class = match code {
            "1" => "b",
            "2" => "d",
            "31" => "r",
            "32" => "g",
            "33" => "y",
            "36" => "c",
            _ => "",
        };
        if class.is_empty() {
            spans.push_str(&text);
        } else if !text.is_empty() {
            let _ = write!(spans, "<tspan class=\"{class}\">{text}</tspan>");
        }
    }
    spans
}
