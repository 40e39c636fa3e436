//! Errors from libraries.

/// An error whose text already contains its causes. It reports no source, so a chain of errors prints each cause once.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Whole<E>(pub E);
