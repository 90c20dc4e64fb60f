//! The admin listener's page in a browser, in front of a gateway with traffic.
//!
//! Takes a Chromium (`chromium`, `chromium-browser` or `google-chrome`), driven over its debugging pipe, on loopback
//! only. Where there is none the tests are skipped, which the output says; with `CORELANE_REQUIRE_BROWSER=1` that is
//! a failure.

#[allow(dead_code, reason = "other test programs use the rest")]
mod rig;

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use corelane::control::stats::{Stats, WorkerStats};
use corelane::mock::Settings;
use serde_json::{Value, json};

use rig::{Http, Rig, until};

/// Longest wait for a browser on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn chromium() -> Option<&'static str> {
    let there = |name: &&str| {
        let mut command = Command::new(name);
        command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    ["chromium", "chromium-browser", "google-chrome"].into_iter().find(there)
}

/// A browser with one page. Its drop ends it.
struct Browser {
    child: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    profile: PathBuf,
    next: u64,
    session: Option<String>,
    /// What the page complained of: exceptions, breaches of its policy.
    complaints: Vec<String>,
}

impl Browser {
    /// `None` where there is no browser.
    fn start(name: &str) -> Option<Browser> {
        let Some(program) = chromium() else {
            assert!(std::env::var_os("CORELANE_REQUIRE_BROWSER").is_none_or(|v| v != "1"), "no Chromium");
            println!("skipped: no Chromium (apt-get install chromium)");
            return None;
        };
        let profile = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("browser-{name}-{}", std::process::id()));
        // The browser wants its pipe at descriptors 3 and 4.
        let script = format!(
            "exec {program} --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
             --no-proxy-server --disable-background-networking --disable-component-update --disable-sync \
             --user-data-dir=\"$0\" --remote-debugging-pipe about:blank 3<&0 4>&1 </dev/null >/dev/null 2>&1"
        );
        let mut command = Command::new("sh");
        command.arg("-c").arg(script).arg(&profile);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let to = child.stdin.take().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let (send, from) = channel();
        std::thread::spawn(move || {
            let mut message = Vec::new();
            while out.read_until(0, &mut message).is_ok_and(|n| n > 0) {
                let value = serde_json::from_slice(message.strip_suffix(b"\0").unwrap_or(&message));
                if value.ok().is_none_or(|value: Value| send.send(value).is_err()) {
                    return;
                }
                message.clear();
            }
        });
        let mut browser = Browser { child, to, from, profile, next: 0, session: None, complaints: Vec::new() };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut message = json!({"id": self.next, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.to.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let answer = self.from.recv_timeout(PATIENCE).unwrap_or_else(|e| panic!("{method}: {e}"));
            match answer["method"].as_str() {
                Some("Runtime.exceptionThrown" | "Log.entryAdded") => self.complaints.push(answer.to_string()),
                Some(_) => {}
                None if answer["id"] == self.next => {
                    assert!(answer.get("error").is_none(), "{method}: {answer}");
                    return answer["result"].clone();
                }
                None => {}
            }
        }
    }

    /// The value of an expression in the page.
    fn value(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", asked);
        assert!(answer.get("exceptionDetails").is_none(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    fn until(&mut self, expression: &str) {
        let begun = Instant::now();
        while self.value(expression) != true {
            let page = self.value("document.body.innerText");
            assert!(begun.elapsed() < PATIENCE, "in vain: {expression}; {:?}\n{page}", self.complaints);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The texts of a table's cells, row by row.
    fn rows(&mut self, table: &str) -> Vec<Vec<String>> {
        let cells = "[...row.cells].map(cell => cell.innerText)";
        let rows = self.value(&format!("[...document.querySelectorAll('#{table} tbody tr')].map(row => {cells})"));
        serde_json::from_value(rows).unwrap()
    }

    /// Runs before any script of the pages that are opened from now on.
    fn prepare(&mut self, script: &str) {
        self.call("Page.addScriptToEvaluateOnNewDocument", json!({"source": script}));
    }

    fn open(&mut self, admin: SocketAddr) {
        self.call("Page.navigate", json!({"url": format!("http://{admin}/")}));
        self.until("document.readyState === 'complete' && document.getElementById('live') !== null");
    }

    fn size(&mut self, width: u32, height: u32) {
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", metrics);
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let close = json!({"id": 0, "method": "Browser.close"});
        let _ = self.to.write_all(format!("{close}\0").as_bytes());
        let begun = Instant::now();
        while self.child.try_wait().is_ok_and(|ended| ended.is_none()) && begun.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.profile);
    }
}

/// Requests one after the other, until it is over.
fn traffic(rig: &Rig, over: &AtomicBool) {
    let mut http = rig.http();
    let prompt = "what the requests of this test have in common, several blocks of it ".repeat(10);
    while !over.load(Ordering::Relaxed) {
        let body = json!({"model":"mock","prompt":prompt,"max_tokens":3,"stream":true,"mock":{"gap_ms":2}});
        http.post("/v1/completions", &body).expect(200);
        http.post("/v1/completions", &json!({"model":"nobody's","prompt":"x"})).expect(404);
    }
}

#[test]
fn the_page_shows_what_goes_on() {
    let Some(mut browser) = Browser::start("live") else { return };
    let rig = Rig::with(Settings::default(), 3, |c| c.cores = vec![0, 1]);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| traffic(&rig, &over));
        // Whatever fails below, the traffic ends.
        let shown = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| look(&mut browser, &rig)));
        over.store(true, Ordering::Relaxed);
        shown.unwrap_or_else(|e| std::panic::resume_unwind(e));
    });
    let admin = rig.gateway.admin();
    drop(rig);
    println!("{admin} is gone");
    browser.until("document.getElementById('live').innerText.startsWith('the gateway does not answer')");
    browser.until("document.documentElement.classList.contains('stale')");
}

