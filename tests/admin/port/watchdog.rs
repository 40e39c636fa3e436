//! systemd's watchdog kills a daemon that hangs, but not a daemon that waits.

use std::sync::{Arc, Mutex};

use tokio::net::UnixDatagram;

use super::common::proxy::Proxy;
use super::common::{Daemon, World, eventually};
use super::{ANY, address, get, like};

/// The messages to systemd, in order.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<String>>>);

impl Told {
    fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    /// Returns how often the daemon has fed the watchdog.
    fn fed(&self) -> usize {
        self.lines().iter().filter(|line| line.starts_with("WATCHDOG=1")).count()
    }
}

/// Starts a daemon that notifies systemd. Also returns the messages to systemd.
fn watched(world: &World, more: (&str, &str)) -> (Told, Daemon) {
    let path = world.folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    let told = Told::default();
    let noted = told.clone();
    tokio::spawn(async move {
        let mut bytes = [0; 4_096];
        while let Ok(read) = socket.recv(&mut bytes).await {
            noted.0.lock().unwrap().push(String::from_utf8_lossy(&bytes[..read]).into_owned());
        }
    });
    let daemon = world.daemon_with(&[("NOTIFY_SOCKET", path.to_str().unwrap()), ("WATCHDOG_USEC", "3000000"), more]);
    (told, daemon)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_hangs_is_restarted_and_one_that_waits_is_not() {
    let (hangs, waits) =
        (World::new("watchdog_hangs", ANY).await.hurried(), World::new("watchdog_waits", ANY).await.hurried());
    let (proxy, url) = Proxy::before(waits.config.mysql.url.expose()).await;
    let (of_hung, hung) = watched(&hangs, ("TALLYD_HANG_POINT", "consumer:before-commit"));
    let (of_patient, patient) = watched(&waits, ("TALLYD__MYSQL__URL", url.as_str()));
    for (world, daemon) in [(&hangs, &hung), (&waits, &patient)] {
        daemon.logged("\"consuming\"").await;
        if world.name == waits.name {
            proxy.hold();
        }
        let publisher = world.publisher().await;
        world.publish(&publisher, &[like(42, 1)]).await;
    }
    hung.logged("\"fault-point\"").await;
    hung.logged("\"stuck\"").await;
    assert!(hung.log().contains("\"loops\":\"consumer 0\""), "{}", hung.log());
    let live = get(&address(&hung).await, "/livez").await;
    assert_eq!((live.status, live.body.as_str()), (503, "{\"live\":false,\"stuck\":[\"consumer 0\"]}"));

    let (fed, fed_patient) = (of_hung.fed(), of_patient.fed());
    assert!(fed > 0, "before it hung");
    eventually("the waiting daemon continues to feed the watchdog", || async { of_patient.fed() >= fed_patient + 4 })
        .await;
    assert_eq!(of_hung.fed(), fed, "the hanging daemon must not feed the watchdog");
    assert_eq!(get(&address(&patient).await, "/livez").await.status, 200);
    eventually("systemctl status shows the waiting operation", || async {
        of_patient.lines().iter().any(|line| line.starts_with("STATUS=running, ") && line.contains("; retrying: "))
    })
    .await;
    hung.kill();
    proxy.release();
    eventually("the daemon waits for nothing", || async {
        let lines = of_patient.lines();
        let last = lines.iter().rev().find(|line| line.starts_with("STATUS="));
        last.is_some_and(|line| !line.contains("; retrying: "))
    })
    .await;
    assert!(patient.stop().success());
    assert!(of_patient.lines().iter().any(|line| line.starts_with("STOPPING=1")));
}
