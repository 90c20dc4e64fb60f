//! The messages: a table, and combinations of what messages are made of.
//!
//! Takes nothing, gives bytes as they come over a connection. Never judges them.

/// What requests of the corpus are followed by.
pub const NEXT_REQUEST: &[u8] = b"GET /next HTTP/1.1\r\nHost: next\r\n\r\n";

const CHUNKS: &str = "5\r\nhello\r\n0\r\n\r\n";

const LENGTHS: &[&str] = &[
    "5",
    "05",
    "0000000000000000000000005",
    "+5",
    "-5",
    " 5",
    "\t5\t",
    "5 5",
    "5,5",
    "5, 5",
    "5,6",
    ",5",
    "5,",
    "5;a",
    "0",
    "00",
    "0x5",
    "5.0",
    "5e0",
    "0b101",
    "five",
    "",
    "\"5\"",
    "5_0",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551614",
    "18446744073709551615",
    "18446744073709551616",
    "18446744073709551621",
    "99999999999999999999999999",
    "\u{665}",
    "5\r\nContent-Length: 5",
    "5\r\nContent-Length: 6",
    "5\r\ncontent-length: 05",
    "0\r\nX: y\r\nContent-Length: 5",
];

const CODINGS: &[&str] = &[
    "chunked",
    "Chunked",
    "CHUNKED",
    "  chunked\t",
    "gzip, chunked",
    "chunked, gzip",
    "gzip",
    "identity",
    "identity, chunked",
    "chunked, chunked",
    "chunked,",
    ",chunked",
    ", ,chunked",
    "chunked;q=1",
    "\"chunked\"",
    "'chunked'",
    "xchunked",
    "chunkedx",
    "chunk",
    "chunked x",
    "chunked\u{a0}",
    "",
    "\x0bchunked",
    "chunked\0",
    "chunked\r\nTransfer-Encoding: chunked",
    "gzip\r\nTransfer-Encoding: chunked",
    "chunked\r\nTransfer-Encoding: gzip",
    "identity\r\nTransfer-Encoding: chunked",
    "chunked\r\nTransfer-Encoding:",
    "\r\n chunked",
];

/// Chunked bodies.
const BODIES: &[&str] = &[
    "0\r\n\r\n",
    "5\r\nhello\r\n0\r\n\r\n",
    "5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n",
    "A\r\n0123456789\r\n0\r\n\r\n",
    "a\r\n0123456789\r\n0\r\n\r\n",
    "005\r\nhello\r\n000\r\n\r\n",
    "0000000000000005\r\nhello\r\n0\r\n\r\n",
    "00000000000000005\r\nhello\r\n0\r\n\r\n",
    "5\r\nhello\r\n00000000000000000\r\n\r\n",
    "5;a\r\nhello\r\n0\r\n\r\n",
    "5;a=b\r\nhello\r\n0;c\r\n\r\n",
    "5;a=\"b;\\\"c\"\r\nhello\r\n0\r\n\r\n",
    "5 ;a\r\nhello\r\n0\r\n\r\n",
    "5\t;a\r\nhello\r\n0\r\n\r\n",
    "5;\r\nhello\r\n0\r\n\r\n",
    "5 \r\nhello\r\n0\r\n\r\n",
    "5\t\r\nhello\r\n0 \r\n\r\n",
    "5 5\r\nhello\r\n0\r\n\r\n",
    " 5\r\nhello\r\n0\r\n\r\n",
    "5;a\rb\r\nhello\r\n0\r\n\r\n",
    "5;a\nb\r\nhello\r\n0\r\n\r\n",
    "5;a\0b\r\nhello\r\n0\r\n\r\n",
    "5;a\u{7f}b\r\nhello\r\n0\r\n\r\n",
    "5;\u{e9}\r\nhello\r\n0\r\n\r\n",
    "5,a\r\nhello\r\n0\r\n\r\n",
    "+5\r\nhello\r\n0\r\n\r\n",
    "-5\r\nhello\r\n0\r\n\r\n",
    "0x5\r\nhello\r\n0\r\n\r\n",
    "5h\r\nhello\r\n0\r\n\r\n",
    "g\r\nhello\r\n0\r\n\r\n",
    "\r\nhello\r\n0\r\n\r\n",
    ";a\r\nhello\r\n0\r\n\r\n",
    "5\nhello\r\n0\r\n\r\n",
    "5\rhello\r\n0\r\n\r\n",
    "5\r\r\nhello\r\n0\r\n\r\n",
    "5\r\nhello\n0\r\n\r\n",
    "5\r\nhello\r0\r\n\r\n",
    "5\r\nhello0\r\n\r\n",
    "5\r\nhell\r\n0\r\n\r\n",
    "5\r\nhelloo\r\n0\r\n\r\n",
    "5\r\nhello\r\n\r\n0\r\n\r\n",
    "5\r\nhello\r\n0\n\r\n",
    "5\r\nhello\r\n0\r\n\n",
    "5\r\nhello\r\n0\r\r\n",
    "5\r\nhello\r\n0\r\n",
    "5\r\nhello\r\n0\r\n\r",
    "5\r\nhello\r\n",
    "5\r\nhel",
    "5",
    "",
    "ffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "10000000000000000\r\nhello\r\n0\r\n\r\n",
    "10000000000000005\r\nhello\r\n0\r\n\r\n",
    "fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "7fffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "8000000000000000\r\nhello\r\n0\r\n\r\n",
    // trailers
    "0\r\nX: y\r\n\r\n",
    "0\r\nX: y\r\nZ:\r\n\r\n",
    "0\r\nContent-Length: 5\r\n\r\nhello",
    "0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "0\r\nX : y\r\n\r\n",
    "0\r\n X: y\r\n\r\n",
    "0\r\nX: y\r\n z\r\n\r\n",
    "0\r\nX: y\n\r\n",
    "0\r\nX: y\rz\r\n\r\n",
    "0\r\nX: a\0b\r\n\r\n",
    "0\r\nX: a\u{7f}b\r\n\r\n",
    "0\r\nno colon\r\n\r\n",
    "0\r\nnocolon\r\n\r\n",
    "0\r\n: y\r\n\r\n",
    "0\r\nX(: y\r\n\r\n",
    "0\r\nX: \u{e9}\r\n\r\n",
    "0\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
];

