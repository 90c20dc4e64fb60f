//! What a request says of a worker.
//!
//! Takes a JSON object under our names of settings or those of the peers, gives settings, or every mistake at once.
//! Never takes a setting that would do nothing, and never quotes an API key.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::config::fields::{self, PROBE_SECS, THRESHOLD};
use crate::config::{Backend, Config, Connector, Engine, Role, WorkerSpec, WorkerUrl, Wrong, nearest, quote};
use crate::control::command::Patch;
use crate::limits::{MAX_DP_SIZE, MAX_LABELS, MAX_MODELS_PER_WORKER};

/// The names of settings, for who has got one wrong.
const NAMES: [&str; 18] = [
    "url",
    "role",
    "worker_type",
    "api_key",
    "models",
    "model_id",
    "group",
    "bootstrap_port",
    "backend",
    "runtime",
    "connector",
    "dp_size",
    "labels",
    "health_endpoint",
    "health_timeout_secs",
    "health_interval_secs",
    "health_failure_threshold",
    "health_success_threshold",
];

/// Settings of the peers that have one value here, with that value and why.
const FIXED: [(&str, &str, &str); 4] = [
    ("connection_mode", "\"http\"", "workers are spoken to by HTTP"),
    ("priority", "50", "workers have no priorities"),
    ("cost", "1.0", "workers have no costs"),
    ("dp_aware", "false", "that is an option (--dp-aware), or give dp_size"),
];

/// What was said of a worker.
#[derive(Debug, Default)]
pub struct Form {
    pub url: Option<String>,
    role: Option<Role>,
    engine: Option<Engine>,
    connector: Option<Connector>,
    dp_size: Option<u32>,
    pub patch: Patch,
}

impl Form {
    /// Reads an object.
    ///
    /// # Errors
    /// Every mistake, a line each.
    pub fn read(said: &Map<String, Value>) -> Result<Form, String> {
        let mut form = Form::default();
        let mut wrongs = Vec::new();
        for (name, value) in said {
            if let Err(wrong) = form.take(name, value) {
                wrongs.push(format!("{name}: {wrong}"));
            }
        }
        if wrongs.is_empty() { Ok(form) } else { Err(wrongs.join("\n")) }
    }

    fn take(&mut self, name: &str, value: &Value) -> Result<(), Wrong> {
        let patch = &mut self.patch;
        match name {
            "url" => once(&mut self.url, text(value, |text| WorkerUrl::parse(text).map(|url| url.to_string()))?),
            "role" | "worker_type" => once(&mut self.role, text(value, fields::role)?),
            "api_key" => once(&mut patch.api_key, or_null(value, |value| text(value, fields::api_key))?),
            "models" => once(&mut patch.models, models(value)?),
            "model_id" | "model" => once(&mut patch.models, Vec::from_iter(or_null(value, one_model)?)),
            "group" => once(&mut patch.group, text(value, fields::group)?),
            "bootstrap_port" => once(&mut patch.bootstrap_port, port(value)?),
            "backend" | "runtime" | "runtime_type" => self.backend(&text(value, |text| Ok(text.to_owned()))?),
            "connector" => once(&mut self.connector, text(value, fields::connector)?),
            "dp_size" => once(&mut self.dp_size, whole(value, 1, MAX_DP_SIZE.into())? as u32),
            "labels" => once(&mut patch.labels, labels(value)?),
            "health_endpoint" | "health_check_endpoint" => {
                let read = |value: &Value| text(value, |text| fields::target(text).map(str::to_owned));
                once(&mut patch.health_endpoint, or_null(value, read)?)
            }
            "health_timeout_secs" | "health_check_timeout_secs" => {
                once(&mut patch.health_timeout, or_null(value, seconds)?)
            }
            "health_interval_secs" | "health_check_interval_secs" => {
                once(&mut patch.health_interval, or_null(value, seconds)?)
            }
            "health_failure_threshold" => once(&mut patch.health_failures, or_null(value, threshold)?),
            "health_success_threshold" => once(&mut patch.health_successes, or_null(value, threshold)?),
            "health" => self.health(value),
            "draining" => once(&mut patch.draining, value.as_bool().ok_or_else(|| not(value, "true or false"))?),
            _ => unknown(name, value),
        }
    }

