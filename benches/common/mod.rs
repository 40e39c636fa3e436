//! The parts that all benchmarks share. The steps of a measurement:
//!
//! ```text
//! workload -> preload (or publish at a rate) -> queue -> contender, a child process -> MySQL -> compared with the model
//!                                                            cpu: the time that the contender and both servers used
//! ```
//!
//! Every contender is a separate process, so its CPU and memory can be measured. The contender logs to stderr in the
//! format of tallyd's log: `{"event":"consuming"}` once, then `{"event":"batch-committed","events":5000}` per batch. The
//! lines also have the time of the commit: `timestamp` in tallyd's log, `at_us` in the peers' logs.

pub mod command;
pub mod contender;
pub mod cpu;
pub mod daemon;
pub mod http;
pub mod lineup;
pub mod machine;
pub mod model;
pub mod numbers;
pub mod peers;
pub mod preload;
pub mod relay;
pub mod report;
pub mod wait;
pub mod workload;
pub mod world;
