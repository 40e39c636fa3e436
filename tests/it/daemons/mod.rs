//! Several daemons share the partitions and the jobs: whichever of them dies, freezes or loses its servers, the others go on within seconds,
//! and the end is as if nothing had happened.

#![expect(clippy::unwrap_used, reason = "a test ends at the first surprise")]

mod dying;
#[cfg(feature = "fault-points")]
mod frozen;
mod growing;
#[cfg(feature = "fault-points")]
mod jobs;
mod sharing;
