//! Workers that come and go under load: no request is lost.

use std::time::Duration;

use corelane::config::{Backend, Role, WorkerSpec};
use corelane::control::command::{Added, Command, Commands, Left, Patch, Reconciled};
use corelane::control::fleet::{Listed, Refusal, Source};
use corelane::mock::Settings;
use corelane::mock::load::{Load, Pattern, Totals};
use serde_json::json;

use crate::rig::{self, Rig, post, until};

fn add(commands: &Commands, spec: &WorkerSpec) -> Result<Added, Refusal> {
    commands.give_blocking(|reply| Command::Add(Source::Admin, Box::new(spec.clone()), reply)).unwrap()
}

fn remove(commands: &Commands, name: &str, force: bool) -> Result<Left, Refusal> {
    commands.give_blocking(|reply| Command::Remove { name: name.into(), force, reply }).unwrap()
}

fn patch(commands: &Commands, name: &str, patch: Patch) -> Result<(), Refusal> {
    commands.give_blocking(|reply| Command::Patch(name.into(), Box::new(patch), reply)).unwrap().map(|_| ())
}

fn list(commands: &Commands) -> Vec<Listed> {
    commands.give_blocking(Command::List).unwrap()
}

fn reconcile(commands: &Commands, specs: &[WorkerSpec]) -> Reconciled {
    commands.give_blocking(|reply| Command::Reconcile(Source::Config, specs.to_vec(), reply)).unwrap()
}

/// The worker of a URL; `None` when it is not listed.
fn listed(commands: &Commands, url: &str) -> Option<Listed> {
    list(commands).into_iter().find(|worker| &*worker.url == url)
}

fn is_ready(commands: &Commands, url: &str) -> bool {
    listed(commands, url).is_some_and(|worker| worker.is_healthy)
}

#[test]
fn what_changes_in_place_keeps_the_worker() {
    let rig = Rig::new(1);
    let commands = rig.gateway.commands().clone();
    let url = rig.fleet.engine(0).url();
    rig.post("/v1/completions", &json!({"prompt": "x"})).expect(200);
    let before = listed(&commands, &url).unwrap();
    let change = Patch {
        api_key: Some(Some("sesame".into())),
        models: Some(vec!["alias".into(), "mock".into()]),
        labels: Some([("rack".to_owned(), "7".to_owned())].into()),
        ..Patch::default()
    };
    patch(&commands, &url, change).unwrap();
    until("lanes know", || rig.post("/v1/completions", &json!({"prompt": "x", "model": "alias"})).status == 200);
    let last = rig.stats(0).last.unwrap().head;
    assert!(last.contains("Bearer sesame"), "{last}");
    let after = listed(&commands, &url).unwrap();
    assert_eq!((&after.id, after.state, &after.labels["rack"]), (&before.id, "ready", &"7".to_owned()));
    assert!(after.selected_total > before.selected_total && before.selected_total == 1);
    // Probes go by the new settings, and know what the old ones came to.
    let timeout = Patch { health_timeout: Some(Some(Duration::from_secs(3))), ..Patch::default() };
    patch(&commands, &url, timeout).unwrap();
    assert!(is_ready(&commands, &url));
    let nowhere = Patch { labels: Some([].into()), ..Patch::default() };
    assert_eq!(patch(&commands, "9-9", nowhere), Err(Refusal::Unknown));
    let spec = WorkerSpec { backend: Backend::VllmNixl, ..WorkerSpec::new(url.clone()) };
    let replace = |spec| commands.give_blocking(|reply| Command::Replace(url.clone(), Box::new(spec), reply)).unwrap();
    assert_eq!(replace(spec), Err(Refusal::Fixed("backend")));
    assert!(replace(WorkerSpec::new(url.clone())).is_ok());
    assert!(listed(&commands, &url).unwrap().labels.is_empty());
}

