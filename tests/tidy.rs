//! The sources keep the order of the house: imports run downward, shared state stands in few places.
//!
//! Takes the text of every file under `src/`, gives every breach with its line. Checks direction and ownership
//! only, never sizes or taste. Rules are plain functions over (path, text), and each is shown to fail on a small
//! example. Items under `#[cfg(test)]`, and files named `tests.rs`, are exempt from all rules but those on contracts
//! and `unsafe`.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// Lines that break a rule for a reason: rule, file, the line without its indentation, the reason.
const EXCEPTIONS: &[(&str, &str, &str, &str)] = &[
    ("sharing", "lane/spawn.rs", "use std::sync::Arc;", "a waker must be sendable; this one never leaves its thread"),
    (
        "sharing",
        "lane/spawn.rs",
        "use std::sync::atomic::{AtomicBool, Ordering};",
        "a waker must be sendable; this one never leaves its thread",
    ),
    (
        "sharing",
        "lane/spawn.rs",
        "aside: Arc<AtomicBool>,",
        "a waker must be sendable; this one never leaves its thread",
    ),
    (
        "sharing",
        "lane/spawn.rs",
        "noted = Some(Waker::from(Arc::new(Noted { aside: aside.clone(), task: cx.waker().clone() })));",
        "a waker must be sendable; this one never leaves its thread",
    ),
    (
        "sharing",
        "lane/spawn.rs",
        "fn wake(self: Arc<Self>) {",
        "a waker must be sendable; this one never leaves its thread",
    ),
    (
        "sharing",
        "lane/wire/bufring.rs",
        "use std::sync::atomic::{AtomicU16, Ordering};",
        "the tail of the buffer ring is read by the kernel",
    ),
    (
        "sharing",
        "lane/wire/bufring.rs",
        "let at = BufRingEntry::tail(self.entries.as_ptr()).cast::<AtomicU16>();",
        "the same",
    ),
    ("import", "flow/accept.rs", "use crate::flow::Flow;", "accept starts the tasks of a flow"),
];

/// A breach of a rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Clone)]
struct Breach {
    rule: &'static str,
    path: String,
    line: usize,
    what: String,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "src/{}:{}: {}: {}", self.path, self.line, self.rule, self.what)
    }
}

// ── reading sources ─────────────────────────────────────────────────────────────────────────────────────────────

/// The text with comments and the insides of literals blanked; lines stay where they are.
fn without_prose(text: &str) -> String {
    let b = text.as_bytes();
    let mut out = Vec::with_capacity(b.len());
    let mut at = 0;
    while at < b.len() {
        let rest = &b[at..];
        let word_before = at > 0 && (b[at - 1].is_ascii_alphanumeric() || b[at - 1] == b'_');
        let len = if rest.starts_with(b"//") {
            rest.iter().position(|c| *c == b'\n').unwrap_or(rest.len())
        } else if rest.starts_with(b"/*") {
            block_comment(rest)
        } else if rest[0] == b'"' {
            quoted(rest)
        } else if !word_before && let Some(len) = raw_or_byte_string(rest) {
            len
        } else if rest[0] == b'\'' {
            character(rest)
        } else {
            out.push(rest[0]);
            at += 1;
            continue;
        };
        out.extend(rest[..len].iter().map(|c| if *c == b'\n' { b'\n' } else { b' ' }));
        at += len;
    }
    String::from_utf8(out).expect("what is blanked is ASCII, what is kept is whole")
}

fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        match &rest[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => {
                (depth, at) = (depth - 1, at + 2);
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    rest.len()
}

fn quoted(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// `r"…"`, `r#"…"#`, `b"…"`, `br"…"`, `c"…"`; a raw identifier is none.
fn raw_or_byte_string(rest: &[u8]) -> Option<usize> {
    let prefix = rest.iter().take_while(|c| matches!(c, b'b' | b'r' | b'c')).count();
    if prefix == 0 || prefix > 2 {
        return None;
    }
    let hashes = rest[prefix..].iter().take_while(|c| **c == b'#').count();
    if rest.get(prefix + hashes) != Some(&b'"') {
        return None;
    }
    if !rest[..prefix].contains(&b'r') {
        return (hashes == 0).then(|| prefix + quoted(&rest[prefix..]));
    }
    let end: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let from = prefix + hashes + 1;
    let found = rest[from..].windows(end.len()).position(|w| w == end);
    Some(found.map_or(rest.len(), |at| from + at + end.len()))
}

/// A character, or only the quote of a lifetime.
fn character(rest: &[u8]) -> usize {
    if rest.get(1) == Some(&b'\\') {
        let end = rest[2..].iter().skip(1).position(|c| *c == b'\'');
        return end.map_or(1, |at| at + 4);
    }
    let width = match rest.get(1) {
        Some(0xf0..) => 4,
        Some(0xe0..) => 3,
        Some(0xc0..) => 2,
        _ => 1,
    };
    if rest.get(1 + width) == Some(&b'\'') { width + 2 } else { 1 }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Token {
    text: String,
    line: usize,
}

/// Words, `::`, and every other character by itself.
fn tokens(code: &str) -> Vec<Token> {
    let mut out = Vec::new();
    let mut line = 1;
    let mut chars = code.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        if c == '\n' {
            line += 1;
        } else if c.is_alphanumeric() || c == '_' {
            let mut end = at + c.len_utf8();
            while let Some((at, c)) = chars.next_if(|(_, c)| c.is_alphanumeric() || *c == '_') {
                end = at + c.len_utf8();
            }
            out.push(Token { text: code[at..end].to_owned(), line });
        } else if c == ':' && chars.next_if(|(_, c)| *c == ':').is_some() {
            out.push(Token { text: "::".to_owned(), line });
        } else if !c.is_whitespace() {
            out.push(Token { text: c.to_string(), line });
        }
    }
    out
}

/// The tokens without the items that stand under `#[cfg(test)]`.
fn without_tests(all: Vec<Token>) -> Vec<Token> {
    let mut out = Vec::with_capacity(all.len());
    let mut at = 0;
    while at < all.len() {
        let is = |from: usize, want: &[&str]| {
            want.iter().enumerate().all(|(i, w)| all.get(from + i).is_some_and(|t| t.text == *w))
        };
        let marked = is(at, &["#", "[", "cfg", "(", "test", ")", "]"])
            || is(at, &["#", "[", "cfg", "(", "all", "(", "test"])
            || is(at, &["#", "[", "test", "]"]);
        if marked {
            at = end_of_item(&all, at)
        } else {
            out.push(all[at].clone())
        }
        at += usize::from(!marked);
    }
    out
}

/// Behind the item whose first attribute begins at `at`.
fn end_of_item(all: &[Token], mut at: usize) -> usize {
    while all.get(at).is_some_and(|t| t.text == "#") {
        at = behind_brackets(all, at + 1);
    }
    while let Some(token) = all.get(at) {
        match token.text.as_str() {
            ";" => return at + 1,
            "{" => return behind_brackets(all, at),
            "(" | "[" => at = behind_brackets(all, at),
            _ => at += 1,
        }
    }
    at
}

/// Behind the bracket that closes the one at `at`.
fn behind_brackets(all: &[Token], mut at: usize) -> usize {
    let mut depth = 0usize;
    while let Some(token) = all.get(at) {
        at += 1;
        match token.text.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    at
}

/// The tokens that rules look at.
fn read(text: &str) -> Vec<Token> {
    without_tests(tokens(&without_prose(text)))
}

/// Whether a whole file is test code; [`hiding`] makes sure that it is compiled as such.
fn is_test(path: &str) -> bool {
    path.ends_with("/tests.rs")
}

/// The module of a file: `flow/inspect/scan.rs` is `flow::inspect::scan`; crate root and main are empty.
fn module(path: &str) -> Vec<String> {
    let stem = path.trim_end_matches(".rs");
    if matches!(stem, "lib" | "main") { Vec::new() } else { stem.split('/').map(str::to_owned).collect() }
}

/// A path into the crate, from its root.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Import {
    to: Vec<String>,
    line: usize,
}

/// Every path into the crate: `use` trees, and paths in line, from `crate`, `corelane`, `self`, `super`, and those
/// that `use` takes from a module declared in the same file.
fn imports(path: &str, text: &str) -> Vec<Import> {
    let all = read(text);
    let here = module(path);
    let own: BTreeSet<&str> =
        all.windows(3).filter(|w| w[0].text == "mod" && w[2].text == ";").map(|w| w[1].text.as_str()).collect();
    let mut out = Vec::new();
    // Modules inside of the file, with the depth of their bodies.
    let mut inner: Vec<(String, usize)> = Vec::new();
    let (mut depth, mut at) = (0usize, 0);
    while at < all.len() {
        let text = all[at].text.as_str();
        let next = |n: usize| all.get(at + n).map_or("", |t| t.text.as_str());
        let before = at.checked_sub(1).map_or("", |i| all[i].text.as_str());
        match text {
            "{" => depth += 1,
            "}" => {
                depth = depth.saturating_sub(1);
                inner.pop_if(|(_, at)| *at > depth);
            }
            "mod" if next(2) == "{" => inner.push((next(1).to_owned(), depth + 1)),
            "use" => {
                let mut leaves = Vec::new();
                at = use_tree(&all, at + 1, &mut Vec::new(), &mut leaves);
                let place: Vec<String> = here.iter().cloned().chain(inner.iter().map(|(m, _)| m.clone())).collect();
                out.extend(leaves.into_iter().filter_map(|(to, line)| {
                    let to = if own.contains(to[0].as_str()) {
                        place.iter().cloned().chain(to).collect()
                    } else {
                        resolve(&place, &to)?
                    };
                    Some(Import { to, line })
                }));
                continue;
            }
            "crate" | "corelane" | "self" | "super" if next(1) == "::" && before != "::" => {
                let line = all[at].line;
                let mut to = vec![text.to_owned()];
                while next_is(&all, at + 1, "::") && all.get(at + 2).is_some_and(|t| is_word(&t.text)) {
                    to.push(all[at + 2].text.clone());
                    at += 2;
                }
                let place: Vec<String> = here.iter().cloned().chain(inner.iter().map(|(m, _)| m.clone())).collect();
                out.extend(resolve(&place, &to).map(|to| Import { to, line }));
            }
            _ => {}
        }
        at += 1;
    }
    out
}

fn next_is(all: &[Token], at: usize, text: &str) -> bool {
    all.get(at).is_some_and(|t| t.text == text)
}

fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphanumeric() || c == '_')
}

