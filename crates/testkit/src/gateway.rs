//! Runs a gateway as a child process with the accounts of an API server, and sends requests to it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::Value;
use tallyd_core::card::Card;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{Daemon, STARTED, World, program, unit_environment};

const CARD_MAX: Duration = Duration::from_secs(5);

/// The timeout of a request. The timeout is long, because the machine can be under heavy load.
const ANSWER_MAX: Duration = Duration::from_secs(60);

pub struct Gateway {
    pub process: Daemon,
    pub address: String,
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_else(|| panic!("no error: {self:?}")).to_owned()
    }

    pub fn verdicts(&self) -> Vec<String> {
        let events = self.json()["events"].as_array().unwrap_or_else(|| panic!("no events: {self:?}")).clone();
        events.iter().map(|event| event["verdict"].as_str().unwrap().to_owned()).collect()
    }
}

impl World {
    /// Starts a gateway and waits until it accepts requests. If an address in `environment` contains the account with
    /// all rights, the gateway gets the address with an API server's account instead.
    pub async fn gateway_with(&self, environment: &[(&str, &str)]) -> Gateway {
        self.write_card().await;
        self.gateway_without_card(environment).await
    }

    pub async fn gateway_without_card(&self, environment: &[(&str, &str)]) -> Gateway {
        let mut command = self.gateway_command();
        for (name, value) in environment {
            command.env(name, self.as_api(name, value));
        }
        Gateway::spawned(command, self.log_path(STARTED.fetch_add(1, Ordering::Relaxed))).await
    }

    /// Writes the site card that a daemon of this world writes, because not every test starts a daemon. Does nothing
    /// while Redis is unreachable.
    pub async fn write_card(&self) {
        let card = Card::from(&self.config).encode();
        let _ = timeout(CARD_MAX, self.cache.write_site_card(&card)).await;
    }

    pub fn gateway_command(&self) -> Command {
        gateway_command(&self.folder.path().join("gateway.toml"))
    }

    pub async fn gateway(&self) -> Gateway {
        self.gateway_with(&[]).await
    }
}

pub fn gateway_command(config: &Path) -> Command {
    let mut command = Command::new(program());
    command.arg("--config").arg(config).arg("gateway");
    command.env_remove("NOTIFY_SOCKET").envs(unit_environment()).stdin(Stdio::null());
    command
}

impl Gateway {
    pub async fn spawned(mut command: Command, log_path: PathBuf) -> Self {
        command.stderr(File::create(&log_path).unwrap());
        Self::started(Daemon::new(command.spawn().unwrap(), log_path)).await
    }

    pub async fn started(process: Daemon) -> Self {
        process.logged("\"gateway-started\"").await;
        let log = process.log();
        let line = log.lines().find(|line| line.contains("\"gateway-started\"")).unwrap();
        let address = serde_json::from_str::<Value>(line).unwrap()["address"].as_str().unwrap().to_owned();
        Self { process, address }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")).await
    }

    pub async fn post(&self, body: &str) -> Answer {
        self.send(&self.posted(body)).await
    }

    pub fn posted(&self, body: &str) -> String {
        let length = body.len();
        format!(
            "POST /v1/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )
    }

    pub async fn send(&self, request: &str) -> Answer {
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        read(&mut stream).await
    }
}

pub async fn read(stream: &mut (impl AsyncReadExt + Unpin)) -> Answer {
    let mut answer = String::new();
    let read = timeout(ANSWER_MAX, stream.read_to_string(&mut answer)).await;
    read.expect("the gateway did not answer in time").unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_lowercase(), body: body.to_owned() }
}
