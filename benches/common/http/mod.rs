//! Measures servers over HTTP: the gateway, and a bare handler that publishes the same events and reads the same keys.

pub mod bare;
pub mod load;
pub mod server;
