//! A separate Redis with default settings, which writes nothing to disk.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use redis::{Connection, Pipeline};

/// How long to wait until the server has started, and until its memory is constant.
const PATIENCE: Duration = Duration::from_secs(120);

pub struct Server {
    child: Child,
    pub connection: Connection,
    _folder: tempfile::TempDir,
}

impl Server {
    pub fn start() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut child = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--save", "", "--port", &port.to_string(), "--dir"])
            .arg(folder.path())
            .stdout(Stdio::null())
            .spawn()
            .context("start redis-server")?;
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}"))?;
        let until = Instant::now() + PATIENCE;
        let connection = loop {
            match client.get_connection() {
                Ok(connection) => break connection,
                Err(error) if Instant::now() > until => {
                    child.kill()?;
                    return Err(error).context("connect to redis-server");
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        Ok(Self { child, connection, _folder: folder })
    }

    pub fn used_memory(&mut self) -> Result<f64> {
        self.info("memory", "used_memory:")
    }

    /// Waits until Redis has finished growing its table of keys, then returns the memory that Redis uses. Redis moves
    /// the entries to the larger table in small steps. Until the last step, the old table needs memory, too.
    pub fn settled_memory(&mut self) -> Result<f64> {
        // By default, Redis does its background work only ten times a second.
        let () = redis::cmd("CONFIG").arg("SET").arg("hz").arg(500).query(&mut self.connection)?;
        let until = Instant::now() + PATIENCE;
        let mut known = self.used_memory()?;
        loop {
            std::thread::sleep(Duration::from_millis(1_000));
            let now = self.used_memory()?;
            // Differences below a page of memory are ignored, because Redis's statistics themselves use some memory.
            if (now - known).abs() < 4_096.0 {
                let () = redis::cmd("CONFIG").arg("SET").arg("hz").arg(10).query(&mut self.connection)?;
                return Ok(now);
            }
            ensure!(Instant::now() < until, "the memory of Redis does not become constant");
            known = now;
        }
    }

    /// Returns the CPU time of Redis for these pipelines, run one after the other, in microseconds.
    pub fn cpu_us_of(&mut self, pipelines: &[Pipeline]) -> Result<f64> {
        let before = self.cpu_us()?;
        for pipeline in pipelines {
            let _: Vec<redis::Value> = pipeline.query(&mut self.connection)?;
        }
        Ok(self.cpu_us()? - before)
    }

    fn cpu_us(&mut self) -> Result<f64> {
        Ok((self.info("cpu", "used_cpu_user:")? + self.info("cpu", "used_cpu_sys:")?) * 1e6)
    }

    fn info(&mut self, section: &str, name: &str) -> Result<f64> {
        let info: String = redis::cmd("INFO").arg(section).query(&mut self.connection)?;
        let line = info.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
        Ok(line.trim().parse()?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
