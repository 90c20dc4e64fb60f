//! Workers that a program writes down: the file, or the directory of files, that `workers_file` names.
//!
//! Takes names and texts, gives drafts of workers with their places, or every mistake. Never takes a part of what has a
//! mistake for the whole: that is the caller's rule, and why all of them are told.

use serde_json::Value as Json;
use toml_edit::{Array, InlineTable, Item, Value};

use super::WorkerSpec;
use super::mistakes::{Mistake, Origin, Wrong, nearest, quote};
use super::source::Files;
use super::tables::{self, Placed};
use super::toml::{self, FromFile, Places, WORKERS};
use super::worker_url::WorkerUrl;
use super::workers::Draft;

/// What was found.
#[derive(Default)]
pub struct Found {
    pub workers: Vec<Placed<Draft>>,
    pub mistakes: Vec<Mistake>,
}

/// Endings of the files of a directory that are read.
pub const ENDINGS: [&str; 3] = [".toml", ".json", ".txt"];

/// Whether a directory's entry is a file of workers. Those that begin with a dot are not: editors and Kubernetes keep
/// other things there.
pub fn is_workers_file(entry: &str) -> bool {
    !entry.starts_with('.') && ENDINGS.iter().any(|ending| entry.ends_with(ending))
}

/// Reads the file called `name`, or the files of that directory in the order of their names; `origin` is where the name
/// stands.
pub fn read(name: &str, origin: &Origin, files: &impl Files) -> Found {
    let mut found = Found::default();
    let names = match files.list(name) {
        Ok(None) => vec![name.to_owned()],
        Ok(Some(mut entries)) => {
            entries.retain(|entry| is_workers_file(entry));
            entries.sort_unstable();
            entries.iter().map(|entry| format!("{}/{entry}", name.trim_end_matches('/'))).collect()
        }
        Err(error) => {
            found.mistakes.push(unreadable(name, &error, origin));
            return found;
        }
    };
    for name in names {
        match files.read_lasting(&name) {
            Ok(text) if name.ends_with(".toml") => of_toml(&name, &text, &mut found),
            Ok(text) if name.ends_with(".json") => of_json(&name, &text, &mut found),
            Ok(text) => of_lines(&name, &text, &mut found),
            Err(error) => found.mistakes.push(unreadable(&name, &error, origin)),
        }
    }
    found
}

fn unreadable(name: &str, error: &std::io::Error, origin: &Origin) -> Mistake {
    let wrong = Wrong::new(format!("cannot read {}: {error}", quote(name)), "name a readable file or directory");
    wrong.at(origin, "workers_file")
}

fn of_toml(name: &str, text: &str, found: &mut Found) {
    let FromFile { given, workers, extra_routes, mut mistakes, .. } = toml::read(name, text);
    let options = given.iter().map(|given| (given.row.key, &given.origin));
    let routes = extra_routes.iter().map(|route| ("extra_routes", &route.origin));
    for (key, origin) in options.chain(routes) {
        let what = format!("{key} does not belong into a file of workers");
        mistakes.push(Mistake::new(origin.clone(), what, "leave [[workers]] alone there"));
    }
    found.workers.extend(workers);
    found.mistakes.append(&mut mistakes);
}

fn of_json(name: &str, text: &str, found: &mut Found) {
    let place = |line, column| Origin::File { name: name.to_owned(), line, column };
    let whole = place(0, 0);
    let listed = match serde_json::from_str(text) {
        Ok(Json::Array(listed)) => listed,
        Ok(Json::Object(mut said)) if matches!(said.get(WORKERS), Some(Json::Array(_))) => {
            for key in said.keys().filter(|key| *key != WORKERS) {
                let fix =
                    nearest(key, [WORKERS]).map_or("leave it out".to_owned(), |near| format!("did you mean {near}?"));
                found.mistakes.push(Mistake::new(whole.clone(), format!("{}: no such key", quote(key)), fix));
            }
            match said.remove(WORKERS) {
                Some(Json::Array(listed)) => listed,
                _ => Vec::new(),
            }
        }
        Ok(_) => {
            let fix = "write a list of addresses or of objects, alone or as \"workers\"";
            return found.mistakes.push(Mistake::new(whole, "is no list of workers", fix));
        }
        Err(error) => {
            let place = place(error.line(), error.column().max(1));
            return found.mistakes.push(Mistake::new(place, format!("no JSON: {error}"), "correct the syntax"));
        }
    };
    let mut workers = Array::new();
    for worker in listed {
        workers.push(match worker {
            Json::String(url) => Value::from(InlineTable::from_iter([("url", url)])),
            // What is no table is told as such.
            other => value(other).unwrap_or_else(|| Value::from(false)),
        });
    }
    let mut out = FromFile::default();
    tables::workers(&Item::Value(Value::Array(workers)), whole, &Places { name, text }, &mut out);
    found.workers.append(&mut out.workers);
    found.mistakes.append(&mut out.mistakes);
}

/// A value of JSON as one of TOML; nothing for null, which stands for what is left out.
fn value(json: Json) -> Option<Value> {
    Some(match json {
        Json::Null => return None,
        Json::Bool(on) => Value::from(on),
        Json::Number(n) => n.as_i64().map_or_else(|| Value::from(n.as_f64().unwrap_or(f64::NAN)), Value::from),
        Json::String(text) => Value::from(text),
        Json::Array(items) => Value::Array(items.into_iter().filter_map(value).collect()),
        Json::Object(members) => {
            let members = members.into_iter().filter_map(|(key, json)| Some((key, value(json)?)));
            Value::InlineTable(members.collect())
        }
    })
}