    /// The name of an engine, or that of a backend as it is listed.
    fn backend(&mut self, name: &str) -> Result<(), Wrong> {
        let (engine, connector) = match name.split_once('_') {
            Some((engine, connector)) if engine == "vllm" => (engine, Some(fields::connector(connector)?)),
            _ => (name, None),
        };
        once(&mut self.engine, fields::engine(engine)?)?;
        connector.map_or(Ok(()), |connector| once(&mut self.connector, connector))
    }

    /// The settings of probes in an object of their own.
    fn health(&mut self, value: &Value) -> Result<(), Wrong> {
        let said = value.as_object().ok_or_else(|| not(value, "an object"))?;
        for (name, value) in said {
            let ours = match name.as_str() {
                "endpoint" => "health_endpoint",
                "timeout_secs" => "health_timeout_secs",
                "check_interval_secs" | "interval_secs" => "health_interval_secs",
                "failure_threshold" => "health_failure_threshold",
                "success_threshold" => "health_success_threshold",
                _ => {
                    let fix = "the keys are endpoint, timeout_secs, check_interval_secs, failure_threshold, \
                               success_threshold";
                    return Err(Wrong::new(format!("{} is no such key", quote(name)), fix));
                }
            };
            self.take(ours, value).map_err(|wrong| Wrong::new(format!("{name}: {}", wrong.what), wrong.fix))?;
        }
        Ok(())
    }

    /// The worker that was described whole; what it does not say of its backend the options say.
    ///
    /// # Errors
    /// What is missing or does not go together, and what to change.
    pub fn spec(&self, config: &Config) -> Result<WorkerSpec, String> {
        let missing = || "url: is missing; add it like \"url\": \"http://10.0.0.1:30000\"".to_owned();
        let engine = self.engine.unwrap_or(config.engine);
        if self.connector.is_some() && engine != Engine::Vllm {
            return Err(
                "connector: is vLLM's, and this worker is SGLang; add \"backend\": \"vllm\", or leave it out".into()
            );
        }
        let spec = WorkerSpec {
            role: self.role.unwrap_or(Role::Regular),
            backend: Backend::of(engine, self.connector.unwrap_or(config.connector)),
            dp_size: self.dp_size,
            ..WorkerSpec::new(self.url.clone().ok_or_else(missing)?)
        };
        let spec = self.patch.on(&spec);
        match fields::misfit(&spec) {
            Some(wrong) => Err(wrong.to_string()),
            None => Ok(spec),
        }
    }

    /// Names of settings that were given and that a worker has for good.
    pub fn fixed(&self) -> Option<&'static str> {
        match () {
            () if self.role.is_some() => Some("role"),
            () if self.engine.is_some() || self.connector.is_some() => Some("backend"),
            () if self.dp_size.is_some() => Some("dp_size"),
            () => None,
        }
    }
}

fn unknown(name: &str, value: &Value) -> Result<(), Wrong> {
    if let Some((_, only, why)) = FIXED.iter().find(|(fixed, ..)| *fixed == name) {
        let same = match value.as_f64() {
            Some(n) => only.parse() == Ok(n),
            None => serde_json::from_str(only).is_ok_and(|only: Value| only == *value),
        };
        return if same { Ok(()) } else { Err(Wrong::new(*why, format!("leave it out, or give {only}"))) };
    }
    let fix = match nearest(name, NAMES) {
        Some(near) => format!("did you mean {near}?"),
        None => format!("the settings of a worker are {}", NAMES.join(", ")),
    };
    Err(Wrong::new("no such setting", fix))
}

/// Puts a setting that may go by several names.
fn once<T: PartialEq>(field: &mut Option<T>, value: T) -> Result<(), Wrong> {
    match field {
        Some(known) if *known != value => Err(Wrong::new("is given twice, and differently", "give it once")),
        _ => {
            *field = Some(value);
            Ok(())
        }
    }
}

fn not(value: &Value, what: &str) -> Wrong {
    let is = match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    Wrong::new(format!("is {is}"), format!("give {what}"))
}

