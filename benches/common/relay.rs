//! A proxy for one daemon. After [`Relay::fall_silent`], the proxy transfers no data but keeps all connections open.

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;

pub struct Relay {
    silent: watch::Sender<bool>,
    accepting: AbortHandle,
}

impl Relay {
    /// Starts a relay to the server in `url`. Also returns the URL of the relay.
    pub async fn before(url: &str) -> Result<(Self, String)> {
        let mut url = url::Url::parse(url)?;
        let server = format!("{}:{}", url.host_str().context("no host")?, url.port().context("no port")?);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (sender, silent) = watch::channel(false);
        let accepting = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let Ok(far) = TcpStream::connect(&server).await else { continue };
                let ((from_near, to_near), (from_far, to_far)) = (near.into_split(), far.into_split());
                tokio::spawn(copy(from_near, to_far, silent.clone()));
                tokio::spawn(copy(from_far, to_near, silent.clone()));
            }
        });
        url.set_port(Some(address.port())).map_err(|()| anyhow::anyhow!("no port"))?;
        Ok((Self { silent: sender, accepting: accepting.abort_handle() }, url.to_string()))
    }

    /// From now on, the relay transfers no data, but keeps all connections open.
    pub fn fall_silent(&self) {
        self.silent.send_replace(true);
    }

    /// Sends the data that the relay has held back.
    pub fn speak(&self) {
        self.silent.send_replace(false);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut silent: watch::Receiver<bool>) {
    let mut bytes = vec![0; 64 * 1024];
    while let Ok(read @ 1..) = from.read(&mut bytes).await {
        // The watch channel's sender lives as long as the relay. When the relay drops this sender, both connections are
        // closed.
        if silent.wait_for(|silent| !silent).await.is_err() {
            return;
        }
        let Some(read) = bytes.get(..read) else { return };
        if to.write_all(read).await.is_err() {
            return;
        }
    }
}
