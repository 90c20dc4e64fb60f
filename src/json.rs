//! Raw pieces of JSON that workers answer: where members of an object and elements of an array lie.
//!
//! Takes whole JSON texts, gives spans into them. Never copies a value, never goes deeper than it is asked, never takes
//! what is not JSON.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::span::Span;

/// Where the values of these members of an object lie; of duplicates the last. `None` when `text` is no JSON object.
pub fn members<const N: usize>(text: &[u8], names: [&str; N]) -> Option<[Option<Span>; N]> {
    let mut json = whole(text)?;
    let found = json.deserialize_map(Members(&names)).ok()?;
    json.end().ok()?;
    Some(found.map(|value| value.map(|value| within(text, value))))
}

/// Calls `each` with the number and the place of every element of an array, as it is met. `None` when `text` turns out
/// to be no JSON array.
pub fn elements(text: &[u8], each: impl FnMut(usize, Span)) -> Option<()> {
    let mut json = whole(text)?;
    json.deserialize_seq(Elements { text, each }).ok()?;
    json.end().ok()
}

/// Spans do not reach further than 4 GiB. UTF-8 is checked here, because values that are passed over are not.
fn whole(text: &[u8]) -> Option<serde_json::Deserializer<serde_json::de::StrRead<'_>>> {
    u32::try_from(text.len()).ok()?;
    Some(serde_json::Deserializer::from_str(simdutf8::basic::from_utf8(text).ok()?))
}

/// Where a value, a piece of `text`, lies in it.
fn within(text: &[u8], value: &RawValue) -> Span {
    let start = value.get().as_ptr() as usize - text.as_ptr() as usize;
    Span::new(start, start + value.get().len())
}

struct Members<'n, const N: usize>(&'n [&'n str; N]);

impl<'de, const N: usize> Visitor<'de> for Members<'_, N> {
    type Value = [Option<&'de RawValue>; N];

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut found = [None; N];
        while let Some(which) = members.next_key_seed(Key(self.0))? {
            match which {
                Some(which) => found[which] = Some(members.next_value()?),
                None => drop(members.next_value::<IgnoredAny>()?),
            }
        }
        Ok(found)
    }
}

/// Which of the names a key is.
struct Key<'n>(&'n [&'n str]);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok(self.0.iter().position(|wanted| *wanted == name))
    }
}

struct Elements<'t, F> {
    text: &'t [u8],
    each: F,
}

impl<'de, F: FnMut(usize, Span)> Visitor<'de> for Elements<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut elements: A) -> Result<(), A::Error> {
        let mut nth = 0;
        while let Some(element) = elements.next_element()? {
            (self.each)(nth, within(self.text, element));
            nth += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_found_where_they_lie() {
        for (text, a, b) in [
            (r#" {"a": [1 ,{"b":2}] , "c":0,"b":"x\u0041" } "#, Some(r#"[1 ,{"b":2}]"#), Some(r#""x\u0041""#)),
            (r#"{"a":1,"\u0061":2,"x":{"b":3}}"#, Some("2"), None),
            (r#"{"a":null}"#, Some("null"), None),
            ("{}", None, None),
        ] {
            let found = members(text.as_bytes(), ["a", "b"]).unwrap();
            assert_eq!(found.map(|s| s.map(|s| s.of(text.as_bytes()))), [a, b].map(|s| s.map(str::as_bytes)), "{text}");
        }
        for text in ["", "null", "[]", "1", r#"{"a":1"#, r#"{"a":1} x"#, r#"{"a":01}"#, r#"{"a":1,}"#] {
            assert_eq!(members(text.as_bytes(), ["a"]), None, "{text}");
        }
        assert_eq!(members(b"{\"a\":\"\xFF\"}", ["a"]), None);
        assert_eq!(members(b"{\"b\":\"\xFF\",\"a\":1}", ["a"]), None);
    }

    #[test]
    fn elements_come_in_order() {
        let text = b" [ 1 ,[2,3],{\"a\":[]} ,null] ";
        let mut seen = Vec::new();
        assert_eq!(elements(text, |nth, span| seen.push((nth, span.of(text)))), Some(()));
        assert_eq!(seen, [(0, &b"1"[..]), (1, b"[2,3]"), (2, b"{\"a\":[]}"), (3, b"null")]);
        assert_eq!(elements(b"[]", |_, _| panic!("there is none")), Some(()));
        for text in ["", "{}", "[1", "[1,]", "[1] 2", "7"] {
            assert_eq!(elements(text.as_bytes(), |_, _| ()), None, "{text}");
        }
    }
}
