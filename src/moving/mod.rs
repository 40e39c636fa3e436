//! Commands that bring a site's data in, compare it, or take it out. A person starts each, as a run under a lock of its own; none runs in a
//! daemon.

pub mod compare;
pub mod erase;
pub mod export;
pub mod import;
