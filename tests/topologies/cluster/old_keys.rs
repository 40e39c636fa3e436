//! An older site has counters in a Redis Cluster. tallyd imports them as opening balances, and compares them with its
//! own counters.

use serde_json::Value;

use super::common::{World, stderr};
use super::nodes::{MASTERS, Nodes};

const KEYS: u64 = 60;

fn report(world: &World, arguments: &[&str]) -> Value {
    let output = world.tallyd(&[arguments, &["--format", "json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_an_older_site_are_read_from_every_master() {
    let nodes = Nodes::start().await;
    let mut world = World::new("cluster_old_keys", &nodes.settings("[filter]\n")).await;
    drop(world.publisher().await);
    let keys = format!("{}:post:views:{{id}}", world.name);
    // The test account can run SCAN only if the configuration has the section `[filter]`.
    let import = format!("[[import]]\nname = \"views\"\nkind = \"video\"\nmetric = \"view\"\nkeys = \"{keys}\"\n");
    world.set(&nodes.settings(&format!("[filter]\n[metrics]\nlike = 1\nview = 2\n{import}")));
    let mut places = [0; MASTERS];
    for id in 1..=KEYS {
        let key = keys.replace("{id}", &id.to_string());
        nodes.command(redis::cmd("SET").arg(&key).arg(id * 10)).await;
        places[nodes.place_of(&key).await] += 1;
    }
    assert!(places.iter().all(|keys| *keys > 0), "{places:?}");
    let imported = report(&world, &["import", "views"]);
    assert_eq!((&imported["rows"], &imported["changed"]), (&KEYS.into(), &KEYS.into()), "{imported}");
    let views = i64::try_from(KEYS * (KEYS + 1) * 5).unwrap();
    assert_eq!(world.count("SELECT CAST(SUM(value) AS SIGNED) FROM counter WHERE metric = 2").await, views);
    assert_eq!(report(&world, &["import", "views", "--verify"])["differing"], 0);
    let compared = report(&world, &["admin", "compare", "--keys", &keys, "--metric", "view"]);
    assert_eq!((&compared["checked"], &compared["equal"]), (&KEYS.into(), &KEYS.into()), "{compared}");
}
