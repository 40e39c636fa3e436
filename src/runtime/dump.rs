//! Forbids core dumps of this process, which would hold passwords and keys. It also keeps other processes of the same user from debugging it and
//! from reading its environment.

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};

pub fn forbid() {
    // Neither can fail with these values; what a kernel refuses all the same is left as the unit has it (LimitCORE=0).
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    // A limit of size is not asked where the kernel hands dumps to a program, as it does to systemd-coredump.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
}
