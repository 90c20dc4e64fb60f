//! JSON as a plain parser sees it.
//!
//! Takes texts, gives their pieces as serde_json finds them. Never uses the crate that is tested.

use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// A member: the key as a name and as it is written, and the value as it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    pub name: String,
    pub key: &'a str,
    pub value: &'a str,
}

/// Whether the text is JSON, however deep.
pub fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

/// The members of an object in their order, duplicates too. `None` for what is no object, and for half a surrogate pair
/// in a key, which has no name in Rust.
pub fn entries(text: &str) -> Option<Vec<Entry<'_>>> {
    let mut json = serde_json::Deserializer::from_str(text);
    let raw = json.deserialize_map(Members).ok()?;
    json.end().ok()?;
    raw.into_iter()
        .map(|(key, value)| {
            Some(Entry { name: serde_json::from_str(key.get()).ok()?, key: key.get(), value: value.get() })
        })
        .collect()
}

/// The elements of an array as they are written; `None` for what is no array.
pub fn elements(text: &str) -> Option<Vec<&str>> {
    let raw: Vec<&RawValue> = serde_json::from_str(text).ok()?;
    Some(raw.into_iter().map(RawValue::get).collect())
}

struct Members;

impl<'de> Visitor<'de> for Members {
    type Value = Vec<(&'de RawValue, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut all = Vec::new();
        while let Some(member) = members.next_entry()? {
            all.push(member);
        }
        Ok(all)
    }
}
