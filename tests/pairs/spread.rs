//! How requests spread over pairs: the fault that this gateway grew from, and what a mid-decode metric says.

use std::time::Duration;

use corelane::config::{Config, Policy};
use corelane::mock::{Controls, Settings};
use serde_json::json;

use crate::Pairs;
use crate::rig::{in_flight, post, until};

/// Long prompts, one-token answers, decode far faster than prefill: load that was counted when the answer began would
/// send all of them to the first prefill worker (field report 1).
fn seed(concurrent: usize, policy: Policy) {
    const WORKERS: usize = 8;
    let settings = Settings { prefill_tokens_per_sec: 4e7, threads: 2, ..Settings::default() };
    let pairs = Pairs::with(settings, WORKERS, WORKERS, |config: &mut Config| {
        config.cores = vec![0, 1];
        config.policy = policy;
    });
    // No answer comes before all are chosen: what was counted at answers would stand at 0 for all of them.
    pairs.engines().for_each(|engine| engine.freeze());
    // 32k tokens of four bytes; different from the first one on.
    let bodies = (0..concurrent).map(|n| {
        let text = format!("{n:08} {}", "word".repeat(32 * 1024 - 3));
        post("/v1/completions", &json!({"model": "mock", "prompt": text, "max_tokens": 1}))
    });
    let mut clients: Vec<_> = bodies.map(|body| (pairs.http(), body)).collect();
    std::thread::scope(|scope| {
        for (http, body) in &mut clients {
            scope.spawn(|| http.send(body).answer().expect(200));
        }
        until("all are chosen", || in_flight(&pairs.gateway) as usize == 2 * concurrent);
        pairs.engines().for_each(|engine| engine.thaw());
    });
    for fleet in [&pairs.prefill, &pairs.decode] {
        let counts: Vec<u64> = fleet.engines().iter().map(|engine| engine.stats().requests).collect();
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(most - least <= 1, "{policy:?}, {concurrent} at once: {counts:?}");
        assert_eq!(counts.iter().sum::<u64>(), concurrent as u64);
    }
    pairs.settles();
}

#[test]
fn sixty_four_at_once_spread_evenly() {
    seed(64, Policy::CacheAware);
}

#[test]
fn two_hundred_and_fifty_six_at_once_spread_evenly() {
    seed(256, Policy::CacheAware);
}

#[test]
fn least_load_spreads_evenly_too() {
    seed(64, Policy::LeastLoad);
}

/// A prefill that is over is not charged any more, however long the decode goes on (field report 21).
#[test]
fn in_mid_decode_only_the_decode_worker_is_charged() {
    let pairs = Pairs::new(1, 1);
    let slow = Controls { gap_ms: Some(20.0), ..Controls::default() };
    pairs.decode.engine(0).misbehave(Some(slow));
    let mut http = pairs.http();
    http.send(&post("/v1/completions", &json!({"model":"mock","prompt":"x","max_tokens":10_000,"stream":true})));
    assert_eq!(http.head().expect("a stream begins").status, 200);
    assert!(!http.chunk(&mut String::new()).expect("with tokens").is_empty());
    let label = |role: &str, url: &str| format!("corelane_worker_inflight{{worker=\"{url}\",role=\"{role}\"}}");
    let prefill = label("prefill", &pairs.prefill.urls()[0]);
    let decode = label("decode", &pairs.decode.urls()[0]);
    until("the prefill is over", || pairs.metric(&prefill) == Some(0.0));
    for _ in 0..3 {
        assert_eq!((pairs.metric(&prefill), pairs.metric(&decode)), (Some(0.0), Some(1.0)));
        assert!(!http.chunk(&mut String::new()).expect("tokens go on").is_empty());
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(http);
    pairs.settles();
    assert_eq!(in_flight(&pairs.gateway), 0);
    assert_eq!((pairs.metric(&prefill), pairs.metric(&decode)), (Some(0.0), Some(0.0)));
}

#[test]
fn the_access_log_names_both_workers_of_a_pair() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("pairs-{}.log", std::process::id()));
    let pairs = Pairs::with(Settings::default(), 1, 1, |c| {
        c.access_log = corelane::config::AccessLog::All;
        c.access_log_path = path.to_str().expect("UTF-8").to_owned();
    });
    let body = json!({"model":"mock","prompt":"a long prompt ".repeat(40),"max_tokens":3,"stream":true});
    pairs.http().post("/v1/completions", &body).expect(200);
    let text = || std::fs::read_to_string(&path).unwrap_or_default();
    until("its line is written", || text().ends_with('\n'));
    let line: serde_json::Value = serde_json::from_str(&text()).expect("one line");
    assert_eq!((&line["prefill"], &line["decode"]), (&json!(pairs.prefill.urls()[0]), &json!(pairs.decode.urls()[0])));
    assert_eq!((&line["worker"], &line["decision"]), (&json!(null), &json!("miss")), "the prefill worker's decision");
    assert_eq!((&line["status"], &line["end"], &line["attempts"]), (&json!(200), &json!("complete"), &json!(1)));
    assert_eq!(pairs.metric(r#"corelane_model_first_token_seconds_count{model="mock"}"#), Some(1.0));
    let _ = std::fs::remove_file(&path);
}
