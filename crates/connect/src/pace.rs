//! Shortens the intervals of a process that a test waits for.

use std::time::Duration;

/// Returns the interval. In a build with the feature `fault-points`, divides the interval by `TALLYD_TEST_PACE`. All
/// intervals are divided by the same number, so a test proves the same order of events in less time.
#[cfg(feature = "fault-points")]
pub fn pace(interval: Duration) -> Duration {
    use std::sync::LazyLock;
    static DIVISOR: LazyLock<u32> = LazyLock::new(|| {
        let given = std::env::var("TALLYD_TEST_PACE").ok();
        given.and_then(|given| given.parse().ok()).filter(|divisor| *divisor > 0).unwrap_or(1)
    });
    interval / *DIVISOR
}

#[cfg(not(feature = "fault-points"))]
#[inline]
pub fn pace(interval: Duration) -> Duration {
    interval
}
