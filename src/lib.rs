//! tallyd keeps a product's like counts true.
//!
//! The data's way:
//!
//! ```text
//! API server --publish--> exchange --> partitions --> consumer --one transaction--> like_record + counter + outbox --> ack
//!                                                         \--> dead_letter, in the same transaction
//! outbox:      each difference that a transaction noted -> Redis counters, boards, filters
//!              (counters with `writer = "api"`: API servers, with lua/like.lua, before they publish)
//! reconciler:  sample Redis (the cut) -> fence through every partition -> read MySQL as of the cut -> add the drift
//! recounter:   what a query says of another table beside counter -> fence -> the same again -> add the drift
//! archiver:    closed period -> freeze the zset -> copy to leaderboard_archive -> verify -> only then expire
//! filters:     likers from MySQL -> a Bloom filter for each target with many likes, kept up by the outbox or lua/like.lua
//! ```
//!
//! In reading order: the crate `tallyd_core` has the words; [`consumer`], `outbox`, and the
//! [`jobs`] the tasks, which never call each other; `tallyd_mysql`, `tallyd_redis` and `tallyd_rabbitmq` what they stand
//! on, as [`servers`] has them; [`app`] builds and supervises them. The crate `tallyd_client` is the API servers' side, on which `gateway`, a
//! process of its own, stands. ARCHITECTURE.md tells the whole.

#![warn(unreachable_pub)]

pub(crate) mod admin;
pub mod app;
pub(crate) mod boards;
pub mod cli;
pub mod config;
pub mod consumer;
pub mod dead_letters;
pub(crate) mod gateway;
pub(crate) mod http;
pub mod jobs;
pub mod letter;
pub mod moving;
pub(crate) mod outbox;
pub(crate) mod partitions;
pub mod runtime;
pub mod servers;
pub(crate) mod telemetry;
pub(crate) mod version;
