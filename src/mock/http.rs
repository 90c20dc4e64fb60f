//! Requests off a socket and bytes onto it, by hand, because hyper refuses to misbehave.
//!
//! Takes a non-blocking stream, gives whole requests. Never reads past 64 KiB of what follows a request
//! while that request is answered, never writes anything by itself but `100 Continue`.

use std::io;
use std::ops::Range;

use tokio::net::TcpStream;

use super::ask::{Addressee, Controls};

/// Longest head that is read, in bytes.
const MAX_HEAD_BYTES: usize = 1 << 20;
/// Bytes of pipelined requests that are read ahead.
const MAX_AHEAD_BYTES: usize = 64 * 1024;
const READ_BYTES: usize = 64 * 1024;

/// A request that was received whole, or at least its head (see `early`).
#[derive(Default)]
pub(super) struct Request {
    /// Request line and header lines, without the final empty line.
    pub head: Vec<u8>,
    pub method: String,
    /// Target without query.
    pub path: String,
    pub query: String,
    pub headers: Vec<(String, Vec<u8>)>,
    pub body: Vec<u8>,
    /// Trailer lines of a chunked body, as they came.
    pub trailers: Vec<u8>,
    /// Whether the client allows another request on this connection.
    pub keep_alive: bool,
    /// Whether the client understands chunked coding.
    pub chunked_ok: bool,
    /// Controls that asked to be obeyed before the body has been read; `body` is then incomplete.
    pub early: Option<Box<Controls>>,
    /// What is left of the body.
    left: Left,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Left {
    #[default]
    Nothing,
    Length(usize),
    Chunked,
}

impl Request {
    /// The first header of this (lower-case) name.
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_slice())
    }
}

/// Why no request came.
pub(super) enum Unread {
    /// The connection ended, or failed.
    Gone,
    /// The bytes are no HTTP, or too many: the status to answer with before closing.
    Refused(u16),
}

impl From<io::Error> for Unread {
    fn from(_: io::Error) -> Self {
        Unread::Gone
    }
}

/// Reads once. `Ok(0)` is the end of the stream.
pub(super) async fn fill(stream: &TcpStream, buf: &mut Vec<u8>) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        buf.reserve(READ_BYTES.min(buf.len().max(4096)));
        match stream.try_read_buf(buf) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
    }
}

/// Returns when the peer has closed or reset the connection; keeps what it sent until then.
pub(super) async fn gone(stream: &TcpStream, buf: &mut Vec<u8>) {
    while buf.len() < MAX_AHEAD_BYTES {
        match fill(stream, buf).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
    }
    std::future::pending().await
}

