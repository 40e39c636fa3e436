//! A proxy in front of a server. The proxy reads the callers' requests and then never answers, like a server that
//! hangs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Says how many callers get no answer, and after which text the proxy stops answering.
#[derive(Clone, Copy)]
pub struct Stall {
    /// The proxy stops answering after the caller has sent this text.
    pub after: &'static str,
    /// The number of callers that get no answer. The proxy answers all later callers.
    pub callers: usize,
}

pub struct Stalling {
    /// The server's URL, but with the proxy's address.
    pub url: String,
    callers: Arc<AtomicUsize>,
    stalled: Arc<AtomicUsize>,
}

impl Stalling {
    pub async fn before(url: &str, stall: Stall) -> Self {
        let mut url = url::Url::parse(url).unwrap();
        let server = format!("{}:{}", url.host_str().unwrap(), url.port().unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        url.set_port(Some(listener.local_addr().unwrap().port())).unwrap();
        let proxy = Self { url: url.to_string(), callers: Arc::default(), stalled: Arc::default() };
        let (callers, stalled) = (Arc::clone(&proxy.callers), Arc::clone(&proxy.stalled));
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                callers.fetch_add(1, Ordering::Relaxed);
                let far = TcpStream::connect(&server).await.unwrap();
                let ((from_near, to_near), (from_far, to_far)) = (near.into_split(), far.into_split());
                let silent = watch::Sender::new(false);
                tokio::spawn(answer(from_far, to_near, silent.subscribe()));
                tokio::spawn(ask(from_near, to_far, silent, stall, Arc::clone(&stalled)));
            }
        });
        proxy
    }

    /// Returns how many connections clients have made.
    pub fn callers(&self) -> usize {
        self.callers.load(Ordering::Relaxed)
    }

    /// Returns how many of the connections got no answer.
    pub fn stalled(&self) -> usize {
        self.stalled.load(Ordering::Relaxed)
    }
}

async fn ask(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    silent: watch::Sender<bool>,
    stall: Stall,
    stalled: Arc<AtomicUsize>,
) {
    let mut bytes = vec![0; 64 * 1024];
    while let Ok(read @ 1..) = from.read(&mut bytes).await {
        let said = bytes[..read].windows(stall.after.len()).any(|part| part == stall.after.as_bytes());
        if said && !*silent.borrow() && stalled.load(Ordering::Relaxed) < stall.callers {
            stalled.fetch_add(1, Ordering::Relaxed);
            silent.send_replace(true);
        }
        if to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}

async fn answer(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, silent: watch::Receiver<bool>) {
    let mut bytes = vec![0; 64 * 1024];
    while let Ok(read @ 1..) = from.read(&mut bytes).await {
        // The proxy forwards an error of Redis, because an error means that the command did nothing. The proxy drops
        // only the answer to a command that ran.
        if (!*silent.borrow() || bytes.starts_with(b"-NOSCRIPT")) && to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}