/// Reads one tree of a `use`, gives the place behind it.
fn use_tree(all: &[Token], mut at: usize, prefix: &mut Vec<String>, leaves: &mut Vec<(Vec<String>, usize)>) -> usize {
    let base = prefix.len();
    let mut line = all.get(at).map_or(0, |t| t.line);
    if next_is(all, at, "::") {
        at += 1;
    }
    while let Some(token) = all.get(at) {
        match token.text.as_str() {
            "::" => at += 1,
            "{" => {
                at += 1;
                while !next_is(all, at, "}") && at < all.len() {
                    at = use_tree(all, at, prefix, leaves);
                    at += usize::from(next_is(all, at, ","));
                }
                prefix.truncate(base);
                return at + 1;
            }
            "as" => at += 2,
            "*" => (at, line) = (at + 1, token.line),
            text if is_word(text) => {
                line = token.line;
                // `use a::{self, b}`: the module itself.
                if text != "self" || prefix.is_empty() {
                    prefix.push(text.to_owned());
                }
                at += 1;
            }
            _ => break,
        }
    }
    if !prefix.is_empty() {
        leaves.push((prefix.clone(), line));
    }
    prefix.truncate(base);
    at
}

/// A path as written at a place, from the root of the crate; `None` for other crates.
fn resolve(place: &[String], path: &[String]) -> Option<Vec<String>> {
    let mut at = match path[0].as_str() {
        "crate" | "corelane" => Vec::new(),
        "self" | "super" => place.to_vec(),
        _ => return None,
    };
    for segment in path.iter() {
        match segment.as_str() {
            "crate" | "corelane" | "self" => {}
            "super" => drop(at.pop()),
            other => at.push(other.to_owned()),
        }
    }
    Some(at)
}

// ── the order ───────────────────────────────────────────────────────────────────────────────────────────────────

/// Where a module stands.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Main,
    Cli,
    Boot,
    Flow,
    Control,
    Passage,
    Room(String),
    Lane,
    Shared,
    Http1,
    Config,
    Metrics,
    Fault,
    Span,
    Limits,
    Mock,
}

