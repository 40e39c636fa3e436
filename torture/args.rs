//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Parser;

use crate::faults::{self, Fault};
use crate::plan::third;
use crate::run::items;

/// Run a site while servers, connections and daemons fail at times that the seed determines, then compare the stored
/// data with every answer that users got.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "dev/torture",
    after_help = "Exit codes: 0 the stored data match every answer; 1 the data differ, the run failed, or fewer than half of its faults ran; 64 usage"
)]
pub struct Args {
    /// Random seed. The same seed gives the same plan and the same users. Default: a new seed, which the run prints. If
    /// the seed is even, the daemons count likes. If the seed is odd, the API servers count likes.
    #[arg(long)]
    pub seed: Option<u64>,

    /// Minutes of clicks and faults. After these minutes, the run takes about two more minutes: it waits without
    /// faults, starts a reconcile, and compares the data.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=2_880))]
    pub minutes: u64,

    /// Faults to inject: "all", or a comma-separated list. Each entry is a fault's name, or the beginning of a fault's
    /// name.
    #[arg(long, default_value = "all", value_name = "all|NAME,...")]
    pub faults: String,

    /// Inject only a third of these faults. Three consecutive numbers inject all of them.
    #[arg(long, value_name = "NUMBER")]
    pub third: Option<u64>,

    /// Number of daemons.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=9))]
    pub daemons: u8,

    /// Number of API servers, with four concurrent users each.
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub clients: u32,

    /// Seconds without clicks and faults before the last reconcile. Default: 60, or 15 in runs of up to 10 minutes.
    #[arg(long)]
    pub quiet: Option<u64>,

    /// List the faults and exit.
    #[arg(long)]
    pub list: bool,

    /// Print the plan and exit.
    #[arg(long)]
    pub plan: bool,

    /// Try each of these faults alone for a few seconds, for example while you write a new fault.
    #[arg(long = "try", value_name = "NAME,...", hide = true)]
    pub try_alone: Option<String>,

    /// Folder for configurations, logs and results.
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

    /// Returns the chosen faults in the order of the list of all faults. No fault occurs twice in the list. Fails if a
    /// name matches no fault.
    pub fn chosen(&self) -> Result<Vec<Fault>> {
        let faults = choose(faults::all(), &self.faults)?;
        let Some(number) = self.third else { return Ok(faults) };
        Ok(third(number, &items(&faults)).into_iter().map(|place| faults[place].clone()).collect())
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
            bail!("--faults: no fault is called '{name}'. Did you mean {nearest}? See dev/torture --list.");
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
    fn each_file_of_a_failed_seed_has_the_arguments_of_its_run() {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("seeds");
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            if name == "README.md" {
                continue;
            }
            let text = std::fs::read_to_string(entry.path()).unwrap();
            let (first, what_failed) = text.split_once('\n').unwrap();
            assert_eq!(parsed(first).unwrap().seed.unwrap().to_string(), name);
            assert!(!what_failed.trim().is_empty(), "{name}");
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
        assert!(error.contains("'deamon-killed'. Did you mean daemon-killed?"), "{error}");
        assert!(names("").is_err() && names("daemon-killed,").is_err());
    }
}
