//! The configuration in effect, for people: as TOML with the origin of every value, as JSON, and as one line.
//!
//! Takes what was loaded, gives text. Never shows an API key or a secret.

use std::fmt::Write as _;
use std::net::SocketAddr;

use serde_json::{Map, Value as Json, json};
use toml_edit::Value;

use super::load::Loaded;
use super::mistakes::Origin;
use super::options::Section;
use super::values::{Kind, toml_list, toml_text};
use super::{Connector, Engine, ExtraRoute, Role, WorkerSpec};

/// Column at which the origins begin, where the value leaves room.
const ORIGIN_COLUMN: usize = 44;

impl Loaded {
    /// One line: what would be served, and where.
    pub fn summary(&self) -> String {
        let c = &self.config;
        let mut workers =
            if c.workers.len() == 1 { "1 worker".to_owned() } else { format!("{} workers", c.workers.len()) };
        let mut policy = c.policy.name().to_owned();
        if c.has_pairs() {
            let count = |role| c.workers.iter().filter(|w| w.role == role).count();
            let [regular, prefill, decode] = Role::ALL.map(count);
            let rest = if regular == 0 { String::new() } else { format!(", {regular} regular") };
            let _ = write!(workers, " ({prefill} prefill, {decode} decode{rest})");
            let [of_prefill, of_decode] = [Role::Prefill, Role::Decode].map(|role| c.policy_of(role).name());
            policy = match () {
                () if regular > 0 => format!("{policy}, prefill by {of_prefill}, decode by {of_decode}"),
                () if of_prefill == of_decode => of_prefill.to_owned(),
                () => format!("prefill by {of_prefill}, decode by {of_decode}"),
            };
        }
        let listen = SocketAddr::new(c.host, c.port);
        let metrics = SocketAddr::new(c.metrics_host, c.metrics_port);
        let source = self.file.as_deref().unwrap_or("no file");
        format!("ok ({source}): {workers}, {policy}, clients on {listen}, metrics on {metrics}")
    }

    /// The configuration as JSON: options by key, with the values of the TOML, and what the tables hold. Secrets that are
    /// set are `"(hidden)"`.
    pub fn to_json(&self) -> Json {
        let mut all = Map::new();
        for setting in self.settings.iter().filter(|s| !matches!(s.row.kind, Kind::Workers(_))) {
            all.insert(setting.row.key.to_owned(), setting.shown.as_deref().map_or(Json::Null, json));
        }
        let worker = |w: &WorkerSpec| {
            json!({
                "url": w.url, "role": w.role.name(), "backend": w.backend.name(), "group": w.group,
                "bootstrap_port": w.bootstrap_port, "dp_size": w.dp_size, "models": w.models,
                "health_endpoint": w.health_endpoint, "health_timeout_secs": w.health_timeout.map(|t| t.as_secs_f64()),
                "health_interval_secs": w.health_interval.map(|t| t.as_secs_f64()),
                "health_failure_threshold": w.health_failures, "health_success_threshold": w.health_successes,
                "api_key": w.api_key.as_ref().map(|_| HIDDEN), "labels": w.labels, "expand": w.expand,
            })
        };
        all.insert("workers".into(), self.config.workers.iter().map(worker).collect());
        let route = |r: &ExtraRoute| json!({"path": r.path, "methods": r.methods});
        all.insert("extra_routes".into(), self.config.extra_routes.iter().map(route).collect());
        Json::Object(all)
    }

