//! The fuzz targets over their seeds, and over some thousand mutations of them: what CI runs of them.
//!
//! Takes the committed seeds in `tests/fuzz/seeds/`, gives a failure with the input that shows it. Never draws other
//! mutations from one run to the next; the long runs are libFuzzer's (`tests/fuzz/README.md`).

use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

#[path = "fuzz/targets/lib.rs"]
mod targets;

/// Mutations of one target.
const MUTATIONS: usize = 8000;
/// Longest input that mutations make, in bytes.
const MAX_BYTES: usize = 2048;
/// Pieces that mutations put in: what the formats have in common.
const PIECES: &[&[u8]] = &[
    b"\r\n",
    b"\n",
    b"\r",
    b" ",
    b"\t",
    b"\0",
    b"\xff",
    b"\xc3\xa9",
    b":",
    b",",
    b"\"",
    b"\\",
    b"\\u00",
    b"{}",
    b"[",
    b"]",
    b"null",
    b"0",
    b"1",
    b"-",
    b"+",
    b";",
    b"=",
    b"--",
    b"true",
    b"chunked",
    b"Content-Length: 1\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"\"n\":2,",
    b"\"bootstrap_room\":1,",
    b"data: ",
];

/// The seeds of a target, by name.
fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/seeds").join(target);
    let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut seeds: Vec<_> = files
        .map(|file| {
            let file = file.expect("the folder can be read");
            (file.file_name().to_string_lossy().into_owned(), std::fs::read(file.path()).expect("a seed can be read"))
        })
        .collect();
    seeds.sort();
    seeds
}

fn mutate(seeds: &[(String, Vec<u8>)], random: &mut fastrand::Rng) -> Vec<u8> {
    let mut input = seeds[random.usize(..seeds.len())].1.clone();
    for _ in 0..random.usize(1..5) {
        let at = random.usize(0..=input.len());
        let end = (at + random.usize(0..16)).min(input.len());
        match random.u32(0..6) {
            0 => drop(input.drain(at..end)),
            1 => drop(input.splice(at..end, random.choice(PIECES).into_iter().flat_map(|piece| piece.iter().copied()))),
            2 => drop(input.splice(at..at, random.choice(PIECES).into_iter().flat_map(|piece| piece.iter().copied()))),
            3 => {
                let again = input[at..end].to_vec();
                let to = random.usize(0..=input.len());
                input.splice(to..to, again);
            }
            4 => {
                let other = &seeds[random.usize(..seeds.len())].1;
                input.truncate(at);
                input.extend_from_slice(&other[random.usize(0..=other.len())..]);
            }
            _ => {
                if let Some(byte) = input.get_mut(at) {
                    *byte ^= 1 << random.u32(0..8);
                }
            }
        }
    }
    input.truncate(MAX_BYTES);
    input
}

#[test]
fn targets_hold_over_their_seeds_and_mutations() {
    let mut failed = String::new();
    for (name, target) in targets::ALL {
        let seeds = seeds(name);
        assert!(!seeds.is_empty(), "{name} has seeds");
        let mut random = fastrand::Rng::with_seed(7);
        let mutations = (0..MUTATIONS).map(|nth| (format!("mutation {nth}"), mutate(&seeds, &mut random)));
        for (which, input) in seeds.iter().cloned().chain(mutations) {
            if catch_unwind(AssertUnwindSafe(|| target(&input))).is_err() {
                let _ = writeln!(failed, "{name}, {which}: {}", input.escape_ascii());
                break;
            }
        }
    }
    assert!(failed.is_empty(), "these inputs break a property (see the panics above):\n{failed}");
}

#[test]
fn every_target_can_be_run_by_libfuzzer() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz");
    let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).expect("the manifest can be read");
    let named: Vec<_> =
        manifest.lines().filter_map(|line| line.strip_prefix("path = \"bins/")?.strip_suffix(".rs\"")).collect();
    let mut all: Vec<_> = targets::ALL.iter().map(|target| target.0).collect();
    assert_eq!(named.len(), all.len());
    all.retain(|name| !named.contains(name));
    assert!(all.is_empty(), "not in tests/fuzz/Cargo.toml: {all:?}");
    for name in named {
        let text = std::fs::read_to_string(folder.join(format!("bins/{name}.rs"))).expect("the target can be read");
        assert!(text.contains(&format!("corelane_fuzz::{name}::{name}(data)")), "{name}");
    }
}
