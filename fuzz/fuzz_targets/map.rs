#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tallyd_fuzz::map(data));
