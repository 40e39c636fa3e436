//! Writes new files. It never overwrites a file.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::plan::{Password, Plan, Reader};
use super::{config_text, script};
use tallyd_base::config::{self, Config, Secret};

const CONFIG: &str = "config.toml";

const GATEWAY: &str = "gateway.toml";

/// 40 letters and digits have 238 random bits. Such a password needs no quotes in shells and servers.
const PASSWORD_LENGTH: usize = 40;
const LETTERS: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

struct NewFile {
    path: PathBuf,
    text: Secret,
    mode: u32,
    reader: Reader,
}

/// Fails if the folder is not writable. `tallyd init` checks the folder before it asks the user questions.
pub(super) fn check_writable(folder: &Path) -> Result<()> {
    let above = folder.ancestors().find(|path| path.is_dir()).unwrap_or(folder);
    tempfile::tempfile_in(above).map(drop).with_context(|| format!("write into {}", above.display()))
}

pub(super) fn check_free(paths: impl IntoIterator<Item = PathBuf>) -> Result<()> {
    for path in paths {
        let is_there = path.symlink_metadata().is_ok();
        if is_there && !(path.ends_with(CONFIG) && sets_nothing(&path)) {
            bail!(
                "{} exists, and tallyd does not overwrite it: nothing was written. Move it away, or choose another --dir",
                path.display()
            );
        }
    }
    Ok(())
}

/// Returns the paths of all files that `write` can write.
pub(super) fn paths(folder: &Path, secrets: &Path) -> Vec<PathBuf> {
    let passwords = Password::ALL.map(|password| secrets.join(password.file()));
    [CONFIG, GATEWAY, "migrate.toml", "accounts.sh"]
        .map(|name| folder.join(name))
        .into_iter()
        .chain(passwords)
        .collect()
}

/// Writes all files. If one file can't be written, deletes the files that were already written.
pub(super) fn write(plan: &Plan) -> Result<Vec<PathBuf>> {
    let files = planned(plan)?;
    check_free(files.iter().map(|file| file.path.clone()))?;
    fs::create_dir_all(&plan.folder).with_context(|| format!("make {}", plan.folder.display()))?;
    let mut store = DirBuilder::new();
    store.recursive(true).mode(0o700);
    store.create(&plan.secrets).with_context(|| format!("make {}", plan.secrets.display()))?;
    let mut written = Vec::new();
    for file in &files {
        if let Err(error) = create(file) {
            written.iter().for_each(|path| drop(fs::remove_file(path)));
            return Err(error);
        }
        written.push(file.path.clone());
    }
    Ok(written)
}

fn planned(plan: &Plan) -> Result<Vec<NewFile>> {
    let mut files = Vec::new();
    for password in plan.passwords() {
        let text = Secret::new(format!("{}\n", new_password()?.expose()));
        let reader = if plan.has_store() { Reader::Administrator } else { password.reader() };
        files.push(NewFile { path: plan.secrets.join(password.file()), text, mode: 0o600, reader });
    }
    // config.toml is written last, so if config.toml exists, all files exist.
    for (name, text, mode, reader) in [
        ("accounts.sh", script::accounts(plan), 0o700, Reader::Administrator),
        ("migrate.toml", config_text::migrate(plan), 0o600, Reader::Administrator),
        (GATEWAY, config_text::gateway(plan), 0o640, Reader::Gateway),
        (CONFIG, config_text::config(plan), 0o640, Reader::Daemon),
    ] {
        files.push(NewFile { path: plan.folder.join(name), text: Secret::new(text), mode, reader });
    }
    Ok(files)
}

fn create(file: &NewFile) -> Result<()> {
    let path = &file.path;
    if !path.ends_with(CONFIG) || !sets_nothing(path) {
        return write_new(file);
    }
    let kept = path.with_extension("toml.example");
    if kept.symlink_metadata().is_ok() {
        bail!("{} exists, and tallyd does not overwrite it: move it away", kept.display());
    }
    fs::rename(path, &kept).with_context(|| format!("rename {}", path.display()))?;
    write_new(file).inspect_err(|_| drop(fs::rename(&kept, path)))
}

