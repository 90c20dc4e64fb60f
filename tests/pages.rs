//! Pages that name tests: what they name is there, and the page of what broke for others has a row for every report.
//!
//! Takes the README, the pages of `tuning/` and the sources, gives every name that leads nowhere. Never judges what a
//! test does.

use std::collections::BTreeMap;
use std::path::Path;

/// Reports of the page.
const REPORTS: u32 = 38;

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).ok()
}

/// What stands between backquotes and names a test: its file and its name.
fn named(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split('`').skip(1).step_by(2).filter_map(|quoted| {
        let (file, name) = quoted.split_once("::")?;
        file.ends_with(".rs").then_some((file, name))
    })
}

/// Whether a source has a test of this name: a function that is marked, or a line of a table from which a macro makes
/// some.
fn has_test(source: &str, name: &str) -> bool {
    let mut marked = false;
    for line in source.lines().map(str::trim_start) {
        if line.starts_with("#[test]") {
            marked = true;
        } else if let Some(rest) = line.strip_prefix("fn ") {
            if marked && rest.strip_prefix(name).is_some_and(|rest| rest.starts_with('(')) {
                return true;
            }
            marked = false;
        }
    }
    let from_table = format!("\n    {name}: ");
    source.contains("$( #[test] fn $name()") && source.contains(&from_table)
}

/// Names of a page that lead nowhere.
fn astray(page: &str, source: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let leads = |file: &str, name: &str| source(file).is_some_and(|source| has_test(&source, name));
    named(page).filter(|(file, name)| !leads(file, name)).map(|(file, name)| format!("{file}::{name}")).collect()
}

/// The rows of the reports: their number, what broke, what notices it.
fn rows(page: &str) -> BTreeMap<u32, (&str, &str)> {
    let rows = page.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| ")?.strip_suffix(" |")?.splitn(3, " | ");
        Some((cells.next()?.parse().ok()?, (cells.next()?, cells.next()?)))
    });
    rows.collect()
}

#[test]
fn tests_that_pages_name_are_there() {
    let pages = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tuning")).unwrap();
    let pages = pages.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let pages = pages.filter(|name| name.ends_with(".md")).map(|name| format!("tuning/{name}"));
    let mut all = 0;
    for page in pages.chain(["README.md".to_owned()]) {
        let text = read(&page).unwrap();
        assert_eq!(astray(&text, read), Vec::<String>::new(), "on {page}");
        all += named(&text).count();
    }
    assert!(all > 50, "{all} tests are named");
}

#[test]
fn every_report_has_a_row() {
    let page = read("tuning/what-broke-for-others.md").unwrap();
    let rows = rows(&page);
    assert!(rows.keys().copied().eq(1..=REPORTS), "{:?}", rows.keys());
    for (number, (fault, by)) in rows {
        assert!(!fault.is_empty() && !by.is_empty());
        assert!(named(by).next().is_some() || by.starts_with("does not apply: "), "nothing notices report {number}");
    }
}

#[test]
fn what_leads_nowhere_is_seen() {
    let source = "#[test]\nfn good() {\n    fn inner() {}\n}\nfn helper() {}\n";
    let table = "macro_rules! m { ($( $name:ident; )*) => { $( #[test] fn $name() { } )* } }\nm! {\n    made: 1;\n}\n";
    let sources = |file: &str| match file {
        "tests/a.rs" => Some(source.to_owned()),
        "tests/b.rs" => Some(table.to_owned()),
        _ => None,
    };
    let page = "`tests/a.rs::good` `tests/a.rs::helper` `tests/a.rs::inner` `tests/a.rs::goo` `tests/b.rs::made` \
                `tests/b.rs::other` `tests/c.rs::good` `Some::thing`";
    let want = ["tests/a.rs::helper", "tests/a.rs::inner", "tests/a.rs::goo", "tests/b.rs::other", "tests/c.rs::good"];
    assert_eq!(astray(page, sources), want);
    assert_eq!(rows("| 1 | a | b |\n| | **x** | |\n| 3 | c | d | e |\n").into_keys().collect::<Vec<_>>(), [1, 3]);
}
