//! What the workers of a pair are sent, and what the client gets of their answers.

use std::collections::HashSet;

use corelane::config::Backend;
use corelane::mock::{Controls, Settings};
use serde_json::{Value, json};

use crate::Pairs;
use crate::rig::{request, until};

/// The last body that an engine got.
fn body_of(engine: &corelane::mock::Engine) -> String {
    let last = engine.stats().last.expect("it got a request");
    String::from_utf8(last.body).expect("UTF-8")
}

fn json_of(engine: &corelane::mock::Engine) -> Value {
    serde_json::from_str(&body_of(engine)).expect("JSON")
}

/// Whitespace, order, escapes, duplicates, numbers that no float holds: all as the client wrote it, around what comes
/// in last.
#[test]
fn bytes_outside_of_the_inserted_members_are_the_clients() {
    let pairs = Pairs::new(1, 1);
    let odd = " { \"prompt\" :\"h\\u00e9 \\/\" ,\"x\":1.000000000000000000001e5,\"x\":[ ], \"model\":\"mock\"\r\n,\
               \"max_tokens\":1 }\n ";
    let answer = pairs.http().send(&request("POST", "/v1/completions", &[], odd.as_bytes())).answer();
    answer.expect(200);
    let host_port = "\"bootstrap_host\":\"127.0.0.1\",\"bootstrap_port\":null,\"bootstrap_room\":";
    let (head, tail) = odd.split_at(odd.rfind('}').unwrap());
    let mut rooms = HashSet::new();
    for engine in pairs.engines() {
        let body = body_of(engine);
        let rest = body.strip_prefix(head).unwrap_or_else(|| panic!("{body}"));
        let rest = rest.trim_start_matches(',').strip_prefix(host_port).unwrap_or_else(|| panic!("{body}"));
        let room = rest.strip_suffix(tail).unwrap_or_else(|| panic!("{body}"));
        rooms.insert(room.parse::<u64>().expect("a scalar room"));
    }
    assert_eq!(rooms.len(), 1, "both meet in one room");
    let room = rooms.into_iter().next().unwrap();
    assert!((1..1 << 63).contains(&room));
}

/// A body too large for one send goes out from where it lies, the members behind it.
#[test]
fn large_bodies_are_patched_too() {
    let pairs = Pairs::new(1, 1);
    let prompt = "long ".repeat(300_000);
    let sent = json!({"model": "mock", "prompt": prompt, "max_tokens": 2});
    for private in [false, true] {
        let mut sent = sent.clone();
        if private {
            sent["bootstrap_room"] = json!(7);
            sent["kv_hints"] = json!({"a": [1]});
        }
        pairs.http().post("/v1/completions", &sent).expect(200);
        for engine in pairs.engines() {
            let got = json_of(engine);
            assert_eq!((&got["prompt"], &got["max_tokens"]), (&sent["prompt"], &sent["max_tokens"]));
            assert_ne!(got["bootstrap_room"], json!(7));
            assert!(got["bootstrap_room"].is_u64() && got.get("kv_hints").is_none());
        }
    }
    pairs.settles();
}

/// What only workers may tell each other is never taken from a client, by whatever spelling (a duplicate room ends both
/// schedulers of the engines).
#[test]
fn members_of_the_clients_that_are_the_workers_are_cut() {
    let pairs = Pairs::new(1, 1);
    let body = br#"{"bootstrap\u005froom":5,"model":"mock","bootstrap_host":"evil","prompt":"x","routed_dp_rank":3,"kv_transfer_params":{},"max_tokens":1}"#;
    let fields = [("X-Data-Parallel-Rank", "3"), ("X-Override-Rank", "1")];
    pairs.http().send(&request("POST", "/v1/completions", &fields, body)).answer().expect(200);
    for engine in pairs.engines() {
        let got = json_of(engine);
        assert_eq!(got["bootstrap_host"], json!("127.0.0.1"));
        assert_ne!(got["bootstrap_room"], json!(5));
        assert!(got.get("routed_dp_rank").is_none() && got.get("kv_transfer_params").is_none(), "{got}");
        let last = engine.stats().last.unwrap();
        assert!(last.header("x-data-parallel-rank").is_empty() && last.header("x-override-rank").is_empty());
    }
}

