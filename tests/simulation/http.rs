//! HTTP/1.1 as the simulated clients and workers read it: by their own few lines, not by the gateway's.
//!
//! Takes bytes, gives heads and bodies. Never forgives: what is not as the standard has it is an error.

/// A head: first line and fields, names in lower case.
#[derive(Clone, Debug)]
pub struct Head {
    pub first: String,
    pub fields: Vec<(String, String)>,
}

impl Head {
    /// Takes a head off the front of `buf`; `None` while it is not whole.
    pub fn take(buf: &mut Vec<u8>) -> Option<Result<Head, String>> {
        let end = buf.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
        let bytes: Vec<u8> = buf.drain(..end).collect();
        Some(Head::read(&bytes[..end - 4]))
    }

    fn read(bytes: &[u8]) -> Result<Head, String> {
        let text = std::str::from_utf8(bytes).map_err(|_| "a head that is no text".to_owned())?;
        let mut lines = text.split("\r\n");
        let first = lines.next().unwrap_or_default().to_owned();
        let field = |line: &str| {
            let (name, value) = line.split_once(':').ok_or(format!("a field without a colon: {line}"))?;
            Ok((name.to_ascii_lowercase(), value.trim().to_owned()))
        };
        Ok(Head { first, fields: lines.map(field).collect::<Result<_, String>>()? })
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// A field as a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.get(name)?.parse().ok()
    }

    /// The status of an answer.
    pub fn status(&self) -> Result<u16, String> {
        let bad = || format!("a status line: {}", self.first);
        let rest = self.first.strip_prefix("HTTP/1.1 ").ok_or_else(bad)?;
        rest.get(..3).and_then(|code| code.parse().ok()).ok_or_else(bad)
    }
}

/// Where a body ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Length(u64),
    /// In front of a chunk's size.
    Size,
    Chunk(u64),
    /// Behind a chunk.
    Line,
    Trailer,
    Close,
}

/// A body that arrives.
#[derive(Debug)]
pub struct Body {
    framing: Framing,
    pub bytes: Vec<u8>,
    pub done: bool,
}

impl Body {
    /// The body of an answer with this head. `none`: there is none, whatever the head says.
    pub fn of(head: &Head, none: bool) -> Result<Body, String> {
        let framing = match (head.get("transfer-encoding"), head.get("content-length")) {
            _ if none => Framing::Length(0),
            (Some(_), Some(_)) => return Err("both framings at once".into()),
            (Some("chunked"), None) => Framing::Size,
            (Some(other), None) => return Err(format!("transfer coding {other}")),
            (None, Some(length)) => Framing::Length(length.parse().map_err(|_| format!("length {length}"))?),
            (None, None) => Framing::Close,
        };
        Ok(Body { framing, bytes: Vec::new(), done: framing == Framing::Length(0) })
    }

    /// Whether the end of the connection is its end.
    pub fn ends_with_connection(&self) -> bool {
        self.framing == Framing::Close
    }

    /// Takes what belongs to it off the front of `buf`.
    pub fn take(&mut self, buf: &mut Vec<u8>) -> Result<(), String> {
        while !self.done {
            match self.framing {
                Framing::Close => {
                    self.bytes.append(buf);
                    return Ok(());
                }
                Framing::Length(left) | Framing::Chunk(left) => {
                    let n = (left as usize).min(buf.len());
                    self.bytes.extend(buf.drain(..n));
                    let left = left - n as u64;
                    let chunk = matches!(self.framing, Framing::Chunk(_));
                    self.framing = if chunk { Framing::Chunk(left) } else { Framing::Length(left) };
                    if left > 0 {
                        return Ok(());
                    }
                    if chunk { self.framing = Framing::Line } else { self.done = true }
                }
                Framing::Size | Framing::Line | Framing::Trailer => {
                    let Some(end) = buf.windows(2).position(|two| two == b"\r\n") else {
                        return Ok(());
                    };
                    let line: Vec<u8> = buf.drain(..end + 2).collect();
                    self.line(&line[..end])?;
                }
            }
        }
        Ok(())
    }

    fn line(&mut self, line: &[u8]) -> Result<(), String> {
        match self.framing {
            Framing::Line if line.is_empty() => self.framing = Framing::Size,
            Framing::Line => return Err("bytes behind a chunk".into()),
            Framing::Trailer => self.done = line.is_empty(),
            _ => {
                let text = String::from_utf8_lossy(line);
                let digits = text.split(';').next().unwrap_or_default().trim();
                let size = u64::from_str_radix(digits, 16).map_err(|_| format!("chunk size {text:?}"))?;
                self.framing = if size == 0 { Framing::Trailer } else { Framing::Chunk(size) };
            }
        }
        Ok(())
    }
}
