//! A network of one daemon's own, which falls silent when it is told to: what is sent arrives nowhere, and nobody is told.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

pub struct Relay {
    address: SocketAddr,
    silent: watch::Sender<bool>,
}

impl Relay {
    /// Before the server in `url`; with the address that leads through here.
    pub async fn before(url: &str) -> Result<(Self, String)> {
        let mut url = url::Url::parse(url)?;
        let server = format!("{}:{}", url.host_str().context("no host")?, url.port().context("no port")?);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let relay = Self { address: listener.local_addr()?, silent: watch::Sender::new(false) };
        let silent = relay.silent.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let Ok(far) = TcpStream::connect(&server).await else { continue };
                let ((from_near, to_near), (from_far, to_far)) = (near.into_split(), far.into_split());
                tokio::spawn(copy(from_near, to_far, silent.subscribe()));
                tokio::spawn(copy(from_far, to_near, silent.subscribe()));
            }
        });
        url.set_port(Some(relay.address.port())).map_err(|()| anyhow::anyhow!("no port"))?;
        Ok((relay, url.to_string()))
    }

    /// From now on nothing goes through, and nothing is closed.
    pub fn fall_silent(&self) {
        self.silent.send_replace(true);
    }
}

async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut silent: watch::Receiver<bool>) {
    let mut bytes = vec![0; 64 * 1024];
    while let Ok(read @ 1..) = from.read(&mut bytes).await {
        // Its sender lives as long as the measurement: then both ends are closed.
        if silent.wait_for(|silent| !silent).await.is_err() {
            return;
        }
        let Some(read) = bytes.get(..read) else { return };
        if to.write_all(read).await.is_err() {
            return;
        }
    }
}
