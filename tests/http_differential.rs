//! Our HTTP/1.1 parser beside hyper's: the same messages, the same meaning, or a difference that is written down.
//!
//! Takes some thousand legal and illegal messages, each read by both, gives a failure for every difference that no row
//! of a table explains, and for every row that no message needs. Never lets us take what hyper refuses where that
//! matters for the length of a message: the tables have no row for it.

#[path = "http_differential/corpus.rs"]
mod corpus;
#[path = "http_differential/read.rs"]
mod read;

use std::collections::BTreeMap;

use corelane::fault::Fault;
use corelane::http1::Method;
use read::{Message, Open};

/// A difference that is meant: our fault, as its code and its detail, of a message that hyper takes (or what else we do);
/// what such a message has, as far as that can be told by a look at its bytes; and the reason.
struct Meant {
    says: &'static str,
    has: fn(&[u8]) -> bool,
    why: &'static str,
}

const fn meant(says: &'static str, has: fn(&[u8]) -> bool, why: &'static str) -> Meant {
    Meant { says, has, why }
}

/// What stands in a table for the one thing in which we are laxer.
const LAXER: &str = "taken, and refused by hyper";
/// What stands in a table for what we have not refused when hyper has.
const LATER: &str = "refused later than by hyper";

/// Requests that we refuse and hyper takes.
const REQUESTS: &[Meant] = &[
    meant(
        "bad_framing: Content-Length and Transfer-Encoding exclude each other.",
        both,
        "hyper lets the coding win; the next parser may not",
    ),
    meant(
        "bad_framing: Content-Length is repeated.",
        |wire| count(wire, "content-length") > 1,
        "hyper takes the same number twice; a list is not worth the doubt",
    ),
    meant(
        "bad_framing: Transfer-Encoding is repeated.",
        |wire| count(wire, "transfer-encoding") > 1,
        "hyper looks at the last one alone",
    ),
    meant(
        "transfer_coding_unknown: ",
        other_coding,
        "hyper looks at the last coding alone, and undoes no other; neither do we, so we say so",
    ),
    meant(
        "bad_chunk: ",
        has_odd_chunk,
        "hyper takes controls in extensions, more digits than a size has, a bare LF as end of a trailer",
    ),
    meant(
        "bad_chunk: ",
        has_blank_size,
        "hyper takes blanks behind a size; the grammar has them only before an extension",
    ),
    meant("bad_header: Lines end in CRLF.", bare_lf, "hyper takes a bare LF"),
    meant(
        "bad_request_line: Lines end in CRLF.",
        |wire| bare_lf(wire) || empty_lines(wire),
        "hyper takes a bare LF, and any number of empty lines between requests",
    ),
    meant(
        "bad_header: Connection is not a list of tokens.",
        |wire| count(wire, "connection") > 0,
        "hyper passes over what is none",
    ),
    meant(
        "bad_header: Connection names a field that is not hop-by-hop.",
        |wire| count(wire, "connection") > 0,
        "hyper is no proxy and drops no field",
    ),
    meant("bad_host: ", |_| true, "hyper leaves Host to its caller; a proxy routes and forwards by it"),
    meant(
        "bad_request_line: It does not begin with a method.",
        |wire| wire.iter().take_while(|byte| byte.is_ascii_alphabetic()).count() > 32,
        "hyper takes methods of any length",
    ),
    meant("method_not_implemented: ", |_| true, "hyper leaves methods to its caller; none of the others has a route"),
    meant(
        "bad_request_line: Only OPTIONS may have the target `*`.",
        |wire| contains(wire, b" * "),
        "hyper leaves that to its caller",
    ),
    meant(
        "bad_request_line: The target holds bytes that must be percent-encoded.",
        odd_target,
        "hyper cuts a fragment off and takes UTF-8",
    ),
    meant(
        "bad_request_line: The target is neither a path nor an http URL.",
        |_| true,
        "hyper takes authorities, other schemes and relative paths",
    ),
    meant(
        "bad_request_line: The target's host is not valid.",
        |wire| contains(wire, b"://"),
        "hyper takes user names and ports of any size",
    ),
    meant("target_too_long: ", |wire| wire.len() > 8192, "hyper takes eight times as much"),
    meant(
        "expectation_failed: ",
        |wire| count(wire, "expect") > 0,
        "hyper passes over an expectation that it does not know",
    ),
    meant("upgrade_not_supported: ", |wire| count(wire, "upgrade") > 0, "hyper leaves upgrades to its caller"),
    meant(
        LAXER,
        |_| true,
        "targets pass raw, whatever visible ASCII is in them; hyper's type for URIs has no room for some",
    ),
];

