//! Checks the token of a request. Pure.

use axum::http::HeaderValue;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use sha2::{Digest, Sha256};

use crate::config::Secret;

#[derive(Clone)]
pub struct Token([u8; 32]);

impl Token {
    pub fn new(token: &Secret) -> Self {
        Self(Sha256::digest(token.expose()).into())
    }

    pub fn is_in(&self, authorization: Option<&HeaderValue>) -> bool {
        credentials(authorization, "bearer").is_some_and(|token| self.is(token.as_bytes()))
    }

    /// Does the same as [`Token::is_in`], and also accepts the token as the password of any user, from a browser.
    pub fn is_in_or_is_password(&self, authorization: Option<&HeaderValue>) -> bool {
        let password = || {
            let both = BASE64_STANDARD.decode(credentials(authorization, "basic")?).ok()?;
            let colon = both.iter().position(|byte| *byte == b':')?;
            both.get(colon + 1..).map(<[u8]>::to_vec)
        };
        self.is_in(authorization) || password().is_some_and(|password| self.is(&password))
    }

    /// The duration of the comparison reveals nothing about the token, because whole digests are compared.
    fn is(&self, given: &[u8]) -> bool {
        let digest: [u8; 32] = Sha256::digest(given).into();
        self.0.iter().zip(digest).fold(0, |differs, (own, other)| differs | (own ^ other)) == 0
    }
}

fn credentials<'a>(authorization: Option<&'a HeaderValue>, scheme: &str) -> Option<&'a str> {
    let (given, rest) = authorization?.to_str().ok()?.split_once(' ')?;
    given.eq_ignore_ascii_case(scheme).then(|| rest.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_taken_as_bearer_or_as_a_browsers_password_and_no_other_is() {
        let token = Token::new(&serde_json::from_str("\"of-a-test-0123456789\"").unwrap());
        let has = |header: &str| {
            let header = HeaderValue::from_str(header).unwrap();
            (token.is_in(Some(&header)), token.is_in_or_is_password(Some(&header)))
        };
        let basic = |both: &str| format!("Basic {}", BASE64_STANDARD.encode(both));
        for right in ["Bearer of-a-test-0123456789", "bearer  of-a-test-0123456789"] {
            assert_eq!(has(right), (true, true), "{right}");
        }
        for password in [":of-a-test-0123456789", "anybody:of-a-test-0123456789"] {
            assert_eq!(has(&basic(password)), (false, true), "{password}");
        }
        for wrong in [
            "of-a-test-0123456789",
            "Bearer",
            "Bearer ",
            "Bearer of-a-test-012345678",
            "Digest of-a-test-0123456789",
            "Basic !",
            &basic("of-a-test-0123456789:"),
            &basic("of-a-test-0123456789"),
        ] {
            assert_eq!(has(wrong), (false, false), "{wrong}");
        }
        assert!(!token.is_in(None) && !token.is_in_or_is_password(None));
    }
}
