//! The workers: can they be reached, are they well, do they serve what is configured, do connections last.
//!
//! Takes what they answered, gives findings. Never asks them itself.

use std::time::Duration;

use super::Plan;
use super::facts::fleet::{Answered, Keeps, Worker};
use super::finding::Finding;

/// Slower than this is worth a note: within a data centre it takes a tenth of it.
const SLOW_LOOK_UP: Duration = Duration::from_millis(100);
const SLOW_CONNECT: Duration = Duration::from_millis(20);
/// A connection that a request is sent on must outlive `pool_idle` by this, which covers the way there.
const MARGIN: Duration = Duration::from_millis(500);

pub fn check(plan: &Plan, workers: &[Worker]) -> Vec<Finding> {
    let mut all: Vec<Finding> = workers.iter().flat_map(|worker| one(plan, worker)).collect();
    all.extend(default_model(plan, workers));
    all
}

/// A time as people write it.
fn ms(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}

fn one(plan: &Plan, worker: &Worker) -> Vec<Finding> {
    let mut all = vec![address(worker)];
    all.extend(worker.connected.as_ref().map(|connected| connect(worker, connected)));
    if let Some((path, outcome)) = &worker.health {
        all.push(health(worker, path, outcome));
    }
    all.extend(worker.models.as_ref().map(|served| models(worker, served)));
    all.extend(worker.keeps.as_ref().map(|keeps| keep_alive(plan, worker, keeps)));
    all
}

fn address(worker: &Worker) -> Finding {
    let (check, url) = ("workers.address", &worker.url);
    match &worker.looked_up {
        Err(e) => Finding::fail(check, format!("{url}: its name cannot be looked up: {e}"))
            .fix("correct the name, or put its address into /etc/hosts"),
        Ok(took) if *took > SLOW_LOOK_UP => {
            Finding::note(check, format!("{url}: looking its name up took {}", ms(*took)))
                .fix("name the worker by address, or run a caching resolver on this host")
        }
        Ok(took) => Finding::ok(check, format!("{url}: looked up in {}", ms(*took))),
    }
}

fn connect(worker: &Worker, connected: &Result<Duration, String>) -> Finding {
    let (check, url) = ("workers.connect", &worker.url);
    match connected {
        Err(e) => Finding::fail(check, format!("{url}: no connection: {e}"))
            .fix(format!("start the worker, or open the way to it; then: curl -v {url}/health")),
        Ok(took) if *took > SLOW_CONNECT => {
            Finding::note(check, format!("{url}: connecting took {}; every request has that way to go", ms(*took)))
        }
        Ok(took) => Finding::ok(check, format!("{url}: connected in {}", ms(*took))),
    }
}

/// What to do where a key is asked for.
fn key_fix(worker: &Worker) -> String {
    let what = if worker.has_key { "correct its api_key" } else { "give it an api_key" };
    format!("{what} in [[workers]] of the configuration")
}

fn health(worker: &Worker, path: &str, outcome: &Answered) -> Finding {
    let check = "workers.health";
    let url = format!("{}{path}", worker.url);
    match outcome {
        Err(e) => Finding::fail(check, format!("{url}: {e}")).fix(format!("curl -v {url}")),
        Ok((401 | 403, _)) => Finding::fail(check, format!("{url} refuses its key")).fix(key_fix(worker)),
        Ok((status, _)) if !(200..300).contains(status) => {
            Finding::fail(check, format!("{url} answers {status}: the worker would get no requests"))
                .fix("look into the worker's log, or name another health_endpoint in [[workers]]")
        }
        Ok((_, took)) if *took * 2 > worker.health_timeout => Finding::warning(
            check,
            format!("{url} took {} of the {} that a probe may take", ms(*took), ms(worker.health_timeout)),
        )
        .fix("raise --health-check-timeout-secs, or health_timeout_secs of the worker"),
        Ok((status, took)) => Finding::ok(check, format!("{url} answers {status} in {}", ms(*took))),
    }
}

fn models(worker: &Worker, served: &Result<Vec<String>, String>) -> Finding {
    let (check, url) = ("workers.models", &worker.url);
    let configured = worker.configured.join(", ");
    match served {
        Err(e) if e.ends_with("401") || e.ends_with("403") => {
            Finding::fail(check, format!("{url}: {e}: it refuses its key")).fix(key_fix(worker))
        }
        Err(e) if worker.configured.is_empty() => Finding::fail(check, format!("{url}: its models are not known: {e}"))
            .fix("name them in [[workers]]: models = [\"…\"]"),
        Err(e) => Finding::note(check, format!("{url}: {e}; taken from the configuration: {configured}")),
        Ok(served) => {
            let lacks: Vec<&str> =
                worker.configured.iter().filter(|m| !served.contains(m)).map(String::as_str).collect();
            let serves = served.join(", ");
            match lacks.is_empty() {
                true => Finding::ok(check, format!("{url} serves {serves}")),
                false => Finding::warning(
                    check,
                    format!("{url} serves {serves}, and not {}, which the configuration gives it", lacks.join(", ")),
                )
                .fix(format!("models = {served:?} in its [[workers]], or start the worker with that name")),
            }
        }
    }
}

