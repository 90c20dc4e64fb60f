//! Heads of answers: however they arrive they read the same, they say what the bytes say, and what is passed on reads
//! back as what was meant.
//!
//! Takes the beginning of a worker's stream, gives nothing.

use corelane::http1::{Answer, AnswerBody, FieldKind, Method, Parsed, ResponseHead, Version, response_head as write};

use super::cuts::cuts;
use super::request_head::{LIMITS, Line, count, fields, is_chunked, keeps_alive, length, lines};

#[derive(Debug, PartialEq, Eq)]
struct Said {
    len: usize,
    line: (Version, u16, Vec<u8>),
    fields: Vec<(Line, FieldKind)>,
    body: AnswerBody,
    keep_alive: bool,
}

/// Checks one input.
pub fn response_head(data: &[u8]) {
    for method in [Method::Post, Method::Head] {
        let whole = parse(data, &[], method);
        for cuts in cuts(data) {
            assert_eq!(parse(data, &cuts, method), whole, "cut at {cuts:?}");
        }
        let Ok(Some(said)) = whole else { continue };
        let head = &data[..said.len];
        assert_eq!(
            parse(head, &[], method).ok().flatten().as_ref(),
            Some(&said),
            "what follows a head does not matter"
        );
        check(head, &said, method);
        check_passed(head, &said, method);
    }
}

fn parse(data: &[u8], cuts: &[usize], method: Method) -> Result<Option<Said>, ()> {
    let mut head = ResponseHead::new();
    for end in cuts.iter().copied().chain([data.len()]) {
        let seen = &data[..end];
        if let Parsed::Complete(len) = head.parse(seen, &LIMITS, method).map_err(drop)? {
            return Ok(Some(Said {
                len,
                line: (head.version, head.status, head.reason.of(seen).to_vec()),
                fields: fields(&head.fields, seen),
                body: head.body,
                keep_alive: head.keep_alive,
            }));
        }
    }
    Ok(None)
}

fn check(head: &[u8], said: &Said, method: Method) {
    let (first, lines) = lines(head);
    let (version, status, reason) = &said.line;
    let version = if *version == Version::H11 { "HTTP/1.1" } else { "HTTP/1.0" };
    let begin = format!("{version} {status}");
    let rest = first.strip_prefix(begin.as_bytes()).expect("version and status");
    assert!(rest.is_empty() && reason.is_empty() || rest.strip_prefix(b" ") == Some(reason));
    assert_eq!(lines, said.fields.iter().map(|field| field.0.clone()).collect::<Vec<_>>());
    assert_eq!(said.keep_alive, keeps_alive(said.line.0, &lines) && said.body != AnswerBody::UntilClose);
    let codings = count(&lines, "transfer-encoding");
    let none = *status < 200 || matches!(status, 204 | 304) || method == Method::Head;
    match said.body {
        AnswerBody::None => assert!(none),
        AnswerBody::Length(n) => assert_eq!((none, codings, length(&lines)), (false, 0, Some(n))),
        AnswerBody::Chunked => {
            assert_eq!((none, codings, count(&lines, "content-length")), (false, 1, 0));
            assert!(is_chunked(&lines) && said.line.0 == Version::H11);
        }
        AnswerBody::UntilClose => {
            assert_eq!((none, codings, count(&lines, "content-length"), said.keep_alive), (false, 0, 0, false));
        }
    }
}

/// What a client gets reads as the same answer.
fn check_passed(head: &[u8], said: &Said, method: Method) {
    let mut parsed = ResponseHead::new();
    let _ = parsed.parse(head, &LIMITS, method);
    for (client_version, keep_alive) in [(Version::H11, true), (Version::H11, false), (Version::H10, true)] {
        let framing = match said.body {
            AnswerBody::Chunked if client_version == Version::H10 => AnswerBody::UntilClose,
            framing => framing,
        };
        let mut out = Vec::new();
        write(&mut out, &parsed, head, &Answer { request_id: b"id", framing, keep_alive, client_version });
        let mut again = ResponseHead::new();
        let limits = corelane::http1::HeadLimits { bytes: 2 * LIMITS.bytes, fields: LIMITS.fields + 4 };
        assert_eq!(again.parse(&out, &limits, method), Ok(Parsed::Complete(out.len())));
        assert_eq!((again.status, again.reason.of(&out), again.body), (said.line.1, &said.line.2[..], framing));
        let kept = |fields: &[(Line, FieldKind)]| -> Vec<Line> {
            fields
                .iter()
                .filter(|f| matches!(f.1, FieldKind::Pass | FieldKind::ContentType))
                .map(|f| f.0.clone())
                .collect()
        };
        let passed = fields(&again.fields, &out);
        assert_eq!(kept(&passed), kept(&said.fields));
        let (_, lines) = lines(&out);
        assert_eq!(count(&lines, "x-request-id"), 1);
        let lives = keep_alive && framing != AnswerBody::UntilClose;
        if said.line.1 >= 200 {
            assert_eq!(count(&lines, "connection"), usize::from(!lives || client_version == Version::H10));
        }
    }
}
