//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Parser;

use crate::faults::{self, Fault};

/// Servers, lines and daemons fail by a seeded plan while users click, and what is left is compared with every answer.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "dev/torture",
    after_help = "Exit codes: 0 no promise was broken, 1 one was, or the run itself failed, or ran fewer than half of its faults, 64 usage"
)]
pub struct Args {
    /// Where chance begins: the same seed makes the same plan and the same users. One of its own otherwise, which is printed.
    /// With an even seed the daemons count likes, with an odd one API servers do.
    #[arg(long)]
    pub seed: Option<u64>,

    /// How long users click and faults come; quiet, a reconcile and the comparison follow, two minutes or so.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=2_880))]
    pub minutes: u64,

    /// Which faults: names with commas between, beginnings of names, or all.
    #[arg(long, default_value = "all", value_name = "all|NAME,...")]
    pub faults: String,

    /// How many daemons.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=9))]
    pub daemons: u8,

    /// API servers, with four users each at a time.
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub clients: u32,

    /// Seconds in which nothing happens, before the last reconcile: a minute, and less in runs of up to 10 minutes.
    #[arg(long)]
    pub quiet: Option<u64>,

    /// Lists the faults, and does nothing.
    #[arg(long)]
    pub list: bool,

    /// Prints the plan, and does nothing.
    #[arg(long)]
    pub plan: bool,

    /// Tries each of the faults alone, for a few seconds: for those who write faults.
    #[arg(long = "try", value_name = "NAME,...", hide = true)]
    pub try_alone: Option<String>,

    /// Where configurations, logs and results go.
    #[arg(long, default_value = "target/torture", hide = true)]
    pub folder: PathBuf,
}

impl Args {
    pub fn length(&self) -> Duration {
        Duration::from_secs(self.minutes * 60)
    }

    pub fn quiet(&self) -> Duration {
        Duration::from_secs(self.quiet.unwrap_or(if self.minutes > 10 { 60 } else { 15 }))
    }

    /// Those that are named, in the order of the list, each once.
    ///
    /// # Errors
    /// A name that no fault has.
    pub fn chosen(&self) -> Result<Vec<Fault>> {
        choose(faults::all(), &self.faults)
    }
}

fn choose(all: Vec<Fault>, names: &str) -> Result<Vec<Fault>> {
    let names: Vec<&str> = names.split(',').map(str::trim).collect();
    let is_named = |fault: &Fault, name: &str| name == "all" || !name.is_empty() && fault.name.starts_with(name);
    for name in &names {
        if !all.iter().any(|fault| is_named(fault, name)) {
            let nearest = all.iter().max_by(|one, other| {
                let near = |fault: &Fault| strsim::jaro_winkler(fault.name, name);
                near(one).total_cmp(&near(other))
            });
            let nearest = nearest.map_or("all", |fault| fault.name);
            bail!("--faults: no fault is called '{name}'; perhaps {nearest}. dev/torture --list names all.");
        }
    }
    Ok(all.into_iter().filter(|fault| names.iter().any(|name| is_named(fault, name))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &str) -> Result<Args, clap::Error> {
        Args::try_parse_from(std::iter::once("dev/torture").chain(words.split_whitespace()))
    }

    #[test]
    fn what_is_said_is_taken_and_what_makes_no_sense_is_refused() {
        let args = parsed("--seed 7 --minutes 2 --faults daemon-killed --daemons 2 --clients 9").unwrap();
        assert_eq!((args.seed, args.minutes, args.daemons, args.clients), (Some(7), 2, 2, 9));
        assert!(args.quiet() < parsed("--minutes 11").unwrap().quiet());
        for wrong in ["--seed x", "--minutes 0", "--daemons 0", "--clients 0", "--what", "word"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn faults_are_chosen_by_name_and_a_name_that_none_has_is_said_with_the_nearest() {
        let names = |words: &str| -> Result<Vec<&'static str>> {
            Ok(choose(faults::all(), words)?.iter().map(|fault| fault.name).collect())
        };
        assert_eq!(names("all").unwrap().len(), faults::all().len());
        assert_eq!(names("daemon-frozen,daemon-killed,daemon-killed").unwrap(), ["daemon-killed", "daemon-frozen"]);
        let error = names("deamon-killed").unwrap_err().to_string();
        assert!(error.contains("'deamon-killed'; perhaps daemon-killed"), "{error}");
        assert!(names("").is_err() && names("daemon-killed,").is_err());
    }
}
