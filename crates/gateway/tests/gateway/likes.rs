//! The daemon counts likes here, and a repeated like changes nothing.

use serde_json::{Value, json};

use super::common::gateway::Gateway;
use super::common::proxy::Proxy;
use super::common::{World, eventually};
use super::{PLAIN, like};

async fn likes(gateway: &Gateway, user: u64, ids: &str) -> Value {
    let answer = gateway.get(&format!("/v1/likes?user={user}&kind=video&ids={ids}")).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["likes"].clone()
}

fn liked(id: &str, liked: bool, source: &str) -> Value {
    json!({ "id": id, "liked": liked, "source": source })
}

/// Adds the time `at` to an event.
fn at(event: &str, at: i64) -> String {
    event.replacen('{', &format!("{{\"at\":{at},"), 1)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_like_does_not_win_against_the_unlike_after_it() {
    let settings = format!("{PLAIN}[amqp]\ntimeout_ms = 1500\n[reconcile]\nwatch_every = \"1s\"\n");
    let world = World::new("gw_retried", &settings).await;
    let daemon = world.daemon();
    daemon.logged("redis-loaded").await;
    let (proxy, url) = Proxy::before(world.config.amqp.url.expose()).await;
    let gateway = world.gateway_with(&[("TALLYD__AMQP__URL", url.as_str())]).await;
    assert_eq!(gateway.post(&like("like", 41, 7)).await.status, 202);
    // The broker gets the event, but its confirm is lost.
    proxy.mute();
    let lost = gateway.post(&like("like", 42, 7)).await;
    assert_eq!((lost.status, lost.verdicts()), (503, vec!["unconfirmed".to_owned()]));
    let clicked = lost.json()["events"][0]["at"].as_i64().unwrap();
    proxy.cut();
    assert_eq!(gateway.post(&like("unlike", 42, 7)).await.status, 202);
    assert_eq!(gateway.post(&at(&like("like", 42, 7), clicked)).await.status, 202);
    world.drained(&world.publisher().await).await;
    assert_eq!(likes(&gateway, 7, "41,42").await, json!([liked("41", true, "mysql"), liked("42", false, "mysql")]));
    eventually("the numbers are in Redis", || async {
        let read = gateway.get("/v1/counters?kind=video&ids=41,42").await.json()["counters"].clone();
        let number = |id: &str, like: u64| json!({ "id": id, "source": "redis", "like": like });
        read == json!([number("41", 1), number("42", 0)])
    })
    .await;
    assert!(gateway.process.stop().success());
}