/// The place of a path from the crate's root; `None` for what the order does not know.
fn place(path: &[String]) -> Option<Place> {
    Some(match path.first().map(String::as_str) {
        None => Place::Main,
        Some("cli") => Place::Cli,
        Some("boot") => Place::Boot,
        Some("flow") => match path.get(1).map(String::as_str) {
            Some("passage") => Place::Passage,
            // The walk of requests with two legs, and what it tries again: no rooms, but parts of the one file that knows
            // their order.
            Some("pair" | "retry") => Place::Flow,
            // Modules are lower-case, and `flow` itself offers types only.
            Some(room) if room.starts_with(|c: char| c.is_lowercase()) => Place::Room(room.to_owned()),
            _ => Place::Flow,
        },
        Some("control") => Place::Control,
        Some("lane") => Place::Lane,
        Some("shared") => Place::Shared,
        Some("http1") => Place::Http1,
        Some("config") => Place::Config,
        Some("metrics") => Place::Metrics,
        Some("fault") => Place::Fault,
        Some("span" | "json") => Place::Span,
        Some("limits") => Place::Limits,
        Some("mock") => Place::Mock,
        Some(_) => return None,
    })
}

/// Whether `from` may know `to`.
fn may(from: &Place, to: &Place) -> bool {
    use Place::*;
    let bottom = matches!(to, Fault | Span | Limits);
    let shared = bottom || matches!(to, Shared | Http1 | Config | Metrics);
    if from == to {
        return true;
    }
    match from {
        Main => true,
        Cli => !matches!(to, Main),
        Boot => !matches!(to, Main | Cli | Mock),
        Flow => shared || matches!(to, Passage | Room(_) | Lane),
        // Data plane and control plane meet in `shared` only.
        Control => shared,
        Passage => shared || matches!(to, Lane) || *to == Room("inspect".into()),
        // What inspect makes of a body is a part of what passes, so it cannot know that.
        Room(room) => shared || matches!(to, Lane) || (matches!(to, Passage) && room != "inspect"),
        Lane => shared,
        Shared => bottom || matches!(to, Http1 | Config | Metrics),
        Http1 | Config => bottom,
        Metrics => bottom || matches!(to, Config),
        Fault => matches!(to, Span | Limits),
        Span | Limits => false,
        Mock => false,
    }
}

/// Imports run downward.
fn upward_imports(path: &str, text: &str) -> Vec<Breach> {
    let breach = |line, what| Breach { rule: "import", path: path.to_owned(), line, what };
    if path == "lib.rs" {
        return Vec::new();
    }
    let Some(from) = place(&module(path)) else {
        return vec![breach(1, "this file has no place in the order of imports: give it one".into())];
    };
    imports(path, text)
        .into_iter()
        .filter_map(|Import { to, line }| match place(&to) {
            Some(place) if may(&from, &place) => None,
            Some(place) => Some(breach(line, format!("{from:?} must not know {place:?}: crate::{}", to.join("::")))),
            None => Some(breach(line, format!("crate::{} has no place in the order of imports", to.join("::")))),
        })
        .collect()
}

// ── ownership and manners ───────────────────────────────────────────────────────────────────────────────────────

/// Whether a file is one of the modules, or in one of their folders.
fn within(path: &str, modules: &[&str]) -> bool {
    let stem = path.trim_end_matches(".rs");
    modules.iter().any(|m| stem == *m || stem.strip_prefix(m).is_some_and(|rest| rest.starts_with('/')))
}

fn words(
    rule: &'static str,
    path: &str,
    tokens: &[Token],
    why: &str,
    bad: impl Fn(&[Token], usize) -> bool,
) -> Vec<Breach> {
    let each = (0..tokens.len()).filter(|at| bad(tokens, *at));
    each.map(|at| Breach {
        rule,
        path: path.to_owned(),
        line: tokens[at].line,
        what: format!("`{}`: {why}", tokens[at].text),
    })
    .collect()
}

/// What several threads use stands in `shared`, or where threads are born, or on the other plane.
fn sharing(path: &str, text: &str) -> Vec<Breach> {
    if within(path, &["shared", "boot", "control", "mock", "cli", "main"]) {
        return Vec::new();
    }
    let bad = |t: &[Token], at: usize| {
        let text = t[at].text.as_str();
        matches!(text, "Arc" | "ArcSwap" | "Mutex" | "RwLock" | "Condvar") || text.starts_with("Atomic")
    };
    words("sharing", path, &read(text), "what several threads use stands in shared/", bad)
}

