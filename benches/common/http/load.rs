//! Sends requests over persistent HTTP/1.1 connections. The HTTP code of this module is minimal, so that the load
//! generator needs little CPU time compared with the server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use tallyd_core::event::{LikeEvent, encode_like};
use tallyd_core::model::{Kind, Target, TargetId, UserId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// The number of targets. The requests contain likes for these targets in turn.
const TARGETS: u64 = 10_000;

/// Sends the given number of requests, and reads all answers. Each must have this status.
pub async fn send<R>(address: &str, connections: u64, requests: u64, status: u16, request: R) -> Result<()>
where
    R: Fn(u64) -> Vec<u8> + Clone + Send + 'static,
{
    let (next, mut all) = (Arc::new(AtomicU64::new(0)), JoinSet::new());
    for _ in 0..connections {
        let (mut stream, next, request) = (connect(address).await?, Arc::clone(&next), request.clone());
        all.spawn(async move {
            let mut answer = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= requests {
                    return Ok(());
                }
                stream.write_all(&request(number)).await?;
                read(&mut stream, &mut answer).await?;
                let is_right = answer.starts_with(format!("HTTP/1.1 {status}").as_bytes());
                ensure!(is_right, "the answer is {}", String::from_utf8_lossy(&answer));
            }
        });
    }
    while let Some(ended) = all.join_next().await {
        ended??;
    }
    Ok(())
}

/// Sends one request, and returns the answer's body.
pub async fn ask(address: &str, request: &[u8]) -> Result<String> {
    let (mut stream, mut answer) = (connect(address).await?, Vec::new());
    stream.write_all(request).await?;
    read(&mut stream, &mut answer).await?;
    let answer = String::from_utf8(answer)?;
    Ok(answer.split_once("\r\n\r\n").context("the answer has no head")?.1.to_owned())
}

async fn connect(address: &str) -> Result<TcpStream> {
    let stream = TcpStream::connect(address).await.context("connect to the server")?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Returns the request that publishes `list` likes.
pub fn likes(number: u64, list: u64) -> Vec<u8> {
    let now = tallyd_base::runtime::clock::now();
    let event = |place: u64| {
        let target = Target { kind: Kind(1), id: TargetId(1 + place % TARGETS) };
        encode_like(&LikeEvent { target, user: UserId(1 + place), at: now, liked: true }, "video", None)
    };
    let events: Vec<Vec<u8>> = (number * list..(number + 1) * list).map(event).collect();
    let events = events.join(&b',');
    let body = if list == 1 { events } else { [b"[", events.as_slice(), b"]"].concat() };
    let head = format!(
        "POST /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: keep-alive\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    [head.into_bytes(), body].concat()
}

/// Returns the request that reads the counters of these videos.
pub fn counters(ids: impl Iterator<Item = u64>) -> Vec<u8> {
    let ids = ids.map(|id| id.to_string()).collect::<Vec<_>>().join(",");
    format!("GET /v1/counters?kind=video&ids={ids} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: keep-alive\r\n\r\n")
        .into_bytes()
}

/// Reads one answer. The answer must have the header Content-Length.
async fn read(stream: &mut TcpStream, answer: &mut Vec<u8>) -> Result<()> {
    answer.clear();
    loop {
        ensure!(stream.read_buf(answer).await? > 0, "the server closed the connection");
        let Some(end) = answer.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
        let head = std::str::from_utf8(answer.get(..end).unwrap_or_default())?.to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
        let length: usize = length.context("the answer has no Content-Length")?.trim().parse()?;
        if answer.len() >= end + 4 + length {
            return Ok(());
        }
    }
}
