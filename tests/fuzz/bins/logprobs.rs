//! libFuzzer's way into `targets/logprobs.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| corelane_fuzz::logprobs::logprobs(data));
