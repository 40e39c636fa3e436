//! If an import crashes at any step, or loses the connection to its source, a later command resumes the import.

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

use tallyd_moving::import::FAULT_POINTS;

use super::{
    Schema, assert_brought_over, block, counters_equal_rows, here, log_of_paused, old_likes, paused_at, report,
    resumed, run, world,
};
use crate::common::proxy::{Proxy, behind};
use crate::common::{World, eventually, signal};

const SIGABRT: i32 = 6;

/// Runs the real program. Fails unless the program crashes at the fault point. Ends the lease, so that another run can
/// begin immediately.
async fn die(world: &World, arguments: &[&str], point: &str) {
    let mut tallyd = world.command();
    let tallyd = tallyd.arg("import").args(arguments).env("TALLYD_FAULT_POINT", point);
    let ended = tallyd.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
    assert_eq!(ended.signal(), Some(SIGABRT), "{point}: {ended}");
    world.end_leases().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_that_dies_at_any_step_goes_on_where_it_was() {
    let numbers = "[[import]]\nname = \"views\"\nkind = \"video\"\nmetric = \"view\"\npage_rows = 20\n\
                   query = \"SELECT post_id AS target, COUNT(*) AS value FROM old_like WHERE post_id > :after_target GROUP BY post_id \
                   ORDER BY post_id LIMIT :rows\"";
    for (place, schema) in Schema::ALL.into_iter().enumerate() {
        let settings = schema.settings(&format!("page_rows = 20\n{numbers}"));
        let world = world(&format!("import_dies{place}"), &settings).await;
        old_likes(&world, (1..=90).map(|user| (user % 30 + 1, user))).await;
        let (of_rows, rest) = FAULT_POINTS.split_at(3);
        let (of_numbers, of_deletions) = rest.split_at(2);
        die(&world, &["old"], of_rows[0]).await;
        for point in &of_rows[1..] {
            die(&world, &["old", "--resume"], point).await;
        }
        let last = report(&world, 0, &["old", "--resume"]);
        // Earlier runs crashed after the first page and after the second page, so the last run reads fewer rows.
        assert!(last["resumed_run"].is_u64() && last["rows"].as_u64().unwrap() < 90, "{last}");
        assert_brought_over(&world).await;
        for point in of_numbers {
            die(&world, &["views"], point).await;
        }
        report(&world, 0, &["views", "--resume"]);
        assert_eq!(world.count("SELECT COUNT(*) FROM counter WHERE metric = 2 AND value = 3").await, 30);
        if schema == Schema::SoftDelete {
            continue;
        }
        run(&world, "DELETE FROM old_like WHERE user_id IN (3, 33, 63, 90)").await;
        let quickly = ["old", "--deletions", "--look-again", "1s", "--yes"];
        die(&world, &quickly, of_deletions[0]).await;
        for point in &of_deletions[1..] {
            die(&world, &[&quickly[..], &["--resume"]].concat(), point).await;
            counters_equal_rows(&world).await;
        }
        report(&world, 0, &[&quickly[..], &["--resume"]].concat());
        assert_brought_over(&world).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_whose_servers_go_away_waits_and_goes_on() {
    let mut world = World::new("import_source", "").await;
    world.publisher().await;
    run(&world, super::TABLE).await;
    old_likes(&world, (1..=3_000).map(|user| (user % 30 + 1, user))).await;
    let (source, url) = Proxy::before(world.config.mysql.url.expose()).await;
    let (redis, redis_url) = Proxy::before(world.config.redis.url.expose()).await;
    let redis_address = behind(&redis.address.to_string());
    let source_block =
        format!("page_rows = 100\nserver = \"site\"\n[server.site]\nurl = \"{url}\"\n[redis]\nurl = \"{redis_url}\"");
    world.set(&block(&Schema::HardDelete.query(), &source_block));
    let import = paused_at(&world, &[], "import:read").await;
    // Redis is unreachable, and the site's server closes each connection after some pages.
    redis.fail();
    source.truncate(30_000);
    signal(&import, "CONT");
    eventually("the import waits for Redis", || async {
        std::fs::read_to_string(log_of_paused(&world)).unwrap().contains("asking the servers whether they are busy")
    })
    .await;
    assert!(here(&world).await.len() < 3_000);
    redis.lead(redis_address);
    let done = resumed(import);
    assert_eq!(done["rows"], 3_000, "{done}");
    assert_brought_over(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_ends_in_its_time_and_goes_on_later() {
    let world = world("import_time", &Schema::Timeless.settings("page_rows = 100")).await;
    old_likes(&world, (1..=1_000).map(|user| (4, user))).await;
    let first = report(&world, 75, &["--run-time", "0s"]);
    assert_eq!((&first["ended"], &first["added"]), (&"time-over".into(), &0.into()), "{first}");
    assert_eq!(first["ended_early"], "its run time was over: --resume continues");
    report(&world, 0, &["--resume"]);
    assert_eq!(
        report(&world, 75, &["--verify", "--run-time", "0s"])["ended_early"],
        "its run time was over: run it again"
    );
    assert_brought_over(&world).await;
    // All runs write the start time of the first run, so the second pass finds all rows by this time.
    assert_eq!(world.count("SELECT COUNT(DISTINCT update_at) FROM like_record").await, 1);
}
