//! Room for the broker library's thread, which reads a message's headers by recursion: a list nested 4,000 deep, which
//! fits into one frame, overflows the usual 2 MiB, and an overflow ends the whole process.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// The standard library's own variable for the stacks of threads.
const VARIABLE: &str = "RUST_MIN_STACK";

/// Each level takes five bytes of a frame, which has 128 KiB at most (RabbitMQ's `frame_max`, unless set): 26,000 levels. They take 48 MiB, at
/// 1.8 KiB each; without optimization more than 10 KiB each.
const BYTES: &str = if cfg!(debug_assertions) { "536870912" } else { "134217728" };

/// For threads that only drop what that one has read.
pub const WORKER_BYTES: usize = 32 << 20;

/// Runs something as such a thread: the first one has only what the system gives it (`ulimit -s`). None where there is no room for one.
pub fn with_room<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let thread = std::thread::Builder::new().name("tallyd".to_owned()).stack_size(WORKER_BYTES).spawn(run).ok()?;
    Some(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// Starts the program once more with larger stacks, in the same process, where they are smaller. Only address
/// space is reserved: memory is used as a stack grows.
pub fn ensure() {
    let bytes = |text: &str| text.parse::<u64>().unwrap_or(0);
    if std::env::var(VARIABLE).is_ok_and(|text| bytes(&text) >= bytes(BYTES)) {
        return;
    }
    let Ok(program) = std::env::current_exe() else { return };
    let mut arguments = std::env::args_os();
    let mut command = Command::new(program);
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    // Returns only where it failed; then it goes on with the stacks there are.
    let error = command.args(arguments).env(VARIABLE, BYTES).exec();
    tracing::debug!(event = "stack-kept", "the program could not be started with larger stacks: {error}");
}
