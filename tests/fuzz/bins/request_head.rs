//! libFuzzer's way into `targets/request_head.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| corelane_fuzz::request_head::request_head(data));
