//! A bug that panics in the middle of a request ends that request's connection, and nothing else.

use corelane::config::{AccessLog, WorkerSpec};
use corelane::metrics::Tally;
use corelane::mock::Settings;
use serde_json::json;

use crate::access::Log;
use crate::rig::{End, Http, Rig, config, fleet, post, start, until};

/// One lane, whose clients would all share its end. The bug: a key that the configuration would refuse, because it would
/// forge header lines. What writes the head for the worker panics over it, where assertions are compiled in.
fn gateway_with_a_bug(log: &Log) -> Rig {
    let fleet = fleet(Settings::default(), 2);
    let of = |worker: usize, model: &str| {
        let mut spec = WorkerSpec::new(fleet.urls()[worker].clone());
        spec.models = vec![model.to_owned()];
        spec
    };
    let (good, mut bad) = (of(0, "good"), of(1, "bad"));
    bad.api_key = Some("key\r\nx-forged: 1".into());
    let mut config = config(vec![good, bad]);
    (config.health_check, config.max_concurrent_requests) = (false, 8);
    (config.access_log, config.access_log_path) = (AccessLog::All, log.path());
    Rig { gateway: start(config), fleet }
}

#[test]
fn a_panic_ends_its_connection_and_nothing_else() {
    const PANICS: u64 = 12;
    let log = Log::new("panics");
    let rig = gateway_with_a_bug(&log);
    let stream = json!({"model":"good","prompt":"x","stream":true,"max_tokens":30,"mock":{"gap_ms":20}});
    let mut streams: Vec<Http> = (0..4).map(|_| rig.http()).collect();
    for http in &mut streams {
        http.send(&post("/v1/completions", &stream));
        assert_eq!(http.head().unwrap().status, 200);
    }
    let mut idle = rig.http();
    idle.post("/v1/completions", &json!({"model":"good","prompt":"x"})).expect(200);

    // More often than there are permits, with bodies that take memory; the last bytes are of a request behind it.
    for n in 0..PANICS {
        let mut http = rig.http();
        let mut wire =
            post("/v1/completions", &json!({"model":"bad","prompt":"p".repeat(200_000),"stream":n % 2 == 0}));
        wire.extend(post("/v1/completions", &json!({"model":"good","prompt":"behind it"})));
        http.send(&wire);
        assert!(matches!(http.expect_closed(), End::Fin | End::Reset));
    }

    // Who was being served still is, who was connected can ask, and new ones come in: on the same lane.
    for http in &mut streams {
        let (mut text, mut trailers) = (String::new(), String::new());
        loop {
            let chunk = http.chunk(&mut trailers).expect("the stream goes on");
            if chunk.is_empty() {
                break;
            }
            text += &String::from_utf8_lossy(&chunk);
        }
        assert!(text.ends_with("data: [DONE]\n\n") && text.matches("data: {").count() >= 30, "{text}");
    }
    idle.post("/v1/completions", &json!({"model":"good","prompt":"x"})).expect(200);
    rig.post("/v1/completions", &json!({"model":"good","prompt":"x"})).expect(200);
    until("every panic is counted", || rig.tally(Tally::Panics) == PANICS);
    assert_eq!(rig.metric("corelane_panics_total"), Some(PANICS as f64));

    // They have their lines as others do.
    let lines = log.lines(streams.len() + 3 + PANICS as usize);
    let (ended, well): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line["model"] == "bad");
    assert!(well.iter().all(|line| line["end"] == "complete"), "{well:?}");
    assert_eq!(ended.len(), PANICS as usize);
    for line in ended {
        assert_eq!((&line["status"], &line["end"]), (&json!(0), &json!("internal_error")), "{line}");
        assert_eq!(line["worker"], json!(rig.fleet.urls()[1]), "{line}");
        assert!(line["bytes_in"].as_u64().unwrap() > 200_000 && line["bytes_out"] == 0, "{line}");
    }
    assert_eq!(rig.metric(r#"corelane_faults_total{code="internal_error"}"#), Some(PANICS as f64));

    // What the requests held is free: places, permits, memory, connections.
    rig.settles();
    assert_eq!(rig.stats(1).requests, 0, "the worker saw something of it");
    until("permits are back", || rig.metric("corelane_permits_in_use") == Some(0.0));
    assert_eq!(rig.gateway.shared().memory.claimed(), 0);
    drop((streams, idle));
    until("no connection is left", || rig.gateway.shared().handover.connections(0) == 0);
}
