//! Selects the contenders that can run on this machine.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

use super::contender::{Contender, Runs};
use super::peers::Runtime;

/// The contenders that run, and the contenders that can't be installed.
pub struct Lineup {
    pub contenders: Vec<Contender>,
    /// Maps a contender's name to the reason why the contender can't be installed.
    pub missing: BTreeMap<String, String>,
}

/// Selects the contenders named in `only`, or all contenders. Installs the software that these contenders need.
///
/// # Errors
/// Fails if a name is unknown.
pub async fn line_up(all: &[Contender], only: &[String]) -> Result<Lineup> {
    for name in only {
        let names: Vec<&str> = all.iter().map(|contender| contender.name).collect();
        ensure!(names.contains(&name.as_str()), "there is no contender {name}; use one of {}", names.join(", "));
    }
    let mut lineup = Lineup { contenders: Vec::new(), missing: BTreeMap::new() };
    let mut installed: BTreeMap<Runtime, Option<String>> = BTreeMap::new();
    let chosen = |contender: &&Contender| only.is_empty() || only.iter().any(|name| name == contender.name);
    for contender in all.iter().filter(chosen) {
        let reason = match contender.runs {
            Runs::Peer(runtime, _) => match installed.get(&runtime) {
                Some(reason) => reason.clone(),
                None => installed.entry(runtime).or_insert(install(runtime).await).clone(),
            },
            _ => None,
        };
        match reason {
            None => lineup.contenders.push(*contender),
            Some(reason) => drop(lineup.missing.insert(contender.name.to_owned(), reason)),
        }
    }
    Ok(lineup)
}

/// If the contender can't be installed, returns the reason.
async fn install(runtime: Runtime) -> Option<String> {
    match runtime.install().await {
        Ok(versions) => {
            println!("peers: {versions}");
            None
        }
        Err(error) => Some(format!("{error:#}")),
    }
}

impl Lineup {
    /// Prints the missing contenders.
    pub fn print_missing(&self) {
        for (name, reason) in &self.missing {
            println!("{name} is missing: {reason}");
        }
    }
}
