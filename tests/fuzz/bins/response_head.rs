//! libFuzzer's way into `targets/response_head.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| corelane_fuzz::response_head::response_head(data));
