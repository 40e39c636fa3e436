//! Pages of docs/operations that say what to do about a problem.

const MANUAL: &str = concat!(env!("CARGO_PKG_HOMEPAGE"), "/blob/main/docs/operations");

macro_rules! runbooks {
    ($($name:ident = $page:literal,)+) => {
        #[derive(Clone, Copy)]
        pub(super) enum Runbook { $($name,)+ }

        impl Runbook {
            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$name,)+];

            const fn page(self) -> &'static str {
                match self { $(Self::$name => $page,)+ }
            }
        }
    };
}

runbooks! {
    BoardLost = "alerts/TallydBoardLost.md",
    BoardUnarchived = "alerts/TallydBoardUnarchived.md",
    Brake = "alerts/TallydBrake.md",
    DeadLettersFull = "alerts/TallydDeadLettersFull.md",
    DeadLettersOpen = "alerts/TallydDeadLettersOpen.md",
    JobFailed = "alerts/TallydJobFailed.md",
    MorePartitions = "partitions.md",
    NotReady = "alerts/TallydNotReady.md",
    OutageGoesOn = "alerts/TallydOutageGoesOn.md",
    Paused = "alerts/TallydPaused.md",
    PartitionStuck = "alerts/TallydPartitionStuck.md",
    PartitionWithoutConsumer = "alerts/TallydPartitionWithoutConsumer.md",
    ReloadRefused = "alerts/TallydReloadRefused.md",
    RestoredMysql = "backup.md",
    Returned = "alerts/TallydReturned.md",
    ServerDown = "alerts/TallydServerDown.md",
    ServerSlow = "alerts/TallydServerSlow.md",
    SiteDiffers = "alerts/TallydSiteDiffers.md",
}

impl Runbook {
    pub(super) fn url(self) -> String {
        format!("{MANUAL}/{}", self.page())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_runbook_of_a_problem_is_a_page_of_the_manual() {
        let manual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operations");
        for runbook in Runbook::ALL {
            assert!(manual.join(runbook.page()).exists(), "{}", runbook.url());
        }
    }
}
