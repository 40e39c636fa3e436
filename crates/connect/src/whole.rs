//! Errors of libraries.

/// An error whose text has those of its causes in it: it names no cause, so that a chain of errors shows none twice.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Whole<E>(pub E);
