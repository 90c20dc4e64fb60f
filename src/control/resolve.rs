//! Where a worker is: its URL taken apart, and its name looked up.
//!
//! Takes a worker's base URL, gives what a request needs of it and, again and again, its addresses. Never
//! runs on a lane; never takes an address away because a later look-up failed (the probes judge workers, the
//! name service does not).

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use crate::config::{WorkerUrl, Wrong};

/// Longest wait for the name service; the look-up itself goes on in its own thread.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Look-ups at a time: each blocks a thread for as long as the name service takes, and a fleet's worth of threads would
/// be too many.
pub const LOOKUPS: usize = 8;

/// A turn lasts as long as its look-up, whoever waits for it: while the name service hangs, no more are begun.
static TURNS: Semaphore = Semaphore::const_new(LOOKUPS);

/// A worker's base URL, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// `host:port`, the port always written: the value of `Host`.
    pub authority: Box<str>,
    /// Name or address, without the brackets of IPv6.
    pub host: Box<str>,
    pub port: u16,
    /// Path prefix: empty, or starting with `/` and not ending in one.
    pub prefix: Box<str>,
}

impl Endpoint {
    /// Takes a worker's URL apart; what one may look like is the configuration's to say.
    ///
    /// # Errors
    /// What is wrong with the URL, and what to write instead.
    pub fn parse(url: &str) -> Result<Endpoint, Wrong> {
        WorkerUrl::parse(url).map(Endpoint::from)
    }

    /// The host as it stands in a URL: IPv6 in brackets.
    pub fn bracketed(&self) -> String {
        if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.to_string() }
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
        let (host, port) = (self.host.clone(), self.port);
        let look = in_turn(&TURNS, move || (&*host, port).to_socket_addrs());
        let addrs = match tokio::time::timeout(LOOKUP_TIMEOUT, look).await {
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

/// Blocks a thread with this when it is its turn. It is not begun when nobody waits for it any more by then.
async fn in_turn<T: Send + 'static>(
    turns: &'static Semaphore,
    look: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    // It is never closed.
    let turn = turns.acquire().await.map_err(io::Error::other)?;
    let looked = spawn_blocking(move || {
        let found = look();
        drop(turn);
        found
    });
    looked.await.map_err(io::Error::other)?
}

impl From<WorkerUrl> for Endpoint {
    fn from(url: WorkerUrl) -> Endpoint {
        let mut endpoint =
            Endpoint { authority: "".into(), host: url.host.into(), port: url.port, prefix: url.prefix.into() };
        endpoint.authority = format!("{}:{}", endpoint.bracketed(), url.port).into();
        endpoint
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
            ("http://A", "a:80", "a", 80, ""),
            ("http://a:8000/x/y", "a:8000", "a", 8000, "/x/y"),
            ("http://a:8000/", "a:8000", "a", 8000, ""),
            ("http://[::1]:30000/p", "[::1]:30000", "::1", 30000, "/p"),
            ("http://[::1]", "[::1]:80", "::1", 80, ""),
            ("http://10.0.0.1:65535", "10.0.0.1:65535", "10.0.0.1", 65535, ""),
        ] {
            let want = Endpoint { authority: authority.into(), host: host.into(), port, prefix: prefix.into() };
            assert_eq!(Endpoint::parse(url), Ok(want), "{url}");
        }
    }

    #[test]
    fn literals_need_no_look_up() {
        assert_eq!(Endpoint::parse("http://[::1]:9").unwrap().literal(), Some("[::1]:9".parse().unwrap()));
        assert_eq!(Endpoint::parse("http://localhost:9").unwrap().literal(), None);
    }

    #[tokio::test]
    async fn a_look_up_that_hangs_is_not_followed_by_more_than_have_a_turn() {
        static TURNS: Semaphore = Semaphore::const_new(1);
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let first = tokio::spawn(in_turn(&TURNS, move || ended.recv().map_err(io::Error::other)));
        tokio::task::yield_now().await;
        let never = in_turn(&TURNS, || -> io::Result<()> { unreachable!("nobody waits for it any more") });
        assert!(tokio::time::timeout(Duration::from_millis(20), never).await.is_err());
        end.send(()).unwrap();
        assert!(first.await.unwrap().is_ok());
        assert_eq!(in_turn(&TURNS, || Ok(7)).await.unwrap(), 7);
        // A look-up that panics gives its turn back, too.
        assert!(in_turn(&TURNS, || -> io::Result<()> { panic!("on purpose") }).await.is_err());
        assert_eq!(in_turn(&TURNS, || Ok(8)).await.unwrap(), 8);
    }

    #[test]
    fn order_of_addresses_does_not_matter() {
        let (a, b) = ("10.0.0.1:1".parse().unwrap(), "10.0.0.2:1".parse().unwrap());
        assert!(same_addrs(&[a, b], &[b, a]) && !same_addrs(&[a], &[b]) && !same_addrs(&[a], &[a, b]));
    }
}
