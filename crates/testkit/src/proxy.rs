//! A TCP proxy between clients and a server. The proxy can close and delay connections, drop or truncate answers, hold
//! back the bytes of clients, and replace bytes.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

static MADE_FOR: LazyLock<Mutex<HashMap<String, String>>> = LazyLock::new(Mutex::default);

/// If `address` belongs to a proxy of this process, returns the address of the server behind the proxy. A proxy can
/// lead to another proxy.
pub fn behind(address: &str) -> String {
    let known = MADE_FOR.lock().unwrap();
    let mut address = address.to_owned();
    while let Some(server) = known.get(&address) {
        address.clone_from(server);
    }
    address
}

pub struct Proxy {
    pub address: SocketAddr,
    line: Arc<Line>,
}

struct Line {
    server: Mutex<String>,
    open: Mutex<CancellationToken>,
    held: watch::Sender<bool>,
    muted: AtomicBool,
    /// The bytes that the server sent, if the proxy records them.
    answers: Mutex<Option<Vec<u8>>>,
    /// If a client sends these bytes, the proxy starts to hold back the clients' bytes.
    last_words: Mutex<Option<Vec<u8>>>,
    /// Each piece of data is delayed by a time in this range, in milliseconds.
    delay: Mutex<Option<Range<u64>>>,
    /// The proxy closes each connection after the server has sent this number of further bytes.
    answers_left: Mutex<Option<usize>>,
    /// Bytes that the proxy replaces, and the bytes that it passes instead.
    replaced: Mutex<Vec<(Vec<u8>, Vec<u8>)>>,
    pieces: AtomicU64,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The entry must go, because the next proxy can get the same port.
        MADE_FOR.lock().unwrap().remove(&self.address.to_string());
    }
}

impl Proxy {
    pub async fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        MADE_FOR.lock().unwrap().insert(address.to_string(), server.clone());
        let line = Arc::new(Line::to(server));
        let proxy = Self { address, line: Arc::clone(&line) };
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                // The token first: [`Proxy::fail`] must also close a connection that is being opened.
                let cut = line.open.lock().unwrap().clone();
                let server = line.server.lock().unwrap().clone();
                let Ok(far) = TcpStream::connect(server).await else { continue };
                let line = Arc::clone(&line);
                tokio::spawn(async move { cut.run_until_cancelled(line.through(near, far, &cut)).await });
            }
        });
        proxy
    }

    /// Starts a proxy for the server of `url`. Returns the proxy, and `url` with the proxy's address.
    pub async fn before(url: &str) -> (Self, String) {
        let mut url = url::Url::parse(url).unwrap();
        let proxy = Self::to(format!("{}:{}", url.host_str().unwrap(), url.port().unwrap())).await;
        url.set_port(Some(proxy.address.port())).unwrap();
        (proxy, url.to_string())
    }

    /// Connects new clients to another server. Open connections keep their server.
    pub fn lead(&self, server: String) {
        *self.line.server.lock().unwrap() = server;
    }

    /// Closes every open connection. New connections work.
    pub fn cut(&self) {
        self.line.muted.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.line.open.lock().unwrap()).cancel();
    }

    /// Closes every open connection, and makes new connections fail.
    pub fn fail(&self) {
        self.lead("127.0.0.1:1".to_owned());
        self.cut();
    }

    /// Drops the server's answers until the connections are closed.
    pub fn mute(&self) {
        self.line.muted.store(true, Ordering::Relaxed);
    }

    pub fn hold(&self) {
        *self.line.answers.lock().unwrap() = Some(Vec::new());
        self.line.held.send_replace(true);
    }

    /// When a client sends `words`, the proxy begins to hold all bytes that clients send. The proxy holds `words`, too.
    pub fn hold_from(&self, words: &[u8]) {
        *self.line.last_words.lock().unwrap() = Some(words.to_vec());
    }

    pub fn holds(&self) -> bool {
        *self.line.held.borrow()
    }

    /// Sends the held bytes to the server. Also sends the held bytes of clients that are no longer connected.
    pub fn release(&self) {
        self.line.held.send_replace(false);
    }

    pub fn answers(&self) -> Vec<u8> {
        self.line.answers.lock().unwrap().clone().unwrap_or_default()
    }

    /// Passes no bytes in either direction until [`Proxy::clear`]. Connections stay open, and the proxy accepts new
    /// connections.
    pub fn silence(&self) {
        self.mute();
        self.line.held.send_replace(true);
    }

    /// Delays each piece of data by a number of milliseconds in this range, in both directions.
    pub fn delay(&self, milliseconds: Range<u64>) {
        *self.line.delay.lock().unwrap() = Some(milliseconds);
    }

    /// Closes each connection after the server has sent `bytes` more bytes. The limit also applies to connections that
    /// are already open.
    pub fn truncate(&self, bytes: usize) {
        *self.line.answers_left.lock().unwrap() = Some(bytes);
    }

    /// Passes `to` instead of `from` in both directions, as a proxy does that knows the protocol. Both have the same
    /// length, because messages contain their length.
    pub fn replace(&self, from: &[u8], to: &[u8]) {
        assert_eq!(from.len(), to.len());
        self.line.replaced.lock().unwrap().push((from.to_vec(), to.to_vec()));
    }

    pub fn clear(&self) {
        *self.line.delay.lock().unwrap() = None;
        *self.line.answers_left.lock().unwrap() = None;
        *self.line.last_words.lock().unwrap() = None;
        if self.holds() || self.line.muted.load(Ordering::Relaxed) {
            self.cut();
            self.release();
        }
    }
}

