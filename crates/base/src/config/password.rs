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

/// The place of all secrets on a machine. Only root can read it, and systemd passes each unit its own files.
pub const SECRETS: &str = "/etc/credstore";

/// Where a relative name is looked up without systemd. Root's commands read the files themselves, or the running
/// daemon's copies if the files are encrypted.
const PLACES: [&str; 3] = [SECRETS, "/run/credentials/tallyd.service", CONTAINER_SECRETS];

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

/// Returns the absolute path of `file`, the value of the key `name`. A relative path is a systemd credential
/// (`LoadCredential=`), or is looked up in `PLACES`.
pub(super) fn located(name: &str, file: &str) -> Result<PathBuf, String> {
    if Path::new(file).is_absolute() {
        return Ok(PathBuf::from(file));
    }
    match std::env::var_os("CREDENTIALS_DIRECTORY") {
        Some(directory) => found(name, file, &[Path::new(&directory)]),
        None => found(name, file, &PLACES.map(Path::new)),
    }
}

fn found(name: &str, file: &str, folders: &[&Path]) -> Result<PathBuf, String> {
    folders.iter().map(|folder| folder.join(file)).find(|path| path.exists()).ok_or_else(|| {
        let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        format!(
            "{name} {file} is in none of {}, or {} can't read it there: run this as root, or write the file into \
             {SECRETS}. A unit also needs LoadCredential={file} and a restart",
            folders.join(", "),
            own_user()
        )
    })
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
        let error = read(0o644).unwrap_err();
        let expected = format!(
            "has the mode 0644 and can be read by everyone: chown it to the user {own} that tallyd runs as, and chmod it to 0400"
        );
        assert!(error.ends_with(&expected), "{error}");
        assert_eq!(read(0o440), Ok("secret".to_owned()));
    }

    #[test]
    fn a_relative_name_is_found_in_the_first_place_that_has_it() {
        let top = tempfile::tempdir().unwrap();
        let places = ["credstore", "running", "secrets"].map(|name| top.path().join(name));
        let found = || found("password_file", "p", &places.each_ref().map(PathBuf::as_path));
        let error = found().unwrap_err();
        for part in [places[0].to_str().unwrap(), "password_file p is in none of ", SECRETS, "LoadCredential=p and"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        for place in places.iter().rev() {
            fs::create_dir(place).unwrap();
            fs::write(place.join("p"), "secret").unwrap();
            assert_eq!(found(), Ok(place.join("p")));
        }
    }
}
