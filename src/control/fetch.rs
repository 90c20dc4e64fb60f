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

/// What is asked of whom.
#[derive(Clone, Copy)]
pub struct Question<'a> {
    pub addrs: &'a [SocketAddr],
    /// The `Host`.
    pub authority: &'a str,
    /// With its prefix.
    pub path: &'a str,
    /// Sent as `Authorization: Bearer`.
    pub api_key: Option<&'a str>,
    /// For all of it, the body included.
    pub limit: Duration,
}

impl Question<'_> {
    /// Asks with `GET`, and keeps up to [`MAX_ANSWER_BYTES`] of the answer's body.
    ///
    /// # Errors
    /// See [`Failure`]; a status of 400 or more is no failure here.
    pub async fn get(self) -> Result<Reply, Failure> {
        self.ask(Method::GET, MAX_ANSWER_BYTES).await
    }

    /// The same with another method, without a body, or with another bound for the answer's, in bytes.
    ///
    /// # Errors
    /// See [`get`](Self::get).
    pub async fn ask(self, method: Method, most: usize) -> Result<Reply, Failure> {
        let request = self.request(method).ok_or(Failure::Unaskable)?;
        match timeout(self.limit, exchange(self.addrs, request, self.limit, most)).await {
            Ok(result) => result,
            Err(_) => Err(Failure::Timeout(self.limit)),
        }
    }

    fn request(&self, method: Method) -> Option<Request<Empty<Bytes>>> {
        let mut request = Request::builder()
            .method(method)
            .uri(self.path)
            .header(HOST, self.authority)
            .header(USER_AGENT, AGENT)
            .header(CONNECTION, "close")
            .body(Empty::new())
            .ok()?;
        if let Some(key) = self.api_key {
            let mut value = HeaderValue::try_from(format!("Bearer {key}")).ok()?;
            value.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        Some(request)
    }
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
