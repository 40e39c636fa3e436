//! Checks the alerts: their syntax, when they fire, and their runbooks.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

use super::expressions::unknown;
use super::metrics::metrics;
use super::{list, path, promtool, read, text, yaml};

const RULES: &str = "ops/prometheus/tallyd.rules.yml";
const TESTS: &str = "ops/prometheus/tallyd.rules.test.yml";
const RUNBOOKS: &str = "docs/operations/alerts";
const MANUAL: &str = "docs/operations/alerts/README.md";

/// Returns all rules: alerts and recording rules.
pub fn rules() -> Vec<Value> {
    list(&yaml(RULES), "groups").iter().flat_map(|group| list(group, "rules").to_vec()).collect()
}

/// Returns the names of the metrics that recording rules make.
pub fn recorded() -> BTreeSet<String> {
    rules().iter().filter_map(|rule| Some(rule["record"].as_str()?.to_owned())).collect()
}

fn alerts() -> Vec<Value> {
    rules().into_iter().filter(|rule| rule["alert"].is_string()).collect()
}

#[test]
fn prometheus_takes_the_rules() {
    promtool(&["check", "rules"], &path(RULES)).unwrap();
}

#[test]
fn every_alert_fires_on_numbers_that_are_too_bad_and_not_on_those_that_nearly_are() {
    promtool(&["test", "rules"], &path(TESTS)).unwrap();
}

#[test]
fn every_alert_has_a_case_that_fires_it_and_one_that_nearly_does() {
    let mut cases: BTreeMap<String, BTreeSet<bool>> = BTreeMap::new();
    for test in list(&yaml(TESTS), "tests") {
        for case in list(test, "alert_rule_test") {
            let (name, fires) = (text(case, "alertname"), !list(case, "exp_alerts").is_empty());
            assert_eq!(text(test, "name"), format!("{name}: {}", if fires { "fires" } else { "near miss" }));
            cases.entry(name.to_owned()).or_default().insert(fires);
        }
    }
    let both = BTreeSet::from([false, true]);
    let wanted: BTreeMap<String, BTreeSet<bool>> =
        alerts().iter().map(|alert| (text(alert, "alert").to_owned(), both.clone())).collect();
    assert_eq!(cases, wanted);
}

#[test]
fn every_alert_says_how_bad_it_is_and_what_has_happened() {
    for alert in alerts() {
        let name = text(&alert, "alert");
        assert!(["critical", "warning"].contains(&text(&alert["labels"], "severity")), "{name}");
        let annotations = &alert["annotations"];
        assert!(text(annotations, "summary").len() < 100, "{name}: the summary must be one line");
        assert!(
            text(annotations, "description").ends_with(['.', ')', '}']),
            "{name}: the description must be sentences"
        );
    }
}

#[test]
fn every_alert_links_to_its_runbook_below_one_address() {
    let address = concat!(env!("CARGO_PKG_HOMEPAGE"), "/blob/main/docs");
    assert!(read(MANUAL).contains(&format!("sed 's|{address}|")), "the manual must say how to replace {address}");
    for alert in alerts() {
        let name = text(&alert, "alert");
        let runbook = format!("{address}/operations/alerts/{name}.md");
        assert_eq!(text(&alert["annotations"], "runbook_url"), runbook);
        assert!(path(RUNBOOKS).join(format!("{name}.md")).exists(), "{runbook} has no section");
    }
}

/// Returns the runbooks. Each pair has an alert's name and the text of the alert's page in the manual.
fn runbooks() -> Vec<(String, String)> {
    let files =
        std::fs::read_dir(path(RUNBOOKS)).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = files.filter(|file| file != "README.md").collect();
    names.sort_unstable();
    let page = |file: String| {
        let text = read(&format!("{RUNBOOKS}/{file}"));
        let (title, body) = text.split_once('\n').unwrap();
        let name = file.trim_end_matches(".md").to_owned();
        assert_eq!(title, format!("# {name}"));
        (name, body.to_owned())
    };
    names.into_iter().map(page).collect()
}

#[test]
fn every_alert_has_a_runbook_and_every_runbook_an_alert() {
    let mut alerts: Vec<String> = alerts().iter().map(|alert| text(alert, "alert").to_owned()).collect();
    alerts.sort_unstable();
    let runbooks: Vec<String> = runbooks().into_iter().map(|(name, _)| name).collect();
    assert_eq!(runbooks, alerts);
}

#[test]
fn every_runbook_says_what_it_means_where_to_look_what_to_do_and_when_it_is_over() {
    for (name, body) in runbooks() {
        for part in ["**Means:**", "**Look:**", "**Resolved:**"] {
            assert_eq!(body.matches(part).count(), 1, "{name}: {part}");
        }
        assert!(body.contains("**Do:**") || body.contains("| do |"), "{name}: the runbook has no step");
    }
}

#[test]
fn runbooks_name_log_events_that_there_are() {
    let listed = read("docs/operations/logs.md");
    for (name, body) in runbooks() {
        for event in body.split("F_EVENT=").skip(1).map(|rest| rest.split([' ', '`', '\n']).next().unwrap()) {
            assert!(
                listed.contains(&format!("\n| `{event}` | ")),
                "{name}: {event} is missing in the table of log events"
            );
        }
    }
}

#[test]
fn runbooks_give_commands_that_there_are() {
    let mut tried = 0;
    for (name, body) in runbooks() {
        let blocks = body.split("```sh\n").skip(1).flat_map(|rest| rest.split("```").next().unwrap().lines());
        let inline = body.split('`').skip(1).step_by(2);
        for command in blocks.chain(inline).filter_map(|line| line.strip_prefix("tallyd ")) {
            let arguments = command.split('#').next().unwrap().split_whitespace();
            let mut program = Command::new(env!("CARGO_BIN_EXE_tallyd"));
            let output = program.args(arguments).arg("--help").output().unwrap();
            assert!(output.status.success(), "{name}: tallyd {command}\n{}", String::from_utf8_lossy(&output.stderr));
            tried += 1;
        }
    }
    assert!(tried > 20, "{tried} commands");
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_and_runbooks_ask_for_what_the_daemon_says() {
    let (metrics, recorded) = (metrics("ops_rules").await, recorded());
    let check = |what: &str, expression: &str| {
        let unknown = unknown(expression, &metrics, &recorded);
        assert!(unknown.is_empty(), "{what}: the daemon doesn't export {unknown:?}");
    };
    for rule in rules() {
        check(&rule.to_string(), text(&rule, "expr"));
    }
    let pages: String = runbooks().into_iter().map(|(_, body)| body).chain([read(MANUAL)]).collect();
    let blocks: Vec<&str> = pages.split("```promql\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(!blocks.is_empty());
    for line in blocks.iter().flat_map(|block| block.lines()) {
        check(line, line);
    }
}
