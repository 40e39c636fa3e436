//! The table of commands that destroy. docs/operations/commands.md has the same table.

use tallyd_base::cli::consent::{ALL_STOPPED, NONE, REPAIR_LIMITS, Rule};

pub const RULES: [Rule; 14] = [
    tallyd_moving::command::import::DELETIONS,
    tallyd_moving::command::erase::ERASE,
    ARCHIVE,
    BOARD_RESTORE,
    BOARD_SNAPSHOT,
    DEAD_PURGE,
    MAP_REMOVE,
    PARTITIONS_LOWER,
    tallyd_filters::command::DROP,
    LAYOUT_DROP,
    NAMES_RENAME,
    RECONCILE,
    tallyd_recount::command::FORCE,
    AFTER_RESTORE,
];

pub(super) const ARCHIVE: Rule =
    Rule::new("archive --period", "a board in Redis", "the archive is verified", "`board restore`");
pub(super) const BOARD_RESTORE: Rule = Rule::new("board restore", "a board's scores in Redis", "", NONE);
pub(super) const BOARD_SNAPSHOT: Rule = Rule::new("board snapshot --force", "a board's last snapshot", "", NONE);
pub(super) const DEAD_PURGE: Rule =
    Rule::new("dead purge", "dead letters", "only replayed letters, without `--open`", NONE);
pub(super) const MAP_REMOVE: Rule = Rule::new(
    "admin map remove",
    "a map's queue",
    "no daemon has the map; no messages, without `--with-messages`",
    "configure the map again; its messages are lost",
);
pub(super) const PARTITIONS_LOWER: Rule =
    Rule::new("admin partitions lower", "empty queues", ALL_STOPPED, "raise `[amqp] partitions`");
pub(super) const LAYOUT_DROP: Rule =
    Rule::new("admin layout drop", "a layout's numbers", "the layout is not configured", "configure it");
pub(super) const NAMES_RENAME: Rule =
    Rule::new("admin names rename", "a kind's or metric's old name", ALL_STOPPED, "rename it back");
pub(super) const RECONCILE: Rule =
    Rule::new("reconcile --force", "numbers in Redis that MySQL lacks", REPAIR_LIMITS, NONE);
pub(super) const AFTER_RESTORE: Rule = Rule::new("admin after-restore", "numbers in Redis that MySQL lacks", "", NONE);
