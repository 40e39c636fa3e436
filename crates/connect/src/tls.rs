//! Collects the certificate authorities that TLS connections trust, and explains why a TLS connection failed. Each
//! explanation names the server, the cause and the correction. The client libraries wrap the TLS error in their own
//! errors, so this module extracts it.

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

#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// Certificates of trusted authorities (PEM). tallyd trusts these authorities in addition to the system's
    /// authorities, or instead of the system's authorities.
    pub authorities: Option<String>,
    pub identity: Option<Identity>,
}

#[derive(Clone)]
pub struct Identity {
    pub certificate: String,
    pub key: Secret,
}

/// The output contains neither the key nor the certificate, because the certificate's file can also contain the key.
impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity(***)")
    }
}

/// The system's trusted authorities as PEM, without unreadable certificates.
static SYSTEMS: LazyLock<String> = LazyLock::new(|| {
    let (mut text, mut store) = (String::new(), RootCertStore::empty());
    for certificate in rustls_native_certs::load_native_certs().certs {
        let encoded = BASE64_STANDARD.encode(&certificate);
        if store.add(certificate).is_ok() {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "-----BEGIN CERTIFICATE-----\n{encoded}\n-----END CERTIFICATE-----");
        }
    }
    text
});

#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct TlsFault {
    message: String,
    is_nameless: bool,
}

/// Error messages about TLS contain the server's name and settings from this struct.
#[derive(Clone, Copy)]
pub struct Server<'a> {
    pub name: &'a str,
    pub address: &'a str,
    pub section: &'a str,
    pub has_certificate: bool,
}

/// Returns the configured authorities (`own`) and the system's authorities, as PEM.
pub fn authorities(own: Option<&str>) -> String {
    format!("{}\n{}", own.unwrap_or_default(), *SYSTEMS)
}

impl TlsFault {
    pub fn of(error: &(dyn Error + 'static), server: Server<'_>) -> Option<Self> {
        let Server { name, address, section, has_certificate } = server;
        let error = within(error)?;
        let message = match error {
            rustls::Error::InvalidCertificate(wrong) => {
                format!("{name} at {address} shows a certificate {}", of_certificate(wrong, server))
            }
            rustls::Error::AlertReceived(alert) if is_about_ours(*alert) && has_certificate => format!(
                "{name} at {address} does not accept the certificate in [{section}] tls_cert_file ({alert:?}): see the server's log, and use a certificate \
                 from an authority that the server trusts"
            ),
            rustls::Error::AlertReceived(alert) if is_about_ours(*alert) => format!(
                "{name} at {address} asks for a certificate ({alert:?}): set [{section}] tls_cert_file and tls_key_file"
            ),
            rustls::Error::InvalidMessage(_) => {
                format!("{name} at {address} does not speak TLS on this port: correct the port in [{section}] url")
            }
            other => format!("{name} at {address}: TLS failed: {other}"),
        };
        Some(Self { message, is_nameless: is_nameless(error) })
    }

    /// Returns true if the server's certificate is trusted but contains no server name. MySQL generates such
    /// certificates.
    pub fn is_nameless(&self) -> bool {
        self.is_nameless
    }

    /// Builds the error for a server that does not support TLS. `plain` says how to allow a connection without TLS.
    pub fn without_tls(server: Server<'_>, plain: &str) -> Self {
        let Server { name, address, section, .. } = server;
        let message = format!(
            "{name} at {address} does not support TLS: enable TLS there, or {plain} in [{section}] url for plain text"
        );
        Self { message, is_nameless: false }
    }
}

fn is_nameless(error: &rustls::Error) -> bool {
    matches!(
        error,
        rustls::Error::InvalidCertificate(CertificateError::NotValidForNameContext { presented, .. }) if presented.is_empty()
    )
}

fn of_certificate(wrong: &CertificateError, Server { address, section, .. }: Server<'_>) -> String {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    match wrong {
        CertificateError::UnknownIssuer if section == "mysql" => format!(
            "from an authority that is not trusted here: set [mysql] tls_ca_file to a file with that authority's certificate. If MySQL generated the \
             certificate: scp {host}:/var/lib/mysql/ca.pem /etc/tallyd/mysql-ca.pem, set tls_ca_file to that file, and end url with \
             ?ssl-mode=VERIFY_CA"
        ),
        CertificateError::NotValidForNameContext { presented, .. } if section == "mysql" && presented.is_empty() => {
            "that names no server, like the ones MySQL generates: end [mysql] url with ?ssl-mode=VERIFY_CA, which trusts only the authority in \
             tls_ca_file"
                .to_owned()
        }
        CertificateError::UnknownIssuer => format!(
            "from an authority that is not trusted here: set [{section}] tls_ca_file to a file with that authority's certificate"
        ),
        CertificateError::NotValidForNameContext { expected, presented } => format!(
            "for other names ({}), not for {}: write one of these names in [{section}] url, or create a certificate for the name in url",
            presented.iter().map(|name| plain(name)).collect::<Vec<_>>().join(", "),
            expected.to_str()
        ),
        CertificateError::NotValidForName => {
            format!("for another name: write that name in [{section}] url, or create a certificate for the name in url")
        }
        CertificateError::ExpiredContext { not_after, .. } => {
            format!("that expired on {}: renew it, or correct this machine's clock", date(*not_after))
        }
        CertificateError::NotValidYetContext { not_before, .. } => format!(
            "that is not valid before {}: correct this machine's clock, or the clock of the machine that issued the certificate",
            date(*not_before)
        ),
        other => format!("that cannot be used: {other}"),
    }
}

/// Extracts `db.example` from the library's `DnsName("db.example")`.
fn plain(name: &str) -> &str {
    name.split('"').nth(1).unwrap_or(name)
}

fn date(time: UnixTime) -> String {
    let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX).to_string()
}

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

fn within<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<rustls::Error>() {
            return Some(found);
        }
        next = match (error.downcast_ref::<io::Error>(), error.downcast_ref::<Arc<dyn Error + Send + Sync>>()) {
            // `source()` of an `io::Error` skips the error inside the `io::Error`.
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
        let message = |error: rustls::Error| {
            let outer = io::Error::other(io::Error::new(io::ErrorKind::InvalidData, error));
            TlsFault::of(&outer, server).unwrap().to_string()
        };
        assert_eq!(
            message(CertificateError::UnknownIssuer.into()),
            "Redis at db:1 shows a certificate from an authority that is not trusted here: set [redis] tls_ca_file to a file with \
             that authority's certificate"
        );
        assert!(
            message(rustls::Error::AlertReceived(AlertDescription::CertificateRequired))
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
