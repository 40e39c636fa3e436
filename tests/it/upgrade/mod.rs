//! Upgrades and downgrades. The schema changes while daemons run, even if a change is interrupted. Daemons of two
//! versions share the work.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod schema;
mod steps;
