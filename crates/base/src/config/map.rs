//! Finds errors in `[[map]]` that the types can't exclude.

use std::collections::BTreeSet;

use super::check::is_name;
use super::key::Key;
use super::problem::Faults;
use super::{Config, LIKE, Rules, Writes};
use tallyd_core::mapping::{Map, Place, Source, TYPES, no_toggle};
use tallyd_core::model::Kind;
use tallyd_core::unit::Unit;

/// Maximum length of a name in RabbitMQ, in bytes.
const EXCHANGE_BYTES_MAX: usize = 255;

pub(super) fn problems(config: &Config, found: &mut Faults) {
    for (place, map) in config.maps.iter().enumerate() {
        let block = Key::from("map").then(place);
        let mut texts = named(config, map);
        let others = config.maps.get(..place).unwrap_or_default();
        if others.iter().any(|other| other.name == map.name) {
            texts.push(("name", "another [[map]] has the same name: rename one".to_owned()));
        }
        if others.iter().any(|other| other.number == map.number) {
            texts.push(("number", format!("another map has the number {}: choose another number", map.number)));
        }
        texts.extend(sources(map));
        texts.extend(values(config, map));
        texts.extend(needs(map));
        texts.extend(counted_by_api(config, map).map(|text| ("kind", text)));
        for (key, text) in texts {
            found.at(block.then(key), format!("[[map]] {}: {text}", map.name));
        }
    }
}

