//! Replays a body that an operator has corrected in an editor.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Output, Stdio};

use tallyd_core::event::Reason;

use super::{assert_exits, film, ids, put_bodies, take};
use crate::common::{World, stderr, target};

/// Replays dead letter 1 with `script` as the editor and with `answers` on stdin. The script gets the file's name as
/// `$1`.
fn edit(world: &World, script: &str, answers: &str, more: &[&str]) -> Output {
    let path = world.folder.path().join("editor");
    fs::write(&path, format!("#!/bin/sh\nset -eu\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = world.command();
    command.args(["dead", "replay", "--edit", "1"]).args(more).env_remove("VISUAL").env("EDITOR", &path);
    command.env("TMPDIR", world.folder.path().join("tmp"));
    fs::create_dir_all(world.folder.path().join("tmp")).unwrap();
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(answers.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let left = fs::read_dir(world.folder.path().join("tmp")).unwrap().count();
    assert_eq!(left, 0, "the file must be deleted");
    output
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_is_edited_until_it_would_be_taken_and_the_letter_keeps_its_own() {
    let world = World::new("dead_edit", "").await;
    let (_daemon, publisher) = (world.consuming().await, world.publisher().await);
    let original = film(9, 5);
    put_bodies(&world, Reason::UnknownKind, std::slice::from_ref(&original)).await;

    // No answer, the answer "no", an empty file or a failed editor cancels the replay.
    let output = edit(&world, "true", "", &[]);
    assert_exits(&output, 1, "would be refused: unknown-kind: kind is \"film\"");
    assert!(stderr(&output).contains("edit it again? [Y/n] "), "{}", stderr(&output));
    assert_exits(&edit(&world, "sed -i s/film/fil/ \"$1\"", "n\n", &[]), 1, "nothing was replayed");
    assert_exits(&edit(&world, ": > \"$1\"", "", &[]), 1, "nothing was replayed");
    assert_exits(&edit(&world, "exit 3", "", &[]), 1, "the editor failed (exit status: 3)");
    assert_eq!(ids(&world).await, [(1, true)]);

    // The first edit is invalid JSON, and the second edit is valid. The script replaces the file with a new file, as
    // many editors do.
    let seen = world.folder.path().join("seen");
    let script = format!(
        "stat -c %a \"$1\" >> {seen}; cat \"$1\" >> {seen}\n\
         if grep -q film \"$1\"; then echo '{{' > \"$1\"; exit; fi\n\
         echo '{{\"type\":\"like\",\"kind\":\"video\",\"target_id\":9,\"user_id\":5,\"at\":{at}}}' > \"$1.new\"; mv \"$1.new\" \"$1\"",
        seen = seen.display(),
        at = tallyd_base::runtime::clock::now(),
    );
    let output = edit(&world, &script, "\n", &[]);
    assert_exits(&output, 0, "1 of 1 dead letters replayed");
    assert!(stderr(&output).contains("malformed-json"), "{}", stderr(&output));
    let seen = fs::read_to_string(seen).unwrap();
    assert!(seen.starts_with("600\n{\n  \"type\": \"like\",\n"), "{seen}");
    world.drained(&publisher).await;
    assert_eq!(world.counters().await[&target(9)], 1);
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record WHERE user_id = 5").await, 1);
    assert_eq!(ids(&world).await, [(1, false)]);
    assert_eq!(world.tallyd(&["dead", "show", "1", "--raw"]).stdout, original);
    assert_exits(&edit(&world, "true", "", &[]), 64, "was replayed before");

    // If the consumer rejects an edited body, this body becomes a new dead letter.
    let output = edit(&world, "echo '[1]' > \"$1\"", "", &["--force", "--format", "json"]);
    assert_exits(&output, 0, "\"replayed\":1");
    world.drained(&publisher).await;
    assert_eq!(ids(&world).await, [(1, false), (2, true)]);
    assert_eq!(world.tallyd(&["dead", "show", "2", "--raw"]).stdout, b"1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_left_as_it_is_is_sent_byte_by_byte() {
    let world = World::new("dead_unedited", "").await;
    world.publisher().await;
    let body = format!(
        "{{\"type\":\"like\", \"kind\":\"video\",\"target_id\":9,\"user_id\":5,\"at\":{}}} ",
        tallyd_base::runtime::clock::now()
    );
    put_bodies(&world, Reason::ReturnedByBroker, &[body.clone().into_bytes()]).await;
    // The editor's command has arguments.
    let mut command = world.command();
    let output = command.args(["dead", "replay", "--edit", "1"]).env("VISUAL", "test -f").output().unwrap();
    assert_exits(&output, 0, "1 of 1");
    let (delivery, _) = take(&world, 1).await.pop().unwrap();
    assert_eq!(String::from_utf8(delivery.data).unwrap(), body);
    assert_eq!(delivery.routing_key.as_str(), "5");
}
