//! Whether the gateway's two ports are free, and who has them if not.
//!
//! Takes addresses, gives what came of binding them for a moment. Never keeps one; never says more to whoever has it
//! than one GET.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Longest wait for whoever has a port.
const PATIENCE: Duration = Duration::from_secs(1);

/// A port, tried.
#[derive(Debug)]
pub enum Door {
    Free,
    /// A corelane has it.
    Ours,
    /// Something else has it.
    Taken,
    /// It cannot be had for another reason.
    Refused(io::Error),
}

/// Tries the port of the gateway or (`is_admin`) of its metrics.
pub fn try_door(host: IpAddr, port: u16, is_admin: bool) -> Door {
    match TcpListener::bind((host, port)) {
        Ok(_) => Door::Free,
        Err(e) if e.kind() == ErrorKind::AddrInUse => match is_corelane(SocketAddr::new(host, port), is_admin) {
            true => Door::Ours,
            false => Door::Taken,
        },
        Err(e) => Door::Refused(e),
    }
}

/// Whether who listens there answers as a corelane does: with a fault of its own, or with its metrics.
fn is_corelane(mut address: SocketAddr, is_admin: bool) -> bool {
    if address.ip().is_unspecified() {
        let loopback = if address.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
        address.set_ip(loopback);
    }
    let (path, sign) = if is_admin { ("/metrics", "corelane_") } else { ("/corelane-doctor", "x-corelane-error:") };
    let answer = ask(address, path).unwrap_or_default();
    String::from_utf8_lossy(&answer).to_lowercase().contains(sign)
}

fn ask(address: SocketAddr, path: &str) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    // What came before it fell silent is as good.
    let _ = stream.take(16 * 1024).read_to_end(&mut answer);
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_free_or_somebody_s() {
        let localhost = IpAddr::from(Ipv4Addr::LOCALHOST);
        let taken = TcpListener::bind((localhost, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        let answering = std::thread::spawn(move || {
            for answer in
                ["HTTP/1.1 404 Not Found\r\nX-Corelane-Error: unknown_route\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n"]
            {
                let (mut stream, _) = taken.accept().unwrap();
                // All of it: a close over unread bytes is a reset, and could lose the answer.
                let mut asked = Vec::new();
                while !asked.ends_with(b"\r\n\r\n") {
                    let mut piece = [0; 1024];
                    let n = stream.read(&mut piece).unwrap();
                    assert!(n > 0, "half a question");
                    asked.extend_from_slice(&piece[..n]);
                }
                stream.write_all(answer.as_bytes()).unwrap();
            }
            taken
        });
        assert!(matches!(try_door(localhost, port, false), Door::Ours));
        assert!(matches!(try_door(localhost, port, false), Door::Taken));
        drop(answering.join().unwrap());
        assert!(matches!(try_door(localhost, port, true), Door::Free));
        let not_ours = IpAddr::from([192, 0, 2, 1]);
        assert!(matches!(try_door(not_ours, 0, false), Door::Refused(_)));
    }
}
