//! Heads of requests: however they arrive they read the same, they say what the bytes say, and what is forwarded reads
//! back as what was meant.
//!
//! Takes the beginning of a client's stream, gives nothing. Never asks the parser's own classification whether a
//! message is framed in two ways: lines are split anew.

use std::net::{IpAddr, Ipv4Addr};

use corelane::fault::What;
use corelane::http1::{
    BodyLength, Field, FieldKind, Forward, HeadLimits, Method, Parsed, RequestHead, Version, request_head as write,
};

use super::chunked::is_token;
use super::cuts::cuts;

/// Small, so that inputs meet them.
pub const LIMITS: HeadLimits = HeadLimits { bytes: 4096, fields: 24 };

/// Name and value of a field.
pub type Line = (Vec<u8>, Vec<u8>);

#[derive(Debug, PartialEq, Eq)]
struct Said {
    len: usize,
    method: Method,
    version: Version,
    path: Vec<u8>,
    query: Option<Vec<u8>>,
    authority: Option<Vec<u8>>,
    fields: Vec<(Line, FieldKind)>,
    body: BodyLength,
    keep_alive: bool,
    expect_continue: bool,
}

/// Checks one input.
pub fn request_head(data: &[u8]) {
    let whole = parse(data, &[]);
    for cuts in cuts(data) {
        assert_eq!(parse(data, &cuts), whole, "cut at {cuts:?}");
    }
    let Ok(Some(said)) = whole else { return };
    let head = &data[..said.len];
    assert_eq!(parse(head, &[]).as_ref(), Ok(&Some(said)), "what follows a head does not matter");
    let Ok(Some(said)) = parse(head, &[]) else { return };
    let (first, lines) = lines(head);
    let Said { method, path, query, .. } = &said;
    let target = first.strip_prefix(method.as_str().as_bytes()).and_then(|rest| rest.strip_prefix(b" "));
    let target = target.and_then(|rest| Some(&rest[..rest.iter().position(|byte| *byte == b' ')?]));
    let target = target.expect("a method, a target and a version");
    let mark: &[u8] = if query.is_some() { b"?" } else { b"" };
    let tail = [&path[..], mark, query.as_deref().unwrap_or_default()].concat();
    assert!(target.ends_with(&tail) || (path == b"/" && target.ends_with(&tail[1..])), "{}", target.escape_ascii());
    assert_eq!(lines, said.fields.iter().map(|field| field.0.clone()).collect::<Vec<_>>());
    check_framing(&lines, said.body);
    assert!(said.version == Version::H11 || said.body != BodyLength::Chunked);
    assert_eq!(said.keep_alive, keeps_alive(said.version, &lines));
    check_forwarded(head, &said);
}

fn parse(data: &[u8], cuts: &[usize]) -> Result<Option<Said>, What> {
    let mut head = RequestHead::new();
    for end in cuts.iter().copied().chain([data.len()]) {
        let seen = &data[..end];
        if let Parsed::Complete(len) = head.parse(seen, &LIMITS).map_err(|fault| fault.what)? {
            let bytes = |span: corelane::span::Span| span.of(seen).to_vec();
            return Ok(Some(Said {
                len,
                method: head.method,
                version: head.version,
                path: bytes(head.path),
                query: head.query.map(bytes),
                authority: head.authority.map(bytes),
                fields: fields(&head.fields, seen),
                body: head.body,
                keep_alive: head.keep_alive,
                expect_continue: head.expect_continue,
            }));
        }
    }
    Ok(None)
}

/// What the fields are, in a form that outlives the buffer.
pub fn fields(fields: &[Field], seen: &[u8]) -> Vec<(Line, FieldKind)> {
    fields.iter().map(|f| ((f.name.of(seen).to_vec(), f.value.of(seen).to_vec()), f.kind)).collect()
}

/// The first line of a whole head, and its field lines, split by the grammar of RFC 9112, section 5.
pub fn lines(head: &[u8]) -> (&[u8], Vec<Line>) {
    let mut rest = head;
    while let Some(next) = rest.strip_prefix(b"\r\n") {
        rest = next;
    }
    let mut lines = std::iter::from_fn(|| {
        let end = rest.windows(2).position(|two| two == b"\r\n").expect("every line of a head ends in CRLF");
        let line = &rest[..end];
        assert!(!line.iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0)), "{}", line.escape_ascii());
        rest = &rest[end + 2..];
        Some(line)
    });
    let first = lines.next().unwrap_or_default();
    let fields = lines.take_while(|line| !line.is_empty()).map(|line| {
        let colon = line.iter().position(|byte| *byte == b':').expect("every field line has a colon");
        assert!(colon > 0 && line[..colon].iter().all(is_token), "{}", line.escape_ascii());
        (line[..colon].to_vec(), line[colon + 1..].trim_ascii().to_vec())
    });
    (first, fields.collect())
}

