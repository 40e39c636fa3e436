//! `[[export]]`: an old table that `tallyd admin export` keeps current.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use tallyd_base::config::{Config, Faults, Key, Mysql, Pause, is_name};
use tallyd_core::site_query::{OF_EXPORT, Query};
use tallyd_core::unit::Unit;

/// Every statement needs the first two placeholders of [`OF_EXPORT`], `:target` and `:user`. A statement without these
/// placeholders would write wrong rows.
const NEEDED: usize = 2;

const DELETED: usize = 3;

/// A table of likes, and the statements that write one row of the table.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// Name in commands and reports: 1 to 32 of a-z, 0-9, - and _. Progress is stored under this name: don't change it.
    pub name: String,
    /// A name of `[kinds]`.
    pub kind: String,
    /// INSERT, REPLACE or UPDATE for a like, with `:target`, `:user` and optionally `:at`. Statements with `:deleted`
    /// (0 or 1) also write unlikes.
    pub upsert: String,
    /// DELETE or UPDATE for an unlike, with `:target` and `:user`. Required if `upsert` has no `:deleted`.
    #[schemars(with = "String")]
    #[serde(default)]
    pub delete: Option<String>,
    /// Unit of an integer `:at` since 1970. Without it: DATETIME(6) in UTC.
    #[schemars(with = "Unit")]
    #[serde(default)]
    pub unit: Option<Unit>,
    /// How far a pass looks back from `--since` or the previous pass.
    #[schemars(extend("x-minimum" = "1s", "x-maximum" = "7d"))]
    #[serde(default = "one_minute")]
    pub overlap: Pause,
    /// Name of the table's server: a `[server.NAME]`. Default: the server of `[mysql]`.
    #[schemars(with = "String")]
    #[serde(default)]
    pub server: Option<String>,
    #[serde(skip)]
    pub mysql: Option<Mysql>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Writes {
    upsert: Query,
    delete: Option<Query>,
}

impl Writes {
    pub fn sql(&self, liked: bool, values: &[String; 4]) -> String {
        match &self.delete {
            Some(delete) if !liked => delete.sql(values),
            _ => self.upsert.sql(values),
        }
    }
}

impl Export {
    pub fn writes(&self) -> Result<Writes, (&'static str, String)> {
        let parse = |key: &'static str, text: &str, verbs: &[&str]| {
            let parsed = Query::parse_write(text, verbs, OF_EXPORT, NEEDED);
            // The parser's messages say "query", so the word is replaced by the key's name.
            parsed.map_err(|sentence| (key, sentence.replacen("query", key, 1)))
        };
        let upsert = parse("upsert", &self.upsert, &["insert", "replace", "update"])?;
        let delete = self.delete.as_ref().map(|delete| parse("delete", delete, &["delete", "update"])).transpose()?;
        match (upsert.has(DELETED), &delete) {
            (true, Some(_)) => Err(("delete", "upsert has :deleted and also writes unlikes: remove delete".to_owned())),
            (false, None) => {
                Err(("delete", "unlikes can't be exported: add delete, or use :deleted in upsert".to_owned()))
            }
            _ => Ok(Writes { upsert, delete }),
        }
    }
}

fn one_minute() -> Pause {
    Pause::from_secs(60)
}

pub(super) fn problems(config: &Config, exports: &[Export], found: &mut Faults) {
    for (place, export) in exports.iter().enumerate() {
        let Export { name, kind, .. } = export;
        let block = Key::from("export").then(place);
        let mut report = |key: &str, problem: &str| found.at(block.then(key), format!("[[export]] {name}: {problem}"));
        if !is_name(name) {
            report("name", "a name must have 1 to 32 characters of a-z, 0-9, - and _");
        }
        if exports.iter().take(place).any(|other| other.name == *name) {
            report("name", "another [[export]] has the same name: rename one");
        }
        if config.kinds.named(kind).is_none() {
            report("kind", &format!("the kind {kind} is not in [kinds]"));
        }
        if let Err((key, problem)) = export.writes() {
            report(key, &problem);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::parse;

    const UPSERT: &str = "upsert = \"INSERT INTO l VALUES (:target, :user, :at) ON DUPLICATE KEY UPDATE at = at\"";
    const DELETE: &str = "delete = \"DELETE FROM l WHERE p = :target AND u = :user\"";

    fn found(more: &str) -> Vec<String> {
        let text = more.replace("[[export]]", "[[export]]\nname = \"old\"\nkind = \"video\"");
        let config = tallyd_base::config::parse("[kinds]\nvideo = 1\n", "test", []).unwrap();
        parse(&text, "test", &config).err().map_or_else(Vec::new, |error| error.0)
    }

    #[test]
    fn exports_that_can_be_run_have_no_problems() {
        let soft = "upsert = \"UPDATE l SET gone = :deleted WHERE p = :target AND u = :user\"";
        for more in
            [format!("[[export]]\n{UPSERT}\n{DELETE}"), format!("[[export]]\n{soft}\nunit = \"ms\"\noverlap = \"1h\"")]
        {
            assert_eq!(found(&more), Vec::<String>::new(), "{more}");
        }
    }

    #[test]
    fn exports_that_can_not_be_run_are_refused() {
        let soft = UPSERT.replace(":at)", ":deleted)");
        for (more, problem) in [
            (UPSERT.to_owned(), "unlikes can't be exported: add delete"),
            (format!("{soft}\n{DELETE}"), "upsert has :deleted and also writes unlikes"),
            (format!("{}\n{DELETE}", UPSERT.replace(":user", "7")), "upsert lacks :user"),
            (format!("{UPSERT}\n{}", DELETE.replace(" AND u = :user", "")), "delete lacks :user"),
            (
                format!("{UPSERT}\n{}", DELETE.replace("DELETE FROM", "TRUNCATE")),
                "delete does not begin with DELETE OR UPDATE",
            ),
            (format!("{UPSERT}\n{}", DELETE.replace(":user", ":user; COMMIT")), "delete has more than one statement"),
            (format!("{UPSERT}\n{DELETE}\noverlap = \"10ms\""), "overlap is \"10ms\": write a duration, 1s to 7d"),
            (
                format!("{UPSERT}\n{DELETE}\nserver = \"old\"\n[server.old]\nurl = \"mysql://u@h\""),
                "url has no database",
            ),
        ] {
            let found = found(&format!("[[export]]\n{more}"));
            assert!(found.len() == 1 && found[0].contains(problem), "{problem}: {found:?}");
        }
    }
}