/// Answers that we refuse and hyper takes, or waits for the end of.
const ANSWERS: &[Meant] = &[
    meant(
        "worker_bad_answer: It has both Content-Length and Transfer-Encoding.",
        both,
        "hyper lets the coding win; a client behind us may not",
    ),
    meant(
        "worker_bad_answer: Its Content-Length fields disagree.",
        |wire| count(wire, "content-length") > 1,
        "hyper looks at lengths only where they count: not beside a coding, not without a body",
    ),
    meant(
        "worker_bad_answer: Its Content-Length is not a number.",
        |wire| count(wire, "content-length") > 0,
        "the same, and hyper takes lists of one number",
    ),
    meant(
        "worker_bad_answer: Its transfer coding is not chunked.",
        |wire| count(wire, "transfer-encoding") > 0,
        "hyper reads other codings until the connection ends, and passes them on encoded",
    ),
    meant("worker_bad_framing: ", has_odd_chunk, "as with requests"),
    meant("worker_bad_framing: ", has_blank_size, "as with requests"),
    meant("worker_bad_framing: ", has_open_trailers, "hyper looks at trailers when all are there"),
    meant("worker_bad_answer: Its lines do not end in CRLF.", bare_lf, "hyper takes a bare LF"),
    meant(
        "worker_bad_answer: It does not begin with a status line.",
        |wire| contains(wire, b"\r\n\r\nHTTP") || wire.starts_with(b"\r\n"),
        "hyper takes empty lines before it",
    ),
    meant(
        "worker_bad_answer: It switches protocols, which nobody asked for.",
        |wire| contains(wire, b" 101 "),
        "hyper leaves upgrades to its caller",
    ),
    meant(
        "worker_bad_answer: Its status is not a number from 100 to 599.",
        |wire| contains(wire, b" 600 ") || contains(wire, b" 999 "),
        "hyper takes any three digits from 100 on; no class beyond 5xx means anything",
    ),
    meant(
        "worker_bad_answer: Connection is not a list of tokens.",
        |wire| count(wire, "connection") > 0,
        "hyper passes over what is none",
    ),
    meant(
        "worker_bad_answer: Connection names a field that is not hop-by-hop.",
        |wire| count(wire, "connection") > 0,
        "hyper is no proxy and drops no field",
    ),
    meant(LATER, |_| true, "we look at field lines when all are there, hyper as they come"),
];

fn both(wire: &[u8]) -> bool {
    count(wire, "content-length") > 0 && count(wire, "transfer-encoding") > 0
}

fn other_coding(wire: &[u8]) -> bool {
    count(wire, "transfer-encoding") == 1 && wire.contains(&b',')
}

/// What follows the head.
fn body(wire: &[u8]) -> &[u8] {
    find(wire, b"\r\n\r\n").map_or(b"", |at| &wire[at + 4..])
}

fn has_odd_chunk(wire: &[u8]) -> bool {
    let odd = |line: &[u8]| line.iter().any(|byte| !matches!(byte, b'\r' | b'\t') && byte.is_ascii_control());
    let long = |line: &[u8]| line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count() > 16;
    bare_lf(body(wire)) || body(wire).split(|byte| *byte == b'\n').any(|line| odd(line) || long(line))
}

fn has_blank_size(wire: &[u8]) -> bool {
    let blank = |line: &[u8]| line.ends_with(b" \r") || line.ends_with(b"\t\r");
    body(wire).split(|byte| *byte == b'\n').any(|line| blank(line) && line[0].is_ascii_hexdigit())
}

