//! A private CA, and the certificates that it signs for servers and for tallyd.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    date_time_ymd,
};

/// A server's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Certificate {
    /// A certificate of the known CA, for the requested name.
    Right,
    /// A certificate for another name.
    OtherName,
    /// A certificate without a name, like the certificate that MySQL generates.
    NoName,
    /// A certificate of an unknown CA.
    OtherAuthority,
    /// A certificate that has expired.
    Expired,
    /// A certificate that is not valid yet.
    Early,
}

impl Certificate {
    pub const ALL: [Self; 6] =
        [Self::Right, Self::OtherName, Self::NoName, Self::OtherAuthority, Self::Expired, Self::Early];

    /// Returns the name of the certificate's file.
    pub fn file(self) -> String {
        format!("{self:?}.pem")
    }
}

/// A temporary folder with the files of certificates and keys. The servers run as other users, and these users must not
/// be able to read tallyd's key.
pub struct Files(tempfile::TempDir);

impl Files {
    /// Makes the servers' certificates and tallyd's certificate. All servers' certificates have the same key. tallyd's
    /// certificate has the name `tallyd`.
    pub fn new() -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        fs::set_permissions(files.0.path(), Permissions::from_mode(0o755)).unwrap();
        let (authority, other) = (authority("Private authority"), authority("Another authority"));
        let key = KeyPair::generate().unwrap();
        for shown in Certificate::ALL {
            let name = if shown == Certificate::OtherName { "elsewhere.example" } else { "127.0.0.1" };
            let names: &[&str] = if shown == Certificate::NoName { &[] } else { &[name] };
            let mut params = named(names, name);
            match shown {
                Certificate::Expired => params.not_after = date_time_ymd(2021, 5, 4),
                Certificate::Early => params.not_before = date_time_ymd(2091, 5, 4),
                Certificate::Right | Certificate::OtherName | Certificate::NoName | Certificate::OtherAuthority => {}
            }
            let signs = if shown == Certificate::OtherAuthority { &other.1 } else { &authority.1 };
            files.write(&shown.file(), &params.signed_by(&key, signs).unwrap().pem());
        }
        files.write("server.key", &key.serialize_pem());
        files.write("ca.pem", &authority.0);
        files.write("other-ca.pem", &other.0);
        let key = KeyPair::generate().unwrap();
        files.write("tallyd.pem", &named(&[], "tallyd").signed_by(&key, &authority.1).unwrap().pem());
        files.write("stranger.pem", &named(&[], "tallyd").signed_by(&key, &other.1).unwrap().pem());
        files.write("tallyd.key", &key.serialize_pem());
        fs::set_permissions(files.path("tallyd.key"), Permissions::from_mode(0o600)).unwrap();
        files
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
        fs::set_permissions(self.path(name), Permissions::from_mode(0o644)).unwrap();
    }
}

/// Makes a CA. Returns the certificate of the CA, and the issuer that signs other certificates.
fn authority(name: &str) -> (String, Issuer<'static, KeyPair>) {
    let mut params = named(&[], name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate().unwrap();
    let certificate = params.self_signed(&key).unwrap();
    (certificate.pem(), Issuer::new(params, key))
}

fn named(names: &[&str], common_name: &str) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2120, 1, 1);
    params
}
