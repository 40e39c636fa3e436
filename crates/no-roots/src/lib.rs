//! An empty list of authorities. For each connection, sqlx adds this list to the configured authorities.
//!
//! sqlx always adds its own list, and `ssl-mode=VERIFY_CA` ignores the server's name. If the list contained public
//! authorities, sqlx would accept any certificate from them. `[patch.crates-io]` replaces the published crate of the
//! same name with this crate.

use rustls::pki_types::TrustAnchor;

pub const TLS_SERVER_ROOTS: &[TrustAnchor<'static>] = &[];
