//! What all connections to servers share: addresses, secrets, TLS, what becomes of the work after an error. Also the named points at which a
//! test may stop the process.

#![warn(unreachable_pub)]

pub mod address;
pub mod fate;
pub mod fault;
pub mod secret;
pub mod tls;
pub mod whole;
