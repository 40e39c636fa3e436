//! Users continue to like while an import runs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tallyd_core::model::Target;

use super::{Schema, assert_brought_over, here, old_likes, on_site, paused_at, publish, report, resumed, run, world};
use crate::common::{Dice, World, stderr, stdout};

/// Writes an unlike to the site's table, as the site's own worker does.
async fn old_unlike(world: &World, schema: Schema, post: u64, user: u64) {
    let change = match schema {
        Schema::SoftDelete => "UPDATE old_like SET deleted = 1, changed_at = NOW()",
        Schema::HardDelete | Schema::Timeless => "DELETE FROM old_like",
    };
    run(world, &format!("{change} WHERE post_id = {post} AND user_id = {user}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_is_newer_than_a_row_always_wins() {
    for (place, schema) in Schema::ALL.into_iter().enumerate() {
        let world = world(&format!("import_event{place}"), &schema.settings("")).await;
        let publisher = world.publisher().await;
        let daemon = world.daemon();
        old_likes(&world, (1..=100).map(|user| (user % 3 + 1, user))).await;
        // At this point the import has read the rows, but has not written them.
        let import = paused_at(&world, &[], "import:read").await;
        let mut events = Vec::new();
        for user in 1..=10 {
            let post = user % 3 + 1;
            old_unlike(&world, schema, post, user).await;
            events.push((post, user, false));
        }
        // These users like again.
        for user in 1..=3 {
            events.push((user % 3 + 1, user, true));
        }
        old_likes(&world, (1..=3).map(|user| (user % 3 + 1, user))).await;
        old_likes(&world, (201..=220).map(|user| (2, user))).await;
        events.extend((201..=220).map(|user| (2, user, true)));
        publish(&world, &publisher, events).await;
        world.drained(&publisher).await;
        let found = resumed(import);
        assert_eq!((&found["rows"], &found["added"], &found["kept"]), (&100.into(), &90.into(), &10.into()), "{found}");
        assert_brought_over(&world).await;
        assert!(daemon.stop().success());
    }
}

/// Users like and unlike on the site for this number of seconds. For each click, the site's worker changes the site's
/// table, and the site publishes an event.
async fn click(world: &World, schema: Schema, seconds: u64) {
    let (publisher, mut dice) = (world.broker.connect_publisher("test").await.unwrap(), Dice::of_run(5));
    let until = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < until {
        let (post, user, liked) = (1 + dice.below(60), 1 + dice.below(400), dice.percent(60));
        match liked {
            true => old_likes(world, [(post, user)]).await,
            false => old_unlike(world, schema, post, user).await,
        }
        publish(world, &publisher, [(post, user, liked)]).await;
    }
}

async fn redis_equals_counters(world: &World) {
    let mut counters: BTreeMap<Target, i64> = world.counters().await;
    counters.retain(|_, value| *value != 0);
    assert_eq!(world.redis_counters().await, counters);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_site_that_goes_on_liking_is_brought_over_and_loaded() {
    for writer in ["api", "daemon"] {
        let schema = Schema::HardDelete;
        let rule = format!(
            "page_rows = 150\n[[rule]]\nmetric = \"like\"\nwriter = \"{writer}\"\n[reconcile]\nwatch_every = \"1s\"\nrepair_abs_max = 100"
        );
        let world = world(&format!("import_live_{writer}"), &schema.settings(&rule)).await;
        let publisher = world.publisher().await;
        let daemon = world.daemon();
        daemon.logged("redis-loaded").await;
        old_likes(&world, (0..20_000).map(|n| (n % 60 + 1, n / 60 + 1))).await;
        let (import, ()) = tokio::join!(
            async { tokio::task::block_in_place(|| report(&world, 0, &[])) },
            // The clicks run at the same time as the import, on other connections.
            click(&world, schema, 1)
        );
        assert!(import["rows"].as_u64().unwrap() > 15_000, "{import}");
        report(&world, 0, &["--deletions", "--look-again", "2s", "--yes"]);
        world.drained(&publisher).await;
        assert_brought_over(&world).await;
        // Redis does not have the imported likes. For a reconcile this is a large difference, which an operator must
        // check.
        let limited = world.tallyd(&["reconcile", "--full"]);
        assert_eq!(limited.status.code(), Some(1), "{}", stdout(&limited));
        // docs/moving-reference.md recommends this command.
        let loaded = world.tallyd(&["reconcile", "--reload"]);
        assert!(loaded.status.success(), "{}", stderr(&loaded));
        world.outbox_added().await;
        redis_equals_counters(&world).await;
        let exact = world.reconcile("--full").await;
        assert_eq!((&exact["drifted"], &exact["counters_off"]), (&0.into(), &0.into()), "{exact}");
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_finds_nothing_while_both_sides_change() {
    let schema = Schema::SoftDelete;
    let world = world("import_verify_live", &schema.settings("page_rows = 1000")).await;
    let publisher = world.publisher().await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    old_likes(&world, (0..20_000).map(|n| (n % 60 + 1, n / 60 + 1))).await;
    report(&world, 0, &[]);
    let clicks = click(&world, schema, 8);
    let verified = async {
        // The command runs while users click.
        let mut command = world.command();
        command.args(["import", "--verify"]);
        tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
    };
    let (output, ()) = tokio::join!(verified, clicks);
    assert_eq!(output.status.code(), Some(0), "{} {}", stdout(&output), stderr(&output));
    world.drained(&publisher).await;
    assert_eq!(here(&world).await, on_site(&world).await);
}
