//! Where a port takes connections: an address, or a socket in the file system.

use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_util::either::Either;

use crate::config::Listen;

pub(crate) type Stream = Either<TcpStream, UnixStream>;

pub(crate) enum Listener {
    Address(TcpListener),
    Socket(Socket),
}

pub(crate) struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Listener {
    /// Listens. The socket that a killed process has left is replaced. The process' umask decides who can connect to a new one.
    pub(crate) async fn bind(listen: &Listen) -> Result<Self> {
        match listen {
            Listen::Address(address) => TcpListener::bind(address).await.map(Self::Address),
            Listen::Socket(path) => {
                forget(path).await?;
                let listener = UnixListener::bind(path)?;
                Ok(Self::Socket(Socket { listener, path: path.clone() }))
            }
        }
    }

    pub(crate) fn listens(&self) -> Result<Listen> {
        Ok(match self {
            Self::Address(listener) => Listen::Address(listener.local_addr()?),
            Self::Socket(socket) => Listen::Socket(socket.path.clone()),
        })
    }

    pub(crate) async fn accept(&self) -> Result<Stream> {
        Ok(match self {
            Self::Address(listener) => Either::Left(listener.accept().await?.0),
            Self::Socket(socket) => Either::Right(socket.listener.accept().await?.0),
        })
    }
}

/// Fails if [`Listener::bind`] would, and leaves everything as it is.
pub(crate) async fn can_listen(listen: &Listen) -> Result<()> {
    match listen {
        Listen::Address(address) => TcpListener::bind(address).await.map(drop),
        Listen::Socket(path) => is_left(path).await.map(drop),
    }
}

async fn forget(path: &Path) -> Result<()> {
    if is_left(path).await? { tokio::fs::remove_file(path).await } else { Ok(()) }
}

/// Whether a killed process has left its socket there. Fails if a process listens on it, or if the file is no socket.
async fn is_left(path: &Path) -> Result<bool> {
    let Ok(found) = tokio::fs::symlink_metadata(path).await else { return Ok(false) };
    if !found.file_type().is_socket() {
        return Err(Error::new(ErrorKind::AlreadyExists, "there is a file of that name, which is no socket"));
    }
    match UnixStream::connect(path).await {
        Ok(_) => Err(Error::new(ErrorKind::AddrInUse, "another process listens there")),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(true),
        Err(error) => Err(error),
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = std::fs::remove_file(&self.path);
    }
}
