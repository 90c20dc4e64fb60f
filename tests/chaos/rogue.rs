//! A worker that breaks HTTP and its connections in every phase, by chance.
//!
//! Takes a seed, gives an address behind which threads answer as they like. Probes are answered well. Never says
//! that something is complete that is not: whatever looks whole there is.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Starts one; its threads end with the test's process.
pub fn start(seed: u64) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut rng = fastrand::Rng::with_seed(seed);
        for stream in listener.incoming() {
            let Ok(stream) = stream else { continue };
            let mut conn = Rogue { stream, rng: rng.fork(), buf: Vec::new() };
            std::thread::spawn(move || {
                let _ = conn.stream.set_nodelay(true);
                while conn.serve().is_ok_and(|end| end == End::Keep) {}
            });
        }
    });
    address
}

#[derive(PartialEq, Eq)]
enum End {
    Keep,
    Gone,
}

struct Rogue {
    stream: TcpStream,
    rng: fastrand::Rng,
    buf: Vec<u8>,
}

/// What a request asks for: the text of each event, how many, and whether as a stream.
struct Wish {
    text: String,
    events: usize,
    stream: bool,
}

impl Wish {
    fn read(body: &[u8]) -> Wish {
        let v: Value = serde_json::from_slice(body).expect("the gateway passes what it has checked");
        Wish {
            text: v["mock"]["text"].as_str().expect("every request has one").to_owned(),
            events: v["max_tokens"].as_u64().unwrap() as usize,
            stream: v["stream"] == true,
        }
    }

    /// The pieces of the answer's body.
    fn pieces(&self) -> Vec<String> {
        if !self.stream {
            return vec![format!("{{\"text\":\"{}\",\"usage\":{{}}}}", self.text.repeat(self.events))];
        }
        let mut pieces = vec![format!("data: {{\"text\":\"{}\"}}\n\n", self.text); self.events];
        pieces.push("data: [DONE]\n\n".to_owned());
        pieces
    }
}

fn chunk(piece: &str) -> String {
    format!("{:x}\r\n{piece}\r\n", piece.len())
}

impl Rogue {
    fn fill(&mut self) -> io::Result<usize> {
        let mut piece = [0; 16 * 1024];
        let n = self.stream.read(&mut piece)?;
        self.buf.extend_from_slice(&piece[..n]);
        Ok(n)
    }

    /// Receives up to the end of `need(buf)` bytes.
    fn until(&mut self, need: impl Fn(&[u8]) -> Option<usize>) -> io::Result<Vec<u8>> {
        loop {
            if let Some(n) = need(&self.buf).filter(|n| *n <= self.buf.len()) {
                let rest = self.buf.split_off(n);
                return Ok(std::mem::replace(&mut self.buf, rest));
            }
            if self.fill()? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    fn send(&mut self, text: &str) -> io::Result<()> {
        self.stream.write_all(text.as_bytes())
    }

    /// Ends the connection: by a reset or a FIN, at once or after a breath.
    fn leave(&mut self) -> io::Result<End> {
        if self.rng.bool() {
            std::thread::sleep(Duration::from_millis(self.rng.u64(1..10)));
        }
        if self.rng.bool() {
            socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO))?;
        }
        Ok(End::Gone)
    }

