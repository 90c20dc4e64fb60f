//! libFuzzer's way into `targets/chunked.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| corelane_fuzz::chunked::chunked(data));
