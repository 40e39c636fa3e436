//! Passwords that never appear in output.

use std::fmt;

use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize, Serializer};

/// A password. Prints as `***`.
#[derive(Clone, Deserialize)]
#[serde(transparent)]
pub struct Secret(SecretString);

impl Secret {
    pub fn new(text: String) -> Self {
        Self(text.into())
    }

    /// Returns the password. Call this function only where the password is passed to a library.
    pub fn expose(&self) -> &str {
        self.0.expose_secret()
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("***")
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_prints_as_three_stars() {
        assert_eq!(format!("{:?}", Secret::new("secret".to_owned())), "***");
    }
}
