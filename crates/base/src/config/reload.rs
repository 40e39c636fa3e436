//! Finds the changes of a reload: the keys that differ, the keys that apply immediately, and the keys that need a
//! restart. Pure.

use serde_json::Value;

use super::problem::{Fault, Faults};
use super::{Config, ConfigError, EventClock, LIKE, Rules, Secret, ServerUrl, Tls, check};

#[derive(Debug)]
pub struct Reload {
    pub config: Config,
    pub changed: Vec<String>,
    pub needs_restart: Vec<String>,
}

impl Config {
    /// Tasks read these settings each time they start a piece of work. Connections, ports and the count of tasks are
    /// fixed at the start. Fails if a new setting contradicts one that needs a restart.
    pub fn reloaded(&self, new: Self) -> Result<Reload, ConfigError> {
        let mut config = Self {
            daemon: new.daemon.clone(),
            reconcile: new.reconcile.clone(),
            archive: new.archive.clone(),
            kinds: new.kinds.clone(),
            metrics: new.metrics.clone(),
            retired: new.retired.clone(),
            rules: new.rules.clone(),
            recounts: new.recounts.clone(),
            boards: new.boards.clone(),
            ..self.clone()
        };
        config.log.level.clone_from(&new.log.level);
        config.filter.false_positive = new.filter.false_positive;
        config.filter.asked = new.filter.asked;
        config.consumer.future_max = new.consumer.future_max;
        config.consumer.dead_letters_max = new.consumer.dead_letters_max;
        config.consumer.applied_event_keep = new.consumer.applied_event_keep;
        if config.redis.also.is_some() {
            // `load` does the same, because API servers still count in two layouts.
            config.reconcile.event_clock = EventClock::Producer;
        }
        let needs_restart = differences(&config, &new);
        let mut faults = Faults::default();
        check::problems(&config, &mut faults);
        let later = needs_restart.join(", ");
        let until = |fault: Fault| format!("{} (restart the daemon: it then also applies {later})", fault.text);
        let mut problems: Vec<String> = faults.0.into_iter().map(until).collect();
        if config.metrics.like() != self.metrics.like() {
            problems.push(format!("[metrics] {LIKE} has another code: restart the daemon to apply it"));
        }
        problems.extend(self.other_writers(&config));
        if !problems.is_empty() {
            return Err(ConfigError(problems));
        }
        Ok(Reload { changed: differences(self, &config), needs_restart, config })
    }
}

impl Config {
    /// Says which existing numbers another writer would count. Such a change needs more steps than a reload.
    fn other_writers(&self, new: &Self) -> Option<String> {
        let (mut kinds, mut metrics) = (self.kinds.clone(), self.metrics.clone());
        kinds.0.retain(|name, code| new.kinds.0.get(name) == Some(code));
        metrics.0.retain(|name, code| new.metrics.0.get(name) == Some(code));
        let numbers = Rules::from(self).other_writers(&Rules::from(new), (&kinds, &metrics));
        let names = numbers.join(", ");
        (!numbers.is_empty()).then(|| {
            format!(
                "[[rule]] changes the writer of {names}: a reload can't do this, follow the steps of docs/counters.md, \
                 \"Change who counts\""
            )
        })
    }
}

