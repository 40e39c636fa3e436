//! An empty list of authorities, which sqlx adds to the configured ones for each connection.
//!
//! sqlx cannot leave its own list out, and `ssl-mode=VERIFY_CA` ignores the server's name. With public authorities in
//! the list, any certificate from them would pass. `[patch.crates-io]` puts this crate in place of the published one of
//! the same name.

use rustls::pki_types::TrustAnchor;

pub const TLS_SERVER_ROOTS: &[TrustAnchor<'static>] = &[];
