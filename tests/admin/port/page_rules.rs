//! Checks that users of the status page need no mouse and no screen. The tests use axe-core's rules and the keyboard.

use std::path::Path;

use serde_json::Value;
use tallyd_core::model::UserId;

use super::common::browser::Browser;
use super::common::proxy::Proxy;
use super::common::{World, eventually};
use super::page::{shows, unfold};
use super::{ANY, address};

/// Returns the violations of axe-core's rules, each with its elements.
async fn violations(browser: &Browser) -> Value {
    let check = r"axe.run().then(({ violations }) => violations.map(({ id, nodes }) =>
        [id, nodes.map((node) => [node.html, node.failureSummary])]))";
    browser.value(check).await
}

/// Fails if the page violates a rule. Checks light and dark colours, first with the sections unchanged and then with
/// all sections unfolded.
async fn assert_no_violations(browser: &Browser, state: &str) {
    for scheme in ["light", "dark"] {
        browser.show_as(1_200, 900, scheme).await;
        assert_eq!(violations(browser).await, Value::Array(Vec::new()), "{state}, {scheme}");
    }
    unfold(browser).await;
    for (width, scheme) in [(1_200, "light"), (1_200, "dark"), (360, "light")] {
        browser.show_as(width, 900, scheme).await;
        assert_eq!(violations(browser).await, Value::Array(Vec::new()), "{state}, unfolded, {scheme}, {width} wide");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_breaks_none_of_axes_rules_in_any_state() {
    let axe = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/axe/node_modules/axe-core/axe.min.js");
    let axe = std::fs::read_to_string(&axe).expect("axe-core is missing: dev/test admin installs it");
    let world =
        World::new("page_rules", &format!("{ANY}[[board]]\nname = \"likes\"\nperiod = \"week\"\n")).await.hurried();
    let (redis, redis_url) = Proxy::before(world.config.redis.url.expose()).await;
    let daemon = world.daemon_with(&[("TALLYD__REDIS__URL", redis_url.as_str())]);
    let browser = Browser::start().await;
    browser.open(&format!("http://{}/", address(&daemon).await)).await;
    shows(&browser, "#well", "No problems").await;
    let report = world.reconcile("--full").await;
    assert_eq!(report["ended"], "done");
    shows(&browser, "#reconciles-section summary", "last run done").await;
    browser.value(&format!("(() => {{ {axe}\n; return true }})()")).await;
    assert_no_violations(&browser, "healthy").await;

    let publisher = world.publisher().await;
    world.publish(&publisher, &[(UserId(9), b"{".to_vec())]).await;
    shows(&browser, "#dead", "malformed-json").await;
    redis.hold();
    shows(&browser, "#troubles", "redis is unreachable: ").await;
    assert_no_violations(&browser, "with problems").await;
    redis.release();
    daemon.kill();
    shows(&browser, "#state", "The daemon does not answer").await;
    assert_no_violations(&browser, "without a daemon").await;
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sections_are_open_and_have_a_runbook_while_they_have_a_problem() {
    let world = World::new("page_folds", ANY).await.hurried();
    let (redis, redis_url) = Proxy::before(world.config.redis.url.expose()).await;
    let daemon = world.daemon_with(&[("TALLYD__REDIS__URL", redis_url.as_str())]);
    let browser = Browser::start().await;
    browser.open(&format!("http://{}/", address(&daemon).await)).await;
    shows(&browser, "#tile-problems", "none").await;
    let open = "[...document.querySelectorAll('details[open]')].map((section) => section.id)";
    assert_eq!(browser.value(open).await, Value::Array(Vec::new()), "all is well");

    redis.hold();
    shows(&browser, "#tile-problems", "1 serious").await;
    shows(&browser, "#servers-section summary", "! 2 of 3 up").await;
    assert_eq!(browser.value(open).await, serde_json::json!(["servers-section"]));
    let runbook = browser.value("document.querySelector('#troubles a').href").await;
    assert_eq!(runbook, concat!(env!("CARGO_PKG_HOMEPAGE"), "/blob/main/docs/operations/alerts/TallydServerDown.md"));
    redis.release();
    shows(&browser, "#tile-problems", "none").await;
    assert_eq!(browser.value(open).await, Value::Array(Vec::new()), "no problem is left");
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn arrow_keys_read_out_the_points_of_every_plot() {
    let world = World::new("page_keys", ANY).await.hurried();
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    for _ in 0..2 {
        assert_eq!(world.reconcile("--full").await["ended"], "done");
    }
    let browser = Browser::start().await;
    browser.open(&format!("http://{}/", address(&daemon).await)).await;
    shows(&browser, "#state", "Ready: events are written").await;
    shows(&browser, "#plot-drift", "in 2 runs").await;
    let skip = "(document.querySelector('.skip').click(), document.activeElement.id)";
    assert_eq!(browser.value(skip).await, "wrong", "the first link must jump to the problems");
    let points = "document.querySelector('#plot-events [role=slider]').ariaValueMax > 0";
    eventually("the plots have two points", || async { browser.value(points).await == true }).await;
    let press = async |plot: &str, key: &str| {
        let press = format!(
            r"((it) => {{
                it.focus();
                it.dispatchEvent(new KeyboardEvent('keydown', {{ key: '{key}' }}));
                return `${{it.ariaValueNow}} ${{it.ariaValueText}}`;
            }})(document.querySelector('#{plot} [role=slider]'))"
        );
        browser.value(&press).await.as_str().unwrap().to_owned()
    };
    for plot in ["plot-events", "plot-lag", "plot-waiting"] {
        let said = press(plot, "Home").await;
        assert!(said.starts_with("0 ") && said.contains(" UTC: "), "{said}");
        assert!(press(plot, "ArrowRight").await.starts_with("1 "), "{plot}");
        let read = "document.querySelectorAll('.plots .read').length";
        assert_eq!(browser.value(read).await, 3, "a point must be read out in all plots");
    }
    let said = press("plot-drift", "ArrowLeft").await;
    assert!(said.starts_with("0 ") && said.ends_with("full done: 0 of 0 drifted, 0 repaired"), "{said}");
    browser.close().await;
}
