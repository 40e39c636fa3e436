//! Tests the packages and the documented samples through a real gateway.

use std::process::Command;

use serde_json::{Value, json};

use super::{Driver, Package, root, run};
use crate::common::{World, eventually};
use crate::stalling::{Stall, Stalling};

const TOKEN: &str = "of-sixteen-or-more-letters";
const SETTINGS: &str = "[metrics]\nlike = 1\nview = 2\n[[rule]]\nmetric = \"like\"\nboard = \"clicked\"\n\
     [[board]]\nname = \"clicked\"\nperiod = \"total\"";

#[tokio::test(flavor = "multi_thread")]
async fn samples_and_packages_agree_with_the_gateway() {
    let world = World::new("samples", SETTINGS).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    assert!(world.tallyd(&["reconcile"]).status.success());
    let gateway = world.gateway_with(&[("TALLYD__GATEWAY__TOKEN", TOKEN)]).await;
    let url = format!("http://{}", gateway.address);

    let samples = root().join("clients/samples");
    for (program, sample, user) in [("sh", "like.sh", "7"), ("php", "like.php", "8"), ("ruby", "like.rb", "9")] {
        let command = |token: &str, kind: &str| {
            let mut command = Command::new(program);
            command.arg(samples.join(sample)).args([kind, "42", user]);
            command.env("TALLYD_GATEWAY", &url).env("TALLYD_TOKEN", token);
            command
        };
        let said = run(&mut command(TOKEN, "video"));
        let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0]["events"][0]["verdict"], "confirmed", "{sample}: {said}");
        assert_eq!(lines[1]["counters"][0]["id"], "42", "{sample}: {said}");
        for (token, kind) in [("another-token-of-some-letters", "video"), (TOKEN, "song")] {
            let output = command(token, kind).output().unwrap();
            assert!(!output.status.success(), "{sample}: {output:?}");
        }
    }
    let likes = "SELECT COUNT(*) FROM like_record WHERE target_id = 42 AND is_del = 0";
    eventually("the samples' likes are in MySQL", || async { world.count(likes).await == 3 }).await;

    for package in [Package::Threads, Package::Asyncio, Package::Node] {
        let folder = package.install();
        let site = package.start(folder.path());
        site.call("open", json!([]), json!({"gateway": url, "token": TOKEN})).await.unwrap();
        eventually("the gateway returns the counts", || async {
            site.done("counts", json!(["video", [42, "43"]])).await == json!([[42, 3], ["43", 0]])
        })
        .await;
        assert_eq!(site.done("counts", json!(["video", [42], "view"])).await, json!([[42, 0]]));
        assert_eq!(site.done("liked", json!(["video", [42, 43], 8])).await, json!([[42, true], [43, false]]));
        let board = site.call("board", json!(["clicked"]), json!({"around": 42})).await.unwrap();
        // Python's driver sends a dict as a list of pairs.
        let in_pairs = || board.as_array()?.iter().find(|pair| pair[0] == "members").map(|pair| &pair[1]);
        let members = board.get("members").or_else(in_pairs).unwrap();
        assert_eq!(members[0], json!({"rank": 1, "member": "42", "score": 3}), "{board}");
        let unknown = site.fails("counts", json!(["song", [1]])).await;
        assert!(unknown.class == "GatewayError" && unknown.message.contains("unknown-kind"), "{unknown:?}");
        publishes(&site, &world, &url).await;
        site.call("open", json!([]), json!({"gateway": url, "token": "wrong"})).await.unwrap();
        assert!(site.fails("board", json!(["clicked"])).await.message.contains("401 (unauthorized)"));
        site.close().await;
    }
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 0);
    gateway.process.stop();
}

/// Without RabbitMQ's address a client publishes over HTTP.
async fn publishes(site: &Driver, world: &World, gateway: &str) {
    let like = |kind: &str| json!({"type": "like", "kind": kind, "target_id": 44, "user_id": 7});
    let unlike = site.done("unlike", json!(["video", 44, 7])).await;
    assert_eq!(site.done("publish", json!([unlike])).await, unlike);
    let partly = site.fails("publish_many", json!([[like("video"), like("song")]])).await;
    assert_eq!((partly.class.as_str(), &partly.event), ("PublishManyError", &json!([])), "{partly:?}");
    assert!(partly.message.contains("1 of 2 events were not confirmed (RefusedError 1)"), "{partly:?}");
    let liked = "SELECT COUNT(*) FROM like_record WHERE target_id = 44 AND user_id = 7 AND is_del = 0";
    eventually("the like is in MySQL", || async { world.count(liked).await == 1 }).await;

    // The gateway publishes the event, but its answer is lost. The client must not send the event again.
    let stalling = Stalling::before(gateway, Stall { after: "event_id", callers: 1 }).await;
    site.call("open", json!([]), json!({"gateway": stalling.url, "token": TOKEN, "deadline_s": 2})).await.unwrap();
    let late = site.fails("count", json!(["video", 45, "view"])).await;
    assert_eq!((late.class.as_str(), stalling.stalled(), stalling.callers()), ("UnconfirmedError", 1, 1), "{late:?}");
    assert_eq!(site.done("publish", json!([late.event])).await, late.event);
}
