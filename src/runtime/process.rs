//! What a process has from its first instant, because the standard library and the C library read it from the environment as it starts.
//!
//! Room for the broker library's thread, which reads a message's headers by recursion: a list nested 4,000 deep, which fits into one
//! frame, overflows the usual 2 MiB, and an overflow ends the whole process. And an allocator that gives memory back.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The standard library's own variable for the stacks of threads, in bytes.
const STACK: &str = "RUST_MIN_STACK";

/// Each level takes five bytes of a frame, which has 128 KiB at most (RabbitMQ's `frame_max`, unless set): 26,000 levels. They take 48 MiB, at
/// 1.8 KiB each; without optimization more than 10 KiB each.
const STACK_BYTES: &str = if cfg!(debug_assertions) { "536870912" } else { "134217728" };

/// glibc's own for how many arenas its allocator has (mallopt(3), `M_ARENA_MAX`): eight for each processor unless set. Each keeps what was once
/// freed in it, and threads that are busy by turns leave in each of them what only one needs at a time.
const ARENAS: &str = "MALLOC_ARENA_MAX";

/// Enough that two threads seldom wait for each other: small blocks come from a cache of the thread's own.
const ARENAS_MAX: &str = "2";

/// Says that this is the second start: where the system takes one of the others away (glibc does for programs with more rights than their user),
/// there is no third.
const BEGUN: &str = "_TALLYD_BEGUN";

/// For threads that only drop what that one has read.
pub const WORKER_BYTES: usize = 32 << 20;

/// Runs something as such a thread: the first one has only what the system gives it (`ulimit -s`). None where there is no room for one.
pub fn with_room<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let thread = std::thread::Builder::new().name("tallyd".to_owned()).stack_size(WORKER_BYTES).spawn(run).ok()?;
    Some(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// Starts the program once more, in the same process, where its environment lacks something. Of stacks only address space is reserved: memory is
/// used as one grows.
pub fn ensure() {
    let missing = missing(|name| std::env::var_os(name));
    if missing.is_empty() {
        return;
    }
    let Ok(program) = std::env::current_exe() else { return };
    let mut arguments = std::env::args_os();
    let mut command = Command::new(program);
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    // Returns only where it failed; then it goes on with what there is.
    let error = command.args(arguments).envs(missing).env(BEGUN, "1").exec();
    tracing::debug!(event = "stack-kept", "the program could not be started with larger stacks: {error}");
}

/// What is to be set, once. An operator's own number of arenas stays, and so do larger stacks.
fn missing(set: impl Fn(&str) -> Option<OsString>) -> Vec<(&'static str, &'static str)> {
    if set(BEGUN).is_some() {
        return Vec::new();
    }
    let bytes = |text: &str| text.parse::<u64>().unwrap_or(0);
    let stack = set(STACK).and_then(|text| text.to_str().map(bytes)).unwrap_or(0);
    let mut missing = Vec::new();
    if stack < bytes(STACK_BYTES) {
        missing.push((STACK, STACK_BYTES));
    }
    if set(ARENAS).is_none() {
        missing.push((ARENAS, ARENAS_MAX));
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_operator_has_set_stays_unless_it_is_too_small_and_nothing_is_missing_after_that() {
        let with = |stack: Option<&str>, arenas: Option<&str>| {
            let (stack, arenas) = (stack.map(OsString::from), arenas.map(OsString::from));
            missing(move |name| match name {
                STACK => stack.clone(),
                ARENAS => arenas.clone(),
                _ => None,
            })
        };
        let (stack, arenas) = ((STACK, STACK_BYTES), (ARENAS, ARENAS_MAX));
        assert_eq!(with(None, None), [stack, arenas]);
        assert_eq!(with(Some("2097152"), Some("8")), [stack]);
        assert_eq!(with(Some("much"), None), [stack, arenas]);
        assert_eq!(with(Some("9999999999"), None), [arenas]);
        assert_eq!(with(Some(STACK_BYTES), Some(ARENAS_MAX)), []);
        assert_eq!(missing(|name| (name == BEGUN).then(OsString::new)), [], "whatever was taken away");
    }
}
