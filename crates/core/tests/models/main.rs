//! Models of what surrounds tallyd's pure decisions. The decisions are the functions that the daemon calls.

mod prefetch;
mod queue;
