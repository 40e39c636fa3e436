//! Tests clients while all servers work: clicks, reads, and reads of data that Redis has lost.

use redis::AsyncCommands;
use serde_json::Value;
use tallyd_core::model::UserId;

use super::common::{Dice, World, as_api, eventually, lose, target};
use super::example::{Example, on_board, outcome, three_truths};

/// A double can't distinguish this integer from the next smaller integer. No smaller positive integer has this problem.
const ODD: &str = "9007199254740993";
const NEIGHBOUR: &str = "9007199254740992";
const LAST: &str = "9223372036854775807";

async fn flush_scripts(world: &World) {
    let () = redis::cmd("SCRIPT").arg("FLUSH").query_async(&mut world.redis().await).await.unwrap();
}

/// Deletes the recent clicks from Redis. Normally they expire after some minutes.
async fn forget_clicks(world: &World) {
    let mut redis = world.redis().await;
    for bucket in 0..world.cache.keys.buckets() {
        let keys = world.cache.keys.recent("video", bucket);
        let () = redis::cmd("UNLINK").arg(&keys).query_async(&mut redis).await.unwrap();
    }
}

async fn all_is_written(world: &World) {
    eventually("all three agree", || async {
        let [redis, counters, records] = three_truths(world).await;
        redis == counters && counters == records
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clicks_and_reads_of_the_clients_end_in_three_equal_numbers() {
    for example in Example::ALL {
        let world = World::new(&format!("client_{}", example.name()), &as_api("[metrics]\nlike = 1\nview = 2")).await;
        let daemon = world.daemon();
        daemon.logged("\"consuming\"").await;
        assert!(world.tallyd(&["reconcile"]).status.success());
        clicks(example, &world).await;
        what_mysql_says(example, &world).await;
        unknown_numbers(example, &world).await;
        other_numbers(example, &world).await;
        assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 0);
        let report = world.report(&["reconcile", "--dry-run"]);
        assert_eq!((&report["drifted"], &report["counters_off"]), (&0.into(), &0.into()), "{report}");
        assert!(daemon.stop().success());
    }
}

async fn clicks(example: Example, world: &World) {
    let ids = ["42", "43", NEIGHBOUR, ODD, LAST];
    assert_eq!(example.lines(world, &[&["--read", "video"], &ids[..]].concat()), ["0"; 5]);
    let first = example.click(world, &["video", "42", "1"]);
    assert_eq!(outcome(&first), (true, Some(1)));
    // The user clicks again after Redis has lost its scripts.
    flush_scripts(world).await;
    let again = example.click(world, &["video", "42", "1"]);
    assert_eq!(outcome(&again), (false, Some(1)));
    assert_eq!(again["at"], first["at"], "the client returns the same event again");
    assert_eq!(outcome(&example.click(world, &["video", "42", LAST])), (true, Some(2)));
    assert_eq!(outcome(&example.click(world, &["video", ODD, ODD])), (true, Some(1)));
    assert_eq!(outcome(&example.click(world, &["video", LAST, LAST])), (true, Some(1)));
    let unlike = example.click(world, &["--unlike", "video", "42", "1"]);
    assert_eq!((outcome(&unlike), &unlike["type"]), ((true, Some(1)), &Value::from("unlike")));
    flush_scripts(world).await;
    assert_eq!(outcome(&example.click(world, &["--unlike", "video", "42", "1"])), (false, Some(1)));
    assert_eq!(example.lines(world, &[&["--read", "video"], &ids[..]].concat()), ["1", "0", "0", "1", "1"]);
    let liked = |user| example.lines(world, &[&["--liked-by", user, "video"], &ids[..]].concat());
    assert_eq!(liked(LAST), ["yes", "no", "no", "no", "yes"]);
    assert_eq!(liked(ODD), ["no", "no", "no", "yes", "no"]);
    assert_eq!(liked("1"), ["no"; 5]);
    assert_eq!((on_board(world, 42).await, on_board(world, 43).await), ([Some(1); 2], [None; 2]));
    all_is_written(world).await;
}

async fn what_mysql_says(example: Example, world: &World) {
    forget_clicks(world).await;
    let ids = ["42", "43", NEIGHBOUR, ODD, LAST];
    let liked = |user| example.lines(world, &[&["--liked-by", user, "video"], &ids[..]].concat());
    assert_eq!(liked(LAST), ["yes", "no", "no", "no", "yes"]);
    assert_eq!(liked(ODD), ["no", "no", "no", "yes", "no"]);
    assert_eq!(outcome(&example.click(world, &["video", ODD, ODD])), (false, Some(1)), "MySQL has this like already");
    assert_eq!(outcome(&example.click(world, &["--unlike", "video", "42", "1"])), (false, Some(1)));
    // Redis' clock is behind the time in the row.
    let ahead = "UPDATE like_record SET update_at = update_at + INTERVAL 2 MINUTE WHERE target_id = 42 AND is_del = 0";
    sqlx::query(ahead).execute(&world.pool).await.unwrap();
    assert_eq!(outcome(&example.click(world, &["--unlike", "video", "42", LAST])), (true, Some(0)));
    assert_eq!(outcome(&example.click(world, &["video", ODD, NEIGHBOUR])), (true, Some(2)));
    assert_eq!(on_board(world, 42).await, [None; 2], "no user likes it any more");
    all_is_written(world).await;
    if example == Example::Python {
        ids_as_numbers(world).await;
    }
}

/// Python has integers of any size, so its ids can be integers. Checks the answers of MySQL and of Redis.
async fn ids_as_numbers(world: &World) {
    let read = format!(
        "print(like.liked(server, 'video', {ODD}, [{ODD}, {NEIGHBOUR}, 43]), like.read_or_ask(server, 'video', [{ODD}, 43]))"
    );
    for _ in 0..2 {
        forget_clicks(world).await;
        assert_eq!(Example::Python.program(world, &[], &read), "[True, False, False] [2, 0]\n");
        // The click changes nothing, because MySQL already has the like.
        let click =
            format!("event, changed = like.click(server, 'like', 'video', {ODD}, {ODD})\nprint(changed)\n{read}");
        assert_eq!(
            Example::Python.program(world, &[("CLICKS_MAX", "9")], &click),
            "False\n[True, False, False] [2, 0]\n"
        );
    }
    let unknown = format!("print(like.likes_in_mysql('video', [{ODD}, 43]), like.wait_ms(server, {ODD}))");
    assert_eq!(Example::Python.program(world, &[], &unknown), format!("{{'{ODD}': 2, '43': 0}} 0\n"));
    let refused = "for bad in (0, -1, True, 1.0, 2**63, '042', None):\n  try: like.liked(server, 'video', 7, [bad])\n  except like.Refused as error: print(error.reason)";
    assert_eq!(Example::Python.program(world, &[], refused), "target-id-out-of-range\n".repeat(7));
}

async fn unknown_numbers(example: Example, world: &World) {
    lose(world).await;
    let ids = ["42", ODD, LAST];
    let read = |option: &str| example.lines(world, &[&["--read", option, "video"], &ids[..]].concat());
    assert_eq!(example.lines(world, &["--read", "video", "42", ODD, LAST]), ["unknown"; 3]);
    assert_eq!(read("--mysql"), ["0", "2", "1"]);
    let missing: Vec<String> =
        redis::cmd("SMEMBERS").arg(world.cache.keys.missing()).query_async(&mut world.redis().await).await.unwrap();
    assert!(!missing.is_empty() && missing.iter().all(|name| name.starts_with("video:")), "{missing:?}");
    // The click counts, but the target's count is unknown.
    assert_eq!(outcome(&example.click(world, &["video", "42", "5"])), (true, None));
    eventually("the like is in MySQL", || async {
        world.count("SELECT COUNT(*) FROM like_record WHERE user_id = 5 AND is_del = 0").await == 1
    })
    .await;
    assert!(world.tallyd(&["reconcile"]).status.success());
    assert_eq!(example.lines(world, &["--read", "video", "42", ODD, LAST]), ["1", "2", "1"]);
    all_is_written(world).await;
}

async fn other_numbers(example: Example, world: &World) {
    let event: Value = serde_json::from_str(&example.lines(world, &["--count", "view=3", "video", ODD])[0]).unwrap();
    assert_eq!((&event["type"], &event["target_id"]), (&"count".into(), &ODD.into()));
    // An event with the same id and time is the same event. An event with another id is another event.
    let (id, at) = (event["event_id"].as_str().unwrap(), event["at"].to_string());
    let again = example.lines(world, &["--count", "view=3", "--event-id", id, "--at", &at, "video", ODD]);
    assert_eq!(serde_json::from_str::<Value>(&again[0]).unwrap(), event);
    example.lines(world, &["--count", "view=-1", "video", ODD]);
    if example == Example::Node {
        lost_counts(world);
    }
    eventually("the views are in MySQL", || async {
        world
            .count("SELECT CAST(COALESCE(SUM(value), 0) AS SIGNED) FROM counter WHERE metric = 2 AND target_id = 9007199254740993")
            .await
            == 2
    })
    .await;
    if example == Example::Node {
        eventually("each view is counted once", || async {
            world.count("SELECT CAST(COALESCE(SUM(value), 0) AS SIGNED) FROM counter WHERE target_id = 77").await == 4
        })
        .await;
    }
    example.refused(world, &[], &["--count", "like=1", "video", ODD]);
}

/// After a lost confirm, the caller can publish again, either with the same id and time or with the event in the error.
fn lost_counts(world: &World) {
    let program = "
        const astray = new Client({ amqpUrl: env.AMQP_URL, exchange: 'tally.nowhere' });
        const at = String(Date.now() * 1_000);
        const error = await astray.add('video', '77', 'view', 4, 'mine', at).catch((error) => error);
        await client.publish(error.event);
        await client.add('video', '77', 'view', 4, 'mine', at);
        await astray.close();
        console.log(error.event.event_id, String(error.event.at) === at);";
    assert_eq!(Example::Node.program(world, &[], program), "mine true\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_through_the_clients_comes_into_the_bloom_filter() {
    let settings = "[filter]\nlikes_min = 2\nasked = true\ncron = \"* * * * * *\"\n";
    for example in Example::ALL {
        let world = World::new(&format!("client_filter_{}", example.name()), &as_api(settings)).await;
        let daemon = world.daemon();
        daemon.logged("\"consuming\"").await;
        assert!(world.tallyd(&["reconcile"]).status.success());
        let click = |user: &str| {
            let output = example.run(&world, &[("FILTERS", "1")], &["video", "42", user]);
            assert!(output.status.success(), "{example:?}: {}", super::common::stderr(&output));
        };
        click("1");
        click("2");
        let [filter, config, added] = world.cache.keys.filter("video", target(42));
        eventually("the target has a filter", || async { world.redis().await.exists(&filter).await.unwrap() }).await;
        click("9007199254740993");
        eventually("the daemon has set the user's bits", || async {
            let mut redis = world.redis().await;
            let waiting: Option<i64> = redis.hget(&config, "waiting").await.unwrap();
            let noted: i64 = redis.scard(&added).await.unwrap();
            waiting.is_none_or(|waiting| waiting == 0) && noted == 0
        })
        .await;
        all_is_written(&world).await;
        forget_clicks(&world).await;
        let client = world.client();
        for (user, likes) in [(1, true), (2, true), (9_007_199_254_740_993, true), (5, false)] {
            assert_eq!(client.liked(UserId(user), &[target(42)]).await.unwrap(), [likes], "{example:?}: {user}");
        }
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_two_languages_that_click_on_the_same_targets_count_each_click_once() {
    let world = World::new("client_both", &as_api("")).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    assert!(world.tallyd(&["reconcile"]).status.success());
    let mut dice = Dice::of_run(7);
    for round in 0..6 {
        if round % 2 == 1 {
            flush_scripts(&world).await;
        }
        let clicks: Vec<(Example, Vec<String>)> = (0..6)
            .map(|_| {
                let example = Example::ALL[dice.below(2) as usize];
                let ids = [format!("{}", 42 + dice.below(2)), format!("{}", 1 + dice.below(3))];
                let mut arguments = vec!["video".to_owned()];
                if dice.percent(40) {
                    arguments.insert(0, "--unlike".to_owned());
                }
                (example, [arguments, ids.to_vec()].concat())
            })
            .collect();
        std::thread::scope(|scope| {
            for (example, arguments) in &clicks {
                let world = &world;
                scope.spawn(move || {
                    example.click(world, &arguments.iter().map(String::as_str).collect::<Vec<_>>());
                });
            }
        });
    }
    all_is_written(&world).await;
    assert_eq!(world.report(&["reconcile", "--dry-run"])["drifted"], 0);
}
