//! Headings of docs/operations.md that say what to do about a problem.

const MANUAL: &str = concat!(env!("CARGO_PKG_HOMEPAGE"), "/blob/main/docs/operations.md");

macro_rules! runbooks {
    ($($name:ident = $anchor:literal,)+) => {
        #[derive(Clone, Copy)]
        pub(super) enum Runbook { $($name,)+ }

        impl Runbook {
            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$name,)+];

            const fn anchor(self) -> &'static str {
                match self { $(Self::$name => $anchor,)+ }
            }
        }
    };
}

runbooks! {
    BoardLost = "alert-tallydboardlost",
    BoardUnarchived = "alert-tallydboardunarchived",
    Brake = "alert-tallydbrake",
    DeadLettersFull = "alert-tallyddeadlettersfull",
    DeadLettersOpen = "alert-tallyddeadlettersopen",
    JobFailed = "alert-tallydjobfailed",
    MorePartitions = "the-number-of-partitions-is-to-grow",
    NotReady = "alert-tallydnotready",
    OutageGoesOn = "alert-tallydoutagegoeson",
    Paused = "alert-tallydpaused",
    PartitionStuck = "alert-tallydpartitionstuck",
    PartitionWithoutConsumer = "alert-tallydpartitionwithoutconsumer",
    ReloadRefused = "alert-tallydreloadrefused",
    RestoredMysql = "mysql-was-restored-from-a-backup",
    Returned = "alert-tallydreturned",
    ServerDown = "alert-tallydserverdown",
    ServerSlow = "alert-tallydserverslow",
}

impl Runbook {
    pub(super) fn url(self) -> String {
        format!("{MANUAL}#{}", self.anchor())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// As forges make anchors of headings.
    fn anchor(heading: &str) -> String {
        let kept = heading.to_lowercase().replace(' ', "-");
        kept.chars().filter(|it| it.is_alphanumeric() || matches!(it, '-' | '_')).collect()
    }

    #[test]
    fn every_runbook_of_a_problem_is_a_heading_of_the_manual() {
        let manual = include_str!("../../../docs/operations.md");
        let headings: HashSet<String> =
            manual.lines().filter_map(|line| line.strip_prefix("### ")).map(anchor).collect();
        for runbook in Runbook::ALL {
            assert!(headings.contains(runbook.anchor()), "{}", runbook.url());
        }
    }
}
