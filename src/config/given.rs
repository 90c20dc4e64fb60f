//! One option as one source gives it, before it is read.
//!
//! Takes texts and their places, gives the same together with the option's row. Never judges a value.

use super::mistakes::{Mistake, Origin, Wrong};
use super::options::Row;

/// An option as a flag, a variable or a file gives it.
pub struct Given {
    pub row: &'static Row,
    pub origin: Origin,
    /// The value, or the items of a list.
    pub texts: Vec<String>,
    /// Places of the items, where they differ from `origin`.
    pub places: Vec<Origin>,
}

impl Given {
    /// A value that stands as plain text; lists are split at commas and spaces.
    pub fn new(row: &'static Row, origin: Origin, values: Vec<String>) -> Given {
        let texts = if row.kind.is_list() { split(&values) } else { values };
        Given { row, origin, texts, places: Vec::new() }
    }

    /// The place of the item `at`.
    pub fn place(&self, at: usize) -> &Origin {
        self.places.get(at).unwrap_or(&self.origin)
    }

    /// A mistake in the item `at`.
    pub fn mistake(&self, at: usize, wrong: Wrong) -> Mistake {
        wrong.at(self.place(at), self.row.key)
    }
}

/// Items of a list; a text without any is one empty item, so that it is noticed.
fn split(values: &[String]) -> Vec<String> {
    let items: Vec<String> = values
        .iter()
        .flat_map(|v| v.split(|c: char| c == ',' || c.is_whitespace()))
        .filter(|item| !item.is_empty())
        .map(str::to_owned)
        .collect();
    if items.is_empty() && !values.is_empty() { vec![String::new()] } else { items }
}
