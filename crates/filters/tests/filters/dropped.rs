//! Tests `tallyd admin filters drop`.

use crate::common::{World, stderr, stdout, target};

use super::{BY_HAND, run, seed, state};

#[tokio::test(flavor = "multi_thread")]
async fn all_filters_are_dropped_once_nobody_keeps_them() {
    let mut world = World::new("filters_drop", BY_HAND).await;
    world.publisher().await;
    for id in [42, 43] {
        seed(&world, target(id), 1..=30).await;
    }
    assert_eq!(run(&world).await.built, 2);
    let dropped = |world: &World, arguments: &[&str]| {
        let output = world.tallyd(&[&["admin", "filters", "drop", "--yes"], arguments].concat());
        (output.status.code().unwrap(), stdout(&output) + &stderr(&output))
    };
    let (code, said) = dropped(&world, &[]);
    assert!(code == 64 && said.contains("[filter] likes_min is 20: set asked = false"), "{said}");
    world.set("");
    let (code, said) = dropped(&world, &[]);
    assert!(code == 75 && said.contains("updated filters within the last 35 minutes"), "{said}");
    let earlier = "UPDATE job_run SET finished_at = finished_at - INTERVAL 36 MINUTE WHERE job = 'filters'";
    sqlx::query(earlier).execute(&world.pool).await.unwrap();

    // Adds the row that `tallyd pause consumer` writes.
    let pause = "INSERT INTO control (task, command, ordered_at, until_at, ordered_by, reason) \
                 VALUES ('consumer', 'pause', NOW(6), NOW(6) + INTERVAL 10 MINUTE, 'test', '')";
    sqlx::query(pause).execute(&world.pool).await.unwrap();
    let (code, said) = dropped(&world, &[]);
    assert!(code == 75 && said.contains("consumer is paused until"), "{said}");
    sqlx::query("DELETE FROM control").execute(&world.pool).await.unwrap();

    let (code, said) = dropped(&world, &["--dry-run"]);
    assert!(code == 0 && said.contains("delete all Bloom filters in Redis: 5 keys"), "{said}");
    assert!(state(&world, target(42)).await.is_some());
    let (code, said) = dropped(&world, &[]);
    assert!(code == 0 && said.contains("5 keys deleted"), "{said}");
    for id in [42, 43] {
        assert_eq!(state(&world, target(id)).await, None);
    }
    assert_eq!(world.cache.filter_epoch().await.unwrap(), "");
    let (code, said) = dropped(&world, &[]);
    assert!(code == 0 && said.contains("0 keys deleted"), "{said}");
}
