//! One connection read by both parsers.
//!
//! Takes the bytes of a connection, gives the messages on it and how it went on. Never opens a socket.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use bytes::Bytes;
use corelane::fault::Fault;
use corelane::http1::{
    AnswerBody, BodyLength, Chunked, Field, HeadLimits, Method, Parsed, RequestHead, ResponseHead, Version,
};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

const LIMITS: HeadLimits = HeadLimits { bytes: 128 * 1024, fields: 100 };
/// More than any case has.
const PIPE_BYTES: usize = 1 << 20;
/// Turns of all tasks after which what has not happened does not happen.
const TURNS: usize = 40;

/// A message in a form that both parsers can be brought to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Method, authority, path and query; or the status.
    pub line: Vec<String>,
    pub version: Version,
    /// Names in lower case, in their order; of one name, values in theirs.
    pub fields: Vec<(String, String)>,
    pub body: Bytes,
}

/// What was read from one connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    pub messages: Vec<Message>,
    /// Why no further message was read: what our parser says, if it was that one and it refused.
    pub refused: Option<Fault>,
}

/// How an answer was read while the server kept the connection open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Open {
    /// It is whole, and whether another request could follow it.
    Whole(Box<Message>, bool),
    /// It is not, and more is waited for.
    Waiting,
    Refused,
}

fn message(line: Vec<String>, version: Version, fields: Vec<(String, String)>, body: Bytes) -> Message {
    let mut fields = fields;
    fields.sort_by(|a, b| a.0.cmp(&b.0));
    Message { line, version, fields, body }
}

fn lossless(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}

// ---- ours

fn our_fields(fields: &[Field], wire: &[u8]) -> Vec<(String, String)> {
    fields.iter().map(|f| (lossless(f.name.of(wire)).to_lowercase(), lossless(f.value.of(wire)))).collect()
}

/// A body at the beginning of the bytes, and what follows it; `None`: it is not whole, `Err`: it is malformed.
fn chunked(wire: &[u8]) -> Result<Option<(Bytes, &[u8])>, ()> {
    let mut buf = wire.to_vec();
    let squeezed = Chunked::new().squeeze(&mut buf).map_err(drop)?;
    buf.truncate(squeezed.payload);
    Ok(squeezed.done.then(|| (buf.into(), &wire[squeezed.consumed..])))
}

fn exactly(wire: &[u8], len: u64) -> Option<(Bytes, &[u8])> {
    let (body, rest) = wire.split_at_checked(usize::try_from(len).ok()?)?;
    Some((Bytes::copy_from_slice(body), rest))
}

/// What our parser makes of a client's bytes.
pub fn our_requests(mut wire: &[u8]) -> Read {
    let mut messages = Vec::new();
    loop {
        let mut head = RequestHead::new();
        let end = match head.parse(wire, &LIMITS) {
            Ok(Parsed::Complete(end)) => end,
            Ok(Parsed::Partial) => return Read { messages, refused: None },
            Err(fault) => return Read { messages, refused: Some(fault) },
        };
        let body = match head.body {
            BodyLength::None => exactly(&wire[end..], 0),
            BodyLength::Length(len) => exactly(&wire[end..], len),
            BodyLength::Chunked => match chunked(&wire[end..]) {
                Ok(body) => body,
                Err(()) => return Read { messages, refused: Some(corelane::fault::What::BadChunk.into()) },
            },
        };
        let Some((body, rest)) = body else { return Read { messages, refused: None } };
        let of = |span: corelane::span::Span| lossless(span.of(wire));
        let line = vec![
            head.method.as_str().to_owned(),
            head.authority.map(of).unwrap_or_default(),
            of(head.path),
            head.query.map_or_else(|| "none".to_owned(), |query| format!("?{}", of(query))),
        ];
        messages.push(message(line, head.version, our_fields(&head.fields, wire), body));
        if !head.keep_alive {
            return Read { messages, refused: None };
        }
        wire = rest;
    }
}

/// What our parser makes of a server's bytes: the answer while the connection is open, and when it has ended.
pub fn our_answer(wire: &[u8], method: Method) -> (Open, Option<Message>, Option<Fault>) {
    let mut at = 0;
    let mut head = ResponseHead::new();
    loop {
        head.reset();
        match head.parse(&wire[at..], &LIMITS, method) {
            Ok(Parsed::Complete(end)) if head.interim() => at += end,
            Ok(Parsed::Complete(_)) => break,
            Ok(Parsed::Partial) => return (Open::Waiting, None, None),
            Err(fault) => return (Open::Refused, None, Some(fault)),
        }
    }
    let wire = &wire[at..];
    let end = match head.parse(wire, &LIMITS, method) {
        Ok(Parsed::Complete(end)) => end,
        other => unreachable!("it was whole before: {other:?}"),
    };
    let told = |body| message(vec![head.status.to_string()], head.version, our_fields(&head.fields, wire), body);
    let body = match head.body {
        AnswerBody::None => exactly(&wire[end..], 0),
        AnswerBody::Length(len) => exactly(&wire[end..], len),
        AnswerBody::Chunked => match chunked(&wire[end..]) {
            Ok(body) => body,
            Err(()) => return (Open::Refused, None, Some(corelane::fault::What::CutBadFraming.into())),
        },
        AnswerBody::UntilClose => return (Open::Waiting, Some(told(Bytes::copy_from_slice(&wire[end..]))), None),
    };
    let Some((body, rest)) = body else { return (Open::Waiting, None, None) };
    let told = told(body);
    (Open::Whole(Box::new(told.clone()), head.keep_alive && rest.is_empty()), Some(told), None)
}

