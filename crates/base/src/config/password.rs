//! Reads passwords and keys from files. Rejects files that everyone can read.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::key::Key;
use super::problem::Faults;
use super::{Config, Login, Secret, ServerUrl};

/// Container engines put secrets into this folder, with mode 0444 by default. The mode is safe, because no other user
/// runs a process in the container.
const CONTAINER_SECRETS: &str = "/run/secrets";

pub(super) fn set_passwords(config: &mut Config, faults: &mut Faults) {
    for (section, url, login) in config.servers_mut() {
        set_password(&Key::from(section), section, url, login, faults);
    }
    if let Some(file) = &config.redis.sentinel_password_file {
        match read_password("sentinel_password_file", file) {
            Ok(password) => config.redis.sentinel_password = Some(password),
            Err(problem) => faults.at("redis.sentinel_password_file", format!("[redis] {problem}")),
        }
    }
}

pub(super) fn set_password(block: &Key, section: &str, url: &mut ServerUrl, login: &Login, faults: &mut Faults) {
    let mut set = || {
        let password = match (&login.password, &login.password_file) {
            (Some(password), _) => password.clone(),
            (None, Some(file)) => {
                let problem = |problem| ("password_file", problem);
                url.set_password_file(located("password_file", file).map_err(problem)?);
                read_password("password_file", file).map_err(problem)?
            }
            (None, None) => return Ok(()),
        };
        url.set_password(&password).map_err(|error| ("url", format!("url {error}")))
    };
    if let Err((name, problem)) = set() {
        faults.at(block.then(name), format!("[{section}] {problem}"));
    }
}

/// Returns the absolute path of `file`, the value of the key `name`. If `file` is a relative path, the file is a
/// systemd credential (`LoadCredential=`).
pub(super) fn located(name: &str, file: &str) -> Result<PathBuf, String> {
    if Path::new(file).is_absolute() {
        return Ok(PathBuf::from(file));
    }
    let Some(directory) = std::env::var_os("CREDENTIALS_DIRECTORY") else {
        return Err(format!(
            "{name} is the credential {file}, but systemd passed no credentials: \
             write an absolute path, or add LoadCredential={file}:/path to the unit"
        ));
    };
    Ok(Path::new(&directory).join(file))
}

/// Reads the file that the value of the key `name` refers to. Removes line breaks at the end of the text.
pub(super) fn read_password(name: &str, file: &str) -> Result<Secret, String> {
    let text = read_secret(name, file)?;
    Ok(Secret::new(text.expose().trim_end_matches(['\n', '\r']).to_owned()))
}

pub fn read_token(file: &Path) -> Result<Secret, String> {
    read_password("the token in", &file.display().to_string())
}

pub(super) fn read_secret(name: &str, file: &str) -> Result<Secret, String> {
    let path = located(name, file)?;
    let failed = |error: std::io::Error| {
        let advice = match error.kind() {
            std::io::ErrorKind::PermissionDenied => {
                format!(
                    ": chown it to {} and chmod it to 0400, or chgrp it to the process's group and chmod it to 0440",
                    own_user()
                )
            }
            _ => String::new(),
        };
        format!("{name} {}: {error}{advice}", path.display())
    };
    let mode = fs::metadata(&path).map_err(failed)?.permissions().mode() & 0o777;
    if mode & 0o007 != 0 && !path.starts_with(CONTAINER_SECRETS) {
        return Err(format!(
            "{name} {} has the mode 0{mode:o} and can be read by everyone: chown it to {}, and chmod it to 0400",
            path.display(),
            own_user()
        ));
    }
    fs::read_to_string(&path).map(Secret::new).map_err(failed)
}

fn own_user() -> String {
    format!("the user {} that tallyd runs as", rustix::process::geteuid().as_raw())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_file_that_everyone_can_read_says_whose_and_how_it_must_be() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("password");
        fs::write(&file, "secret\n").unwrap();
        let read = |mode: u32| {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            read_password("password_file", file.to_str().unwrap()).map(|secret| secret.expose().to_owned())
        };
        let own = fs::metadata(&file).unwrap().uid();
        let said = read(0o644).unwrap_err();
        let expected = format!(
            "has the mode 0644 and can be read by everyone: chown it to the user {own} that tallyd runs as, and chmod it to 0400"
        );
        assert!(said.ends_with(&expected), "{said}");
        assert_eq!(read(0o440), Ok("secret".to_owned()));
    }
}
