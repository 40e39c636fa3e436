//! Finds the metrics and labels of a PromQL expression. promtool checks its syntax.

use std::collections::BTreeSet;

use super::metrics::{ADDED, Metrics};

const WORDS: [&str; 14] = [
    "and",
    "or",
    "unless",
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "bool",
    "offset",
    "inf",
    "Inf",
    "nan",
];

/// Keywords that are followed by a list of labels in parentheses.
const OF_LABELS: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];

#[derive(Default)]
pub struct Asked {
    pub metrics: BTreeSet<String>,
    pub labels: BTreeSet<String>,
    /// One entry for each label of each selector: the metric, the label, and the label's value if the selector allows
    /// only one value.
    pub selected: BTreeSet<(String, String, Option<String>)>,
}

/// Finds the metrics and labels of an expression.
pub fn asked(expression: &str) -> Asked {
    let mut asked = Asked::default();
    let (mut rest, texts) = without_texts(expression);
    while let Some(start) = rest.find(|letter: char| letter.is_ascii_alphanumeric() || "_:{[$".contains(letter)) {
        rest = rest.split_off(start);
        if rest.starts_with('[') {
            rest = rest.split_off(rest.find(']').unwrap());
            continue;
        }
        let end = rest.find(|letter: char| !letter.is_ascii_alphanumeric() && !"_:$".contains(letter));
        let after = rest.split_off(end.unwrap_or(rest.len()));
        let word = std::mem::replace(&mut rest, after);
        let next = rest.trim_start();
        if OF_LABELS.contains(&word.as_str()) && next.starts_with('(') {
            let (labels, after) = next[1..].split_once(')').unwrap();
            asked
                .labels
                .extend(labels.split(',').map(|label| label.trim().to_owned()).filter(|label| !label.is_empty()));
            rest = after.to_owned();
        } else if WORDS.contains(&word.as_str())
            || is_call(next)
            || word.starts_with(|first: char| first.is_ascii_digit())
        {
            // The word is a function, an operator or a number.
        } else {
            if let Some((labels, after)) = next.strip_prefix('{').and_then(|inside| inside.split_once('}')) {
                for selector in labels.split(',').map(str::trim) {
                    let (label, wanted) = selector.split_once(['=', '!']).unwrap();
                    // If the operator is `=`, `wanted` begins with a quote. If the operator is `=~`, `!=` or `!~`,
                    // `wanted` begins with the operator's second character.
                    let value = wanted.strip_prefix('"').filter(|_| !selector.contains('!'));
                    let value =
                        value.map(|number| texts[number.trim_end_matches('"').parse::<usize>().unwrap()].clone());
                    asked.selected.insert((word.clone(), label.to_owned(), value));
                }
                rest = after.to_owned();
            }
            asked.metrics.insert(word);
        }
    }
    asked
}

/// Tells whether the word before `next` is a function or an aggregation.
fn is_call(next: &str) -> bool {
    ["(", "by (", "without ("].iter().any(|opening| next.starts_with(opening))
}

/// Replaces each quoted text by a number. Returns the new expression and the texts.
fn without_texts(expression: &str) -> (String, Vec<String>) {
    let parts: Vec<&str> = expression.split('"').collect();
    let texts: Vec<String> = parts.iter().skip(1).step_by(2).map(|&text| text.to_owned()).collect();
    let outside = parts.iter().step_by(2).enumerate().map(|(number, part)| match number {
        0 => (*part).to_owned(),
        _ => format!("\"{}\"{part}", number - 1),
    });
    (outside.collect(), texts)
}

/// Returns the expression's metrics and labels that the daemon doesn't export. `recorded` has the names of the metrics
/// that Prometheus' recording rules create.
pub fn unknown(expression: &str, metrics: &Metrics, recorded: &BTreeSet<String>) -> Vec<String> {
    let asked = asked(expression);
    let known = |metric: &String| metric == "up" || metrics.contains_key(metric) || recorded.contains(metric);
    let mut unknown: Vec<String> = asked.metrics.iter().filter(|metric| !known(metric)).cloned().collect();
    let all: BTreeSet<&str> =
        metrics.values().flat_map(|labels| labels.keys()).map(String::as_str).chain(ADDED).collect();
    unknown.extend(asked.labels.iter().filter(|label| !all.contains(label.as_str())).cloned());
    for (metric, label, value) in asked.selected {
        if ADDED.contains(&label.as_str()) {
            continue;
        }
        let values = metrics.get(&metric).and_then(|labels| labels.get(&label));
        if values.is_none_or(|values| value.as_ref().is_some_and(|value| !values.contains(value))) {
            unknown.push(format!("{metric}{{{label}={value:?}}}"));
        }
    }
    unknown
}

#[test]
fn names_are_found_in_an_expression() {
    let asked = asked(
        r#"histogram_quantile(0.9, sum by (step, le) (rate(a_bucket{x="b_total", y!~"1|2"}[5m]))) > bool 2 and on (job) c:d == 1e3 unless up"#,
    );
    assert_eq!(asked.metrics.iter().collect::<Vec<_>>(), ["a_bucket", "c:d", "up"]);
    assert_eq!(asked.labels.iter().collect::<Vec<_>>(), ["job", "le", "step"]);
    let selected: Vec<_> = asked.selected.iter().map(|(_, label, value)| (label.as_str(), value.as_deref())).collect();
    assert_eq!(selected, [("x", Some("b_total")), ("y", None)]);
}
