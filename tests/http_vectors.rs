//! Legal and illegal HTTP/1.1 messages, and what must hold for all of them: any split of the input gives the same
//! result, what is written reads back as what was meant, and no input panics.

use corelane::fault::{Fault, What};
use corelane::http1::*;
use corelane::limits::{MAX_REQUEST_ID_BYTES, MAX_TARGET_BYTES};
use proptest::prelude::*;
use std::net::{IpAddr, Ipv4Addr};

const LIMITS: HeadLimits = HeadLimits { bytes: 16 * 1024, fields: 40 };
const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7));

fn request(wire: &[u8]) -> Result<(RequestHead, Parsed), What> {
    let mut head = RequestHead::new();
    let parsed = head.parse(wire, &LIMITS).map_err(|f| f.what)?;
    Ok((head, parsed))
}

/// What a request says, in a form that can be compared.
#[derive(Debug, PartialEq, Eq)]
struct Said {
    line: (Method, Version, Vec<u8>, Option<Vec<u8>>),
    fields: Vec<(Vec<u8>, Vec<u8>, FieldKind)>,
    body: BodyLength,
    keep_alive: bool,
    expect_continue: bool,
    parsed: Parsed,
}

fn fields(fields: &[Field], wire: &[u8]) -> Vec<(Vec<u8>, Vec<u8>, FieldKind)> {
    fields.iter().map(|f| (f.name.of(wire).to_vec(), f.value.of(wire).to_vec(), f.kind)).collect()
}

fn said(head: &RequestHead, parsed: Parsed, wire: &[u8]) -> Said {
    Said {
        line: (head.method, head.version, head.path.of(wire).to_vec(), head.query.map(|q| q.of(wire).to_vec())),
        fields: fields(&head.fields, wire),
        body: head.body,
        keep_alive: head.keep_alive,
        expect_continue: head.expect_continue,
        parsed,
    }
}

fn whole(wire: &[u8]) -> Result<Option<Said>, What> {
    let (head, parsed) = request(wire)?;
    Ok((parsed != Parsed::Partial).then(|| said(&head, parsed, wire)))
}

/// The same, with the input arriving up to each of `ends` in turn.
fn in_parts(wire: &[u8], ends: impl IntoIterator<Item = usize>) -> Result<Option<Said>, What> {
    let mut head = RequestHead::new();
    for end in ends {
        let parsed = head.parse(&wire[..end], &LIMITS).map_err(|f| f.what)?;
        if parsed != Parsed::Partial {
            return Ok(Some(said(&head, parsed, &wire[..end])));
        }
    }
    Ok(None)
}

fn show(wire: &[u8]) -> String {
    String::from_utf8_lossy(&wire[..wire.len().min(200)]).into_owned()
}

fn answer(wire: &[u8], method: Method) -> Result<(ResponseHead, Parsed), Fault> {
    let mut head = ResponseHead::new();
    let parsed = head.parse(wire, &LIMITS, method)?;
    Ok((head, parsed))
}

fn answer_in_bytes(wire: &[u8], method: Method) -> Result<(ResponseHead, Parsed), Fault> {
    let mut head = ResponseHead::new();
    for end in 0..=wire.len() {
        let parsed = head.parse(&wire[..end], &LIMITS, method)?;
        if parsed != Parsed::Partial {
            return Ok((head, parsed));
        }
    }
    Ok((head, Parsed::Partial))
}

/// A whole request with these field lines besides Host.
fn with(lines: &str) -> Vec<u8> {
    format!("POST /v1/completions HTTP/1.1\r\nHost: a\r\n{lines}\r\n").into_bytes()
}