fn of_lines(name: &str, text: &str, found: &mut Found) {
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let origin = Origin::File { name: name.to_owned(), line: at + 1, column: 1 };
        match WorkerUrl::parse(line) {
            Ok(url) => {
                let spec = WorkerSpec::new(url.to_string());
                found.workers.push(Placed { value: Draft { spec, engine: None, connector: None }, origin });
            }
            Err(wrong) => found.mistakes.push(wrong.at(&origin, "worker")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::super::{Config, Loaded, flags};
    use super::*;

    /// Files of a directory called `d`.
    struct Shelf(Vec<(&'static str, &'static str)>);

    impl Files for Shelf {
        fn read(&self, name: &str) -> io::Result<String> {
            let (_, text) = self.0.iter().find(|(known, _)| *known == name).ok_or(io::ErrorKind::NotFound)?;
            Ok((*text).to_owned())
        }

        fn list(&self, name: &str) -> io::Result<Option<Vec<String>>> {
            let within = self.0.iter().filter_map(|(known, _)| Some(known.strip_prefix("d/")?.to_owned()));
            Ok((name.trim_end_matches('/') == "d").then(|| within.collect()))
        }
    }

    fn load(file: &str, shelf: Vec<(&'static str, &'static str)>, more: &[&str]) -> Result<Loaded, Vec<String>> {
        let args: Vec<String> = ["--workers-file", file].iter().chain(more).map(|text| (*text).to_owned()).collect();
        let flags = flags::read(&flags::command("serve", "Serves."), &args).expect("clap has nothing to say");
        super::super::load(flags, &[], Shelf(shelf)).map_err(|all| all.iter().map(Mistake::to_string).collect())
    }

    fn urls(config: &Config) -> Vec<&str> {
        config.workers.iter().map(|worker| &*worker.url).collect()
    }

    #[test]
    fn workers_come_as_lines_toml_and_json() {
        let lines = load("w", vec![("w", "# ours\nhttp://a\n\n http://b:2 \n")], &[]).unwrap();
        assert_eq!(urls(&lines.config), ["http://a:80", "http://b:2"]);
        assert!(lines.to_toml().contains("workers_file = \"w\"") && lines.to_toml().contains("# worker http://b:2"));
        let toml = "[[workers]]\nurl = 'http://a'\napi_key = 'k'";
        let json = r#"["http://a", {"url": "http://b", "models": ["m"], "dp_size": 2, "api_key": null, "health_timeout_secs": 1.5}]"#;
        let wrapped = r#"{"workers": [{"url": "http://a"}]}"#;
        let loaded = load("w.toml", vec![("w.toml", toml)], &[]).unwrap();
        assert_eq!(loaded.config.workers[0].api_key.as_deref(), Some("k"));
        let loaded = load("w.json", vec![("w.json", json)], &[]).unwrap();
        assert_eq!(urls(&loaded.config), ["http://a:80", "http://b:80"]);
        let worker = &loaded.config.workers[1];
        assert_eq!((worker.dp_size, worker.api_key.as_deref(), worker.models.len()), (Some(2), None, 1));
        assert_eq!(worker.health_timeout.unwrap().as_millis(), 1500);
        assert_eq!(urls(&load("w.json", vec![("w.json", wrapped)], &[]).unwrap().config), ["http://a:80"]);
        assert!(load("w.json", vec![("w.json", "[]")], &[]).unwrap().config.workers.is_empty(), "they may come later");
    }

    #[test]
    fn a_directory_is_read_in_order_and_adds_to_other_workers() {
        let shelf = vec![
            ("d/b.json", r#"["http://b"]"#),
            ("d/a.txt", "http://a"),
            ("d/..data.json", "?"),
            ("d/notes", "?"),
            ("d/.swp.toml", "?"),
        ];
        let loaded = load("d/", shelf, &["--worker-urls", "http://w"]).unwrap();
        assert_eq!(urls(&loaded.config), ["http://w:80", "http://a:80", "http://b:80"]);
    }

    #[test]
    fn mistakes_are_told_with_their_places() {
        for (name, text, says) in [
            ("w", "http://a\nhttps://b", "w:2:1: worker: \"https://b\" asks for TLS"),
            ("w", "http://a\nhttp://a", "w:2:1: worker: http://a:80 is given twice (first at w:1:1)"),
            (
                "w.toml",
                "port = 1\n[[workers]]\nurl = 'http://a'",
                "w.toml:1:8: port does not belong into a file of workers",
            ),
            ("w.toml", "[[workers]]\nurl = 'http://a'\nrole = 'x'", "w.toml:3:8: role: \"x\" is not known"),
            ("w.json", "[", "w.json:1:1: no JSON"),
            ("w.json", "7", "w.json: is no list of workers"),
            ("w.json", "[7]", "w.json: workers: is no list of tables"),
            ("w.json", r#"{"workers": [], "worker": 1}"#, "w.json: \"worker\": no such key; did you mean workers?"),
            (
                "w.json",
                r#"[{"url": "http://a", "modles": []}]"#,
                "w.json: \"modles\": no such key; did you mean models?",
            ),
            (
                "w.json",
                r#"[{"url": "http://a", "role": "prefill"}]"#,
                "w.json: worker: http://a:80 is a prefill worker without",
            ),
        ] {
            let told = load(name, vec![(name, text)], &[]).err().expect(text);
            assert!(told.len() == 1 && told[0].starts_with(says), "{text}: {told:#?}");
        }
        let told = load("nowhere", Vec::new(), &[]).err().unwrap();
        assert!(told.len() == 1 && told[0].starts_with("--workers-file: cannot read \"nowhere\""), "{told:#?}");
    }
}
