//! Shared parts of the HTTP ports: a listener, a loop that accepts connections, limits, and access checks.
//!
//! The loop replaces `axum::serve`, which limits neither the connections nor the time and size of a request's head.

pub mod exposition;
pub mod hosts;
mod listener;
mod patience;
mod token;

use std::io;
use std::pin::pin;
use std::time::Duration;

use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus_client::metrics::gauge::Gauge;
use serde::Serialize;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::runtime::liveness::Heartbeat;
use listener::Stream;
pub use listener::{Listener, can_listen};
use patience::Patience;
pub use token::Token;

const HEAD_BYTES_MAX: usize = 16 << 10;

/// Delay before the next try if a connection could not be accepted, for example because too many files are open.
const ACCEPT_AGAIN: Duration = Duration::from_millis(500);

#[derive(Clone)]
pub struct Limits {
    pub connections_max: usize,
    /// Longest duration of a connection. `None`: the connection stays open while the client sends requests.
    pub connection_max: Option<Duration>,
    /// Time limit for the head of a request. Idle clients must not block other clients.
    pub head_max: Duration,
    pub unread_max: Duration,
    pub keep_alive: bool,
    /// After the stop, requests in flight have this time to finish.
    pub drain_max: Duration,
    pub not_accepted: fn(&io::Error),
}

pub struct Port {
    pub listener: Listener,
    pub routes: Router,
    pub limits: Limits,
    pub open: Gauge,
}

impl Port {
    pub async fn run(self, beat: Heartbeat, end: CancellationToken) {
        let mut connections = JoinSet::new();
        while let Some(accepted) = end.run_until_cancelled(beat.during(self.accept(&mut connections))).await {
            match accepted {
                Ok(stream) => {
                    drop(connections.spawn(serve(stream, self.routes.clone(), self.limits.clone(), end.clone())));
                }
                Err(error) => {
                    (self.limits.not_accepted)(&error);
                    beat.pause(ACCEPT_AGAIN, &end).await;
                }
            }
        }
        drop(self.listener);
        let all = async { while connections.join_next().await.is_some() {} };
        // If a connection is still open after this time, the connection closes when the process ends.
        let _ = tokio::time::timeout(self.limits.drain_max, beat.during(all)).await;
    }

    async fn accept(&self, connections: &mut JoinSet<()>) -> io::Result<Stream> {
        while connections.try_join_next().is_some() {}
        while connections.len() >= self.limits.connections_max {
            connections.join_next().await;
        }
        self.open.set(i64::try_from(connections.len()).unwrap_or(i64::MAX));
        self.listener.accept().await
    }
}

/// The uid of the process at the other end of a socket, as the kernel reports it.
#[derive(Clone, Copy, Debug)]
pub struct PeerUid(pub u32);

async fn serve(stream: Stream, routes: Router, limits: Limits, end: CancellationToken) {
    let routes = match peer(&stream) {
        Some(uid) => routes.layer(Extension(uid)),
        None => routes,
    };
    let routes = TowerToHyperService::new(routes);
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.head_max)
            .max_buf_size(HEAD_BYTES_MAX)
            .keep_alive(limits.keep_alive)
            .serve_connection(TokioIo::new(Patience::new(stream, limits.unread_max)), routes)
    );
    let served = async {
        if end.run_until_cancelled(connection.as_mut()).await.is_none() {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    };
    // An error means that the client has disconnected or is too slow.
    match limits.connection_max {
        Some(connection_max) => drop(tokio::time::timeout(connection_max, served).await),
        None => served.await,
    }
}

fn peer(stream: &Stream) -> Option<PeerUid> {
    match stream {
        Stream::Left(_) => None,
        Stream::Right(socket) => Some(PeerUid(socket.peer_cred().ok()?.uid())),
    }
}

pub fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => (status, [(CONTENT_TYPE, "application/json")], body).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    use super::*;
    use crate::config::Listen;
    use crate::runtime::liveness::Liveness;

    const LONG: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn a_client_that_reads_nothing_keeps_no_place_from_another() {
        let limits = Limits {
            connections_max: 1,
            connection_max: None,
            head_max: LONG,
            unread_max: Duration::from_millis(100),
            keep_alive: true,
            drain_max: Duration::ZERO,
            not_accepted: |_| {},
        };
        let listener = Listener::bind(&Listen::Address("127.0.0.1:0".parse().unwrap())).await.unwrap();
        let address = listener.listens().unwrap().to_string();
        let routes = Router::new().route("/", get(async || "x".repeat(1 << 20)));
        let (port, end) = (Port { listener, routes, limits, open: Gauge::default() }, CancellationToken::new());
        let serving = tokio::spawn(port.run(Liveness::default().register("test"), end.clone()));
        let mut silent = TcpStream::connect(&address).await.unwrap();
        silent.write_all("GET / HTTP/1.1\r\nHost: a\r\n\r\n".repeat(100).as_bytes()).await.unwrap();
        let mut other = TcpStream::connect(&address).await.unwrap();
        other.write_all(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        timeout(LONG, other.read_to_string(&mut answer)).await.expect("the silent client has the only place").unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer:.100}");
        end.cancel();
        serving.await.unwrap();
    }
}