#[test]
fn batches_get_arrays_and_single_prompts_do_not() {
    let pairs = Pairs::new(1, 1);
    let cases = [
        ("/generate", json!({"text": "one", "sampling_params": {"max_new_tokens": 1}}), None),
        ("/generate", json!({"text": ["a", "b", "c"], "sampling_params": {"max_new_tokens": 1}}), Some(3)),
        ("/generate", json!({"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 1}}), Some(2)),
        ("/v1/completions", json!({"model": "mock", "prompt": ["only"], "max_tokens": 1}), Some(1)),
        ("/v1/completions", json!({"model": "mock", "prompt": [1, 2, 3], "max_tokens": 1}), None),
        ("/v1/chat/completions", json!({"model": "mock", "messages": [{"role":"user","content":"x"}]}), None),
    ];
    for (path, body, batch) in cases {
        pairs.http().post(path, &body).expect(200);
        let [first, second] = [&pairs.prefill, &pairs.decode].map(|fleet| json_of(fleet.engine(0)));
        assert_eq!(first["bootstrap_room"], second["bootstrap_room"], "{path} {body}");
        match batch {
            None => assert!(first["bootstrap_room"].is_u64() && first["bootstrap_host"].is_string(), "{first}"),
            Some(n) => {
                for member in ["bootstrap_room", "bootstrap_host", "bootstrap_port"] {
                    assert_eq!(first[member].as_array().map(Vec::len), Some(n), "{member} of {first}");
                }
                let rooms: HashSet<u64> =
                    first["bootstrap_room"].as_array().unwrap().iter().map(|room| room.as_u64().unwrap()).collect();
                assert_eq!(rooms.len(), n);
            }
        }
    }
    for engine in pairs.engines() {
        let stats = engine.stats();
        assert_eq!((stats.duplicate_rooms, stats.bad_bootstrap, stats.roomless), (0, 0, 0));
    }
}

/// Several samples would share a room and hang in the engine.
#[test]
fn several_samples_are_refused_and_nobody_is_charged() {
    let pairs = Pairs::new(1, 1);
    let asks = [
        ("/v1/completions", json!({"model": "mock", "prompt": "x", "n": 2})),
        ("/generate", json!({"text": "x", "sampling_params": {"n": 2}})),
    ];
    for (path, body) in asks {
        pairs.http().post(path, &body).expect_error(400, "samples_not_supported");
    }
    assert_eq!(pairs.engines().map(|engine| engine.stats().requests).sum::<u64>(), 0);
    pairs.settles();
}

/// Requests that generate nothing need no pair.
#[test]
fn what_generates_nothing_goes_to_one_worker() {
    let pairs = Pairs::new(1, 1);
    pairs.http().post("/v1/tokenize", &json!({"model": "mock", "prompt": "x"})).expect(200);
    pairs.http().post("/v1/embeddings", &json!({"model": "mock", "input": "x"})).expect(200);
    let paths = pairs.prefill.engine(0).stats().paths;
    assert!(paths.contains_key("/v1/tokenize") && paths.contains_key("/v1/embeddings"), "{paths:?}");
    pairs.settles();
}

fn logprobs(answer: &Value) -> usize {
    answer["meta_info"]["input_token_logprobs"].as_array().map_or(0, Vec::len)
}

/// The client gets the prompt's log probabilities, which only the prefill worker knows.
#[test]
fn log_probabilities_of_the_prompt_come_from_the_prefill() {
    let pairs = Pairs::new(1, 1);
    let mut ask = json!({"text": "some text", "return_logprob": true, "sampling_params": {"max_new_tokens": 3}});
    let one = pairs.http().post("/generate", &ask).expect(200);
    assert!(logprobs(&one.json()) > 0, "{}", one.text());
    ask["stream"] = json!(true);
    let stream = pairs.http().post("/generate", &ask).expect(200).text();
    let events: Vec<&str> = stream.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    assert_eq!(events.last(), Some(&"[DONE]"), "{stream}");
    for event in &events[..events.len() - 1] {
        assert!(logprobs(&serde_json::from_str(event).unwrap()) > 0, "{event}");
    }
    ask["stream"] = json!(false);
    ask["text"] = json!(["a text", "another one"]);
    let batch = pairs.http().post("/generate", &ask).expect(200).json();
    let batch = batch.as_array().expect("a batch");
    assert!(batch.len() == 2 && batch.iter().all(|one| logprobs(one) > 0), "{batch:?}");
    ask["return_logprob"] = json!(false);
    let plain = pairs.http().post("/generate", &ask).expect(200).text();
    assert!(!plain.contains("input_token_logprobs\":[["), "{plain}");
    pairs.settles();
}

/// A prefill that has a megabyte to say says it in every event, however many come at once; all of it is counted.
#[test]
fn large_log_probabilities_are_put_into_every_event() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("merged-{}.log", std::process::id()));
    let pairs = Pairs::with(Settings::default(), 1, 1, |c| {
        c.access_log = corelane::config::AccessLog::All;
        c.access_log_path = path.to_str().expect("UTF-8").to_owned();
    });
    let sampling = json!({"max_new_tokens": 12});
    let text = "t".repeat(250_000);
    let ask = json!({"text": text, "return_logprob": true, "stream": true, "sampling_params": sampling});
    let whole = pairs.http().post("/generate", &ask).expect(200).text();
    let events: Vec<&str> = whole.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    assert_eq!((events.len(), events.last()), (14, Some(&"[DONE]")));
    for event in &events[..13] {
        assert!(logprobs(&serde_json::from_str(event).unwrap()) > 62_000, "{}", &event[..200]);
    }
    pairs.settles();
    let log = || std::fs::read_to_string(&path).unwrap_or_default();
    until("its line is written", || log().ends_with('\n'));
    let line: Value = serde_json::from_str(&log()).expect("one line");
    assert!(line["bytes_out"].as_u64().is_some_and(|sent| sent > whole.len() as u64), "{line} of {}", whole.len());
    let _ = std::fs::remove_file(&path);
}

/// What is read whole of workers' answers counts like what is read of clients.
#[test]
fn answers_that_are_read_whole_have_a_bound_together() {
    // A million bytes of prompt are a quarter of a million tokens, of each of which the prefill has something to say.
    let ask = json!({"text": "t".repeat(1 << 20), "return_logprob": true, "sampling_params": {"max_new_tokens": 1}});
    for (memory, status) in [(2 << 20, 503), (64 << 20, 200)] {
        let pairs = Pairs::with(Settings::default(), 1, 1, |c| c.body_memory_bytes = memory);
        let answer = pairs.http().post("/generate", &ask).expect(status);
        assert_eq!(answer.header("x-corelane-error"), (status == 503).then_some("out_of_buffers"));
        pairs.settles();
        until("all of it is given back", || pairs.gateway.shared().memory.claimed() == 0);
        let vitals = &pairs.gateway.shared().vitals;
        assert!((0..2).all(|slot| vitals.vital(slot).failures() == 0), "the workers are blamed");
    }
}

/// Answers into which nothing can be put pass as they are, and one without a body gets none.
#[test]
fn odd_answers_are_no_place_for_log_probabilities() {
    let pairs = Pairs::new(1, 1);
    let [prefill, decode] = [pairs.prefill.engine(0), pairs.decode.engine(0)];
    let says = |engine: &corelane::mock::Engine, raw: String| {
        engine.misbehave(Some(Controls { raw: Some(raw), ..Controls::default() }));
    };
    let prompt = r#"{"meta_info":{"input_token_logprobs":[[-1,5,null]]}}"#;
    for stream in [false, true] {
        let ask = json!({"text": "some text", "return_logprob": true, "stream": stream});
        let mut http = pairs.http();
        let body = if stream { format!("data: {prompt}\n\n") } else { prompt.into() };
        says(prefill, format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()));
        says(decode, "HTTP/1.1 204 No Content\r\n\r\n".into());
        let answer = http.post("/generate", &ask).expect(204);
        assert!(answer.headers("transfer-encoding").is_empty() && answer.headers("content-length").is_empty());
        says(decode, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".into());
        http.post("/generate", &ask).expect_error(502, "decode_worker_bad_answer");
        pairs.engines().for_each(|engine| engine.misbehave(None));
        http.post("/generate", &ask).expect(200);
        pairs.settles();
    }
}

fn vllm(backend: Backend) -> Pairs {
    crate::of_backend(backend, |_| {})
}

fn clean(pairs: &Pairs) {
    for engine in pairs.engines() {
        let stats = engine.stats();
        assert_eq!((stats.unsanitised, stats.bad_transfer, stats.bad_request_id), (0, 0, 0), "{stats:?}");
        assert_eq!(stats.staged, 0);
    }
}

/// The prefill is a request for one token, whatever the client asked for; the decode gets what the client sent and
/// what the prefill's answer says, byte for byte (field report 22).
#[test]
fn nixl_goes_one_leg_after_the_other() {
    let pairs = vllm(Backend::VllmNixl);
    for stream in [false, true] {
        let ask = json!({"model": "mock", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "n": 1,
                         "stream": stream, "stream_options": {"include_usage": true}, "min_tokens": 2});
        let ask = if stream {
            ask
        } else {
            json!({"stream_options": null, "model": "mock", "max_tokens": 5,
                         "messages": [{"role": "user", "content": "Hello"}]})
        };
        pairs.http().post("/v1/chat/completions", &ask).expect(200);
        let first = json_of(pairs.prefill.engine(0));
        assert_eq!((&first["stream"], &first["max_tokens"]), (&json!(false), &json!(1)), "{first}");
        assert!(first.get("stream_options").is_none() && first.get("min_tokens").is_none());
        let second = json_of(pairs.decode.engine(0));
        assert_eq!((&second["max_tokens"], &second["messages"]), (&ask["max_tokens"], &ask["messages"]));
        assert_eq!(second["kv_transfer_params"]["do_remote_prefill"], json!(true), "{second}");
    }
    clean(&pairs);
    pairs.settles();
}

#[test]
fn mooncake_goes_side_by_side() {
    let pairs = vllm(Backend::VllmMooncake);
    for stream in [false, true] {
        let ask = json!({"model": "mock", "prompt": "Hello", "max_tokens": 5, "stream": stream});
        pairs.http().post("/v1/completions", &ask).expect(200);
        let [first, second] = [&pairs.prefill, &pairs.decode].map(|fleet| json_of(fleet.engine(0)));
        let id = |leg: &Value| leg["kv_transfer_params"]["transfer_id"].as_str().unwrap().to_owned();
        assert_eq!(id(&first), id(&second));
        assert!(id(&first).starts_with("xfer-"));
    }
    clean(&pairs);
    pairs.settles();
}

/// What was prefilled lies in the engine until the decode worker fetches it, whether or not anybody waits for it.
#[test]
fn a_client_that_leaves_during_a_nixl_prefill_leaves_nothing_staged() {
    let pairs = vllm(Backend::VllmNixl);
    let slow = Controls { delay_ms: 300.0, ..Controls::default() };
    pairs.prefill.engine(0).misbehave(Some(slow));
    let mut http = pairs.http();
    let ask = json!({"model": "mock", "prompt": "Hello", "max_tokens": 1000, "stream": true});
    http.send(&crate::rig::post("/v1/completions", &ask));
    crate::rig::until("the prefill has it", || pairs.prefill.engine(0).stats().active == 1);
    drop(http);
    crate::rig::until("the decode worker is asked all the same", || pairs.decode.engine(0).stats().requests == 1);
    pairs.settles();
    clean(&pairs);
}

/// Ranks of a data-parallel engine are workers of their own.
#[test]
fn each_rank_of_a_data_parallel_engine_is_charged() {
    let settings = Settings { dp_size: 4, ..Settings::default() };
    let (prefill, decode) = crate::engines(&settings, 1, 1);
    let mut config = crate::rig::config(crate::specs(&prefill, &decode));
    config.dp_aware = true;
    let gateway = corelane::boot::Gateway::start(config).expect("the gateway starts");
    crate::rig::until("all ranks are usable", || gateway.shared().readiness.snapshot().usable == 8);
    let pairs = Pairs { gateway, prefill, decode };
    for n in 0..16 {
        let ask = json!({"model": "mock", "prompt": format!("prompt {n}"), "max_tokens": 1});
        pairs.http().post("/v1/completions", &ask).expect(200);
    }
    for engine in pairs.engines() {
        let stats = engine.stats();
        assert_eq!(stats.bad_rank, 0, "{stats:?}");
        assert_eq!(stats.ranks.values().copied().collect::<Vec<_>>(), [4, 4, 4, 4], "{:?}", stats.ranks);
    }
    pairs.settles();
}

/// vLLM's engines are told their ranks by a header, on both legs: with Mooncake each rank has an id of its own, which the
/// decode worker must be told of the rank that the prefill really has.
#[test]
fn ranks_of_vllm_engines_are_told_by_the_header() {
    for backend in [Backend::VllmNixl, Backend::VllmMooncake] {
        let connector = match backend {
            Backend::VllmMooncake => corelane::mock::Connector::Mooncake,
            _ => corelane::mock::Connector::Nixl,
        };
        let bootstrap = backend == Backend::VllmMooncake;
        let settings = Settings { vllm: true, connector, bootstrap, dp_size: 2, ..Settings::default() };
        let (prefill, decode) = crate::engines(&settings, 1, 1);
        let mut specs = crate::specs(&prefill, &decode);
        for spec in &mut specs {
            (spec.backend, spec.dp_size) = (backend, Some(2));
        }
        specs[0].bootstrap_port = prefill.engine(0).bootstrap_port();
        let gateway = corelane::boot::Gateway::start(crate::rig::config(specs)).expect("the gateway starts");
        crate::rig::until("all ranks are usable", || gateway.shared().readiness.snapshot().usable == 4);
        let pairs = Pairs { gateway, prefill, decode };
        for n in 0..8 {
            let ask = json!({"model": "mock", "prompt": format!("prompt {n}"), "max_tokens": 2});
            pairs.http().post("/v1/completions", &ask).expect(200);
        }
        clean(&pairs);
        for engine in pairs.engines() {
            let ranks = engine.stats().ranks;
            assert_eq!(ranks.values().copied().collect::<Vec<_>>(), [4, 4], "{backend:?}: {ranks:?}");
        }
        pairs.settles();
    }
}
