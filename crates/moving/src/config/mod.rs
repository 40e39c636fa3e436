//! move.toml: the old tables of a site that moves, and their servers. It stands beside config.toml. Only `tallyd import`,
//! `tallyd admin export` and `tallyd config check` read it, and no variable of the environment changes it.

mod export;
mod import;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use export::{Export, Writes};
pub use import::{Import, Reads};
use tallyd_base::config::{
    Config, ConfigError, Faults, File, Key, Login, Mysql, Origins, Problem, Read, ServerUrl, complete_mysql, finished,
    is_name, of_daemon, read_file, schema_of, typed,
};

pub const MOVE_FILE: &str = "move.toml";

static SCHEMA: LazyLock<Value> = LazyLock::new(|| schema_of::<Moves>("tallyd's move.toml"));

pub fn schema() -> &'static Value {
    &SCHEMA
}

const FILE: File = File { schema, elsewhere: of_daemon, has_variables: false };

/// All settings of move.toml.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("additionalProperties" = false))]
pub struct Moves {
    /// MySQL servers of old tables, each with a name. Tables without a `server` are on the server of `[mysql]`.
    #[serde(rename = "server")]
    pub servers: BTreeMap<String, Server>,
    /// Old tables that `tallyd import` copies.
    #[serde(rename = "import")]
    pub imports: Vec<Import>,
    /// Old tables that `tallyd admin export` keeps current after the cut-over.
    #[serde(rename = "export")]
    pub exports: Vec<Export>,
    #[serde(skip)]
    origins: Origins,
}

/// `[server.NAME]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = false))]
pub struct Server {
    /// `mysql://user@host:3306/database`, as `[mysql] url`.
    pub url: ServerUrl,
    #[serde(flatten)]
    pub login: Login,
}

/// move.toml beside this config.toml.
pub fn path_beside(config: &Path) -> PathBuf {
    config.with_file_name(MOVE_FILE)
}

/// A site that does not move has no such file.
pub fn load(config_path: &Path, config: &Config) -> Result<Moves, ConfigError> {
    examine(&path_beside(config_path), config).map_err(ConfigError::from)
}

pub(crate) fn examine(path: &Path, config: &Config) -> Result<Moves, Vec<Problem>> {
    if !path.exists() {
        return Ok(Moves::default());
    }
    checked(read_file(path, FILE)?, config)
}

/// Parses `text`, which the file `source` contains.
pub fn parse(text: &str, source: &str, config: &Config) -> Result<Moves, ConfigError> {
    let read = tallyd_base::config::read(text, source, [], FILE)?;
    checked(read, config).map_err(ConfigError::from)
}

fn checked(mut read: Read, config: &Config) -> Result<Moves, Vec<Problem>> {
    let mut moves: Moves = typed(&mut read);
    let mut found = Faults::default();
    let mut servers = BTreeMap::new();
    for (name, Server { url, login }) in &moves.servers {
        let block = Key::from("server").then(name);
        if !is_name(name) {
            let text = format!("[server.{name}]: a name must have 1 to 32 characters of a-z, 0-9, - and _");
            found.at(block.clone(), text);
        }
        let mut server = Mysql { url: url.clone(), login: login.clone(), ..config.mysql.clone() };
        complete_mysql(&block, &format!("server.{name}"), &mut server, &mut found);
        servers.insert(name.as_str(), server);
    }
    let imports =
        moves.imports.iter_mut().enumerate().map(|(place, it)| ("import", place, &it.name, &it.server, &mut it.mysql));
    let exports =
        moves.exports.iter_mut().enumerate().map(|(place, it)| ("export", place, &it.name, &it.server, &mut it.mysql));
    for (block, place, name, wanted, mysql) in imports.chain(exports) {
        let Some(wanted) = wanted else { continue };
        *mysql = servers.get(wanted.as_str()).cloned();
        if mysql.is_none() {
            let known = servers.keys().copied().collect::<Vec<_>>().join(", ");
            let text = format!("[[{block}]] {name}: no [server.{wanted}] is there; known: {known}");
            found.at(Key::from(block).then(place).then("server"), text);
        }
    }
    import::problems(config, &moves.imports, &mut found);
    export::problems(config, &moves.exports, &mut found);
    moves.origins = finished(read, found)?;
    Ok(moves)
}

impl Moves {
    pub(crate) fn problem(&self, key: Key, text: String) -> Problem {
        self.origins.problem(&[key], text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_wrong_is_the_only_problem_and_gets_the_right_advice() {
        let config = tallyd_base::config::parse("[kinds]\nvideo = 1\n", "config.toml", []).unwrap();
        let import = "[[import]]\nname = \"views\"\nkind = \"video\"\nserver = \"old\"\nquery = \"\"\"SELECT target, user FROM l WHERE \
                      target > :after_target AND user > :after_user LIMIT :rows\"\"\"\n[server.old]\n";
        for (server, problem) in [
            ("tls_ca_file = \"/ca.pem\"\n", "[server] old must have `url`"),
            (
                "url = \"mysql://u@h/t\"\npassword = \"x\"\n",
                "`password` is not allowed here: put it into a separate file (password_file)",
            ),
            ("url = \"mysql://u@h\"\n", "[server.old] url has no database"),
        ] {
            let found = parse(&format!("{import}{server}"), "move.toml", &config).unwrap_err().0;
            assert!(found.len() == 1 && found[0].contains(problem) && !found[0].contains("TALLYD__"), "{found:?}");
        }
    }
}
