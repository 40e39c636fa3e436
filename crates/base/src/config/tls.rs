//! When tallyd reads its configuration, this module reads the certificates and keys from their files. This module also
//! checks that each certificate belongs to its key.

use std::fs;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

use super::key::Key;
use super::password::{located, read_secret};
use super::problem::Faults;
use super::{Config, Identity, Login, Mysql, ServerUrl, Tls};

/// With these values of `ssl-mode` in `[mysql] url`, the client does not verify the server.
const UNSURE: [&str; 2] = ["preferred", "required"];

/// The command that copies the authority's certificate from a MySQL server that generated its own certificates.
const OWN_CA: &str = "scp HOST:/var/lib/mysql/ca.pem /etc/tallyd/mysql-ca.pem";

pub(super) fn read(config: &mut Config, faults: &mut Faults) {
    for (section, _, login) in config.servers_mut() {
        login.tls = read_files(&Key::from(section), section, login, faults);
    }
}

pub(super) fn read_files(block: &Key, section: &str, login: &Login, faults: &mut Faults) -> Tls {
    let mut report = |name: &str, problem: String| faults.at(block.then(name), format!("[{section}] {problem}"));
    let authorities = login.tls_ca_file.as_ref();
    let authorities =
        authorities.and_then(|file| read_authorities(file).map_err(|problem| report("tls_ca_file", problem)).ok());
    let identity = match (&login.tls_cert_file, &login.tls_key_file) {
        (Some(certificate), Some(key)) => {
            read_identity(certificate, key).map_err(|(name, problem)| report(name, problem)).ok()
        }
        (None, None) => None,
        (Some(_), None) => {
            report("tls_cert_file", "tls_cert_file needs its private key: also set tls_key_file".to_owned());
            None
        }
        (None, Some(_)) => {
            report("tls_key_file", "tls_key_file needs a certificate: also set tls_cert_file".to_owned());
            None
        }
    };
    Tls { authorities, identity }
}

/// Certificates are of no use without TLS. `write` says how the address gets TLS.
fn without_tls(block: &Key, section: &str, login: &Login, write: &str, found: &mut Faults) {
    for (name, file) in [
        ("tls_ca_file", &login.tls_ca_file),
        ("tls_cert_file", &login.tls_cert_file),
        ("tls_key_file", &login.tls_key_file),
    ] {
        if file.is_some() {
            let keys = [block.then("url"), block.then(name)];
            found.between(&keys, format!("[{section}] {name} is set, but url does not use TLS: {write}"));
        }
    }
}

pub fn read_authorities(file: &str) -> Result<String, String> {
    const NAME: &str = "tls_ca_file";
    let path = located(NAME, file)?;
    let text = fs::read_to_string(&path).map_err(|error| format!("{NAME} {}: {error}", path.display()))?;
    let mut store = RootCertStore::empty();
    for certificate in certificates(&text).map_err(|problem| format!("{NAME} {}: {problem}", path.display()))? {
        store
            .add(certificate)
            .map_err(|error| format!("{NAME} {}: not a certificate of an authority: {error}", path.display()))?;
    }
    Ok(text)
}

fn read_identity(certificate: &str, key: &str) -> Result<Identity, (&'static str, String)> {
    let (of_certificate, of_key) = ("tls_cert_file", "tls_key_file");
    let path = located(of_certificate, certificate).map_err(|problem| (of_certificate, problem))?;
    let wrong = |problem: String| (of_certificate, format!("{of_certificate} {}: {problem}", path.display()));
    let text = fs::read_to_string(&path).map_err(|error| wrong(error.to_string()))?;
    let chain = certificates(&text).map_err(wrong)?;
    let secret = read_secret(of_key, key).map_err(|problem| (of_key, problem))?;
    // The library's message is dropped, because it could show parts of the key.
    let read = PrivateKeyDer::from_pem_slice(secret.expose().as_bytes())
        .map_err(|_| (of_key, format!("{of_key} {key}: no private key in PEM format without a passphrase")))?;
    match CertifiedKey::from_der(chain, read, &rustls::crypto::ring::default_provider()) {
        Ok(_) => Ok(Identity { certificate: text, key: secret }),
        Err(rustls::Error::InconsistentKeys(_)) => {
            Err((of_key, format!("{of_key} {key}: does not belong to {of_certificate} {}", path.display())))
        }
        Err(error) => Err((of_certificate, format!("{of_certificate} {}: {error}", path.display()))),
    }
}

