//! Tests reads from the gateway. If a number is unknown, the answer is never zero.

use serde_json::json;
use tallyd_core::model::BoardPeriod;

use super::PLAIN;
use super::common::proxy::Proxy;
use super::common::{World, lose};
use crate::common::scripts::OnBoard;

#[tokio::test(flavor = "multi_thread")]
async fn numbers_that_redis_lost_come_from_mysql_or_are_unknown() {
    let world = World::new("gw_unknown", PLAIN).await;
    sqlx::query(
        "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES (1, 42, 1, 0, 3, NOW(6))",
    )
    .execute(&world.pool)
    .await
    .unwrap();
    lose(&world).await;
    let (proxy, url) = Proxy::before(world.config.mysql.url.expose()).await;
    let (silent_mysql, silent_url) = Proxy::before(world.config.mysql.url.expose()).await;
    silent_mysql.hold();
    let gateway = world.gateway_with(&[("TALLYD__MYSQL__URL", url.as_str())]).await;
    let read = gateway.get("/v1/counters?kind=video&ids=42,43").await.json();
    let expected = json!([{ "id": "42", "source": "mysql", "like": 3 }, { "id": "43", "source": "mysql", "like": 0 }]);
    assert_eq!(read["counters"], expected);
    proxy.fail();
    let read = gateway.get("/v1/counters?kind=video&ids=42").await.json();
    assert_eq!(read["counters"], json!([{ "id": "42", "source": "unknown", "like": null }]));
    let likes = gateway.get("/v1/likes?user=7&kind=video&ids=42").await;
    assert_eq!((likes.status, likes.code().as_str()), (503, "mysql-unavailable"));
    assert!(likes.head.contains("retry-after: 1"));
    // If MySQL does not answer, the gateway must not report Redis as unreachable.
    let silent = world.gateway_with(&[("TALLYD__MYSQL__URL", silent_url.as_str())]).await;
    let unknown = silent.get("/v1/counters?kind=video&ids=42").await.json();
    assert_eq!(unknown["counters"], json!([{ "id": "42", "source": "unknown", "like": null }]));
    assert!(!silent.process.log().contains("gateway-redis-away"), "{}", silent.process.log());
    assert!(silent.process.stop().success());
    assert!(gateway.process.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_board_has_its_first_members_and_a_members_neighbours() {
    let boards = "[[board]]\nname = \"hot\"\nperiod = \"week\"\n[[board]]\nname = \"hot\"\nperiod = \"total\"\n\
        [[board]]\nname = \"days\"\nperiod = \"day\"\n";
    let world = World::new("gw_boards", boards).await;
    let client = world.api_server();
    for (member, score) in [("a", 5), ("b", 9), ("c", 1), ("d", 7)] {
        for board in ["hot", "days"] {
            client.add_to_board(OnBoard { board, member: member.as_bytes() }, "like", score).await.unwrap();
        }
    }
    let (mysql, url) = Proxy::before(world.config.mysql.url.expose()).await;
    let gateway = world.gateway_with(&[("TALLYD__MYSQL__URL", url.as_str())]).await;
    // Open boards are read from Redis alone.
    mysql.fail();
    let read = gateway.get("/v1/boards/hot?period=total&top=2&around=a&radius=1").await;
    assert_eq!(read.status, 200, "{read:?}");
    let member = |rank: u64, member: &str, score: u64| json!({ "rank": rank, "member": member, "score": score });
    let expected = json!({ "board": "hot", "period": "total", "lost": false, "members": [member(1, "b", 9), member(2, "d", 7)],
        "around": [member(2, "d", 7), member(3, "a", 5), member(4, "c", 1)] });
    assert_eq!(read.json(), expected);
    let current = gateway.get("/v1/boards/days").await.json();
    assert_eq!((current["members"].as_array().unwrap().len(), &current["around"]), (4, &json!(null)), "{current}");
    let at = BoardPeriod { board: "days".to_owned(), period: current["period"].as_str().unwrap().to_owned() };
    world.cache.set_board_lost(&at, None).await.unwrap();
    assert_eq!(gateway.get("/v1/boards/days").await.json()["lost"], json!(true));
    for (path, status, code) in [
        ("/v1/boards/cold", 404, "unknown-board"),
        ("/v1/boards/%ff", 400, "not-utf-8"),
        ("/v1/boards/hot", 400, "no-period"),
        ("/v1/boards/hot?period=2026", 400, "no-period"),
        ("/v1/boards/hot?period=2026-11", 404, "unknown-board"),
        ("/v1/boards/hot?period=total&top=0", 400, "out-of-range"),
        ("/v1/boards/hot?period=total&top=1001", 400, "out-of-range"),
    ] {
        let answer = gateway.get(path).await;
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{path}: {answer:?}");
    }
    assert!(gateway.process.stop().success());
}
