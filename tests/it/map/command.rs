//! Tests two uses of `tallyd admin map`: the check of samples without a server, and the removal of a map.

use std::fs;

use serde_json::Value;

use super::{Site, event, now_ms, settings};
use crate::common::servers::SilentLeader;
use crate::common::{eventually, stderr, stdout};

#[tokio::test(flavor = "multi_thread")]
async fn samples_show_what_becomes_of_them_without_a_server() {
    let site = Site::new("map_sample", "ms").await;
    let sample = site.world.folder.path().join("sample.json");
    // The command must work without servers, so the test gives wrong addresses of the servers.
    let alone = |arguments: &[&str]| {
        let mut command = site.world.command();
        for (section, url) in [
            ("MYSQL", "mysql://u@127.0.0.1:1/x"),
            ("REDIS", "redis://127.0.0.1:1"),
            ("AMQP", "amqp://u@127.0.0.1:1/%2f"),
        ] {
            command.env(format!("TALLYD__{section}__URL"), url);
        }
        command.args(["admin", "map", "--sample"]).arg(&sample).args(arguments).output().unwrap()
    };
    let good = event("LIKE", 42, 7, 1_795_251_385_004);
    fs::write(&sample, format!("{good}\n\n{}\n{}\n", event("SHARE", 42, 7, 5), event("VIEW", 42, 7, now_ms())))
        .unwrap();
    let output = alone(&[]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let text = stdout(&output);
    for line in [
        "line 1: like video:42 by user 7 at 2026-11-21T08:56:25.004",
        "line 3: rejected, unknown-type: type from /action is \"SHARE\", which is not in its `values`",
        "line 4: count view of video:42 by +1 at ",
        "2 of 3 events fit the map site",
    ] {
        assert!(text.contains(line), "{line} is not in: {text}");
    }
    let report: Value = serde_json::from_slice(&alone(&["--format", "json"]).stdout).unwrap();
    assert_eq!((&report["taken"], &report["events"][1]["reason"]), (&2.into(), &"unknown-type".into()));
    // This sample is a single JSON value, written over several lines.
    fs::write(&sample, serde_json::to_string_pretty(&serde_json::json!({ "events": [good] })).unwrap()).unwrap();
    let output = alone(&["--name", "site"]);
    assert!(output.status.success() && stdout(&output).contains("1 of 1 events fit"), "{}", stdout(&output));
    assert_eq!(alone(&["--name", "other"]).status.code(), Some(64));
    site.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_map_is_removed_once_nobody_needs_its_queue() {
    let mut site = Site::new("map_remove", "ms").await;
    let remove = ["admin", "map", "remove", "site", "--yes"];
    let assert_exits = |site: &Site, arguments: &[&str], code: i32, said: &str| {
        let output = site.world.tallyd(arguments);
        let text = stdout(&output) + &stderr(&output);
        assert!(output.status.code() == Some(code) && text.contains(said), "{:?}: {text}", output.status);
    };
    assert_exits(&site, &remove, 78, "first remove it on every host");
    let daemon = site.daemon().await;
    site.world.set(settings(&site.exchange, "ms").split("[[map]]").next().unwrap());
    assert_exits(&site, &remove, 75, "a daemon consumes");
    assert!(daemon.stop().success());
    site.publish(&event("LIKE", 42, 7, now_ms())).await;
    // If the configuration has no map for an existing queue, `config check` reports the map.
    let output = site.world.tallyd(&["config", "check"]);
    let text = stdout(&output) + &stderr(&output);
    assert!(text.contains("the map site, introduced by"), "{text}");
    assert_exits(&site, &remove, 75, "has 1 messages");
    assert_exits(&site, &[&remove[..], &["--with-messages", "--dry-run"]].concat(), 0, "delete the queue");
    let queued = async || site.link.depth(&site.queue()).await.unwrap().messages() == Some(1);
    eventually("a dry run changes nothing", queued).await;
    assert_exits(&site, &[&remove[..], &["--with-messages"]].concat(), 0, "the map site is removed");
    assert_eq!(site.world.count("SELECT COUNT(*) FROM map_in_use").await, 0);
    let other = site.world.broker.connect("test").await.unwrap();
    assert!(other.depth(&site.queue()).await.is_err(), "the queue is deleted");
    assert_exits(&site, &remove, 64, "no map named site is in use");
    site.publish(&event("LIKE", 42, 8, now_ms())).await;
    assert_eq!(site.of_the_old_worker().await, 2, "the site continues");
    site.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn map_remove_deletes_no_queue_whose_leader_is_silent() {
    let mut site = Site::new("map_silent", "ms").await;
    let daemon = site.daemon().await;
    assert!(daemon.stop().success());
    site.publish(&event("LIKE", 42, 7, now_ms())).await;
    site.world.set(settings(&site.exchange, "ms").split("[[map]]").next().unwrap());
    let queue = site.queue();
    let silent = SilentLeader::of(&queue);
    for with_messages in [&[][..], &["--with-messages"]] {
        let mut remove = site.world.command();
        remove
            .args(["admin", "map", "remove", "site", "--yes"])
            .args(with_messages)
            .env("TALLYD__AMQP__TIMEOUT_MS", "1500");
        let output = remove.output().unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(75), "{text}");
        assert!(text.contains(&format!("the queue {queue} stays")), "{text}");
    }
    drop(silent);
    assert!(site.world.unconsumed(&queue).await > 0, "the message is still there");
    assert_eq!(site.world.count("SELECT COUNT(*) FROM map_in_use").await, 1);
    site.close().await;
}
