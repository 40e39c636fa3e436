//! Runs Chromium without a window, controlled by ChromeDriver over WebDriver (<https://www.w3.org/TR/webdriver2/>).

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use axum::body::{Body, to_bytes};
use axum::http::{Method, Request};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

/// The largest answer in bytes. Screenshots are the largest answers.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// The maximum number of times that chromedriver is started. Chromedriver opens the same port for IPv4 and for IPv6,
/// but checks whether the port is free for only one of these protocols. If another process uses the port with the other
/// protocol, chromedriver ends.
const STARTS_MAX: usize = 5;

/// Starts the driver and returns it with its port. Returns `None` if the driver ended without opening a port.
fn start_driver() -> Option<(Child, u16)> {
    let mut driver = Command::new("chromedriver");
    let driver = driver.arg("--port=0").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut driver = driver.spawn().expect("chromedriver can't be run: apt-get install chromium chromium-driver");
    let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines();
    let port =
        lines.find_map(|line| line.unwrap().split_once("successfully on port ")?.1.trim_end_matches('.').parse().ok());
    if port.is_none() {
        let _ = driver.wait();
    }
    Some((driver, port?))
}

/// A tab with its own profile. Dropping the `Browser` kills Chromium and chromedriver.
pub struct Browser {
    driver: Child,
    port: u16,
    session: String,
    /// Chromium's process id, because Chromium keeps running when chromedriver is killed.
    process: i64,
    profile: tempfile::TempDir,
}

impl Browser {
    pub async fn start() -> Self {
        let profile = tempfile::tempdir().unwrap();
        let (driver, port) = (0..STARTS_MAX).find_map(|_| start_driver()).expect("chromedriver printed no port");
        let mut browser = Self { driver, port, session: String::new(), process: 0, profile };
        let folder = format!("--user-data-dir={}", browser.profile.path().display());
        let arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            &folder,
        ];
        let capabilities = json!({ "alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": { "args": arguments },
            "goog:loggingPrefs": { "browser": "ALL", "performance": "ALL" },
        }});
        let made = browser.ask(Method::POST, "/session", json!({ "capabilities": capabilities })).await;
        browser.session = format!("/session/{}", made["sessionId"].as_str().unwrap());
        browser.process = made["capabilities"]["goog:processID"].as_i64().unwrap();
        browser
    }

    pub async fn open(&self, url: &str) {
        self.post("/url", json!({ "url": url })).await;
    }

    pub async fn value(&self, expression: &str) -> Value {
        self.post("/execute/sync", json!({ "script": format!("return {expression}"), "args": [] })).await
    }

    pub async fn text(&self, selector: &str) -> String {
        let found = format!("document.querySelector({})?.innerText ?? ''", json!(selector));
        self.value(&found).await.as_str().unwrap().to_owned()
    }

    pub async fn show_as(&self, width: u32, height: u32, scheme: &str) {
        let metrics = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.devtools("Emulation.setDeviceMetricsOverride", metrics).await;
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.devtools("Emulation.setEmulatedMedia", json!({ "features": features })).await;
    }

    pub async fn picture(&self, path: &Path) {
        let size = self.value("[document.documentElement.clientWidth, document.documentElement.scrollHeight]").await;
        let clip = json!({ "x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1 });
        let shot = json!({ "format": "png", "captureBeyondViewport": true, "clip": clip });
        let taken = self.devtools("Page.captureScreenshot", shot).await;
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, STANDARD.decode(taken["data"].as_str().unwrap()).unwrap()).unwrap();
    }

    pub async fn console(&self) -> Vec<String> {
        let entries = self.post("/se/log", json!({ "type": "browser" })).await;
        entries.as_array().unwrap().iter().map(|entry| entry["message"].as_str().unwrap().to_owned()).collect()
    }

    pub async fn requests(&self) -> Vec<String> {
        let entries = self.post("/se/log", json!({ "type": "performance" })).await;
        let events = entries
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| -> Value { serde_json::from_str(entry["message"].as_str().unwrap()).unwrap() });
        let sent = events.filter(|event| event["message"]["method"] == "Network.requestWillBeSent");
        sent.map(|event| event["message"]["params"]["request"]["url"].as_str().unwrap().to_owned()).collect()
    }

    async fn devtools(&self, method: &str, parameters: Value) -> Value {
        self.post("/goog/cdp/execute", json!({ "cmd": method, "params": parameters })).await
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        self.ask(Method::POST, &format!("{}{path}", self.session), body).await
    }

    async fn ask(&self, method: Method, path: &str, body: Value) -> Value {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(connection);
        let request = Request::builder().method(method).uri(path).header("Host", format!("127.0.0.1:{}", self.port));
        let request = request.header("Content-Type", "application/json").body(Body::from(body.to_string())).unwrap();
        let answer = sender.send_request(request).await.unwrap();
        let bytes = to_bytes(Body::new(answer.into_body()), ANSWER_BYTES_MAX).await.unwrap();
        connection.abort();
        let mut answer: Value = serde_json::from_slice(&bytes).unwrap();
        assert!(answer["value"]["error"].is_null(), "{path}: {answer:#}");
        answer["value"].take()
    }

    pub async fn close(mut self) {
        self.ask(Method::DELETE, &self.session.clone(), json!({})).await;
        self.process = 0;
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if self.process > 0 {
            let _ = Command::new("kill").arg("-KILL").arg(self.process.to_string()).status();
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}
