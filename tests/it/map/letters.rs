//! Events with invalid fields arrive through a map. Each dead letter contains the JSON pointer of the invalid field,
//! and a replay uses the map again.

use super::{Site, event, now_ms, settings};
use crate::common::{eventually, stderr, stdout};

const OPEN: &str = "SELECT COUNT(*) FROM dead_letter WHERE replayed_at IS NULL";

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_a_dead_letter_and_goes_back_to_the_map() {
    let mut site = Site::new("map_letters", "ms").await;
    let daemon = site.daemon().await;
    let mut film = event("LIKE", 42, 7, now_ms());
    film["object"]["kind"] = 2.into();
    let mut uuid = event("LIKE", 42, 7, now_ms());
    uuid["actor"]["id"] = "018f2c5e-7c3a-7b1e-9d4f-0123456789ab".into();
    let both = serde_json::json!({ "events": [event("LIKE", 42, 8, now_ms()), film] });
    site.publish(&both).await;
    site.publish(&uuid).await;
    eventually("both events are dead-lettered", || async { site.world.count(OPEN).await == 2 }).await;
    let errors: Vec<(String, String, Vec<u8>)> =
        sqlx::query_as("SELECT error, queue, body FROM dead_letter ORDER BY id")
            .fetch_all(&site.world.pool)
            .await
            .unwrap();
    assert!(errors[0].0.starts_with("kind from /object/kind is 2, which is not in its `values`"), "{errors:?}");
    assert!(
        errors[1].0.starts_with("user_id from /actor/id is \"018f2c5e")
            && errors[1].0.contains("a UUID can't be mapped")
    );
    assert_eq!((&errors[0].1, &errors[0].2), (&site.queue(), &film.to_string().into_bytes()));
    let shown = stdout(&site.world.tallyd(&["dead", "show", "1"]));
    assert!(shown.contains("would be refused: unknown-kind: kind from /object/kind"), "{shown}");
    assert!(daemon.stop().success());
    // The test adds the kind to the values of the map.
    let with_films = settings(&site.exchange, "ms").replace("\"1\" = \"video\"", "\"1\" = \"video\", \"2\" = \"film\"");
    site.world.set(&with_films);
    let daemon = site.world.daemon();
    let output = site.world.tallyd(&["dead", "replay", "--all"]);
    assert!(stdout(&output).contains("1 of 2 dead letters replayed"), "{}{}", stdout(&output), stderr(&output));
    let liked = "SELECT COUNT(*) FROM like_record WHERE kind = 2 AND target_id = 42 AND user_id = 7";
    eventually("the like is written", || async { site.world.count(liked).await == 1 }).await;
    assert_eq!(site.world.count(OPEN).await, 1, "the letter with the UUID is left");
    assert!(daemon.stop().success());
    // If the configuration has no map, tallyd can't read the dead letter.
    site.world.set("[kinds]\nvideo = 1\nfilm = 2\n[metrics]\nlike = 1\nview = 2\n");
    let output = site.world.tallyd(&["dead", "replay", "2"]);
    assert!(
        stdout(&output).contains("it arrived through the map site, which is not in the configuration"),
        "{}",
        stdout(&output)
    );
    site.close().await;
}
