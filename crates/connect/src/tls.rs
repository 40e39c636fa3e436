//! Whom connections by TLS trust, and what a failed one says, as a sentence: which server, what is wrong, and what to do. The libraries'
//! errors have it inside.

use std::error::Error;
use std::fmt::{self, Write};
use std::io;
use std::sync::{Arc, LazyLock};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use jiff::Timestamp;
use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError, RootCertStore};

use crate::secret::Secret;

/// What the connections to a server need beside its address.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// Certificates of authorities that are trusted beside the system's own, or alone: PEM.
    pub authorities: Option<String>,
    /// What is shown to a server that asks.
    pub identity: Option<Identity>,
}

/// A certificate of ours, and its key.
#[derive(Clone)]
pub struct Identity {
    /// The certificate, and those between it and the authority's: PEM.
    pub certificate: String,
    /// Its private key: PEM.
    pub key: Secret,
}

/// Neither is printed: a file of both is taken for the certificate, too.
impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity(***)")
    }
}

/// The authorities that the system trusts, as PEM, but for those that can't be read.
static SYSTEMS: LazyLock<String> = LazyLock::new(|| {
    let (mut text, mut store) = (String::new(), RootCertStore::empty());
    for certificate in rustls_native_certs::load_native_certs().certs {
        let encoded = BASE64_STANDARD.encode(&certificate);
        if store.add(certificate).is_ok() {
            // A String can't fail.
            let _ = writeln!(text, "-----BEGIN CERTIFICATE-----\n{encoded}\n-----END CERTIFICATE-----");
        }
    }
    text
});

/// A server that can't be believed to be the one that is meant, or that doesn't believe us.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{said}")]
pub struct TlsFault {
    said: String,
    is_nameless: bool,
}

/// A server, as sentences name it.
#[derive(Clone, Copy)]
pub struct Server<'a> {
    /// `RabbitMQ`.
    pub name: &'a str,
    /// `host:port`.
    pub address: &'a str,
    /// Its section of the configuration.
    pub section: &'a str,
    /// Whether there is a certificate of ours to show.
    pub has_certificate: bool,
}

/// `own` authorities and the system's, as PEM.
pub fn authorities(own: Option<&str>) -> String {
    format!("{}\n{}", own.unwrap_or_default(), *SYSTEMS)
}

impl TlsFault {
    /// What is wrong; none where the connection failed for another reason.
    pub fn of(error: &(dyn Error + 'static), server: Server<'_>) -> Option<Self> {
        let Server { name, address, section, has_certificate } = server;
        let error = within(error)?;
        let said = match error {
            rustls::Error::InvalidCertificate(wrong) => {
                format!("{name} at {address} shows a certificate {}", of_certificate(wrong, server))
            }
            rustls::Error::AlertReceived(alert) if is_about_ours(*alert) && has_certificate => format!(
                "{name} at {address} does not accept the certificate in [{section}] tls_cert_file ({alert:?}): see its log, and have \
                 the certificate made by an authority that it trusts"
            ),
            rustls::Error::AlertReceived(alert) if is_about_ours(*alert) => format!(
                "{name} at {address} asks for a certificate ({alert:?}): set [{section}] tls_cert_file and tls_key_file"
            ),
            rustls::Error::InvalidMessage(_) => {
                format!("{name} at {address} does not speak TLS there: mend the port in [{section}] url")
            }
            other => format!("{name} at {address}: no TLS: {other}"),
        };
        Some(Self { said, is_nameless: is_nameless(error) })
    }

    /// Whether the certificate is trusted and names no server, as the one that MySQL makes for itself.
    pub fn is_nameless(&self) -> bool {
        self.is_nameless
    }

    /// The server has no TLS at all.
    pub fn without_tls(server: Server<'_>, plain: &str) -> Self {
        let Server { name, address, section, .. } = server;
        let said =
            format!("{name} at {address} has no TLS: set it up there, or {plain} in [{section}] url for plain text");
        Self { said, is_nameless: false }
    }
}

fn is_nameless(error: &rustls::Error) -> bool {
    matches!(
        error,
        rustls::Error::InvalidCertificate(CertificateError::NotValidForNameContext { presented, .. }) if presented.is_empty()
    )
}

/// What follows "shows a certificate".
fn of_certificate(wrong: &CertificateError, Server { address, section, .. }: Server<'_>) -> String {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    match wrong {
        CertificateError::UnknownIssuer if section == "mysql" => format!(
            "of an authority that is not trusted here: name a file with the authority's certificate in [mysql] tls_ca_file. If MySQL made the \
             certificate for itself: scp {host}:/var/lib/mysql/ca.pem /etc/tallyd/mysql-ca.pem, set tls_ca_file to that, and end url with \
             ?ssl-mode=VERIFY_CA"
        ),
        CertificateError::NotValidForNameContext { presented, .. } if section == "mysql" && presented.is_empty() => {
            "for no name, as MySQL makes it for itself: end [mysql] url with ?ssl-mode=VERIFY_CA, which trusts the authority in tls_ca_file \
             alone"
                .to_owned()
        }
        CertificateError::UnknownIssuer => format!(
            "of an authority that is not trusted here: name a file with the authority's certificate in [{section}] tls_ca_file"
        ),
        CertificateError::NotValidForNameContext { expected, presented } => format!(
            "for other names ({}), not for {}: write one of those in [{section}] url, or have a certificate made for this one",
            presented.iter().map(|name| plain(name)).collect::<Vec<_>>().join(", "),
            expected.to_str()
        ),
        CertificateError::NotValidForName => {
            format!("for another name: write that one in [{section}] url, or have a certificate made for this one")
        }
        CertificateError::ExpiredContext { not_after, .. } => {
            format!("that expired on {}: have it renewed, unless this machine's clock is wrong", date(*not_after))
        }
        CertificateError::NotValidYetContext { not_before, .. } => format!(
            "that is valid from {} on: set this machine's clock, or that of whoever made the certificate",
            date(*not_before)
        ),
        other => format!("that can't be used: {other}"),
    }
}

