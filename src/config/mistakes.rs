//! Where a value came from, and how a mistake in it is told: one line that says where, what, and what to change.
//!
//! Takes places and texts, gives lines. Never prints a secret: whoever makes a mistake decides what is quoted.

use std::fmt;

/// Where a value or a mistake stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A command-line argument, with its dashes.
    Flag(String),
    /// An environment variable.
    Env(String),
    /// A place in the configuration file; line and column count from 1, columns in characters.
    File { name: String, line: usize, column: usize },
    /// The option table.
    Default,
}

impl Origin {
    /// The order in which mistakes are listed: flags, variables, the file by line.
    pub fn rank(&self) -> (u8, usize, usize) {
        match self {
            Origin::Flag(_) => (0, 0, 0),
            Origin::Env(_) => (1, 0, 0),
            Origin::File { line, column, .. } => (2, *line, *column),
            Origin::Default => (3, 0, 0),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Flag(name) | Origin::Env(name) => f.write_str(name),
            Origin::File { name, line: 0, .. } => f.write_str(name),
            Origin::File { name, line, column } => write!(f, "{name}:{line}:{column}"),
            Origin::Default => f.write_str("default"),
        }
    }
}

/// What is wrong with a value and what to change; the place is added by whoever knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    pub what: String,
    pub fix: String,
}

impl Wrong {
    pub fn new(what: impl Into<String>, fix: impl Into<String>) -> Wrong {
        Wrong { what: what.into(), fix: fix.into() }
    }

    /// Adds the place. In a file the key is named too, because a line number alone says little.
    pub fn at(self, origin: &Origin, key: &str) -> Mistake {
        let what = match origin {
            Origin::File { .. } => format!("{key}: {}", self.what),
            _ => self.what,
        };
        Mistake { origin: origin.clone(), what, fix: self.fix }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.what, self.fix)
    }
}

/// One thing that the user has to change, or (as a warning) should look at. Displays as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    pub origin: Origin,
    pub what: String,
    pub fix: String,
}

impl Mistake {
    pub fn new(origin: Origin, what: impl Into<String>, fix: impl Into<String>) -> Mistake {
        Mistake { origin, what: what.into(), fix: fix.into() }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.origin, self.what, self.fix)
    }
}

/// Longest excerpt of a user's value in a mistake, in characters.
const QUOTE_CHARS: usize = 80;

/// A user's text in quotes, on one line and not too long.
pub fn quote(text: &str) -> String {
    match text.char_indices().nth(QUOTE_CHARS) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// The known name that was probably meant, if one is near enough to be worth naming.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let allowed = (name.chars().count() / 3).clamp(1, 5);
    let near = |k: &'a str| (strsim::damerau_levenshtein(name, k), k);
    if let Some((_, k)) = known.into_iter().map(near).filter(|(d, _)| *d <= allowed).min_by_key(|(d, _)| *d) {
        return Some(k);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_found_or_none() {
        let known = ["port", "host", "policy", "max_payload_size"];
        assert_eq!(nearest("prot", known), Some("port"));
        assert_eq!(nearest("max_paylod_sizes", known), Some("max_payload_size"));
        assert_eq!(nearest("banana", known), None);
    }

    #[test]
    fn quotes_stay_on_one_line() {
        assert_eq!(quote("a\nb"), r#""a\nb""#);
        assert!(quote(&"é".repeat(500)).chars().count() < 100);
    }

    #[test]
    fn a_mistake_is_one_line_with_its_place() {
        let place = Origin::File { name: "c.toml".into(), line: 3, column: 8 };
        assert_eq!(Wrong::new("is odd", "mend it").at(&place, "port").to_string(), "c.toml:3:8: port: is odd; mend it");
        let flag = Origin::Flag("--port".into());
        assert_eq!(Wrong::new("is odd", "mend it").at(&flag, "port").to_string(), "--port: is odd; mend it");
    }
}
