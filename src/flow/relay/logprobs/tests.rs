//! Answers of both legs, merged, compared with what a plain parser would make of them.
//!
//! Takes answers whole and in pieces, gives proof that arrays alone change. Never talks to a worker.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::limits::{MAX_EVENT_BYTES, MERGED_TURN_BYTES};

const PREFILL: &str = r#"{"text":"x","meta_info":{"id":"p","input_token_logprobs":[[null,1,null] , [-0.50,2,"\u0041"]],
 "input_top_logprobs":[ null, [[-1.0,3,null]] ],"input_token_ids_logprobs":null,"output_token_logprobs":[[0,9,null]]}}"#;

fn merged(prefill: &str, decode: &str) -> Option<String> {
    let mut out = b"before".to_vec();
    let changed = Prefilled::read(prefill.as_bytes(), false)?.merge_json(decode.as_bytes(), &mut out);
    let out = String::from_utf8(out).unwrap();
    let body = out.strip_prefix("before").unwrap();
    assert_eq!(changed, !body.is_empty());
    changed.then(|| body.to_owned())
}

#[test]
fn arrays_follow_each_other_and_the_rest_stays() {
    for (decode, want) in [
        // Empty, null, filled; in another order, with odd spaces and names that look alike.
        (
            r#"{"meta_info" : {"input_top_logprobs":null , "a":1.50,"input_token_logprobs": [ ]},"input_token_logprobs":[] }"#,
            r#"{"meta_info" : {"input_top_logprobs":[null, [[-1.0,3,null]]] , "a":1.50,"input_token_logprobs": [[null,1,null] , [-0.50,2,"\u0041"]]},"input_token_logprobs":[] }"#,
        ),
        (
            r#"{"meta_info":{"input_token_logprobs":[ [1,2] ],"input_top_logprobs":[[]],"input_token_ids_logprobs":[3]}}"#,
            r#"{"meta_info":{"input_token_logprobs":[[null,1,null] , [-0.50,2,"\u0041"],[1,2]],"input_top_logprobs":[null, [[-1.0,3,null]],[]],"input_token_ids_logprobs":[3]}}"#,
        ),
        // Missing: put in at the end.
        (
            r#"{"meta_info":{"input_top_logprobs":[],"x":{} }}"#,
            r#"{"meta_info":{"input_top_logprobs":[null, [[-1.0,3,null]]],"x":{} ,"input_token_logprobs":[[null,1,null] , [-0.50,2,"\u0041"]]}}"#,
        ),
        (
            " {\"meta_info\":{ }}\n",
            " {\"meta_info\":{ \"input_token_logprobs\":[[null,1,null] , [-0.50,2,\"\\u0041\"]],\"input_top_logprobs\":[null, [[-1.0,3,null]]]}}\n",
        ),
        // Of duplicates the last counts; what is no array stays.
        (
            r#"{"meta_info":{"input_top_logprobs":[0],"input_top_logprobs":[1],"input_token_logprobs":7}}"#,
            r#"{"meta_info":{"input_top_logprobs":[0],"input_top_logprobs":[null, [[-1.0,3,null]],1],"input_token_logprobs":7}}"#,
        ),
    ] {
        assert_eq!(merged(PREFILL, decode).as_deref(), Some(want), "{decode}");
    }
}