/// `db.example` of the library's `DnsName("db.example")`.
fn plain(name: &str) -> &str {
    name.split('"').nth(1).unwrap_or(name)
}

fn date(time: UnixTime) -> String {
    let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX).to_string()
}

/// What a server says that doesn't like who asks.
fn is_about_ours(alert: AlertDescription) -> bool {
    matches!(
        alert,
        AlertDescription::CertificateRequired
            | AlertDescription::NoCertificate
            | AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied
            | AlertDescription::HandshakeFailure
    )
}

/// The error of TLS inside another one.
fn within<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<rustls::Error>() {
            return Some(found);
        }
        next = match (error.downcast_ref::<io::Error>(), error.downcast_ref::<Arc<dyn Error + Send + Sync>>()) {
            // Its source would be that of what it holds.
            (Some(error), _) => error.get_ref().map(|error| error as &(dyn Error + 'static)),
            (_, Some(error)) => Some(error.as_ref()),
            _ => error.source(),
        };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_found_inside_and_said_with_what_to_do() {
        let server = Server { name: "Redis", address: "db:1", section: "redis", has_certificate: false };
        let said = |error: rustls::Error| {
            let outer = io::Error::other(io::Error::new(io::ErrorKind::InvalidData, error));
            TlsFault::of(&outer, server).unwrap().to_string()
        };
        assert_eq!(
            said(CertificateError::UnknownIssuer.into()),
            "Redis at db:1 shows a certificate of an authority that is not trusted here: name a file with the authority's certificate in \
             [redis] tls_ca_file"
        );
        assert!(
            said(rustls::Error::AlertReceived(AlertDescription::CertificateRequired))
                .contains("set [redis] tls_cert_file")
        );
        assert!(TlsFault::of(&io::Error::other("no"), server).is_none());
    }

    #[test]
    fn a_certificate_for_another_name_is_not_nameless() {
        for (presented, expected) in [(vec![], true), (vec!["DnsName(\"other\")".to_owned()], false)] {
            let expected_name = rustls::pki_types::ServerName::try_from("db").unwrap().to_owned();
            let error = CertificateError::NotValidForNameContext { expected: expected_name, presented };
            assert_eq!(is_nameless(&error.into()), expected);
        }
        assert!(!is_nameless(&CertificateError::UnknownIssuer.into()));
    }
}
