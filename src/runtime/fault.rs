//! Named points at which a test may end the process as if by SIGKILL. Nothing at all without the feature
//! `fault-points`, which no release is built with.

/// Ends the process here when `TALLYD_FAULT_POINT` names this point.
#[cfg(feature = "fault-points")]
pub fn point(name: &str) {
    if std::env::var("TALLYD_FAULT_POINT").is_ok_and(|wanted| wanted == name) {
        tracing::error!(event = "fault-point", name, "ending the process, as the test asked");
        std::process::abort();
    }
}

/// Nothing: this build has no fault points.
#[cfg(not(feature = "fault-points"))]
#[inline]
pub fn point(_name: &str) {}
