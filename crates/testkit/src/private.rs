//! Runs a Redis server for one test. The test can restart the server or make it a replica.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::ports::free_port;
use super::signal::signal;
use super::{eventually, root};

pub struct Private {
    child: Child,
    port: u16,
    folder: tempfile::TempDir,
    arguments: Vec<String>,
    /// A library that changes the server's clock, if the clock is wrong.
    clock: Option<PathBuf>,
}

impl Private {
    pub async fn start(arguments: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), arguments, None).await
    }

    pub async fn start_ahead(ahead: Duration) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (library, source) = (folder.path().join("clock.so"), root().join("torture/clock.c"));
        let mut compile = Command::new("cc");
        assert!(compile.args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap().success());
        std::fs::write(folder.path().join("ahead"), (ahead.as_micros() as i64).to_ne_bytes()).unwrap();
        Self::start_in(folder, &[], Some(library)).await
    }

    async fn start_in(folder: tempfile::TempDir, arguments: &[&str], clock: Option<PathBuf>) -> Self {
        let port = free_port();
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let child = spawn(port, folder.path(), &arguments, clock.as_deref());
        let server = Self { child, port, folder, arguments, clock };
        server.answers().await;
        server
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    pub async fn connect(&self) -> redis::aio::MultiplexedConnection {
        redis::Client::open(self.url()).unwrap().get_multiplexed_async_connection().await.unwrap()
    }

    pub async fn restart(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = spawn(self.port, self.folder.path(), &self.arguments, self.clock.as_deref());
        self.answers().await;
    }

    pub fn signal(&self, name: &str) {
        signal(&self.child, name);
    }

    async fn answers(&self) {
        let client = redis::Client::open(self.url()).unwrap();
        eventually("the server answers", || async { client.get_multiplexed_async_connection().await.is_ok() }).await;
    }
}

fn spawn(port: u16, folder: &Path, arguments: &[String], clock: Option<&Path>) -> Child {
    Command::new("redis-server")
        .envs(clock.map(|library| ("LD_PRELOAD", library)))
        .env("TALLYD_CLOCK", folder.join("ahead"))
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--dir"])
        .arg(folder)
        .args(arguments)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

impl Drop for Private {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