/// Whether the last chunk is there, but not what ends the message.
fn has_open_trailers(wire: &[u8]) -> bool {
    find(body(wire), b"0\r\n").is_some_and(|at| !contains(&body(wire)[at..], b"\r\n\r\n"))
}

fn bare_lf(wire: &[u8]) -> bool {
    wire.first() == Some(&b'\n') || wire.windows(2).any(|two| two[1] == b'\n' && two[0] != b'\r')
}

fn empty_lines(wire: &[u8]) -> bool {
    contains(wire, &b"\r\n".repeat(5))
}

fn odd_target(wire: &[u8]) -> bool {
    wire.iter().take_while(|byte| **byte != b'\r').any(|byte| *byte == b'#' || *byte >= 0x7f)
}

/// Lines that have this name, however many colons or spaces follow it.
fn count(wire: &[u8], name: &str) -> usize {
    let lines = wire.split(|byte| *byte == b'\n');
    lines.filter(|line| line.get(..name.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(name.as_bytes()))).count()
}

fn find(wire: &[u8], what: &[u8]) -> Option<usize> {
    wire.windows(what.len()).position(|window| window == what)
}

fn contains(wire: &[u8], what: &[u8]) -> bool {
    find(wire, what).is_some()
}

/// Differences, sorted by what explains them.
struct Judged {
    rows: &'static [Meant],
    /// Messages that needed a row.
    needed: Vec<usize>,
    /// Differences without a row, one message for each kind, and how many more.
    unexplained: BTreeMap<String, (String, usize)>,
    /// Messages that both took.
    taken: usize,
}

impl Judged {
    fn new(rows: &'static [Meant]) -> Judged {
        Judged { rows, needed: vec![0; rows.len()], unexplained: BTreeMap::new(), taken: 0 }
    }

    /// We refuse what hyper takes.
    fn refused(&mut self, wire: &[u8], fault: &Fault) {
        self.meant(wire, &format!("{}: {}", fault.row().code, fault.detail));
    }

    /// A difference that a row has to explain.
    fn meant(&mut self, wire: &[u8], says: &str) {
        let fits = |row: &Meant| row.says == says && (row.has)(wire);
        match self.rows.iter().position(fits) {
            Some(row) => self.needed[row] += 1,
            None => self.differs(wire, &format!("we refuse, hyper does not: {says}")),
        }
    }

    fn differs(&mut self, wire: &[u8], how: &str) {
        let shown = || wire[..wire.len().min(300)].escape_ascii().to_string();
        self.unexplained.entry(how.to_owned()).or_insert_with(|| (shown(), 0)).1 += 1;
    }

