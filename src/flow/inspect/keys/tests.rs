//! Keys of prompts: the same however a body was split, and kept by conversations that grow.
//!
//! Takes bodies, gives verdicts on their keys. Never looks inside the hash.

use super::super::*;
use super::*;
use proptest::prelude::*;

const KEYS: &[&str] = &["text", "messages", "input_ids", "prompt"];
const RULES: KeyRules = KeyRules { seed: 7, max_bytes: 1 << 20 };

/// The key of a body that comes in pieces that end at the given offsets.
fn key_as(rules: KeyRules, body: &[u8], ends: impl IntoIterator<Item = usize>) -> (Kind, Vec<u64>) {
    let mut inspector = Inspector::new();
    inspector.begin(routes::Body::Json(KEYS), b"");
    inspector.want_key(rules);
    let _ = inspector.feed(format!("{{\"text\":\"{}", "old".repeat(99)).as_bytes());
    inspector.begin(routes::Body::Json(KEYS), b"");
    inspector.want_key(rules);
    for end in ends {
        inspector.feed(&body[..end]).unwrap();
    }
    let ask = inspector.finish(body).unwrap();
    while !inspector.hash(&ask, body) {}
    let (kind, symbols) = inspector.key();
    (kind, symbols.to_vec())
}

/// The key, which is the same for every cut into two, for single bytes and for the body at once.
fn key(body: impl AsRef<[u8]>) -> (Kind, Vec<u64>) {
    let body = body.as_ref();
    let whole = key_as(RULES, body, []);
    for end in (0..=body.len()).step_by(1 + body.len() / 300) {
        assert_eq!(key_as(RULES, body, [end]), whole, "cut at {end}: {}", body.escape_ascii());
    }
    assert_eq!(key_as(RULES, body, 0..=body.len()), whole, "byte by byte: {}", body.escape_ascii());
    whole
}

fn long(text: &str) -> String {
    format!("{text}{}", " and so on".repeat(30))
}

fn ids(count: usize) -> String {
    let ids: Vec<String> = (0..count).map(|i| (i * 977 % 128_000).to_string()).collect();
    format!("[{}]", ids.join(", "))
}

