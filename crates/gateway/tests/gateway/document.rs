//! Checks the samples and the table of metrics in docs/gateway.md.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use super::common::{World, eventually, root};
use super::{PLAIN, get};

/// Returns the code blocks of `text` that are marked with this language.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let opening = format!("```{language}\n");
    text.split(&opening).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

/// Removes the fields that differ from call to call.
fn plain(mut told: Value) -> Value {
    for (list, field) in [("events", "at"), ("likes", "source")] {
        for entry in told[list].as_array_mut().into_iter().flatten() {
            entry.as_object_mut().unwrap().remove(field);
        }
    }
    told
}

#[tokio::test(flavor = "multi_thread")]
async fn the_samples_of_the_document_are_answered_as_it_says() {
    let text = fs::read_to_string(root().join("docs/gateway.md")).unwrap();
    let commands: Vec<&str> = blocks(&text, "sh").into_iter().filter(|block| block.starts_with("curl")).collect();
    let answers = blocks(&text, "json");
    assert_eq!((commands.len(), answers.len()), (3, 3));
    let world = World::new("gw_document", &format!("{PLAIN}[reconcile]\nwatch_every = \"1s\"\n")).await;
    let daemon = world.daemon();
    daemon.logged("redis-loaded").await;
    let gateway = world.gateway().await;
    for (command, answer) in commands.into_iter().zip(answers) {
        let expected = plain(serde_json::from_str(answer).unwrap());
        let command = command.replace("127.0.0.1:9191", &gateway.address);
        eventually(&format!("{command} is answered: {expected}"), || async {
            let output = tokio::process::Command::new("sh").args(["-ec", &command]).output().await.unwrap();
            serde_json::from_slice(&output.stdout).is_ok_and(|told| plain(told) == expected)
        })
        .await;
    }
    let told = gateway.send(&get("/openapi.json")).await;
    let described: Value =
        serde_json::from_str(&fs::read_to_string(root().join("docs/openapi.json")).unwrap()).unwrap();
    assert_eq!((told.status, told.json()), (200, described));

    let metrics = gateway.get("/metrics").await.body;
    let listed: BTreeSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("| `tallyd_gateway_")?.split('`').next()).collect();
    let found: BTreeSet<&str> =
        metrics.lines().filter_map(|line| line.strip_prefix("# TYPE tallyd_gateway_")?.split(' ').next()).collect();
    assert_eq!(listed, found);
    assert!(gateway.process.stop().success());
}
