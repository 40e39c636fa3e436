//! Tests the gateway's answers to posted events.

use futures_util::StreamExt;
use serde_json::json;
use tallyd_core::model::{Metric, UserId};
use tallyd_core::traceparent::{self, HEADER};

use super::common::{Model, World, as_api, body, eventually, target};
use super::{PLAIN, count, like};

#[tokio::test(flavor = "multi_thread")]
async fn events_are_accepted_once_the_broker_has_them_all() {
    let world = World::new("gw_events", &format!("{PLAIN}[reconcile]\nwatch_every = \"1s\"\n")).await;
    let daemon = world.daemon();
    daemon.logged("redis-loaded").await;
    let gateway = world.gateway().await;
    let views: Vec<String> = (0..1_000).map(|number| count(number % 10 + 1, &format!("e{number}"))).collect();
    let answer = gateway.post(&format!("[{}]", views.join(","))).await;
    assert_eq!((answer.status, answer.verdicts()), (202, vec!["confirmed".to_owned(); 1_000]), "{answer:?}");
    // If a client repeats the request, no event is counted again.
    assert_eq!(gateway.post(&format!("[{}]", views.join(","))).await.status, 202);
    let unread = json!({ "type": "set", "kind": "video", "target_id": 7, "metric": "unread", "value": 5,
        "at": tallyd_base::runtime::clock::now().0 });
    assert_eq!(gateway.post(&unread.to_string()).await.verdicts(), ["confirmed"]);
    let publisher = world.publisher().await;
    world.drained(&publisher).await;
    let views = "SELECT CAST(SUM(value) AS SIGNED) FROM counter WHERE metric = 2";
    assert_eq!(world.count(views).await, 1_000);
    eventually("the gateway returns the numbers", || async {
        let read = gateway.get("/v1/counters?kind=video&ids=7,8,99&metrics=view,unread").await;
        assert_eq!(read.status, 200, "{read:?}");
        let read = read.json();
        read["kind"] == "video"
            && read["counters"][0] == json!({ "id": "7", "source": "redis", "view": 100, "unread": 5 })
            && read["counters"][2] == json!({ "id": "99", "source": "redis", "view": 0, "unread": 0 })
    })
    .await;
    assert!(gateway.process.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn each_event_of_a_list_has_its_verdict_in_its_place() {
    let world = World::new("gw_verdicts", PLAIN).await;
    world.publisher().await;
    let gateway = world.gateway().await;
    let fence = r#"{"type":"fence","fence":1}"#;
    let old = count(1, "old").replace("\"at\":17", "\"at\":15");
    let events = [count(1, "a"), "{}".to_owned(), count(2, "b"), fence.to_owned(), old, like("like", 0, 7)];
    let answer = gateway.post(&format!("[{}]", events.join(","))).await;
    assert_eq!(answer.status, 400, "{answer:?}");
    let told = answer.json()["events"].as_array().unwrap().clone();
    let reasons: Vec<&str> = told.iter().map(|event| event["reason"].as_str().unwrap_or("confirmed")).collect();
    let expected = ["confirmed", "no-type", "confirmed", "unknown-type", "at-too-old", "target-id-out-of-range"];
    assert_eq!(reasons, expected);
    let message = "type is missing, allowed are \"like\", \"unlike\", \"count\", \"set\" and \"reset\"";
    assert_eq!(told[1], json!({ "verdict": "refused", "reason": "no-type", "message": message }));
    assert_eq!(world.unconsumed(&world.broker.queue(0)).await, 1, "accepted events are published");
    assert!(gateway.process.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_api_servers_count_is_published_with_the_scripts_at_and_refused_without() {
    let settings = "[metrics]\nlike = 1\nview = 2\n[gateway]\nrate_likes_max = 1\nrate_window = \"1h\"\n\
        [reconcile]\nwatch_every = \"1s\"\n[[rule]]\nmetric = \"view\"\nwriter = \"api\"\n";
    let world = World::new("gw_counted", &as_api(settings)).await;
    let daemon = world.daemon();
    daemon.logged("redis-loaded").await;
    let (gateway, server) = (world.gateway().await, world.api_server());
    let refused = gateway.post(&like("like", 42, 7)).await;
    assert_eq!(refused.status, 400, "{refused:?}");
    let told = &refused.json()["events"][0];
    assert_eq!(told["reason"], "counted-by-api", "{told}");
    assert!(told["message"].as_str().unwrap().contains("docs/scripts.md"), "{told}");
    let mut model = Model::default();
    for id in [42, 43] {
        let counted = server.count(target(id), UserId(7), true, &[]).await.unwrap();
        let (_, event) = body(&counted.event);
        let sent = gateway.post(std::str::from_utf8(&event).unwrap()).await;
        assert_eq!(
            (sent.status, sent.verdicts()),
            (202, vec!["confirmed".to_owned()]),
            "the script has limited clicks"
        );
        assert_eq!(sent.json()["events"][0], json!({ "verdict": "confirmed", "at": counted.event.at.0 }));
        model.apply(&counted.event);
    }
    let changed = server.add(target(42), Metric(2), 3, "a").await.unwrap().counted().unwrap();
    let repeated = json!({ "type": "count", "kind": "video", "target_id": 42, "metric": "view", "delta": 3,
        "event_id": "a", "at": changed.at.0 });
    assert_eq!(gateway.post(&repeated.to_string()).await.verdicts(), ["confirmed"]);
    world.drained(&world.publisher().await).await;
    world.assert_equals(&model).await;
    assert!(gateway.process.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn where_api_servers_count_their_recent_clicks_come_before_mysql() {
    let world = World::new("gw_recent", &as_api("")).await;
    world.publisher().await;
    let gateway = world.gateway().await;
    world.api_server().like(target(42), UserId(8), &[]).await.unwrap().counted().unwrap();
    let likes = gateway.get("/v1/likes?user=8&kind=video&ids=42,43").await.json();
    let expected = json!([
        { "id": "42", "liked": true, "source": "redis" }, { "id": "43", "liked": false, "source": "mysql" }
    ]);
    assert_eq!(likes, json!({ "user": "8", "kind": "video", "likes": expected }));
    assert!(gateway.process.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_name_the_trace_of_the_request_that_made_them() {
    let traces = ["1", "2"].map(|span| format!("00-4bf92f3577b34da6a3ce929d0e0e4736-000000000000000{span}-01"));
    let world = World::new("gw_trace", PLAIN).await;
    let publisher = world.publisher().await;
    let gateway = world.gateway().await;
    for trace in [traces[0].as_str(), "00-invalid"] {
        let header = format!("traceparent: {trace}\r\nContent-Length");
        let request = gateway.posted(&like("like", 42, 7)).replacen("Content-Length", &header, 1);
        assert_eq!(gateway.send(&request).await.verdicts(), ["confirmed"]);
    }
    let client = world.client();
    tallyd_client::traced(Some(&traces[1]), client.like(target(42), UserId(8))).await.unwrap();
    client.like(target(42), UserId(9)).await.unwrap();
    let (link, queue) = (world.broker.connect("test").await.unwrap(), world.broker.queue(0));
    eventually("all likes are queued", async || publisher.depth(&queue).await.unwrap().messages() == Some(4)).await;
    let consume = link.channel.basic_consume(queue.as_str().into(), "".into(), Default::default(), Default::default());
    let mut consumer = consume.await.unwrap();
    let mut named = Vec::new();
    for _ in 0..4 {
        let delivery = consumer.next().await.unwrap().unwrap();
        let header = delivery.properties.headers().as_ref().and_then(|all| all.inner().get(HEADER));
        let header = header.and_then(|value| value.as_long_string()).map(ToString::to_string);
        named.push(header.filter(|text| traceparent::parse(text).is_some()));
    }
    let [first, second] = traces;
    assert_eq!(named, [Some(first), None, Some(second), None]);
    assert!(gateway.process.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_starts_without_a_card_and_learns_each_later_one() {
    let mut world = World::new("gw_no_card", PLAIN).await;
    let publisher = world.publisher().await;
    let gateway = world.gateway_without_card(&[]).await;
    let read = gateway.get("/v1/counters?kind=video&ids=1").await;
    assert_eq!(read.json()["counters"], json!([{ "id": "1", "source": "unknown", "like": null }]), "{read:?}");
    let likes = gateway.get("/v1/likes?user=7&kind=video&ids=1").await;
    assert_eq!((likes.status, likes.code().as_str()), (503, "no-site-card"));
    let article = like("like", 1, 7).replace("video", "article");
    assert_eq!(gateway.post(&article).await.verdicts(), ["confirmed"], "without a card the daemon checks the names");

    world.write_card().await;
    eventually("the gateway has the card", || async {
        gateway.get("/v1/likes?user=7&kind=video&ids=1").await.status == 200
    })
    .await;
    assert_eq!(gateway.post(&article).await.verdicts(), ["refused"]);

    world.set(&PLAIN.replace("post = 2", "post = 2\narticle = 3"));
    world.write_card().await;
    eventually("the new kind is known", || async { gateway.post(&article).await.status == 202 }).await;
    assert!(gateway.process.stop().success());
    drop(publisher);
}
