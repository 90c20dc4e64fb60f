//! One option as one source gives it, before it is read.
//!
//! Takes texts and their places, gives the same together with the option's row. Never judges a value.

use super::Role;
use super::mistakes::{Mistake, Origin, Wrong};
use super::options::Row;
use super::values::Kind;
use super::workers::is_port;

/// An option as a flag, a variable or a file gives it.
#[derive(Clone)]
pub struct Given {
    pub row: &'static Row,
    pub origin: Origin,
    /// The value, or the items of a list.
    pub texts: Vec<String>,
    /// Places of the items, where they differ from `origin`.
    pub places: Vec<Origin>,
}

impl Given {
    /// A value that stands as plain text; lists are split at commas and spaces, but for the port of a prefill worker,
    /// which stays with the address before it, and for secrets, which are split in variables only.
    pub fn new(row: &'static Row, origin: Origin, values: Vec<String>) -> Given {
        let texts = match row.kind {
            Kind::Workers(Role::Prefill) => with_ports(split(&values)),
            // A comma may be part of a secret: only a variable has no other way to hold several.
            Kind::Secrets(_) if !matches!(origin, Origin::Env(_)) => values,
            _ if row.kind.is_list() => split(&values),
            _ => values,
        };
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

fn with_ports(items: Vec<String>) -> Vec<String> {
    let mut joined: Vec<String> = Vec::new();
    for item in items {
        match joined.last_mut() {
            Some(address) if is_port(&item) => {
                address.push(' ');
                address.push_str(&item);
            }
            _ => joined.push(item),
        }
    }
    joined
}
