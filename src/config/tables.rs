//! The tables that only the file has: `[[workers]]` and `[[extra_routes]]`.
//!
//! Takes TOML items, gives checked workers and routes with their places. Never quotes an API key.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::Range;
use std::time::Duration;

use toml_edit::{Item, TableLike, Value};

use super::fields::{PROBE_SECS, THRESHOLD, api_key, connector, engine, group, label, model, role, target};
use super::mistakes::{Mistake, Origin, Wrong, nearest, quote};
use super::routes::{ROUTES, is_segment};
use super::toml::{FromFile, Places, article};
use super::workers::{Draft, NO_PORT};
use super::{ExtraRoute, Role, WorkerSpec, WorkerUrl};
use crate::limits::{MAX_DP_SIZE, MAX_LABELS, MAX_MODELS_PER_WORKER, MAX_TARGET_BYTES};

/// A value and its place in the file.
#[derive(Clone, Debug)]
pub struct Placed<T> {
    pub value: T,
    pub origin: Origin,
}

const WORKER_KEYS: [&str; 16] = [
    "url",
    "api_key",
    "models",
    "role",
    "bootstrap_port",
    "group",
    "backend",
    "connector",
    "dp_size",
    "health_endpoint",
    "health_timeout_secs",
    "expand",
    "health_interval_secs",
    "health_failure_threshold",
    "health_success_threshold",
    "labels",
];
const ROUTE_KEYS: [&str; 2] = ["path", "methods"];
const METHODS: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

/// Reads all `[[workers]]`.
pub fn workers(item: &Item, place: Origin, places: &Places, out: &mut FromFile) {
    for (table, span) in tables("workers", item, place, out) {
        let mut entry = Entry { table, places, place: places.at(span), mistakes: Vec::new() };
        entry.only(&WORKER_KEYS);
        let url = entry.required("url", |text| WorkerUrl::parse(text).map(|url| url.to_string()));
        let api_key = entry.text("api_key", api_key);
        let models = entry.list("models", model);
        if models.len() > MAX_MODELS_PER_WORKER {
            entry.wrong(
                "models",
                format!("lists {} models", models.len()),
                format!("list at most {MAX_MODELS_PER_WORKER}"),
            );
        }
        let role = entry.text("role", role).unwrap_or(Role::Regular);
        let bootstrap_port = entry.port("bootstrap_port");
        let group = entry.text("group", group).unwrap_or_default();
        let engine = entry.text("backend", engine);
        let connector = entry.text("connector", connector);
        let dp_size = entry.whole("dp_size", 1, MAX_DP_SIZE.into(), "a whole number").map(|size| size as u32);
        let health_endpoint = entry.text("health_endpoint", |text| target(text).map(str::to_owned));
        let [health_timeout, health_interval] =
            ["health_timeout_secs", "health_interval_secs"].map(|key| entry.seconds(key, PROBE_SECS.0, PROBE_SECS.1));
        let [health_failures, health_successes] = ["health_failure_threshold", "health_success_threshold"]
            .map(|key| entry.whole(key, THRESHOLD.0, THRESHOLD.1, "a whole number").map(|n| n as u32));
        let labels = entry.labels("labels");
        let expand = entry.switch("expand");
        let is_address = |url: &String| WorkerUrl::parse(url).is_ok_and(|url| url.host.parse::<IpAddr>().is_ok());
        if expand && url.as_ref().is_some_and(is_address) {
            entry.wrong("expand", "is for names, and this worker is given by its address", "leave it out");
        }
        for (key, belongs) in [
            ("bootstrap_port", role == Role::Prefill),
            ("group", role != Role::Regular),
            ("connector", role != Role::Regular),
        ] {
            if entry.table.contains_key(key) && !belongs {
                let whose = if key == "bootstrap_port" { "prefill workers" } else { "prefill and decode workers" };
                entry.wrong(
                    key,
                    format!("is for {whose}, and this one is {}", role.name()),
                    "leave it out, or set role",
                );
            }
        }
        let origin = entry.place_of("url");
        let connector = connector.map(|value| Placed { value, origin: entry.place_of("connector") });
        out.mistakes.append(&mut entry.mistakes);
        if let Some(url) = url {
            let spec = WorkerSpec {
                role,
                models,
                api_key,
                group,
                bootstrap_port,
                dp_size,
                health_endpoint,
                health_timeout,
                expand,
                health_interval,
                health_failures,
                health_successes,
                labels,
                ..WorkerSpec::new(url)
            };
            out.workers.push(Placed { value: Draft { spec, engine, connector }, origin });
        }
    }
}