fn with_bytes(lines: &[u8]) -> Vec<u8> {
    [&b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"[..], lines, b"\r\n"].concat()
}

fn get(host_lines: &str) -> Vec<u8> {
    format!("GET / HTTP/1.1\r\n{host_lines}\r\n").into_bytes()
}

fn line(line: &str) -> Vec<u8> {
    format!("{line}\r\nHost: a\r\n\r\n").into_bytes()
}

fn illegal_requests() -> Vec<(Vec<u8>, What)> {
    use What::*;
    let many = |n: usize| (0..n).map(|i| format!("x-{i}: 1\r\n")).collect::<String>();
    let long = "a".repeat(MAX_TARGET_BYTES);
    vec![
        // contradictory framing
        (with("Content-Length: 3\r\nTransfer-Encoding: chunked\r\n"), BadFraming),
        (with("Transfer-Encoding: chunked\r\nContent-Length: 3\r\n"), BadFraming),
        (with("Transfer-Encoding: chunked\r\nContent-Length: 0\r\n"), BadFraming),
        (with("Transfer-Encoding: identity\r\nContent-Length: 3\r\n"), BadFraming),
        (with("transfer-encoding: CHUNKED\r\ncontent-length: 3\r\n"), BadFraming),
        (with("Content-Length: 3\r\nContent-Length: 4\r\n"), BadFraming),
        (with("Content-Length: 3\r\nContent-Length: 3\r\n"), BadFraming),
        (with("Content-Length: 3\r\ncontent-length: 3\r\n"), BadFraming),
        (with("Content-Length: 3, 3\r\n"), BadFraming),
        (with("Content-Length: 3,4\r\n"), BadFraming),
        (with("Content-Length:\r\n"), BadFraming),
        (with("Content-Length: +3\r\n"), BadFraming),
        (with("Content-Length: -3\r\n"), BadFraming),
        (with("Content-Length: 3.0\r\n"), BadFraming),
        (with("Content-Length: 0x3\r\n"), BadFraming),
        (with("Content-Length: 1e3\r\n"), BadFraming),
        (with("Content-Length: 3 3\r\n"), BadFraming),
        (with("Content-Length: 3;\r\n"), BadFraming),
        (with("Content-Length: \"3\"\r\n"), BadFraming),
        (with("Content-Length: three\r\n"), BadFraming),
        (with("Content-Length: 1_000\r\n"), BadFraming),
        (with_bytes(b"Content-Length: \xd9\xa3\r\n"), BadFraming),
        (with("Content-Length: 9223372036854775808\r\n"), BadFraming),
        (with("Content-Length: 18446744073709551616\r\n"), BadFraming),
        (with("Content-Length: 18446744073709551619\r\n"), BadFraming),
        (with("Content-Length: 999999999999999999999999999999\r\n"), BadFraming),
        (with("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"), BadFraming),
        (with("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n"), BadFraming),
        (with("Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"), BadFraming),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec(), BadFraming),
        (b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\n".to_vec(), BadFraming),
        // transfer codings other than exactly chunked
        (with("Transfer-Encoding: gzip\r\n"), CodingUnknown),
        (with("Transfer-Encoding: identity\r\n"), CodingUnknown),
        (with("Transfer-Encoding: gzip, chunked\r\n"), CodingUnknown),
        (with("Transfer-Encoding: chunked, gzip\r\n"), CodingUnknown),
        (with("Transfer-Encoding: chunked, chunked\r\n"), CodingUnknown),
        (with("Transfer-Encoding: chunked,\r\n"), CodingUnknown),
        (with("Transfer-Encoding: ,chunked\r\n"), CodingUnknown),
        (with("Transfer-Encoding: xchunked\r\n"), CodingUnknown),
        (with("Transfer-Encoding: chunked;q=1\r\n"), CodingUnknown),
        (with("Transfer-Encoding: \"chunked\"\r\n"), CodingUnknown),
        (with("Transfer-Encoding:\r\n"), CodingUnknown),
        (with_bytes(b"Transfer-Encoding: chunked\xa0\r\n"), CodingUnknown),
        (with_bytes(b"Transfer-Encoding: \xef\xbb\xbfchunked\r\n"), CodingUnknown),
        // line ends
        (b"GET / HTTP/1.1\nHost: a\r\n\r\n".to_vec(), BadRequestLine),
        (b"GET / HTTP/1.1\nHost: a\n\n".to_vec(), BadRequestLine),
        (b"GET / HTTP/1.1\r\nHost: a\n\r\n".to_vec(), BadHeader),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\n".to_vec(), BadHeader),
        (b"GET / HTTP/1.1\r\n\nHost: a\r\n\r\n".to_vec(), BadHeader),
        (b"GET / HTTP/1.1\rHost: a\r\n\r\n".to_vec(), BadRequestLine),
        (b"GET /\r HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(), BadRequestLine),
        (b"GET / HTTP/1.1\r\r\nHost: a\r\n\r\n".to_vec(), BadRequestLine),
        (with("X: a\rb\r\n"), BadHeader),
        (with("X: a\r\r\n"), BadHeader),
        (with("X: a\rTransfer-Encoding: chunked\r\n"), BadHeader),
        (with("X: a\nTransfer-Encoding: chunked\r\n"), BadHeader),
        (with("\rX: a\r\n"), BadHeader),
        (b"\nGET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(), BadRequestLine),
        (b"\rGET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(), BadRequestLine),
        (b"\r\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(), BadRequestLine),
        (b"\r\n\r\n\r\n\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(), BadRequestLine),
        // folding and names
        (with("X: a\r\n b\r\n"), BadHeader),
        (with("X: a\r\n\tb\r\n"), BadHeader),
        (with("Content-Length: 3\r\n 4\r\n"), BadHeader),
        (with("X:\r\n chunked\r\n"), BadHeader),
        (b"GET / HTTP/1.1\r\n Host: a\r\n\r\n".to_vec(), BadHeader),
        (b"GET / HTTP/1.1\r\n\tHost: a\r\n\r\n".to_vec(), BadHeader),
        (b"GET / HTTP/1.1\r\n \r\nHost: a\r\n\r\n".to_vec(), BadHeader),
        (with("Content-Length : 3\r\n"), BadHeader),
        (with("Transfer-Encoding\t: chunked\r\n"), BadHeader),
        (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n".to_vec(), BadHeader),
        (with("no colon\r\n"), BadHeader),
        (with("nocolon\r\n"), BadHeader),
        (with(": empty\r\n"), BadHeader),
        (with("X Y: a\r\n"), BadHeader),
        (with("X(Y): a\r\n"), BadHeader),
        (with("X/Y: a\r\n"), BadHeader),
        (with("X\"Y: a\r\n"), BadHeader),
        (with("X{Y}: a\r\n"), BadHeader),
        (with("X@Y: a\r\n"), BadHeader),
        (with("[X]: a\r\n"), BadHeader),
        (with("X=Y\r\n"), BadHeader),
        (with_bytes(b"X\xe9: a\r\n"), BadHeader),
        (with_bytes(b"X\x00: a\r\n"), BadHeader),
        (with_bytes(b"\xef\xbb\xbfX: a\r\n"), BadHeader),
        (with_bytes(b"X\x7f: a\r\n"), BadHeader),
        (with_bytes(b"X\x0b: a\r\n"), BadHeader),
        // values
        (with_bytes(b"X: a\x00b\r\n"), BadHeader),
        (with_bytes(b"X: \x00\r\n"), BadHeader),
        (with_bytes(b"X: a\x01\r\n"), BadHeader),
        (with_bytes(b"X: a\x08\r\n"), BadHeader),
        (with_bytes(b"X: a\x0b\r\n"), BadHeader),
        (with_bytes(b"X: a\x0cb\r\n"), BadHeader),
        (with_bytes(b"X: a\x1b[0m\r\n"), BadHeader),
        (with_bytes(b"X: a\x7f\r\n"), BadHeader),
        (with_bytes(b"Content-Length: 3\x0b\r\n"), BadHeader),
        (with_bytes(b"Transfer-Encoding: \x0bchunked\r\n"), BadHeader),
        (with_bytes(b"X: a long enough value for the vector path of any tokenizer \x00 and on\r\n"), BadHeader),
        (with_bytes(b"X: a long enough value for the vector path of any tokenizer \x7f and on\r\n"), BadHeader),
        // Host
        (get(""), BadHost),
        (get("Hos: a\r\n"), BadHost),
        (get("Host:\r\n"), BadHost),
        (get("Host: \t \r\n"), BadHost),
        (get("Host: a\r\nHost: b\r\n"), BadHost),
        (get("Host: a\r\nHost: a\r\n"), BadHost),
        (get("Host: a\r\nhOST: a\r\n"), BadHost),
        (get("Host: a, b\r\n"), BadHost),
        (get("Host: a b\r\n"), BadHost),
        (get("Host: a/b\r\n"), BadHost),
        (get("Host: http://a\r\n"), BadHost),
        (get("Host: u@a\r\n"), BadHost),
        (get("Host: a:\x38\x30b\r\n"), BadHost),
        (get("Host: a:-1\r\n"), BadHost),
        (get("Host: a:65536\r\n"), BadHost),
        (get("Host: a:80:80\r\n"), BadHost),
        (get("Host: :80\r\n"), BadHost),
        (get("Host: ::1\r\n"), BadHost),
        (get("Host: [::1\r\n"), BadHost),
        (get("Host: [::1]x\r\n"), BadHost),
        (get("Host: [a]\r\n"), BadHost),
        (get("Host: []\r\n"), BadHost),
        (get("Host: a?b\r\n"), BadHost),
        (get("Host: a#b\r\n"), BadHost),
        (get("Host: a%00b\r\n"), BadHost),
        (get("Host: a\\b\r\n"), BadHost),
        (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n".to_vec(), BadHost),
        (b"GET / HTTP/1.0\r\nHost: a b\r\n\r\n".to_vec(), BadHost),
        (b"GET http://a/ HTTP/1.1\r\n\r\n".to_vec(), BadHost),
        // request line
        (b"GET /\r\n".to_vec(), BadRequestLine),
        (b"GET /\r\n\r\n".to_vec(), BadRequestLine),
        (b"GET\r\n\r\n".to_vec(), BadRequestLine),
        (line("GET  HTTP/1.1"), BadRequestLine),
        (line("GET HTTP/1.1"), BadRequestLine),
        (line("GET  / HTTP/1.1"), BadRequestLine),
        (line("GET /  HTTP/1.1"), BadRequestLine),
        (line("GET / HTTP/1.1 "), BadRequestLine),
        (line("GET / HTTP/1.1 x"), BadRequestLine),
        (line(" GET / HTTP/1.1"), BadRequestLine),
        (line("GET\t/\tHTTP/1.1"), BadRequestLine),
        (line("GET\t/ HTTP/1.1"), BadRequestLine),
        (line("GET / http/1.1"), BadRequestLine),
        (line("GET / HTTP/1.11"), BadRequestLine),
        (line("GET / HTTP/1"), BadRequestLine),
        (line("GET / HTTP/1,1"), BadRequestLine),
        (line("GET / HTTP 1.1"), BadRequestLine),
        (line("GET / XTTP/1.1"), BadRequestLine),
        (line("GET / HTTP/x.1"), BadRequestLine),
        (line("G(T / HTTP/1.1"), BadRequestLine),
        (line("GET: / HTTP/1.1"), BadRequestLine),
        (line("{\"a\":1}"), BadRequestLine),
        (line(&format!("{} / HTTP/1.1", "A".repeat(33))), BadRequestLine),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(), BadRequestLine),
        (b"\x00".to_vec(), BadRequestLine),
        (b"\x80\x2e\x01".to_vec(), BadRequestLine),
        // target
        (line("GET v1/models HTTP/1.1"), BadRequestLine),
        (line("GET ? HTTP/1.1"), BadRequestLine),
        (line("GET * HTTP/1.1"), BadRequestLine),
        (line("OPTIONS ** HTTP/1.1"), BadRequestLine),
        (line("GET /a b HTTP/1.1"), BadRequestLine),
        (line("GET /#frag HTTP/1.1"), BadRequestLine),
        (line("GET /?a#frag HTTP/1.1"), BadRequestLine),
        (line("GET /\tx HTTP/1.1"), BadRequestLine),
        (line("GET /\x01 HTTP/1.1"), BadRequestLine),
        (line("GET /\x7f HTTP/1.1"), BadRequestLine),
        (line("GET /\0 HTTP/1.1"), BadRequestLine),
        (line("GET /é HTTP/1.1"), BadRequestLine),
        (b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(), BadRequestLine),
        (line("GET ftp://a/ HTTP/1.1"), BadRequestLine),
        (line("GET http:/a HTTP/1.1"), BadRequestLine),
        (line("GET http:// HTTP/1.1"), BadRequestLine),
        (line("GET http:///x HTTP/1.1"), BadRequestLine),
        (line("GET http://?x HTTP/1.1"), BadRequestLine),
        (line("GET http://u:p@a/ HTTP/1.1"), BadRequestLine),
        (line("GET http://a:99999/ HTTP/1.1"), BadRequestLine),
        (line("GET http://a,b/ HTTP/1.1"), BadRequestLine),
        (line("GET a:80 HTTP/1.1"), BadRequestLine),
        (line(&format!("GET /{long} HTTP/1.1")), TargetTooLong),
        (line(&format!("GET http://a/{long} HTTP/1.1")), TargetTooLong),
        (format!("GET /{long}").into_bytes(), TargetTooLong),
        (format!("GET /{long}\nHost: a\n\n").into_bytes(), TargetTooLong),
        (format!("GET / {long}{long}").into_bytes(), BadRequestLine),
        // methods and versions
        (line("CONNECT a:443 HTTP/1.1"), MethodUnknown),
        (line("TRACE / HTTP/1.1"), MethodUnknown),
        (line("get / HTTP/1.1"), MethodUnknown),
        (line("Post / HTTP/1.1"), MethodUnknown),
        (line("GETS / HTTP/1.1"), MethodUnknown),
        (line("PROPFIND / HTTP/1.1"), MethodUnknown),
        (line("M-SEARCH * HTTP/1.1"), MethodUnknown),
        (line("PRI / HTTP/1.1"), MethodUnknown),
        (line("OTHER / HTTP/1.1"), MethodUnknown),
        (line(&format!("{} / HTTP/1.1", "A".repeat(32))), MethodUnknown),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), VersionUnknown),
        (line("GET / HTTP/2.0"), VersionUnknown),
        (line("GET / HTTP/0.9"), VersionUnknown),
        (line("GET / HTTP/1.2"), VersionUnknown),
        (line("GET / HTTP/3.0"), VersionUnknown),
        // expectations, upgrades, Connection
        (with("Content-Length: 3\r\nExpect: 200-ok\r\n"), ExpectationUnknown),
        (with("Expect: 100-continue, x\r\n"), ExpectationUnknown),
        (with("Expect:\r\n"), ExpectationUnknown),
        (with("Expect: 100-continue\r\nExpect: x\r\n"), ExpectationUnknown),
        (with("Connection: Upgrade\r\nUpgrade: websocket\r\n"), UpgradeRefused),
        (with("Connection: keep-alive, upgrade\r\nUpgrade: h2c, WebSocket\r\n"), UpgradeRefused),
        (with("Connection: upgrade\r\nUpgrade: websocket/13\r\n"), UpgradeRefused),
        (with("Connection: Content-Length\r\nContent-Length: 3\r\n"), BadHeader),
        (with("Connection: host\r\n"), BadHeader),
        (with("Connection: close, authorization\r\nAuthorization: Bearer x\r\n"), BadHeader),
        (with("Connection: a b\r\n"), BadHeader),
        (with("Connection: \"close\"\r\n"), BadHeader),
        (with(&format!("Connection: {}\r\n", ",".repeat(40))), BadHeader),
        // limits
        (with(&many(LIMITS.fields)), TooManyHeaders),
        (with(&many(1000)), TooManyHeaders),
        (with(&format!("X: {}\r\n", "a".repeat(LIMITS.bytes))), HeadTooLarge),
        (with(&format!("{}: a\r\n", "X".repeat(LIMITS.bytes))), HeadTooLarge),
    ]
}

#[test]
fn illegal_requests_get_their_fault_however_they_arrive() {
    let vectors = illegal_requests();
    assert!(vectors.len() > 150, "{}", vectors.len());
    for (wire, what) in &vectors {
        assert_eq!(request(wire).err(), Some(*what), "{:?}", show(wire));
        assert_eq!(in_parts(wire, 0..=wire.len()).err(), Some(*what), "byte by byte: {:?}", show(wire));
    }
}

#[test]
fn garbage_is_refused_before_a_line_is_complete() {
    for (part, what) in [
        (&b"\x16\x03"[..], What::BadRequestLine),
        (b"\n", What::BadRequestLine),
        (b" ", What::BadRequestLine),
        (b"GET\r", What::BadRequestLine),
        (b"GET  ", What::BadRequestLine),
        (b"GET / HTTP/2.0\r\n", What::VersionUnknown),
        (b"BREW / HTTP/1.1\r\n", What::MethodUnknown),
        (b"GET / HTTP/1.1\r\nHost: a\n", What::BadHeader),
    ] {
        assert_eq!(request(part).err(), Some(what), "{:?}", show(part));
    }
}

struct Legal {
    wire: Vec<u8>,
    path: &'static str,
    query: Option<&'static str>,
    body: BodyLength,
    keep_alive: bool,
    expect: bool,
}

fn legal(wire: Vec<u8>, path: &'static str) -> Legal {
    Legal { wire, path, query: None, body: BodyLength::None, keep_alive: true, expect: false }
}

fn legal_requests() -> Vec<Legal> {
    let posted = |lines: &str| legal(with(lines), "/v1/completions");
    let bytes = |lines: &[u8]| legal(with_bytes(lines), "/v1/completions");
    let on = |target: &str, path| legal(line(target), path);
    let long: &'static str = Box::leak(format!("/{}", "a".repeat(MAX_TARGET_BYTES - 1)).into_boxed_str());
    vec![
        legal(get("Host: a\r\n"), "/"),
        legal(get("host:a\r\n"), "/"),
        legal(get("HOST:\t a \t\r\n"), "/"),
        legal(get("Host: a:8080\r\n"), "/"),
        legal(get("Host: a:\r\n"), "/"),
        legal(get("Host: 127.0.0.1:30000\r\n"), "/"),
        legal(get("Host: [::1]:30000\r\n"), "/"),
        legal(get("Host: [2001:db8::1]\r\n"), "/"),
        legal(get("Host: my_service-1.ns.svc\r\n"), "/"),
        legal([b"\r\n".to_vec(), get("Host: a\r\n")].concat(), "/"),
        legal([b"\r\n\r\n\r\n\r\n".to_vec(), get("Host: a\r\n")].concat(), "/"),
        on("GET /a//b/../%2e%2E/;p=1 HTTP/1.1", "/a//b/../%2e%2E/;p=1"),
        on("HEAD //evil.example/ HTTP/1.1", "//evil.example/"),
        on("DELETE /a%20b%00 HTTP/1.1", "/a%20b%00"),
        on("PUT /\"<>\\^`{|} HTTP/1.1", "/\"<>\\^`{|}"),
        on("OPTIONS * HTTP/1.1", "*"),
        on("PATCH /x HTTP/1.1", "/x"),
        Legal { query: Some("a=b&c=%20"), ..on("GET /x?a=b&c=%20 HTTP/1.1", "/x") },
        Legal { query: Some(""), ..on("GET /x? HTTP/1.1", "/x") },
        Legal { query: Some("a?b/c"), ..on("GET /x?a?b/c HTTP/1.1", "/x") },
        on("GET http://h/x HTTP/1.1", "/x"),
        on("GET HTTP://h:80/x/ HTTP/1.1", "/x/"),
        on("GET https://h HTTP/1.1", "/"),
        Legal { query: Some("q"), ..on("GET http://[::1]:1?q HTTP/1.1", "/") },
        Legal { query: Some("u=http://b/"), ..on("GET http://h/x?u=http://b/ HTTP/1.1", "/x") },
        legal(line(&format!("GET {long} HTTP/1.1")), long),
        Legal { body: BodyLength::Length(0), ..posted("Content-Length: 0\r\n") },
        Legal { body: BodyLength::Length(3), ..posted("content-LENGTH:3\r\n") },
        Legal { body: BodyLength::Length(3), ..posted("Content-Length: \t003 \r\n") },
        Legal { body: BodyLength::Length(i64::MAX as u64), ..posted("Content-Length: 9223372036854775807\r\n") },
        Legal { body: BodyLength::Chunked, ..posted("Transfer-Encoding: chunked\r\n") },
        Legal { body: BodyLength::Chunked, ..posted("transfer-encoding:\tChUnKeD\t\r\n") },
        Legal {
            body: BodyLength::Chunked,
            expect: true,
            ..posted("Transfer-Encoding: chunked\r\nExpect: 100-Continue\r\n")
        },
        Legal { body: BodyLength::Length(3), expect: true, ..posted("Expect: 100-continue\r\nContent-Length: 3\r\n") },
        Legal { body: BodyLength::Length(0), ..posted("Expect: 100-continue\r\nContent-Length: 0\r\n") },
        posted("Expect: 100-continue\r\n"),
        posted("X:\r\nY: \r\nZ: \t\r\n"),
        posted("X: a\tb\r\nX: c, d\r\n"),
        posted("!#$%&'*+-.^_`|~09azAZ: x\r\n"),
        posted("X: a:b: c\r\n"),
        bytes(b"X: \xe9\xff caf\xc3\xa9\r\n"),
        posted("Content-Lengt: 3\r\nContent_Length: 4\r\nTransfer_Encoding: chunked\r\n"),
        posted("Connection: keep-alive\r\n"),
        posted("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\n"),
        posted("Upgrade: websocket\r\n"),
        posted("Connection: TE\r\nTE: trailers\r\n"),
        posted("Connection: , ,\r\n"),
        posted("Connection:\r\n"),
        posted("Connection: Transfer-Encoding\r\n"),
        posted("Trailer: Content-Length\r\n"),
        Legal { keep_alive: false, ..posted("Connection: close\r\n") },
        Legal { keep_alive: false, ..posted("Connection: x, CLOSE\r\n") },
        Legal { keep_alive: false, ..posted("Connection: keep-alive\r\nConnection: close\r\n") },
        Legal { keep_alive: false, ..legal(b"GET / HTTP/1.0\r\n\r\n".to_vec(), "/") },
        Legal { keep_alive: false, ..legal(b"GET / HTTP/1.0\r\nHost: a\r\n\r\n".to_vec(), "/") },
        legal(b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n".to_vec(), "/"),
        Legal {
            body: BodyLength::Length(3),
            ..legal(
                b"POST / HTTP/1.0\r\nConnection: keep-alive\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
                    .to_vec(),
                "/",
            )
        },
    ]
}

#[test]
fn legal_requests_say_what_they_mean_however_they_arrive() {
    for want in legal_requests() {
        let wire = &want.wire;
        let got = whole(wire).unwrap_or_else(|w| panic!("{w:?}: {:?}", show(wire))).expect("complete");
        assert_eq!(got.parsed, Parsed::Complete(wire.len()), "{:?}", show(wire));
        assert_eq!(String::from_utf8_lossy(&got.line.2), want.path);
        assert_eq!(got.line.3.as_deref(), want.query.map(str::as_bytes), "{:?}", show(wire));
        assert_eq!(
            (got.body, got.keep_alive, got.expect_continue),
            (want.body, want.keep_alive, want.expect),
            "{:?}",
            show(wire)
        );
        assert_eq!(in_parts(wire, 0..=wire.len()), Ok(Some(whole(wire).unwrap().unwrap())), "{:?}", show(wire));
        for cut in 0..wire.len().min(400) {
            assert_eq!(in_parts(wire, [cut, wire.len()]), whole(wire), "cut at {cut}: {:?}", show(wire));
        }
    }
}

#[test]
fn the_limits_hold_at_their_edges() {
    let sized = |n: usize| {
        let empty = with("X: \r\n").len();
        with(&format!("X: {}\r\n", "a".repeat(n - empty)))
    };
    assert!(request(&sized(LIMITS.bytes)).is_ok());
    assert_eq!(request(&sized(LIMITS.bytes + 1)).err(), Some(What::HeadTooLarge));
    // Bytes behind the head do not count.
    let piped = [sized(LIMITS.bytes), vec![b'x'; 100]].concat();
    assert_eq!(request(&piped).unwrap().1, Parsed::Complete(LIMITS.bytes));
    let full = (1..LIMITS.fields).map(|i| format!("x-{i}: 1\r\n")).collect::<String>();
    assert_eq!(request(&with(&full)).unwrap().0.fields.len(), LIMITS.fields);
    let tight = HeadLimits { bytes: 20, fields: 40 };
    for end in [20, 21, 40] {
        let wire = line("GET /a/rather/long/path HTTP/1.1");
        assert_eq!(RequestHead::new().parse(&wire[..end], &tight).unwrap_err().what, What::HeadTooLarge);
        assert_eq!(RequestHead::new().parse(&wire[..19], &tight), Ok(Parsed::Partial));
    }
    // The caller's limit is capped by the tokenizer's table.
    let huge = (0..MAX_FIELDS).map(|i| format!("x-{i}: 1\r\n")).collect::<String>();
    let wide = HeadLimits { bytes: 1 << 20, fields: usize::MAX };
    assert_eq!(RequestHead::new().parse(&with(&huge), &wide).unwrap_err().what, What::TooManyHeaders);
}

#[test]
fn a_head_is_reused_for_pipelined_requests() {
    let first = with("Content-Length: 3\r\nExpect: 100-continue\r\nConnection: close\r\n");
    let second = b"GET http://b/x?y HTTP/1.1\r\nHost: a\r\nX-Request-Id: 1\r\n\r\n".to_vec();
    let third = get("Host: a\r\n");
    let mut wire = [first.clone(), b"abc".to_vec(), second.clone(), third.clone()].concat();
    let mut head = RequestHead::new();
    assert_eq!(head.parse(&wire, &LIMITS), Ok(Parsed::Complete(first.len())));
    assert_eq!(head.body, BodyLength::Length(3));
    wire.drain(..first.len() + 3);
    assert_eq!(head.parse(&wire, &LIMITS), Ok(Parsed::Complete(second.len())));
    assert_eq!(head.authority.map(|a| a.of(&wire)), Some(&b"b"[..]));
    wire.drain(..second.len());
    assert_eq!(head.parse(&wire, &LIMITS), Ok(Parsed::Complete(third.len())));
    assert_eq!((head.body, head.expect_continue, head.keep_alive), (BodyLength::None, false, true));
    assert_eq!((head.query, head.authority, head.fields.len()), (None, None, 1));
    // A head that was left incomplete is forgotten on demand, and a fault does not stick.
    assert_eq!(head.parse(&second[..30], &LIMITS), Ok(Parsed::Partial));
    head.reset();
    assert_eq!(head.parse(&third, &LIMITS), Ok(Parsed::Complete(third.len())));
    assert!(head.parse(b"\n", &LIMITS).is_err());
    assert_eq!(head.parse(&third, &LIMITS), Ok(Parsed::Complete(third.len())));
}

#[test]
fn fields_are_found_by_kind_and_by_name() {
    let wire = with("X-A: 1\r\nx-a: 2\r\nContent-Type: application/json\r\nX-SMG-Routing-Key: k\r\n");
    let head = request(&wire).unwrap().0;
    assert_eq!(head.named(&wire, "X-a").map(|v| v.of(&wire)), Some(&b"1"[..]));
    assert_eq!(head.first(FieldKind::RoutingKey).map(|v| v.of(&wire)), Some(&b"k"[..]));
    assert_eq!(head.first(FieldKind::ContentType).map(|v| v.of(&wire)), Some(&b"application/json"[..]));
    assert_eq!(head.named(&wire, "x-b"), None);
}

#[test]
fn request_ids_are_taken_in_the_order_of_the_names() {
    let names: Vec<String> =
        ["x-request-id", "x-correlation-id", "x-trace-id", "request-id", "x-mine"].map(String::from).into();
    let id = |lines: &str| {
        let wire = with(lines);
        let head = request(&wire).unwrap().0;
        request_id(&head, &wire, &names).map(|s| String::from_utf8(s.of(&wire).to_vec()).unwrap())
    };
    assert_eq!(id("Request-Id: d\r\nX-Trace-Id: c\r\nX-Correlation-ID: b\r\nX-REQUEST-ID: a\r\n").unwrap(), "a");
    assert_eq!(id("Request-Id: d\r\nX-Trace-Id: c\r\nX-Correlation-ID: b\r\n").unwrap(), "b");
    assert_eq!(id("Request-Id: d\r\nX-Trace-Id: c\r\n").unwrap(), "c");
    assert_eq!(id("X-Mine: e\r\nRequest-Id: d\r\n").unwrap(), "d");
    assert_eq!(id("X-Mine: e\r\n").unwrap(), "e");
    assert_eq!(id(""), None);
    assert_eq!(id("X-Request-Id:\r\nRequest-Id: d\r\n").unwrap(), "d");
    assert_eq!(id("X-Request-Id: a b\r\n"), None);
    assert_eq!(id("X-Request-Id: a\tb\r\n"), None);
    assert_eq!(id("X-Request-Id: é\r\n"), None);
    assert!(id(&format!("X-Request-Id: {}\r\n", "i".repeat(MAX_REQUEST_ID_BYTES))).is_some());
    assert_eq!(id(&format!("X-Request-Id: {}\r\n", "i".repeat(MAX_REQUEST_ID_BYTES + 1))), None);
}

// ---- writing requests

fn forward() -> Forward<'static> {
    Forward {
        prefix: "",
        client: CLIENT,
        authorization: None,
        own_keys: false,
        request_id: b"id-1",
        length: BodyLength::None,
        dp_rank: None,
    }
}

fn forwarded(wire: &[u8], f: &Forward<'_>) -> String {
    let head = request(wire).unwrap().0;
    let mut out = Vec::new();
    request_head(&mut out, &head, wire, f);
    String::from_utf8_lossy(&out).into_owned()
}

#[test]
fn end_to_end_fields_pass_and_the_rest_does_not() {
    let wire = with(concat!(
        "Accept: a\r\nX-Repeat: 1\r\nACCEPT: b\r\nx-repeat:  2 \r\n",
        "Connection: close, x-Named\r\nX-Named: 1\r\nKeep-Alive: 5\r\nProxy-Authorization: p\r\nProxy-Connection: p\r\n",
        "TE: trailers\r\nTrailer: x\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n",
        "X-Corelane-Foo: 1\r\nX-Corelane-Key: 1\r\nX-SMG-Target-Worker: w\r\nX-Data-Parallel-Rank: 1\r\nX-Override-Y: 1\r\n",
        "Authorization: Bearer c\r\nX-SMG-Routing-Key: k\r\nContent-Type: application/json\r\nCookie: a=b\r\n",
        "traceparent: t\r\nX-Request-ID: theirs\r\nX-Correlation-Id: other\r\nX-Forwarded-For: 10.0.0.1, 10.0.0.2\r\n",
        "X-Forwarded-For: 10.0.0.3\r\nX-Forwarded-Proto: https\r\nForwarded: for=x\r\nX-Empty:\r\n",
    ));
    let out = forwarded(&wire, &Forward { length: BodyLength::Chunked, ..forward() });
    let want = concat!(
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\nAccept: a\r\nX-Repeat: 1\r\nACCEPT: b\r\nx-repeat: 2\r\n",
        "Authorization: Bearer c\r\nX-SMG-Routing-Key: k\r\nContent-Type: application/json\r\nCookie: a=b\r\n",
        "traceparent: t\r\nX-Correlation-Id: other\r\nX-Forwarded-Proto: https\r\nForwarded: for=x\r\nX-Empty: \r\n",
        "x-forwarded-for: 10.0.0.1, 10.0.0.2, 10.0.0.3, 192.0.2.7\r\nx-request-id: id-1\r\n",
        "transfer-encoding: chunked\r\n\r\n",
    );
    assert_eq!(out, want);
}

#[test]
fn keys_of_the_gateway_do_not_pass() {
    let wire = with("Authorization: Bearer ours\r\nX-API-Key: ours\r\nAuthorization: Basic x\r\nAccept: a\r\n");
    for authorization in [None, Some("worker")] {
        let out = forwarded(&wire, &Forward { own_keys: true, authorization, ..forward() });
        assert!(!out.contains("ours") && !out.contains("Basic") && out.contains("Accept: a\r\n"), "{out}");
        assert_eq!(out.contains("authorization: Bearer worker\r\n"), authorization.is_some(), "{out}");
    }
    let out = forwarded(&wire, &forward());
    assert!(out.contains("Authorization: Bearer ours\r\nX-API-Key: ours\r\nAuthorization: Basic x\r\n"), "{out}");
}

#[test]
fn what_changes_for_the_worker_changes_once() {
    let wire = with("Authorization: Bearer client\r\nauthorization: Basic x\r\nX-Request-Id: a\r\nx-request-id: b\r\n");
    let f = Forward { prefix: "/engine", authorization: Some("key"), length: BodyLength::Length(12), ..forward() };
    let want = concat!(
        "POST /engine/v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer key\r\n",
        "x-forwarded-for: 192.0.2.7\r\nx-forwarded-proto: http\r\nx-request-id: id-1\r\ncontent-length: 12\r\n\r\n",
    );
    assert_eq!(forwarded(&wire, &f), want);
}

#[test]
fn ranks_come_from_the_gateway_alone() {
    let steering = with(concat!(
        "x-data-parallel-rank: 7\r\nX-DATA-PARALLEL-RANK: 8\r\nX-Override-: 1\r\nx-override-max-tokens: 1\r\n",
        "X-OVERRIDE-Content-Type: a\r\nX-Overrid: passes\r\nX-Data-Parallel-Size: passes\r\n",
        "Connection: x-data-parallel-rank, x-override-max-tokens\r\n",
    ));
    let want = |rank: &str| {
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: a\r\nX-Overrid: passes\r\nX-Data-Parallel-Size: passes\r\n\
             x-forwarded-for: 192.0.2.7\r\nx-forwarded-proto: http\r\nx-request-id: id-1\r\n{rank}\r\n"
        )
    };
    assert_eq!(forwarded(&steering, &forward()), want(""));
    for rank in [0, 12] {
        let f = Forward { dp_rank: Some(rank), ..forward() };
        assert_eq!(forwarded(&steering, &f), want(&format!("x-data-parallel-rank: {rank}\r\n")));
    }
}

#[test]
fn targets_are_forwarded_raw_in_origin_form() {
    for (target, sent, host) in [
        ("/x?a=b", "/p/x?a=b", "a"),
        ("/x?", "/p/x?", "a"),
        ("//b/%2e%2e/", "/p//b/%2e%2e/", "a"),
        ("http://b:1/x?y", "/p/x?y", "b:1"),
        ("http://b", "/p/", "b"),
        ("https://b?y", "/p/?y", "b"),
    ] {
        let out = forwarded(&line(&format!("GET {target} HTTP/1.1")), &Forward { prefix: "/p", ..forward() });
        assert!(out.starts_with(&format!("GET {sent} HTTP/1.1\r\nhost: {host}\r\n")), "{target}: {out}");
    }
    assert!(forwarded(&line("OPTIONS * HTTP/1.1"), &Forward { prefix: "/p", ..forward() }).starts_with("OPTIONS * "));
    assert!(forwarded(b"GET / HTTP/1.0\r\n\r\n", &forward()).starts_with("GET / HTTP/1.1\r\nhost: \r\n"));
}

#[test]
fn mapped_addresses_are_written_as_ipv4() {
    let f = Forward { client: "::ffff:192.0.2.1".parse().unwrap(), ..forward() };
    assert!(forwarded(&get("Host: a\r\n"), &f).contains("\r\nx-forwarded-for: 192.0.2.1\r\n"));
    let f = Forward { client: "2001:db8::1".parse().unwrap(), ..forward() };
    assert!(forwarded(&get("Host: a\r\n"), &f).contains("\r\nx-forwarded-for: 2001:db8::1\r\n"));
}

#[test]
fn known_fields_cannot_be_named_away() {
    let wire = with(
        "Connection: x-request-id, x-forwarded-for, content-type, x-corelane-foo, expect, x-a\r\nX-A: 1\r\nContent-Type: t\r\nX-Forwarded-For: 10.0.0.1\r\n",
    );
    let out = forwarded(&wire, &forward());
    assert!(out.contains("x-forwarded-for: 10.0.0.1, 192.0.2.7\r\n") && out.contains("Content-Type: t\r\n"), "{out}");
    assert!(!out.contains("X-A"), "{out}");
}

#[cfg(debug_assertions)]
#[test]
fn line_ends_in_inputs_are_bugs_that_are_noticed() {
    let wire = get("Host: a\r\n");
    for bad in [
        Forward { request_id: b"a\r\nx: y", ..forward() },
        Forward { authorization: Some("k\r"), ..forward() },
        Forward { prefix: "/\n", ..forward() },
    ] {
        assert!(std::panic::catch_unwind(|| forwarded(&wire, &bad)).is_err(), "{bad:?}");
    }
}

// ---- answers

#[test]
fn illegal_answers_are_refused_however_they_arrive() {
    let ok = |lines: &str| format!("HTTP/1.1 200 OK\r\n{lines}\r\n").into_bytes();
    let first = |line: &str| format!("{line}\r\nContent-Length: 0\r\n\r\n").into_bytes();
    let many = (0..100).map(|i| format!("x-{i}: 1\r\n")).collect::<String>();
    let vectors = vec![
        ok("Content-Length: 3\r\nTransfer-Encoding: chunked\r\n"),
        ok("Transfer-Encoding: chunked\r\nContent-Length: 3\r\n"),
        ok("Content-Length: 3\r\nContent-Length: 4\r\n"),
        ok("Content-Length: 3, 3\r\n"),
        ok("Content-Length: -1\r\n"),
        ok("Content-Length:\r\n"),
        ok("Content-Length: 18446744073709551616\r\n"),
        ok("Transfer-Encoding: gzip, chunked\r\n"),
        ok("Transfer-Encoding: gzip\r\n"),
        ok("Transfer-Encoding: identity\r\n"),
        ok("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"),
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec(),
        ok("X: a\nY: b\r\n"),
        ok("X: a\rY: b\r\n"),
        ok("X: a\r\n b\r\n"),
        ok("X : a\r\n"),
        ok("X: a\0\r\n"),
        ok("nocolon\r\n"),
        ok(" X: a\r\n"),
        ok("Connection: a b\r\n"),
        ok("Connection: content-length\r\nContent-Length: 3\r\n"),
        ok(&many),
        ok(&format!("X: {}\r\n", "a".repeat(LIMITS.bytes))),
        b"HTTP/1.1 200 OK\nContent-Length: 0\r\n\r\n".to_vec(),
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\n".to_vec(),
        b"\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".to_vec(),
        format!("HTTP/1.1 200 {}", "a".repeat(LIMITS.bytes)).into_bytes(),
        first("HTTP/1.1 101 Switching Protocols"),
        first("HTTP/1.1 099 X"),
        first("HTTP/1.1 600 X"),
        first("HTTP/1.1 000 X"),
        first("HTTP/1.1 20 OK"),
        first("HTTP/1.1 2000 OK"),
        first("HTTP/1.1 2x0 OK"),
        first("HTTP/1.1 200OK"),
        first("HTTP/1.1 200\tOK"),
        first("HTTP/1.1  200 OK"),
        first("HTTP/1.1"),
        first("HTTP/1.1 "),
        first("HTTP/1.2 200 OK"),
        first("HTTP/2.0 200 OK"),
        first("http/1.1 200 OK"),
        first("ICY 200 OK"),
        first("HTTP/1.1 200 O\x01K"),
        first("HTTP/1.1 200 O\rK"),
        b"garbage".to_vec(),
        b"\x15\x03\x03\x00\x02".to_vec(),
    ];
    for wire in vectors {
        assert_eq!(answer(&wire, Method::Post).unwrap_err().what, What::BadAnswer, "{:?}", show(&wire));
        assert_eq!(answer_in_bytes(&wire, Method::Post).unwrap_err().what, What::BadAnswer, "{:?}", show(&wire));
    }
}

#[test]
fn legal_answers_say_how_they_are_framed() {
    use AnswerBody::*;
    let vectors: &[(&str, Method, AnswerBody, bool)] = &[
        ("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", Method::Post, Length(3), true),
        ("HTTP/1.1 200 OK\r\nContent-Length: 3\r\ncontent-length: 3\r\n\r\n", Method::Post, Length(3), true),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", Method::Post, Chunked, true),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nConnection: close\r\n\r\n", Method::Get, Chunked, false),
        ("HTTP/1.1 200 OK\r\n\r\n", Method::Post, UntilClose, false),
        ("HTTP/1.1 200 OK\r\nConnection: keep-alive\r\n\r\n", Method::Post, UntilClose, false),
        ("HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\n", Method::Post, Length(3), false),
        ("HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 3\r\n\r\n", Method::Post, Length(3), true),
        ("HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", Method::Post, Length(0), true),
        ("HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n", Method::Post, Length(0), true),
        ("HTTP/1.1 404 Nicht da, \u{e4}tsch\r\nContent-Length: 0\r\n\r\n", Method::Post, Length(0), true),
        ("HTTP/1.1 599 X\r\nContent-Length: 0\r\n\r\n", Method::Post, Length(0), true),
        ("HTTP/1.1 204 No Content\r\n\r\n", Method::Delete, None, true),
        ("HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\n", Method::Delete, None, true),
        ("HTTP/1.1 304 Not Modified\r\nContent-Length: 3\r\n\r\n", Method::Get, None, true),
        ("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", Method::Head, None, true),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", Method::Head, None, true),
        ("HTTP/1.1 200 OK\r\n\r\n", Method::Head, None, true),
        ("HTTP/1.1 100 Continue\r\n\r\n", Method::Post, None, true),
        ("HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", Method::Post, None, true),
    ];
    for (wire, method, body, keep_alive) in vectors {
        let (head, parsed) = answer(wire.as_bytes(), *method).unwrap_or_else(|f| panic!("{f}: {wire:?}"));
        assert_eq!((head.body, head.keep_alive), (*body, *keep_alive), "{wire:?}");
        assert_eq!(parsed, Parsed::Complete(wire.len()));
        assert_eq!(head.interim(), head.status < 200);
        let (again, parsed) = answer_in_bytes(wire.as_bytes(), *method).unwrap();
        assert_eq!(
            (again.body, again.keep_alive, again.status, parsed),
            (*body, *keep_alive, head.status, Parsed::Complete(wire.len()))
        );
        assert_eq!(again.fields, head.fields);
    }
}

fn answered(wire: &str, method: Method, f: &Answer<'_>) -> String {
    let head = answer(wire.as_bytes(), method).unwrap().0;
    let mut out = Vec::new();
    response_head(&mut out, &head, wire.as_bytes(), f);
    String::from_utf8(out).unwrap()
}

#[test]
fn answers_pass_with_their_framing_written_anew() {
    let wire = concat!(
        "HTTP/1.1 200 Fine by me\r\nServer: uvicorn\r\nSet-Cookie: a\r\nset-cookie: b\r\nContent-Type: text/event-stream\r\n",
        "Connection: keep-alive, x-n\r\nX-N: 1\r\nKeep-Alive: 5\r\nProxy-Authenticate: x\r\nTransfer-Encoding: chunked\r\n",
        "Trailer: t\r\nUpgrade: h2c\r\nX-Corelane-Error: forged\r\nX-Request-Id: theirs\r\nRequest-Id: other\r\n",
        "X-Data-Parallel-Rank: 1\r\nHost: odd\r\nExpect: odd\r\nRetry-After: 2\r\n\r\n",
    );
    let f =
        Answer { request_id: b"id-1", framing: AnswerBody::Chunked, keep_alive: true, client_version: Version::H11 };
    let kept = concat!(
        "HTTP/1.1 200 Fine by me\r\nServer: uvicorn\r\nSet-Cookie: a\r\nset-cookie: b\r\nContent-Type: text/event-stream\r\n",
        "Request-Id: other\r\nX-Data-Parallel-Rank: 1\r\nHost: odd\r\nExpect: odd\r\nRetry-After: 2\r\nx-request-id: id-1\r\n",
    );
    assert_eq!(answered(wire, Method::Post, &f), format!("{kept}transfer-encoding: chunked\r\n\r\n"));
    let closing = Answer { keep_alive: false, ..f };
    assert_eq!(
        answered(wire, Method::Post, &closing),
        format!("{kept}transfer-encoding: chunked\r\nconnection: close\r\n\r\n")
    );
    let length = Answer { framing: AnswerBody::Length(7), ..f };
    assert_eq!(answered(wire, Method::Post, &length), format!("{kept}content-length: 7\r\n\r\n"));
    let until_close = Answer { framing: AnswerBody::UntilClose, ..f };
    assert_eq!(answered(wire, Method::Post, &until_close), format!("{kept}connection: close\r\n\r\n"));
    let old = Answer { framing: AnswerBody::UntilClose, client_version: Version::H10, ..f };
    assert_eq!(answered(wire, Method::Post, &old), format!("{kept}connection: close\r\n\r\n"));
    let old = Answer { framing: AnswerBody::Length(1), client_version: Version::H10, ..f };
    assert_eq!(
        answered(wire, Method::Post, &old),
        format!("{kept}content-length: 1\r\nconnection: keep-alive\r\n\r\n")
    );
}

#[test]
fn lengths_of_bodies_that_do_not_come_pass_where_they_may() {
    let f = Answer { request_id: b"i", framing: AnswerBody::None, keep_alive: true, client_version: Version::H11 };
    let head = answered("HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\n", Method::Head, &f);
    assert_eq!(head, "HTTP/1.1 200 OK\r\nx-request-id: i\r\ncontent-length: 3\r\n\r\n");
    let none = answered("HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\n", Method::Post, &f);
    assert_eq!(none, "HTTP/1.1 204 No Content\r\nx-request-id: i\r\n\r\n");
    let hints =
        answered("HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", Method::Post, &Answer { keep_alive: false, ..f });
    assert_eq!(hints, "HTTP/1.1 103 Early Hints\r\nLink: x\r\nx-request-id: i\r\n\r\n");
}

// ---- local answers

fn body_of(out: &[u8]) -> serde_json::Value {
    let (head, parsed) = answer(out, Method::Post).unwrap();
    let Parsed::Complete(end) = parsed else { panic!("incomplete") };
    assert_eq!(head.body, AnswerBody::Length((out.len() - end) as u64));
    serde_json::from_slice(&out[end..]).unwrap()
}

#[test]
fn every_fault_has_a_well_formed_answer_or_none() {
    for what in What::ALL {
        let row = what.row();
        let detail = "Quote \" back\\slash \r\n\t\u{1}\u{7f} é 😀";
        let mut out = b"before".to_vec();
        error(
            &mut out,
            &Fault::with(*what, detail),
            &Extra { request_id: Some(b"id"), keep_alive: true, allow: &["GET", "HEAD"], ..Extra::default() },
        );
        let out = &out[6..];
        if row.status == 0 {
            assert!(out.is_empty());
            continue;
        }
        let text = String::from_utf8_lossy(out).into_owned();
        assert!(text.starts_with(&format!("HTTP/1.1 {} ", row.status)), "{text}");
        assert!(text.contains(&format!("\r\nx-corelane-error: {}\r\n", row.code)), "{text}");
        assert_eq!(text.contains("\r\nretry-after: 1\r\n"), matches!(row.status, 429 | 503));
        assert_eq!(text.contains("\r\nwww-authenticate: Bearer\r\n"), row.status == 401);
        assert_eq!(text.contains("\r\nallow: GET, HEAD\r\n"), row.status == 405);
        assert!(text.contains("\r\nx-request-id: id\r\n") && !text.contains("connection:"));
        let kind = match row.status {
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        let want = serde_json::json!({"error": {"message": format!("{} {detail}", row.text), "type": kind, "code": row.code, "param": null}});
        assert_eq!(body_of(out), want);
    }
}

#[test]
fn local_answers_close_and_omit_bodies_as_told() {
    let mut out = Vec::new();
    local(
        &mut out,
        200,
        "application/json",
        b"{}",
        &Extra { keep_alive: true, version: Version::H10, ..Extra::default() },
    );
    assert_eq!(
        out,
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\nconnection: keep-alive\r\n\r\n{}"
    );
    out.clear();
    local(&mut out, 503, "text/plain", b"no", &Extra { head_only: true, ..Extra::default() });
    assert_eq!(out, b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\ncontent-length: 2\r\nconnection: close\r\n\r\n");
    let mut full = Vec::new();
    error(&mut full, &What::PathUnknown.into(), &Extra::default());
    out.clear();
    error(&mut out, &What::PathUnknown.into(), &Extra { head_only: true, ..Extra::default() });
    assert!(full.starts_with(&out) && out.ends_with(b"\r\n\r\n") && full.ends_with(b"}}"));
    assert!(answer(CONTINUE, Method::Post).unwrap().0.interim());
}

// ---- chunked coding

/// Payload, bytes consumed and whether it ended, with the input arriving in parts.
fn dechunk(wire: &[u8], cuts: &[usize]) -> Result<(Vec<u8>, usize, bool), BadChunk> {
    let (mut by_piece, mut by_skim, mut by_squeeze) = (Chunked::new(), Chunked::new(), Chunked::new());
    let (mut payload, mut squeezed) = (Vec::new(), Vec::new());
    let (mut consumed, mut begin) = (0, 0);
    for end in cuts.iter().copied().chain([wire.len()]) {
        let part = &wire[begin..end];
        let mut at = 0;
        let pieces = loop {
            match by_piece.next(&part[at..]) {
                Err(e) => break Err(e),
                Ok(piece) => {
                    payload.extend_from_slice(&part[at..][piece.payload.clone()]);
                    at += piece.consumed;
                    if piece.payload.is_empty() {
                        break Ok(());
                    }
                }
            }
        };
        let skim = by_skim.skim(part);
        let mut copy = part.to_vec();
        let squeeze = by_squeeze.squeeze(&mut copy);
        assert_eq!((skim.is_err(), squeeze.is_err()), (pieces.is_err(), pieces.is_err()));
        pieces?;
        let (skim, squeeze) = (skim?, squeeze?);
        squeezed.extend_from_slice(&copy[..squeeze.payload]);
        assert_eq!((skim.consumed, squeeze.consumed), (at, at));
        assert_eq!(skim.payload, squeeze.payload as u64);
        assert_eq!(&copy[at..], &part[at..], "what follows the message stays where it was");
        assert_eq!(by_piece, by_skim);
        assert_eq!(by_piece, by_squeeze);
        consumed += at;
        begin = end;
    }
    assert_eq!(payload, squeezed);
    Ok((payload, consumed, by_piece.done()))
}

#[test]
fn legal_chunks() {
    for (wire, payload, rest) in [
        (&b"0\r\n\r\n"[..], &b""[..], 0),
        (b"000\r\n\r\nGET", b"", 3),
        (b"3\r\nabc\r\n0\r\n\r\n", b"abc", 0),
        (b"3\r\n\r\n\r\r\n0\r\n\r\n", b"\r\n\r", 0),
        (b"A\r\n0123456789\r\n0\r\n\r\n", b"0123456789", 0),
        (b"a\r\n0123456789\r\n0\r\n\r\n", b"0123456789", 0),
        (b"0000000000000001\r\na\r\n0\r\n\r\n", b"a", 0),
        (b"1;x\r\na\r\n0;y=z\r\n\r\n", b"a", 0),
        (b"1 ;x=\"y z\"\r\na\r\n0\r\n\r\n", b"a", 0),
        (b"1;\r\na\r\n0\r\n\r\n", b"a", 0),
        (b"1;\xe9\t\r\na\r\n0\r\n\r\n", b"a", 0),
        (b"0\r\nA: b\r\nc:\r\n\r\n", b"", 0),
        (b"5\r\n0\r\n\r\n\r\n0\r\n\r\nx", b"0\r\n\r\n", 1),
    ] {
        assert_eq!(dechunk(wire, &[]), Ok((payload.to_vec(), wire.len() - rest, true)), "{:?}", show(wire));
        for cut in 0..=wire.len() {
            assert_eq!(dechunk(wire, &[cut]), dechunk(wire, &[]), "cut at {cut}: {:?}", show(wire));
        }
    }
}

#[test]
fn illegal_chunks() {
    for wire in [
        &b"\r\n"[..],
        b"\n",
        b"x\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b" 1\r\n",
        b";x\r\n",
        b"1\na\r\n0\r\n\r\n",
        b"1\r\na\n0\r\n\r\n",
        b"1\r\na0\r\n\r\n",
        b"1\r\nab\r\n0\r\n\r\n",
        b"1\r\na\r\r\n",
        b"1\r\na\r\n\r\n",
        b"1 \r\na\r\n",
        b"1 2\r\na\r\n",
        b"1\t\r\n",
        b"1,1\r\n",
        b"1_0\r\n",
        b"1\r\r\na\r\n",
        b"1;a\nb\r\n",
        b"1;a\n\na\r\n0\r\n\r\n",
        b"1\n\na\r\n0\r\n\r\n",
        b"0\r\nA: b\n\n\r\n",
        b"1\r\na\n\n0\r\n\r\n",
        b"1;a\rb\r\n",
        b"1;a\0\r\n",
        b"1;a\x7f\r\n",
        b"10000000000000000\r\n",
        b"ffffffffffffffffff\r\n",
        b"0\r\n\n",
        b"0\r\n\r\r\n",
        b"0\n\r\n",
        b"0\r\nnocolon\r\n\r\n",
        b"0\r\n: a\r\n\r\n",
        b"0\r\nA : b\r\n\r\n",
        b"0\r\n A: b\r\n\r\n",
        b"0\r\nA: b\r\n c\r\n\r\n",
        b"0\r\nA: b\n\r\n",
        b"0\r\nA: b\rc\r\n\r\n",
        b"0\r\nA: \0\r\n\r\n",
        b"0\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    ] {
        assert_eq!(dechunk(wire, &[]), Err(BadChunk), "{:?}", show(wire));
        for cut in 0..=wire.len() {
            assert_eq!(dechunk(wire, &[cut]), Err(BadChunk), "cut at {cut}: {:?}", show(wire));
        }
    }
}

// ---- properties

/// Pieces out of which attacks on parsers are made.
fn fragments() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop::sample::select(vec![
        &b"\r\n"[..],
        b"\r\n\r\n",
        b"\n",
        b"\r",
        b" ",
        b"\t",
        b":",
        b"\0",
        b",",
        b"\xff",
        b"GET ",
        b"POST ",
        b"PRI ",
        b"TRACE ",
        b"/",
        b"/v1/x?y",
        b"*",
        b"http://h/",
        b" HTTP/1.1",
        b" HTTP/1.0",
        b" HTTP/2.0",
        b"Host: a",
        b"Host: b",
        b"Content-Length: 3",
        b"Content-Length: 4",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: gzip",
        b"Connection: close",
        b"Connection: x",
        b"x: y",
        b"Expect: 100-continue",
        b"Upgrade: websocket",
        b"Connection: upgrade",
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 ",
        b"204",
        b"0",
        b"3\r\nabc",
        b";e",
        b"a",
    ]);
    let good = prop::sample::select(vec![
        &b""[..],
        b"GET / HTTP/1.1\r\nHost: a\r\n",
        b"POST /x HTTP/1.1\r\nHost: a\r\n",
        b"GET / HTTP/1.0\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"3\r\nabc\r\n",
    ]);
    (good, prop::collection::vec(piece, 0..12)).prop_map(|(good, pieces)| [good, &pieces.concat()].concat())
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-zA-Z][a-zA-Z0-9_-]{0,12}",
        prop::sample::select(vec![
            "Accept",
            "Connection",
            "X-Request-Id",
            "X-Correlation-Id",
            "Authorization",
            "X-Forwarded-For",
            "X-Forwarded-Proto",
            "Content-Type",
            "Keep-Alive",
            "Proxy-Foo",
            "TE",
            "X-Corelane-A",
            "x-corelane-key",
            "X-SMG-Routing-Key",
            "X-Override-B",
        ])
        .prop_map(String::from),
    ]
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![9 => 0x20..0x7fu8, 1 => 0x80..=0xffu8, 1 => Just(b'\t')];
    prop::collection::vec(byte, 0..24)
}

fn end_to_end(said: &[(Vec<u8>, Vec<u8>, FieldKind)]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let keep = |k: FieldKind| {
        matches!(k, FieldKind::Pass | FieldKind::ContentType | FieldKind::Authorization)
            || matches!(k, FieldKind::RequestId(1..))
    };
    said.iter().filter(|f| keep(f.2)).map(|f| (f.0.clone(), f.1.clone())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_input_panics(wire in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = request(&wire);
        let _ = answer(&wire, Method::Get);
        let _ = dechunk(&wire, &[]);
    }

    #[test]
    fn fragments_read_the_same_however_they_arrive(wire in fragments(), a in 0..200usize, b in 0..200usize) {
        let (a, b) = (a.min(b).min(wire.len()), a.max(b).min(wire.len()));
        prop_assert_eq!(in_parts(&wire, [a, b, wire.len()]), whole(&wire));
        prop_assert_eq!(in_parts(&wire, 0..=wire.len()), whole(&wire));
        prop_assert_eq!(dechunk(&wire, &[a, b]), dechunk(&wire, &[]));
        let told = |r: Result<(ResponseHead, Parsed), Fault>| {
            r.map(|(h, p)| if p == Parsed::Partial { None } else { Some((h.status, h.body, h.keep_alive, h.fields, p)) }).ok()
        };
        prop_assert_eq!(told(answer(&wire, Method::Get)), told(answer_in_bytes(&wire, Method::Get)));
    }

    #[test]
    fn chunks_of_any_payload_come_back(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..6),
                                       tail in prop::collection::vec(any::<u8>(), 0..10), seed in any::<u64>()) {
        let mut wire = Vec::new();
        for chunk in &chunks {
            wire.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
            wire.extend_from_slice(chunk);
            wire.extend_from_slice(b"\r\n");
        }
        wire.extend_from_slice(b"0\r\nx-t: 1\r\n\r\n");
        let len = wire.len();
        wire.extend_from_slice(&tail);
        let want = Ok((chunks.concat(), len, true));
        for cut in 0..=wire.len() {
            prop_assert_eq!(&dechunk(&wire, &[cut]), &want);
        }
        let other = (seed % (wire.len() as u64 + 1)) as usize;
        prop_assert_eq!(&dechunk(&wire, &[other / 2, other]), &want);
        prop_assert_eq!(&dechunk(&wire, &(0..wire.len()).collect::<Vec<_>>()), &want);
    }

    #[test]
    fn what_is_forwarded_reads_back_as_what_was_meant(lines in prop::collection::vec((name(), value()), 0..12),
                                                      length in prop::option::of(0..1000u64), key in any::<bool>()) {
        let mut wire = b"POST /v1/x?q HTTP/1.1\r\nHost: h:1\r\n".to_vec();
        for (name, value) in &lines {
            wire.extend_from_slice(name.as_bytes());
            wire.extend_from_slice(b": ");
            wire.extend_from_slice(value);
            wire.extend_from_slice(b"\r\n");
        }
        wire.extend_from_slice(b"\r\n");
        let Ok((head, parsed)) = request(&wire) else { return Ok(()) };
        let before = said(&head, parsed, &wire);
        let framing = length.map_or(BodyLength::Chunked, BodyLength::Length);
        let authorization = key.then_some("k");
        let mut out = Vec::new();
        request_head(&mut out, &head, &wire, &Forward { length: framing, authorization, ..forward() });
        let after = whole(&out).expect("what we write is legal").expect("and complete");
        prop_assert_eq!(after.parsed, Parsed::Complete(out.len()));
        prop_assert_eq!(after.body, framing);
        prop_assert_eq!(&after.line, &before.line);
        let mut want = end_to_end(&before.fields);
        if key {
            want.retain(|f| !f.0.eq_ignore_ascii_case(b"authorization"));
            want.insert(0, (b"authorization".to_vec(), b"Bearer k".to_vec()));
        }
        prop_assert_eq!(end_to_end(&after.fields), want);
        let count = |kind| after.fields.iter().filter(|f| f.2 == kind).count();
        prop_assert_eq!((count(FieldKind::RequestId(0)), count(FieldKind::ForwardedFor), count(FieldKind::Host)), (1, 1, 1));
        prop_assert!(count(FieldKind::ForwardedProto) >= 1);
        for gone in [FieldKind::Own, FieldKind::DpRank, FieldKind::HopByHop, FieldKind::Connection, FieldKind::Expect] {
            prop_assert_eq!(count(gone), 0);
        }
    }

    #[test]
    fn answers_read_back_as_what_was_meant(lines in prop::collection::vec((name(), value()), 0..12), reason in value(), status in 200..600u16) {
        let mut wire = format!("HTTP/1.1 {status} ").into_bytes();
        wire.extend_from_slice(&reason);
        wire.extend_from_slice(b"\r\n");
        for (name, value) in &lines {
            wire.extend_from_slice(name.as_bytes());
            wire.extend_from_slice(b":");
            wire.extend_from_slice(value);
            wire.extend_from_slice(b"\r\n");
        }
        wire.extend_from_slice(b"Content-Length: 9\r\n\r\n");
        let Ok((head, _)) = answer(&wire, Method::Post) else { return Ok(()) };
        let mut out = Vec::new();
        response_head(&mut out, &head, &wire, &Answer { request_id: b"i", framing: head.body, keep_alive: true, client_version: Version::H11 });
        let (again, parsed) = answer(&out, Method::Post).expect("what we write is legal");
        prop_assert_eq!(parsed, Parsed::Complete(out.len()));
        prop_assert_eq!((again.status, again.body), (status, head.body));
        prop_assert_eq!(again.reason.of(&out), &reason[..]);
        prop_assert_eq!(end_to_end(&fields(&again.fields, &out)), end_to_end(&fields(&head.fields, &wire)));
    }
}
