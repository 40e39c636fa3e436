//! Checks that Grafana can load the dashboard, and that each panel has a description.

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};

use super::alerts::recorded;
use super::expressions::unknown;
use super::metrics::metrics;
use super::{list, promtool, read, text};

const ROWS: [&str; 9] = [
    "Overview",
    "Consumer",
    "Queues",
    "Servers",
    "Outbox",
    "Reconcile and other jobs",
    "Boards",
    "Dead letters",
    "Process",
];

fn dashboard() -> Value {
    serde_json::from_str(&read("ops/grafana/tallyd.json")).unwrap()
}

/// Returns all panels except the titles of rows.
fn panels() -> Vec<Value> {
    list(&dashboard(), "panels").iter().filter(|panel| text(panel, "type") != "row").cloned().collect()
}

/// Returns pairs of a panel's title and one of the panel's expressions, in the form that Prometheus receives.
fn expressions() -> Vec<(String, String)> {
    let of = |panel: &Value| {
        let title = text(panel, "title").to_owned();
        let targets = list(panel, "targets").to_vec();
        targets.into_iter().map(move |target| (title.clone(), text(&target, "expr").replace("$__rate_interval", "5m")))
    };
    panels().iter().flat_map(of).collect()
}

#[test]
fn the_dashboard_has_a_row_for_each_task() {
    let rows: Vec<Value> =
        list(&dashboard(), "panels").iter().filter(|panel| text(panel, "type") == "row").cloned().collect();
    assert_eq!(rows.iter().map(|row| text(row, "title")).collect::<Vec<_>>(), ROWS);
}

#[test]
fn every_panel_has_a_description_a_unit_a_legend_and_the_chosen_data_source() {
    let chosen = json!({ "type": "prometheus", "uid": "${datasource}" });
    for panel in panels() {
        let title = text(&panel, "title");
        assert!(text(&panel, "description").ends_with('.'), "{title}: the description must be a sentence");
        let defaults = &panel["fieldConfig"]["defaults"];
        assert!(!text(defaults, "unit").is_empty(), "{title}: no unit");
        assert!(!list(&defaults["thresholds"], "steps").is_empty(), "{title}: no thresholds");
        assert_eq!(panel["datasource"], chosen, "{title}");
        for target in list(&panel, "targets") {
            assert_eq!(target["datasource"], chosen, "{title}");
            let legend = text(target, "legendFormat");
            assert!(!legend.is_empty() || text(&panel, "type") == "stat", "{title}: a curve has no name");
        }
    }
}

#[test]
fn no_two_panels_share_an_id_or_a_place() {
    let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
    for panel in list(&dashboard(), "panels") {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{panel}");
        let place = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(place("x") + place("w") <= 24, "{panel}");
        for cell in (0..place("w")).flat_map(|x| (0..place("h")).map(move |y| (x, y))) {
            assert!(
                cells.insert((place("x") + cell.0, place("y") + cell.1)),
                "{} overlaps with another panel",
                panel["title"]
            );
        }
    }
}

#[test]
fn every_panel_asks_the_chosen_daemons() {
    let dashboard = dashboard();
    let variables: Vec<&str> =
        list(&dashboard["templating"], "list").iter().map(|variable| text(variable, "name")).collect();
    assert_eq!(variables, ["datasource", "job", "instance"]);
    for (title, expression) in expressions() {
        let chosen = expression.matches(r#"{job=~"$job", instance=~"$instance""#).count();
        assert_eq!(chosen, expression.matches('{').count(), "{title}: {expression}");
        assert!(chosen > 0, "{title}: {expression}");
    }
}

/// promtool reads expressions only in rules, so the test makes a rule of each expression.
#[test]
fn prometheus_takes_every_expression_of_the_dashboard() {
    let rule = |(number, (_, expression)): (usize, (String, String))| json!({"record": format!("panel:{number}"), "expr": expression});
    let rules: Vec<Value> = expressions().into_iter().enumerate().map(rule).collect();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.yml");
    // JSON is YAML.
    fs::write(&file, json!({"groups": [{"name": "dashboard", "rules": rules}]}).to_string()).unwrap();
    promtool(&["check", "rules"], &file).unwrap();
}

/// If no panel shows a metric, the daemon does not need to measure it.
#[tokio::test(flavor = "multi_thread")]
async fn the_dashboard_asks_for_all_that_the_daemon_says_and_for_nothing_else() {
    let (metrics, recorded) = (metrics("ops_dashboard").await, recorded());
    let mut shown = String::new();
    for (title, expression) in expressions() {
        let unknown = unknown(&expression, &metrics, &recorded);
        assert!(unknown.is_empty(), "{title}: the daemon doesn't export {unknown:?}");
        shown.push_str(&expression);
    }
    for metric in metrics.keys() {
        let of = metric.strip_suffix("_sum").or(metric.strip_suffix("_count")).unwrap_or(metric);
        assert!(shown.contains(of), "{metric} is on no panel");
    }
}
