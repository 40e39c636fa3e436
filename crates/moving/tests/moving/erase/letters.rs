//! Some dead letters contain the erased user: alone, together with other users, or in a text that tallyd can't decode.

use serde_json::json;
use sqlx::Row;
use tallyd_core::event::Reason;
use tallyd_mysql::Store;
use tallyd_mysql::letters::DeadLetter;

use super::{METRICS, USER, VIDEO, erase, named, report};
use crate::common::World;

fn like(user: u64, video: u64) -> String {
    format!(r#"{{"type":"like","kind":"video","target_id":"{video}","user_id":{user},"at":0}}"#)
}

async fn put(world: &World, bodies: &[String]) {
    let letter = |body: &String| DeadLetter {
        apart: String::new(),
        body: body.clone().into_bytes(),
        headers: "{}".into(),
        reason: Reason::AtOutOfRange.code(),
        error: "at is 0".to_owned(),
        queue: "the test's".to_owned(),
        first_seen: tallyd_base::runtime::clock::now(),
    };
    let letters: Vec<DeadLetter> = bodies.iter().map(letter).collect();
    Store::new(&world.config.mysql, 1).unwrap().keep_dead_letters(&letters).await.unwrap();
}

async fn bodies(world: &World) -> Vec<String> {
    let rows = sqlx::query("SELECT body FROM dead_letter ORDER BY id").fetch_all(&world.pool).await.unwrap();
    rows.iter().map(|row| String::from_utf8(row.get(0)).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_loses_the_erased_events_and_keeps_the_others() {
    let world = World::new("erase_letters", METRICS).await;
    world.publisher().await;
    let (mine, other, third) = (like(USER.0, 3), like(8, 3), like(9, VIDEO));
    let letters = [
        mine.clone(),
        other.clone(),
        format!("[{mine},{other},{third}]"),
        format!("[{mine}, {mine}]"),
        // Letter 3 and this letter differ only in the place of the user's event. When the erase removes this event, the
        // two letters become equal.
        format!("[{other},{mine},{third}]"),
        third.clone(),
    ];
    put(&world, &letters).await;
    sqlx::query("UPDATE dead_letter SET replayed_at = NOW(6) WHERE id = 3").execute(&world.pool).await.unwrap();

    let dry = report(&erase(&world, &["--user", &USER.to_string(), "--dry-run"]), 0);
    assert_eq!((&dry["letters_deleted"], &dry["letters_rewritten"]), (&json!(2), &json!(2)));
    assert_eq!(bodies(&world).await, letters);

    let erased = report(&erase(&world, &["--user", &USER.to_string()]), 0);
    assert_eq!((&erased["letters_deleted"], &erased["letters_rewritten"]), (&json!(2), &json!(2)));
    assert_eq!(bodies(&world).await, [other.clone(), format!("[{other},{third}]"), third]);
    let open = "SELECT COUNT(*) FROM dead_letter WHERE replayed_at IS NULL";
    assert_eq!(world.count(open).await, 3, "an open letter that is merged with a replayed letter must stay open");
    assert_eq!(named(&world, USER.0).await, [] as [String; 0]);

    let erased = report(&erase(&world, &["--target", &format!("video:{VIDEO}")]), 0);
    assert_eq!((&erased["letters_deleted"], &erased["letters_rewritten"]), (&json!(1), &json!(1)));
    assert_eq!(bodies(&world).await, [other.clone(), format!("[{other}]")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_that_only_a_person_can_read_is_named() {
    let world = World::new("erase_unclear", METRICS).await;
    world.publisher().await;
    let letters = [format!("{{\"actor\":{{\"id\":\"{USER}\"}}}}"), format!("user {USER} likes"), "user 7".to_owned()];
    put(&world, &letters).await;
    let erased = report(&erase(&world, &["--user", &USER.to_string()]), 1);
    assert_eq!(erased["unclear_letters"], json!([1, 2]));
    let left = erased["left"].to_string();
    assert!(left.contains("`tallyd dead show 1 2`"), "{left}");
    assert_eq!(bodies(&world).await, letters);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_in_queues_is_counted_and_named() {
    let world = World::new("erase_waiting", METRICS).await;
    let publisher = world.publisher().await;
    let returned = format!("{}.returned", world.name);
    for _ in 0..3 {
        publisher.publish("", &returned, like(USER.0, 3).as_bytes()).await.unwrap();
    }
    let erased = report(&erase(&world, &["--user", &USER.to_string()]), 1);
    assert_eq!(erased["waiting"], json!([{ "queue": returned, "messages": 3 }]));
    assert!(erased["left"].to_string().contains("3 messages wait in"), "{erased}");
}
