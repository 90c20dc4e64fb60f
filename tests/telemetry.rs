//! The metrics as others read them: Python's Prometheus client, the rules of promtool's linter, and the dashboard.
//!
//! Takes a Python that has the package `prometheus_client` (`CORELANE_PYTHON`, else `target/sdk-venv`, else
//! `python3`). Where there is none that part is skipped, which the output says; with `CORELANE_REQUIRE_SDK=1` it is a
//! failure.

#[allow(dead_code, reason = "other test programs use the rest")]
mod rig;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use corelane::config::WorkerSpec;
use corelane::metrics::{Kind, Row, Tally, table};
use corelane::mock::Settings;
use serde_json::{Value, json};

use rig::{Http, Rig, until};

/// A Python that has the parser.
fn python() -> Option<PathBuf> {
    let asked = std::env::var_os("CORELANE_PYTHON").map(PathBuf::from);
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/sdk-venv/bin/python");
    let candidates = asked.map_or_else(|| vec![ours, "python3".into()], |asked| vec![asked]);
    candidates.into_iter().find(|python| {
        let mut command = Command::new(python);
        command.args(["-c", "import prometheus_client"]).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    })
}

/// What Python's parser says of a page: its last line, or its complaint.
fn parsed(python: &Path, page: &str) -> Result<String, String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sdk/openmetrics.py");
    let mut child = Command::new(python)
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    match output.status.success() {
        true => Ok(String::from_utf8(output.stdout).unwrap()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

#[test]
fn pythons_prometheus_client_reads_the_page() {
    let rig = Rig::with(Settings::default(), 2, |c| {
        c.cores = vec![0, 1];
        // A name that labels must escape.
        c.workers.push(WorkerSpec { models: vec!["a\"b\\c".into()], ..WorkerSpec::new("http://127.0.0.1:9") });
        c.health_check = false;
        c.max_concurrent_requests = 100;
    });
    let mut http = rig.http();
    for path in ["/v1/completions", "/v1/chat/completions"] {
        for stream in [false, true] {
            let body = json!({"model":"mock","prompt":"x".repeat(500),"messages":[{"role":"user","content":"hello"}],
                "stream":stream,"max_tokens":5,"mock":{"gap_ms":2}});
            http.post(path, &body).expect(200);
        }
    }
    http.post("/v1/completions", &json!({"model":"a\"b\\c","prompt":"x"})).expect(502);
    http.post("/v1/completions", &json!({"model":"nobody's","prompt":"x"})).expect(404);
    let page = || Http::connect(rig.gateway.admin()).ask("GET", "/metrics", &[], b"").expect(200).text();
    let lanes = r#"corelane_lane_cpu_seconds_total{lane="0"}"#;
    until("the lanes have published", || rig.metric(lanes).is_some_and(|cpu| cpu > 0.0));
    let text = page();
    for series in [
        r#"corelane_model_requests_total{model="mock",status="2xx"} 4"#,
        r#"corelane_model_requests_total{model="a\"b\\c",status="5xx"} 1"#,
        r#"corelane_model_requests_total{model="other",status="4xx"} 1"#,
        r#"corelane_first_byte_seconds_count{route="/v1/completions"} 2"#,
        r#"corelane_first_token_seconds_count{route="/v1/completions"} 1"#,
        r#"corelane_model_first_token_seconds_count{model="mock"} 2"#,
    ] {
        assert!(text.contains(&format!("{series}\n")), "{series}\n{text}");
    }
    let gaps = rig.metric(r#"corelane_model_event_gap_seconds_count{model="mock"}"#);
    assert!(gaps.is_some_and(|n| n >= 8.0), "{gaps:?} gaps of two streams of 5 events");
    let Some(python) = python() else {
        assert!(std::env::var_os("CORELANE_REQUIRE_SDK").is_none_or(|v| v != "1"), "no Python with prometheus_client");
        return println!(
            "skipped: no Python with prometheus_client (target/sdk-venv/bin/pip install prometheus-client)"
        );
    };
    let found = parsed(&python, &text).unwrap_or_else(|complaint| panic!("{complaint}\n{text}"));
    assert!(found.ends_with(&format!(" samples of {} families\n", table().len())), "{found}");
    println!("{found}");
    // It does complain.
    let broken = text.replacen("corelane_panics_total", "corelane_panics", 1);
    assert!(parsed(&python, &broken).is_err());
}

/// What promtool's linter would say of a row; empty for nothing.
fn lint(row: &Row) -> Vec<&'static str> {
    let mut said = Vec::new();
    let has = |part: &str| row.name.split('_').any(|p| p == part);
    let ends = |ends: &[&str]| ends.iter().any(|end| row.name.ends_with(end));
    let mut check = |bad: bool, what| said.extend(bad.then_some(what));
    check(row.help.is_empty(), "no help");
    check(
        ends(&["_total", "_bucket", "_count", "_sum", "_info"]) && row.name != "corelane_build_info",
        "a suffix that is added",
    );
    check(row.labels.contains(&"le") || row.labels.contains(&"quantile"), "a label that is reserved");
    check(row.name.bytes().any(|b| b.is_ascii_uppercase()), "camel case");
    check(
        ["ms", "us", "ns", "milliseconds", "microseconds", "kib", "mib", "kb", "mb", "percent", "minutes"]
            .iter()
            .any(|u| has(u)),
        "no base unit",
    );
    check(["counter", "gauge", "histogram", "summary"].iter().any(|kind| has(kind)), "a type in the name");
    let unit = |unit: &str| has(unit) && !row.name.ends_with(&format!("_{unit}"));
    check(unit("seconds") || unit("bytes") || unit("ratio"), "the unit is not last");
    let timed = matches!(row.kind, Kind::Histogram(corelane::metrics::Scale::Latency));
    check(timed && !row.name.ends_with("_seconds"), "a time without its unit");
    let mut labels = row.labels.to_vec();
    labels.dedup();
    check(labels.len() != row.labels.len(), "a label twice");
    said
}

#[test]
fn the_table_passes_the_linter() {
    for row in table() {
        assert_eq!(lint(&row), [""; 0], "{}", row.name);
    }
    let bad = |name: &'static str, kind| lint(&Row { name, kind, labels: &[], help: "Help." });
    assert_eq!(bad("corelane_x_total", Kind::Counter), ["a suffix that is added"]);
    assert_eq!(bad("corelane_wait_ms", Kind::Gauge), ["no base unit"]);
    assert_eq!(bad("corelane_seconds_waited", Kind::Gauge), ["the unit is not last"]);
    assert_eq!(bad("corelane_x", Kind::Histogram(corelane::metrics::Scale::Latency)), ["a time without its unit"]);
}

// ── the dashboard ───────────────────────────────────────────────────────────────────────────────────────────────

/// The row of a series' name, and whether it has buckets.
fn series(name: &str) -> Option<(Row<'static>, bool)> {
    table().into_iter().find_map(|row| {
        let suffix = name.strip_prefix(row.name)?;
        let fits = match row.kind {
            Kind::Counter => suffix == "_total",
            Kind::Gauge => suffix.is_empty(),
            Kind::Histogram(_) => matches!(suffix, "_bucket" | "_sum" | "_count"),
        };
        fits.then_some((row, suffix == "_bucket"))
    })
}

/// What is wrong with a query: names and labels that the table does not have. `legend` may use the labels that are
/// left.
fn mistakes(query: &str, legend: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for (at, _) in query.match_indices("corelane_") {
        let name: &str = query[at..].split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default();
        let Some((row, has_buckets)) = series(name) else {
            wrong.push(format!("no metric {name}"));
            continue;
        };
        let known = |label: &str| label == "instance" || row.labels.contains(&label) || label == "le" && has_buckets;
        let rest = &query[at + name.len()..];
        let chosen = rest.strip_prefix('{').and_then(|rest| rest.split_once('}')).map_or("", |(inside, _)| inside);
        for (label, value) in chosen.split(", ").filter_map(|part| part.split_once('=')) {
            let label = label.trim_end_matches('!');
            if !known(label) {
                wrong.push(format!("{name} has no label {label}"));
            }
            let value = value.trim_matches(['"', '~']);
            let values: BTreeSet<&str> = Tally::ALL
                .iter()
                .filter(|tally| tally.row().0 == row.name)
                .flat_map(|tally| tally.labels().filter(|(key, _)| *key == label).map(|(_, value)| value))
                .collect();
            if !values.is_empty() && !values.contains(value) {
                wrong.push(format!("{name} has no {label} {value}"));
            }
        }
        // The grouping that stands nearest before it.
        let grouped = query[..at].rfind(" by (").map_or("", |by| query[by + 5..].split(')').next().unwrap_or_default());
        for label in grouped.split(", ").filter(|label| !label.is_empty() && !known(label)) {
            wrong.push(format!("{name} has no label {label}"));
        }
        for label in legend.split("{{").skip(1).filter_map(|part| part.split("}}").next()) {
            if !grouped.split(", ").any(|kept| kept == label) {
                wrong.push(format!("the legend's {label} is not kept by the query"));
            }
        }
    }
    if !query.contains("corelane_") {
        wrong.push("no metric of ours".into());
    }
    if query.contains("histogram_quantile") && !query.contains("by (le") {
        wrong.push("a quantile needs le".into());
    }
    wrong
}

#[test]
fn the_dashboard_asks_for_what_there_is() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tuning/grafana/corelane.json");
    let board: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let panels = board["panels"].as_array().unwrap();
    let mut asked = BTreeSet::new();
    let mut places = BTreeSet::new();
    for panel in panels {
        assert!(places.insert(panel["id"].as_u64().unwrap()), "ids are unique");
        let title = panel["title"].as_str().unwrap();
        if panel["type"] == "row" {
            continue;
        }
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{title}");
        for target in targets {
            let query = target["expr"].as_str().unwrap();
            let wrong = mistakes(query, target["legendFormat"].as_str().unwrap());
            assert!(wrong.is_empty(), "{title}: {wrong:?} in {query}");
            asked.extend(table().into_iter().filter(|row| query.contains(row.name)).map(|row| row.name));
        }
    }
    for needed in [
        "corelane_requests",
        "corelane_faults",
        "corelane_first_token_seconds",
        "corelane_event_gap_seconds",
        "corelane_worker_inflight",
        "corelane_cache_decisions",
        "corelane_lane_cpu_seconds",
        "corelane_relay_bytes",
        "corelane_upstream_closed",
        "corelane_worker_breaker_state",
        "corelane_queue_length",
    ] {
        assert!(asked.contains(needed), "{needed}");
    }
    for list in board["templating"]["list"].as_array().unwrap() {
        let query = list["query"]["query"].as_str().unwrap_or("");
        assert!(query.is_empty() || mistakes(query, "").is_empty(), "{query}");
    }
    for (query, legend, wrong) in [
        ("rate(corelane_request_total[1m])", "", "no metric corelane_request_total"),
        ("corelane_requests", "", "no metric corelane_requests"),
        ("corelane_first_byte_seconds", "", "no metric corelane_first_byte_seconds"),
        (r#"corelane_requests_total{path="x"}"#, "", "corelane_requests_total has no label path"),
        (r#"corelane_cache_decisions_total{reason="hits"}"#, "", "corelane_cache_decisions_total has no reason hits"),
        ("sum by (le) (corelane_first_byte_seconds_sum)", "", "corelane_first_byte_seconds_sum has no label le"),
        ("sum by (route) (corelane_requests_total)", "{{status}}", "the legend's status is not kept by the query"),
        ("up", "", "no metric of ours"),
    ] {
        assert_eq!(mistakes(query, legend), [wrong], "{query}");
    }
}
