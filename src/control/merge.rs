//! The metrics of many engines as one page.
//!
//! Takes each engine's exposition in the text format of Prometheus, gives one in which every sample says whose it is and
//! every family stands once. Never passes on a line that it does not understand: one engine's nonsense would make the
//! page useless for all.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::exposition::escape;

/// Media type of the page.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Kinds of families that the format knows.
const KINDS: [&str; 5] = ["counter", "gauge", "histogram", "summary", "untyped"];
/// What the names of samples add to that of their family; the last one is OpenMetrics'.
const SUFFIXES: [&str; 5] = ["_bucket", "_sum", "_count", "_created", "_total"];

/// Families by name.
#[derive(Debug, Default)]
pub struct Page {
    families: BTreeMap<String, Family>,
}

#[derive(Debug, Default)]
struct Family {
    help: String,
    kind: String,
    samples: String,
}

impl Page {
    /// Adds what an engine says; gives how many lines of it were not understood, or contradict what others said of a
    /// family.
    pub fn add(&mut self, worker: &str, text: &str) -> usize {
        let label = format!("worker=\"{}\"", escape(worker));
        let mut dropped = 0;
        // The family that the last head opened, and whether its samples can be taken.
        let mut open = (String::new(), false);
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            if let Some(comment) = line.strip_prefix('#') {
                if let Some((name, is_good)) = self.head(comment.trim_start()) {
                    dropped += usize::from(!is_good);
                    let same = open.0 == name;
                    open = (name.to_owned(), is_good && (!same || open.1));
                }
                continue;
            }
            let Some(sample) = Sample::parse(line) else {
                dropped += 1;
                continue;
            };
            let in_open = sample
                .name
                .strip_prefix(open.0.as_str())
                .is_some_and(|rest| !open.0.is_empty() && (rest.is_empty() || SUFFIXES.contains(&rest)));
            let family = match (in_open, open.1) {
                (true, false) => {
                    dropped += 1;
                    continue;
                }
                (true, true) => self.families.entry(open.0.clone()).or_default(),
                (false, _) => self.families.entry(sample.name.to_owned()).or_default(),
            };
            sample.write(&mut family.samples, &label);
        }
        dropped
    }

    /// Takes a line of a family's head; its name, and whether it agrees with what is known. `None` for other comments.
    fn head<'a>(&mut self, comment: &'a str) -> Option<(&'a str, bool)> {
        let (what, rest) = comment.split_once(' ')?;
        let (name, said) = rest.trim_start().split_once(' ').unwrap_or((rest.trim(), ""));
        let said = said.trim();
        if !is_name(name) {
            return None;
        }
        match what {
            "HELP" => {
                let family = self.families.entry(name.to_owned()).or_default();
                if family.help.is_empty() {
                    // An escape that nobody knows stays one.
                    said.clone_into(&mut family.help);
                }
                Some((name, true))
            }
            "TYPE" if KINDS.contains(&said) => {
                let family = self.families.entry(name.to_owned()).or_default();
                if family.kind.is_empty() && family.samples.is_empty() {
                    said.clone_into(&mut family.kind);
                }
                Some((name, family.kind == said))
            }
            "TYPE" => Some((name, false)),
            _ => None,
        }
    }

    /// The page.
    pub fn text(&self) -> String {
        let mut page = String::new();
        for (name, family) in self.families.iter().filter(|(_, family)| !family.samples.is_empty()) {
            if !family.help.is_empty() {
                let _ = writeln!(page, "# HELP {name} {}", family.help);
            }
            let kind = if family.kind.is_empty() { "untyped" } else { &family.kind };
            let _ = writeln!(page, "# TYPE {name} {kind}");
            page.push_str(&family.samples);
        }
        page
    }
}

/// One sample, as it stands in a line; its time is left out.
pub struct Sample<'a> {
    pub name: &'a str,
    /// Between the braces.
    labels: Vec<(&'a str, &'a str)>,
    /// A number.
    pub value: &'a str,
}

