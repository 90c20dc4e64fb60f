//! What the legs of a pair get, compared with a plain parser's view of the client's body.
//!
//! Takes bodies with marked members in every place, gives proof that they alone are gone. Never talks to a worker.

use std::collections::HashSet;

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::rooms::agrees;
use super::*;
use crate::config::routes;
use crate::fault::What;
use crate::flow::inspect::{Ask, Inspector};
use crate::limits::MAX_PAIR_BATCH;
use crate::shared::roster::DpRank;

const PRIVATE: [&str; 8] = [
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "data_parallel_rank",
    "kv_transfer_params",
    "kv_hints",
];
const REPLACED: [&str; 8] = [
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "stream_options",
    "min_tokens",
    "min_completion_tokens",
    "n",
];
const ADD: &str = r#""added":[1,{"a":"b"}],"more":null"#;

fn inspected(body: &str) -> (Inspector, Ask) {
    let mut inspector = Inspector::new();
    inspector.begin(routes::Body::Json(&["prompt", "text", "input_ids"]), b"");
    let ask = inspector.finish(body.as_bytes()).unwrap();
    (inspector, ask)
}

fn patched(body: &str, only_private: bool, add: &str) -> String {
    let (inspector, _) = inspected(body);
    let (marks, object) = (inspector.marks(), inspector.object());
    let mut out = b"head {".to_vec();
    match only_private {
        true => cut_and_add(&mut out, body.as_bytes(), object, private(marks), add.as_bytes()),
        false => cut_and_add(&mut out, body.as_bytes(), object, marked(marks), add.as_bytes()),
    }
    String::from_utf8(out).unwrap().strip_prefix("head {").unwrap().to_owned()
}

/// The body with what was cut and what was added undone as far as can be: without commas between members.
fn bare(body: &str, gone: &[&str]) -> String {
    let mut body = body.to_owned();
    for member in gone {
        body = body.replacen(member, "", 1);
    }
    body.replace(',', "")
}

