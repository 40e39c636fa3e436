//! Runs a Redis server for one test. The test can restart the server or make it a replica.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::eventually;
use super::ports::free_port;

pub struct Private {
    child: Child,
    port: u16,
    folder: tempfile::TempDir,
    arguments: Vec<String>,
}

impl Private {
    /// Starts a server that keeps nothing on disk. `arguments` are further settings of the server.
    pub async fn start(arguments: &[&str]) -> Self {
        let port = free_port();
        let folder = tempfile::tempdir().unwrap();
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let child = spawn(port, folder.path(), &arguments);
        let server = Self { child, port, folder, arguments };
        server.answers().await;
        server
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    pub async fn connect(&self) -> redis::aio::MultiplexedConnection {
        redis::Client::open(self.url()).unwrap().get_multiplexed_async_connection().await.unwrap()
    }

    /// Kills the server, and starts it again without data.
    pub async fn restart(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = spawn(self.port, self.folder.path(), &self.arguments);
        self.answers().await;
    }

    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status().unwrap();
        assert!(sent.success(), "kill -{name}");
    }

    async fn answers(&self) {
        let client = redis::Client::open(self.url()).unwrap();
        eventually("the server answers", || async { client.get_multiplexed_async_connection().await.is_ok() }).await;
    }
}

fn spawn(port: u16, folder: &Path, arguments: &[String]) -> Child {
    Command::new("redis-server")
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
