//! Bodies as the legs of pairs get them: the client's, without the members that are cut out, with those that are added.
//!
//! Takes a body, gives nothing. Never lets a byte of what stays change.

use corelane::config::routes::Body;
use corelane::flow::dispatch::patch::{
    Bootstrap, Rooms, cut_and_add, marked, mooncake_decode, mooncake_prefill, nixl_decode, nixl_prefill, private, tail,
    transfer_params,
};
use corelane::flow::inspect::{Inspector, Mark};
use corelane::shared::roster::DpRank;
use corelane::span::Span;

use super::cuts::random;
use super::json_scan::{is_marked, is_private};
use super::plain::entries;

/// Checks one input.
pub fn patch(data: &[u8]) {
    let mut inspector = Inspector::new();
    inspector.begin(Body::Json(&["prompt", "text", "input_ids"]), b"");
    let Ok(ask) = inspector.finish(data) else { return };
    let (marks, object) = (inspector.marks(), inspector.object());
    let body = std::str::from_utf8(data).expect("what was accepted is UTF-8");
    if entries(body).is_none() {
        return;
    }
    let mut random = random(data);
    let id = &data[..data.len().min(random.usize(0..40))];
    for responses in [false, true] {
        let mut add = Vec::new();
        nixl_prefill(&mut add, marks, responses);
        check(body, object, marks, &add, true);
        add.clear();
        mooncake_prefill(&mut add, marks, responses, id);
        check(body, object, marks, &add, true);
    }
    check(body, object, marks, b"", false);
    let mut add = Vec::new();
    nixl_decode(&mut add, transfer_params(data));
    check(body, object, marks, &add, false);
    add.clear();
    mooncake_decode(&mut add, id, &String::from_utf8_lossy(id), "http://[::1]:8998");
    check(body, object, marks, &add, false);
    let rooms = Rooms::new(random.u64(..), 3);
    let Ok(draw) = rooms.draw(ask.batch) else { return };
    let size = random.u32(1..1000);
    let prefill = random.bool().then(|| DpRank { rank: random.u32(..size), size });
    let port = random.bool().then_some(8998);
    let pair = Bootstrap { host: "[::1]", port, rooms: &rooms, draw, prefill, decode: prefill };
    for write in [Bootstrap::write_prefill, Bootstrap::write_decode] {
        add.clear();
        write(&pair, &mut add);
        check(body, object, marks, &add, false);
    }
}

fn check(body: &str, object: Span, marks: &[Mark], add: &[u8], all: bool) {
    let before = [&b"head"[..], b" {"].concat();
    let mut out = before.clone();
    match all {
        true => cut_and_add(&mut out, body.as_bytes(), object, marked(marks), add),
        false => cut_and_add(&mut out, body.as_bytes(), object, private(marks), add),
    }
    let out = out.strip_prefix(&before[..]).expect("what was there stays");
    let text = std::str::from_utf8(out).expect("a patched body is UTF-8");
    let got = entries(text).unwrap_or_else(|| panic!("a patched body is an object: {text}"));
    let added = format!("{{{}}}", std::str::from_utf8(add).expect("what is added is UTF-8"));
    let added = entries(&added).expect("what is added are members");
    let mut want = entries(body).expect("the body is an object");
    want.retain(|entry| if all { !is_marked(&entry.name) } else { !is_private(&entry.name) });
    let uncut = want.len() == entries(body).map_or(0, |entries| entries.len());
    want.extend(added);
    assert_eq!(got, want);
    let (front, back) = (&body[..object.start as usize], &body[object.end()..]);
    assert!(text.starts_with(front) && text.ends_with(back), "{text}");
    if uncut {
        let mut end = body.as_bytes()[..object.end() - 1].to_vec();
        tail(&mut end, body.as_bytes(), object, add);
        assert_eq!(end, out, "the end alone is the same");
    }
}