impl<'a> Sample<'a> {
    /// The sample of a line; `None` for comments and for what is none.
    pub fn parse(line: &'a str) -> Option<Sample<'a>> {
        let end = line.find(['{', ' ', '\t'])?;
        let (name, mut rest) = line.split_at(end);
        let mut labels = Vec::new();
        if let Some(inner) = rest.strip_prefix('{') {
            rest = inner.trim_start();
            while !rest.starts_with('}') {
                let (label, after) = rest.split_once('=')?;
                let after = after.trim_start().strip_prefix('"')?;
                let end = closing_quote(after)?;
                labels.push((label.trim(), &after[..end]));
                rest = after[end + 1..].trim_start();
                rest = match rest.strip_prefix(',') {
                    Some(more) => more.trim_start(),
                    None if rest.starts_with('}') => rest,
                    None => return None,
                };
            }
            rest = &rest[1..];
        }
        let mut words = rest.split_ascii_whitespace();
        let value = words.next()?;
        let is_time = |word: &str| word.parse::<f64>().is_ok();
        let is_whole = words.next().is_none_or(is_time) && words.next().is_none_or(|word| word.starts_with('#'));
        let is_good = is_name(name)
            && is_whole
            && value.parse::<f64>().is_ok()
            && labels.iter().all(|(name, _)| is_name(name) && !name.contains(':'));
        is_good.then_some(Sample { name, labels, value })
    }

    /// The value of a label, as it is escaped.
    pub fn label(&self, name: &str) -> Option<&'a str> {
        self.labels.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    /// Writes it with the worker's label, which it may have had itself.
    fn write(&self, out: &mut String, worker: &str) {
        let _ = write!(out, "{}{{{worker}", self.name);
        for (name, value) in &self.labels {
            let name = if *name == "worker" { "exported_worker" } else { name };
            let _ = write!(out, ",{name}=\"{value}\"");
        }
        let _ = writeln!(out, "}} {}", self.value);
    }
}

/// Where a quoted text ends, if its escapes are known.
fn closing_quote(text: &str) -> Option<usize> {
    let mut bytes = text.bytes().enumerate();
    loop {
        match bytes.next()? {
            (at, b'"') => return Some(at),
            (_, b'\\') => drop(bytes.next().filter(|(_, b)| matches!(b, b'\\' | b'"' | b'n'))?),
            _ => {}
        }
    }
}

fn is_name(name: &str) -> bool {
    let first = |b: &u8| b.is_ascii_alphabetic() || matches!(b, b'_' | b':');
    name.as_bytes().first().is_some_and(first) && name.bytes().all(|b| first(&b) || b.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_stands_once_and_every_sample_says_whose_it_is() {
        let mut page = Page::default();
        let one = "# HELP t:x Some \\n text.\n# TYPE t:x gauge\nt:x{model=\"m\"} 1.5 1700000000000\n# nothing\n\
                   # HELP h Times.\n# TYPE h histogram\nh_bucket{le=\"1.0\"} 1\nh_bucket{le=\"+Inf\"} 2\nh_sum 3\nh_count 2\n";
        let two =
            "# TYPE t:x gauge\nt:x{ model=\"a,b\\\"}\" , worker=\"w\", } NaN\n# TYPE c counter\nc_total 7\nloose 1\n";
        assert_eq!((page.add("http://a:1", one), page.add("q\"", two)), (0, 0));
        let wanted = "# TYPE c counter\nc_total{worker=\"q\\\"\"} 7\n\
                      # HELP h Times.\n# TYPE h histogram\nh_bucket{worker=\"http://a:1\",le=\"1.0\"} 1\n\
                      h_bucket{worker=\"http://a:1\",le=\"+Inf\"} 2\nh_sum{worker=\"http://a:1\"} 3\n\
                      h_count{worker=\"http://a:1\"} 2\n\
                      # TYPE loose untyped\nloose{worker=\"q\\\"\"} 1\n\
                      # HELP t:x Some \\n text.\n# TYPE t:x gauge\nt:x{worker=\"http://a:1\",model=\"m\"} 1.5\n\
                      t:x{worker=\"q\\\"\",model=\"a,b\\\"}\",exported_worker=\"w\"} NaN\n";
        assert_eq!(page.text(), wanted);
    }

    #[test]
    fn nonsense_and_contradictions_are_left_out() {
        let mut page = Page::default();
        page.add("a", "# TYPE x gauge\nx 1\n# TYPE y counter\ny 1\n");
        let bad = [
            "# TYPE x counter",
            "x_total 2",
            "x 3",
            "# TYPE y nonsense",
            "y 4",
            "z{a=\"b} 1",
            "z{a=b} 1",
            "z{a=\"\\q\"} 1",
            "z{1=\"b\"} 1",
            "z",
            "z one",
            "z 1 2 3",
            "1z 1",
            "<html>",
        ];
        assert_eq!(page.add("b", &bad.join("\n")), bad.len());
        assert_eq!(page.text(), "# TYPE x gauge\nx{worker=\"a\"} 1\n# TYPE y counter\ny{worker=\"a\"} 1\n");
    }
}
