//! The classes of server errors. The class of an error decides how the work continues.

/// The class of an error, which decides how the caller continues. Each server's crate (for example `tallyd-mysql`)
/// assigns a class to each of its errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The server, the network or a competing writer caused the error: the same work can succeed later.
    Passing,
    /// The server rejects the account: the work fails until a person changes the account or its rights.
    Refused,
    /// TLS failed: the server has the wrong identity, or the server does not trust this client.
    Untrusted,
    /// The configuration is wrong: a retry does not help.
    Misconfigured,
    /// One item (a row, key or message) caused the error: this item fails again, but other items can succeed.
    Item,
}
