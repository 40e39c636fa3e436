//! A TCP proxy in front of a server, whose connections a test cuts, or whose callers' bytes it holds back.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What the server has said, once somebody listens.
type Answers = Arc<Mutex<Option<Vec<u8>>>>;

/// What a caller says for everything from there on to be held.
type LastWords = Arc<Mutex<Option<Vec<u8>>>>;

pub struct Proxy {
    /// Where it listens: in place of the server.
    pub address: SocketAddr,
    server: Arc<Mutex<String>>,
    open: Arc<Mutex<CancellationToken>>,
    held: watch::Sender<bool>,
    muted: Arc<AtomicBool>,
    answers: Answers,
    last_words: LastWords,
}

impl Proxy {
    pub async fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (held, muted, server) = (watch::Sender::new(false), Arc::default(), Arc::new(Mutex::new(server)));
        let (open, answers, last_words) = (Arc::default(), Arc::default(), Arc::default());
        let proxy = Self { address, server: Arc::clone(&server), open, held, muted, answers, last_words };
        let (open, held, answers) = (Arc::clone(&proxy.open), proxy.held.clone(), Arc::clone(&proxy.answers));
        let (muted, last_words) = (Arc::clone(&proxy.muted), Arc::clone(&proxy.last_words));
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let server = server.lock().unwrap().clone();
                let Ok(far) = TcpStream::connect(server).await else { continue };
                let cut = open.lock().unwrap().clone();
                let (held, last_words) = (held.clone(), Arc::clone(&last_words));
                let (muted, answers) = (Arc::clone(&muted), Arc::clone(&answers));
                tokio::spawn(async move {
                    let _ = cut.run_until_cancelled(through(near, far, held, last_words, muted, answers)).await;
                });
            }
        });
        proxy
    }

    /// Leads whoever connects from now on to another server. Connections that are open stay where they are.
    pub fn lead(&self, server: String) {
        *self.server.lock().unwrap() = server;
    }

    /// Closes every connection that is open now. New ones go through.
    pub fn cut(&self) {
        self.muted.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.open.lock().unwrap()).cancel();
    }

    /// Keeps from the callers what the server says, until they are cut.
    pub fn mute(&self) {
        self.muted.store(true, Ordering::Relaxed);
    }

    /// Takes what callers send from now on, and keeps it from the server.
    pub fn hold(&self) {
        *self.answers.lock().unwrap() = Some(Vec::new());
        self.held.send_replace(true);
    }

    /// Begins to [`Proxy::hold`] when a caller sends that, and doesn't let it through.
    pub fn hold_from(&self, words: &[u8]) {
        *self.last_words.lock().unwrap() = Some(words.to_vec());
    }

    /// Sends the server what was held back, also of callers that have gone meanwhile.
    pub fn release(&self) {
        self.held.send_replace(false);
    }

    /// What the server has said since [`Proxy::hold`].
    pub fn answers(&self) -> Vec<u8> {
        self.answers.lock().unwrap().clone().unwrap_or_default()
    }

    /// `url` with the proxy's address in place of the server's.
    pub async fn before(url: &str) -> (Self, String) {
        let mut url = url::Url::parse(url).unwrap();
        let proxy = Self::to(format!("{}:{}", url.host_str().unwrap(), url.port().unwrap())).await;
        url.set_port(Some(proxy.address.port())).unwrap();
        (proxy, url.to_string())
    }
}

/// Copies both ways until both have ended.
async fn through(
    near: TcpStream,
    far: TcpStream,
    held: watch::Sender<bool>,
    last_words: LastWords,
    muted: Arc<AtomicBool>,
    answers: Answers,
) {
    let (mut from_near, mut to_near) = near.into_split();
    let (mut from_far, mut to_far) = far.into_split();
    let asking = async {
        let mut is_held = held.subscribe();
        while let Some(bytes) = some(&mut from_near).await {
            let last = last_words.lock().unwrap().take_if(|words| bytes.windows(words.len()).any(|part| part == words));
            if last.is_some() {
                held.send_replace(true);
            }
            let _ = is_held.wait_for(|held| !held).await;
            if to_far.write_all(&bytes).await.is_err() {
                break;
            }
        }
        let _ = to_far.shutdown().await;
    };
    let answering = async {
        let mut near_listens = true;
        while let Some(bytes) = some(&mut from_far).await {
            near_listens = near_listens && !muted.load(Ordering::Relaxed) && to_near.write_all(&bytes).await.is_ok();
            if let Some(answers) = answers.lock().unwrap().as_mut() {
                answers.extend(bytes);
            }
        }
        let _ = to_near.shutdown().await;
    };
    tokio::join!(asking, answering);
}

/// The next bytes; none at the end.
async fn some(from: &mut (impl AsyncRead + Unpin)) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 16 * 1024];
    let read = from.read(&mut bytes).await.ok().filter(|read| *read > 0)?;
    bytes.truncate(read);
    Some(bytes)
}