// ---- hyper's

fn version(version: hyper::Version) -> Version {
    if version == hyper::Version::HTTP_10 { Version::H10 } else { Version::H11 }
}

fn hyper_fields(fields: &HeaderMap) -> Vec<(String, String)> {
    fields.iter().map(|(name, value)| (lossless(name.as_str().as_bytes()), lossless(value.as_bytes()))).collect()
}

/// Runs a future until it is done, or until nothing happens any more.
async fn until_idle<F: Future>(future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    for _ in 0..TURNS {
        let polled = std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await;
        if let Poll::Ready(done) = polled {
            return Some(done);
        }
        tokio::task::yield_now().await;
    }
    None
}

/// What hyper's server makes of a client's bytes.
pub async fn hyper_requests(wire: &[u8]) -> Vec<Message> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let noted = noted.clone();
        async move {
            let (head, body) = request.into_parts();
            if let Ok(body) = body.collect().await {
                let uri = &head.uri;
                let line = vec![
                    head.method.as_str().to_owned(),
                    uri.authority().map(|authority| lossless(authority.as_str().as_bytes())).unwrap_or_default(),
                    lossless(uri.path().as_bytes()),
                    uri.query().map_or_else(|| "none".to_owned(), |query| format!("?{}", lossless(query.as_bytes()))),
                ];
                let told = message(line, version(head.version), hyper_fields(&head.headers), body.to_bytes());
                noted.lock().expect("no panic").push(told);
            }
            Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
        }
    });
    let (mut client, server) = duplex(PIPE_BYTES);
    client.write_all(wire).await.expect("the pipe holds it");
    client.shutdown().await.expect("a pipe can be shut");
    let serve =
        hyper::server::conn::http1::Builder::new().half_close(true).serve_connection(TokioIo::new(server), service);
    let _ = until_idle(serve).await.expect("a connection that ended is served to its end");
    seen.lock().expect("no panic").clone()
}

/// What hyper's client makes of a server's bytes, as [`our_answer`] says it.
pub async fn hyper_answer(wire: &[u8], method: Method) -> (Open, Option<Message>) {
    (hyper_answer_open(wire, method).await, hyper_answer_closed(wire, method).await)
}

type Sender = hyper::client::conn::http1::SendRequest<Empty<Bytes>>;

async fn connect() -> (Sender, DuplexStream) {
    let (client, server) = duplex(PIPE_BYTES);
    let (sender, conn) = hyper::client::conn::http1::handshake(TokioIo::new(client)).await.expect("a pipe is open");
    tokio::spawn(conn);
    (sender, server)
}

async fn ask(sender: &mut Sender, method: Method) -> Result<Message, ()> {
    let request = Request::builder().method(method.as_str()).uri("/").body(Empty::new()).expect("a request");
    let (head, body) = sender.send_request(request).await.map_err(drop)?.into_parts();
    let body = body.collect().await.map_err(drop)?.to_bytes();
    Ok(message(vec![head.status.as_str().to_owned()], version(head.version), hyper_fields(&head.headers), body))
}

/// Reads a request off the server's end.
async fn asked(server: &mut DuplexStream) {
    let mut got = Vec::new();
    while !got.ends_with(b"\r\n\r\n") {
        if server.read_buf(&mut got).await.is_ok_and(|n| n == 0) {
            return;
        }
    }
}

async fn hyper_answer_closed(wire: &[u8], method: Method) -> Option<Message> {
    let (mut sender, mut server) = connect().await;
    let answer = async {
        asked(&mut server).await;
        server.write_all(wire).await.expect("the pipe holds it");
        server.shutdown().await.expect("a pipe can be shut");
    };
    let (told, ()) = until_idle(async { tokio::join!(ask(&mut sender, method), answer) }).await?;
    told.ok()
}

async fn hyper_answer_open(wire: &[u8], method: Method) -> Open {
    let (mut sender, mut server) = connect().await;
    let answer = async {
        asked(&mut server).await;
        server.write_all(wire).await.expect("the pipe holds it");
    };
    let told = match until_idle(async { tokio::join!(ask(&mut sender, method), answer) }).await {
        None => return Open::Waiting,
        Some((Err(()), ())) => return Open::Refused,
        Some((Ok(told), ())) => told,
    };
    let again = async {
        asked(&mut server).await;
        let _ = server.write_all(b"HTTP/1.1 299 Next\r\nContent-Length: 0\r\n\r\n").await;
    };
    let next = async {
        sender.ready().await.map_err(drop)?;
        ask(&mut sender, method).await
    };
    let next = until_idle(async { tokio::join!(next, again).0 }).await;
    Open::Whole(Box::new(told), next.is_some_and(|next| next.is_ok_and(|next| next.line == ["299"])))
}
