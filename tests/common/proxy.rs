//! A TCP proxy in front of a server, whose connections a test cuts.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

pub struct Proxy {
    /// Where it listens: in place of the server.
    pub address: SocketAddr,
    open: Arc<Mutex<CancellationToken>>,
}

impl Proxy {
    /// Passes everything on to `server` (`host:port`).
    pub async fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let open: Arc<Mutex<CancellationToken>> = Arc::default();
        let shared = Arc::clone(&open);
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let Ok(mut far) = TcpStream::connect(&server).await else { continue };
                let cut = shared.lock().unwrap().clone();
                tokio::spawn(async move {
                    let _ = cut.run_until_cancelled(copy_bidirectional(&mut near, &mut far)).await;
                });
            }
        });
        Self { address, open }
    }

    /// Closes every connection that is open now. New ones go through.
    pub fn cut(&self) {
        std::mem::take(&mut *self.open.lock().unwrap()).cancel();
    }

    /// `url` with the proxy's address in place of the server's.
    pub async fn before(url: &str) -> (Self, String) {
        let mut url = url::Url::parse(url).unwrap();
        let proxy = Self::to(format!("{}:{}", url.host_str().unwrap(), url.port().unwrap())).await;
        url.set_port(Some(proxy.address.port())).unwrap();
        (proxy, url.to_string())
    }
}