/// How many lines have this name.
pub fn count(lines: &[Line], name: &str) -> usize {
    lines.iter().filter(|line| line.0.eq_ignore_ascii_case(name.as_bytes())).count()
}

/// The length that all lines of Content-Length agree on, if there are any.
pub fn length(lines: &[Line]) -> Option<u64> {
    let mut lengths = lines.iter().filter(|line| line.0.eq_ignore_ascii_case(b"content-length")).map(|line| {
        assert!(line.1.iter().all(u8::is_ascii_digit));
        std::str::from_utf8(&line.1).ok().and_then(|digits| digits.parse().ok()).expect("a length is a number")
    });
    let first = lengths.next();
    assert!(lengths.all(|length| Some(length) == first));
    first
}

fn check_framing(lines: &[Line], body: BodyLength) {
    let counts = (count(lines, "content-length"), count(lines, "transfer-encoding"));
    match body {
        BodyLength::None => assert_eq!(counts, (0, 0)),
        BodyLength::Length(n) => assert_eq!((counts, Some(n)), ((1, 0), length(lines))),
        BodyLength::Chunked => assert_eq!((counts, is_chunked(lines)), ((0, 1), true)),
    }
}

/// Whether the only coding of the body is chunked.
pub fn is_chunked(lines: &[Line]) -> bool {
    let mut codings = lines.iter().filter(|line| line.0.eq_ignore_ascii_case(b"transfer-encoding"));
    codings.all(|line| line.1.eq_ignore_ascii_case(b"chunked"))
}

/// Whether the connection lives on by what its lines say (RFC 9112, section 9.3).
pub fn keeps_alive(version: Version, lines: &[Line]) -> bool {
    let options = lines.iter().filter(|line| line.0.eq_ignore_ascii_case(b"connection"));
    let says = |word: &[u8]| {
        let mut options = options.clone().flat_map(|line| line.1.split(|byte| *byte == b','));
        options.any(|option| option.trim_ascii().eq_ignore_ascii_case(word))
    };
    !says(b"close") && (version == Version::H11 || says(b"keep-alive"))
}

/// What a worker gets reads as the same request, with the framing that was meant and nothing that was for us.
fn check_forwarded(head: &[u8], said: &Said) {
    let mut parsed = RequestHead::new();
    let _ = parsed.parse(head, &LIMITS);
    for (length, authorization) in
        [(BodyLength::None, None), (BodyLength::Length(7), Some("key")), (BodyLength::Chunked, None)]
    {
        let mut out = Vec::new();
        let told = Forward {
            prefix: "/prefix",
            client: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7)),
            authorization,
            own_keys: false,
            request_id: b"id",
            length,
            dp_rank: Some(3),
        };
        write(&mut out, &parsed, head, &told);
        let (first, lines) = lines(&out);
        let Said { method, path, query, .. } = said;
        let prefix: &[u8] = if path == b"*" { b"" } else { b"/prefix" };
        let query = query.as_ref().map_or(Vec::new(), |query| [b"?", &query[..]].concat());
        let line = [method.as_str().as_bytes(), b" ", prefix, path, &query, b" HTTP/1.1"].concat();
        assert_eq!(first, line);
        check_framing(&lines, length);
        for once in ["host", "x-request-id", "x-forwarded-for", "x-data-parallel-rank"] {
            assert_eq!(count(&lines, once), 1, "{once}");
        }
        for never in ["connection", "te", "trailer", "upgrade", "expect", "keep-alive", "x-smg-target-worker"] {
            assert_eq!(count(&lines, never), 0, "{never}");
        }
        let kept = |fields: &[(Line, FieldKind)]| -> Vec<Line> {
            fields
                .iter()
                .filter(|f| matches!(f.1, FieldKind::Pass | FieldKind::ContentType))
                .map(|f| f.0.clone())
                .collect()
        };
        // An HTTP/1.0 client may leave Host out; the worker is then told an empty one, which we would not take.
        if count(&lines, "host") == 1 && lines.iter().all(|l| l.0 != b"host" || !l.1.is_empty()) {
            let mut again = RequestHead::new();
            let limits = HeadLimits { bytes: 2 * LIMITS.bytes, fields: LIMITS.fields + 8 };
            assert_eq!(again.parse(&out, &limits), Ok(Parsed::Complete(out.len())));
            assert_eq!((again.body, kept(&fields(&again.fields, &out))), (length, kept(&said.fields)));
        }
    }
}
