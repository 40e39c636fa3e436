//! Several daemons share the partitions and the jobs. If a daemon crashes, freezes or loses its servers, the other
//! daemons continue within seconds. The data in MySQL and Redis are the same as with a single daemon.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod dying;
#[cfg(feature = "fault-points")]
mod frozen;
mod growing;
#[cfg(feature = "fault-points")]
mod jobs;
mod sharing;