const METHODS: &[&str] = &[
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "CONNECT",
    "TRACE",
    "PRI",
    "get",
    "G",
    "G!#$%&'*+-.^_`|~1",
    "GE(T",
    "GE\u{e9}T",
    "G\0T",
    "GET\t",
    "",
    " GET",
    "\"GET\"",
    "GET:",
];

const TARGETS: &[&str] = &[
    "/",
    "/v1/chat/completions",
    "/a?b=c",
    "/a?",
    "/?a?b",
    "/a%20b%00",
    "/a%zz",
    "/a;b=c,d",
    "//a",
    "/../a/./b",
    "/a\\b",
    "/a|b^c`d",
    "/a\"b<c>d",
    "/{a}[b]",
    "/~!@$&'()*+=:",
    "/?\"<>`{}|\\^[]",
    "/a#b",
    "/a?b#c",
    "/\u{e9}",
    "/?\u{e9}",
    "/\u{7f}",
    "/a\0b",
    "/a\tb",
    "/a b",
    "*",
    "**",
    "/*",
    "?a",
    "a",
    "a/b",
    "a:80",
    "[::1]:80",
    "http://a/b?c",
    "http://a",
    "http://a?b",
    "http://a:80/",
    "http://a:/",
    "http://a:99999/",
    "http://a:x/",
    "http://[::1]:80/b",
    "http://[::1/b",
    "http://u@a/",
    "http://u:p@a/",
    "http://",
    "http:///b",
    "http:a",
    "HTTPS://A/",
    "ftp://a/",
    "http://a#b",
    "http://a%2f/b",
    "http://a_b~c/",
    "",
];

const VERSIONS: &[&str] = &[
    "HTTP/1.1",
    "HTTP/1.0",
    "HTTP/0.9",
    "HTTP/1.2",
    "HTTP/2.0",
    "HTTP/3.0",
    "HTTP/1",
    "HTTP/11",
    "HTTP/1.1.",
    "HTTP/1.10",
    "HTTP/01.1",
    "http/1.1",
    "HTTP",
    "HTTP /1.1",
    "HTTP/ 1.1",
    "HTTP/1.1 ",
    " HTTP/1.1",
    "HTTP/1.1\t",
    "HTTP/1.1 x",
    "XTTP/1.1",
    "HTTP/1,1",
    "HTTPS/1.1",
    "",
];

