//! libFuzzer's way into `targets/patch.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| corelane_fuzz::patch::patch(data));