fn or_null<T>(value: &Value, read: impl Fn(&Value) -> Result<T, Wrong>) -> Result<Option<T>, Wrong> {
    if value.is_null() { Ok(None) } else { read(value).map(Some) }
}

fn text<T>(value: &Value, read: impl Fn(&str) -> Result<T, Wrong>) -> Result<T, Wrong> {
    value.as_str().ok_or_else(|| not(value, "a text")).and_then(read)
}

fn whole(value: &Value, min: u64, max: u64) -> Result<u64, Wrong> {
    let give = format!("a whole number from {min} to {max}");
    match value.as_u64() {
        Some(n) if (min..=max).contains(&n) => Ok(n),
        _ if value.is_number() => Err(Wrong::new(format!("{value} is out of range"), format!("give {give}"))),
        _ => Err(not(value, &give)),
    }
}

fn threshold(value: &Value) -> Result<u32, Wrong> {
    whole(value, THRESHOLD.0, THRESHOLD.1).map(|n| n as u32)
}

fn seconds(value: &Value) -> Result<Duration, Wrong> {
    let (min, max) = PROBE_SECS;
    match value.as_f64() {
        Some(n) if (min..=max).contains(&n) => Ok(Duration::from_secs_f64(n)),
        Some(n) => Err(Wrong::new(format!("{n} is out of range"), format!("give seconds from {min} to {max}"))),
        None => Err(not(value, &format!("seconds from {min} to {max}"))),
    }
}

fn port(value: &Value) -> Result<Option<u16>, Wrong> {
    match value {
        Value::Null => Ok(None),
        Value::String(none) if none == "none" => Ok(None),
        _ => whole(value, 1, 65535).map(|port| Some(port as u16)),
    }
}

fn one_model(value: &Value) -> Result<String, Wrong> {
    text(value, fields::model)
}

/// Names, or objects with an `id`.
fn models(value: &Value) -> Result<Vec<String>, Wrong> {
    let listed = value.as_array().ok_or_else(|| not(value, "a list of names"))?;
    if listed.len() > MAX_MODELS_PER_WORKER {
        let fix = format!("list at most {MAX_MODELS_PER_WORKER}");
        return Err(Wrong::new(format!("lists {} models", listed.len()), fix));
    }
    let mut models = Vec::new();
    for item in listed {
        let name = one_model(item.get("id").unwrap_or(item))?;
        if !models.contains(&name) {
            models.push(name);
        }
    }
    Ok(models)
}

