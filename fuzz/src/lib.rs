//! The fuzz targets. Each fuzzer accepts any bytes, and panics if tallyd breaks a guarantee. libFuzzer calls the
//! fuzzers (`fuzz_targets`). With a stable compiler, the test suite (`tests/it/fuzz`) calls the fuzzers with mutations
//! of the same corpora.

mod config;
mod dead;
mod event;
mod layout;
mod map;
mod redis_replies;
mod score;

pub use config::config;
pub use dead::dead;
pub use event::event;
pub use layout::layout;
pub use map::map;
pub use redis_replies::redis_replies;
pub use score::score;

/// Takes bytes from the front of the input. When the input is empty, returns zeros.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn some(&mut self, count: usize) -> &'a [u8] {
        let (some, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        some
    }

    fn byte(&mut self) -> u8 {
        self.some(1).first().copied().unwrap_or(0)
    }

    fn number(&mut self) -> u64 {
        let mut bytes = [0; 8];
        let some = self.some(8);
        bytes[..some.len()].copy_from_slice(some);
        u64::from_le_bytes(bytes)
    }
}
