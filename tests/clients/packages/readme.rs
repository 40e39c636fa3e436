//! Runs the README's first example as a new user does, in a folder with only the package. The example publishes the
//! first event.

use std::fs;

use super::{Example, Package, root, run, site_card};
use crate::common::{World, stdout, target};

/// Returns README.md's Python block with the test world's servers.
fn first_event(world: &World) -> String {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let block = readme.split("```python\n").nth(1).unwrap().split("```").next().unwrap();
    let prefix = format!(", key_prefix=\"{}\") as site", world.config.redis.key_prefix);
    let changes = [
        ("amqp://tallyd_api:choose-another@127.0.0.1:5672/%2f", world.api.amqp.url.expose()),
        ("redis://tallyd_api:choose-another@127.0.0.1:6379/0", world.api.redis.url.expose()),
        (") as site", &prefix),
    ];
    changes.iter().fold(block.to_owned(), |block, (from, to)| {
        assert!(block.contains(from), "README.md has no {from}");
        block.replacen(from, to, 1)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_event_of_the_readme_comes_into_mysql_and_redis() {
    let world = World::new("first_event", "").await;
    // With this setting, the daemon loads missing data into an empty Redis, as it does with config.toml.
    let daemon = world.daemon_with(&[("TALLYD__RECONCILE__WATCH_EVERY", "5s")]);
    daemon.logged("\"consuming\"").await;
    daemon.logged("redis-loaded").await;
    site_card::write_for_now(&world).await;
    let folder = Package::Threads.install();
    let program = folder.path().join("first.py");
    fs::write(&program, first_event(&world)).unwrap();
    let mut python = Example::Python.interpreter();
    let said = run(python.arg(&program).env("PYTHONPATH", folder.path().join("installed")));
    assert_eq!(said, "{42: 1}\n", "the example must work on the very first run");
    let shown = stdout(&world.tallyd(&["show", "video:42"]));
    assert!(shown.split_whitespace().collect::<Vec<_>>().ends_with(&["like", "1", "1", "1"]), "{shown}");
    assert_eq!(world.counters().await[&target(42)], 1);
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record WHERE user_id = 7 AND is_del = 0").await, 1);
    assert!(daemon.stop().success());
    world.close().await;
}
