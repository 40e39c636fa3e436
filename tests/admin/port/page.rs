//! The status page of the real daemon, in a real browser.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use tallyd_core::model::UserId;

use super::common::browser::Browser;
use super::common::ports::free_port;
use super::common::proxy::Proxy;
use super::common::size::pace;
use super::common::{Dice, World, drift, eventually, target};
use super::{ANY, address, get, like};
use crate::common::scripts::OnBoard;

/// This markup would have a visible effect if the page did not escape it.
const MARKUP: &str = "<img src=x onerror=\"document.title='taken over'\"><b>bold</b>";

/// The folder for screenshots of the page.
fn pictures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target/artifacts")
}

/// Tells whether the page shows this count of committed events.
async fn committed(browser: &Browser, events: u32) -> bool {
    browser.text("#tile-events .note").await == format!("{events} since the start")
}

pub(super) async fn shows(browser: &Browser, selector: &str, text: &str) {
    eventually(&format!("{selector} shows {text}"), || async { browser.text(selector).await.contains(text) }).await;
}

/// Unfolds all sections, as a click on each section does.
pub(super) async fn unfold(browser: &Browser) {
    browser.value("document.querySelectorAll('details').forEach((section) => (section.open = true))").await;
}

/// Fails if the browser's console has a message. If `may_fail` is true, messages about failed requests are allowed.
async fn assert_quiet(browser: &Browser, may_fail: bool) {
    let said = browser.console().await;
    let is_expected = |line: &String| may_fail && line.contains("net::ERR_");
    let wrong: Vec<&String> = said.iter().filter(|line| !is_expected(line)).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Returns by how many pixels the page is wider than a window of this width.
async fn too_wide(browser: &Browser, width: u32, scheme: &str) -> i64 {
    browser.show_as(width, 900, scheme).await;
    let beyond = browser.value("document.documentElement.scrollWidth - document.documentElement.clientWidth").await;
    assert_eq!(browser.value("document.documentElement.clientWidth").await, width);
    beyond.as_i64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_shows_what_is_written_and_what_could_not_be() {
    let settings = format!("{ANY}[[board]]\nname = \"likes\"\nperiod = \"week\"\n");
    let world = World::new("page", &settings).await.hurried();
    let daemon = world.daemon();
    let address = address(&daemon).await;
    let base = format!("http://{address}/");
    let browser = Browser::start().await;
    browser.open(&base).await;
    shows(&browser, "#state", "Ready: events are written").await;
    shows(&browser, "#well", "No problems").await;

    let publisher = world.publisher().await;
    world.publish(&publisher, &[like(42, 1), like(42, 2)]).await;
    eventually("the likes are shown", || committed(&browser, 2)).await;
    world.publish(&publisher, &[like(42, 3), like(43, 1), (UserId(9), b"{".to_vec())]).await;
    eventually("more likes are shown", || committed(&browser, 4)).await;
    shows(&browser, "#dead", "malformed-json").await;
    shows(&browser, "#troubles", "dead letters are open").await;
    shows(&browser, "#troubles code", "tallyd dead list --open").await;
    shows(&browser, "#state", "there is a problem").await;
    unfold(&browser).await;
    shows(&browser, "#partitions", "this process").await;
    shows(&browser, "#boards", "likes").await;
    let report = world.reconcile("--full").await;
    assert_eq!(report["ended"], "done");
    shows(&browser, "#jobs", "✓ done").await;
    shows(&browser, "#reconciles", "full").await;
    let plot = "document.querySelector('#plot-events path')?.getAttribute('d') ?? ''";
    eventually("the plot has points", || async { browser.value(plot).await.as_str().unwrap().contains('M') }).await;
    assert!(browser.text("#plot-lag").await.contains("ms"), "the axis must show its unit");
    let titles = "[...document.querySelectorAll('main time')].every((time) => / UTC$/.test(time.title))";
    assert_eq!(browser.value(titles).await, true, "each displayed time must have its UTC time as title");

    assert_quiet(&browser, false).await;
    let requests = browser.requests().await;
    assert!(requests.iter().any(|url| *url == format!("{base}v1/status")), "{requests:?}");
    // Some requests are for Chromium's own pages, which Chromium showed first.
    for url in requests
        .iter()
        .filter(|url| !url.starts_with("chrome:") && !url.starts_with("chrome-untrusted:") && !url.starts_with("data:"))
    {
        assert!(url.starts_with(&base), "{url}");
    }
    let head = get(&address, "/").await.head;
    for line in
        ["content-security-policy: default-src 'none'; script-src 'sha256-", "nosniff", "cache-control: no-store"]
    {
        assert!(head.contains(line), "no {line} in {head}");
    }
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_a_reason_holds_is_shown_as_text() {
    let world = World::new("page_text", ANY).await.hurried();
    let daemon = world.daemon();
    let address = address(&daemon).await;
    daemon.logged("\"consuming\"").await;
    let report = serde_json::json!({ "error": MARKUP }).to_string();
    let sql = "INSERT INTO job_run (job, mode, owner, started_at, finished_at, outcome, report) \
               VALUES ('reconcile', 'full', ?, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), 'failed', ?)";
    sqlx::query(sql).bind(MARKUP).bind(report).execute(&world.pool).await.unwrap();
    let sql = "INSERT INTO dead_letter (body, headers, reason, error, queue, first_seen) \
               VALUES ('{', '{}', '<b>bold</b>', '', '', UTC_TIMESTAMP(6))";
    sqlx::query(sql).execute(&world.pool).await.unwrap();
    let browser = Browser::start().await;
    browser.open(&format!("http://{address}/")).await;
    unfold(&browser).await;
    shows(&browser, "#jobs", MARKUP).await;
    shows(&browser, "#troubles", MARKUP).await;
    shows(&browser, "#dead", "<b>bold</b>").await;
    assert_eq!(browser.value("document.querySelectorAll('img, b').length").await, 0);
    assert!(!browser.value("document.title").await.as_str().unwrap().contains("taken over"));
    assert_quiet(&browser, false).await;
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_away_stands_out_until_it_is_back() {
    let world = World::new("page_away", ANY).await.hurried();
    let (proxy, mysql) = Proxy::before(world.config.mysql.url.expose()).await;
    let daemon = world.daemon_with(&[("TALLYD__MYSQL__URL", mysql.as_str())]);
    let address = address(&daemon).await;
    let browser = Browser::start().await;
    browser.open(&format!("http://{address}/")).await;
    shows(&browser, "#state", "Ready: events are written").await;
    proxy.hold();
    proxy.cut();
    shows(&browser, "#state", "Not ready: events are not written").await;
    shows(&browser, "#troubles li[data-style=grave]", "mysql is unreachable: ").await;
    shows(&browser, "#servers", "✕ down").await;
    assert!(browser.value("document.title").await.as_str().unwrap().starts_with("✕ Not ready"));
    let first = browser.value("document.querySelector('#troubles li').getBoundingClientRect().bottom").await;
    assert!(first.as_f64().unwrap() < 400.0, "the problem must be visible without scrolling: {first}");
    browser.show_as(1_200, 900, "light").await;
    browser.picture(&pictures().join("status-page-away.png")).await;
    proxy.release();
    shows(&browser, "#state", "Ready: events are written").await;
    shows(&browser, "#well", "No problems").await;
    eventually("no problem is shown", || async { browser.text("#troubles").await.is_empty() }).await;
    assert_quiet(&browser, false).await;
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_says_that_the_daemon_is_gone_and_takes_up_with_the_next_one() {
    let port = free_port();
    let world = World::new("page_gone", &format!("[admin]\nlisten = \"127.0.0.1:{port}\"\n")).await.hurried();
    let daemon = world.daemon();
    let address = address(&daemon).await;
    let publisher = world.publisher().await;
    world.publish(&publisher, &[like(42, 1), like(42, 2)]).await;
    let browser = Browser::start().await;
    browser.open(&format!("http://{address}/")).await;
    eventually("the likes are shown", || committed(&browser, 2)).await;
    let plot = "document.querySelector('#plot-events path')?.getAttribute('d') ?? ''";
    eventually("the plot has points", || async { browser.value(plot).await.as_str().unwrap().contains('M') }).await;
    let former = format!(":{}", daemon.child.id());
    daemon.kill();
    shows(&browser, "#state", "The daemon does not answer").await;
    shows(&browser, "#since", "The values below are from").await;
    assert_eq!(
        browser.value("document.querySelectorAll('.known.stale').length").await,
        2,
        "the head and the tables must be grey"
    );
    assert!(committed(&browser, 2).await, "the page still shows the last known data");
    assert!(browser.text("#owner").await.ends_with(&former));
    browser.show_as(1_200, 900, "light").await;
    browser.picture(&pictures().join("status-page-gone.png")).await;

    let daemon = world.daemon();
    let next = format!(":{}", daemon.child.id());
    eventually("the restarted daemon is shown", || async { browser.text("#owner").await.ends_with(&next) }).await;
    shows(&browser, "#state", "Ready: events are written").await;
    assert_eq!(browser.value("document.querySelectorAll('.stale').length").await, 0);
    assert!(committed(&browser, 0).await, "the restarted daemon's data are shown");
    eventually("the plot marks the start of the restarted daemon", || async {
        browser.value("document.querySelectorAll('#plot-events .started').length").await == 2
    })
    .await;
    let points = browser.value(plot).await;
    assert!(points.as_str().unwrap().contains('M'), "the plot still has the points from before the restart: {points}");
    assert_quiet(&browser, true).await;
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_cant_show_what_it_is_told_doesnt_call_the_daemon_silent() {
    let world = World::new("page_mistake", ANY).await.hurried();
    let daemon = world.daemon();
    let address = address(&daemon).await;
    let browser = Browser::start().await;
    browser.open(&format!("http://{address}/")).await;
    shows(&browser, "#state", "Ready: events are written").await;
    // `window.change` changes the daemon's answers before the page gets them.
    let between = r"(() => {
        const asked = window.fetch;
        window.fetch = async (path, limits) => {
            const told = await (await asked(path, limits)).json();
            window.answered = (window.answered ?? 0) + 1;
            return new Response(JSON.stringify(window.change?.(path, told) ?? told));
        };
        return true;
    })()";
    assert_eq!(browser.value(between).await, true);
    let change = async |script: &str| drop(browser.value(&format!("(window.change = {script}, true)")).await);
    change("(path, told) => path === 'v1/status' ? { ...told, started_at: 1e300 } : told").await;
    shows(&browser, "#state", "Rendering error: reload the page").await;
    shows(&browser, "#since", "Invalid time value").await;
    change("null").await;
    shows(&browser, "#state", "Ready: events are written").await;

    change("(path, told) => path === 'v1/status' ? { ...told, troubles: Array(2).fill({ what: 'twice' }) } : told")
        .await;
    shows(&browser, "#troubles", "twice").await;
    browser.value("(window.answered = 0, true)").await;
    eventually("the page gets another answer", || async { browser.value("window.answered > 3").await == true }).await;
    let lines = browser.value("document.querySelectorAll('#troubles li').length").await;
    assert_eq!(lines, 2, "the page must not add a second row with the same name");

    // The daemon has run for a short time, so the page shows the shortest range. If there are older points, the page
    // shows a longer range.
    assert_eq!(browser.text("#reach").await, "The last 10 minutes");
    for (minutes, words) in [(12, "The last 30 minutes"), (31, "The last hour")] {
        let older = format!("told.map((one) => ({{ ...one, at: one.at - {minutes} * 60e6 }}))");
        change(&format!("(path, told) => path === 'v1/history' ? {older}.concat(told) : told")).await;
        shows(&browser, "#reach", words).await;
        let first = "Number(/M([0-9.]+)/.exec(document.querySelector('#plot-events path').getAttribute('d'))[1])";
        assert!(browser.value(first).await.as_f64().unwrap() >= 52.0, "all points must be within the axes");
    }
    browser.close().await;
}

/// Users click for this duration, divided by the pace of the world. Then the test makes the page's screenshots.
const TRAFFIC_LASTS: Duration = Duration::from_secs(25);

/// Publishes likes and adds to boards at a changing rate, as API servers do.
async fn traffic(world: &World, until: Instant) {
    let client = world.api_server();
    let (mut dice, began) = (Dice::of_run(7), Instant::now());
    let mut user = 0;
    while Instant::now() < until {
        let wave = 20.0 + 15.0 * (began.elapsed().as_secs_f64() / 70.0).sin();
        for _ in 0..wave as u64 + dice.below(12) {
            user += 1;
            let id = 1 + dice.below(400).min(dice.below(400));
            let member = id.to_string();
            client.like(target(id), UserId(user), &[]).await.unwrap();
            for board in ["likes", "rising", "all-time"] {
                client.add_to_board(OnBoard { board, member: member.as_bytes() }, "like", 1).await.unwrap();
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_with_all_that_there_is_fits_phones_and_screens_in_light_and_dark() {
    let settings = format!(
        "{ANY}[amqp]\npartitions = 2\n\
         [reconcile]\nchanged_cron = \"*/20 * * * * *\"\nfull_cron = \"0 0 3 * * *\"\n[archive]\ncron = \"0 10 * * * *\"\n\
         [[board]]\nname = \"likes\"\nperiod = \"week\"\n[[board]]\nname = \"rising\"\nperiod = \"day\"\n\
         [[board]]\nname = \"all-time\"\nperiod = \"total\"\n"
    );
    let mut world = World::new("page_all", &settings).await.hurried();
    world.set(&settings);
    let (redis, redis_url) = Proxy::before(world.config.redis.url.expose()).await;
    let daemon = world.daemon_with(&[("TALLYD__REDIS__URL", redis_url.as_str())]);
    let address = address(&daemon).await;
    daemon.logged("\"consuming\"").await;
    // The daemon's own runs sometimes hold the lock.
    world.succeeds(&["reconcile"]).await;
    let browser = Browser::start().await;
    browser.open(&format!("http://{address}/")).await;
    let lasts = TRAFFIC_LASTS / pace();
    let until = Instant::now() + lasts;
    let drifting = async {
        let mut dice = Dice::of_run(11);
        while Instant::now() < until {
            tokio::time::sleep(lasts / 2).await;
            for id in 0..dice.below(9).saturating_sub(3) {
                drift(&world, target(id + 1), 5).await;
            }
        }
    };
    tokio::join!(traffic(&world, until), drifting);
    world.succeeds(&["reconcile"]).await;
    let publisher = world.publisher().await;
    world.publish(&publisher, &[(UserId(9), b"{".to_vec()), (UserId(9), b"[]".to_vec())]).await;
    shows(&browser, "#dead", "malformed-json").await;
    unfold(&browser).await;
    shows(&browser, "#reconciles", "full").await;
    shows(&browser, "#boards", "all-time").await;
    for (width, scheme) in [(1_400, "light"), (1_200, "light"), (1_400, "dark"), (360, "light"), (360, "dark")] {
        assert_eq!(too_wide(&browser, width, scheme).await, 0, "{width} in {scheme}");
        assert_legible(&browser).await;
        browser.picture(&pictures().join(format!("status-page-{width}-{scheme}.png"))).await;
    }
    redis.hold();
    shows(&browser, "#troubles", "redis is unreachable: ").await;
    for (width, scheme) in [(1_200, "dark"), (360, "light")] {
        assert_eq!(too_wide(&browser, width, scheme).await, 0, "{width} in {scheme}");
        assert_legible(&browser).await;
        browser.picture(&pictures().join(format!("status-page-redis-away-{width}-{scheme}.png"))).await;
    }
    redis.release();
    assert_quiet(&browser, false).await;
    browser.close().await;
}

/// Checks that every text has a contrast of at least 4.5 with its background (WCAG 2.2, 1.4.3).
async fn assert_legible(browser: &Browser) {
    let script = r"(() => {
        const luminance = (colour) => {
            const [red, green, blue] = colour.match(/[\d.]+/g).map(Number).map((part) => {
                const share = part / 255;
                return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
            });
            return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
        };
        const behind = (element) => {
            for (let at = element; at; at = at.parentElement) {
                const colour = getComputedStyle(at).backgroundColor;
                if (!colour.startsWith('rgba(0, 0, 0, 0')) return colour;
            }
            return 'rgb(255, 255, 255)';
        };
        const wrong = [];
        for (const element of document.querySelectorAll('body *')) {
            const texts = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
            if (!texts || !element.getClientRects().length) continue;
            const style = getComputedStyle(element);
            const text = element instanceof SVGElement ? style.fill : style.color;
            const both = [luminance(text), luminance(behind(element))].sort((one, other) => other - one);
            const contrast = (both[0] + 0.05) / (both[1] + 0.05);
            if (contrast < 4.5) wrong.push(`${element.textContent}: ${contrast.toFixed(2)}`);
        }
        return wrong;
    })()";
    assert_eq!(browser.value(script).await, Value::Array(Vec::new()));
}