fn write_new(file: &NewFile) -> Result<()> {
    let path = &file.path;
    let action = || format!("write {}", path.display());
    let mut opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).with_context(action)?;
    let mut whole = || -> std::io::Result<()> {
        opened.write_all(file.text.expose().as_bytes())?;
        if let Some((user, group)) = file.reader.account().and_then(ids) {
            // An account owns the files of its passwords. It can read its configuration, but can't change it.
            let user = if file.mode == 0o600 { user } else { 0 };
            chown(path, Some(user), Some(group))?;
        }
        // The process's umask can change the mode of a new file, so the exact mode is set here.
        fs::set_permissions(path, Permissions::from_mode(file.mode))?;
        opened.sync_all()
    };
    whole().inspect_err(|_| drop(fs::remove_file(path))).with_context(action)
}

/// Returns `None` if the account does not exist, or if this process can't give it files.
fn ids(account: &str) -> Option<(u32, u32)> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let users = fs::read_to_string("/etc/passwd").ok()?;
    let mut fields = users.lines().find(|line| line.split(':').next() == Some(account))?.split(':').skip(2);
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

    use super::super::plan::Facts;
    use super::super::plan::tests::{daemon, load};
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
    fn in_the_default_layout_only_root_reads_passwords_and_each_process_its_own_configuration() {
        let urls = ["127.0.0.1", "127.0.0.1", "127.0.0.1"];
        let plan = Plan::new(Path::new("/etc/tallyd"), &daemon(urls), Facts::default(), load()).unwrap();
        let of = |name: &str| if name.ends_with("-password") { "etc/credstore" } else { "etc/tallyd" };
        assert_eq!((plan.folder.to_str(), plan.secrets.to_str()), (Some("/etc/tallyd"), Some("/etc/credstore")));
        let root = tempfile::tempdir().unwrap();
        let plan = Plan { folder: root.path().join(of("")), secrets: root.path().join(of("-password")), ..plan };
        let files = planned(&plan).unwrap();
        let found: BTreeSet<_> =
            files.iter().map(|file| (file.path.clone(), file.mode, file.reader.account())).collect();
        let expected = [
            ("tallyd.amqp-password", 0o600, None),
            ("tallyd.mysql-password", 0o600, None),
            ("tallyd.redis-password", 0o600, None),
            ("tallyd.migrate-password", 0o600, None),
            ("tallyd.api-password", 0o600, None),
            ("accounts.sh", 0o700, None),
            ("migrate.toml", 0o600, None),
            ("gateway.toml", 0o640, Some("tallyd-gateway")),
            ("config.toml", 0o640, Some("tallyd")),
        ]
        .map(|(name, mode, group)| (root.path().join(of(name)).join(name), mode, group));
        assert_eq!(found, BTreeSet::from(expected.clone()));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(write(&plan).unwrap().len(), expected.len());
        assert_eq!(mode(&plan.secrets), 0o700);
        assert!(expected.iter().all(|(path, expected, _)| mode(path) == *expected));
        let all: BTreeSet<PathBuf> = paths(&plan.folder, &plan.secrets).into_iter().collect();
        assert_eq!(all, expected.into_iter().map(|(path, ..)| path).collect());
    }

    #[test]
    fn only_a_configuration_that_sets_nothing_makes_way() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(CONFIG);
        let free = || check_free([path.clone()]);
        free().unwrap();
        fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/../../config.toml"), &path).unwrap();
        free().unwrap();
        for text in ["[amqp]\nurl = \"amqp://other@127.0.0.1:5672/%2f\"\n", "[amqp]\npartitions = 2\n", "no TOML"] {
            fs::write(&path, text).unwrap();
            assert!(free().unwrap_err().to_string().contains("exists, and tallyd does not overwrite it"), "{text}");
        }
    }
}
