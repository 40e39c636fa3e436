//! `tallyd gateway`: events over HTTP, for languages without good clients for AMQP and Redis. The gateway is a separate
//! process without state. Any number of gateways can run.
//!
//! The steps of an event: the daemon's own decoder checks the event, the broker confirms it, and then the gateway
//! answers. An answer with 202 means that every event of the request is on the broker's disk. The gateway counts nothing:
//! if API servers count a number (`writer = "api"`), they have called a script before they send the event.
//!
//! The gateway knows kinds, metrics, boards and rules from the site card. If it never could read the card, it publishes
//! without checking names, and all numbers are unknown.
//!
//! The gateway consumes no partitions, runs no jobs and migrates no tables. Each wait for a server has a limit. Slow
//! clients must not block other clients, so connections, requests, bodies and times are limited.

mod answer;
mod boards;
pub mod config;
mod counters;
mod events;
mod hints;
mod likes;
mod metrics;
mod openapi;
mod query;
mod ready;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, CACHE_CONTROL, CONNECTION, HOST, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tokio::task::JoinError;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info};

use answer::{Answer, Refused};
use config::GatewayConfig;
use hints::Hints;
use metrics::Metrics;
pub use openapi::DOCUMENT;
use tallyd_base::config::{ConfigError, Listen};
use tallyd_base::http::{Limits, Listener, Port, Token, hosts};
use tallyd_base::runtime::liveness::Liveness;
use tallyd_base::runtime::{shutdown, systemd};
use tallyd_base::version;
use tallyd_client::{ClickLimits, Client, Settings};

/// Time limit for the head of a request, for an idle connection, and for a client that reads nothing of an answer.
const HEAD_MAX: Duration = Duration::from_secs(10);

/// After the stop, the gateway still accepts requests for this time, so that a proxy first learns of the stop from
/// /readyz.
const DRAIN_PAUSE: Duration = Duration::from_secs(2);

/// After [`DRAIN_PAUSE`]. Longer than twice `[amqp] timeout_ms`, the limit of a confirm. Together shorter than the
/// `TimeoutStopSec` of systemd/tallyd-gateway.service.
const DRAIN_MAX: Duration = Duration::from_secs(25);

/// The maximum number of bodies larger than [`events::BODY_SMALL`] that are read at the same time, to limit memory.
const BODIES_MAX: usize = 128;

pub(crate) struct Gate {
    client: Client,
    connections_max: usize,
    has_limit: bool,
    /// Permits to publish. Requests that read have other permits. So an outage of MySQL does not stop publishing, and
    /// an outage of RabbitMQ does not stop reading.
    publishing: Arc<Semaphore>,
    reading: Semaphore,
    bodies: Semaphore,
    token: Option<Token>,
    /// True if the `Host` of a request must be an address or `localhost`. Without this check, a web page could send
    /// requests through a browser on this machine.
    is_local: bool,
    hints: Hints,
    metrics: Metrics,
    ready: tokio::sync::Mutex<Option<ready::Answers>>,
    stop: CancellationToken,
}

type Shared = State<Arc<Gate>>;

impl Gate {
    fn new(config: &GatewayConfig, listen: &Listen, stop: CancellationToken) -> Result<Self> {
        let token = config.gateway.token.as_ref();
        let client = Client::new(&settings(config)).map_err(|error| ConfigError(vec![error.to_string()]))?;
        Ok(Self {
            client,
            connections_max: config.gateway.connections_max,
            has_limit: config.gateway.rate_likes_max > 0,
            publishing: Arc::new(Semaphore::new(config.gateway.requests_max)),
            reading: Semaphore::new(config.gateway.requests_max),
            ready: tokio::sync::Mutex::default(),
            bodies: Semaphore::new(BODIES_MAX),
            is_local: token.is_none() && matches!(listen, Listen::Address(_)),
            token: token.map(Token::new),
            hints: Hints::default(),
            metrics: Metrics::default(),
            stop,
        })
    }

    fn may_publish(&self) -> Answer<OwnedSemaphorePermit> {
        Arc::clone(&self.publishing).try_acquire_owned().map_err(|_| Refused::busy())
    }

    fn may_read(&self) -> Answer<SemaphorePermit<'_>> {
        self.reading.try_acquire().map_err(|_| Refused::busy())
    }
}

fn settings(GatewayConfig { gateway, amqp, mysql, redis, .. }: &GatewayConfig) -> Settings {
    let limits = ClickLimits { rate_likes_max: gateway.rate_likes_max, rate_window: gateway.rate_window.0 };
    Settings { amqp: amqp.clone(), mysql: mysql.clone(), redis: redis.clone(), limits, ..Settings::default() }
}