impl Line {
    fn to(server: String) -> Self {
        Self {
            server: Mutex::new(server),
            open: Mutex::default(),
            held: watch::Sender::new(false),
            muted: AtomicBool::default(),
            answers: Mutex::default(),
            last_words: Mutex::default(),
            delay: Mutex::default(),
            answers_left: Mutex::default(),
            replaced: Mutex::default(),
            pieces: AtomicU64::default(),
        }
    }

    /// Copies bytes in both directions until both directions have ended, or until the proxy truncates the answers.
    async fn through(&self, near: TcpStream, far: TcpStream, cut: &CancellationToken) {
        let (from_near, to_near) = near.into_split();
        let (from_far, to_far) = far.into_split();
        let broken = CancellationToken::new();
        let both = async { tokio::join!(self.ask(from_near, to_far, cut), self.answer(from_far, to_near, &broken)) };
        let _ = broken.run_until_cancelled(both).await;
    }

    async fn ask(&self, mut near: OwnedReadHalf, mut far: OwnedWriteHalf, cut: &CancellationToken) {
        let mut is_held = self.held.subscribe();
        while let Some(mut bytes) = some(&mut near).await {
            self.replace_in(&mut bytes);
            let is_last = |words: &mut Vec<u8>| bytes.windows(words.len()).any(|part| part == words);
            let last = self.last_words.lock().unwrap().take_if(is_last);
            if last.is_some() {
                self.held.send_replace(true);
            }
            self.wait().await;
            let _ = is_held.wait_for(|held| !held).await;
            // [`Proxy::cut`] ends this task only when the task waits.
            if cut.is_cancelled() {
                return;
            }
            if far.write_all(&bytes).await.is_err() {
                break;
            }
        }
        let _ = far.shutdown().await;
    }

    async fn answer(&self, mut far: OwnedReadHalf, mut near: OwnedWriteHalf, broken: &CancellationToken) {
        let mut near_listens = true;
        let mut passes = None;
        while let Some(mut bytes) = some(&mut far).await {
            self.replace_in(&mut bytes);
            passes = self.answers_left.lock().unwrap().map(|left| passes.unwrap_or(left));
            if let Some(left) = &mut passes {
                bytes.truncate(*left);
                *left -= bytes.len();
            }
            self.wait().await;
            near_listens = near_listens && !self.muted.load(Ordering::Relaxed) && near.write_all(&bytes).await.is_ok();
            if let Some(answers) = self.answers.lock().unwrap().as_mut() {
                answers.extend(bytes);
            }
            if passes == Some(0) {
                broken.cancel();
            }
        }
        let _ = near.shutdown().await;
    }

    fn replace_in(&self, bytes: &mut [u8]) {
        for (from, to) in self.replaced.lock().unwrap().iter() {
            for at in 0..bytes.len().saturating_sub(from.len() - 1) {
                if bytes[at..].starts_with(from) {
                    bytes[at..at + to.len()].copy_from_slice(to);
                }
            }
        }
    }

    async fn wait(&self) {
        let delay = self.delay.lock().unwrap().clone();
        let Some(delay) = delay else { return };
        // Multiply by a prime, so the delays of successive pieces differ.
        let piece = self.pieces.fetch_add(1, Ordering::Relaxed).wrapping_mul(7_919);
        let milliseconds = delay.start + piece % (delay.end - delay.start).max(1);
        tokio::time::sleep(Duration::from_millis(milliseconds)).await;
    }
}

async fn some(from: &mut (impl AsyncRead + Unpin)) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 16 * 1024];
    let read = from.read(&mut bytes).await.ok().filter(|read| *read > 0)?;
    bytes.truncate(read);
    Some(bytes)
}
