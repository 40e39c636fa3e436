//! Several daemons share the partitions and the jobs. If one daemon crashes, freezes or loses its servers, the others
//! continue within seconds. The results in the stores are the same as with one daemon.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod dying;
#[cfg(feature = "fault-points")]
mod frozen;
mod growing;
#[cfg(feature = "fault-points")]
mod jobs;
mod sharing;