/// Reads all `[[extra_routes]]`.
pub fn extra_routes(item: &Item, place: Origin, places: &Places, out: &mut FromFile) {
    for (table, span) in tables("extra_routes", item, place, out) {
        let mut entry = Entry { table, places, place: places.at(span), mistakes: Vec::new() };
        entry.only(&ROUTE_KEYS);
        let path = entry.required("path", |text| route_path(text).map(|()| text.to_owned()));
        let methods = entry.list("methods", method);
        let origin = entry.place_of("path");
        out.mistakes.append(&mut entry.mistakes);
        let Some(path) = path else { continue };
        if let Some(other) = out.extra_routes.iter().find(|r| overlap(&r.value.path, &path)) {
            let wrong =
                Wrong::new(format!("{path} overlaps with {} at {}", other.value.path, other.origin), "leave one");
            out.mistakes.push(wrong.at(&origin, "path"));
            continue;
        }
        out.extra_routes.push(Placed { value: ExtraRoute { path, methods }, origin });
    }
}

type Spanned<'a> = (&'a dyn TableLike, Option<Range<usize>>);

/// The tables of `[[key]]`, or of `key = [{…}]`.
fn tables<'a>(key: &str, item: &'a Item, place: Origin, out: &mut FromFile) -> Vec<Spanned<'a>> {
    let mut found: Vec<Spanned<'a>> = Vec::new();
    let good = match item {
        Item::ArrayOfTables(all) => {
            found.extend(all.iter().map(|t| (t as &dyn TableLike, t.span())));
            true
        }
        Item::Value(Value::Array(all)) => {
            found.extend(all.iter().filter_map(|v| Some((v.as_inline_table()? as &dyn TableLike, v.span()))));
            found.len() == all.len()
        }
        _ => false,
    };
    if !good {
        out.mistakes.push(Wrong::new("is no list of tables", format!("begin each with [[{key}]]")).at(&place, key));
    }
    found
}

/// One table while it is read.
struct Entry<'a> {
    table: &'a dyn TableLike,
    places: &'a Places<'a>,
    place: Origin,
    mistakes: Vec<Mistake>,
}

impl Entry<'_> {
    fn place_of(&self, key: &str) -> Origin {
        match self.table.get(key).and_then(Item::span) {
            Some(span) => self.places.at(Some(span)),
            None => self.place.clone(),
        }
    }

    fn wrong(&mut self, key: &str, what: impl Into<String>, fix: impl Into<String>) {
        let mistake = Wrong::new(what, fix).at(&self.place_of(key), key);
        self.mistakes.push(mistake);
    }

    fn only(&mut self, known: &[&str]) {
        for (key, item) in self.table.iter().filter(|(key, _)| !known.contains(key)) {
            let span = self.table.key(key).and_then(toml_edit::Key::span).or_else(|| item.span());
            let fix = match nearest(key, known.iter().copied()) {
                Some(near) => format!("did you mean {near}?"),
                None => format!("the keys are {}", known.join(", ")),
            };
            self.mistakes.push(Mistake::new(self.places.at(span), format!("{key:?}: no such key"), fix));
        }
    }

    fn required<T>(&mut self, key: &str, read: impl Fn(&str) -> Result<T, Wrong>) -> Option<T> {
        if self.table.get(key).is_none() {
            self.wrong(key, "is missing", format!("add {key} = \"…\""));
        }
        self.text(key, read)
    }

    fn text<T>(&mut self, key: &str, read: impl Fn(&str) -> Result<T, Wrong>) -> Option<T> {
        let item = self.table.get(key)?;
        let Some(text) = item.as_str() else {
            self.wrong(key, format!("is {}", item.as_value().map_or("a table", article)), "give a text in quotes");
            return None;
        };
        read(text).map_err(|wrong| self.wrong(key, wrong.what, wrong.fix)).ok()
    }

    fn whole(&mut self, key: &str, min: u64, max: u64, what: &str) -> Option<u64> {
        let item = self.table.get(key)?;
        let number = item.as_integer().and_then(|n| u64::try_from(n).ok()).filter(|n| (min..=max).contains(n));
        if number.is_none() {
            let is = match item.as_integer() {
                Some(n) => format!("{n} is out of range"),
                None => format!("is {}", item.as_value().map_or("a table", article)),
            };
            self.wrong(key, is, format!("give {what} from {min} to {max}"));
        }
        number
    }

    fn seconds(&mut self, key: &str, min: f64, max: f64) -> Option<Duration> {
        let item = self.table.get(key)?;
        let number = item.as_float().or_else(|| item.as_integer().map(|n| n as f64));
        let good = number.filter(|n| (min..=max).contains(n));
        if good.is_none() {
            let is = match number {
                Some(n) => format!("{n} is out of range"),
                None => format!("is {}", item.as_value().map_or("a table", article)),
            };
            self.wrong(key, is, format!("give seconds from {min} to {max}"));
        }
        good.map(Duration::from_secs_f64)
    }

    fn switch(&mut self, key: &str) -> bool {
        let Some(item) = self.table.get(key) else { return false };
        item.as_bool().unwrap_or_else(|| {
            self.wrong(key, format!("is {}", item.as_value().map_or("a table", article)), "give true or false");
            false
        })
    }

    /// A port, or "none" for the engine's own default.
    fn port(&mut self, key: &str) -> Option<u16> {
        if self.table.get(key).and_then(Item::as_str) == Some(NO_PORT) {
            return None;
        }
        self.whole(key, 1, 65535, "\"none\", or a port").map(|port| port as u16)
    }

    /// A table of texts.
    fn labels(&mut self, key: &str) -> BTreeMap<String, String> {
        let Some(item) = self.table.get(key) else { return BTreeMap::new() };
        let Some(table) = item.as_table_like() else {
            self.wrong(key, "is no table", format!("write {key} = {{ name = \"…\" }}"));
            return BTreeMap::new();
        };
        if table.len() > MAX_LABELS {
            self.wrong(key, format!("has {} labels", table.len()), format!("give at most {MAX_LABELS}"));
        }
        let mut labels = BTreeMap::new();
        for (name, value) in table.iter() {
            let text = value.as_str().ok_or_else(|| Wrong::new(format!("{name:?} is no text"), "give texts in quotes"));
            match text.and_then(|text| Ok((label(name)?, label(text)?))) {
                Ok((name, value)) => drop(labels.insert(name, value)),
                Err(wrong) => self.wrong(key, wrong.what, wrong.fix),
            }
        }
        labels
    }

    fn list(&mut self, key: &str, read: impl Fn(&str) -> Result<String, Wrong>) -> Vec<String> {
        let Some(item) = self.table.get(key) else { return Vec::new() };
        let Some(items) = item.as_array() else {
            self.wrong(key, "is no list", format!("write {key} = [\"…\"]"));
            return Vec::new();
        };
        let mut out: Vec<String> = Vec::new();
        for value in items {
            let text = value
                .as_str()
                .ok_or_else(|| Wrong::new(format!("an item is {}", article(value)), "list texts in quotes"));
            let read = text.and_then(&read).and_then(|text| match out.contains(&text) {
                true => Err(Wrong::new(format!("{} is listed twice", quote(&text)), "list it once")),
                false => Ok(text),
            });
            match read {
                Ok(text) => out.push(text),
                Err(wrong) => self.mistakes.push(wrong.at(&self.places.at(value.span()), key)),
            }
        }
        out
    }
}

