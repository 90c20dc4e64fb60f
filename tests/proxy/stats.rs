//! What the admin listener's page and its figures are: counts against what was sent, and the headers around them.

use corelane::config::Policy;
use corelane::control::stats::{Stats, WorkerStats};
use corelane::mock::Settings;
use serde_json::json;

use crate::rig::{Answer, Http, Rig, post, until};

fn admin(rig: &Rig, path: &str) -> Answer {
    Http::connect(rig.gateway.admin()).ask("GET", path, &[], b"").expect(200)
}

fn stats(rig: &Rig) -> Stats {
    serde_json::from_slice(&admin(rig, "/stats").body).expect("the figures are as their types say")
}

fn sum(buckets: &[u64]) -> u64 {
    buckets.iter().sum()
}

#[test]
fn the_figures_are_what_happened() {
    let rig = Rig::with(Settings::default(), 2, |c| {
        (c.cores, c.policy, c.max_concurrent_requests) = (vec![0, 1], Policy::CacheAware, 50);
    });
    let before = stats(&rig);
    assert_eq!((before.lanes.len(), before.workers.len()), (2, 2));
    assert!(before.ready && !before.draining && before.statuses.is_empty() && before.faults.is_empty());
    assert_eq!((before.version.as_str(), before.queue.permits), (env!("CARGO_PKG_VERSION"), 50));
    assert_eq!(before.prefix.budget, rig.gateway.shared().prefix.budget());

    let mut http = rig.http();
    let prompt = "a prompt that is longer than a few blocks ".repeat(20);
    for _ in 0..6 {
        http.post("/v1/completions", &json!({"model":"mock","prompt":prompt,"max_tokens":2})).expect(200);
    }
    for _ in 0..3 {
        let stream = json!({"model":"mock","prompt":"short","max_tokens":2,"stream":true});
        http.post("/v1/completions", &stream).expect(200);
    }
    http.post("/v1/completions", &json!({"model":"nobody's","prompt":"x"})).expect(404);
    rig.settles();

    let now = stats(&rig);
    println!("{now:?}");
    assert!(now.up_ms > before.up_ms);
    assert_eq!(now.statuses, [("200".to_owned(), 9), ("404".to_owned(), 1)].into());
    assert_eq!(now.faults, [("model_not_found".to_owned(), 1)].into());
    let of_worker = |of: fn(&WorkerStats) -> u64| now.workers.iter().map(of).sum::<u64>();
    assert_eq!(of_worker(|w| w.selected), 9);
    assert_eq!((now.answer_classes[0].as_str(), of_worker(|w| w.answers[0])), ("2xx", 9));
    assert_eq!((of_worker(|w| sum(&w.answers)), of_worker(|w| w.failures), of_worker(|w| w.in_flight)), (9, 0, 0));
    for (worker, url) in now.workers.iter().zip(rig.fleet.urls()) {
        assert_eq!((&worker.url, worker.usable), (&url, true));
        assert_eq!([&worker.role, &worker.state, &worker.breaker], ["regular", "ready", "closed"]);
    }
    // The first long prompt is a miss, the others find it; three are shorter than a block.
    let decisions: Vec<(&str, u64)> = now.decisions.iter().map(|(reason, n)| (reason.as_str(), *n)).collect();
    assert_eq!(decisions, [("hit", 5), ("imbalanced", 0), ("miss", 1), ("short", 3), ("spill", 0)]);
    let latency = &now.latency;
    for histogram in [&latency.total, &latency.first_byte, &latency.first_token, &latency.event_gap, &latency.queue] {
        assert_eq!(histogram.len(), latency.bounds_us.len() + 1);
    }
    assert_eq!([&latency.total, &latency.first_byte, &latency.first_token].map(|h| sum(h)), [9, 9, 3]);
    assert_eq!(now.lanes.iter().map(|lane| lane.requests).sum::<u64>(), 10);
    assert_eq!(now.lanes.iter().map(|lane| lane.connections).sum::<u64>(), 1);
    assert_eq!(now.traffic.connects + now.traffic.reuses, 9);
    assert!(now.traffic.copied > 0 && now.traffic.bytes_out > now.traffic.copied && now.traffic.bytes_in > 6 * 800);
    assert!(now.prefix.nodes > 0 && now.prefix.bytes > 0);
    until("the lanes have published", || stats(&rig).lanes.iter().all(|lane| lane.cpu_us > 0 && lane.tasks > 0));
}

/// No limit is shown as none, at the start and after a limit.
#[test]
fn no_limit_is_shown_as_none() {
    let rig = Rig::new(1);
    for (permits, shown) in [(0, 0), (7, 7), (0, 0)] {
        rig.gateway.shared().limit_requests(permits, 0);
        assert_eq!(stats(&rig).queue.permits, shown);
    }
}

#[test]
fn what_is_held_now_is_shown() {
    let rig = Rig::with(Settings::default(), 1, |c| (c.max_concurrent_requests, c.queue_size) = (1, 8));
    rig.fleet.engine(0).freeze();
    let mut held = rig.http();
    held.send(&post("/generate", &json!({"text":"x"})));
    until("the engine has it", || rig.received() == 1);
    let mut second = rig.http();
    second.send(&post("/generate", &json!({"text":"y"})));
    until("one is held, one waits", || {
        let now = stats(&rig);
        (now.queue.in_use, now.queue.waiting, now.workers[0].in_flight) == (1, 1, 1)
    });
    rig.fleet.engine(0).thaw();
    held.answer().expect(200);
    second.answer().expect(200);
    until("both are out", || stats(&rig).queue.in_use == 0);
    assert_eq!(sum(&stats(&rig).latency.queue), 1);
}

/// What stands between a page that shows what others named, and what they would like it to do.
#[test]
fn the_page_may_load_nothing_and_run_nothing_else() {
    let rig = Rig::new(1);
    let page = admin(&rig, "/");
    assert_eq!(page.header("content-type"), Some("text/html; charset=utf-8"));
    for (name, value) in [
        ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
    ] {
        assert_eq!(page.header(name), Some(value), "{name}");
    }
    let policy = page.header("content-security-policy").expect("a policy").to_owned();
    let nonce = policy.split("'nonce-").nth(1).and_then(|rest| rest.split('\'').next()).expect("a nonce").to_owned();
    assert_eq!(nonce.len(), 32);
    let wanted = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    assert_eq!(policy, wanted);
    let text = page.text();
    assert_eq!(text.matches(&format!("nonce=\"{nonce}\"")).count(), 2, "style and script");
    assert_eq!((text.matches("<script").count(), text.matches("<style").count()), (1, 1));
    for foreign in ["http:", "https:", "src=", "innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("] {
        assert!(!text.contains(foreign), "{foreign}");
    }
    let again = admin(&rig, "/");
    assert!(!again.header("content-security-policy").unwrap().contains(&nonce), "a nonce is used once");
    assert!(!again.text().contains(&nonce));

    let figures = admin(&rig, "/stats");
    assert_eq!(figures.header("cache-control"), Some("no-store"));
    assert_eq!(figures.header("content-type"), Some("application/json"));
    Http::connect(rig.gateway.admin()).ask("POST", "/stats", &[], b"").expect(405);
}
