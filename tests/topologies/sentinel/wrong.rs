//! Tests sentinels with wrong answers, and wrong configurations of sentinels.

use std::process::Output;

use super::common::{World, stderr, stdout};
use super::group::Group;

#[track_caller]
fn says(output: &Output, code: i32, said: &str) {
    let all = format!("{}{}", stdout(output), stderr(output));
    assert_eq!(output.status.code(), Some(code), "{all}");
    assert!(all.contains(said), "\"{said}\" is not in: {all}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_sentinels_is_said() {
    let group = Group::start().await;
    let world = World::new("sentinel_wrong", &group.settings("")).await;
    let check = |environment: &[(&str, &str)]| {
        world.command().envs(environment.iter().copied()).args(["config", "check"]).output().unwrap()
    };
    let master = group.master().await.unwrap();
    says(&check(&[]), 0, &format!("{} is the master tally, according to its sentinels", group.server(master)));
    // The command succeeds even if one of three sentinels is unreachable.
    let [one, two, _] = group.sentinels().try_into().unwrap();
    let away = format!("[\"127.0.0.1:1\", \"{one}\", \"{two}\"]");
    says(&check(&[("TALLYD__REDIS__SENTINELS", &away)]), 0, "is the master tally");

    says(&check(&[("TALLYD__REDIS__SENTINELS", "[\"127.0.0.1:1\"]")]), 75, "127.0.0.1:1: ");
    let unknown = [("TALLYD__REDIS__SENTINEL_MASTER", "nobody")];
    says(&check(&unknown), 78, "no sentinel watches a master \"nobody\": fix [redis] sentinel_master");
    says(&world.command().envs(unknown).output().unwrap(), 78, "no sentinel watches a master \"nobody\"");
    let file = world.folder.path().join("wrong");
    std::fs::write(&file, "wrong").unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o400)).unwrap();
    let wrong = [("TALLYD__REDIS__SENTINEL_PASSWORD_FILE", file.to_str().unwrap())];
    says(&check(&wrong), 78, "fix [redis] sentinel_password_file");

    // Now the configuration has no password for the sentinels.
    let settings = group.settings("");
    let without: Vec<&str> = settings.lines().filter(|line| !line.starts_with("sentinel_password_file")).collect();
    world.write(&without.join("\n"));
    says(&check(&[]), 78, "fix [redis] sentinel_password_file");
    let server = format!("[\"{}\"]", group.server(master));
    says(&check(&[("TALLYD__REDIS__SENTINELS", &server)]), 78, "the server is not a sentinel: fix [redis] sentinels");

    let replica = (master + 1) % 3;
    let (_sentinel, mistaken) = group.mistaken(replica);
    let others = [
        ("TALLYD__REDIS__SENTINELS", format!("[\"{mistaken}\"]")),
        ("TALLYD__REDIS__SENTINEL_MASTER", "other".to_owned()),
    ];
    super::eventually("the sentinel with the wrong master answers", || async {
        let output = world.command().envs(others.clone()).args(["config", "check"]).output().unwrap();
        let said = format!(
            "sentinels name {} as the master other, but the ROLE of that server is slave",
            group.server(replica)
        );
        output.status.code() == Some(75) && stderr(&output).contains(&said)
    })
    .await;
}
