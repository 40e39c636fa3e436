//! The question of `tallyd config check` about the admin port: whether it is free, or that a daemon with this configuration answers there.

use super::port::of_listener;
use crate::admin::NOT_OPENED;
use crate::admin::ask::{self, Port};
use tallyd_base::config::{Admin, Listen};
use tallyd_base::health::Status;
use tallyd_base::http::can_listen;

use tallyd_base::cli::check::{Check, What};

pub(super) async fn check(admin: &Admin) -> Vec<Check> {
    vec![port(admin).await]
}

async fn port(admin: &Admin) -> Check {
    let Ok(Some(listen)) = admin.address() else {
        return Check::ok(What::AdminPort, "disabled, because [admin] listen is empty");
    };
    if let Some(owner) = daemon_at(admin, &listen).await {
        return Check::ok(What::AdminPort, format!("the daemon {owner} answers at {listen}"));
    }
    match can_listen(&listen).await {
        Ok(()) => Check::ok(What::AdminPort, format!("{listen} is free")),
        Err(error) => Check::warning(What::AdminPort, format!("{listen}: {error}"), NOT_OPENED),
    }
}

async fn daemon_at(admin: &Admin, listen: &Listen) -> Option<String> {
    // `of_listener` fails only for port 0, which means any free port.
    let at = of_listener(Some(listen.clone())).ok()?;
    let answer = ask::get(&Port { at, token: admin.token.clone() }, "/v1/status").await.ok()?;
    let status: Status = serde_json::from_str(&answer.body).ok()?;
    Some(status.owner).filter(|owner| !owner.is_empty())
}
