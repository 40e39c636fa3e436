//! The control socket: the only way to send an order to a running daemon. The permissions of the socket's file decide
//! who can send orders.
//!
//! The daemon that receives an operator's order writes the order to MySQL. All daemons of the site read the order
//! there. So an operator can send the order to the socket of any daemon. If several daemons on one machine use the same
//! path, the first daemon gets the socket. The other daemons retry, and one of them gets the socket when the first
//! daemon has ended.

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::post;
use axum::{Extension, Router};
use prometheus_client::metrics::gauge::Gauge;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{LIMITS, busy, refused};
use tallyd_base::config::Listen;
use tallyd_base::http::{Listener, PeerUid, Port, json};
use tallyd_base::runtime::liveness::Heartbeat;
use tallyd_base::servers::Servers;
use tallyd_base::servers::control::Control;
use tallyd_core::control::{Command, LASTS_MAX, Order, REASON_MAX, Task};
use tallyd_mysql::{Store, StoreError};

pub(crate) const ORDERS: &str = "/v1/orders";

/// The mode of the socket's file. The file's owner and group can connect.
const MODE: u32 = 0o660;

/// Length of the column `control.ordered_by`, in characters.
const BY_MAX: usize = 255;

/// Delay before the next try to create the socket, if another daemon has the socket or the folder is missing.
const BIND_AGAIN: Duration = Duration::from_secs(2);

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Wanted {
    pub task: Task,
    pub command: Command,
    /// The order's duration in seconds. `None` ends the current order.
    pub lasts_s: Option<u64>,
    pub by: String,
    pub reason: String,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Done {
    pub before: Option<Order>,
    pub now: Option<Order>,
}

pub(crate) struct ControlSocket {
    path: PathBuf,
    desk: Desk,
}

#[derive(Clone)]
struct Desk {
    store: Store,
    control: Control,
    host: Arc<str>,
}

impl ControlSocket {
    pub(crate) fn new(path: PathBuf, servers: &Servers) -> Self {
        let host = servers.owner.rsplit_once(':').map_or(servers.owner.as_str(), |(host, _)| host);
        let desk = Desk { store: servers.store.clone(), control: servers.control.clone(), host: host.into() };
        Self { path, desk }
    }

    pub(crate) async fn run(self, beat: Heartbeat, end: CancellationToken) {
        let mut is_logged = false;
        while !end.is_cancelled() {
            match self.bind().await {
                Ok(listener) => {
                    let path = self.path.display();
                    info!(event = "control-listening", path = %path, "the control socket is {path}");
                    let routes = Router::new().route(ORDERS, post(order)).with_state(self.desk);
                    return Port { listener, routes, limits: LIMITS, open: Gauge::default() }.run(beat, end).await;
                }
                Err(error) if !is_logged => {
                    is_logged = true;
                    let path = self.path.display();
                    warn!(
                        event = "control-not-listening",
                        path = %path,
                        error = %error,
                        "the control socket {path} can't be created, retrying: {error}. Make its folder writable for this user. If another daemon has this socket, use it, or change [admin] control"
                    );
                }
                Err(_) => {}
            }
            beat.pause(BIND_AGAIN, &end).await;
        }
    }

    async fn bind(&self) -> std::io::Result<Listener> {
        let listener = Listener::bind(&Listen::Socket(self.path.clone())).await?;
        set_permissions(&self.path, Permissions::from_mode(MODE))?;
        Ok(listener)
    }
}

async fn order(State(desk): State<Desk>, Extension(uid): Extension<PeerUid>, body: Bytes) -> Response {
    let wanted = match serde_json::from_slice::<Wanted>(&body) {
        Ok(wanted) => wanted,
        Err(error) => {
            return refused(StatusCode::BAD_REQUEST, &format!("this version does not support the order: {error}"));
        }
    };
    if let Some(problem) = wanted.problem() {
        return refused(StatusCode::BAD_REQUEST, &problem);
    }
    match desk.order(&wanted, uid).await {
        Ok(done) => json(StatusCode::OK, &done),
        Err(error) => busy(&format!("{:#}", anyhow::Error::from(error))),
    }
}

impl Wanted {
    fn problem(&self) -> Option<String> {
        let lasts = self.lasts_s.map(Duration::from_secs);
        if lasts.is_some_and(|lasts| lasts.is_zero() || lasts > LASTS_MAX) {
            return Some(format!("the duration of an order must be from 1 s to {} days", LASTS_MAX.as_secs() / 86_400));
        }
        if self.reason.chars().count() > REASON_MAX || self.by.chars().count() > REASON_MAX {
            return Some(format!("a reason can have at most {REASON_MAX} characters"));
        }
        let ends = lasts.is_none();
        if !ends && matches!(self.command, Command::Throttle { targets_per_second: 0 }) {
            return Some("a throttle must allow at least 1 target per second".to_owned());
        }
        let is_throttle = matches!(self.command, Command::Throttle { .. });
        (is_throttle && self.task != Task::Reconcile).then(|| format!("{} can't be throttled", self.task))
    }
}

impl Desk {
    async fn order(&self, wanted: &Wanted, uid: PeerUid) -> Result<Done, StoreError> {
        let Wanted { task, command, lasts_s, by, reason } = wanted;
        let before = self.find(*task, *command).await?;
        match lasts_s {
            Some(lasts_s) => {
                // Terminals and logs show the user's name and the reason, so control characters are removed.
                let plain = |text: &str| text.replace(char::is_control, " ");
                let by = ordered_by(&plain(by), uid, &self.host);
                let lasts = Duration::from_secs(*lasts_s);
                self.store.give_order(*task, *command, lasts, &by, &plain(reason)).await?;
            }
            None => self.store.end_order(*task, *command).await?,
        }
        // This daemon obeys immediately, and the other daemons within a second.
        self.control.refresh(&self.store).await?;
        Ok(Done { before, now: self.find(*task, *command).await? })
    }

    async fn find(&self, task: Task, command: Command) -> Result<Option<Order>, StoreError> {
        let mut orders = self.store.orders().await?.into_iter().map(|(order, _)| order);
        Ok(orders.find(|it| it.task == task && it.command.name() == command.name()))
    }
}

fn ordered_by(name: &str, PeerUid(uid): PeerUid, host: &str) -> String {
    let known: String = format!(" (uid {uid}) on {host}").chars().take(BY_MAX).collect();
    let name: String = name.chars().take(BY_MAX - known.chars().count()).collect();
    name + &known
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_is_cut_to_what_the_column_takes() {
        assert_eq!(ordered_by("anna", PeerUid(1000), "db1"), "anna (uid 1000) on db1");
        let long = ordered_by(&"ä".repeat(REASON_MAX), PeerUid(u32::MAX), &"h".repeat(64));
        assert_eq!(long.chars().count(), BY_MAX);
        assert!(long.starts_with("ää") && long.contains("ä (uid 4294967295) on h") && long.ends_with('h'), "{long}");
        assert_eq!(ordered_by("anna", PeerUid(0), &"h".repeat(300)).chars().count(), BY_MAX);
    }
}
