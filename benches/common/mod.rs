//! What the benchmarks share. A measurement's way:
//!
//! ```text
//! workload -> preload (or publish at a rate) -> queue -> contender, a child process -> MySQL -> compared with the model
//!                                                            cpu: what it and both servers used meanwhile
//! ```
//!
//! Every contender is a process of its own, so that its CPU and memory are its own, and says on stderr what it does, in
//! the words of tallyd's log: `{"event":"consuming"}` once, then `{"event":"batch-committed","events":5000}` per batch.

pub mod command;
pub mod contender;
pub mod cpu;
pub mod daemon;
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
