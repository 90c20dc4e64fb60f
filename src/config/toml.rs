//! Options from the configuration file.
//!
//! Takes the file's text, gives raw options and tables with their places. Never reads a file and never stops at the
//! first mistake, except where the text is no TOML.

use std::ops::Range;

use toml_edit::{Document, Item, Value};

use super::ExtraRoute;
use super::given::Given;
use super::mistakes::{Mistake, Origin, Wrong, nearest, quote};
use super::options::{self, OPTIONS, Row};
use super::tables::{self, Placed};
use super::values::Kind;
use super::workers::Draft;

/// Keys of the tables that only the file has.
pub const WORKERS: &str = "workers";
/// See [`WORKERS`].
pub const EXTRA_ROUTES: &str = "extra_routes";

/// What the file says.
#[derive(Default)]
pub struct FromFile {
    pub given: Vec<Given>,
    pub workers: Vec<Placed<Draft>>,
    pub extra_routes: Vec<Placed<ExtraRoute>>,
    pub mistakes: Vec<Mistake>,
    /// It names workers, rightly or wrongly, or could not be read to the end.
    pub names_workers: bool,
}

/// Turns byte offsets into places of one file.
pub struct Places<'a> {
    pub name: &'a str,
    pub text: &'a str,
}

impl Places<'_> {
    /// The place where `span` begins, or the file as a whole.
    pub fn at(&self, span: Option<Range<usize>>) -> Origin {
        let name = self.name.to_owned();
        let Some(before) = span.and_then(|s| self.text.get(..s.start)) else {
            return Origin::File { name, line: 0, column: 0 };
        };
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        let line = before.bytes().filter(|b| *b == b'\n').count() + 1;
        Origin::File { name, line, column: before[line_start..].chars().count() + 1 }
    }
}

/// Reads the text of the file called `name`.
pub fn read(name: &str, text: &str) -> FromFile {
    let places = Places { name, text };
    let mut out = FromFile::default();
    let document = match Document::parse(text) {
        Ok(document) => document,
        Err(error) => {
            let mut what = error.message().lines().collect::<Vec<_>>().join(", ");
            if let Some(key) = error.span().and_then(|span| text.get(span))
                && what == "duplicate key"
            {
                what = format!("duplicate key {}", quote(key));
            }
            out.mistakes.push(Mistake::new(places.at(error.span()), format!("no TOML: {what}"), "correct the syntax"));
            out.names_workers = true;
            return out;
        }
    };
    let table = document.as_table();
    let names = |key: &str| key == WORKERS || options::find(key).is_some_and(|r| matches!(r.kind, Kind::Workers(_)));
    out.names_workers = table.iter().any(|(key, _)| names(key));
    for (key, item) in table.iter() {
        let key_span = table.key(key).and_then(toml_edit::Key::span);
        let place = places.at(key_span.or_else(|| item.span()));
        match options::find(key) {
            Some(row) => match option(row, item, &places) {
                Ok(given) => out.given.push(given),
                Err(mistake) => out.mistakes.push(mistake),
            },
            None if key == WORKERS => tables::workers(item, place, &places, &mut out),
            None if key == EXTRA_ROUTES => tables::extra_routes(item, place, &places, &mut out),
            None => out.mistakes.push(unknown(key, place)),
        }
    }
    out
}

fn unknown(key: &str, place: Origin) -> Mistake {
    if let Some(what) = options::later(key) {
        return Mistake::new(place, format!("{key}: not supported yet ({what})"), "leave it out");
    }
    let plain = key.replace('-', "_");
    let known = OPTIONS.iter().map(|row| row.key).chain([WORKERS, EXTRA_ROUTES]);
    match nearest(&plain, known) {
        Some(near) => Mistake::new(place, format!("{key:?}: no such key"), format!("did you mean {near}?")),
        None => Mistake::new(place, format!("{key:?}: no such key"), "leave it out; corelane serve --help lists all"),
    }
}

/// A key of the option table as raw texts.
fn option(row: &'static Row, item: &Item, places: &Places) -> Result<Given, Mistake> {
    let origin = places.at(item.span());
    let wrong =
        |what: &str| Wrong::new(format!("is {what}"), format!("give {}", row.kind.wants())).at(&origin, row.key);
    let value = item.as_value().ok_or_else(|| wrong("a table"))?;
    match value {
        // Whoever writes it down does not mean that everybody may come in.
        Value::Array(items) if items.is_empty() && matches!(row.kind, Kind::Secrets(_)) => Err(wrong("an empty list")),
        Value::Array(items) if row.kind.is_list() => {
            let mut texts = Vec::new();
            for item in items {
                let place = places.at(item.span());
                let text = match item {
                    Value::String(text) => text.value().to_owned(),
                    // Statuses are numbers, to whoever writes them.
                    Value::Integer(number) if matches!(row.kind, Kind::Statuses(_)) => number.value().to_string(),
                    _ => {
                        let wrong = Wrong::new(format!("an item is {}", article(item)), "list texts in quotes");
                        return Err(wrong.at(&place, row.key));
                    }
                };
                texts.push((text, place));
            }
            let (texts, places) = texts.into_iter().unzip();
            Ok(Given { row, origin, texts, places })
        }
        Value::Array(items) if matches!(row.kind, Kind::Cores(_)) => {
            let cores: Option<Vec<String>> = items.iter().map(|i| i.as_integer().map(|n| n.to_string())).collect();
            let cores = cores.ok_or_else(|| wrong("a list of other things than numbers"))?;
            Ok(Given::new(row, origin, vec![cores.join(",")]))
        }
        _ => match scalar(row.kind, value) {
            Some(text) => Ok(Given::new(row, origin, vec![text])),
            None => Err(wrong(article(value))),
        },
    }
}

/// The text of a scalar, if its TOML type suits the option.
fn scalar(kind: Kind, value: &Value) -> Option<String> {
    let number = matches!(
        kind,
        Kind::Whole { .. }
            | Kind::Micros { .. }
            | Kind::Millis { .. }
            | Kind::Bytes { .. }
            | Kind::Seconds { .. }
            | Kind::Ratio { .. }
            | Kind::Cores(_)
            | Kind::Core(_)
    );
    match value {
        Value::Boolean(on) if matches!(kind, Kind::Switch(_)) => Some(on.value().to_string()),
        Value::Integer(n) if number => Some(n.value().to_string()),
        Value::Float(n) if matches!(kind, Kind::Seconds { .. } | Kind::Ratio { .. }) => Some(n.value().to_string()),
        Value::String(text) if !matches!(kind, Kind::Switch(_)) => Some(text.value().clone()),
        _ => None,
    }
}

/// The type of a value, for mistakes.
pub fn article(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "a text",
        Value::Integer(_) => "a whole number",
        Value::Float(_) => "a number with a fraction",
        Value::Boolean(_) => "true or false",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "a list",
        Value::InlineTable(_) => "a table",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dotted_key_behind_a_broken_value_is_a_mistake() {
        let read = read("gateway.toml", "url = =\nurl. = =\n");
        assert_eq!(read.mistakes.len(), 1);
        assert!(read.mistakes[0].to_string().starts_with("gateway.toml:1:7: no TOML"), "{}", read.mistakes[0]);
    }
}