/// Field lines, each with its line end.
const FIELDS: &[&str] = &[
    "X: y\r\n",
    "X:y\r\n",
    "X:  y \t\r\n",
    "X:\r\n",
    "X: \r\n",
    "X:\ty\r\n",
    "X: y z\r\n",
    "X: y:z\r\n",
    "x!#$%&'*+-.^_`|~0: y\r\n",
    "X : y\r\n",
    "X\t: y\r\n",
    " X: y\r\n",
    "\tX: y\r\n",
    "X: y\r\n z\r\n",
    "X: y\r\n\tz\r\n",
    "X:\r\n y\r\n",
    "X: y\r\n \r\n",
    "X: y\n",
    "X: y\r",
    "X: y\r\r\n",
    "X: y\n\r\n",
    "X: y\rz\r\n",
    "X: y\nz\r\n",
    "X: a\0b\r\n",
    "X: a\u{1}b\r\n",
    "X: a\u{b}b\r\n",
    "X: a\u{c}\r\n",
    "X: a\u{7f}b\r\n",
    "X: \u{e9}\r\n",
    "X: \u{feff}y\r\n",
    "X\u{e9}: y\r\n",
    "X\0: y\r\n",
    "X Y: z\r\n",
    "X(Y): z\r\n",
    "X\"Y: z\r\n",
    "X/Y: z\r\n",
    "X[Y]: z\r\n",
    "X@Y: z\r\n",
    "X{Y}: z\r\n",
    "X,Y: z\r\n",
    "X=Y\r\n",
    "no colon\r\n",
    "nocolon\r\n",
    ": y\r\n",
    ":\r\n",
    "\r\n",
    "X: y\r\nX: z\r\n",
    "X: y\r\nx: z\r\nX: y\r\n",
    "Content_Length: 3\r\n",
    "Content-Length : 3\r\n",
    "Content-Length\r\n",
    "Content-Length: 3\r\n ,4\r\n",
    " Content-Length: 3\r\n",
    "X: y\rContent-Length: 3\r\n",
    "X: y\nContent-Length: 3\r\n",
    "X: y\r\n\nContent-Length: 3\r\n",
    "Transfer-Encoding : chunked\r\n",
    "Transfer-Encoding\u{b}: chunked\r\n",
    "X: y\rTransfer-Encoding: chunked\r\n",
    "X: y\nTransfer-Encoding: chunked\r\n",
    "Expect: 100-continue\r\n",
    "Expect: 100-Continue\r\n",
    "Expect: other\r\n",
    "Expect: 100-continue\r\nExpect: 100-continue\r\n",
    "Trailer: X\r\nTE: trailers\r\n",
    "Upgrade: h2c\r\nConnection: upgrade, http2-settings\r\nHTTP2-Settings: a\r\n",
    "Upgrade: websocket\r\nConnection: Upgrade\r\n",
    "Upgrade: websocket\r\n",
];

const CONNECTIONS: &[&str] = &[
    "close",
    "Close",
    "keep-alive",
    "Keep-Alive",
    "keep-alive, close",
    "close, keep-alive",
    "close,",
    ",,close",
    " , x , close",
    "x",
    "x, y",
    "",
    "closed",
    "close;a",
    "clo se",
    "\"close\"",
    "close\r\nConnection: keep-alive",
    "keep-alive\r\nConnection: close",
    "\u{e9}, close",
    "close\tx",
    "te, close",
    "host",
    "content-length",
    "transfer-encoding",
    "authorization",
    "connection",
    "upgrade",
];

const HOSTS: &[&str] = &[
    "Host: a\r\n",
    "Host: a:80\r\n",
    "Host: [::1]\r\n",
    "Host:\r\n",
    "",
    "Host: a\r\nHost: a\r\n",
    "Host: a\r\nHost: b\r\n",
    "Host: a, b\r\n",
    "Host: a b\r\n",
    "Host: a/b\r\n",
    "Host: u@a\r\n",
    "Host: a:x\r\n",
    "Host: a:99999\r\n",
    "Host: [::1\r\n",
    "Host: \u{e9}\r\n",
    "Host: a%41\r\n",
];

