//! libFuzzer's way into `targets/config_file.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| corelane_fuzz::config_file::config_file(data));
