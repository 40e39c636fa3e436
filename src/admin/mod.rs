//! The admin port: status, metrics and health of the daemon, over HTTP. No request to this port changes anything.
//!
//! Requests to the port must never slow the daemon's tasks. So the port has a few separate connections to the servers,
//! and limits the count and the duration of requests. A connection serves one request. On an address that other
//! machines can reach, a token is required (`token`), except for `PROBES`. Web pages have no access: the `Host` of a
//! request is checked (`hosts`), and there is no CORS header.

pub(crate) mod ask;
pub(crate) mod control;
mod counters;
pub(crate) mod health;
mod metrics;
mod page;

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, CACHE_CONTROL, HOST, RETRY_AFTER, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use crate::jobs::{self, Requests};
use tallyd_base::config::{Config, ConfigHandle, Listen};
use tallyd_base::health::Status;
use tallyd_base::http::{Limits, Listener, Port, Token, hosts, json};
use tallyd_base::jobs::modes;
use tallyd_base::runtime::clock;
use tallyd_base::runtime::liveness::{Heartbeat, Liveness};
use tallyd_base::runtime::retry::Outage;
use tallyd_base::telemetry::ObservedReceiver;
use tallyd_base::telemetry::observer::Observer;
use tallyd_base::telemetry::telemetry;
use tallyd_mysql::Store;
use tallyd_rabbitmq::Broker;
use tallyd_redis::Cache;

const CONNECTIONS_MAX: usize = 64;

/// The time limit for a connection: the port must read the request and send the answer within this time.
const CONNECTION_MAX: Duration = Duration::from_secs(15);

const HEAD_MAX: Duration = Duration::from_secs(3);

/// These paths also answer without a token, because probes of orchestrators have no token. If a request has no token,
/// the answer is only a status code.
const PROBES: [&str; 2] = ["/livez", "/readyz"];

pub(crate) const NOT_OPENED: &str =
    "stop the program that listens there (ss -ltnp shows it), or set [admin] listen to another address";

const ANSWER_MAX: Duration = Duration::from_secs(5);

const ASKING_MAX: usize = 16;

/// Number of connections to MySQL. A request waits until a connection is free.
const STORE_CONNECTIONS: u32 = 4;

const DRAIN_MAX: Duration = Duration::from_secs(2);

const LIMITS: Limits = Limits {
    connections_max: CONNECTIONS_MAX,
    connection_max: Some(CONNECTION_MAX),
    head_max: HEAD_MAX,
    unread_max: HEAD_MAX,
    keep_alive: false,
    drain_max: DRAIN_MAX,
    not_accepted: |error| {
        debug!(event = "admin-not-accepted", error = %error, "accepting a connection failed: {error}");
    },
};

pub(crate) struct Admin {
    listen: Listen,
    asked: Asked,
}

#[derive(Clone)]
struct Asked {
    live: ConfigHandle,
    store: Store,
    cache: Cache,
    observed: ObservedReceiver,
    liveness: Liveness,
    owner: Arc<str>,
    asking: Arc<Semaphore>,
    token: Option<Token>,
}

impl Asked {
    fn status(&self) -> Status {
        let seen = Arc::clone(&self.observed.borrow());
        Status::report(&self.live.current(), &self.owner, telemetry(), &seen, clock::now())
    }
}

impl Admin {
    pub(crate) fn new(
        live: &ConfigHandle,
        broker: &Broker,
        owner: &str,
        liveness: &Liveness,
    ) -> Result<Option<(Self, Observer)>> {
        let config = live.current();
        let Some(listen) = config.admin.address().context("read [admin] listen")? else { return Ok(None) };
        let store = Store::of_short_reads(&config.mysql, STORE_CONNECTIONS, ANSWER_MAX)?.impatient();
        let cache = Cache::new(&config.redis, &config.metrics)?;
        // The observer has separate connections. Otherwise many requests for counters could make a server seem
        // unreachable.
        let its = Store::of_short_reads(&config.mysql, 1, ANSWER_MAX)?.impatient();
        let jobs = jobs::table(&Requests::default());
        let modes = Box::new(move |config: &Config| modes(&jobs, config));
        let (observer, observed) =
            Observer::new(live, its, Cache::new(&config.redis, &config.metrics)?, broker.clone(), modes);
        let asked = Asked {
            live: live.clone(),
            store,
            cache,
            observed,
            liveness: liveness.clone(),
            owner: owner.into(),
            asking: Arc::new(Semaphore::new(ASKING_MAX)),
            token: config.admin.token.as_ref().map(Token::new),
        };
        Ok(Some((Self { listen, asked }, observer)))
    }

