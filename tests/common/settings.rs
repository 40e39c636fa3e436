//! The configuration of what runs in a world.

use std::fs;
use std::path::Path;

use tallyd::config::Config;

use super::accounts::Accounts;

/// A part of the stack's environment, as `dev/up --print-env` gives it.
pub fn stack(name: &str) -> String {
    let variable = format!("TALLYD_STACK_{name}");
    std::env::var(&variable).unwrap_or_else(|_| panic!("{variable} is not set: run the tests with dev/test"))
}

/// Writes the configuration of what runs in a world. What the test itself may do by it: all.
pub(super) fn written(
    folder: &Path,
    name: &str,
    admin_url: &str,
    accounts: Option<&Accounts>,
    settings: &str,
) -> Config {
    write(folder, name, admin_url, accounts, settings);
    let path = folder.join("admin.toml");
    fs::write(
        &path,
        toml::to_string(&whole(name, [admin_url, &stack("AMQP_URL"), &stack("REDIS_URL")], settings)).unwrap(),
    )
    .unwrap();
    tallyd::config::load(&path).unwrap()
}

pub(super) fn write(folder: &Path, name: &str, admin_url: &str, accounts: Option<&Accounts>, settings: &str) {
    let servers = [admin_url.to_owned(), stack("AMQP_URL"), stack("REDIS_URL")];
    let servers = servers.map(|url| accounts.map_or_else(|| url.clone(), |accounts| accounts.of_daemon(&url)));
    let whole = whole(name, servers.each_ref().map(String::as_str), settings);
    if let Some(accounts) = accounts {
        accounts.make_in_redis(&whole);
    }
    fs::write(folder.join("config.toml"), toml::to_string(&whole).unwrap()).unwrap();
}

fn whole(name: &str, [mysql, amqp, redis]: [&str; 3], settings: &str) -> toml::Table {
    // Tests run at once on two cores: few buckets, short waits. What `settings` says wins.
    let defaults = format!(
        "[amqp]\nurl = \"{amqp}\"\nprefix = \"{name}\"\n[mysql]\nurl = \"{mysql}{name}\"\n\
         [redis]\nurl = \"{redis}\"\nkey_prefix = \"{name}:\"\nbucket_bits = 4\n\
         [reconcile]\npublish_grace = \"100ms\"\nchanged_cron = \"\"\nfull_cron = \"\"\nwatch_every = \"0s\"\n\
         [archive]\ncron = \"\"\n[log]\nlevel = \"info\"\n[admin]\nlisten = \"\"\n"
    );
    let mut whole: toml::Table = defaults.parse().unwrap();
    let given: toml::Table = settings.parse().expect("the test's settings are TOML");
    for (section, value) in given {
        match (whole.get_mut(&section), value) {
            (Some(toml::Value::Table(known)), toml::Value::Table(own)) => known.extend(own),
            (_, value) => drop(whole.insert(section, value)),
        }
    }
    whole
}
