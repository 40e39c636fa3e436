//! A TCP proxy in front of a server, whose connections are cut, slowed down, silenced or broken off, or whose callers' bytes are held back.

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

/// Which server each proxy of this process was made for, by its own address.
static MADE_FOR: LazyLock<Mutex<HashMap<String, String>>> = LazyLock::new(Mutex::default);

/// The server that an address leads to, through proxies of this process.
pub fn behind(address: &str) -> String {
    let known = MADE_FOR.lock().unwrap();
    let mut address = address.to_owned();
    while let Some(server) = known.get(&address) {
        address.clone_from(server);
    }
    address
}

pub struct Proxy {
    /// Where it listens: in place of the server.
    pub address: SocketAddr,
    line: Arc<Line>,
}

/// What becomes of the bytes of all connections.
struct Line {
    server: Mutex<String>,
    open: Mutex<CancellationToken>,
    held: watch::Sender<bool>,
    muted: AtomicBool,
    /// What the server has said, once somebody listens.
    answers: Mutex<Option<Vec<u8>>>,
    /// What a caller says for everything from there on to be held.
    last_words: Mutex<Option<Vec<u8>>>,
    /// Milliseconds that each piece takes.
    delay: Mutex<Option<Range<u64>>>,
    /// Bytes of answers that each connection still passes.
    answers_left: Mutex<Option<usize>>,
    /// Pieces that went through, for delays that differ.
    pieces: AtomicU64,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The number may be another's next.
        MADE_FOR.lock().unwrap().remove(&self.address.to_string());
    }
}

impl Proxy {
    /// A proxy that leads to that server.
    pub async fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        MADE_FOR.lock().unwrap().insert(address.to_string(), server.clone());
        let line = Arc::new(Line::to(server));
        let proxy = Self { address, line: Arc::clone(&line) };
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let server = line.server.lock().unwrap().clone();
                let Ok(far) = TcpStream::connect(server).await else { continue };
                let cut = line.open.lock().unwrap().clone();
                let line = Arc::clone(&line);
                tokio::spawn(async move { cut.run_until_cancelled(line.through(near, far)).await });
            }
        });
        proxy
    }

    /// `url` with the proxy's address in place of the server's.
    pub async fn before(url: &str) -> (Self, String) {
        let mut url = url::Url::parse(url).unwrap();
        let proxy = Self::to(format!("{}:{}", url.host_str().unwrap(), url.port().unwrap())).await;
        url.set_port(Some(proxy.address.port())).unwrap();
        (proxy, url.to_string())
    }

    /// Leads whoever connects from now on to another server. Connections that are open stay where they are.
    pub fn lead(&self, server: String) {
        *self.line.server.lock().unwrap() = server;
    }

    /// Closes every connection that is open now. New ones go through.
    pub fn cut(&self) {
        self.line.muted.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.line.open.lock().unwrap()).cancel();
    }

    /// Closes every connection, those to come, too.
    pub fn fail(&self) {
        self.lead("127.0.0.1:1".to_owned());
        self.cut();
    }

    /// Keeps from the callers what the server says, until they are cut.
    pub fn mute(&self) {
        self.line.muted.store(true, Ordering::Relaxed);
    }

    /// Takes what callers send from now on, and keeps it from the server.
    pub fn hold(&self) {
        *self.line.answers.lock().unwrap() = Some(Vec::new());
        self.line.held.send_replace(true);
    }

    /// Begins to hold when a caller sends that, and doesn't let it through.
    pub fn hold_from(&self, words: &[u8]) {
        *self.line.last_words.lock().unwrap() = Some(words.to_vec());
    }

    /// Whether what callers send is held.
    pub fn holds(&self) -> bool {
        *self.line.held.borrow()
    }

    /// Sends the server what was held back, also of callers that have gone meanwhile.
    pub fn release(&self) {
        self.line.held.send_replace(false);
    }

    /// What the server has said since [`Proxy::hold`].
    pub fn answers(&self) -> Vec<u8> {
        self.line.answers.lock().unwrap().clone().unwrap_or_default()
    }

    /// Connections stay open, and new ones are taken, but nothing goes either way, until [`Proxy::clear`].
    pub fn silence(&self) {
        self.mute();
        self.line.held.send_replace(true);
    }

    /// Has each piece take so many milliseconds, each way.
    pub fn delay(&self, milliseconds: Range<u64>) {
        *self.line.delay.lock().unwrap() = Some(milliseconds);
    }

    /// Closes each connection, those that are open too, after so many more bytes of the server's.
    pub fn truncate(&self, bytes: usize) {
        *self.line.answers_left.lock().unwrap() = Some(bytes);
    }

    /// What comes now goes through as if nothing had been. What was held is never sent: its connections are cut.
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
            pieces: AtomicU64::default(),
        }
    }

    /// Copies both ways until both have ended, or the server's words are broken off.
    async fn through(&self, near: TcpStream, far: TcpStream) {
        let (from_near, to_near) = near.into_split();
        let (from_far, to_far) = far.into_split();
        let broken = CancellationToken::new();
        let both = async { tokio::join!(self.ask(from_near, to_far), self.answer(from_far, to_near, &broken)) };
        let _ = broken.run_until_cancelled(both).await;
    }

    async fn ask(&self, mut near: OwnedReadHalf, mut far: OwnedWriteHalf) {
        let mut is_held = self.held.subscribe();
        while let Some(bytes) = some(&mut near).await {
            let is_last = |words: &mut Vec<u8>| bytes.windows(words.len()).any(|part| part == words);
            let last = self.last_words.lock().unwrap().take_if(is_last);
            if last.is_some() {
                self.held.send_replace(true);
            }
            self.wait().await;
            let _ = is_held.wait_for(|held| !held).await;
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

    async fn wait(&self) {
        let delay = self.delay.lock().unwrap().clone();
        let Some(delay) = delay else { return };
        // Multiplied by a prime, so that neighbours differ.
        let piece = self.pieces.fetch_add(1, Ordering::Relaxed).wrapping_mul(7_919);
        let milliseconds = delay.start + piece % (delay.end - delay.start).max(1);
        tokio::time::sleep(Duration::from_millis(milliseconds)).await;
    }
}

/// The next bytes; none at the end.
async fn some(from: &mut (impl AsyncRead + Unpin)) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 16 * 1024];
    let read = from.read(&mut bytes).await.ok().filter(|read| *read > 0)?;
    bytes.truncate(read);
    Some(bytes)
}
