//! Several daemons share the partitions and the jobs. If one daemon crashes, freezes or loses its servers, the others
//! continue within seconds. The result is the same.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod dying;
#[cfg(feature = "fault-points")]
mod frozen;
mod growing;
#[cfg(feature = "fault-points")]
mod jobs;
mod sharing;