fn differences(one: &Config, other: &Config) -> Vec<String> {
    let mut found = Vec::new();
    // Writing the configuration as JSON can't fail.
    let value = |config: &Config| serde_json::to_value(config).unwrap_or_default();
    walk(&value(one), &value(other), &mut Vec::new(), &mut found);
    for (section, one, other) in [
        ("amqp", &one.amqp.url, &other.amqp.url),
        ("mysql", &one.mysql.url, &other.mysql.url),
        ("redis", &one.redis.url, &other.redis.url),
    ] {
        // A printed address does not contain the user, the password and the options, so the code compares these parts
        // separately.
        let seen = |url: &ServerUrl| url.to_string();
        if seen(one) == seen(other) && one.expose() != other.expose() {
            found.push(format!("[{section}] url or password"));
        }
    }
    let text = |secret: &Option<Secret>| secret.as_ref().map(|secret| secret.expose().to_owned());
    let contents = |tls: &Tls| {
        let identity = tls.identity.as_ref();
        (tls.authorities.clone(), identity.map(|own| (own.certificate.clone(), own.key.expose().to_owned())))
    };
    for (name, is_new) in [
        ("[admin] token", text(&one.admin.token) != text(&other.admin.token)),
        ("[redis] sentinel_password", text(&one.redis.sentinel_password) != text(&other.redis.sentinel_password)),
        ("[amqp] contents of the tls_ files", contents(&one.amqp.login.tls) != contents(&other.amqp.login.tls)),
        ("[mysql] contents of the tls_ files", contents(&one.mysql.login.tls) != contents(&other.mysql.login.tls)),
        ("[redis] contents of the tls_ files", contents(&one.redis.login.tls) != contents(&other.redis.login.tls)),
    ] {
        if is_new {
            found.push(name.to_owned());
        }
    }
    found
}

