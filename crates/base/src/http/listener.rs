//! Accepts connections at an address, or at a socket in the file system.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_util::either::Either;

use crate::config::Listen;

pub(super) type Stream = Either<TcpStream, UnixStream>;

pub enum Listener {
    Address(TcpListener),
    Socket(Socket),
}

pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Listener {
    /// Begins to listen. Replaces a socket that a killed process left behind. The umask of the process decides who can
    /// connect to a new socket.
    pub async fn bind(listen: &Listen) -> Result<Self> {
        match listen {
            Listen::Address(address) => TcpListener::bind(address).await.map(Self::Address),
            Listen::Socket(path) => {
                // Without the lock, two processes that start together could both replace an old socket. A process could
                // also replace a new socket on which the other process does not listen yet.
                let _alone = lock_folder(path).await?;
                if is_left(path).await? {
                    tokio::fs::remove_file(path).await?;
                }
                let listener = UnixListener::bind(path)?;
                Ok(Self::Socket(Socket { listener, path: path.clone() }))
            }
        }
    }

    pub fn listens(&self) -> Result<Listen> {
        Ok(match self {
            Self::Address(listener) => Listen::Address(listener.local_addr()?),
            Self::Socket(socket) => Listen::Socket(socket.path.clone()),
        })
    }

    pub async fn accept(&self) -> Result<Stream> {
        Ok(match self {
            Self::Address(listener) => Either::Left(listener.accept().await?.0),
            Self::Socket(socket) => Either::Right(socket.listener.accept().await?.0),
        })
    }
}

/// Fails if [`Listener::bind`] would fail. Changes nothing.
pub async fn can_listen(listen: &Listen) -> Result<()> {
    match listen {
        Listen::Address(address) => TcpListener::bind(address).await.map(drop),
        Listen::Socket(path) => is_left(path).await.map(drop),
    }
}

async fn lock_folder(path: &Path) -> Result<File> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder.to_path_buf(),
        _ => PathBuf::from("."),
    };
    let lock = move || File::open(&folder).and_then(|opened| opened.lock().map(|()| opened));
    tokio::task::spawn_blocking(lock).await?
}

/// Returns true if a killed process left its socket at this path. Fails if a process listens on the socket, or if the
/// file is not a socket.
async fn is_left(path: &Path) -> Result<bool> {
    let Ok(found) = tokio::fs::symlink_metadata(path).await else { return Ok(false) };
    if !found.file_type().is_socket() {
        return Err(Error::new(ErrorKind::AlreadyExists, "a file with this name exists and is not a socket"));
    }
    match UnixStream::connect(path).await {
        Ok(_) => Err(Error::new(ErrorKind::AddrInUse, "another process listens there")),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(true),
        Err(error) => Err(error),
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Another process may have removed the file already.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn of_processes_that_start_together_one_listens_on_a_left_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one.sock");
        for _ in 0..200 {
            // This listener leaves its file behind when it is dropped, as a killed process does.
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            let listen = Listen::Socket(path.clone());
            let bound: [_; 4] = std::array::from_fn(|_| {
                let listen = listen.clone();
                tokio::spawn(async move { Listener::bind(&listen).await })
            });
            let mut listening = Vec::new();
            for bound in bound {
                match bound.await.unwrap() {
                    Ok(listener) => listening.push(listener),
                    Err(error) => assert_eq!(error.to_string(), "another process listens there"),
                }
            }
            assert_eq!(listening.len(), 1);
        }
    }
}
