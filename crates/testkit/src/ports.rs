//! Finds ports for servers that a test starts itself.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::TcpListener;

/// The first port. All ports are below the ports of outgoing connections (32768 and up, `ip_local_port_range`). So no
/// client can take one of these ports in the seconds that a server needs to start.
const FIRST: u16 = 10_000;
const NUMBER: u64 = 10_000;

pub fn free_ports<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| {
        loop {
            let place = u16::try_from(RandomState::new().build_hasher().finish() % NUMBER).unwrap();
            if let Ok(listener) = TcpListener::bind(("127.0.0.1", FIRST + place)) {
                break listener;
            }
        }
    });
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

pub fn free_port() -> u16 {
    free_ports::<1>()[0]
}