fn walk(one: &Value, other: &Value, path: &mut Vec<String>, found: &mut Vec<String>) {
    match (one, other) {
        (Value::Object(one), Value::Object(other)) => {
            let mut keys: Vec<&String> = one.keys().chain(other.keys()).collect();
            keys.sort_unstable();
            keys.dedup();
            for key in keys {
                path.push(key.clone());
                walk(one.get(key).unwrap_or(&Value::Null), other.get(key).unwrap_or(&Value::Null), path, found);
                path.pop();
            }
        }
        (one, other) if one == other => {}
        _ => found.push(match path.as_slice() {
            [blocks] => format!("[[{blocks}]]"),
            [sections @ .., key] => format!("[{}] {key}", sections.join(".")),
            [] => return,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;

    fn config(text: &str) -> Config {
        parse(text, "test", []).unwrap()
    }

    /// Returns the applied settings, and the settings that need a restart.
    fn reloaded(before: &str, after: &str) -> (Vec<String>, Vec<String>) {
        let Reload { changed, needs_restart, config: now } = config(before).reloaded(config(after)).unwrap();
        assert_eq!(differences(&now, &config(after)), needs_restart);
        (changed, needs_restart)
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn keys_are_told_apart_by_when_they_are_taken() {
        let after = "[daemon]\ndrain_max_s = 9\ntime_zone = \"Europe/Berlin\"\n[log]\nlevel = \"debug\"\nformat = \"json\"\n[amqp]\npartitions = 2\n\
                     [consumer]\nfuture_max = \"1m\"\nlinger_ms = 6\n[reconcile]\nfull_cron = \"\"\nfence_max = \"61s\"\n\
                     [kinds]\nvideo = 1\npost = 2\n[metrics]\nlike = 1\nview = 2\n[retired]\nmetrics = [\"search\"]\n\
                     [admin]\nlisten = \"\"\n[[rule]]\nmetric = \"view\"\nwriter = \"api\"\n\
                     [[board]]\nname = \"likes\"\nperiod = \"week\"\n\
                     [[recount]]\nkind = \"video\"\nmetric = \"view\"\nquery = \"SELECT 1, 2 WHERE 1 > :after LIMIT :limit\"\n";
        let (changed, needs_restart) = reloaded("", after);
        let taken = [
            "[[board]]",
            "[consumer] future_max",
            "[daemon] drain_max_s",
            "[daemon] time_zone",
            "[kinds] post",
            "[log] level",
            "[metrics] view",
            "[reconcile] fence_max",
            "[reconcile] full_cron",
            "[[recount]]",
            "[retired] metrics",
            "[[rule]]",
        ];
        assert_eq!(changed, names(&taken));
        let not = ["[admin] listen", "[amqp] partitions", "[consumer] linger_ms", "[log] format"];
        assert_eq!(needs_restart, names(&not));
        assert_eq!(reloaded(after, after), (vec![], vec![]));
    }

    #[test]
    fn clients_ask_filters_from_a_reload_on_but_only_if_the_daemon_has_them() {
        let (before, after) = ("[filter]\nlikes_min = 9\n", "[filter]\nlikes_min = 9\nasked = true\n");
        assert_eq!(reloaded(before, after), (names(&["[filter] asked"]), vec![]));
        let problems = config("").reloaded(config(after)).unwrap_err().0;
        assert!(
            problems[0].contains("asked must be false") && problems[0].contains("[filter] likes_min"),
            "{problems:?}"
        );
    }

    #[test]
    fn a_password_is_seen_to_change_and_not_shown() {
        let with = |password: &str| format!("[mysql]\nurl = \"mysql://u:{password}@h/db\"\n");
        let (changed, needs_restart) = reloaded(&with("one"), &with("two"));
        assert_eq!((changed, needs_restart), (vec![], names(&["[mysql] url or password"])));
        let written = serde_json::to_string(&config(&with("s3cr3t"))).unwrap();
        assert!(!written.contains("s3cr3t") && written.contains("mysql://h/db"), "{written}");
    }

    #[test]
    fn a_token_and_what_certificates_files_hold_are_seen_to_change() {
        let with = |secret: &str| {
            let mut config = config("");
            config.admin.token = Some(Secret::new(secret.to_owned()));
            config.redis.sentinel_password = Some(Secret::new(secret.to_owned()));
            config.amqp.login.tls.authorities = Some(secret.to_owned());
            config
        };
        let Reload { changed, needs_restart, .. } =
            with("the-secret-of-before").reloaded(with("the-secret-of-today")).unwrap();
        let expected = ["[admin] token", "[redis] sentinel_password", "[amqp] contents of the tls_ files"];
        assert_eq!((changed, needs_restart), (vec![], names(&expected)));
    }

    #[test]
    fn what_does_not_fit_before_a_restart_is_refused() {
        let one = "[redis]\nlayout = \"string\"\ncounter_key = \"x:{id}\"\n";
        let several =
            "[redis]\nlayout = \"string\"\ncounter_key = \"x:{id}:{metric}\"\n[metrics]\nlike = 1\nview = 2\n";
        let problems = config(one).reloaded(config(several)).unwrap_err().0;
        assert!(problems[0].contains("lacks {metric}") && problems[0].contains("[redis] counter_key"), "{problems:?}");
        let problems = config("").reloaded(config("[metrics]\nlike = 2\n")).unwrap_err().0;
        assert_eq!(problems, ["[metrics] like has another code: restart the daemon to apply it"]);
    }

    #[test]
    fn another_writer_of_an_existing_number_is_refused() {
        let by_api = "[[rule]]\nmetric = \"like\"\nwriter = \"api\"\n";
        for (before, after) in [("", by_api), (by_api, "")] {
            let problems = config(before).reloaded(config(after)).unwrap_err().0;
            assert!(problems[0].contains("video:like") && problems[0].contains("docs/counters.md"), "{problems:?}");
        }
        let further = format!("{by_api}[kinds]\nvideo = 1\npost = 2\n");
        let for_videos = "[[rule]]\nmetric = \"like\"\nkind = \"video\"\nwriter = \"api\"\n";
        assert!(config(for_videos).reloaded(config(&further)).is_ok());
    }

    #[test]
    fn two_layouts_keep_the_clock_that_they_need_until_a_restart() {
        let two = "[redis.also]\nbucket_bits = 14\n";
        let (changed, needs_restart) = reloaded(two, "");
        assert_eq!((changed, needs_restart), (vec![], names(&["[reconcile] event_clock", "[redis] also"])));
    }
}
