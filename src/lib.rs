//! tallyd keeps a product's like counts correct.
//!
//! The data flow:
//!
//! ```text
//! API server --publish--> exchange --> partitions --> consumer --one transaction--> like_record + counter + outbox --> ack
//!                                                         \--> dead_letter, in the same transaction
//! outbox:      each difference that a transaction wrote -> Redis counters, boards, filters
//!              (counters with `writer = "api"`: API servers write them, with lua/like.lua, before they publish)
//! reconciler:  sample Redis (the cut) -> fence through every partition -> read MySQL as of the cut -> add the drift
//! recounter:   compare counter with a query on another table -> fence -> compare again -> add the drift
//! archiver:    closed period -> freeze the zset -> copy to leaderboard_archive -> verify -> only then expire
//! filters:     likers from MySQL -> a Bloom filter for each target with many likes, updated by the outbox or lua/like.lua
//! ```
//!
//! Reading order:
//!
//! 1. The crate `tallyd_core` defines the project's terms as types.
//! 2. [`consumer`], `outbox` and the [`jobs`] are the tasks, which never call each other.
//! 3. `tallyd_mysql`, `tallyd_redis` and `tallyd_rabbitmq` access the servers; `tallyd_base::servers` connects
//!    to them.
//! 4. [`app`] builds and supervises the tasks.
//!
//! The crates `tallyd_filters`, `tallyd_gateway`, `tallyd_moving`, `tallyd_recount` and `tallyd_setup` are satellites: they
//! stand on `tallyd_base`, and only the tables in `jobs` and [`cli`] know them. ARCHITECTURE.md describes the whole system.

#![warn(unreachable_pub)]

pub(crate) mod admin;
pub mod app;
pub mod cli;
pub mod consumer;
pub mod dead_letters;
pub mod jobs;
pub mod letter;
pub(crate) mod outbox;
