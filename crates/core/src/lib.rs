//! The parts of tallyd's logic that need no server: ids, events, drift, boards, periods, scores, names of keys, limits.
//!
//! Pure: no I/O, no clock, no runtime. The time and the time zone database are arguments.

#![warn(unreachable_pub)]

pub mod archive;
pub mod bloom;
pub mod board;
pub mod card;
pub mod chain;
pub mod coalesce;
pub mod control;
pub mod day;
pub mod drift;
pub mod erase;
pub mod event;
pub mod fence;
pub mod flow;
pub mod import;
pub mod keys;
pub mod kinds;
pub mod layout;
pub mod mapping;
pub mod model;
pub mod outbox;
pub mod partition;
pub mod pause;
pub mod period;
pub mod prefetch;
pub mod raised_again;
pub mod ranks;
pub mod repair_limits;
pub mod resolve_sets;
pub mod rules;
pub mod score;
pub mod site;
pub mod site_query;
pub mod sizes;
pub mod stall_detector;
pub mod tally;
pub mod template;
pub mod touched;
pub mod traceparent;
pub mod unit;