    /// Serves until `end`. If the port can't be opened, the daemon still processes events, because processing does not
    /// need the port.
    pub(crate) async fn run(self, beat: Heartbeat, end: CancellationToken) {
        let Some(listener) = end.run_until_cancelled(beat.during(listen(&self.listen))).await else { return };
        let port = Port { listener, routes: routes(self.asked), limits: LIMITS, open: Gauge::default() };
        port.run(beat, end).await;
    }
}

async fn listen(listen: &Listen) -> Listener {
    let mut outage = Outage::new("opening the admin port");
    loop {
        let opened = async {
            let listener = Listener::bind(listen).await?;
            let address = listener.listens()?;
            io::Result::Ok((listener, address))
        };
        match opened.await {
            Ok((listener, address)) => {
                outage.over();
                info!(event = "admin-listening", address = address.to_string(), "the admin port is {address}");
                return listener;
            }
            Err(error) => {
                tokio::time::sleep(outage.failed(&format!("[admin] listen = \"{listen}\": {error}; {NOT_OPENED}")))
                    .await
            }
        }
    }
}

fn routes(asked: Asked) -> Router {
    Router::new()
        .route("/", get(page::show))
        .route("/livez", get(health::livez))
        .route("/readyz", get(health::readyz))
        .route("/metrics", get(metrics::show))
        .route("/v1/counters/{kind}/{id}", get(counters::show))
        .route("/v1/status", get(async |State(asked): State<Asked>| json(StatusCode::OK, &asked.status())))
        .route("/v1/history", get(async || json(StatusCode::OK, &telemetry().pulse.points())))
        .fallback(async || refused(StatusCode::NOT_FOUND, "unknown path"))
        .layer(middleware::from_fn_with_state(asked.clone(), guard))
        .with_state(asked)
}

async fn guard(State(asked): State<Asked>, request: Request, next: Next) -> Result<Response, Infallible> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return Ok(refused(StatusCode::METHOD_NOT_ALLOWED, "only GET is supported"));
    }
    let host = request.headers().get(HOST).map(|host| host.to_str().unwrap_or("?"));
    if !hosts::may_be_called(host, &asked.live.current().admin.hosts) {
        return Ok(refused(
            StatusCode::FORBIDDEN,
            "the Host of the request is not allowed: add the name to [admin] hosts",
        ));
    }
    let is_stranger =
        asked.token.as_ref().is_some_and(|token| !token.is_in_or_is_password(request.headers().get(AUTHORIZATION)));
    if is_stranger && !PROBES.contains(&request.uri().path()) {
        let mut answer =
            refused(StatusCode::UNAUTHORIZED, "the token is missing or wrong: send the token of [admin] token_file");
        // This header makes a browser ask for a user and a password. The user's name is ignored.
        answer.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Basic realm=\"tallyd\""));
        return Ok(answer);
    }
    let answer = tokio::time::timeout(ANSWER_MAX, next.run(request)).await;
    let late = |_| busy(&format!("a server did not answer within {} s", ANSWER_MAX.as_secs()));
    let mut answer = answer.unwrap_or_else(late);
    if is_stranger {
        answer = answer.status().into_response();
    }
    let headers = answer.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    Ok(answer)
}

fn refused(status: StatusCode, reason: &str) -> Response {
    json(status, &serde_json::json!({ "error": reason }))
}

fn busy(reason: &str) -> Response {
    let mut response = refused(StatusCode::SERVICE_UNAVAILABLE, reason);
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    response
}
