//! Code that all connections to servers share: addresses, secrets, TLS, and how to continue after an error. This crate
//! also contains the named points where a test can stop the process.

#![warn(unreachable_pub)]

pub mod address;
pub mod fate;
pub mod fault;
pub mod login;
pub mod opened;
pub mod pace;
pub mod secret;
pub mod tls;
pub mod whole;
