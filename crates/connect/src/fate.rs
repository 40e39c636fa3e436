//! What an error of a server means for the work that it stopped.

/// Decided once, in the crate that knows the error; callers match it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The server, the network or a rival: the same work may succeed later.
    Passing,
    /// The server refuses the account: the same work fails until a person has changed the account or its rights.
    Refused,
    /// TLS failed: the server isn't the one that is meant, or doesn't trust us.
    Untrusted,
    /// The configuration is wrong: no later try helps.
    Misconfigured,
    /// One row, key or message: the same item fails again, its neighbours can succeed.
    Item,
}