/// What belongs to one thread does not stand in `shared`.
fn owning(path: &str, text: &str) -> Vec<Breach> {
    if !within(path, &["shared"]) {
        return Vec::new();
    }
    let bad = |t: &[Token], at: usize| matches!(t[at].text.as_str(), "Rc" | "RefCell");
    words("owning", path, &read(text), "what belongs to one thread does not stand in shared/", bad)
}

/// `unsafe` has few homes, in tests too.
fn danger(path: &str, text: &str) -> Vec<Breach> {
    if within(path, &["lane/wire", "shared/prefix"]) {
        return Vec::new();
    }
    let all = tokens(&without_prose(text));
    words("danger", path, &all, "only lane/wire/ and shared/prefix/", |t, at| t[at].text == "unsafe")
}

/// Tasks of a lane are started in one place, which counts their polls.
fn spawning(path: &str, text: &str) -> Vec<Breach> {
    if matches!(path, "lane/spawn.rs" | "boot/lanes.rs") {
        return Vec::new();
    }
    let bad = |t: &[Token], at: usize| t[at].text.starts_with("spawn_local");
    words("spawning", path, &read(text), "use lane::spawn::spawn, which counts polls and catches panics", bad)
}

/// A file opens with its contract.
fn contract(path: &str, text: &str) -> Vec<Breach> {
    let what = "a file opens with its contract: `//! What it is.`, takes, gives, never".to_owned();
    let opens = text.lines().next().and_then(|l| l.strip_prefix("//! ")).is_some_and(|l| !l.trim().is_empty());
    (!opens).then(|| Breach { rule: "contract", path: path.to_owned(), line: 1, what }).into_iter().collect()
}

/// The data plane does not unwrap: what cannot fail says why with `expect`.
fn unwrapping(path: &str, text: &str) -> Vec<Breach> {
    if !within(path, &["flow", "lane", "http1"]) {
        return Vec::new();
    }
    let bad =
        |t: &[Token], at: usize| t[at].text == "unwrap" && at > 0 && matches!(t[at - 1].text.as_str(), "." | "::");
    words("unwrapping", path, &read(text), "a fault, or an `expect` that says why it cannot fail", bad)
}

/// Nothing unfinished, and nothing printed but by `cli` and `mock`: printing panics where nobody reads.
fn leftovers(path: &str, text: &str) -> Vec<Breach> {
    let prints = within(path, &["cli", "mock"]);
    let bad = |t: &[Token], at: usize| {
        let banned = match t[at].text.as_str() {
            "todo" | "unimplemented" | "dbg" => true,
            "println" | "print" | "eprintln" | "eprint" => !prints,
            _ => false,
        };
        banned && next_is(t, at + 1, "!") && ["(", "[", "{"].iter().any(|open| next_is(t, at + 2, open))
    };
    words("leftovers", path, &read(text), "unfinished, or to be logged", bad)
}

/// What is called `tests` stands under `#[cfg(test)]`.
fn hiding(path: &str, text: &str) -> Vec<Breach> {
    let bad = |t: &[Token], at: usize| t[at].text == "mod" && next_is(t, at + 1, "tests");
    words("hiding", path, &read(text), "`tests` stands under #[cfg(test)]", bad)
}

const RULES: &[fn(&str, &str) -> Vec<Breach>] =
    &[upward_imports, sharing, owning, spawning, unwrapping, leftovers, hiding];
/// Rules that test code obeys too.
const RULES_OF_TESTS: &[fn(&str, &str) -> Vec<Breach>] = &[danger, contract];

/// Breaches of all rules in one file, exceptions included.
fn breaches(path: &str, text: &str) -> Vec<Breach> {
    let rules = RULES.iter().filter(|_| !is_test(path)).chain(RULES_OF_TESTS);
    let mut found: Vec<Breach> = rules.flat_map(|rule| rule(path, text)).collect();
    found.sort();
    found.dedup();
    found
}

/// The exception that covers a breach.
fn excused(breach: &Breach, text: &str) -> Option<usize> {
    let line = text.lines().nth(breach.line - 1)?.trim();
    EXCEPTIONS.iter().position(|(rule, path, what, _)| breach.rule == *rule && breach.path == *path && line == *what)
}

// ── the sources ─────────────────────────────────────────────────────────────────────────────────────────────────

