//! The daemon writes the site's events in the same way as tallyd's own events. The site's old worker still gets all
//! messages.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{Site, event, now_ms, settings};
use crate::common::ports::free_port;
use crate::common::{Dice, eventually, stdout, target};

#[tokio::test(flavor = "multi_thread")]
async fn a_sites_own_events_are_counted_beside_its_old_worker() {
    let mut site = Site::new("map_traffic", "ms").await;
    let port = free_port();
    site.world.set(&format!("{}[admin]\nlisten = \"127.0.0.1:{port}\"\n", settings(&site.exchange, "ms")));
    let daemon = site.daemon().await;
    let (mut dice, mut likes, begins) = (Dice::of_run(24), BTreeMap::new(), now_ms() - 1_000);
    let (mut bodies, mut messages) = (Vec::new(), 0);
    for number in 0..1_000 {
        let (video, user, liked) = (1 + dice.below(20), 1 + dice.below(50), !dice.percent(40));
        likes.insert((video, user), liked);
        // Many events have the same time in milliseconds. The event that is last in the queue must win.
        bodies.push(event(if liked { "LIKE" } else { "UNLIKE" }, video, user, begins + number / 100));
        if bodies.len() == 1 + usize::try_from(dice.below(3)).unwrap() {
            let body = match bodies.len() {
                1 => bodies.remove(0),
                2 => Value::Array(std::mem::take(&mut bodies)),
                _ => json!({ "events": std::mem::take(&mut bodies) }),
            };
            site.publish(&body).await;
            messages += 1;
        }
    }
    site.publish(&json!(bodies)).await;
    site.publish(&event("VIEW", 3, 9, now_ms())).await;
    let all: i64 = likes.values().map(|liked| i64::from(*liked)).sum();
    let sum = "SELECT CAST(COALESCE(SUM(value), 0) AS SIGNED) FROM counter WHERE metric = 1";
    let views = "SELECT CAST(COALESCE(SUM(value), 0) AS SIGNED) FROM counter WHERE metric = 2 AND slot = 60007";
    eventually("the view is written", || async { site.world.count(views).await == 1 }).await;
    assert_eq!(site.world.count(sum).await, all);
    let rows = "SELECT COUNT(*) FROM like_record WHERE is_del = 0";
    assert_eq!((site.world.count(rows).await, site.world.count("SELECT COUNT(*) FROM dead_letter").await), (all, 0));
    assert_eq!(site.of_the_old_worker().await, messages + 2, "the old worker gets all its messages");
    // The number of the map's partition is far above all other partition numbers. The daemon must also add the likes of
    // this partition to Redis.
    site.world.outbox_added().await;
    let of_video = |video| likes.iter().filter(|((it, _), liked)| *it == video && **liked).count() as i64;
    let expected: BTreeMap<_, _> =
        (1..=20).map(|video| (target(video), of_video(video))).filter(|(_, count)| *count > 0).collect();
    let found = site.world.redis_counters().await;
    assert_eq!(found, expected);
    let report = site.world.reconcile("--full").await;
    assert_eq!((&report["drifted"], &report["counters_off"]), (&json!(0), &json!(0)), "{report}");
    eventually("the status names the map", || async {
        let status = stdout(&site.world.tallyd(&["status"]));
        status.lines().any(|line| line.trim_start().starts_with("map site ") && line.contains("writing"))
    })
    .await;
    assert!(daemon.stop().success());
    site.close().await;
}
