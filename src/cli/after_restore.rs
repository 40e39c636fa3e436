//! `tallyd admin after-restore`: corrects Redis after MySQL was restored from a backup. MySQL remains the source of truth.

use anyhow::Result;
use clap::Args;

use super::reconcile::{self, ReconcileArgs};
use super::rules::AFTER_RESTORE;
use super::{EXIT_TRY_LATER, Format};
use tallyd_base::cli::consent::Consent;
use tallyd_base::config::Config;
use tallyd_base::partitions::InUse;
use tallyd_base::servers::Servers;
use tallyd_filters as filters;

#[derive(Debug, Args)]
pub(super) struct AfterRestoreArgs {
    #[command(flatten)]
    consent: Consent,
    /// Print the report as text or as JSON.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(super) async fn run(config: &Config, args: &AfterRestoreArgs) -> Result<u8> {
    let AfterRestoreArgs { consent, format } = args;
    if consent.dry_run {
        return reconcile::run(config, &ReconcileArgs::forced(true, *format)).await;
    }
    let servers = Servers::checked(config).await?;
    let mut plan =
        vec!["run a full reconcile without limits, which removes from Redis the counts that MySQL has lost".to_owned()];
    if config.filter.is_on() {
        plan.push("rebuild all Bloom filters with the daemon's next run".to_owned());
    }
    if let Some(code) = consent.ends(AFTER_RESTORE, &plan)? {
        return Ok(code);
    }
    // The restored MySQL names fences that daemons have dropped since the backup.
    let Servers { store, broker, .. } = &servers;
    for partition in InUse::read(store, broker).await?.partitions.numbers() {
        store.forget_fences(partition, None).await?;
    }
    let code = reconcile::run(config, &ReconcileArgs::forced(false, *format)).await?;
    // After `EXIT_TRY_LATER`, the operator runs the command again, which then also rebuilds the filters.
    if config.filter.is_on() && code != EXIT_TRY_LATER {
        // The restored MySQL lacks unlikes that are newer than the backup, so it contains the undone likes again. The
        // Bloom filters lack the users of these likes.
        store.forget_marks(filters::JOB, filters::MODE).await?;
    }
    Ok(code)
}
