//! libFuzzer's way into `targets/multipart.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| corelane_fuzz::multipart::multipart(data));