pub async fn run(config: &GatewayConfig) -> Result<()> {
    let stop = shutdown::on_signals()?;
    // The gateway has nothing to reload, and SIGHUP must not end it.
    let _hangups = shutdown::hangups()?;
    let listen = config.gateway.address().context("read [gateway] listen")?;
    let gate = Arc::new(Gate::new(config, &listen, stop.clone())?);
    let port = bind(&gate, &listen).await?;
    let address = port.listener.listens().context("read the gateway's address")?;
    let (liveness, end) = (Liveness::default(), CancellationToken::new());
    tokio::spawn(systemd::watchdog(liveness.clone(), end.clone()));
    let mut serving = tokio::spawn(port.run(liveness.register("gateway"), end.clone()));
    systemd::ready();
    started(&address);
    for server in ready::Server::ALL {
        tokio::spawn(ready::watch(Arc::clone(&gate), server));
    }
    tokio::select! {
        () = stop.cancelled() => {}
        ended = &mut serving => return Err(ended_early(ended)),
    }
    systemd::stopping();
    tokio::time::sleep(DRAIN_PAUSE).await;
    end.cancel();
    serving.await.context("the port panicked while stopping")?;
    info!(event = "stopped", "tallyd has stopped, and all connections are closed");
    Ok(())
}

async fn bind(gate: &Arc<Gate>, listen: &Listen) -> Result<Port> {
    let wrong = |error: std::io::Error| ConfigError(vec![format!("[gateway] listen = \"{listen}\": {error}")]);
    let limits = Limits {
        connections_max: gate.connections_max,
        connection_max: None,
        head_max: HEAD_MAX,
        unread_max: HEAD_MAX,
        keep_alive: true,
        drain_max: DRAIN_MAX,
        not_accepted: |error| {
            debug!(event = "gateway-not-accepted", error = %error, "accepting a connection failed: {error}");
        },
    };
    let listener = Listener::bind(listen).await.map_err(wrong)?;
    Ok(Port { listener, routes: routes(gate), limits, open: gate.metrics.connections.clone() })
}

fn started(address: &Listen) {
    let (version, revision, long) = (version::VERSION, version::REVISION, version::LONG);
    let address = address.to_string();
    info!(event = "gateway-started", version, revision, address, "tallyd {long} accepts requests at {address}");
}

fn ended_early(ended: Result<(), JoinError>) -> anyhow::Error {
    error!(event = "gateway-ended", "the port ended unexpectedly");
    ended.err().map_or_else(|| anyhow!("the port ended"), |error| anyhow!("the port panicked: {error}"))
}

fn routes(gate: &Arc<Gate>) -> Router {
    Router::new()
        .route("/v1/events", post(events::publish))
        .route("/v1/counters", get(counters::show))
        .route("/v1/likes", get(likes::show))
        .route("/v1/boards/{name}", get(boards::show))
        .route("/openapi.json", get(openapi::show))
        .route("/livez", get(ready::livez))
        .route("/readyz", get(ready::readyz))
        .route("/metrics", get(metrics::show))
        .fallback(async || Refused::new(StatusCode::NOT_FOUND, "not-found", "unknown path"))
        .method_not_allowed_fallback(async || {
            Refused::new(StatusCode::METHOD_NOT_ALLOWED, "method-not-allowed", "this path does not support the method")
        })
        .layer(middleware::from_fn_with_state(Arc::clone(gate), guard))
        .with_state(Arc::clone(gate))
}

async fn guard(State(gate): Shared, request: Request, next: Next) -> Response {
    let (begun, route) = (Instant::now(), metrics::route(request.uri().path()));
    let mut answer = match may_ask(&gate, &request) {
        Ok(()) => next.run(request).await,
        Err(refused) => refused.into(),
    };
    gate.metrics.answered(route, answer.status(), begun.elapsed());
    let headers = answer.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if gate.stop.is_cancelled() {
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

fn may_ask(gate: &Gate, request: &Request) -> Answer<()> {
    let host = request.headers().get(HOST).map(|host| host.to_str().unwrap_or("?"));
    if gate.is_local && !hosts::may_be_called(host, &[]) {
        let message = "without a token, requests must be sent to localhost or to an IP address";
        return Err(Refused::new(StatusCode::FORBIDDEN, "unknown-host", message));
    }
    let needs_token = request.uri().path().starts_with("/v1/");
    match &gate.token {
        Some(token) if needs_token && !token.is_in(request.headers().get(AUTHORIZATION)) => Err(Refused::no_token()),
        _ => Ok(()),
    }
}
