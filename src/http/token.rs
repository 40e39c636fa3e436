//! Checks the token of a request: `Authorization: Bearer TOKEN`, or in a browser the password of any user. Pure.

use axum::http::HeaderValue;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use sha2::{Digest, Sha256};

use crate::config::Secret;

#[derive(Clone)]
pub(crate) struct Token([u8; 32]);

impl Token {
    pub(crate) fn new(token: &Secret) -> Self {
        Self(Sha256::digest(token.expose()).into())
    }

    /// Returns true if a request has the token. The duration of the comparison reveals nothing about the token, because
    /// whole digests are compared.
    pub(crate) fn is_in(&self, authorization: Option<&HeaderValue>) -> bool {
        let Some(given) = authorization.and_then(|value| given(value.to_str().ok()?)) else { return false };
        let digest: [u8; 32] = Sha256::digest(given).into();
        self.0.iter().zip(digest).fold(0, |differs, (own, other)| differs | (own ^ other)) == 0
    }
}

fn given(header: &str) -> Option<Vec<u8>> {
    let (scheme, rest) = header.split_once(' ')?;
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(rest.trim().as_bytes().to_vec());
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let both = BASE64_STANDARD.decode(rest.trim()).ok()?;
    let colon = both.iter().position(|byte| *byte == b':')?;
    both.get(colon + 1..).map(<[u8]>::to_vec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_taken_as_bearer_or_as_a_browsers_password_and_no_other_is() {
        let token = Token::new(&serde_json::from_str("\"of-a-test-0123456789\"").unwrap());
        let has = |header: &str| token.is_in(Some(&HeaderValue::from_str(header).unwrap()));
        let basic = |both: &str| format!("Basic {}", BASE64_STANDARD.encode(both));
        assert!(has("Bearer of-a-test-0123456789") && has("bearer  of-a-test-0123456789"));
        assert!(has(&basic(":of-a-test-0123456789")) && has(&basic("anybody:of-a-test-0123456789")));
        for wrong in [
            "of-a-test-0123456789",
            "Bearer",
            "Bearer ",
            "Bearer of-a-test-012345678",
            "Digest of-a-test-0123456789",
            "Basic !",
        ] {
            assert!(!has(wrong), "{wrong}");
        }
        assert!(!has(&basic("of-a-test-0123456789:")) && !has(&basic("of-a-test-0123456789")) && !token.is_in(None));
    }
}