fn shared(a: &[u64], b: &[u64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[test]
fn blocks_are_counted_without_the_closing_byte() {
    for (bytes, blocks) in [(0, 0), (62, 0), (63, 1), (64, 1), (127, 2)] {
        // The opening quote counts, the closing one does not.
        let (kind, symbols) = key(format!("{{\"text\" : \"{}\" , \"n\":1}}", "x".repeat(bytes)));
        assert_eq!((kind, symbols.len()), (Kind::Text, blocks), "{bytes}");
    }
    for (count, pages) in [(1, 0), (15, 0), (16, 1), (17, 1), (32, 2)] {
        assert_eq!(key(format!("{{\"input_ids\": {} }}", ids(count))).1.len(), pages, "{count}");
    }
}

#[test]
fn bodies_without_a_prompt_have_no_key() {
    for body in
        ["{}", "{\"text\":null}", "{\"text\":17}", "{\"messages\":[]}", "{\"messages\":{}}", "{\"prompt\":[[]]}"]
    {
        assert_eq!(key(body).1, [0; 0], "{body}");
    }
}

#[test]
fn the_prompt_that_counts_is_hashed_wherever_it_stands() {
    let (a, b, n) = (long("a"), long("b"), ids(40));
    let text = key(format!("{{\"text\":\"{a}\"}}"));
    for body in [
        format!("{{\"input_ids\":{n},\"text\":\"{a}\"}}"),
        format!("{{\"text\":\"{a}\",\"input_ids\":{n}}}"),
        format!("{{\"text\":\"{b}\",\"text\":\"{a}\"}}"),
        format!("{{\"text\":[1,2],\"input_ids\":{n},\"text\":\"{a}\"}}"),
        format!("{{\"x\":{{\"text\":\"{b}\"}},\"text\" :\n\"{a}\"}}"),
    ] {
        assert_eq!(key(&body), text, "{body}");
    }
    let tokens = key(format!("{{\"input_ids\":{n}}}"));
    assert_eq!(tokens.0, Kind::Tokens);
    assert_eq!(key(format!("{{\"text\":\"{a}\",\"input_ids\":{n},\"text\":null}}")), tokens);
    assert_eq!(key(format!("{{\"input_ids\":{}}}", n.replace(' ', "\n\t"))), tokens, "white space is no id");
}

#[test]
fn batches_go_by_their_first_prompt() {
    let (a, b) = (long("a"), long("b"));
    let one = key(format!("{{\"prompt\":\"{a}\"}}"));
    assert_eq!(key(format!("{{\"prompt\": [ \"{a}\" , \"{b}\" ]}}")), one);
    assert_eq!(key(format!("{{\"prompt\":[\"{a}\"]}}")), one);
    let n = ids(40);
    let one = key(format!("{{\"prompt\":{n}}}"));
    assert_eq!(key(format!("{{\"prompt\":[{n} ,[1,2]]}}")), one);
    assert_eq!(one.1.len(), 2);
}

#[test]
fn what_changes_the_engines_prefix_changes_the_first_symbol_alone() {
    let prompt = format!("\"text\":\"{}\"", long("a"));
    let (_, plain) = key(format!("{{{prompt}}}"));
    let mut firsts = vec![plain[0]];
    for part in [
        "\"model\":\"m\"",
        "\"model\":\"m2\"",
        "\"lora_path\":\"m\"",
        "\"tools\":[{}]",
        "\"system\":\"s\"",
        "\"instructions\":\"s\"",
        "\"cache_salt\":\"s\"",
        "\"cache_salt\":\"s\",\"system\":\"s\"",
    ] {
        let before = key(format!("{{{part},{prompt}}}"));
        assert_eq!(key(format!("{{{prompt},{part}}}")), before, "{part}");
        assert_eq!(before.1[1..], plain[1..], "{part}");
        firsts.push(before.1[0]);
    }
    for (i, first) in firsts.iter().enumerate() {
        assert!(!firsts[..i].contains(first), "{i}");
    }
}

#[test]
fn a_list_of_ids_ends_at_what_is_no_id() {
    let n = ids(20);
    let broken = key(format!("{{\"input_ids\":{},\"a\",{}}}", n.trim_end_matches(']'), &n[1..]));
    assert_eq!(broken, key(format!("{{\"input_ids\":{n}}}")));
}

#[test]
fn no_more_than_the_bound_is_read_and_seeds_matter() {
    let body = format!("{{\"text\":\"{}\"}}", "y".repeat(300_000));
    let all = key_as(RULES, body.as_bytes(), []).1;
    assert_eq!(all.len(), 300_001 / 64);
    let bounded = key_as(KeyRules { max_bytes: 1000, ..RULES }, body.as_bytes(), []).1;
    assert_eq!(bounded, all[..15]);
    let other = key_as(KeyRules { seed: 8, ..RULES }, body.as_bytes(), []).1;
    assert_ne!(other[1], all[1]);
}

#[test]
fn unless_asked_for_no_key_is_made() {
    let body = format!("{{\"text\":\"{}\"}}", long("a"));
    let mut inspector = Inspector::new();
    inspector.begin(routes::Body::Json(KEYS), b"");
    let ask = inspector.finish(body.as_bytes()).unwrap();
    assert!(inspector.hash(&ask, body.as_bytes()));
    assert!(inspector.key().1.is_empty());
}

fn turn() -> impl Strategy<Value = String> {
    ("[a-z\\\\]{0,40}", 0..200usize).prop_map(|(text, more)| {
        let text = text.replace('\\', "\\n");
        format!("{{\"role\": \"user\", \"content\": \"{text}{}\"}}", "word ".repeat(more / 5))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn conversations_share_all_but_the_last_block(turns in proptest::collection::vec(turn(), 1..6), next in turn()) {
        let (now, then) = (turns.join(", "), [turns.join(", "), next].join(", "));
        let before = key_as(RULES, format!("{{\"model\":\"m\",\"messages\":[{now}],\"n\":1}}").as_bytes(), []).1;
        let after = key_as(RULES, format!("{{\"model\":\"m\",\"messages\":[{then}],\"n\":1}}").as_bytes(), []).1;
        prop_assert_eq!(shared(&before, &after), before.len());
        prop_assert_eq!(before.len(), (now.len() + 1) / 64);
    }

    #[test]
    fn lists_of_ids_share_all_whole_pages(count in 1..200usize, more in 1..50usize) {
        let list = |n| key_as(RULES, format!("{{\"input_ids\":{}}}", ids(n)).as_bytes(), []).1;
        let (before, after) = (list(count), list(count + more));
        prop_assert_eq!(before.len(), count / 16);
        prop_assert_eq!(shared(&before, &after), before.len());
    }

    #[test]
    fn however_a_body_is_cut_its_key_is_the_same(
        members in proptest::collection::vec((0..4usize, prop_oneof![
            turn().prop_map(|turn| format!("[{turn}, {turn}]")),
            "[ a-z]{0,300}".prop_map(|text| format!("\"{text}\" ")),
            "[ a-z]{0,300}".prop_map(|text| format!("[\"{text}\", \"b\"]")),
            (0..60usize).prop_map(ids),
            (0..60usize).prop_map(|n| format!("[{} , [7]]", ids(n))),
            Just("null".to_string()),
        ]), 0..4),
        cuts in proptest::collection::vec(0..2000usize, 0..6),
    ) {
        let members: Vec<String> = members.iter().map(|(at, value)| format!("\"{}\":{value}", KEYS[*at])).collect();
        let body = format!("{{{}}}", members.join(","));
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % (body.len() + 1)).collect();
        cuts.sort_unstable();
        let whole = key_as(RULES, body.as_bytes(), []);
        prop_assert_eq!(key_as(RULES, body.as_bytes(), cuts), whole, "{}", body);
    }
}
