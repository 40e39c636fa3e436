//! Limits of this process: the process writes no core dumps, and its threads have large stacks.
//!
//! The broker library parses a message's headers by recursion, on its own threads. Only an environment variable can set
//! the stack size of these threads. A list with 4,000 levels of nesting fits into one frame and overflows the usual
//! stack of 2 MiB. An overflow crashes the whole process.

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use tracing::warn;

const STACK: &str = "RUST_MIN_STACK";

/// A frame has at most 128 KiB (RabbitMQ's default `frame_max`), and each level takes five bytes of it: 26,000 levels.
/// Each needs 1.8 KiB of stack, or more than 10 KiB without optimization. Only address space is reserved.
const STACK_BYTES: u64 = if cfg!(debug_assertions) { 512 << 20 } else { 128 << 20 };

/// For threads that only drop the values that the broker library has parsed.
pub(crate) const WORKER_BYTES: usize = 32 << 20;

/// The main thread's stack has only the system's size (`ulimit -s`). `None` if the thread can't be started.
pub fn with_room<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let thread = std::thread::Builder::new().name("tallyd".to_owned()).stack_size(WORKER_BYTES).spawn(run).ok()?;
    Some(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

pub fn check_stacks() {
    let bytes = std::env::var(STACK).ok().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    if bytes < STACK_BYTES {
        warn!(
            event = "stacks-small",
            "very deep message headers can crash this process: set {STACK}={STACK_BYTES} in its environment, as tallyd.service does"
        );
    }
}

/// Dumps would contain passwords and keys. Also keeps processes of the same user from debugging this one.
pub fn forbid_dumps() {
    // Can't fail with these values. If a kernel refuses anyway, the unit's setting (LimitCORE=0) still applies.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    // The kernel ignores the size limit if it pipes dumps to a program such as systemd-coredump.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
}
