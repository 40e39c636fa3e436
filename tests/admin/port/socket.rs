//! The admin port as a Unix socket.

use std::os::unix::fs::PermissionsExt;

use super::common::{World, eventually, stderr, stdout};

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_answers_those_who_may_write_it_and_is_replaced_after_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let url = format!("unix:{}", path.display());
    let world = World::new("admin_socket", &format!("[admin]\nlisten = \"{url}\"\n")).await;
    let asked = |arguments: &[&str]| world.tallyd(arguments);

    let daemon = world.daemon();
    eventually("the daemon is healthy", || async { asked(&["admin", "healthcheck"]).status.code() == Some(0) }).await;
    assert!(daemon.log().contains(&format!("\"address\":\"{url}\"")), "{}", daemon.log());
    let told = asked(&["status", "--format", "json", "--url", &url]);
    assert!(stdout(&told).contains("\"partitions\""), "{}{}", stdout(&told), stderr(&told));
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o002, 0, "the umask of the tests must forbid others to write: {mode:o}");

    let second = world.daemon();
    second.logged(&format!("[admin] listen = \\\"{url}\\\": another process listens there")).await;
    assert!(second.stop().success());
    assert!(path.exists(), "the socket of the first daemon must still exist");

    daemon.kill();
    assert!(path.exists(), "the socket of a killed daemon must still exist");
    let none = asked(&["admin", "healthcheck"]);
    assert_eq!(none.status.code(), Some(75));
    assert!(stderr(&none).contains(&format!("no daemon answers at {url}: Connection refused")), "{}", stderr(&none));

    let daemon = world.daemon();
    eventually("the daemon is healthy again", || async { asked(&["admin", "healthcheck"]).status.code() == Some(0) })
        .await;
    assert!(daemon.stop().success());
    assert!(!path.exists(), "a daemon must remove its socket when it exits");

    std::fs::write(&path, "notes").unwrap();
    let daemon = world.daemon();
    daemon.logged("a file with this name exists and is not a socket").await;
    assert!(daemon.stop().success());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "notes");
}
