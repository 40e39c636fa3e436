//! What tallyd counts, decided without a server: ids, events, boards, periods, scores, names of keys, limits.
//!
//! Pure: no I/O, no clock, no runtime. Whoever needs the time passes it as an argument.

pub mod bloom;
pub mod board;
pub mod chain;
pub mod click_limits;
pub mod event;
pub mod job_name;
pub mod keys;
pub mod kinds;
pub mod layout;
pub mod model;
pub mod outbox_offsets;
pub mod partition;
pub mod pause;
pub mod period;
pub mod ranks;
pub mod recount_query;
pub mod repair_limits;
pub mod rules;
pub mod score;
pub mod tally;
pub mod template;