fn labels(value: &Value) -> Result<BTreeMap<String, String>, Wrong> {
    let said = value.as_object().ok_or_else(|| not(value, "an object of texts"))?;
    if said.len() > MAX_LABELS {
        return Err(Wrong::new(format!("has {} labels", said.len()), format!("give at most {MAX_LABELS}")));
    }
    said.iter().map(|(name, value)| Ok((fields::label(name)?, text(value, fields::label)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(said: Value) -> Result<Form, String> {
        Form::read(said.as_object().expect("an object"))
    }

    fn spec(said: Value) -> Result<WorkerSpec, String> {
        read(said)?.spec(&Config::with_workers(Vec::new()))
    }

    #[test]
    fn a_worker_is_described_in_our_words_or_those_of_the_peers() {
        let ours = spec(json!({
            "url": "HTTP://A:8000/", "role": "prefill", "backend": "vllm", "connector": "mooncake", "group": "g",
            "bootstrap_port": 8998, "models": ["m", "n", "m"], "api_key": "k", "dp_size": 2, "labels": {"rack": "7"},
            "health_endpoint": "/ready", "health_timeout_secs": 2.5, "health_interval_secs": 30,
            "health_failure_threshold": 4, "health_success_threshold": 1,
        }));
        let peers = spec(json!({
            "url": "http://a:8000", "worker_type": "prefill", "runtime": "vllm_mooncake", "group": "g",
            "bootstrap_port": 8998, "models": [{"id": "m", "x": 1}, {"id": "n"}], "api_key": "k", "dp_size": 2,
            "labels": {"rack": "7"}, "connection_mode": "http", "priority": 50, "cost": 1,
            "health": {"endpoint": "/ready", "timeout_secs": 2.5, "check_interval_secs": 30, "failure_threshold": 4,
                       "success_threshold": 1},
        }));
        let wanted = WorkerSpec {
            role: Role::Prefill,
            backend: Backend::VllmMooncake,
            group: "g".into(),
            bootstrap_port: Some(8998),
            models: vec!["m".into(), "n".into()],
            api_key: Some("k".into()),
            dp_size: Some(2),
            labels: [("rack".to_owned(), "7".to_owned())].into(),
            health_endpoint: Some("/ready".into()),
            health_timeout: Some(Duration::from_millis(2500)),
            health_interval: Some(Duration::from_secs(30)),
            health_failures: Some(4),
            health_successes: Some(1),
            ..WorkerSpec::new("http://a:8000")
        };
        assert_eq!((ours, peers), (Ok(wanted.clone()), Ok(wanted)));
        let short = spec(json!({"url": "http://a", "model_id": "m", "api_key": null, "bootstrap_port": "none"}));
        assert_eq!(short, Ok(WorkerSpec { models: vec!["m".into()], ..WorkerSpec::new("http://a:80") }));
    }

    #[test]
    fn every_mistake_says_what_to_change() {
        for (said, says) in [
            (json!({}), "url: is missing; add it like"),
            (json!({"url": "a:1"}), "url: \"a:1\" has no scheme; put http:// before it"),
            (json!({"url": 7}), "url: is a number; give a text"),
            (json!({"url": "http://a", "worker_typ": "x"}), "worker_typ: no such setting; did you mean worker_type?"),
            (json!({"url": "http://a", "zzz": 1}), "zzz: no such setting; the settings of a worker are url, role"),
            (json!({"url": "http://a", "role": "prefil"}), "role: \"prefil\" is not known; did you mean prefill?"),
            (json!({"url": "http://a", "role": "decode", "worker_type": "prefill"}), "is given twice, and differently"),
            (json!({"url": "http://a", "api_key": "a\r\nb"}), "api_key: has characters other than visible ASCII"),
            (json!({"url": "http://a", "models": "m"}), "models: is a text; give a list of names"),
            (json!({"url": "http://a", "models": [""]}), "models: \"\" is no model name"),
            (json!({"url": "http://a", "models": vec!["m"; 257]}), "models: lists 257 models; list at most 256"),
            (json!({"url": "http://a", "labels": {"a": 1}}), "labels: is a number; give a text"),
            (json!({"url": "http://a", "bootstrap_port": 0}), "bootstrap_port: 0 is out of range"),
            (json!({"url": "http://a", "bootstrap_port": 1}), "bootstrap_port: is for prefill workers"),
            (json!({"url": "http://a", "group": "g"}), "group: is for prefill and decode workers"),
            (json!({"url": "http://a", "connector": "nixl"}), "connector: is vLLM's"),
            (json!({"url": "http://a", "backend": "trt"}), "backend: \"trt\" is not known"),
            (json!({"url": "http://a", "dp_size": 1.5}), "dp_size: 1.5 is out of range"),
            (json!({"url": "http://a", "health_timeout_secs": 0}), "health_timeout_secs: 0 is out of range"),
            (
                json!({"url": "http://a", "health": {"timeout_secs": "x"}}),
                "health: timeout_secs: is a text; give seconds",
            ),
            (json!({"url": "http://a", "health": {"x": 1}}), "health: \"x\" is no such key; the keys are endpoint"),
            (json!({"url": "http://a", "health_endpoint": "ready"}), "health_endpoint: \"ready\" is not a path"),
            (
                json!({"url": "http://a", "priority": 7}),
                "priority: workers have no priorities; leave it out, or give 50",
            ),
            (json!({"url": "http://a", "connection_mode": "grpc"}), "connection_mode: workers are spoken to by HTTP"),
        ] {
            let told = spec(said.clone()).expect_err("wrong");
            assert!(told.contains(says), "{said}: {told}");
        }
        let told = read(json!({"url": "x", "role": 1, "nonsense": 1})).unwrap_err();
        assert_eq!(told.lines().count(), 3, "{told}");
        assert!(!read(json!({"url": "u", "api_key": "se cret"})).unwrap_err().contains("cret"));
    }
}
