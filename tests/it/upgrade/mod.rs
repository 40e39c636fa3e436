//! From one version to the next, and back: the schema changes under daemons that write, whatever interrupts it, and daemons of two versions
//! share the work.

#![expect(clippy::unwrap_used, reason = "a test ends at the first surprise")]

mod schema;
mod steps;
