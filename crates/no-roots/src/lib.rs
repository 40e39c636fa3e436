//! The authorities that sqlx trusts for each connection beside those that it is given: none.
//!
//! sqlx knows no other way to leave them out, and ignores the server's name with `ssl-mode=VERIFY_CA`. With public authorities among them
//! anybody's certificate would do. `[patch.crates-io]` puts this crate in place of the published one of the same name.

use rustls::pki_types::TrustAnchor;

/// No authorities.
pub const TLS_SERVER_ROOTS: &[TrustAnchor<'static>] = &[];
