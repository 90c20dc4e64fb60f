//! Answers reach the client as the worker made them, and as soon as it made them.

use std::time::Duration;

use serde_json::{Value, json};

use crate::rig::{End, Http, Rig, post, scrub};

const ASKS: &[(&str, &str)] = &[
    ("/v1/chat/completions", r#"{"model":"mock","messages":[{"role":"user","content":"hello"}]}"#),
    ("/v1/completions", r#"{"model":"mock","prompt":"hello","max_tokens":5}"#),
    ("/generate", r#"{"text":"hello","rid":"abc","sampling_params":{"max_new_tokens":7}}"#),
    ("/v1/messages", r#"{"model":"mock","messages":[{"role":"user","content":"hi"}],"max_tokens":4}"#),
    ("/v1/responses", r#"{"model":"mock","input":"hello"}"#),
    ("/v1/embeddings", r#"{"model":"mock","input":["a","b"]}"#),
    ("/v1/rerank", r#"{"model":"mock","query":"q","documents":["a","b"]}"#),
    ("/v1/messages/count_tokens", r#"{"model":"mock","messages":[]}"#),
    ("/tokenize", r#"{"prompt":"hello"}"#),
    ("/classify", r#"{"input":"hello"}"#),
    ("/v1/score", r#"{"text_1":"a","text_2":["b"]}"#),
];

/// Streams and whole answers carry the bytes that a direct connection gives.
#[test]
fn answers_are_those_of_a_direct_connection() {
    let rig = Rig::new(1);
    let mut through = rig.http();
    let mut direct = Http::connect(rig.fleet.engine(0).addr());
    for (path, body) in ASKS {
        for stream in [false, true] {
            let mut body: Value = serde_json::from_str(body).unwrap();
            body["stream"] = stream.into();
            let want = direct.post(path, &body).expect(200);
            let got = through.post(path, &body).expect(200);
            assert_eq!(scrub(&got.body), scrub(&want.body), "{path}");
            for name in ["content-type", "server", "transfer-encoding"] {
                assert_eq!(got.header(name), want.header(name), "{path}");
            }
            assert!(got.header("x-request-id").is_some_and(|id| id.len() == 32), "{}", got.head);
        }
    }
    rig.settles();
}

/// Field report 16: the first event leaves when it is made, not when the answer is complete.
#[test]
fn the_first_event_arrives_before_the_last_is_made() {
    let rig = Rig::new(1);
    let mut http = rig.http();
    let body = json!({"prompt":"p","stream":true,"max_tokens":4,"mock":{"gap_ms":250}});
    http.send(&post("/v1/completions", &body));
    let head = http.head().unwrap();
    assert_eq!((head.status, rig.stats(0).output_tokens < 4), (200, true));
    let mut trailers = String::new();
    for n in 1..=4 {
        let event = http.chunk(&mut trailers).unwrap();
        assert!(event.starts_with(b"data: {"));
        let made = rig.stats(0).output_tokens;
        assert!(n == 4 || made < 4, "event {n} came after {made} were made");
    }
    while !http.chunk(&mut trailers).unwrap().is_empty() {}
}

/// Field report 34: the framing decides where a stream ends, not its text.
#[test]
fn text_that_looks_like_the_end_is_text() {
    let rig = Rig::new(1);
    let body = json!({"prompt":"p","stream":true,"max_tokens":6,"mock":{"text":"data: [DONE]\n\n","gap_ms":1}});
    let answer = rig.post("/v1/completions", &body).expect(200);
    assert_eq!(answer.text().matches(r"data: [DONE]\n\n").count(), 6);
    assert!(answer.text().ends_with("\n\ndata: [DONE]\n\n"));
}

/// Streams of events from a byte to 200 KB, read in pieces of every size and at every pace, byte for byte.
#[test]
fn streams_of_all_sizes_are_exact() {
    let rig = Rig::with(Default::default(), 2, |c| c.cores = vec![0, 1]);
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    std::thread::scope(|scope| {
        for n in 0..8 {
            let rig = &rig;
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed + n);
                let mut http = rig.http();
                for _ in 0..6 {
                    let bytes = 1 << rng.u32(0..18) | rng.usize(0..70_000) & 0x1ffff;
                    let text: String = (0..bytes.min(200_000)).map(|_| char::from(rng.u8(b'a'..=b'z'))).collect();
                    let tokens = rng.usize(1..8);
                    let chunked = rng.bool();
                    let mut mock = json!({"text": text});
                    if !chunked {
                        mock["no_length"] = true.into();
                    }
                    if rng.bool() {
                        mock["gap_ms"] = 1.into();
                    }
                    let body = json!({"prompt":"p","stream":true,"max_tokens":tokens,"mock":mock});
                    http.most = 1 << rng.u32(8..17);
                    http.send(&post("/v1/completions", &body));
                    std::thread::sleep(Duration::from_millis(rng.u64(0..20)));
                    let answer = http.answer().expect(200);
                    let want = scrub(&Http::connect(rig.fleet.engine(0).addr()).post("/v1/completions", &body).body);
                    assert!(scrub(&answer.body) == want, "{} bytes instead of {}", answer.body.len(), want.len());
                    assert_eq!(answer.header("transfer-encoding").is_some(), chunked);
                    if !chunked {
                        assert_eq!(answer.header("connection"), Some("close"));
                        http = rig.http();
                    }
                }
            });
        }
    });
    rig.settles();
}

/// A long answer with a length passes whole, to a client that takes its time.
#[test]
fn a_long_answer_arrives_whole() {
    let rig = Rig::new(1);
    let body = json!({"padding":"y".repeat(3 << 20),"mock":{"echo_body":true}});
    let mut http = rig.http();
    let copy = http.stream.try_clone().unwrap();
    let bytes = post("/v1/completions", &body);
    let sender = std::thread::spawn(move || std::io::Write::write_all(&mut &copy, &bytes).unwrap());
    http.most = 9_999;
    let answer = http.answer().expect(200);
    sender.join().unwrap();
    assert_eq!(answer.end, End::Whole);
    assert!(answer.body == body.to_string().into_bytes());
}
