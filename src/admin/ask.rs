//! The client of the admin port, for commands. Each request has its own connection. The wait for an answer and the size
//! of the answer are limited.

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use axum::body::{Body, to_bytes};
use axum::http::request::Builder;
use axum::http::{Request, StatusCode, header};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinSet;
use tokio_util::either::Either;
use url::{Host, Url};

use tallyd_base::config::{SOCKET, Secret};

/// Time limit for an answer. The daemon answers these requests without a call to another server.
const ANSWER_MAX: Duration = Duration::from_secs(3);

/// Time limit for the answer to an order. The daemon writes an order to MySQL before it answers.
const ORDER_MAX: Duration = Duration::from_secs(15);

/// The maximum size of an answer. The status of a daemon with 1,000 partitions has 300 kB.
const ANSWER_BYTES_MAX: usize = 4 << 20;

#[derive(Debug)]
pub(crate) struct Answer {
    pub status: StatusCode,
    pub body: String,
}

#[derive(Debug, thiserror::Error)]
#[error(
    "no daemon answers at {at}: {reason}; check that it is running (systemctl status tallyd), and use --url if it has another admin port"
)]
pub(crate) struct NoDaemon {
    pub at: At,
    pub reason: String,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum NoControl {
    #[error(
        "no daemon answers at {0}: {1}. Run the command on a machine with a running daemon (systemctl status tallyd), with the daemon's \
         configuration: [admin] control is the path of the daemon's socket"
    )]
    NoDaemon(PathBuf, String),
    #[error("this user has no right to use {0}: run the command with sudo, or as a member of the daemon's group")]
    NotAllowed(PathBuf),
}

#[derive(Clone, Debug)]
pub(crate) struct Port {
    pub at: At,
    pub token: Option<Secret>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum At {
    Url(Url),
    Socket(PathBuf),
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Url(url) => url.fmt(f),
            Self::Socket(path) => write!(f, "{SOCKET}{}", path.display()),
        }
    }
}

impl At {
    async fn connect(&self) -> Result<Either<TcpStream, UnixStream>> {
        let url = match self {
            Self::Url(url) => url,
            Self::Socket(path) => return Ok(Either::Right(UnixStream::connect(path).await?)),
        };
        let port = url.port_or_known_default().context("the address has no port")?;
        let stream = match url.host().context("the address has no host")? {
            Host::Domain(name) => TcpStream::connect((name, port)).await,
            Host::Ipv4(address) => TcpStream::connect((address, port)).await,
            Host::Ipv6(address) => TcpStream::connect((address, port)).await,
        };
        Ok(Either::Left(stream?))
    }

    fn host_and_path(&self) -> (String, &str) {
        match self {
            Self::Url(url) => {
                let (host, port) = (url.host_str().unwrap_or_default(), url.port_or_known_default().unwrap_or(80));
                (format!("{host}:{port}"), url.path().trim_end_matches('/'))
            }
            Self::Socket(_) => ("localhost".to_owned(), ""),
        }
    }
}

/// Requests `path`, which is appended to the path of the port's address. Returns [`NoDaemon`] if no daemon answers, or
/// if the answer is late, too large or not HTTP.
pub(crate) async fn get(port: &Port, path: &str) -> Result<Answer, NoDaemon> {
    let answer = tokio::time::timeout(ANSWER_MAX, exchange(port, Request::get(path), Body::empty())).await;
    let answer = answer.unwrap_or_else(|_| bail!("no answer within {} s", ANSWER_MAX.as_secs()));
    answer.map_err(|error| NoDaemon { at: port.at.clone(), reason: format!("{error:#}") })
}

pub(crate) async fn post(socket: &Path, path: &str, body: String) -> Result<Answer, NoControl> {
    let port = Port { at: At::Socket(socket.to_owned()), token: None };
    let answer = tokio::time::timeout(ORDER_MAX, exchange(&port, Request::post(path), body.into())).await;
    let answer = answer.unwrap_or_else(|_| bail!("no answer within {} s", ORDER_MAX.as_secs()));
    answer.map_err(|error| {
        let kind = error.chain().find_map(|cause| cause.downcast_ref()).map(io::Error::kind);
        match kind {
            Some(ErrorKind::PermissionDenied) => NoControl::NotAllowed(socket.to_owned()),
            _ => NoControl::NoDaemon(socket.to_owned(), format!("{error:#}")),
        }
    })
}

async fn exchange(Port { at, token }: &Port, request: Builder, body: Body) -> Result<Answer> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(at.connect().await?)).await?;
    // The task of the connection is aborted when this call ends.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let (host, base) = at.host_and_path();
    let path = request.uri_ref().map(ToString::to_string).unwrap_or_default();
    let request = request.uri(format!("{base}{path}"));
    let request = request.header(header::HOST, host).header(header::ACCEPT, "application/json");
    let request = match token {
        Some(token) => request.header(header::AUTHORIZATION, format!("Bearer {}", token.expose())),
        None => request,
    };
    let request = request.body(body)?;
    let answer = sender.send_request(request).await?;
    let status = answer.status();
    let body = to_bytes(Body::new(answer.into_body()), ANSWER_BYTES_MAX).await.context("read the answer")?;
    Ok(Answer { status, body: String::from_utf8(body.to_vec()).context("the answer is not text")? })
}
