//! libFuzzer's way into `targets/json_scan.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| corelane_fuzz::json_scan::json_scan(data));