#[test]
fn what_cannot_be_merged_passes_as_it_came() {
    for decode in [
        "",
        "{}",
        "null",
        r#"{"meta_info":null}"#,
        r#"{"meta_info":[]}"#,
        r#"{"error":{"message":"x"}}"#,
        r#"{"meta_info":{"input_token_logprobs":[]}"#,
        r#"[{"meta_info":{"input_token_logprobs":[]}},"#,
        r#"[{"meta_info":{"input_token_logprobs":[]}}] x"#,
        "[1,null,[]]",
        r#"{"meta_info":{"input_token_logprobs":1,"input_top_logprobs":"a"}}"#,
    ] {
        assert_eq!(merged(PREFILL, decode), None, "{decode}");
    }
    for prefill in [
        "",
        "{}",
        "[]",
        r#"{"meta_info":{"input_token_logprobs":null}}"#,
        r#"{"meta_info":{"output_token_logprobs":[1]}}"#,
        r#"{"meta_info":{"input_token_logprobs":[1]}"#,
        r#"[{"meta_info":{"input_token_logprobs":[1]}},"#,
    ] {
        assert!(Prefilled::read(prefill.as_bytes(), false).is_none(), "{prefill}");
        assert!(Prefilled::read(format!("data: {prefill}\n\n").as_bytes(), true).is_none(), "{prefill}");
    }
    let none = r#"{"meta_info":{"input_token_logprobs":[]}}"#;
    assert_eq!(merged(none, r#"{"meta_info":{"input_token_logprobs":[ 1 ]}}"#), None);
    assert_eq!(merged(none, r#"{"meta_info":{}}"#).as_deref(), Some(none));
}

#[test]
fn batches_are_matched_by_position() {
    let one = |n: u32| format!(r#"{{"meta_info":{{"input_token_logprobs":[{n}]}}}}"#);
    let empty = r#" { "meta_info":{"input_token_logprobs":[]}}"#;
    let prefill = format!("[{},{},{{}},{}]", one(1), one(2), one(4));
    let decode = format!("[{empty} ,{empty},{empty},{empty},{empty}]");
    let want = |n: &str| empty.replace("[]", n);
    let all = format!("[{} ,{},{empty},{},{empty}]", want("[1]"), want("[2]"), want("[4]"));
    assert_eq!(merged(&prefill, &decode), Some(all));
    assert_eq!(merged(&prefill, empty), Some(want("[1]")));
    assert_eq!(merged(&one(1), &decode), Some(format!("[{} ,{empty},{empty},{empty},{empty}]", want("[1]"))));
}

fn event(index: Option<u32>, arrays: &str) -> String {
    let index = index.map_or(String::new(), |index| format!(r#","index":{index}"#));
    format!("data: {{\"text\":\"data: [DONE]\\n\\n\",\"meta_info\":{{\"input_token_logprobs\":{arrays}}}{index}}}\n\n")
}

#[test]
fn events_are_matched_by_index() {
    let prefill = [event(Some(1), "[11]"), event(None, "[10]"), event(Some(1), "[]"), "data: [DONE]\n\n".to_owned()];
    let prefilled = Prefilled::read(prefill.concat().as_bytes(), true).unwrap();
    for (given, want) in [
        (event(None, "[]"), event(None, "[10]")),
        (event(Some(0), "null"), event(Some(0), "[10]")),
        (event(Some(1), "[2,3]"), event(Some(1), "[11,2,3]")),
        (event(Some(2), "[]"), event(Some(2), "[]")),
        (event(Some(4_000_000_000), "[]"), event(Some(4_000_000_000), "[]")),
        ("data: [DONE]\n\n".to_owned(), "data: [DONE]\n\n".to_owned()),
        (": ping\n\n".to_owned(), ": ping\n\n".to_owned()),
        ("\n".to_owned(), "\n".to_owned()),
        (
            format!("event: a\r\n{}", event(None, "[]").replace("\n\n", "\r\n\r\n")),
            format!("event: a\r\n{}", event(None, "[10]").replace("\n\n", "\r\n\r\n")),
        ),
        (event(None, "[]").replace("data: ", "data:"), event(None, "[10]").replace("data: ", "data:")),
        // Data in several lines is nobody's.
        (format!("data: x\n{}", event(None, "[]")), format!("data: x\n{}", event(None, "[]"))),
    ] {
        let mut out = Vec::new();
        prefilled.merge_event(given.as_bytes(), &mut out);
        assert_eq!(String::from_utf8(out).unwrap(), want);
    }
    // Places beyond any batch are not made room for.
    assert!(Prefilled::read(event(Some(4_000_000_000), "[1]").as_bytes(), true).is_none());
}

/// Events stay events, however the prefill's JSON is laid out.
#[test]
fn line_ends_within_arrays_do_not_end_an_event() {
    let prefill = "{\"meta_info\":{\"input_token_logprobs\":[[-1.0,\n\n3,\r\n\"a\\nb\"]\n,[0,1,null]]}}";
    let prefilled = Prefilled::read(prefill.as_bytes(), false).unwrap();
    let mut out = Vec::new();
    prefilled.merge_event(event(None, "[]").as_bytes(), &mut out);
    assert_eq!(String::from_utf8(out).unwrap(), event(None, "[[-1.0,  3,  \"a\\nb\"] ,[0,1,null]]"));
}

fn streamed(stream: &[u8], ends: impl IntoIterator<Item = usize>) -> Vec<u8> {
    let mut merging = Stream::new(Prefilled::read(PREFILL.as_bytes(), false).unwrap());
    let (mut out, mut pos) = (Vec::new(), 0);
    for end in ends.into_iter().chain([stream.len()]) {
        while pos < end {
            let mut some = Vec::new();
            pos += merging.push(&stream[pos..end], &mut some);
            out.append(&mut some);
        }
    }
    merging.finish(&mut out);
    out
}

#[test]
fn streams_may_be_cut_anywhere() {
    let part = |arrays: &str| event(None, arrays).replace("\n\n", "\r\n\r\n");
    let stream = [event(None, "[]"), part("null"), ": x\n\n\r\n".into(), event(None, "[1]"), "data: [DONE]\n\n".into()];
    let first = r#"[null,1,null] , [-0.50,2,"\u0041"]"#;
    let top = r#","input_top_logprobs":[null, [[-1.0,3,null]]]"#;
    let want = stream.concat().replace("\":[]}", "\":null}").replace("\":null}", &format!("\":[{first}]{top}}}"));
    let want = want.replace("\":[1]}", &format!("\":[{first},1]{top}}}"));
    let stream = stream.concat();
    let stream = stream.as_bytes();
    let whole = String::from_utf8(streamed(stream, [])).unwrap();
    assert_eq!(whole, want);
    for end in 0..=stream.len() {
        assert_eq!(streamed(stream, [end]), whole.as_bytes(), "cut at {end}");
    }
    assert_eq!(streamed(stream, 0..=stream.len()), whole.as_bytes());
    // What no empty line completes passes as it came.
    let open = event(None, "[]");
    let open = open.trim_end().as_bytes();
    assert_eq!(streamed(open, [7]), open);
}

#[test]
fn events_that_are_too_long_pass_and_the_next_ones_are_merged() {
    let pad = |len: usize| event(None, "[]").replace("[DONE]", &"x".repeat(len));
    let plain = pad(0).len();
    for (len, is_merged) in [(MAX_EVENT_BYTES - plain, true), (MAX_EVENT_BYTES - plain + 1, false)] {
        let stream = [pad(len), event(None, "[]")].concat();
        let whole = streamed(stream.as_bytes(), []);
        let passed = stream.len() - event(None, "[]").len();
        assert_eq!(whole.starts_with(&stream.as_bytes()[..passed]), !is_merged);
        let last = streamed(event(None, "[]").as_bytes(), []);
        assert!(whole.ends_with(&last) && last.len() > event(None, "[]").len());
        assert!(whole == streamed(stream.as_bytes(), (0..stream.len()).step_by(1 << 20)));
        assert!(whole == streamed(stream.as_bytes(), [passed - 1, passed]));
    }
}

/// A few bytes of the decode's become megabytes, of which only some are made at a time.
#[test]
fn many_events_are_made_one_after_the_other() {
    let said = "[0.5,1,null],".repeat(20_000);
    let prefill = format!(r#"{{"meta_info":{{"input_token_logprobs":[{}]}}}}"#, said.trim_end_matches(','));
    let mut merging = Stream::new(Prefilled::read(prefill.as_bytes(), false).unwrap());
    let stream = event(None, "[]").repeat(100);
    let (mut pos, mut turns, mut made) = (0, 0, 0);
    while pos < stream.len() {
        let mut out = Vec::new();
        pos += merging.push(&stream.as_bytes()[pos..], &mut out);
        assert!(out.len() < MERGED_TURN_BYTES + said.len() + 100, "{}", out.len());
        (turns, made) = (turns + 1, made + out.len());
    }
    assert!(turns > 10 && made > 100 * said.len(), "{turns} turns, {made} bytes");
}

fn array() -> impl Strategy<Value = Option<Value>> {
    prop::option::of(prop_oneof![
        Just(Value::Null),
        prop::collection::vec((any::<i16>(), "[a\"\\],é]{0,3}").prop_map(|(n, text)| json!([n, text])), 0..4)
            .prop_map(Value::from),
    ])
}

fn answer() -> impl Strategy<Value = Value> {
    (array(), array(), array(), "[a-z]{1,3}", array()).prop_map(|(a, b, c, other, d)| {
        let mut meta = serde_json::Map::new();
        for (name, value) in [(&*other, d), (NAMES[0], a), (NAMES[1], b), (NAMES[2], c)] {
            if let Some(value) = value {
                meta.insert(name.to_owned(), value);
            }
        }
        json!({"text": "input_token_logprobs", "meta_info": meta, "z": {"meta_info": {"input_token_logprobs": []}}})
    })
}

/// The same by way of a parser that keeps no bytes.
fn reference(prefill: &Value, decode: &mut Value) {
    for name in NAMES {
        let Some(first) = prefill["meta_info"][name].as_array() else { continue };
        let second = decode["meta_info"][name].as_array().cloned().unwrap_or_default();
        decode["meta_info"][name] = [&first[..], &second].concat().into();
    }
}

proptest! {
    #[test]
    fn merged_answers_are_those_of_a_plain_parser(
        prefill in prop::collection::vec(answer(), 1..4),
        decode in prop::collection::vec(answer(), 1..4),
        pretty in any::<bool>(),
        is_batch in any::<bool>(),
    ) {
        let write = |list: &[Value]| {
            let value = if is_batch { Value::from(list) } else { list[0].clone() };
            if pretty { serde_json::to_string_pretty(&value).unwrap() } else { value.to_string() }
        };
        let text = write(&decode);
        let mut want = decode;
        for (prefill, decode) in prefill.iter().zip(&mut want) {
            reference(prefill, decode);
        }
        let got = merged(&write(&prefill), &text).unwrap_or(text);
        let got: Value = serde_json::from_str(&got).unwrap();
        prop_assert_eq!(got, if is_batch { Value::from(want) } else { want[0].clone() });
    }

    #[test]
    fn noise_passes_however_it_is_cut(
        parts in prop::collection::vec(prop::sample::select(&[
            "data:", " ", "\n", "\r", "\n\n", "\r\n\r\n", "{\"meta_info\":{\"input_token_logprobs\":[", "]}}", "{}", "x",
            "data: {\"meta_info\":{}}\n\n",
        ][..]), 0..40),
        ends in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let stream = parts.concat().into_bytes();
        let whole = streamed(&stream, []);
        let mut ends: Vec<_> = ends.iter().map(|end| end.index(stream.len() + 1)).collect();
        ends.sort_unstable();
        prop_assert_eq!(&streamed(&stream, ends), &whole);
        prop_assert_eq!(streamed(&stream, 0..=stream.len()), whole);
    }
}
