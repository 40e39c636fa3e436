//! Errors from libraries.

/// An error whose text already contains its causes. This type hides the error's `source()`, because otherwise the
/// causes would be printed twice.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Whole<E>(pub E);