    /// The configuration as TOML. Read again it gives the same, but for API keys and secrets, which are left out.
    pub fn to_toml(&self) -> String {
        let mut out = String::new();
        for section in Section::ALL {
            let _ = writeln!(out, "\n# {}", section.title());
            for setting in self.settings.iter().filter(|s| s.row.section == *section) {
                let line = match &setting.shown {
                    Some(shown)
                        if matches!(setting.row.kind, Kind::Workers(_)) && setting.origin == Origin::Default =>
                    {
                        format!("# {} = {shown}", setting.row.key)
                    }
                    Some(_) if matches!(setting.row.kind, Kind::Secret(_) | Kind::Secrets(_)) => {
                        format!("# {} is set, and not shown", setting.row.key)
                    }
                    Some(shown) => format!("{} = {shown}", setting.row.key),
                    None => format!("# {} is not set", setting.row.key),
                };
                push(&mut out, &line, &setting.origin);
            }
        }
        for worker in &self.tables {
            push(&mut out, "\n[[workers]]", &worker.origin);
            let _ = writeln!(out, "url = {}", toml_text(&worker.value.url));
            let _ = writeln!(out, "role = {}", toml_text(worker.value.role.name()));
            let _ = writeln!(out, "backend = {}", toml_text(Engine::NAMES[worker.value.backend.engine() as usize]));
            if worker.value.role != Role::Regular {
                if let Some(connector) = worker.value.backend.connector() {
                    let _ = writeln!(out, "connector = {}", toml_text(Connector::NAMES[connector as usize]));
                }
                let _ = writeln!(out, "group = {}", toml_text(&worker.value.group));
            }
            if let Some(port) = worker.value.bootstrap_port {
                let _ = writeln!(out, "bootstrap_port = {port}");
            }
            if let Some(size) = worker.value.dp_size {
                let _ = writeln!(out, "dp_size = {size}");
            }
            if let Some(path) = &worker.value.health_endpoint {
                let _ = writeln!(out, "health_endpoint = {}", toml_text(path));
            }
            if let Some(timeout) = worker.value.health_timeout {
                let _ = writeln!(out, "health_timeout_secs = {}", timeout.as_secs_f64());
            }
            if let Some(interval) = worker.value.health_interval {
                let _ = writeln!(out, "health_interval_secs = {}", interval.as_secs_f64());
            }
            if let Some(failures) = worker.value.health_failures {
                let _ = writeln!(out, "health_failure_threshold = {failures}");
            }
            if let Some(successes) = worker.value.health_successes {
                let _ = writeln!(out, "health_success_threshold = {successes}");
            }
            if worker.value.expand {
                out.push_str("expand = true\n");
            }
            if !worker.value.labels.is_empty() {
                let label = |(name, value): (&String, &String)| format!("{} = {}", toml_text(name), toml_text(value));
                let labels: Vec<String> = worker.value.labels.iter().map(label).collect();
                let _ = writeln!(out, "labels = {{ {} }}", labels.join(", "));
            }
            if !worker.value.models.is_empty() {
                let _ = writeln!(out, "models = {}", toml_list(&worker.value.models));
            }
            if worker.value.api_key.is_some() {
                out.push_str("# api_key is set, and not shown\n");
            }
        }
        for worker in &self.found {
            push(&mut out, &format!("\n# worker {}", worker.value.url), &worker.origin);
        }
        for route in &self.extra_routes {
            push(&mut out, "\n[[extra_routes]]", &route.origin);
            let _ = writeln!(out, "path = {}", toml_text(&route.value.path));
            if !route.value.methods.is_empty() {
                let _ = writeln!(out, "methods = {}", toml_list(&route.value.methods));
            }
        }
        out.trim_start().to_owned()
    }
}

/// What stands in the place of a secret.
const HIDDEN: &str = "(hidden)";

/// A value in TOML's spelling as JSON.
fn json(shown: &str) -> Json {
    fn of(value: &Value) -> Json {
        match value {
            Value::String(text) => text.value().as_str().into(),
            Value::Integer(n) => (*n.value()).into(),
            Value::Float(n) => (*n.value()).into(),
            Value::Boolean(on) => (*on.value()).into(),
            Value::Array(items) => items.iter().map(of).collect(),
            Value::Datetime(_) | Value::InlineTable(_) => Json::Null,
        }
    }
    shown.parse().map_or(Json::Null, |value| of(&value))
}

fn push(out: &mut String, line: &str, origin: &Origin) {
    let _ = writeln!(out, "{line:<ORIGIN_COLUMN$} # {origin}");
}