/// Writes all of `bytes`.
pub(super) async fn send(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.try_write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => stream.writable().await?,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Reads one request for `engine`. Bytes that follow it stay in `buf`.
pub(super) async fn receive(
    stream: &TcpStream,
    buf: &mut Vec<u8>,
    max_body: usize,
    engine: Addressee,
) -> Result<Request, Unread> {
    let (mut request, head_bytes) = loop {
        if let Some(head) = parse_head(buf)? {
            break head;
        }
        if buf.len() > MAX_HEAD_BYTES {
            return Err(Unread::Refused(431));
        }
        if fill(stream, buf).await? == 0 {
            return Err(Unread::Gone);
        }
    };
    buf.drain(..head_bytes);
    let expects = request.header("expect").is_some_and(|v| v.eq_ignore_ascii_case(b"100-continue"));
    if expects && request.left != Left::Nothing && buf.is_empty() {
        send(stream, b"HTTP/1.1 100 Continue\r\n\r\n").await?;
    }
    receive_body(stream, buf, &mut request, max_body, Some(engine)).await?;
    Ok(request)
}

/// Reads on where an early answer stopped.
pub(super) async fn receive_rest(
    stream: &TcpStream,
    buf: &mut Vec<u8>,
    request: &mut Request,
    max_body: usize,
) -> Result<(), Unread> {
    receive_body(stream, buf, request, max_body, None).await
}

async fn receive_body(
    stream: &TcpStream,
    buf: &mut Vec<u8>,
    request: &mut Request,
    max_body: usize,
    may_be_early: Option<Addressee>,
) -> Result<(), Unread> {
    let mut chunks = Chunks::default();
    let mut looked = 0;
    loop {
        let complete = match request.left {
            Left::Nothing => return Ok(()),
            Left::Length(n) if n > max_body => return Err(Unread::Refused(413)),
            Left::Length(n) => buf.len() >= n,
            Left::Chunked => chunks.advance(buf).map_err(Unread::Refused)?,
        };
        if complete {
            request.body = match request.left {
                Left::Length(n) => take(buf, n),
                _ => {
                    let body = chunks.spans.iter().flat_map(|r| buf[r.clone()].iter().copied()).collect();
                    request.trailers = buf[chunks.trailers.clone()].to_vec();
                    buf.drain(..chunks.at);
                    body
                }
            };
            request.left = Left::Nothing;
            return Ok(());
        }
        if buf.len() > max_body + MAX_HEAD_BYTES {
            return Err(Unread::Refused(413));
        }
        // Controls that come late in a long body are not early: looking for them stops after the first 64 KiB.
        if let Some(engine) = may_be_early
            && looked < MAX_AHEAD_BYTES
            && buf.len() > looked
        {
            looked = buf.len();
            let controls = Controls::in_prefix(buf).map(|all| Controls::first_for(all, engine));
            if let Some(controls) = controls.filter(|c| c.early.is_some()) {
                request.early = Some(Box::new(controls));
                return Ok(());
            }
        }
        if let Left::Length(n) = request.left {
            buf.reserve(n - buf.len());
        }
        if fill(stream, buf).await? == 0 {
            return Err(Unread::Gone);
        }
    }
}

fn take(buf: &mut Vec<u8>, n: usize) -> Vec<u8> {
    let rest = buf.split_off(n);
    std::mem::replace(buf, rest)
}

fn parse_head(buf: &[u8]) -> Result<Option<(Request, usize)>, Unread> {
    let mut fields = [httparse::EMPTY_HEADER; 256];
    let mut parsed = httparse::Request::new(&mut fields);
    let used = match parsed.parse(buf) {
        Ok(httparse::Status::Complete(n)) => n,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(Unread::Refused(400)),
    };
    let headers: Vec<(String, Vec<u8>)> =
        parsed.headers.iter().map(|h| (h.name.to_ascii_lowercase(), h.value.to_vec())).collect();
    let has = |name: &str, token: &[u8]| {
        let mut all = headers.iter().filter(|(n, _)| n == name).flat_map(|(_, v)| v.split(|b| *b == b','));
        all.any(|v| v.trim_ascii().eq_ignore_ascii_case(token))
    };
    let modern = parsed.version == Some(1);
    let keep_alive = if modern { !has("connection", b"close") } else { has("connection", b"keep-alive") };
    let length = headers.iter().find(|(n, _)| n == "content-length").map(|(_, v)| v);
    let left = if has("transfer-encoding", b"chunked") {
        Left::Chunked
    } else if let Some(v) = length {
        let n = std::str::from_utf8(v).ok().and_then(|v| v.parse().ok()).ok_or(Unread::Refused(400))?;
        if n == 0 { Left::Nothing } else { Left::Length(n) }
    } else {
        Left::Nothing
    };
    let target = parsed.path.unwrap_or("/");
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let end = if buf[..used].ends_with(b"\r\n\r\n") { used - 4 } else { used - 2 };
    let request = Request {
        head: buf[..end].trim_ascii_start().to_vec(),
        method: parsed.method.unwrap_or("").to_owned(),
        path: path.to_owned(),
        query: query.to_owned(),
        headers,
        keep_alive,
        chunked_ok: modern,
        left,
        ..Request::default()
    };
    Ok(Some((request, used)))
}

/// Where the payload of a chunked body lies in the buffer.
#[derive(Default)]
struct Chunks {
    /// Everything before is understood.
    at: usize,
    spans: Vec<Range<usize>>,
    trailers: Range<usize>,
    last: bool,
}

impl Chunks {
    /// Understands as much as has come; true when the body is complete.
    fn advance(&mut self, buf: &[u8]) -> Result<bool, u16> {
        loop {
            let Some(line) = super::find(&buf[self.at..], b"\r\n") else {
                return if buf.len() - self.at > MAX_HEAD_BYTES { Err(400) } else { Ok(false) };
            };
            let next = self.at + line + 2;
            if self.last {
                let empty = line == 0;
                self.trailers.end = if empty { self.at } else { next };
                self.at = next;
                if empty {
                    return Ok(true);
                }
                continue;
            }
            let text = std::str::from_utf8(&buf[self.at..next - 2]).map_err(|_| 400u16)?;
            let size = text.split(';').next().unwrap_or("").trim();
            let size = usize::from_str_radix(size, 16).map_err(|_| 400u16)?;
            if size == 0 {
                self.last = true;
                self.at = next;
                self.trailers = next..next;
                continue;
            }
            let end = next.checked_add(size).ok_or(413u16)?;
            if buf.len() < end + 2 {
                return Ok(false);
            }
            if &buf[end..end + 2] != b"\r\n" {
                return Err(400);
            }
            self.spans.push(next..end);
            self.at = end + 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_found_however_they_arrive() {
        let wire = b"3\r\nabc\r\n5;x=y\r\ndefgh\r\n0\r\nx-t: 1\r\n\r\nNEXT";
        let mut chunks = Chunks::default();
        for n in 0..wire.len() - 4 {
            assert_eq!(chunks.advance(&wire[..n]), Ok(false), "{n}");
        }
        assert_eq!(chunks.advance(wire), Ok(true));
        let body: Vec<u8> = chunks.spans.iter().flat_map(|r| wire[r.clone()].to_vec()).collect();
        assert_eq!((body.as_slice(), &wire[chunks.at..]), (&b"abcdefgh"[..], &b"NEXT"[..]));
        assert_eq!(&wire[chunks.trailers.clone()], b"x-t: 1\r\n");
    }
}
