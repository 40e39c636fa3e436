//! Runs the first samples of the READMEs as a new user does, in a folder with only the package. The root's sample
//! publishes the first event.

use std::fs;
use std::process::Command;

use super::{Example, Package, root, run, site_card};
use crate::common::{World, stdout, target};

/// Returns the document's first sample in that language, with the test world's servers.
fn sample(world: &World, document: &str, language: &str) -> String {
    let text = fs::read_to_string(root().join(document)).unwrap();
    let block = text.split(&format!("```{language}\n")).nth(1).unwrap().split("```").next().unwrap();
    let prefix = &world.config.redis.key_prefix;
    let (end, with_prefix) = match language {
        "js" => (" });", format!(", keyPrefix: '{prefix}' }});")),
        _ => (") as site", format!(", key_prefix=\"{prefix}\") as site")),
    };
    let changes = [
        ("amqp://tallyd_api:choose-another@127.0.0.1:5672/%2f", world.api.amqp.url.expose()),
        ("redis://tallyd_api:choose-another@127.0.0.1:6379/0", world.api.redis.url.expose()),
        (end, &with_prefix),
    ];
    changes.iter().fold(block.to_owned(), |block, (from, to)| {
        assert!(block.contains(from), "{document} has no {from}");
        block.replacen(from, to, 1)
    })
}

/// Runs the document's first sample.
fn run_sample(world: &World, document: &str, package: Package) -> String {
    let folder = package.install();
    let (language, mut command) = match package {
        Package::Node => ("js", Command::new("node")),
        _ => ("python", Example::Python.interpreter()),
    };
    let program = folder.path().join("sample.mjs");
    fs::write(&program, sample(world, document, language)).unwrap();
    run(command.arg(&program).env("PYTHONPATH", folder.path().join("installed")))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_event_of_the_readme_comes_into_mysql_and_redis() {
    let world = World::new("first_event", "").await;
    // With this setting, the daemon loads missing data into an empty Redis, as it does with config.toml.
    let daemon = world.daemon_with(&[("TALLYD__RECONCILE__WATCH_EVERY", "5s")]);
    daemon.logged("\"consuming\"").await;
    daemon.logged("redis-loaded").await;
    site_card::write_for_now(&world).await;
    let said = run_sample(&world, "README.md", Package::Threads);
    assert_eq!(said, "{42: 1}\n", "the example must work on the very first run");
    // The same user likes the same target.
    assert_eq!(run_sample(&world, "clients/python/README.md", Package::Threads), "{42: 1}\n");
    assert_eq!(run_sample(&world, "clients/node/README.md", Package::Node), "Map(1) { '42' => 1 }\n");
    let shown = stdout(&world.tallyd(&["show", "video:42"]));
    assert!(shown.split_whitespace().collect::<Vec<_>>().ends_with(&["like", "1", "1", "1"]), "{shown}");
    assert_eq!(world.counters().await[&target(42)], 1);
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record WHERE user_id = 7 AND is_del = 0").await, 1);
    assert!(daemon.stop().success());
    world.close().await;
}
