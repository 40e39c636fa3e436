//! What this process may do and has: no core dumps, and stacks of its threads.
//!
//! The broker library reads a message's headers by recursion, on threads of its own whose stacks only the environment can set: a list nested
//! 4,000 deep, which fits into one frame, overflows the usual 2 MiB, and an overflow ends the whole process.

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use tracing::warn;

/// The standard library's own variable for the stacks of threads, in bytes.
const STACK: &str = "RUST_MIN_STACK";

/// Each level takes five bytes of a frame, which has 128 KiB at most (RabbitMQ's `frame_max`, unless set): 26,000 levels. They take 48 MiB, at
/// 1.8 KiB each; without optimization more than 10 KiB each. Only address space is reserved: memory is used as a stack grows.
const STACK_BYTES: u64 = if cfg!(debug_assertions) { 512 << 20 } else { 128 << 20 };

/// For threads that only drop what the broker library has read.
pub(crate) const WORKER_BYTES: usize = 32 << 20;

/// Runs something on such a thread: the first one has only what the system gives it (`ulimit -s`). `None` if the thread can't be started.
pub(crate) fn with_room<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let thread = std::thread::Builder::new().name("tallyd".to_owned()).stack_size(WORKER_BYTES).spawn(run).ok()?;
    Some(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

pub(crate) fn check_stacks() {
    let bytes = std::env::var(STACK).ok().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    if bytes < STACK_BYTES {
        warn!(
            event = "stacks-small",
            "very deep message headers could end this process: set {STACK}={STACK_BYTES} in its environment, as tallyd.service does"
        );
    }
}

/// Forbids core dumps of this process, which would hold passwords and keys. It also keeps other processes of the same user from debugging it and
/// from reading its environment.
pub(crate) fn forbid_dumps() {
    // Neither can fail with these values; what a kernel refuses all the same is left as the unit has it (LimitCORE=0).
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    // A limit of size is not asked where the kernel hands dumps to a program, as it does to systemd-coredump.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
}