#[test]
fn members_are_cut_in_every_place() {
    // No value has a comma, so all commas are those between members.
    let members = [r#""kv_hints":{"x":[]}"#, r#""a" : "}]""#, "\"k\\u0076_hints\"\n:7", r#""b":[{}]"#, r#""c":-1e3"#];
    let spaces = [("", ""), (" ", ""), ("", " "), ("\n  ", "\t"), ("\r\n", "\r\n ")];
    for count in 0..=members.len() {
        for order in 0..24 {
            for which in 0..1 << count {
                let (before, after) = spaces[(order + which) % spaces.len()];
                let mut list: Vec<&str> = Vec::new();
                let mut cuts: Vec<&str> = Vec::new();
                for at in 0..count {
                    let cut = which >> at & 1 == 1;
                    let kinds: &[usize] = if cut { &[0, 2] } else { &[1, 3, 4] };
                    let member = members[kinds[(order + at) % kinds.len()]];
                    list.push(member);
                    if cut {
                        cuts.push(member);
                    }
                }
                let inside = list.iter().map(|m| format!("{before}{m}{after}")).collect::<Vec<_>>().join(",");
                for (front, back) in [("", ""), (" \n", "\t\r\n ")] {
                    let body = format!("{front}{{{inside}{before}}}{back}");
                    for add in ["", r#""z":[9]"#] {
                        let out = patched(&body, true, add);
                        let left = list.len() - cuts.len() + usize::from(!add.is_empty());
                        assert_eq!(out.matches(',').count(), left.saturating_sub(1), "{body:?} {out:?}");
                        assert!(serde_json::from_str::<Value>(&out).is_ok(), "{body:?} {out:?}");
                        let end = format!("{add}}}{back}");
                        assert!(out.ends_with(&end), "{body:?} {out:?}");
                        let stays = format!("{}}}{back}", out[..out.len() - end.len()].replace(',', ""));
                        assert_eq!(stays, bare(&body, &cuts), "{body:?} {out:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn one_comma_beside_each_goes() {
    for (body, out) in [
        (r#"{"kv_hints":1}"#, r#"{"z":0}"#),
        (r#"{ "kv_hints" : 1 }"#, r#"{  "z":0}"#),
        (r#"{"kv_hints":1 , "a":2}"#, r#"{  "a":2,"z":0}"#),
        (r#"{"a":2 , "kv_hints":1 }"#, r#"{"a":2   ,"z":0}"#),
        (r#"{"a":2,"kv_hints":1,"kv_hints":[2],"b":"," }"#, r#"{"a":2,"b":"," ,"z":0}"#),
        (r#"{"a":{},"kv_hints":1,"kv_hints":[2]}"#, r#"{"a":{},"z":0}"#),
        ("{}", r#"{"z":0}"#),
        (" { } ", r#" { "z":0} "#),
    ] {
        assert_eq!(patched(body, true, r#""z":0"#), out);
    }
    assert_eq!(patched(r#"{"a":1,"kv_hints":1}"#, true, ""), r#"{"a":1}"#);
}

#[test]
fn a_body_without_cuts_needs_only_a_tail() {
    for body in ["{}", " {\n} \n", r#"{"a":1}"#, "\t{\"a\":{ \"b\":[]} \r\n}  ", r#"{"a":"{"}"#] {
        for add in ["", ADD] {
            let (inspector, _) = inspected(body);
            let object = inspector.object();
            let mut out = body.as_bytes()[..object.end() - 1].to_vec();
            let mut end = Vec::new();
            tail(&mut end, body.as_bytes(), object, add.as_bytes());
            out.extend_from_slice(&end);
            assert_eq!(String::from_utf8(out).unwrap(), patched(body, true, add), "{body}");
        }
    }
}

fn bootstrap<'a>(rooms: &'a Rooms, batch: u32, ranks: [Option<DpRank>; 2]) -> Bootstrap<'a> {
    let [prefill, decode] = ranks;
    Bootstrap { host: "[::1]", port: Some(8998), rooms, draw: rooms.draw(batch).unwrap(), prefill, decode }
}

fn legs(pair: Bootstrap<'_>) -> [Map<String, Value>; 2] {
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    pair.write_prefill(&mut prefill);
    pair.write_decode(&mut decode);
    [prefill, decode].map(|leg| {
        let text = format!("{{{}}}", String::from_utf8(leg).unwrap());
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
    })
}

#[test]
fn a_single_prompt_takes_scalars_and_a_batch_arrays() {
    let rooms = Rooms::new(7, 0);
    let [prefill, decode] = legs(bootstrap(&rooms, 0, [None, None]));
    assert_eq!(prefill, decode);
    assert_eq!(prefill.len(), 3);
    assert_eq!((&prefill["bootstrap_host"], &prefill["bootstrap_port"]), (&json!("[::1]"), &json!(8998)));
    assert!(prefill["bootstrap_room"].as_u64().is_some_and(|room| room > 0));
    for n in [1, 3] {
        let pair = Bootstrap { port: None, host: "a\"\\\n", ..bootstrap(&rooms, n, [None, None]) };
        let [prefill, decode] = legs(pair);
        assert_eq!(prefill, decode);
        assert_eq!(prefill["bootstrap_host"], json!(vec!["a\"\\\n"; n as usize]));
        assert_eq!(prefill["bootstrap_port"], json!(vec![Value::Null; n as usize]));
        let list = prefill["bootstrap_room"].as_array().unwrap();
        assert_eq!(list.iter().map(|room| room.as_u64().unwrap()).collect::<HashSet<_>>().len(), n as usize);
    }
    let mut text = Vec::new();
    let pair = bootstrap(&rooms, 0, [None, None]);
    pair.write_decode(&mut text);
    let room = rooms.room(pair.draw, 0, None);
    let want = format!("\"bootstrap_host\":\"[::1]\",\"bootstrap_port\":8998,\"bootstrap_room\":{room}");
    assert_eq!(String::from_utf8(text).unwrap(), want);
}

#[test]
fn shapes_of_prompts_decide_on_arrays() {
    for (body, batch) in [
        (r#"{"text":"a"}"#, 0),
        (r#"{"text":["a"]}"#, 1),
        (r#"{"text":["a","b"]}"#, 2),
        (r#"{"input_ids":[1,2,3]}"#, 0),
        (r#"{"input_ids":[[1,2],[3],[]]}"#, 3),
        (r#"{"text":null,"input_ids":[[1]]}"#, 1),
        (r#"{"prompt":"a"}"#, 0),
        (r#"{"prompt":["a"]}"#, 1),
        (r#"{"prompt":[1,2]}"#, 0),
        (r#"{"prompt":[[1],[2]]}"#, 2),
        (r#"{"messages":[{},{}]}"#, 0),
    ] {
        assert_eq!(inspected(body).1.batch, batch, "{body}");
    }
}

#[test]
fn ranks_are_told_and_rooms_agree_with_them() {
    let rooms = Rooms::new(8, 3);
    let dp = |rank, size| Some(DpRank { rank, size });
    for size in [1, 2, 3, 8, 500, 512] {
        for batch in [0, 5] {
            let rank = size / 2;
            let [prefill, decode] = legs(bootstrap(&rooms, batch, [dp(rank, size), dp(1, 4)]));
            let told = |leg: &Map<String, Value>, name: &str| leg.get(name).and_then(Value::as_u64);
            assert_eq!(told(&prefill, "routed_dp_rank"), Some(u64::from(rank)));
            assert_eq!(told(&prefill, "disagg_prefill_dp_rank"), None);
            assert_eq!(told(&decode, "routed_dp_rank"), Some(1));
            assert_eq!(told(&decode, "disagg_prefill_dp_rank"), Some(u64::from(rank)));
            assert_eq!(prefill["bootstrap_room"], decode["bootstrap_room"]);
            let list = prefill["bootstrap_room"].as_array().cloned().unwrap_or(vec![prefill["bootstrap_room"].clone()]);
            assert!(list.iter().all(|room| room.as_u64().unwrap() % u64::from(size) == u64::from(rank)));
        }
    }
    // A rank that no room can stand for is said in both words.
    for odd in [DpRank { rank: 513, size: 1000 }, DpRank { rank: 4, size: 2 }] {
        let [prefill, decode] = legs(bootstrap(&rooms, 0, [Some(odd), None]));
        assert_eq!(
            (&prefill["routed_dp_rank"], &prefill["disagg_prefill_dp_rank"]),
            (&json!(odd.rank), &json!(odd.rank))
        );
        assert_eq!((decode.get("routed_dp_rank"), &decode["disagg_prefill_dp_rank"]), (None, &json!(odd.rank)));
        assert!(!agrees(odd));
    }
    let [prefill, decode] = legs(bootstrap(&rooms, 0, [None, dp(2, 4)]));
    assert_eq!((prefill.len(), decode.len(), &decode["routed_dp_rank"]), (3, 4, &json!(2)));
}

#[test]
fn a_million_rooms_are_a_million() {
    const GAP: u64 = 512;
    let (mut seen, mut low, mut high) = (HashSet::new(), u64::MAX, 0);
    let mut take = |room: u64| {
        assert!(0 < room && room < 1 << 63);
        (low, high) = (low.min(room), high.max(room));
        assert!(seen.insert(room / GAP), "{room} shares a block");
        seen.len()
    };
    let lanes: Vec<Rooms> = [0, 1, 2, 255].into_iter().map(|lane| Rooms::new(0xFEED, lane)).collect();
    let mut taken = 0;
    for turn in 0u32.. {
        if taken >= 1_000_000 {
            break;
        }
        let rooms = &lanes[turn as usize % lanes.len()];
        let batch = if turn % 100 == 0 { turn % 37 } else { 0 };
        let dp = (turn % 3 == 0).then_some(DpRank { rank: turn % 8, size: 8 });
        let draw = rooms.draw(batch).unwrap();
        for nth in 0..batch.max(1) {
            let room = rooms.room(draw, nth, dp);
            assert_eq!(room, rooms.room(draw, nth, dp), "both legs read the same");
            taken = take(room);
        }
    }
    assert!(low < 1 << 45 && high > (1 << 63) - (1 << 45), "spread over the whole range: {low} to {high}");
}

#[test]
fn rooms_of_other_seeds_and_neighbours_have_nothing_in_common() {
    let (a, b) = (Rooms::new(1, 0), Rooms::new(2, 0));
    let rooms = |from: &Rooms| (0..1000).map(|_| from.room(from.draw(0).unwrap(), 0, None)).collect::<Vec<_>>();
    let (a, b) = (rooms(&a), rooms(&b));
    assert!(a.iter().all(|room| !b.contains(room)));
    // A step to the next count flips half of the bits of the block.
    let flips: u32 = a.windows(2).map(|pair| ((pair[0] ^ pair[1]) >> 9).count_ones()).sum();
    assert!((26_000..28_000).contains(&flips), "{flips}");
    assert_eq!(a.iter().fold(0, |some, room| some | room) >> 9, (1 << 54) - 1);
}

#[test]
fn batches_have_a_bound() {
    let rooms = Rooms::new(1, 0);
    assert_eq!(rooms.draw(MAX_PAIR_BATCH).unwrap().batch(), MAX_PAIR_BATCH);
    assert_eq!(rooms.draw(MAX_PAIR_BATCH + 1).unwrap_err().what, What::BadField);
}

const REQUEST: &str = r#"{"n":4,"stream":true,"prompt":"x","max_tokens":9,"min_tokens":5,"stream_options":{"a":1},"top_p":0.50,"kv_transfer_params":{"do_remote_decode":false}}"#;

#[test]
fn nixl_legs() {
    let (inspector, _) = inspected(REQUEST);
    let mut add = Vec::new();
    nixl_prefill(&mut add, inspector.marks(), false);
    assert_eq!(
        patched(REQUEST, false, std::str::from_utf8(&add).unwrap()),
        concat!(
            r#"{"prompt":"x","top_p":0.50,"stream":false,"max_tokens":1,"n":1,"kv_transfer_params":"#,
            r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"#,
            r#""remote_host":null,"remote_port":null}}"#
        )
    );
    add.clear();
    nixl_decode(&mut add, Some(br#"{"remote_block_ids":[ 1 ]}"#));
    let want = r#"{"n":4,"stream":true,"prompt":"x","max_tokens":9,"min_tokens":5,"stream_options":{"a":1},"top_p":0.50,"kv_transfer_params":{"remote_block_ids":[ 1 ]}}"#;
    assert_eq!(patched(REQUEST, true, std::str::from_utf8(&add).unwrap()), want);
    add.clear();
    nixl_decode(&mut add, None);
    assert!(add.is_empty());
}

#[test]
fn limits_are_replaced_where_they_stood() {
    for (body, responses, added) in [
        ("{}", false, r#""stream":false,"max_tokens":1"#),
        ("{}", true, r#""stream":false,"max_tokens":1,"max_output_tokens":1"#),
        (r#"{"max_output_tokens":null}"#, false, r#""stream":false,"max_tokens":1,"max_output_tokens":1"#),
        (
            r#"{"max_completion_tokens":5,"min_completion_tokens":3}"#,
            false,
            r#""stream":false,"max_tokens":1,"max_completion_tokens":1"#,
        ),
    ] {
        let (inspector, _) = inspected(body);
        let mut add = Vec::new();
        nixl_prefill(&mut add, inspector.marks(), responses);
        let add = String::from_utf8(add).unwrap();
        assert_eq!(add.split_once(",\"kv_transfer_params\"").unwrap().0, added);
        assert!(patched(body, false, &add).starts_with(&format!("{{{added},")));
    }
}

#[test]
fn mooncake_legs() {
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    mooncake_prefill(&mut prefill, &[], false, br#"id"\"#);
    mooncake_decode(&mut decode, br#"id"\"#, "engine-1", "http://[::1]:8998");
    let text =
        |leg: Vec<u8>| serde_json::from_str::<Value>(&format!("{{{}}}", String::from_utf8(leg).unwrap())).unwrap();
    assert_eq!(
        text(prefill),
        json!({"stream": false, "max_tokens": 1, "kv_transfer_params":
            {"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": "xfer-id\"\\"}})
    );
    assert_eq!(
        text(decode),
        json!({"kv_transfer_params": {"do_remote_decode": false, "do_remote_prefill": true,
            "transfer_id": "xfer-id\"\\", "remote_engine_id": "engine-1", "remote_bootstrap_addr": "http://[::1]:8998"}})
    );
}

#[test]
fn answers_of_a_prefill() {
    for (answer, params) in [
        (
            r#"{"id":1,"kv_transfer_params": {"a" : [1 , 1.50,"\u0041"]} ,"x":2}"#,
            Some(r#"{"a" : [1 , 1.50,"\u0041"]}"#),
        ),
        (r#" {"kv_transfer_params":{"a":1},"kv_\u0074ransfer_params":{"b":2}} "#, Some(r#"{"b":2}"#)),
        (r#"{"kv_transfer_params":{"a":1},"kv_transfer_params":null}"#, None),
        (r#"{"kv_transfer_params":null}"#, None),
        (r#"{"choices":[{"kv_transfer_params":{"a":1}}]}"#, None),
        (r#"{"kv_transfer_params":{"a":1}"#, None),
        (r#"{"kv_transfer_params":{"a":1}} x"#, None),
        (r#"[{"kv_transfer_params":{"a":1}}]"#, None),
        ("null", None),
        ("", None),
        ("data: {}", None),
    ] {
        assert_eq!(transfer_params(answer.as_bytes()), params.map(str::as_bytes), "{answer}");
    }
    assert_eq!(transfer_params(b"{\"kv_transfer_params\":\"\xFF\"}"), None);
    let deep = format!(r#"{{"kv_transfer_params":{}1{}}}"#, "[".repeat(1000), "]".repeat(1000));
    assert_eq!(transfer_params(deep.as_bytes()).map(<[u8]>::len), Some(2001));
}

/// A key as it is, or with its first letter escaped.
fn key() -> impl Strategy<Value = String> {
    let names = prop_oneof![
        prop::sample::select(&PRIVATE[..]).prop_map(String::from),
        prop::sample::select(&REPLACED[..]).prop_map(String::from),
        "[a-z][a-zé]{0,3}",
        Just("bootstrap_pair_key".to_owned()),
    ];
    (names, any::<bool>()).prop_map(|(name, escaped)| match escaped {
        true => format!("\\u{:04x}{}", name.as_bytes()[0], &name[1..]),
        false => name,
    })
}

fn value() -> impl Strategy<Value = String> {
    let leaf = prop_oneof!["-?[1-9][0-9]{0,5}", "null|false", "\"[a-z ,{}é]{0,9}(\\\\[\"\\\\n])?\""];
    leaf.prop_recursive(2, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(|items| format!("[ {}\n]", items.join(" , "))),
            prop::collection::vec((key(), inner), 0..4).prop_map(|members| object(&members, " ")),
        ]
    })
}

fn object(members: &[(String, String)], space: &str) -> String {
    let list: Vec<_> =
        members.iter().map(|(key, value)| format!("{space}\"{key}\"{space}:{space}{value}{space}")).collect();
    format!("{{{}{space}}}", list.join(","))
}

/// A value that the inspector accepts for the key.
fn accepted(key: &str, value: String) -> String {
    match serde_json::from_str::<String>(&format!("\"{key}\"")).unwrap().as_str() {
        "n" => "1".to_owned(),
        "stream" => "true".to_owned(),
        _ => value,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn marked_members_go_and_nothing_else_changes(
        members in prop::collection::vec((key(), value()), 0..10),
        space in "[ \n\r\t]{0,2}",
        front in "[ \n]{0,2}",
        only_private in any::<bool>(),
        add in prop::sample::select(&["", ADD][..]),
    ) {
        let members: Vec<_> = members.into_iter().map(|(k, v)| { let v = accepted(&k, v); (k, v) }).collect();
        let body = format!("{front}{}{front}", object(&members, &space));
        let name = |key: &str| serde_json::from_str::<String>(&format!("\"{key}\"")).unwrap();
        let goes = |key: &str| {
            let name = name(key);
            PRIVATE.contains(&&*name) || name.starts_with("bootstrap_") || !only_private && REPLACED.contains(&&*name)
        };
        let (inspector, ask) = inspected(&body);
        prop_assert_eq!(ask.private, members.iter().any(|(key, _)| {
            let name = name(key);
            PRIVATE.contains(&&*name) || name.starts_with("bootstrap_")
        }));
        prop_assert_eq!(inspector.object().of(body.as_bytes()), body.trim().as_bytes());

        let out = patched(&body, only_private, add);
        let mut want: Map<String, Value> = Map::new();
        for (key, value) in members.iter().filter(|(key, _)| !goes(key)) {
            want.insert(name(key), serde_json::from_str(value).unwrap());
        }
        want.extend(serde_json::from_str::<Map<String, Value>>(&format!("{{{add}}}")).unwrap());
        prop_assert_eq!(serde_json::from_str::<Map<String, Value>>(&out).unwrap(), want, "{} -> {}", &body, &out);

        // Byte by byte: what is written is the body's members that stay, each with its own whitespace.
        let kept: Vec<_> = members.iter().filter(|(key, _)| !goes(key)).cloned().collect();
        let squeeze = |text: &str| text.replace([' ', '\n', '\r', '\t'], "");
        let comma = if kept.is_empty() || add.is_empty() { "" } else { "," };
        let plain = object(&kept, "");
        prop_assert_eq!(squeeze(&out), squeeze(&format!("{}{comma}{add}}}", &plain[..plain.len() - 1])));
        let blanks = |text: &str| text.len() - squeeze(text).len();
        let lost: usize = members.iter().filter(|(key, _)| goes(key))
            .map(|(_, value)| blanks(value) + 2 * space.len()).sum();
        prop_assert_eq!(blanks(&out), blanks(&body) - lost);
    }
}
