//! libFuzzer's way into `targets/json_pieces.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| corelane_fuzz::json_pieces::json_pieces(data));
