//! Writes the configuration of the programs in a world.

use std::fs;
use std::path::Path;

use tallyd_base::config::Config;

use super::accounts::Accounts;
use super::proxy::behind;

pub fn stack(name: &str) -> String {
    let variable = format!("TALLYD_STACK_{name}");
    std::env::var(&variable).unwrap_or_else(|_| panic!("{variable} is not set: run the tests with dev/test"))
}

pub fn as_api(settings: &str) -> String {
    format!("{settings}\n[[rule]]\nmetric = \"like\"\nwriter = \"api\"\n")
}

/// Writes the configurations of the programs in a world. Returns the test's own settings, with the account that has all
/// rights. Also returns the settings of an API server.
pub(super) fn written(
    folder: &Path,
    name: &str,
    admin_url: &str,
    accounts: Option<&Accounts>,
    settings: &str,
) -> (Config, Config) {
    write(folder, name, admin_url, accounts, settings);
    let (admin, gateway) = whole(folder, name, admin_url, settings);
    let api = as_account(admin.clone(), admin_url, |url| accounts.map(|accounts| accounts.of_api(url)));
    if accounts.is_some() {
        let mysql = api["mysql"]["url"].as_str().unwrap();
        assert!(!may_do_all(mysql, admin_url), "the API server uses the account with all rights: {mysql}");
    }
    fs::write(folder.join("gateway.toml"), toml::to_string(&of_gateway(&api, gateway)).unwrap()).unwrap();
    let loaded = |file: &str, whole: &toml::Table| {
        let path = folder.join(file);
        fs::write(&path, toml::to_string(whole).unwrap()).unwrap();
        tallyd_base::config::load(&path).unwrap()
    };
    (loaded("admin.toml", &admin), loaded("api.toml", &api))
}

pub(super) fn write(folder: &Path, name: &str, admin_url: &str, accounts: Option<&Accounts>, settings: &str) {
    let (whole, _) = whole(folder, name, admin_url, settings);
    let whole = as_account(whole, admin_url, |url| accounts.map(|accounts| accounts.of_daemon(url)));
    if let Some(accounts) = accounts {
        accounts.make_in_redis(&whole);
    }
    fs::write(folder.join("config.toml"), toml::to_string(&whole).unwrap()).unwrap();
}

/// If an address contains the account that has all rights, puts another account into this address. The addresses can
/// also be addresses of proxies.
fn as_account(mut whole: toml::Table, admin_url: &str, other: impl Fn(&str) -> Option<String>) -> toml::Table {
    for section in ["amqp", "mysql", "redis"] {
        let url = whole.get_mut(section).and_then(|section| section.get_mut("url"));
        if let Some(toml::Value::String(url)) = url
            && may_do_all(url, admin_url)
            && let Some(other) = other(url)
        {
            *url = other;
        }
    }
    whole
}

/// Returns whether `url` has the account with all rights, and leads to a server of this world, directly or through a
/// proxy.
pub(super) fn may_do_all(url: &str, admin_url: &str) -> bool {
    let who_and_where = |url: &str| {
        let url = url::Url::parse(url).ok()?;
        let server = behind(&format!("{}:{}", url.host_str()?, url.port()?));
        Some((server, url.username().to_owned(), url.password().map(str::to_owned)))
    };
    let it = who_and_where(url);
    it.is_some() && [admin_url, &stack("AMQP_URL"), &stack("REDIS_URL")].iter().any(|admin| who_and_where(admin) == it)
}

fn of_gateway(api: &toml::Table, gateway: toml::Value) -> toml::Table {
    let mut whole = api.clone();
    whole.retain(|section, value| {
        let known = &tallyd_gateway::config::schema()["properties"][section]["properties"];
        value.as_table_mut().into_iter().for_each(|keys| keys.retain(|key, _| known.get(key).is_some()));
        known.is_object()
    });
    whole.insert("gateway".to_owned(), gateway);
    whole
}

/// Returns the settings of config.toml and of `[gateway]`, and writes those of move.toml.
fn whole(folder: &Path, name: &str, mysql: &str, settings: &str) -> (toml::Table, toml::Value) {
    let control = folder.join("control.sock");
    let control = control.display();
    let (amqp, redis) = (stack("AMQP_URL"), stack("REDIS_URL"));
    // Several tests run at the same time on two cores, so the configuration has few buckets and short waits. `settings`
    // overrides these defaults.
    let defaults = format!(
        "[amqp]\nurl = \"{amqp}\"\nprefix = \"{name}\"\n[mysql]\nurl = \"{mysql}{name}\"\n\
         [redis]\nurl = \"{redis}\"\nkey_prefix = \"{name}:\"\nbucket_bits = 4\n\
         [reconcile]\npublish_grace = \"100ms\"\nchanged_cron = \"\"\nfull_cron = \"\"\nwatch_every = \"0s\"\n\
         [archive]\ncron = \"\"\n[log]\nlevel = \"info\"\n[admin]\nlisten = \"\"\ncontrol = \"{control}\"\n\
         [gateway]\nlisten = \"127.0.0.1:0\"\n"
    );
    let mut whole: toml::Table = defaults.parse().unwrap();
    let settings = settings.replace("{world}", name);
    let given: toml::Table = settings.parse().expect("the test's settings are not valid TOML");
    for (section, value) in given {
        match (whole.get_mut(&section), value) {
            (Some(toml::Value::Table(known)), toml::Value::Table(own)) => known.extend(own),
            (_, value) => drop(whole.insert(section, value)),
        }
    }
    let moves: toml::Table =
        ["server", "import", "export"].into_iter().filter_map(|key| whole.remove_entry(key)).collect();
    fs::write(folder.join("move.toml"), toml::to_string(&moves).unwrap()).unwrap();
    let gateway = whole.remove("gateway").unwrap();
    (whole, gateway)
}