fn certificates(text: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
    match found {
        Ok(found) if found.is_empty() => Err("has no certificate in PEM format".to_owned()),
        Ok(found) => Ok(found),
        Err(error) => Err(format!("is not in PEM format: {error}")),
    }
}

pub(super) fn problems(config: &Config, found: &mut Faults) {
    let Config { amqp, mysql, redis, .. } = config;
    mysql_problems(&Key::from("mysql"), "mysql", mysql, found);
    for (section, url, scheme, login) in
        [("amqp", &amqp.url, "amqps", &amqp.login), ("redis", &redis.url, "rediss", &redis.login)]
    {
        if !has_scheme(url, scheme) && url.parts().is_ok() {
            without_tls(&section.into(), section, login, &format!("begin url with {scheme}://"), found);
        }
    }
    if is_external(&amqp.url) {
        external(config, found);
    }
}

pub(super) fn mysql_problems(block: &Key, section: &str, mysql: &Mysql, found: &mut Faults) {
    mysql_options(block, section, mysql, found);
    if ssl_mode(&mysql.url).is_some_and(|mode| mode == "disabled") && mysql.url.parts().is_ok() {
        without_tls(block, section, &mysql.login, "remove ssl-mode=DISABLED from url", found);
    }
}

fn external(config: &Config, found: &mut Faults) {
    let amqp = &config.amqp;
    if amqp.login.tls_cert_file.is_none() {
        let text = "[amqp] url has auth_mechanism=external, which needs a client certificate: set tls_cert_file and tls_key_file";
        found.between(&["amqp.url".into(), "amqp.tls_cert_file".into()], text);
    }
    if amqp.login.password.is_some() || amqp.login.password_file.is_some() {
        let text =
            "[amqp] url has auth_mechanism=external, which uses no password: remove the password, or the mechanism";
        found.between(&["amqp.password_file".into(), "amqp.password".into(), "amqp.url".into()], text);
    }
}

pub fn is_external(url: &ServerUrl) -> bool {
    option(url, "auth_mechanism").is_some_and(|mechanism| mechanism == "external")
}

/// For some options, tallyd has keys of its own. Others turn off the verification of the server.
fn mysql_options(block: &Key, section: &str, mysql: &Mysql, found: &mut Faults) {
    let url = &mysql.url;
    for (name, ours) in [("ssl-ca", "tls_ca_file"), ("ssl-cert", "tls_cert_file"), ("ssl-key", "tls_key_file")] {
        if option(url, name).is_some() {
            found.at(block.then("url"), format!("[{section}] url has {name}: use the key {ours} instead"));
        }
    }
    let modes: Vec<String> = options(url, "ssl-mode").collect();
    if let Some(mode) = modes.iter().find(|mode| UNSURE.contains(&mode.as_str())) {
        let text = format!(
            "[{section}] url has ssl-mode={}, which does not verify the server: write VERIFY_IDENTITY, or DISABLED for plain text. For a certificate \
             that MySQL generated, write VERIFY_CA, and set tls_ca_file to the server's ca.pem ({OWN_CA})",
            mode.to_uppercase()
        );
        found.at(block.then("url"), text);
    } else if modes.len() > 1 {
        found.at(block.then("url"), format!("[{section}] url has ssl-mode twice: write it once"));
    } else if modes.iter().any(|mode| mode == "verify_ca") && mysql.login.tls_ca_file.is_none() {
        let text = format!(
            "[{section}] url has ssl-mode=VERIFY_CA, which trusts only the authority in tls_ca_file: set tls_ca_file to the server's ca.pem ({OWN_CA})"
        );
        found.between(&[block.then("url"), block.then("tls_ca_file")], text);
    }
}

pub fn ssl_mode(url: &ServerUrl) -> Option<String> {
    option(url, "ssl-mode")
}

fn option(url: &ServerUrl, name: &str) -> Option<String> {
    options(url, name).next()
}

/// Returns all values of the option `name` in the address `url`, in lower case. The library also accepts the name of
/// the option without the hyphen.
fn options(url: &ServerUrl, name: &str) -> impl Iterator<Item = String> {
    let plain = name.replace('-', "");
    let pairs: Vec<(String, String)> =
        url.parts().map(|parts| parts.query_pairs().into_owned().collect()).unwrap_or_default();
    let name = name.to_owned();
    pairs.into_iter().filter(move |(key, _)| *key == name || *key == plain).map(|(_, value)| value.to_lowercase())
}

fn has_scheme(url: &ServerUrl, scheme: &str) -> bool {
    url.parts().is_ok_and(|parts| parts.scheme() == scheme)
}