/// Bytes of a connection to a server, without [`NEXT_REQUEST`].
pub fn requests() -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    let mut put = |text: String| all.push(text.into_bytes());
    for version in ["1.1", "1.0"] {
        let begin = format!("POST /x HTTP/{version}\r\nHost: a\r\n");
        for length in LENGTHS {
            put(format!("{begin}Content-Length: {length}\r\n\r\nhello"));
            put(format!("{begin}A: b\r\nCONTENT-LENGTH:{length} \r\nC: d\r\n\r\nhello"));
            for coding in CODINGS {
                put(format!("{begin}Content-Length: {length}\r\nTransfer-Encoding: {coding}\r\n\r\n{CHUNKS}"));
                put(format!("{begin}Transfer-Encoding: {coding}\r\nContent-Length: {length}\r\n\r\n{CHUNKS}"));
            }
        }
        for coding in CODINGS {
            put(format!("{begin}Transfer-Encoding: {coding}\r\n\r\n{CHUNKS}"));
            put(format!("GET /x HTTP/{version}\r\nTRANSFER-ENCODING:{coding}\r\nHost: a\r\n\r\n{CHUNKS}"));
        }
        for connection in CONNECTIONS {
            put(format!("{begin}Connection: {connection}\r\nContent-Length: 5\r\nAuthorization: b\r\n\r\nhello"));
        }
        for field in FIELDS {
            put(format!("POST /x HTTP/{version}\r\n{field}Host: a\r\nContent-Length: 5\r\n\r\nhello"));
            put(format!("POST /x HTTP/{version}\r\nHost: a\r\n{field}Content-Length: 5\r\n\r\nhello"));
            put(format!("POST /x HTTP/{version}\r\nHost: a\r\nContent-Length: 5\r\n{field}\r\nhello"));
            put(format!("POST /x HTTP/{version}\r\nHost: a\r\n{field}\r\n"));
        }
        for hosts in HOSTS {
            put(format!("GET / HTTP/{version}\r\n{hosts}\r\n"));
            put(format!("GET http://c/ HTTP/{version}\r\nX: y\r\n{hosts}\r\n"));
        }
    }
    for body in BODIES {
        put(format!("POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{body}"));
    }
    for method in METHODS {
        for target in TARGETS {
            put(format!("{method} {target} HTTP/1.1\r\nHost: a\r\n\r\n"));
        }
    }
    for version in VERSIONS {
        for line in ["GET /", "POST http://a/b", "OPTIONS *", "GET"] {
            put(format!("{line} {version}\r\nHost: a\r\n\r\n"));
        }
    }
    for space in ["", "  ", "\t", " \t", "\r", "\x0b", "\x0c", "\u{a0}"] {
        put(format!("GET{space}/ HTTP/1.1\r\nHost: a\r\n\r\n"));
        put(format!("GET /{space}HTTP/1.1\r\nHost: a\r\n\r\n"));
    }
    for count in 0..7 {
        put(format!("{}GET / HTTP/1.1\r\nHost: a\r\n\r\n", "\r\n".repeat(count)));
        put(format!("{}GET / HTTP/1.1\r\nHost: a\r\n\r\n", "\n".repeat(count)));
        put(format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab{}", "\r\n".repeat(count)));
    }
    for len in [100, 8191, 8192, 8193, 60_000] {
        put(format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "a".repeat(len - 1)));
        put(format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "a".repeat(len)));
        put(format!("GET / HTTP/1.1\r\nHost: a\r\n{}: y\r\n\r\n", "a".repeat(len)));
        put(format!("{} / HTTP/1.1\r\nHost: a\r\n\r\n", "A".repeat(len)));
    }
    for count in [98, 99, 100, 101] {
        put(format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "X: y\r\n".repeat(count)));
    }
    let plain = "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nX: y\r\n\r\nhello";
    let chunked =
        "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nX: y\r\n\r\n";
    for message in [plain, chunked] {
        all.extend(line_ends(message));
        all.extend((0..message.len()).map(|end| message.as_bytes()[..end].to_vec()));
        all.extend(bytes(message));
    }
    all
}

/// The message with each of its line ends written in other ways.
fn line_ends(message: &str) -> impl Iterator<Item = Vec<u8>> {
    let ends = ["\n", "\r", "\r\r\n", "\n\r", "\r\n\n", "\r\n\r", "\r\0\n", " \r\n", "\r \n"];
    message.match_indices("\r\n").flat_map(move |(at, _)| {
        ends.map(|end| [&message.as_bytes()[..at], end.as_bytes(), &message.as_bytes()[at + 2..]].concat())
    })
}

/// The message with bytes of every kind put in at every place.
fn bytes(message: &str) -> impl Iterator<Item = Vec<u8>> {
    let kinds = *b"\0\x01\t\n\x0b\x0c\r \"(,/:;@\\\x7f\x80\xa0\xff0a";
    (0..=message.len())
        .flat_map(move |at| kinds.map(|byte| [&message.as_bytes()[..at], &[byte], &message.as_bytes()[at..]].concat()))
}

