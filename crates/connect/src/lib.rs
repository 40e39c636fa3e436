//! What all connections to servers share: addresses, secrets, TLS. Also the named points at which a test may stop the process.

pub mod address;
pub mod fault;
pub mod secret;
pub mod tls;
