//! Writes new files. It never overwrites a file.

use std::fs::{self, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::plan::{Plan, Reader};
use super::{config_text, script};
use tallyd_base::config::{self, Config, Secret};

const CONFIG: &str = "config.toml";

const GATEWAY: &str = "gateway.toml";

const USER: &str = "tallyd";

/// 40 letters and digits have 238 random bits. Such a password needs no quotes in shells and servers.
const PASSWORD_LENGTH: usize = 40;
const LETTERS: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

struct NewFile {
    name: String,
    text: Secret,
    mode: u32,
    reader: Reader,
}

/// Fails if the folder is not writable. `tallyd init` checks the folder before it asks the user questions.
pub(super) fn check_writable(folder: &Path) -> Result<()> {
    let above = folder.ancestors().find(|path| path.is_dir()).unwrap_or(folder);
    tempfile::tempfile_in(above).map(drop).with_context(|| format!("write into {}", above.display()))
}

pub(super) fn check_free(folder: &Path, names: impl IntoIterator<Item = String>) -> Result<()> {
    for name in names {
        let path = folder.join(&name);
        let is_there = path.symlink_metadata().is_ok();
        if is_there && !(name == CONFIG && sets_nothing(&path)) {
            bail!(
                "{} exists, and tallyd does not overwrite it: nothing was written. Move it away, or choose another --dir",
                path.display()
            );
        }
    }
    Ok(())
}

pub(super) fn names(passwords: impl IntoIterator<Item = String>) -> Vec<String> {
    [CONFIG, "migrate.toml", GATEWAY, "accounts.sh"].map(str::to_owned).into_iter().chain(passwords).collect()
}

/// Writes all files. If one file can't be written, deletes the files that were already written.
pub(super) fn write(plan: &Plan) -> Result<Vec<PathBuf>> {
    let file = |name: &str, text: String, mode| {
        let reader = if matches!(name, CONFIG | GATEWAY) { Reader::Daemon } else { Reader::Administrator };
        NewFile { name: name.to_owned(), text: Secret::new(text), mode, reader }
    };
    let mut files = Vec::new();
    for password in plan.passwords() {
        let text = Secret::new(format!("{}\n", new_password()?.expose()));
        files.push(NewFile { name: password.file(), text, mode: 0o600, reader: password.reader() });
    }
    files.push(file("accounts.sh", script::accounts(plan), 0o700));
    files.push(file("migrate.toml", config_text::migrate(plan), 0o600));
    files.push(file(GATEWAY, config_text::gateway(plan), 0o640));
    // config.toml is written last, so if config.toml exists, all files exist.
    files.push(file(CONFIG, config_text::config(plan), 0o640));
    check_free(&plan.folder, files.iter().map(|file| file.name.clone()))?;
    fs::create_dir_all(&plan.folder).with_context(|| format!("make {}", plan.folder.display()))?;
    let mut written = Vec::new();
    for file in &files {
        let path = plan.folder.join(&file.name);
        if let Err(error) = create(&path, file) {
            written.iter().for_each(|path| drop(fs::remove_file(path)));
            return Err(error);
        }
        written.push(path);
    }
    Ok(written)
}

fn create(path: &Path, file: &NewFile) -> Result<()> {
    if file.name != CONFIG || !sets_nothing(path) {
        return write_new(path, file);
    }
    let kept = path.with_extension("toml.example");
    if kept.symlink_metadata().is_ok() {
        bail!("{} exists, and tallyd does not overwrite it: move it away", kept.display());
    }
    fs::rename(path, &kept).with_context(|| format!("rename {}", path.display()))?;
    write_new(path, file).inspect_err(|_| drop(fs::rename(&kept, path)))
}

fn write_new(path: &Path, file: &NewFile) -> Result<()> {
    let action = || format!("write {}", path.display());
    let mut opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).with_context(action)?;
    let mut whole = || -> std::io::Result<()> {
        opened.write_all(file.text.expose().as_bytes())?;
        if let (Reader::Daemon, Some((user, group))) = (file.reader, daemon_user()) {
            // The daemon's user owns the files of its passwords. The same user can read the configurations, but can't
            // change them.
            let user = if file.mode == 0o600 { user } else { 0 };
            chown(path, Some(user), Some(group))?;
        }
        // The process's umask can change the mode of a new file, so the exact mode is set here.
        fs::set_permissions(path, Permissions::from_mode(file.mode))?;
        opened.sync_all()
    };
    whole().inspect_err(|_| drop(fs::remove_file(path))).with_context(action)
}

pub(super) fn daemon_user() -> Option<(u32, u32)> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let users = fs::read_to_string("/etc/passwd").ok()?;
    let mut fields = users.lines().find(|line| line.split(':').next() == Some(USER))?.split(':').skip(2);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// Returns true if all settings of a config.toml are defaults, as in the package's file. Replacing such a file loses
/// nothing.
fn sets_nothing(path: &Path) -> bool {
    let settings = |config: &Config| {
        let urls = [&config.amqp.url, &config.mysql.url, &config.redis.url].map(|url| url.expose().to_owned());
        serde_json::to_value(config).ok().map(|settings| (settings, urls))
    };
    let read = match fs::read_to_string(path) {
        Err(_) => return false,
        Ok(text) => config::parse(&text, CONFIG, []),
    };
    read.is_ok_and(|config| settings(&config) == settings(&Config::default()))
}

fn new_password() -> Result<Secret> {
    let mut password = String::new();
    while password.len() < PASSWORD_LENGTH {
        let mut bytes = [0; 64];
        getrandom::fill(&mut bytes).map_err(std::io::Error::from).context("read random bytes from the system")?;
        // Bytes of 248 (4 * 62) or more are skipped, because such bytes would make some letters likelier.
        let letters = bytes.iter().filter(|byte| **byte < 248).filter_map(|byte| LETTERS.get(usize::from(byte % 62)));
        password.extend(letters.take(PASSWORD_LENGTH - password.len()).map(|letter| char::from(*letter)));
    }
    Ok(Secret::new(password))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn passwords_are_long_and_of_all_letters_and_never_the_same() {
        let passwords: BTreeSet<String> = (0..50).map(|_| new_password().unwrap().expose().to_owned()).collect();
        assert_eq!(passwords.len(), 50);
        assert!(passwords.iter().all(|password| password.len() == PASSWORD_LENGTH));
        let letters: BTreeSet<u8> = passwords.iter().flat_map(|password| password.bytes()).collect();
        assert_eq!(letters, LETTERS.iter().copied().collect());
    }

    #[test]
    fn only_a_configuration_that_sets_nothing_makes_way() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(CONFIG);
        let free = || check_free(folder.path(), [CONFIG.to_owned()]);
        free().unwrap();
        fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/../../config.toml"), &path).unwrap();
        free().unwrap();
        for text in ["[amqp]\nurl = \"amqp://other@127.0.0.1:5672/%2f\"\n", "[amqp]\npartitions = 2\n", "no TOML"] {
            fs::write(&path, text).unwrap();
            assert!(free().unwrap_err().to_string().contains("exists, and tallyd does not overwrite it"), "{text}");
        }
    }
}