type Text = (&'static str, String);

fn named(config: &Config, map: &Map) -> Vec<Text> {
    let mut texts = Vec::new();
    if !is_name(&map.name) {
        texts.push(("name", "a name must have 1 to 32 characters of a-z, 0-9, - and _".to_owned()));
    }
    let own = format!("{}.", config.amqp.prefix);
    match map.exchange.as_str() {
        "" => texts.push(("exchange", "exchange is empty: write the name of your exchange".to_owned())),
        name if name.len() > EXCHANGE_BYTES_MAX => {
            texts.push(("exchange", format!("exchange has more than {EXCHANGE_BYTES_MAX} bytes: use a shorter name")));
        }
        name if name == format!("{own}events") || name == format!("{own}partitions") => {
            texts.push(("exchange", format!("exchange {name} belongs to tallyd: write the name of your own exchange")));
        }
        _ => {}
    }
    if map.binding_keys.is_empty() || map.binding_keys.iter().any(|key| key.len() > EXCHANGE_BYTES_MAX) {
        texts.push((
            "binding_keys",
            format!("binding_keys must have at least one key, and each key at most {EXCHANGE_BYTES_MAX} bytes"),
        ));
    }
    texts
}

fn sources(map: &Map) -> Vec<Text> {
    let mut texts = Vec::new();
    for (name, source) in map.fields() {
        let Some(Source { pointer, values, constant }) = source else { continue };
        match (pointer, constant) {
            (Some(_), Some(_)) => texts.push((name, format!("{name} has a pointer and a constant: remove one"))),
            (None, None) => texts.push((name, format!("{name} has neither a pointer nor a constant: add one"))),
            (None, Some(_)) if !values.is_empty() => {
                texts.push((name, format!("{name} has values but no pointer: add pointer, or remove values")));
            }
            _ => {}
        }
    }
    let of_fields = map.fields().into_iter().filter_map(|(name, source)| Some((name, source?.pointer.as_ref()?)));
    for (name, places) in of_fields.chain([("at", &map.at.pointer)]) {
        if places.iter().next().is_none() {
            texts.push((name, format!("{name} has an empty list of places: add a place")));
        }
        if name != "at" && places.iter().any(|place| *place == Place::Timestamp) {
            texts.push((name, format!("{name} can't come from property:timestamp, which is a time")));
        }
    }
    if let Some(list) = &map.list {
        if !list.starts_with('/') {
            let text = format!("list: \"{list}\" is not a JSON pointer: begin it with /, for example /batch/events");
            texts.push(("list", text));
        }
        if map.single {
            texts.push((
                "single",
                "single says that a list is one event, so list is not allowed: remove one".to_owned(),
            ));
        }
    }
    if map.ignore_other_types && map.event_type.values.is_empty() {
        texts.push(("ignore_other_types", "ignore_other_types needs `values` for the type: add them".to_owned()));
    }
    texts.extend(times(map));
    texts
}

fn times(map: &Map) -> Vec<Text> {
    let mut texts = Vec::new();
    if map.at.unit != Unit::S && map.at.pointer.iter().any(|place| *place == Place::Timestamp) {
        texts.push(("at", "property:timestamp has seconds: write unit = \"s\"".to_owned()));
    }
    if let Some(zone) = map.at.zone.as_deref().filter(|_| !map.at.knows_zone()) {
        texts
            .push(("at", format!("zone \"{zone}\" is not a time zone: write an IANA name, for example Europe/Berlin")));
    }
    texts
}

fn values(config: &Config, map: &Map) -> Vec<Text> {
    let mut texts = Vec::new();
    for event_type in map.event_type.possible().into_iter().flatten().filter(|it| !TYPES.contains(it)) {
        let why = no_toggle(event_type).unwrap_or("allowed are like, unlike, count, set and reset");
        texts.push(("type", format!("type becomes \"{event_type}\": {why}")));
    }
    for kind in map.kind.possible().into_iter().flatten().filter(|kind| config.kinds.named(kind).is_none()) {
        texts.push(("kind", format!("kind becomes \"{kind}\", which is not in [kinds]")));
    }
    let metrics = map.metric.as_ref().and_then(Source::possible).into_iter().flatten();
    for metric in metrics.filter(|metric| *metric == LIKE || config.metrics.named(metric).is_none()) {
        let text = format!("metric becomes \"{metric}\": allowed are the names in [metrics], except like");
        texts.push(("metric", text));
    }
    texts
}

fn needs(map: &Map) -> Vec<Text> {
    let mut texts = Vec::new();
    for event_type in map.event_type.possible().into_iter().flatten().collect::<BTreeSet<_>>() {
        let needed: &[&'static str] = match event_type {
            "like" | "unlike" => &["user_id"],
            "count" => &["metric", "delta", "event_id"],
            "set" => &["metric", "value"],
            "reset" => &["metric"],
            _ => &[],
        };
        for name in needed {
            if map.fields().iter().any(|(field, source)| field == name && source.is_none()) {
                texts.push((*name, format!("type becomes \"{event_type}\", which needs {name}")));
            }
        }
        if map.at.unit.is_coarse() && matches!(event_type, "set" | "reset") {
            texts.push((
                "at",
                format!("type becomes \"{event_type}\", which needs times in microseconds (unit = \"us\")"),
            ));
        }
    }
    texts
}

fn counted_by_api(config: &Config, map: &Map) -> Option<String> {
    let rules = Rules::from(config);
    let has = |types: &[&str]| map.event_type.possible().is_none_or(|all| all.iter().any(|it| types.contains(it)));
    let mut metrics = Vec::new();
    if map.user_id.is_some() && has(&["like", "unlike"]) {
        metrics.push(LIKE);
    }
    if let Some(metric) = &map.metric
        && has(&["count", "set", "reset"])
    {
        let all = || config.metrics.0.keys().map(String::as_str).filter(|name| *name != LIKE).collect();
        metrics.extend(metric.possible().unwrap_or_else(all));
    }
    let kinds = map.kind.possible().unwrap_or_else(|| config.kinds.0.keys().map(String::as_str).collect());
    let known = |kind: &&str| Some((config.kinds.named(kind)?, (*kind).to_owned()));
    let kinds: Vec<(Kind, String)> = kinds.iter().filter_map(known).collect();
    metrics.into_iter().find_map(|metric| {
        let code = config.metrics.named(metric)?;
        let (_, kind) = kinds.iter().find(|(kind, _)| rules.of(*kind, code).writer == Writes::Api)?;
        Some(format!(
            "[[rule]] of {kind} {metric} has writer = \"api\", but a map's servers don't run tallyd's scripts: set writer = \"daemon\""
        ))
    })
}

#[cfg(test)]
mod tests {
    use crate::config::check::tests::found;

    const MAP: &str = "[kinds]\nvideo = 1\n[metrics]\nlike = 1\nview = 2\n[[map]]\nname = \"site\"\nnumber = 1\n\
                       exchange = \"site.likes\"\nkind = { constant = \"video\" }\ntarget_id = { pointer = \"/id\" }\n\
                       user_id = { pointer = \"/user\" }\nat = { pointer = \"/ts\", unit = \"s\" }\n\
                       type = { pointer = \"/action\", values = { LIKE = \"like\", UNLIKE = \"unlike\" } }\n";

    #[test]
    fn maps_that_can_not_be_are_told_with_the_reason() {
        assert_eq!(found(MAP), Vec::<String>::new());
        for (from, to, problem) in [
            ("\"site\"", "\"My Site\"", "[[map]] My Site: a name must have 1 to 32"),
            ("number = 1", "number = 100", "number is 100, allowed are 1 to 99"),
            ("\"site.likes\"", "\"tally.events\"", "exchange tally.events belongs to tallyd"),
            ("\"/id\"", "\"id\"", "pointer is \"id\": write a JSON pointer, for example \"/actor/id\""),
            ("\"/id\"", "[]", "target_id has an empty list of places: add a place"),
            ("\"/id\"", "[\"/id\", \"property:timestamp\"]", "target_id can't come from property:timestamp"),
            ("\"/ts\", unit = \"s\"", "\"property:timestamp\", unit = \"ms\"", "property:timestamp has seconds"),
            ("unit = \"s\"", "unit = \"s\", zone = \"Berlin\"", "zone \"Berlin\" is not a time zone"),
            ("number = 1\n", "number = 1\nsingle = true\nlist = \"/events\"\n", "so list is not allowed"),
            (
                ", values = { LIKE = \"like\", UNLIKE = \"unlike\" } }",
                " }\nignore_other_types = true",
                "needs `values` for the type",
            ),
            ("{ pointer = \"/id\" }", "{}", "target_id has neither a pointer nor a constant"),
            ("constant = \"video\"", "constant = \"film\"", "kind becomes \"film\", which is not in [kinds]"),
            ("UNLIKE = \"unlike\"", "FLIP = \"toggle\"", "type becomes \"toggle\": a toggle can't be mapped"),
            ("UNLIKE = \"unlike\"", "SEE = \"view\"", "type becomes \"view\": allowed are like, unlike"),
            ("UNLIKE = \"unlike\"", "SEE = \"count\"", "type becomes \"count\", which needs metric"),
            ("unit = \"s\"", "unit = \"min\"", "unit is \"min\""),
            ("user_id = { pointer = \"/user\" }", "", "type becomes \"like\", which needs user_id"),
            (
                "UNLIKE = \"unlike\" } }",
                "ZERO = \"reset\" } }\nmetric = { constant = \"view\" }",
                "type becomes \"reset\", which needs times in microseconds",
            ),
            (
                "[[map]]",
                "[[rule]]\nmetric = \"like\"\nwriter = \"api\"\n[[map]]",
                "[[map]] site: [[rule]] of video like has writer = \"api\", but a map's servers don't run tallyd's scripts",
            ),
        ] {
            let problems = found(&MAP.replace(from, to));
            assert!(problems.iter().any(|it| it.contains(problem)), "{to}: {problems:?}");
        }
        let twice = MAP.replace("[kinds]\nvideo = 1\n[metrics]\nlike = 1\nview = 2\n", "");
        let problems = found(&format!("{MAP}{twice}"));
        assert_eq!(
            problems,
            [
                "[[map]] site: another [[map]] has the same name: rename one",
                "[[map]] site: another map has the number 1: choose another number"
            ]
        );
    }
}