fn look(browser: &mut Browser, rig: &Rig) {
    browser.size(1280, 900);
    browser.open(rig.gateway.admin());
    browser.until("document.getElementById('live').innerText === 'live'");
    browser.until("parseFloat(document.querySelector('#cards b').innerText.replace(',', '')) > 1");
    let workers = browser.rows("workers");
    println!("{workers:#?}");
    let mut urls: Vec<&str> = workers.iter().map(|row| row[0].as_str()).collect();
    urls.sort();
    let mut wanted = rig.fleet.urls();
    wanted.sort();
    assert_eq!(urls, wanted);
    for row in &workers {
        assert_eq!(row[1..4], ["regular", "ready", "closed"]);
    }
    let lanes = browser.rows("lanes");
    assert_eq!(lanes.len(), 2, "{lanes:?}");
    assert!(lanes.iter().all(|lane| lane[1].ends_with('%')), "{lanes:?}");
    // Most requests find the prefix of the first.
    let hits = "parseInt([...document.querySelectorAll('#routing tbody tr')].find(r => r.innerText.startsWith('hit')).cells[2].innerText) > 80";
    browser.until(hits);
    let latency = browser.rows("latency");
    println!("{latency:?}");
    for row in &latency[..4] {
        assert!(row[1].ends_with("ms") || row[1].ends_with("µs"), "{row:?}");
    }
    assert!(browser.rows("statuses").iter().any(|row| row[0] == "404"));
    assert!(browser.rows("faults").iter().any(|row| row[0] == "model_not_found"));
    assert_eq!(browser.value("document.getElementById('ready').innerText"), "ready");
    // At the width of a phone only tables scroll, each in its frame.
    browser.size(360, 740);
    browser.until("innerWidth === 360");
    assert_eq!(browser.value("document.documentElement.scrollWidth"), 360);
    let whole =
        "[...document.querySelectorAll('section:not(.wide) .scroll')].every(s => s.scrollWidth <= s.clientWidth)";
    assert_eq!(browser.value(whole), true, "all but the workers need not even do that");
    assert_eq!(browser.complaints, [""; 0]);
}

/// A `fetch` that answers with `text`, if it is asked with `token` where there is one.
fn fake(text: &str, token: Option<&str>) -> String {
    format!(
        "window.asked = 0; window.fetch = async (url, given) => {{ window.asked++; \
         const right = {} === null || (given.headers || {{}}).Authorization === 'Bearer ' + {0}; \
         return right ? new Response({}) : new Response('{{}}', {{status: 401}}); }};",
        json!(token),
        json!(text)
    )
}

fn figures(rig: &Rig) -> Stats {
    let text = Http::connect(rig.gateway.admin()).ask("GET", "/stats", &[], b"").expect(200).text();
    serde_json::from_str(&text).unwrap()
}

