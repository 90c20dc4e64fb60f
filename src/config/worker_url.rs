//! Addresses of workers.
//!
//! Takes a text, gives its parts and one canonical spelling, so that equal workers compare equal. Never resolves a name.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use super::mistakes::{Wrong, quote};
use super::values::digits;

/// A worker's address: `http://host:port[/prefix]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WorkerUrl {
    /// Name or address in lower case; an IPv6 address without brackets.
    pub host: String,
    pub port: u16,
    /// Path before every route, with a leading and without a trailing slash; empty if there is none.
    pub prefix: String,
}

impl fmt::Display for WorkerUrl {
    /// The canonical spelling: brackets around IPv6, the port always written.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (open, close) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        write!(f, "http://{open}{}{close}:{}{}", self.host, self.port, self.prefix)
    }
}

const EXAMPLE: &str = "write it like http://10.0.0.1:30000";

impl WorkerUrl {
    /// Reads `http://host[:port][/prefix]`; the port defaults to 80.
    ///
    /// # Errors
    /// Says what is wrong and what to write instead; never quotes a URL that carries user info.
    pub fn parse(text: &str) -> Result<WorkerUrl, Wrong> {
        let wrong = |why: &str, fix: &str| Err(Wrong::new(format!("{} {why}", shown(text)), fix));
        if text.is_empty() {
            return Err(Wrong::new("the worker URL is empty", EXAMPLE));
        }
        let rest = match text.split_once("://") {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
            Some((scheme, _)) if scheme.eq_ignore_ascii_case("https") => {
                return wrong(
                    "asks for TLS, which is not supported towards workers",
                    "use http:// and terminate TLS beside the worker",
                );
            }
            Some((scheme, _)) if scheme.eq_ignore_ascii_case("grpc") => {
                return wrong("is a gRPC address, which is not supported yet", "use the worker's http:// address");
            }
            Some(_) => return wrong("has an unknown scheme", EXAMPLE),
            None => return wrong("has no scheme", "put http:// before it"),
        };
        if let Some(bad) = rest.chars().find(|c| !c.is_ascii_graphic()) {
            return wrong(&format!("contains {bad:?}"), "percent-encode it or leave it out");
        }
        if rest.contains(['?', '#']) {
            return wrong("has a query or a fragment", "end it before the '?' or '#'");
        }
        let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        if authority.contains('@') {
            return wrong(
                "carries user info or a rank after '@'",
                "leave it out; a key goes into [[workers]] as api_key",
            );
        }
        let (host, port) = match split_port(authority) {
            Some(parts) => parts,
            None => return wrong("has brackets that do not fit", "write IPv6 like http://[::1]:30000"),
        };
        let host = match canonical_host(host) {
            Some(host) => host,
            None => return wrong("has no valid host", EXAMPLE),
        };
        let port = match port {
            None => 80,
            Some(text) => match digits(text) {
                Some(port @ 1..=65535) => port as u16,
                _ => return wrong("has no valid port", "give a port from 1 to 65535"),
            },
        };
        Ok(WorkerUrl { host, port, prefix: path.trim_end_matches('/').to_owned() })
    }
}

fn shown(text: &str) -> String {
    if text.contains('@') { "the worker URL".to_owned() } else { quote(text) }
}

/// Host (IPv6 still in brackets) and port text; `None` if brackets do not fit.
fn split_port(authority: &str) -> Option<(&str, Option<&str>)> {
    if authority.starts_with('[') {
        let end = authority.find(']')? + 1;
        let (host, rest) = authority.split_at(end);
        return match rest.strip_prefix(':') {
            Some(port) => Some((host, Some(port))),
            None if rest.is_empty() => Some((host, None)),
            None => None,
        };
    }
    match authority.split_once(':') {
        Some((_, port)) if port.contains(':') => None, // a bare IPv6 address
        Some((host, port)) => Some((host, Some(port))),
        None => Some((authority, None)),
    }
}

fn canonical_host(host: &str) -> Option<String> {
    if let Some(inner) = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        return inner.parse::<Ipv6Addr>().ok().map(|ip| ip.to_string());
    }
    // A name made of digits and dots is an address or a slip of the pen (10.0.0.256), never a DNS name.
    if host.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return host.parse::<Ipv4Addr>().ok().map(|ip| ip.to_string());
    }
    let label =
        |l: &str| (1..=63).contains(&l.len()) && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    let name = host.strip_suffix('.').unwrap_or(host);
    (host.len() <= 253 && name.split('.').all(label)).then(|| host.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_workers_have_one_spelling() {
        for (given, canonical) in [
            ("http://10.0.0.1:30000", "http://10.0.0.1:30000"),
            ("HTTP://Worker-1.Example", "http://worker-1.example:80"),
            ("http://w:8000/", "http://w:8000"),
            ("http://w:8000/a/b//", "http://w:8000/a/b"),
            ("http://[0:0::1]:30000/x", "http://[::1]:30000/x"),
            ("http://[::1]", "http://[::1]:80"),
            ("http://gpu_7:80", "http://gpu_7:80"),
        ] {
            assert_eq!(WorkerUrl::parse(given).map(|u| u.to_string()).as_deref(), Ok(canonical), "{given}");
        }
        assert_eq!(WorkerUrl::parse("http://[::1]:1").unwrap().host, "::1");
    }

    #[test]
    fn everything_else_is_refused() {
        for (given, says) in [
            ("", "empty"),
            ("https://w:1", "TLS"),
            ("grpc://w:1", "gRPC"),
            ("ftp://w:1", "scheme"),
            ("w:8000", "no scheme"),
            ("http://", "host"),
            ("http://:80", "host"),
            ("http://10.0.0.256:1", "host"),
            ("http://a..b:1", "host"),
            ("http://w!:1", "host"),
            ("http://[::1%eth0]:1", "host"),
            ("http://::1:80", "brackets"),
            ("http://[::1:80", "brackets"),
            ("http://[::1]80", "brackets"),
            ("http://w:0", "port"),
            ("http://w:", "port"),
            ("http://w:65536", "port"),
            ("http://w:+80", "port"),
            ("http://w/a?b", "query"),
            ("http://w/#b", "fragment"),
            ("http://w /", "contains"),
            ("http://w/\r\nx", "contains"),
        ] {
            let wrong = WorkerUrl::parse(given).expect_err(given);
            assert!(wrong.what.contains(says), "{given}: {wrong}");
            assert!(!wrong.to_string().contains(['\r', '\n']), "{given}");
        }
        let wrong = WorkerUrl::parse("http://user:secret@w:1").unwrap_err();
        assert!(wrong.what.contains("user info") && !wrong.to_string().contains("secret"), "{wrong}");
    }
}