fn keep_alive(plan: &Plan, worker: &Worker, keeps: &Keeps) -> Finding {
    let (check, url, idle) = ("workers.keep_alive", &worker.url, plan.config.pool_idle);
    let shorter = |kept: Duration| {
        let safe = kept.saturating_sub(MARGIN * 2).max(Duration::from_millis(1));
        format!(
            "--pool-idle-ms {}, or a longer keep-alive of the worker (uvicorn: --timeout-keep-alive)",
            safe.as_millis()
        )
    };
    let of_pool = format!("pool_idle_ms is {}", idle.as_millis());
    match keeps {
        Keeps::Not => Finding::warning(check, format!("{url} closes its connection with each answer"))
            .fix("turn keep-alive on at the worker, or at the proxy before it"),
        Keeps::For(kept) if *kept < idle => Finding::warning(
            check,
            format!(
                "{url} closes idle connections after {}, {of_pool}: some requests meet a closed one and are sent again",
                ms(*kept)
            ),
        )
        .fix(shorter(*kept)),
        Keeps::For(kept) if *kept < idle + MARGIN => {
            Finding::note(check, format!("{url} closes idle connections after {}, {of_pool}: close to it", ms(*kept)))
                .fix(shorter(*kept))
        }
        Keeps::For(kept) => Finding::ok(check, format!("{url} closes idle connections after {}, {of_pool}", ms(*kept))),
        Keeps::Longer(watched) if *watched < idle => Finding::note(
            check,
            format!("{url} kept an idle connection for {}; {of_pool}, which is longer than was watched", ms(*watched)),
        ),
        Keeps::Longer(watched) => {
            Finding::ok(check, format!("{url} kept an idle connection for {}, {of_pool}", ms(*watched)))
        }
        Keeps::Unknown(e) => Finding::note(check, format!("{url}: how long it keeps connections was not seen: {e}")),
    }
}

/// Requests that name no model want workers of the default one.
fn default_model(plan: &Plan, workers: &[Worker]) -> Option<Finding> {
    let check = "workers.default_model";
    let wanted = plan.config.default_model.as_ref()?;
    // The configuration's word counts, as it does for the gateway.
    let has = |w: &&Worker| match w.configured.is_empty() {
        true => w.models.as_ref().is_some_and(|m| m.as_ref().is_ok_and(|served| served.contains(wanted))),
        false => w.configured.contains(wanted),
    };
    let n = workers.iter().filter(has).count();
    Some(match n {
        0 => Finding::fail(check, format!("no worker serves default_model {wanted}: requests without a model get 404"))
            .fix("correct --default-model, or leave it out"),
        n => Finding::ok(check, format!("{n} of {} workers serve default_model {wanted}", workers.len())),
    })
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;
    use crate::config::{Config, WorkerSpec};

    fn levels(spec: impl FnOnce(&mut Worker), default_model: Option<&str>) -> Vec<(&'static str, Level)> {
        let mut config = Config::with_workers(vec![WorkerSpec::new("http://w:1")]);
        config.default_model = default_model.map(str::to_owned);
        let mut worker = Worker {
            url: "http://w:1".into(),
            has_key: false,
            configured: Vec::new(),
            looked_up: Ok(Duration::ZERO),
            connected: Some(Ok(Duration::from_millis(1))),
            health: Some(("/health".into(), Ok((200, Duration::from_millis(2))))),
            health_timeout: Duration::from_secs(1),
            models: Some(Ok(vec!["m".into()])),
            keeps: None,
        };
        spec(&mut worker);
        let plan = Plan { config: &config, lanes: vec![0], control: None };
        check(&plan, &[worker]).into_iter().filter(|f| f.level != Level::Ok).map(|f| (f.check, f.level)).collect()
    }

    #[test]
    fn a_good_worker_is_all_right() {
        assert_eq!(levels(|_| {}, Some("m")), []);
    }

    #[test]
    fn what_a_worker_lacks_is_told() {
        let ms = Duration::from_millis;
        type Change = Box<dyn FnOnce(&mut Worker)>;
        let cases: Vec<(Change, &str, Level)> = vec![
            (Box::new(|w| w.looked_up = Ok(Duration::from_secs(1))), "workers.address", Level::Note),
            (Box::new(move |w| w.connected = Some(Ok(ms(50)))), "workers.connect", Level::Note),
            (Box::new(move |w| w.health = Some(("/h".into(), Ok((200, ms(600)))))), "workers.health", Level::Warning),
            (Box::new(move |w| w.health = Some(("/h".into(), Ok((403, ms(1)))))), "workers.health", Level::Fail),
            (Box::new(|w| w.health = Some(("/h".into(), Err("silent".into())))), "workers.health", Level::Fail),
            (Box::new(|w| w.models = Some(Err("/v1/models answers 404".into()))), "workers.models", Level::Fail),
            (Box::new(|w| w.configured = vec!["m".into(), "n".into()]), "workers.models", Level::Warning),
            (Box::new(|w| w.keeps = Some(Keeps::Not)), "workers.keep_alive", Level::Warning),
            (Box::new(move |w| w.keeps = Some(Keeps::For(ms(3900)))), "workers.keep_alive", Level::Warning),
            (Box::new(move |w| w.keeps = Some(Keeps::For(ms(4100)))), "workers.keep_alive", Level::Note),
            (Box::new(|w| w.keeps = Some(Keeps::Unknown("reset".into()))), "workers.keep_alive", Level::Note),
        ];
        for (change, check, level) in cases {
            assert_eq!(levels(change, None), [(check, level)]);
        }
        assert_eq!(levels(|w| w.keeps = Some(Keeps::For(Duration::from_secs(5))), None), []);
        assert_eq!(levels(|w| w.keeps = Some(Keeps::Longer(Duration::from_secs(6))), None), []);
        assert_eq!(levels(|_| {}, Some("x")), [("workers.default_model", Level::Fail)]);
        assert_eq!(levels(|w| w.configured = vec!["m".into()], Some("m")), []);
    }
}