const STATUSES: &[&str] = &[
    "HTTP/1.1 200 OK",
    "HTTP/1.0 200 OK",
    "HTTP/1.1 200 ",
    "HTTP/1.1 200",
    "HTTP/1.1 200 Some Other Reason",
    "HTTP/1.1 200 \u{e9}",
    "HTTP/1.1 200 a\0b",
    "HTTP/1.1 200 a\tb",
    "HTTP/1.1 200 a\rb",
    "HTTP/1.1  200 OK",
    "HTTP/1.1 200  OK",
    "HTTP/1.1\t200 OK",
    " HTTP/1.1 200 OK",
    "\r\nHTTP/1.1 200 OK",
    "\nHTTP/1.1 200 OK",
    "HTTP/1.1 20 OK",
    "HTTP/1.1 2000 OK",
    "HTTP/1.1 2x0 OK",
    "HTTP/1.1 +20 OK",
    "HTTP/1.1 099 OK",
    "HTTP/1.1 000 OK",
    "HTTP/1.1 100 Continue",
    "HTTP/1.1 101 Switching Protocols",
    "HTTP/1.1 103 Early Hints",
    "HTTP/1.1 204 No Content",
    "HTTP/1.1 205 Reset Content",
    "HTTP/1.1 206 Partial Content",
    "HTTP/1.1 301 Moved",
    "HTTP/1.1 304 Not Modified",
    "HTTP/1.1 404 Not Found",
    "HTTP/1.1 500 Oh",
    "HTTP/1.1 599 Oh",
    "HTTP/1.1 600 Oh",
    "HTTP/1.1 999 Oh",
    "HTTP/1.2 200 OK",
    "HTTP/2.0 200 OK",
    "HTTP/1.1200 OK",
    "http/1.1 200 OK",
    "ICY 200 OK",
    "HTTP/1.1",
    "",
];

/// Answers of a server, whole or cut off.
pub fn answers() -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    let mut put = |text: String| all.push(text.into_bytes());
    for status in STATUSES {
        for fields in [
            "Content-Length: 5\r\n",
            "Transfer-Encoding: chunked\r\n",
            "",
            "Content-Length: 0\r\n",
            "Connection: close\r\n",
        ] {
            let body = if fields.starts_with('T') { CHUNKS } else { "hello" };
            put(format!("{status}\r\n{fields}\r\n{body}"));
            put(format!("{status}\r\n{fields}\r\n"));
            put(format!("HTTP/1.1 100 Continue\r\n\r\n{status}\r\n{fields}\r\n{body}"));
        }
    }
    for version in ["1.1", "1.0"] {
        let begin = format!("HTTP/{version} 200 OK\r\n");
        for length in LENGTHS {
            put(format!("{begin}Content-Length: {length}\r\n\r\nhello"));
            put(format!("{begin}A: b\r\nCONTENT-LENGTH:{length} \r\nC: d\r\n\r\nhello"));
            for coding in CODINGS {
                put(format!("{begin}Content-Length: {length}\r\nTransfer-Encoding: {coding}\r\n\r\n{CHUNKS}"));
                put(format!("{begin}Transfer-Encoding: {coding}\r\nContent-Length: {length}\r\n\r\n{CHUNKS}"));
            }
        }
        for coding in CODINGS {
            put(format!("{begin}Transfer-Encoding: {coding}\r\n\r\n{CHUNKS}"));
            put(format!("{begin}TRANSFER-ENCODING:{coding}\r\nX: y\r\n\r\n{CHUNKS}"));
        }
        for connection in CONNECTIONS {
            put(format!("{begin}Connection: {connection}\r\nContent-Length: 5\r\nAuthorization: b\r\n\r\nhello"));
            put(format!("{begin}Connection: {connection}\r\n\r\nhello"));
        }
        for field in FIELDS {
            put(format!("{begin}{field}Content-Length: 5\r\n\r\nhello"));
            put(format!("{begin}Content-Length: 5\r\n{field}\r\nhello"));
            put(format!("{begin}{field}\r\nhello"));
        }
    }
    for body in BODIES {
        put(format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{body}"));
    }
    for count in [99, 100, 101] {
        put(format!("HTTP/1.1 200 OK\r\n{}\r\n", "X: y\r\n".repeat(count)));
    }
    for excess in ["x", "\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"] {
        put(format!("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello{excess}"));
        put(format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{CHUNKS}{excess}"));
        put(format!("HTTP/1.1 204 No\r\n\r\n{excess}"));
    }
    put("HTTP/1.1 100 A\r\n\r\n".repeat(20) + "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    put("HTTP/1.1 102 A\r\nContent-Length: 5\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".to_owned());
    let plain = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: y\r\n\r\nhello";
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nX: y\r\n\r\n";
    for message in [plain, chunked] {
        all.extend(line_ends(message));
        all.extend((0..message.len()).map(|end| message.as_bytes()[..end].to_vec()));
        all.extend(bytes(message));
    }
    all
}