    fn settle(self, fewest: usize) {
        assert!(self.unexplained.is_empty(), "differences that no row explains: {:#?}", self.unexplained);
        let idle: Vec<_> = self
            .rows
            .iter()
            .zip(&self.needed)
            .filter(|(_, needed)| **needed == 0)
            .map(|(row, _)| (row.says, row.why))
            .collect();
        assert!(idle.is_empty(), "rows that no message needs: {idle:#?}");
        assert!(self.taken >= fewest, "only {} messages are taken by both", self.taken);
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime")
}

#[test]
fn requests_are_read_as_hyper_reads_them() {
    let mut judged = Judged::new(REQUESTS);
    runtime().block_on(async {
        for message in corpus::requests() {
            let wire = [&message[..], corpus::NEXT_REQUEST].concat();
            let (ours, hyper) = (read::our_requests(&wire), read::hyper_requests(&wire).await);
            let same = ours.messages.iter().zip(&hyper).take_while(|(ours, hyper)| ours == hyper).count();
            judged.taken += usize::from(same > 0);
            match (ours.messages.get(same), hyper.get(same), &ours.refused) {
                (None, None, _) => {}
                (None, Some(_), Some(fault)) => judged.refused(&wire, fault),
                (None, Some(_), None) => judged.differs(&wire, "hyper reads on where we do not"),
                (Some(_), Some(_), _) => judged.differs(&wire, "the message is another one"),
                (Some(_), None, _) if only_the_target(&wire).await => judged.meant(&wire, LAXER),
                (Some(_), None, _) => judged.differs(&wire, "we take what hyper does not"),
            }
        }
    });
    judged.settle(900);
}

/// What hyper's type for URIs has no room for.
const LAXER_IN_PATHS: &str = "<>`";
const LAXER_IN_QUERIES: &str = "\"<>";

/// Whether a request that we take and hyper does not is read as hyper reads it with a plain target, and the target has a
/// byte for which hyper has no room, so that nothing but that byte is meant.
async fn only_the_target(wire: &[u8]) -> bool {
    let mut words = wire.splitn(3, |byte| *byte == b' ');
    let (Some(method), Some(target), Some(rest)) = (words.next(), words.next(), words.next()) else { return false };
    let plain = [method, b" /plain ", rest].concat();
    let odd = target.starts_with(b"/") && target.iter().any(|byte| LAXER_IN_PATHS.as_bytes().contains(byte));
    let ends = |messages: &[Message]| -> Vec<_> {
        messages.iter().map(|m| (m.version, m.fields.clone(), m.body.clone())).collect()
    };
    odd && ends(&read::our_requests(wire).messages) == ends(&read::hyper_requests(&plain).await)
}

#[test]
fn targets_that_hyper_has_no_room_for_are_few() {
    runtime().block_on(async {
        for (begin, few) in [("/a", LAXER_IN_PATHS), ("/a?b", LAXER_IN_QUERIES)] {
            let mut laxer = Vec::new();
            for byte in 0x21..=0x7e {
                let wire = [b"GET ", begin.as_bytes(), &[byte], b"c HTTP/1.1\r\nHost: a\r\n\r\n"].concat();
                let (ours, hyper) = (read::our_requests(&wire).messages, read::hyper_requests(&wire).await);
                match (ours.len(), hyper.len()) {
                    (1, 0) => laxer.push(byte),
                    (1, 1) => assert_eq!(ours, hyper),
                    other => assert_eq!((byte, other), (b'#', (0, 1))),
                }
            }
            assert_eq!(String::from_utf8_lossy(&laxer), few, "{begin}");
        }
    });
}

#[test]
fn answers_are_read_as_hyper_reads_them() {
    let mut judged = Judged::new(ANSWERS);
    for wire in corpus::answers() {
        for method in [Method::Get, Method::Head] {
            // One runtime each: connections are left behind.
            let (open, closed) = runtime().block_on(read::hyper_answer(&wire, method));
            let (our_open, our_closed, fault) = read::our_answer(&wire, method);
            judged.taken += usize::from(closed.is_some() && our_closed.is_some());
            match (&our_closed, &closed, &fault) {
                (ours, hyper, _) if ours == hyper => {}
                (None, Some(_), Some(fault)) => judged.refused(&wire, fault),
                (None, _, _) => judged.differs(&wire, "hyper reads an answer where we do not"),
                (Some(_), None, _) => judged.differs(&wire, "we take what hyper does not"),
                (Some(_), Some(_), _) => judged.differs(&wire, "the answer is another one"),
            }
            match (&our_open, &open, &fault) {
                (ours, hyper, _) if ours == hyper => {}
                (Open::Refused, _, Some(fault)) => judged.refused(&wire, fault),
                (Open::Waiting, Open::Refused, None) if our_closed.is_none() && closed.is_none() => {
                    judged.meant(&wire, LATER)
                }
                (ours, hyper, _) => {
                    judged.differs(&wire, &format!("while it is open: {} here, {} there", kind(ours), kind(hyper)))
                }
            }
        }
    }
    judged.settle(1000);
}

fn kind(open: &Open) -> &'static str {
    match open {
        Open::Whole(_, true) => "whole, another may follow",
        Open::Whole(_, false) => "whole, none may follow",
        Open::Waiting => "waiting",
        Open::Refused => "refused",
    }
}
