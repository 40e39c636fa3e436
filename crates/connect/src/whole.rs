//! Errors from libraries.

/// An error whose text already contains its causes. It reports no source, so that a chain of errors prints no cause
/// twice.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Whole<E>(pub E);