#[cfg(test)]
mod tests {
    use super::super::schema::{below, schema};
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let config = super::super::parse(text, "config.toml", []).unwrap();
        let mut found = Faults::default();
        problems(&config, &mut found);
        for key in found.0.iter().flat_map(|fault| &fault.keys) {
            let known = key.parts().iter().try_fold(schema(), |schema, name| below(schema, name));
            let is_of_variable = key.parts().last().is_some_and(|name| name == "password");
            assert!(known.is_some() || is_of_variable, "{key} is no key");
        }
        found.0.into_iter().map(|fault| fault.text).collect()
    }

    #[test]
    fn what_would_believe_any_server_is_refused() {
        // If the address has two values, the library uses the last value.
        for mode in [
            "PREFERRED",
            "required",
            "VERIFY_CA&ssl-mode=REQUIRED",
            "VERIFY_IDENTITY&ssl-mode=PREFERRED",
            "DISABLED&sslmode=required",
        ] {
            let problem = found(&format!("[mysql]\nurl = \"mysql://u@h/t?ssl-mode={mode}\"")).join(" ");
            assert!(problem.contains("does not verify the server: write VERIFY_IDENTITY"), "{problem}");
        }
        assert!(found("[mysql]\nurl = \"mysql://u@h/t?sslmode=required\"").len() == 1);
        let verify_ca = "[mysql]\nurl = \"mysql://u@h/t?ssl-mode=VERIFY_CA\"\n";
        assert!(found(verify_ca).join(" ").contains("the authority in tls_ca_file: set"));
        assert_eq!(found(&format!("{verify_ca}tls_ca_file = \"/x\"")), Vec::<String>::new());
        assert!(
            found("[mysql]\nurl = \"mysql://u@h/t?ssl-mode=VERIFY_IDENTITY&sslmode=verify_ca\"")
                .join(" ")
                .contains("twice")
        );
        assert_eq!(found("[mysql]\nurl = \"mysql://u@h/t?ssl-mode=VERIFY_IDENTITY\""), Vec::<String>::new());
        assert_eq!(found("[mysql]\nurl = \"mysql://u@h/t?ssl-mode=disabled\""), Vec::<String>::new());
    }

    #[test]
    fn what_does_not_fit_the_address_is_reported() {
        for (text, expected) in [
            (
                "[amqp]\ntls_ca_file = \"/x\"",
                "[amqp] tls_ca_file is set, but url does not use TLS: begin url with amqps://",
            ),
            ("[redis]\ntls_key_file = \"/x\"", "[redis] tls_key_file is set, but url does not use TLS"),
            ("[mysql]\nurl = \"mysql://u@h/t?ssl-mode=DISABLED\"\ntls_ca_file = \"/x\"", "remove ssl-mode=DISABLED"),
            ("[mysql]\nurl = \"mysql://u@h/t?ssl-ca=/x\"", "[mysql] url has ssl-ca: use the key tls_ca_file instead"),
            (
                "[amqp]\nurl = \"amqps://h/%2f?auth_mechanism=external\"",
                "needs a client certificate: set tls_cert_file",
            ),
            (
                "[amqp]\nurl = \"amqps://h/%2f?auth_mechanism=EXTERNAL\"\ntls_cert_file = \"/x\"\npassword_file = \"/y\"",
                "uses no password",
            ),
        ] {
            let problems = found(text);
            assert!(problems.iter().any(|problem| problem.contains(expected)), "{text}: {problems:?}");
        }
    }

    #[test]
    fn a_file_that_holds_something_else_is_said_and_not_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        for (name, text) in [("words", "s3cr3t"), ("broken", "-----BEGIN CERTIFICATE-----\n!s3cr3t\n")] {
            fs::write(path(name), text).unwrap();
        }
        let problem = |certificate: Option<&str>, authority: &str| {
            let (tls_ca_file, tls_cert_file) = (Some(path(authority)), certificate.map(path));
            let login = Login { tls_ca_file, tls_cert_file, tls_key_file: Some(path("words")), ..Login::default() };
            Faults::texts(|found| drop(read_files(&Key::from("redis"), "redis", &login, found))).join(" ")
        };
        assert!(problem(None, "words").contains("words: has no certificate"));
        assert!(problem(None, "broken").contains("broken: is not in PEM format"));
        assert!(problem(None, "nothing").contains("nothing: No such file"));
        assert!(problem(None, "words").contains("tls_key_file needs a certificate"));
        assert!(!problem(Some("words"), "broken").contains("s3cr3t"));
    }
}
