//! Where a worker is: its URL taken apart, and its name looked up.
//!
//! Takes a worker's base URL, gives what a request needs of it and, again and again, its addresses. Never
//! runs on a lane; never takes an address away because a later look-up failed (the probes judge workers, the
//! name service does not).

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Longest wait for the name service; the look-up itself goes on in its own thread.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);

/// A worker's base URL, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// `host:port` as it stands in the URL: the value of `Host`.
    pub authority: Box<str>,
    /// Name or address, without the brackets of IPv6.
    pub host: Box<str>,
    pub port: u16,
    /// Path prefix: empty, or starting with `/` and not ending in one.
    pub prefix: Box<str>,
}

impl Endpoint {
    /// Takes `http://host[:port][/prefix]` apart.
    ///
    /// # Errors
    /// A sentence about what is wrong with the URL.
    pub fn parse(url: &str) -> Result<Endpoint, &'static str> {
        let rest = url.strip_prefix("http://").ok_or("a worker's URL starts with http://")?;
        if !rest.bytes().all(|b| b.is_ascii_graphic()) || rest.contains(['?', '#', '@', '"', '\\']) {
            return Err("a worker's URL is host, port and path only");
        }
        let cut = rest.find('/').unwrap_or(rest.len());
        let (authority, path) = rest.split_at(cut);
        let (host, port) = match authority.strip_prefix('[') {
            Some(v6) => {
                let (host, after) = v6.split_once(']').ok_or("the IPv6 address lacks its closing bracket")?;
                host.parse::<std::net::Ipv6Addr>().map_err(|_| "what stands in brackets is not an IPv6 address")?;
                (
                    host,
                    after.strip_prefix(':').map_or(if after.is_empty() { Ok(None) } else { Err(()) }, |p| Ok(Some(p))),
                )
            }
            None => match authority.split_once(':') {
                Some((host, port)) => (host, Ok(Some(port))),
                None => (authority, Ok(None)),
            },
        };
        if host.is_empty() {
            return Err("a worker's URL names a host");
        }
        let port = match port {
            Ok(None) => 80,
            Ok(Some(p)) if p.bytes().all(|b| b.is_ascii_digit()) => {
                p.parse().ok().filter(|p| *p != 0).ok_or("the port is a number from 1 to 65535")?
            }
            _ => return Err("the port is a number from 1 to 65535"),
        };
        Ok(Endpoint { authority: authority.into(), host: host.into(), port, prefix: path.trim_end_matches('/').into() })
    }

    /// The address, when the host is one and no look-up is needed.
    pub fn literal(&self) -> Option<SocketAddr> {
        self.host.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, self.port))
    }

    /// Asks the name service.
    ///
    /// # Errors
    /// The name service's own, `TimedOut`, or `NotFound` for a name without addresses.
    pub async fn look_up(&self) -> io::Result<Box<[SocketAddr]>> {
        let lookup = tokio::net::lookup_host((&*self.host, self.port));
        let addrs = match tokio::time::timeout(LOOKUP_TIMEOUT, lookup).await {
            Ok(found) => found?,
            Err(_) => return Err(io::Error::new(io::ErrorKind::TimedOut, "the name service does not answer")),
        };
        let mut unique: Vec<SocketAddr> = Vec::new();
        for addr in addrs {
            if !unique.contains(&addr) {
                unique.push(addr);
            }
        }
        match unique.is_empty() {
            true => Err(io::Error::new(io::ErrorKind::NotFound, "the name has no addresses")),
            false => Ok(unique.into_boxed_slice()),
        }
    }
}

/// Whether two answers of the name service mean the same: their order is a matter of chance.
pub fn same_addrs(a: &[SocketAddr], b: &[SocketAddr]) -> bool {
    a.len() == b.len() && a.iter().all(|x| b.contains(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_taken_apart() {
        for (url, authority, host, port, prefix) in [
            ("http://a:1", "a:1", "a", 1, ""),
            ("http://a", "a", "a", 80, ""),
            ("http://a:8000/x/y", "a:8000", "a", 8000, "/x/y"),
            ("http://a:8000/", "a:8000", "a", 8000, ""),
            ("http://[::1]:30000/p", "[::1]:30000", "::1", 30000, "/p"),
            ("http://[::1]", "[::1]", "::1", 80, ""),
            ("http://10.0.0.1:65535", "10.0.0.1:65535", "10.0.0.1", 65535, ""),
        ] {
            let want = Endpoint { authority: authority.into(), host: host.into(), port, prefix: prefix.into() };
            assert_eq!(Endpoint::parse(url), Ok(want), "{url}");
        }
    }

    #[test]
    fn bad_urls_are_refused() {
        for url in [
            "",
            "a:1",
            "https://a",
            "http://",
            "http://:1",
            "http://a:",
            "http://a:0",
            "http://a:65536",
            "http://a:+1",
            "http://a:1?x",
            "http://u@a:1",
            "http://[::1",
            "http://[::1]1",
            "http://[x]:1",
            "http://a b",
            "http://a\r\n",
            "http://::1",
        ] {
            assert!(Endpoint::parse(url).is_err(), "{url:?}");
        }
    }

    #[test]
    fn literals_need_no_look_up() {
        assert_eq!(Endpoint::parse("http://[::1]:9").unwrap().literal(), Some("[::1]:9".parse().unwrap()));
        assert_eq!(Endpoint::parse("http://localhost:9").unwrap().literal(), None);
    }

    #[test]
    fn order_of_addresses_does_not_matter() {
        let (a, b) = ("10.0.0.1:1".parse().unwrap(), "10.0.0.2:1".parse().unwrap());
        assert!(same_addrs(&[a, b], &[b, a]) && !same_addrs(&[a], &[b]) && !same_addrs(&[a], &[a, b]));
    }
}
