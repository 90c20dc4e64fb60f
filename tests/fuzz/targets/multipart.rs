//! Multipart forms: however they arrive they read the same, and as a plain reading of the whole form says.
//!
//! Takes a Content-Type, a line end and a body, gives nothing.

use corelane::config::routes::Body;
use corelane::fault::{Fault, What};
use corelane::flow::inspect::{Ask, Inspector};

use super::cuts::cuts;

/// Checks one input.
pub fn multipart(data: &[u8]) {
    let Some(at) = data.iter().position(|byte| *byte == b'\n') else { return };
    let (content_type, body) = (&data[..at], &data[at + 1..]);
    let whole = read(content_type, body, &[]);
    for cuts in cuts(body) {
        assert_eq!(read(content_type, body, &cuts), whole, "cut at {cuts:?}");
    }
    let Some(boundary) = content_type.strip_prefix(b"multipart/form-data; boundary=") else { return };
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'-';
    if boundary.is_empty() || boundary.len() > 70 || !boundary.iter().all(plain) {
        return;
    }
    match (parts(body, boundary), whole) {
        (Parts::Odd, _) => {}
        (Parts::Bad, whole) => assert!(matches!(&whole, Err(f) if f.what == What::BadMultipart), "{whole:?}"),
        (Parts::Found { .. }, Err(fault)) if fault.what == What::BadField => {}
        (Parts::Found { model, stream }, whole) => {
            let ask = whole.expect("a whole form is accepted");
            assert_eq!(ask.model.map(|span| span.of(body)), model);
            let is_true = |text: &[u8]| {
                [&b"true"[..], b"1", b"on", b"t", b"y", b"yes"].iter().any(|word| word.eq_ignore_ascii_case(text))
            };
            assert_eq!(ask.stream, stream.is_some_and(is_true));
        }
    }
}

fn read(content_type: &[u8], body: &[u8], cuts: &[usize]) -> Result<Ask, Fault> {
    let mut inspector = Inspector::new();
    inspector.begin(Body::Multipart, content_type);
    for end in cuts {
        inspector.feed(&body[..*end])?;
    }
    inspector.finish(body)
}

/// What a form holds.
enum Parts<'a> {
    Found {
        model: Option<&'a [u8]>,
        stream: Option<&'a [u8]>,
    },
    /// It has no end, or a part without a name.
    Bad,
    /// It has header fields that are read with more care than here.
    Odd,
}

/// The last parts of these names, found by looking for whole delimiter lines.
fn parts<'a>(body: &'a [u8], boundary: &[u8]) -> Parts<'a> {
    let (mut model, mut stream) = (None, None);
    let Some((_, mut line_end, mut last)) = delimiter(body, 0, boundary, true) else { return Parts::Bad };
    while !last {
        // An empty head has one line end, that of the delimiter's line.
        let Some(at) = find(&body[line_end - 2..], b"\r\n\r\n") else { return Parts::Bad };
        let contents = line_end - 2 + at + 4;
        let head = &body[line_end.min(contents - 4)..contents - 4];
        let Some(name) =
            head.strip_prefix(b"Content-Disposition: form-data; name=\"").and_then(|rest| rest.strip_suffix(b"\""))
        else {
            return Parts::Odd;
        };
        if name.iter().any(|byte| !byte.is_ascii_alphanumeric()) {
            return Parts::Odd;
        }
        let Some((end, next, is_last)) = delimiter(body, contents, boundary, false) else { return Parts::Bad };
        let kept = match name {
            b"model" => &mut model,
            b"stream" => &mut stream,
            _ => &mut None,
        };
        *kept = Some(&body[contents..end]);
        (line_end, last) = (next, is_last);
    }
    Parts::Found { model, stream }
}

/// The next line that is a delimiter: where what is before it ends, where the next line begins, whether it is the last.
fn delimiter(body: &[u8], from: usize, boundary: &[u8], first: bool) -> Option<(usize, usize, bool)> {
    for at in from..body.len() {
        let begin = if first && at == 0 && body.starts_with(b"--") { Some(0) } else { None };
        let Some(begin) = begin.or_else(|| body[at..].starts_with(b"\r\n--").then_some(at + 2)) else { continue };
        let Some(rest) = body[begin + 2..].strip_prefix(boundary) else { continue };
        if rest.starts_with(b"--") {
            return Some((at, body.len(), true));
        }
        let padding = rest.iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
        if rest[padding..].starts_with(b"\r\n") {
            return Some((at, begin + 2 + boundary.len() + padding + 2, false));
        }
    }
    None
}

fn find(body: &[u8], what: &[u8]) -> Option<usize> {
    body.windows(what.len()).position(|window| window == what)
}