/// 2048 workers, one of which is named by somebody who would like to run a script.
#[test]
fn a_large_fleet_stays_usable_and_names_are_text() {
    let Some(mut browser) = Browser::start("large") else { return };
    let rig = Rig::new(1);
    let mut stats = figures(&rig);
    let hostile = "http://<img src=x onerror=window.hit=1>/\"'<script>window.hit=1</script>";
    stats.workers = (0..2048u64)
        .map(|i| WorkerStats {
            id: format!("{i}-1"),
            url: if i == 77 { hostile.to_owned() } else { format!("http://10.0.{}.{}:30000", i / 256, i % 256) },
            role: if i % 2 == 0 { "prefill" } else { "decode" }.to_owned(),
            in_flight: if i == 77 { 10_000 } else { i },
            ..stats.workers[0].clone()
        })
        .collect();
    browser.prepare(&fake(&serde_json::to_string(&stats).unwrap(), None));
    browser.size(360, 740);
    browser.open(rig.gateway.admin());
    let count = "document.getElementById('count').innerText";
    browser.until(&format!("{count} === '2048 workers, the first 200 shown'"));
    let rows = browser.rows("workers");
    assert_eq!((rows.len(), rows[0][0].as_str(), rows[0][4].as_str()), (200, hostile, "10,000"));
    assert_eq!((rows[1][0].as_str(), rows[1][4].as_str()), ("http://10.0.7.255:30000", "2,047"));
    assert_eq!(
        browser.value("window.hit === undefined && document.querySelector('#workers img, #workers script') === null"),
        true
    );
    assert_eq!(browser.value("document.documentElement.scrollWidth"), 360);
    let filter = |text: &str| {
        format!(
            "document.getElementById('filter').value = {}; document.getElementById('filter').dispatchEvent(new Event('input')); true",
            json!(text)
        )
    };
    browser.value(&filter("10.0.3. decode"));
    assert_eq!(browser.value(count), "128 of 2048 workers");
    assert!(browser.rows("workers").iter().all(|row| row[0].starts_with("http://10.0.3.") && row[1] == "decode"));
    browser.value(&filter(""));
    browser.value("document.querySelector('#workers th[data-key=url] button').click()");
    let rows = browser.rows("workers");
    assert_eq!((rows[0][0].as_str(), rows[1][0].as_str()), (hostile, "http://10.0.0.0:30000"));
    assert_eq!([&rows[10][0], &rows[11][0]], ["http://10.0.0.9:30000", "http://10.0.0.10:30000"]);
    assert_eq!(browser.value("document.querySelector('#workers th[aria-sort=ascending]').dataset.key"), "url");
    // One redrawing, in ms.
    println!("{}", browser.value("const t = performance.now(); for (let i = 0; i < 10; i++) document.getElementById('filter').dispatchEvent(new Event('input')); (performance.now() - t) / 10"));
    assert_eq!(browser.complaints, [""; 0]);
}

#[test]
fn a_token_is_asked_for_and_kept_for_the_tab() {
    let Some(mut browser) = Browser::start("token") else { return };
    let rig = Rig::new(1);
    browser.prepare(&fake(&serde_json::to_string(&figures(&rig)).unwrap(), Some("right")));
    browser.open(rig.gateway.admin());
    let says = |text: &str| format!("document.getElementById('live').innerText === {}", json!(text));
    let give = |token: &str| {
        format!(
            "document.getElementById('token').value = {}; document.querySelector('#ask form').requestSubmit(); true",
            json!(token)
        )
    };
    browser.until(&says("a token is wanted"));
    assert_eq!(browser.value("document.getElementById('ask').hidden"), false);
    browser.value(&give("wrong"));
    browser.until(&says("this token is not taken"));
    browser.value(&give("right"));
    browser.until(&says("live"));
    assert_eq!(browser.value("document.getElementById('ask').hidden"), true);
    assert_eq!(browser.value("document.getElementById('token').value"), "");
    // The tab keeps it over a reload.
    browser.open(rig.gateway.admin());
    browser.until(&says("live"));
}

#[test]
fn nothing_is_asked_while_nobody_looks() {
    let Some(mut browser) = Browser::start("hidden") else { return };
    let rig = Rig::new(1);
    browser.prepare(&fake(&serde_json::to_string(&figures(&rig)).unwrap(), None));
    browser.prepare("window.away = false; Object.defineProperty(document, 'hidden', {get: () => window.away});");
    browser.open(rig.gateway.admin());
    browser.until("window.asked >= 2");
    let turn = |away: bool| {
        format!("window.away = {away}; document.dispatchEvent(new Event('visibilitychange')); window.asked")
    };
    let asked = browser.value(&turn(true));
    browser.until("document.getElementById('live').innerText === 'paused'");
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(browser.value("window.asked"), asked);
    browser.value(&turn(false));
    browser.until("document.getElementById('live').innerText === 'live'");
    until("it goes on", || browser.value("window.asked").as_u64() > asked.as_u64().map(|n| n + 1));
}