#[test]
fn the_workers_of_the_configuration_become_what_it_says() {
    let rig = Rig::new(3);
    let more = rig::fleet(Settings::default(), 2);
    let commands = rig.gateway.commands().clone();
    let [a, b, c] = [0, 1, 2].map(|i| rig.fleet.engine(i).url());
    let [d, own] = [0, 1].map(|i| more.engine(i).url());
    add(&commands, &WorkerSpec::new(own.clone())).unwrap();
    let id = |url: &str| listed(&commands, url).unwrap().id;
    let before = [id(&a), id(&b)];
    let generation = rig.gateway.shared().roster.generation();

    let keyed = WorkerSpec { api_key: Some("k".into()), ..WorkerSpec::new(a.clone()) };
    let wanted = [keyed, WorkerSpec::new(b.clone()), WorkerSpec::new(d.clone()), WorkerSpec::new("ftp://x")];
    let done = reconcile(&commands, &wanted);
    assert_eq!((&done.added, &done.changed, &done.drained), (&vec![d.clone()], &vec![a.clone()], &vec![c.clone()]));
    assert_eq!((done.kept, done.refused.len(), &done.refused[0].0), (1, 1, &"ftp://x".to_owned()));
    until("the rest is gone", || listed(&commands, &c).is_none());
    until("the new one is in", || is_ready(&commands, &d));
    assert_eq!([id(&a), id(&b)], before);
    assert!(listed(&commands, &own).is_some(), "what the admin listener was told is not the configuration's to undo");
    assert!(rig.gateway.shared().roster.generation() < generation + 30, "published together");

    let again = reconcile(&commands, &wanted[..3]);
    assert_eq!(again, Reconciled { kept: 3, ..Reconciled::default() });
    // A worker that the configuration names belongs to it.
    let own_too: Vec<WorkerSpec> = wanted[..3].iter().cloned().chain([WorkerSpec::new(own.clone())]).collect();
    assert_eq!(reconcile(&commands, &own_too).kept, 4);
    assert_eq!(listed(&commands, &own).unwrap().source, "config");

    // Another backend means another engine: the old one finishes first.
    let other = WorkerSpec { backend: Backend::VllmNixl, ..WorkerSpec::new(b.clone()) };
    assert_eq!(reconcile(&commands, &[own_too[0].clone(), other]).replaced, vec![b.clone()]);
    until("it has come back", || listed(&commands, &b).is_some_and(|w| w.backend == "vllm_nixl" && w.is_healthy));
    until("only these are left", || list(&commands).len() == 2);
    assert_ne!(id(&b), before[1]);
}

/// Conversations whose every answer is a stream that takes some time.
fn pattern(rig: &Rig, conversations: usize) -> Pattern {
    Pattern {
        url: format!("http://{}", rig.gateway.address()),
        conversations,
        system_bytes: 200,
        turn_bytes: 50,
        max_tokens: 12,
        think_ms: (0, 30),
        ..Pattern::default()
    }
}

fn slow() -> Settings {
    Settings { decode_step_ms: 8.0, ..Settings::default() }
}

/// Load that has really begun.
fn traffic(rig: &Rig, conversations: usize) -> Load {
    let load = Load::start(pattern(rig, conversations)).unwrap();
    until("traffic flows", || load.totals().running > conversations as u64 / 2 && load.totals().ok > 50);
    load
}

#[track_caller]
fn expect_none_lost(load: Load) -> Totals {
    let before = load.totals().ok;
    until("it goes on", || load.totals().ok > before + 100);
    let totals = load.stop();
    assert_eq!((totals.failed, totals.refused), (0, 0), "{totals:?}");
    totals
}

