//! One question to a worker, on a connection of its own.
//!
//! Takes addresses and a path, gives status and body. Never takes longer than its limit, body included; never
//! keeps more than [`MAX_ANSWER_BYTES`], or what its caller allows; never leaves the connection behind.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::header::{AUTHORIZATION, CONNECTION, HOST, HeaderValue, USER_AGENT};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Most bytes of an answer that are read.
pub const MAX_ANSWER_BYTES: usize = 1 << 20;

const AGENT: &str = concat!("corelane/", env!("CARGO_PKG_VERSION"));

/// What a worker answered.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    /// The body, or as much of it as is kept.
    pub body: Vec<u8>,
    /// Whether the body was longer than that.
    pub truncated: bool,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum Failure {
    /// The host name has no address (yet).
    Unresolved,
    /// No address took the connection.
    Connect(std::io::Error),
    /// The limit passed.
    Timeout(Duration),
    /// The other side broke off or does not speak HTTP.
    Broken(hyper::Error),
    /// The path or the key cannot stand in a request.
    Unaskable,
}

impl Failure {
    /// Whether it says something of this process and nothing of the worker: descriptors, memory or ports are short.
    pub fn is_ours(&self) -> bool {
        let Failure::Connect(e) = self else { return false };
        const SHORT: [i32; 5] = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EADDRNOTAVAIL];
        e.raw_os_error().is_some_and(|number| SHORT.contains(&number))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Unresolved => f.write_str("its host name does not resolve"),
            Failure::Connect(e) => write!(f, "cannot connect: {e}"),
            Failure::Timeout(limit) => write!(f, "no complete answer within {limit:?}"),
            Failure::Broken(e) => write!(f, "no valid answer: {e}"),
            Failure::Unaskable => f.write_str("its path or api key cannot stand in a request"),
        }
    }
}

/// Gets `path` (prefix included), with the key as `Authorization: Bearer` when there is one.
///
/// # Errors
/// See [`Failure`]; a status of 400 or more is no failure here.
pub async fn get(
    addrs: &[SocketAddr],
    authority: &str,
    path: &str,
    api_key: Option<&str>,
    limit: Duration,
) -> Result<Reply, Failure> {
    ask(Method::GET, addrs, authority, path, api_key, limit).await
}

/// The same with another method, and without a body.
///
/// # Errors
/// See [`get`].
pub async fn ask(
    method: Method,
    addrs: &[SocketAddr],
    authority: &str,
    path: &str,
    api_key: Option<&str>,
    limit: Duration,
) -> Result<Reply, Failure> {
    let request = request(method, authority, path, api_key).ok_or(Failure::Unaskable)?;
    within(MAX_ANSWER_BYTES, addrs, request, limit).await
}

/// [`get`] with another bound for the answer's body, in bytes.
///
/// # Errors
/// See [`get`].
pub async fn get_within(
    most: usize,
    addrs: &[SocketAddr],
    authority: &str,
    path: &str,
    api_key: Option<&str>,
    limit: Duration,
) -> Result<Reply, Failure> {
    let request = request(Method::GET, authority, path, api_key).ok_or(Failure::Unaskable)?;
    within(most, addrs, request, limit).await
}

async fn within(
    most: usize,
    addrs: &[SocketAddr],
    request: Request<Empty<Bytes>>,
    limit: Duration,
) -> Result<Reply, Failure> {
    match timeout(limit, exchange(addrs, request, limit, most)).await {
        Ok(result) => result,
        Err(_) => Err(Failure::Timeout(limit)),
    }
}

fn request(method: Method, authority: &str, path: &str, api_key: Option<&str>) -> Option<Request<Empty<Bytes>>> {
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, authority)
        .header(USER_AGENT, AGENT)
        .header(CONNECTION, "close")
        .body(Empty::new())
        .ok()?;
    if let Some(key) = api_key {
        let mut value = HeaderValue::try_from(format!("Bearer {key}")).ok()?;
        value.set_sensitive(true);
        request.headers_mut().insert(AUTHORIZATION, value);
    }
    Some(request)
}

async fn exchange(
    addrs: &[SocketAddr],
    request: Request<Empty<Bytes>>,
    limit: Duration,
    most: usize,
) -> Result<Reply, Failure> {
    let stream = connect(addrs, limit).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(Failure::Broken)?;
    // The set ends its task when it is dropped, so a limit that passes closes the connection too.
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let answer = sender.send_request(request).await.map_err(Failure::Broken)?;
    let status = answer.status().as_u16();
    let mut incoming = answer.into_body();
    let mut body = Vec::new();
    let mut truncated = false;
    while let Some(frame) = incoming.frame().await {
        let Ok(data) = frame.map_err(Failure::Broken)?.into_data() else { continue };
        let room = most - body.len();
        body.extend_from_slice(&data[..data.len().min(room)]);
        if data.len() > room {
            truncated = true;
            break;
        }
    }
    Ok(Reply { status, body, truncated })
}

/// Tries each address for its share of the limit, so that a silent one does not hide the next.
async fn connect(addrs: &[SocketAddr], limit: Duration) -> Result<TcpStream, Failure> {
    let share = limit / addrs.len().max(1) as u32;
    let mut last = Failure::Unresolved;
    for addr in addrs {
        last = match timeout(share, TcpStream::connect(addr)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(e)) => Failure::Connect(e),
            Err(_) => Failure::Timeout(share),
        };
    }
    Err(last)
}
