//! Upgrades and downgrades. The schema can change while daemons run, even if a change is interrupted. Daemons of two
//! versions can run at the same time.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod schema;
mod steps;