fn sources() -> Vec<(String, String)> {
    fn walk(dir: &Path, root: &Path, out: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, root, out);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
                out.push((name, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut out = Vec::new();
    walk(&root, &root, &mut out);
    out.sort();
    out
}

#[test]
fn the_sources_are_tidy() {
    let sources = sources();
    assert!(sources.len() > 50, "the sources were not found");
    let mut used = BTreeSet::new();
    let mut bad = Vec::new();
    for (path, text) in &sources {
        for breach in breaches(path, text) {
            match excused(&breach, text) {
                Some(which) => drop(used.insert(which)),
                None => bad.push(breach.to_string()),
            }
        }
    }
    assert!(bad.is_empty(), "\n{}", bad.join("\n"));
    let idle: Vec<_> = EXCEPTIONS.iter().enumerate().filter(|(i, _)| !used.contains(i)).map(|(_, e)| e).collect();
    assert!(idle.is_empty(), "exceptions that nothing needs any more: {idle:?}");
}

#[test]
fn every_import_of_the_sources_is_seen() {
    // The reader is only as good as what it finds: no line with `crate::` in code is without an import.
    for (path, text) in sources() {
        let found: BTreeSet<usize> = imports(&path, &text).into_iter().map(|i| i.line).collect();
        for token in read(&text).windows(2).filter(|w| w[0].text == "crate" && w[1].text == "::") {
            let line = token[0].line;
            let near = found.range(line..).next().is_some_and(|l| *l <= line + 3);
            assert!(near, "src/{path}:{line}");
        }
    }
}

// ── proof that each rule can fail ───────────────────────────────────────────────────────────────────────────────

mod proof {
    use super::*;

    fn rules(path: &str, text: &str) -> Vec<&'static str> {
        breaches(path, &format!("//! Contract.\n{text}")).into_iter().map(|b| b.rule).collect()
    }

    #[track_caller]
    fn bad(rule: &str, path: &str, text: &str) {
        assert_eq!(rules(path, text), [rule], "{path}: {text}");
    }

    #[track_caller]
    fn good(path: &str, text: &str) {
        assert_eq!(rules(path, text), [] as [&str; 0], "{path}: {text}");
    }

    #[test]
    fn imports_run_downward() {
        bad("import", "flow/relay.rs", "use crate::flow::dispatch::Leg;");
        bad("import", "flow/relay.rs", "use crate::flow::{dispatch, passage::Then};");
        bad("import", "flow/relay.rs", "use crate::{lane::Lane, flow::{passage::Then, route::{self}}};");
        bad("import", "flow/relay.rs", "use super::route::choose;");
        bad("import", "flow/relay.rs", "fn f() { crate::flow::settle::count() }");
        bad("import", "flow/relay.rs", "fn f() { super::settle::count() }");
        bad("import", "flow/relay.rs", "use crate::flow::Flow;");
        bad("import", "flow/inspect/scan.rs", "use super::super::route::choose;");
        bad("import", "flow/inspect.rs", "use crate::flow::passage::Request;");
        bad("import", "flow/passage.rs", "use crate::flow::relay::relay;");
        bad("import", "flow.rs", "use crate::control::Pace;");
        bad("import", "flow.rs", "use crate::boot::Gateway;");
        bad("import", "control/probe.rs", "use crate::flow::Flow;");
        bad("import", "control/probe.rs", "use crate::lane::Lane;");
        bad("import", "lane/pool.rs", "use crate::flow::passage::Then;");
        bad("import", "lane/pool.rs", "use crate::control::Pace;");
        bad("import", "shared/load.rs", "use crate::lane::Lane;");
        bad("import", "shared.rs", "use crate::flow::Flow;");
        bad("import", "http1/head.rs", "use crate::config::Config;");
        bad("import", "http1/head.rs", "use crate::shared::Shared;");
        bad("import", "config/load.rs", "use crate::metrics::Tally;");
        bad("import", "metrics.rs", "use crate::http1::Method;");
        bad("import", "fault.rs", "use crate::metrics::Tally;");
        bad("import", "limits.rs", "use crate::fault::What;");
        bad("import", "span.rs", "use crate::limits::MAX_LANES;");
        bad("import", "boot.rs", "use crate::cli::run;");
        bad("import", "boot/lanes.rs", "use crate::mock::Fleet;");
        bad("import", "mock/http.rs", "use crate::http1::Method;");
        bad("import", "mock.rs", "use corelane::limits::MAX_LANES;");
        bad("import", "lane.rs", "mod inner { use super::super::flow::Flow; }");
        bad("import", "novelty.rs", "");
        bad("import", "lane.rs", "use crate::novelty::Thing;");
    }

    #[test]
    fn imports_downward_and_inside_are_fine() {
        good(
            "flow.rs",
            "mod relay; use relay::relay; use crate::flow::passage::Then; use crate::{lane::Lane, http1::{self, Extra}};",
        );
        good("flow/relay.rs", "mod splice; use splice::Pipe; use crate::flow::passage::Then; use self::splice::Pipes;");
        good("flow/relay/splice.rs", "use super::Framing; use crate::lane::wire::Conn;");
        good("flow/passage.rs", "use crate::flow::inspect::Ask;");
        good("flow/inspect/scan.rs", "use super::fields::Fields; use super::super::inspect::block;");
        good("lane/view.rs", "use crate::shared::Shared; mod inner { use super::Reading; use crate::limits::*; }");
        good(
            "shared/tallies.rs",
            "use crate::config::routes::ROUTES; use crate::metrics::Tally; use super::roster::Slot;",
        );
        good("metrics.rs", "use crate::config::routes::ROUTES;");
        good("cli/demo.rs", "use crate::mock::Fleet; use crate::boot;");
        good("main.rs", "fn main() { corelane::cli::run(std::env::args_os()) }");
        good(
            "lane.rs",
            "// use crate::flow::Flow;\n/* crate::boot */ const S: &str = \"use crate::flow;\"; const R: &str = r#\"crate::flow \"x\" \"#;",
        );
        good("lane.rs", "/// See [`crate::flow`].\npub(crate) fn f<'a>(c: &'a str) -> char { '\"' }");
        good("lane.rs", "#[cfg(test)]\nmod tests { use crate::mock::Fleet; }");
    }

    #[test]
    fn exceptions_cover_their_own_line_only() {
        let text =
            "//! Contract.\nuse crate::flow::Flow;\nuse crate::flow::Flow as Other;\nuse crate::flow::relay::relay;\n";
        let found = breaches("flow/accept.rs", text);
        let excuses: Vec<bool> = found.iter().map(|b| excused(b, text).is_some()).collect();
        assert_eq!(found.iter().map(|b| b.line).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(excuses, [true, false, false]);
        let text = "//! Contract.\nuse crate::flow::Flow;\n";
        assert!(breaches("flow/relay.rs", text).iter().all(|b| excused(b, text).is_none()));
    }

    #[test]
    fn sharing_has_its_places() {
        for word in ["Arc<u8>", "AtomicU64", "AtomicBool", "Mutex<u8>", "RwLock<u8>", "ArcSwap<u8>"] {
            for path in ["flow/relay.rs", "lane/pool.rs", "http1/head.rs", "metrics.rs", "config/load.rs", "flow.rs"] {
                bad("sharing", path, &format!("struct S(std::x::{word});"));
            }
            for path in [
                "shared/load.rs",
                "shared.rs",
                "boot.rs",
                "boot/lanes.rs",
                "control/fleet.rs",
                "mock.rs",
                "cli/serve.rs",
            ] {
                good(path, &format!("struct S(std::x::{word});"));
            }
        }
        good("lane/pool.rs", "struct Architecture; // an Arc\n#[cfg(test)]\nmod tests { use std::sync::Arc; }");
    }

    #[test]
    fn owning_has_its_places() {
        bad("owning", "shared/load.rs", "use std::rc::Rc;");
        bad("owning", "shared.rs", "struct S(std::cell::RefCell<u8>);");
        good("lane/pool.rs", "use std::rc::Rc; use std::cell::RefCell;");
    }

    #[test]
    fn danger_has_its_places() {
        bad("danger", "lane/pool.rs", "fn f() { unsafe { g() } }");
        bad("danger", "shared/load.rs", "unsafe impl Send for S {}");
        bad("danger", "http1.rs", "#[cfg(test)]\nmod tests { fn f() { unsafe { g() } } }");
        bad("danger", "flow/relay.rs", "fn f() { unsafe { g() } }");
        for path in ["lane/wire/ring.rs", "shared/prefix/node.rs", "shared/prefix.rs"] {
            good(path, "fn f() { unsafe { g() } }");
        }
        good("lane/pool.rs", "// unsafe\nconst S: &str = \"unsafe\";");
    }

    #[test]
    fn spawning_has_its_places() {
        bad("spawning", "flow/accept.rs", "fn f() { glommio::spawn_local(g()) }");
        bad("spawning", "lane/wire/driver.rs", "fn f() { glommio::spawn_local_into(g(), q) }");
        good("lane/spawn.rs", "fn f() { glommio::spawn_local_into(g(), q) }");
        good("boot/lanes.rs", "fn f() { glommio::spawn_local_into(g(), q) }");
    }

    #[test]
    fn contracts_open_files() {
        for text in ["", "use std::io;\n", "\n//! Late.\n", "// No contract.\n", "//! \n", "/// Of an item.\n"] {
            let found: Vec<_> = breaches("lane/pool.rs", text).into_iter().map(|b| b.rule).collect();
            assert_eq!(found, ["contract"], "{text:?}");
        }
    }

    #[test]
    fn the_data_plane_does_not_unwrap() {
        for path in ["flow.rs", "flow/relay.rs", "lane/pool.rs", "http1/head.rs"] {
            bad("unwrapping", path, "fn f() { g()\n.unwrap(); }");
            bad("unwrapping", path, "fn f() { g().map(Option::unwrap); }");
            good(path, "fn f() { g().unwrap_or(1); h().unwrap_or_default(); i().expect(\"checked above\"); }");
            good(path, "#[cfg(test)]\nmod tests { #[test] fn f() { g().unwrap(); } }\nfn h() {}");
        }
        bad(
            "unwrapping",
            "lane/pool.rs",
            "#[cfg(test)]\nmod tests { fn f() { g().unwrap(); } }\nfn h() { g().unwrap() }",
        );
        bad("unwrapping", "lane/pool.rs", "#[cfg(test)]\nuse std::io;\nfn h() { g().unwrap() }");
        good("control/fleet.rs", "fn f() { g().unwrap(); }");
    }

    #[test]
    fn nothing_is_left_over() {
        for word in ["todo", "unimplemented", "dbg"] {
            for path in ["lane/pool.rs", "cli/serve.rs", "mock.rs", "boot.rs"] {
                bad("leftovers", path, &format!("fn f() {{ {word}!() }}"));
            }
        }
        for word in ["println", "print", "eprintln", "eprint"] {
            bad("leftovers", "lane/pool.rs", &format!("fn f() {{ {word}!(\"x\") }}"));
            bad("leftovers", "control.rs", &format!("fn f() {{ {word}!(\"x\") }}"));
            good("cli/serve.rs", &format!("fn f() {{ {word}!(\"x\") }}"));
        }
        good("lane/pool.rs", "fn todo() {} fn f(print: u8) -> bool { print != 3 }");
    }

    #[test]
    fn tests_are_told_by_their_name() {
        good("flow/inspect.rs", "#[cfg(test)]\nmod tests;");
        bad("hiding", "flow/inspect.rs", "mod tests;");
        bad("hiding", "flow/inspect.rs", "mod tests { fn f() {} }");
        good("flow/inspect/tests.rs", "use crate::mock::Fleet; use std::sync::Arc; fn f() { g().unwrap() }");
        bad("danger", "flow/inspect/tests.rs", "fn f() { unsafe { g() } }");
    }

    #[test]
    fn sources_are_read_as_rust_reads_them() {
        assert_eq!(without_prose("a /* b /* c */ d */ e"), "a                   e");
        assert_eq!(
            without_prose("x(b\"q\\\"\", r##\"a\"# \"##, 'c', '\\'', '\\u{1f}', 'ü')")
                .split_whitespace()
                .collect::<String>(),
            "x(,,,,,)"
        );
        assert_eq!(without_prose("fn f<'a>(x: &'a u8) // c\n{}"), "fn f< a>(x: & a u8)     \n{}");
        let text = "use a::b;\nuse crate::{x::{self, y}, z::*,\n w as v};\nfn f() { super::q::r() }\n";
        let found: Vec<String> =
            imports("lane/wire/ring.rs", text).iter().map(|i| format!("{} {}", i.line, i.to.join("::"))).collect();
        assert_eq!(found, ["2 x", "2 x::y", "2 z", "3 w", "4 lane::wire::q::r"]);
    }
}
