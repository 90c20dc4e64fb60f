//! Pieces of workers' answers: members and elements lie where a plain parser finds their values.
//!
//! Takes a text, gives nothing. Never finds anything in what is not JSON.

use corelane::json;
use corelane::span::Span;
use serde_json::Value;

use super::plain::is_json;

const NAMES: [&str; 4] = ["meta_info", "kv_transfer_params", "index", ""];

/// Checks one input.
pub fn json_pieces(data: &[u8]) {
    let members = json::members(data, NAMES);
    let mut elements = Vec::new();
    let whole = json::elements(data, |nth, span| {
        assert_eq!(nth, elements.len());
        elements.push(span);
    });
    let Some(text) = std::str::from_utf8(data).ok().filter(|text| is_json(text)) else {
        return assert_eq!((members, whole), (None, None), "what is no JSON has no pieces");
    };
    let begin = text.trim_ascii().as_bytes()[0];
    assert_eq!(whole.is_some(), begin == b'[');
    let written = |span: Span| {
        let piece = std::str::from_utf8(span.of(data)).expect("a piece is UTF-8");
        assert!(is_json(piece) && piece == piece.trim_ascii(), "{piece}");
        piece
    };
    // Half a surrogate pair in a key has no name.
    assert!(members.is_none() || begin == b'{');
    assert!(members.is_some() || begin != b'{' || text.contains("\\u"));
    let members = members.map(|all| all.map(|span| span.map(written)));
    let elements: Vec<&str> = elements.into_iter().map(written).collect();
    // Numbers beyond any range, half surrogate pairs and too deep values are none for the plain parser.
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => {
            let members = members.expect("an object has members");
            for (name, piece) in NAMES.iter().zip(members) {
                let piece = piece.map(|piece| serde_json::from_str(piece).expect("a piece of a value is one"));
                assert_eq!(object.get(*name), piece.as_ref(), "{name}");
            }
        }
        Ok(Value::Array(array)) => {
            let pieces: Vec<Value> = elements.iter().flat_map(|piece| serde_json::from_str(piece)).collect();
            assert_eq!(array, pieces);
        }
        _ => {}
    }
}
