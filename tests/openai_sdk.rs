//! Clients that people have: the OpenAI Python SDK, curl and wrk, against a gateway and a mock worker as processes.
//!
//! Takes a Python that has the package `openai` (`CORELANE_PYTHON`, else `target/sdk-venv`, else `python3`). What is
//! not there is skipped, which the output says; with `CORELANE_REQUIRE_SDK=1` it is a failure.

mod children;

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use children::{Process, gateway, worker};

/// Says why there is no test, or fails where that is asked for.
fn skip(why: &str) {
    assert!(std::env::var_os("CORELANE_REQUIRE_SDK").is_none_or(|v| v != "1"), "{why}");
    println!("skipped: {why}");
}

fn runs(program: &Path, args: &[&str]) -> bool {
    let quiet = |c: &mut Command| c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet(Command::new(program).args(args)).is_ok_and(|s| s.success())
}

/// A Python that has the SDK.
fn python() -> Option<PathBuf> {
    let asked = std::env::var_os("CORELANE_PYTHON").map(PathBuf::from);
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/sdk-venv/bin/python");
    let candidates = asked.map_or_else(|| vec![ours, "python3".into()], |asked| vec![asked]);
    candidates.into_iter().find(|p| runs(p, &["-c", "import openai"]))
}

/// A worker, its URL, a gateway before it, and that one's address.
fn pair() -> (Process, String, Process, SocketAddr) {
    let (engine, url) = worker(0, &[]);
    let (proxy, address) = gateway(&[&url], &[]);
    (engine, url, proxy, address)
}

#[test]
fn the_openai_sdk_sees_an_engine() {
    let Some(python) = python() else {
        return skip(
            "no Python with the package openai: python3 -m venv target/sdk-venv && target/sdk-venv/bin/pip install openai",
        );
    };
    let (_engine, url) = worker(0, &[]);
    // What the client makes of an engine's refusals is looked at, not what the gateway does.
    let (mut proxy, address) = gateway(&[&url], &["--retry-statuses", "none"]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sdk/openai_sdk.py");
    let mut command = Command::new(python);
    command.arg(script).arg(format!("http://{address}")).arg(&url).stdin(Stdio::null());
    for proxy in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "OPENAI_BASE_URL"] {
        command.env_remove(proxy);
    }
    let output = command.output().unwrap();
    let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.ends_with("all hold\n"), "{said}\n{complained}\n{}", proxy.log());
    proxy.signal(rustix::process::Signal::TERM);
    assert_eq!(proxy.end().code(), Some(0));
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn curl_is_served() {
    let curl = Path::new("curl");
    if !runs(curl, &["--version"]) {
        return skip("curl is not installed");
    }
    let (_engine, _, _proxy, address) = pair();
    let url = |path: &str| format!("http://{address}{path}");
    let ask = |args: &[&str], path: &str| {
        let fixed = ["--silent", "--show-error", "--noproxy", "*", "--max-time", "30"];
        text(&Command::new(curl).args(fixed).args(args).arg(url(path)).stdin(Stdio::null()).output().unwrap())
    };
    let chat = "/v1/chat/completions";
    let body = r#"{"model":"mock","max_tokens":3,"messages":[{"role":"user","content":"hi"}]}"#;
    let json = ["--json", body];
    let whole: serde_json::Value = serde_json::from_str(&ask(&json, chat)).unwrap();
    assert_eq!(whole["usage"]["completion_tokens"], 3);
    let stream = body.replacen('{', r#"{"stream":true,"#, 1);
    let seen = ask(&["--no-buffer", "--json", &stream], chat);
    assert!(seen.starts_with("data: ") && seen.ends_with("data: [DONE]\n\n"), "{seen}");
    // Chunked uploads, the old version, HEAD, Expect, two requests on one connection.
    let status = ["--output", "/dev/null", "--write-out", "%{http_code} %{num_connects}\n"];
    let with = |more: &[&'static str]| [&status[..], &json[..], more].concat();
    assert_eq!(ask(&with(&["--header", "transfer-encoding: chunked"]), chat), "200 1\n");
    assert_eq!(ask(&with(&["--http1.0"]), chat), "200 1\n");
    assert_eq!(ask(&with(&["--header", "expect: 100-continue"]), chat), "200 1\n");
    assert!(ask(&["--head"], "/health").starts_with("HTTP/1.1 200"));
    assert_eq!(
        ask(&[&status[..], &["--output", "/dev/null", &url("/health")]].concat(), "/liveness"),
        "200 1\n200 0\n"
    );
    assert_eq!(ask(&[&status[..], &["--request", "DELETE"]].concat(), chat), "405 1\n");
}

#[test]
fn wrk_is_served_without_errors() {
    let wrk = Path::new("wrk");
    // Without arguments it tells its usage and fails.
    if Command::new(wrk).stdin(Stdio::null()).output().is_err() {
        return skip("wrk is not installed");
    }
    let (_engine, _, mut proxy, address) = pair();
    let script = std::env::temp_dir().join(format!("corelane-{}.lua", std::process::id()));
    std::fs::write(
        &script,
        "wrk.method = 'POST'\nwrk.headers['content-type'] = 'application/json'\n\
         wrk.body = '{\"model\":\"mock\",\"max_tokens\":4,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}'\n",
    )
    .unwrap();
    let output = Command::new(wrk)
        .args(["--threads", "1", "--connections", "64", "--duration", "3s", "--timeout", "30s", "--script"])
        .arg(&script)
        .arg(format!("http://{address}/v1/chat/completions"))
        .stdin(Stdio::null())
        .output();
    let _ = std::fs::remove_file(&script);
    let seen = text(&output.unwrap());
    assert!(seen.contains("Requests/sec:"), "{seen}");
    let admin = proxy.announced("admin");
    let count = |name: &str| {
        let mut stream = std::net::TcpStream::connect(admin).unwrap();
        write!(stream, "GET /metrics HTTP/1.1\r\nhost: corelane\r\nconnection: close\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        let rows: Vec<f64> =
            page.lines().filter(|l| l.starts_with(name)).filter_map(|l| l.rsplit(' ').next()?.parse().ok()).collect();
        assert!(!rows.is_empty(), "no {name} in\n{page}");
        rows.iter().sum::<f64>()
    };
    // A time-out is an answer that came late: whether a lane overslept it, or never got its core, is for who reads this.
    let late = count("corelane_late_wakes_total");
    let fine = !seen.contains("Non-2xx") && !seen.contains("Socket errors");
    assert!(fine, "{seen}\n{late} late wakes\n{}", proxy.log());
    println!("{seen}");
    // Nothing is left behind, and no lane overslept.
    children::until("everybody has left", || count("corelane_lane_connections{") == 0.0);
    children::until("no request is left", || count("corelane_worker_inflight{") == 0.0);
    assert_eq!(count("corelane_panics_total"), 0.0);
    assert_eq!(count("corelane_late_wakes_total"), 0.0);
}
