//! Builds the packages under clients/, installs them from the build, and uses them in an empty folder.

mod gateway;
mod readme;
mod scenario;
mod unit;

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin};
use tokio::sync::oneshot;

use super::common::{stderr, stdout};
use super::example::Example;

/// A package, and the kind of program that uses it: Python with threads, Python with asyncio, or Node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Package {
    Threads,
    Asyncio,
    Node,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs the command. Fails if the command fails.
fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}{}", stdout(&output), stderr(&output));
    stdout(&output)
}

/// Builds the wheel of the Python package, and installs the wheel. The wheel's dependencies come from Debian.
fn install_python(folder: &Path) {
    // pip writes into the folder of the sources, so pip gets a copy of this folder.
    let sources = folder.join("sources");
    run(Command::new("cp").args(["-r", "clients/python"]).arg(&sources).current_dir(root()));
    let pip = |arguments: &[&str]| {
        let mut command = Example::Python.interpreter();
        run(command.args(["-m", "pip", "--quiet", "--disable-pip-version-check"]).args(arguments).current_dir(folder));
    };
    pip(&["wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheels", "./sources"]);
    let wheel = "wheels/tallyd-0.1.0-py3-none-any.whl";
    pip(&["install", "--no-index", "--no-deps", "--target", "installed", wheel]);
    assert!(folder.join("installed/tallyd/py.typed").exists(), "the wheel must contain the type hints");
    has_licences(&folder.join("installed/tallyd-0.1.0.dist-info"));
    let archive = "import flit_core.buildapi as build; build.build_sdist('..')";
    run(Example::Python.interpreter().args(["-c", archive]).current_dir(&sources));
    run(Command::new("tar").args(["-xzf", "tallyd-0.1.0.tar.gz"]).current_dir(folder));
    has_licences(&folder.join("tallyd-0.1.0"));
}

/// Checks that a folder has the texts of the licences.
fn has_licences(folder: &Path) {
    for name in ["LICENSE-MIT", "LICENSE-APACHE"] {
        let text =
            fs::read(folder.join(name)).unwrap_or_else(|error| panic!("{name} in {}: {error}", folder.display()));
        assert!(text == fs::read(root().join(name)).unwrap(), "{name} must be that of tallyd");
    }
}

/// Packs Node's tarball and installs it beside the libraries of dev/test.
fn install_node(folder: &Path) {
    let libraries = root().join("target/clients/node_modules");
    assert!(libraries.exists(), "the libraries of clients/node are missing: run dev/test");
    run(Command::new("npm")
        .args(["pack", "--silent", "--pack-destination"])
        .arg(folder)
        .arg(root().join("clients/node"))
        .current_dir(folder));
    run(Command::new("cp").arg("-al").arg(libraries).arg(folder));
    fs::write(folder.join("package.json"), "{\"private\": true}").unwrap();
    let options = ["install", "--offline", "--no-save", "--no-audit", "--no-fund", "--silent"];
    run(Command::new("npm").args(options).arg("./tallyd-0.1.0.tgz").current_dir(folder));
    assert!(
        folder.join("node_modules/tallyd/src/index.d.ts").exists(),
        "the tarball must contain the type declarations"
    );
    has_licences(&folder.join("node_modules/tallyd"));
}

impl Package {
    /// The part of a test world's name that identifies the package.
    fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::Asyncio => "asyncio",
            Self::Node => "node",
        }
    }

    /// Makes a folder that contains the installed package and nothing else.
    fn install(self) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        match self {
            Self::Threads | Self::Asyncio => install_python(folder.path()),
            Self::Node => install_node(folder.path()),
        }
        folder
    }

    /// Starts a program that uses the package.
    fn start(self, folder: &Path) -> Driver {
        let drivers = root().join("tests/clients/packages");
        let mut command = match self {
            Self::Threads | Self::Asyncio => {
                let mut python = Example::Python.interpreter();
                python.arg(drivers.join("driver.py")).arg(self.name()).env("PYTHONPATH", folder.join("installed"));
                python
            }
            Self::Node => {
                // Node searches for modules in the program's folder.
                let program = folder.join("driver.mjs");
                fs::copy(drivers.join("driver.mjs"), &program).unwrap();
                let mut node = Command::new("node");
                node.arg(program);
                node
            }
        };
        Driver::start(command.current_dir(folder))
    }
}

type Answers = Arc<Mutex<HashMap<u64, oneshot::Sender<Value>>>>;

/// A running program that uses the package and reads commands line by line.
pub struct Driver {
    child: Child,
    orders: tokio::sync::Mutex<(ChildStdin, u64)>,
    answers: Answers,
}

/// An error of the package. The error contains the events that must be published again: one event, or some events of a
/// list.
#[derive(Debug)]
pub struct Failure {
    pub class: String,
    pub message: String,
    pub event: Value,
}

impl Driver {
    fn start(command: &mut Command) -> Self {
        let command = std::mem::replace(command, Command::new("true"));
        let mut command = tokio::process::Command::from(command);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn().expect("start the driver");
        let orders = tokio::sync::Mutex::new((child.stdin.take().unwrap(), 0));
        let answers = Answers::default();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let waiting = Arc::clone(&answers);
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                let answer: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
                let asked = waiting.lock().unwrap().remove(&answer["id"].as_u64().unwrap()).unwrap();
                let _ = asked.send(answer);
            }
            // When the program has ended, all waiting calls fail.
            waiting.lock().unwrap().clear();
        });
        Self { child, orders, answers }
    }

    /// Calls a method. If several tasks make calls, the calls run at the same time.
    pub async fn call(&self, method: &str, with: Value, options: Value) -> Result<Value, Failure> {
        let (answer, answered) = oneshot::channel();
        {
            let mut orders = self.orders.lock().await;
            orders.1 += 1;
            let id = orders.1;
            self.answers.lock().unwrap().insert(id, answer);
            let order = json!({"id": id, "do": method, "with": with, "options": options});
            orders.0.write_all(format!("{order}\n").as_bytes()).await.unwrap();
        }
        let mut answer = answered.await.unwrap_or_else(|_| panic!("the driver exited during {method}"));
        if let Some(class) = answer["error"].as_str() {
            let message = answer["message"].as_str().unwrap().to_owned();
            return Err(Failure { class: class.to_owned(), message, event: answer["event"].take() });
        }
        Ok(answer["value"].take())
    }

    /// Makes a call that must succeed.
    pub async fn done(&self, method: &str, with: Value) -> Value {
        self.call(method, with.clone(), json!({}))
            .await
            .unwrap_or_else(|failure| panic!("{method} {with}: {failure:?}"))
    }

    /// Makes a call that must fail.
    pub async fn fails(&self, method: &str, with: Value) -> Failure {
        let called = self.call(method, with.clone(), json!({})).await;
        called.expect_err(&format!("{method} {with} did not fail"))
    }

    /// Closes the client and ends the program, which must not hang.
    pub async fn close(self) {
        let Self { mut child, orders, .. } = self;
        drop(orders);
        let ended = tokio::time::timeout(super::common::DEADLINE, child.wait()).await;
        assert!(ended.expect("the driver did not exit").unwrap().success());
    }
}