fn method(text: &str) -> Result<String, Wrong> {
    if METHODS.contains(&text) {
        return Ok(text.to_owned());
    }
    let upper = text.to_ascii_uppercase();
    let fix = match METHODS.contains(&upper.as_str()) {
        true => format!("write {upper}"),
        false => format!("give some of {}", METHODS.join(", ")),
    };
    Err(Wrong::new(format!("{} is no method that is passed on", quote(text)), fix))
}

fn route_path(path: &str) -> Result<(), Wrong> {
    let wrong = |what: &str, fix: &str| Err(Wrong::new(format!("{} {what}", quote(path)), fix));
    if !path.starts_with('/') {
        return wrong("does not start with /", "give the whole path");
    }
    if path.len() > MAX_TARGET_BYTES || !path.bytes().all(|b| b.is_ascii_graphic()) {
        return wrong("is no path", "percent-encode what is not visible ASCII");
    }
    if path.contains(['?', '#']) {
        return wrong("has a query or a fragment", "end it before the '?' or '#'");
    }
    if path.split('/').any(|segment| segment.contains('*') && segment != "*") {
        return wrong("has a * within a segment", "* stands for one whole segment, as in /v1/adapters/*");
    }
    if path.contains('\\') || path.to_ascii_lowercase().contains("%5c") {
        return wrong(
            "has a backslash, which a worker may take for a slash",
            "write / where the worker's path has one",
        );
    }
    if path.split('/').any(|segment| !segment.is_empty() && !is_segment(segment.as_bytes())) {
        return wrong("has a segment . or .., or an encoded slash", "give the path as the worker serves it");
    }
    if let Some(route) = ROUTES.iter().find(|route| overlap(route.path, path)) {
        return wrong(&format!("overlaps with the built-in route {}", route.path), "leave it out");
    }
    Ok(())
}

/// Whether some path fits both patterns.
fn overlap(a: &str, b: &str) -> bool {
    let (mut a, mut b) = (a.split('/'), b.split('/'));
    loop {
        match (a.next(), b.next()) {
            (None, None) => return true,
            (Some("*"), Some(segment)) | (Some(segment), Some("*")) if !segment.is_empty() => {}
            (Some(x), Some(y)) if x == y => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_patterns_are_seen() {
        for (a, b) in [("/a/*", "/a/b"), ("/a/b", "/*/b"), ("/*/c", "/b/*"), ("/a", "/a")] {
            assert!(overlap(a, b) && overlap(b, a), "{a} {b}");
        }
        for (a, b) in [("/a/*", "/a/"), ("/a/*", "/a"), ("/a/*", "/a/b/c"), ("/a", "/b")] {
            assert!(!overlap(a, b) && !overlap(b, a), "{a} {b}");
        }
    }
}
