//! Decides how the work continues after an error from a server.

/// Says how the caller continues after an error. Each server's crate (for example `tallyd-mysql`) chooses the fate of
/// its errors, and callers match on the fate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The cause is the server, the network or a competing writer: the same work can succeed later.
    Passing,
    /// The server rejects the account: the work fails until a person changes the account or its rights.
    Refused,
    /// TLS failed: the server has the wrong identity, or it does not trust this client.
    Untrusted,
    /// The configuration is wrong: a retry does not help.
    Misconfigured,
    /// The cause is one row, key or message: this item fails again, but other items can succeed.
    Item,
}