    fn reset(&mut self) -> io::Result<End> {
        // What has been sent shall arrive before.
        std::thread::sleep(Duration::from_millis(5));
        socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO))?;
        Ok(End::Gone)
    }

    /// One request, or the end.
    fn serve(&mut self) -> io::Result<End> {
        let dice = self.rng.u32(0..40);
        let head = self.until(|buf| buf.windows(4).position(|w| w == b"\r\n\r\n").map(|at| at + 4))?;
        let head = String::from_utf8_lossy(&head).to_lowercase();
        if head.starts_with("get ") {
            self.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")?;
            return Ok(End::Keep);
        }
        let length: usize = head.lines().find_map(|l| l.strip_prefix("content-length: ")?.parse().ok()).unwrap_or(0);
        if dice == 0 {
            // In the middle of the request.
            return self.leave();
        }
        let body = self.until(|_| Some(length))?;
        let wish = Wish::read(&body);
        match dice {
            1..=14 => self.answer(&wish, usize::MAX),
            15..=24 => {
                let at = self.rng.usize(0..12);
                self.answer(&wish, at)
            }
            25 => self.leave(),
            26 => {
                std::thread::sleep(Duration::from_secs(60));
                Ok(End::Gone)
            }
            27..=29 => {
                let status = *self.rng.choice(&[500, 503, 429, 422]).unwrap();
                self.send(&format!("HTTP/1.1 {status} No\r\ncontent-length: 2\r\n\r\n{{}}"))?;
                Ok(End::Keep)
            }
            _ => self.nonsense(&wish, dice),
        }
    }

    /// A good answer, broken off in its phase `at`, if it has so many.
    fn answer(&mut self, wish: &Wish, at: usize) -> io::Result<End> {
        let pieces = wish.pieces();
        if self.rng.bool() {
            // By its length.
            let body = pieces.concat();
            let head = format!("HTTP/1.1 200 OK\r\nserver: rogue\r\ncontent-length: {}\r\n\r\n", body.len());
            let cut = match at {
                0 => 7,
                1 => head.len() - 3,
                2 => head.len(),
                3 => head.len() + 1,
                4 | 5 => head.len() + body.len() / 2,
                6..=11 => head.len() + body.len() - 1,
                _ => usize::MAX,
            };
            let whole = head + &body;
            if cut < whole.len() {
                self.send(&whole[..cut])?;
                return self.leave();
            }
            self.send(&whole)?;
            return Ok(End::Keep);
        }
        let head = "HTTP/1.1 200 OK\r\nserver: rogue\r\ntransfer-encoding: chunked\r\n\r\n";
        match at {
            0 => {
                self.send(&head[..9])?;
                return self.leave();
            }
            1 => {
                self.send(head)?;
                return self.leave();
            }
            _ => self.send(head)?,
        }
        let breaks = self.rng.usize(0..pieces.len());
        for (i, piece) in pieces.iter().enumerate() {
            let chunk = chunk(piece);
            if at < 10 && i == breaks {
                // Between two chunks, within a size line, behind it, within the payload, behind it, within its line end.
                let line = chunk.find('\r').expect("a size line");
                let cut = [0, line, line + 1, line + 2, line + 3, chunk.len() - 2, chunk.len() - 1, 1][at - 2];
                self.send(&chunk[..cut])?;
                return self.leave();
            }
            self.send(&chunk)?;
            if self.rng.u32(0..20) == 0 {
                std::thread::sleep(Duration::from_millis(self.rng.u64(0..20)));
            }
        }
        match at {
            // Before the last chunk, and within it.
            10 => self.leave(),
            11 => {
                let last = ["0", "0\r", "0\r\n", "0\r\n\r", "0\r\nx-trailer: 1"];
                let part = *self.rng.choice(&last).unwrap();
                self.send(part)?;
                self.leave()
            }
            _ => {
                self.send("0\r\n\r\n")?;
                match self.rng.u32(0..10) {
                    0 => self.reset(),
                    1 => self.send("EXCESS").map(|()| End::Keep),
                    _ => Ok(End::Keep),
                }
            }
        }
    }

    fn nonsense(&mut self, wish: &Wish, dice: u32) -> io::Result<End> {
        match dice {
            30 => self.send("SSH-2.0-OpenSSH_9.9\r\n")?,
            31 => self.send("HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 5\r\n\r\nabc")?,
            32 => self.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n")?,
            33 => self.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n")?,
            34 => self.send(&format!("HTTP/1.1 200 OK\r\nx-long: {}\r\n\r\n", "l".repeat(128 * 1024)))?,
            35 => self.send(&"HTTP/1.1 103 Early Hints\r\n\r\n".repeat(100))?,
            36 => {
                // The end of the connection is the end of the answer, and a reset is none.
                let pieces = wish.pieces();
                self.send("HTTP/1.1 200 OK\r\nserver: rogue\r\n\r\n")?;
                let whole = self.rng.bool();
                let sent = if whole { pieces.len() } else { self.rng.usize(0..pieces.len()) };
                self.send(&pieces[..sent].concat())?;
                return if whole { Ok(End::Gone) } else { self.reset() };
            }
            37 => {
                // An answer that is too slow to be waited for.
                self.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")?;
                std::thread::sleep(Duration::from_secs(60));
            }
            38 => {
                // In single bytes.
                let body = wish.pieces().concat();
                self.send(&format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len()))?;
                for byte in body.as_bytes().chunks(1 + body.len() / 50) {
                    self.stream.write_all(byte)?;
                }
                return Ok(End::Keep);
            }
            _ => self.send("HTTP/1.1 200 OK\r\nbad header\r\n\r\n")?,
        }
        self.leave()
    }
}