#[test]
fn no_request_is_lost_while_workers_come_and_go() {
    let rig = Rig::with(slow(), 4, |_| {});
    let more = rig::fleet(slow(), 2);
    let commands = rig.gateway.commands().clone();
    let load = traffic(&rig, 300);
    let urls: Vec<String> = (0..4).map(|i| rig.fleet.engine(i).url()).chain(more.urls()).collect();
    for url in &urls[4..] {
        assert!(!add(&commands, &WorkerSpec::new(url.clone())).unwrap().was_leaving);
        until("it is in", || is_ready(&commands, url));
        assert_eq!(add(&commands, &WorkerSpec::new(url.clone())), Err(Refusal::Known));
    }
    for round in 0..2 {
        for url in &urls {
            let id = listed(&commands, url).unwrap().id;
            assert!(matches!(remove(&commands, url, false), Ok(Left::Draining(_))));
            if round == 1 {
                // It is wanted again before it has finished.
                let back = add(&commands, &WorkerSpec::new(url.clone())).unwrap();
                until("it is back", || is_ready(&commands, url));
                assert!(!back.was_leaving || listed(&commands, url).unwrap().id == id);
                continue;
            }
            until("it has left", || listed(&commands, url).is_none());
            assert_eq!(remove(&commands, url, false), Err(Refusal::Unknown));
            assert_eq!(rig.metric(&format!(r#"corelane_worker_up{{worker="{url}",role="regular"}}"#)), None);
            add(&commands, &WorkerSpec::new(url.clone())).unwrap();
            until("it is in again", || is_ready(&commands, url));
            assert_ne!(listed(&commands, url).unwrap().id, id, "it has forgotten what it was");
        }
    }
    expect_none_lost(load);
    until("all has ended", || rig.in_flight() == 0);
}

#[test]
fn a_rolling_restart_costs_no_request() {
    let rig = Rig::with(slow(), 4, |_| {});
    let commands = rig.gateway.commands().clone();
    let load = traffic(&rig, 300);
    for engine in rig.fleet.engines() {
        let url = engine.url();
        remove(&commands, &url, false).unwrap();
        until("it has left", || listed(&commands, &url).is_none());
        // Its idle connections are closed too: an engine that shuts down waits for them.
        until("nobody is connected", || engine.stats().connections == 0);
        assert_eq!(engine.stats().active, 0);
        engine.kill();
        engine.restart().unwrap();
        engine.reset_stats();
        add(&commands, &WorkerSpec::new(url.clone())).unwrap();
        until("it works again", || engine.stats().requests > 20);
    }
    expect_none_lost(load);
}

#[test]
fn a_forced_removal_lets_streams_end() {
    let rig = Rig::with(Settings::default(), 2, |_| {});
    let commands = rig.gateway.commands().clone();
    let mut http = rig.http();
    let body = json!({"prompt": "x", "stream": true, "max_tokens": 30, "mock": {"gap_ms": 20}});
    http.send(&post("/v1/completions", &body));
    until("it streams", || http.fill().is_ok() && http.buf.len() > 400);
    let holder = (0..2).find(|&i| rig.stats(i).active > 0).unwrap();
    let url = rig.fleet.engine(holder).url();
    assert!(matches!(remove(&commands, &url, true), Ok(Left::Removed(_))));
    assert!(listed(&commands, &url).is_none());
    // What comes back under the same address is another worker: it does not have the stream.
    let id = add(&commands, &WorkerSpec::new(url.clone())).unwrap().id;
    until("it is in", || is_ready(&commands, &url));
    assert_eq!((listed(&commands, &url).unwrap().in_flight, listed(&commands, &url).unwrap().id), (0, id.to_string()));
    let answer = http.answer().expect(200);
    assert!(answer.text().ends_with("data: [DONE]\n\n") && answer.text().matches("data: ").count() > 30);
    assert_eq!(rig.stats(holder).aborted, 0);
}

#[test]
fn a_worker_in_maintenance_keeps_its_place() {
    let rig = Rig::new(2);
    let commands = rig.gateway.commands().clone();
    let urls = [0, 1].map(|i| rig.fleet.engine(i).url());
    let drains = |on| Patch { draining: Some(on), ..Patch::default() };
    patch(&commands, &urls[0], drains(true)).unwrap();
    for _ in 0..10 {
        rig.post("/v1/completions", &json!({"prompt": "x"})).expect(200);
    }
    assert_eq!((rig.stats(0).requests, rig.stats(1).requests), (0, 10));
    patch(&commands, &urls[1], drains(true)).unwrap();
    rig.post("/v1/completions", &json!({"prompt": "x"})).expect_error(503, "no_usable_worker");
    patch(&commands, &urls[0], drains(false)).unwrap();
    until("it is ready", || is_ready(&commands, &urls[0]));
    rig.post("/v1/completions", &json!({"prompt": "x"})).expect(200);
    assert_eq!(rig.stats(0).requests, 1);
    // Who stays on the list can still be told to leave, and who is to leave to stay.
    remove(&commands, &urls[1], false).unwrap();
    until("it has left", || listed(&commands, &urls[1]).is_none());
    assert_eq!(list(&commands)[0].role, Role::Regular.name());
}
