//! The access log: one line a request, written beside everything else.
//!
//! Takes the lanes' records, gives lines to standard error, standard output or a file. Never makes a lane wait: while
//! writing is slow, records are dropped where they arise, and counted. Never lets a client's bytes end a line or
//! steer a terminal; never shows a query, a header, a body or a key.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::standard_error;
use crate::config::AccessFormat;
use crate::config::routes::ROUTES;
use crate::metrics::Tally;
use crate::shared::Shared;
use crate::shared::access::{Piece, Record};
use crate::shared::roster::{Role, Slot, Worker};

/// Pauses between two looks at the queues: while there is something to write, and while there is not. What 100 000
/// requests a second leave in the longer one fits a lane's queue.
const BUSY: Duration = Duration::from_millis(5);
const CALM: Duration = Duration::from_millis(20);
/// Records of one lane before another's turn.
const TURN: usize = 256;
/// Bytes of lines that are written at once.
const BATCH_BYTES: usize = 64 * 1024;
/// Least time between two complaints that the log cannot be written.
const COMPLAIN: Duration = Duration::from_secs(60);

/// Where lines go.
enum Target {
    Stderr,
    Stdout,
    File(File),
}

/// The thread's work: see [`Writer::run`].
pub struct Writer {
    shared: &'static Shared,
    format: AccessFormat,
    path: String,
    target: Target,
    names: Names,
    lines: Vec<u8>,
    /// How many are in there.
    count: u64,
    complained: Option<Instant>,
}

impl Writer {
    /// A writer to `stderr`, `stdout` or the file at `path`, which is made where there is none.
    ///
    /// # Errors
    /// One line for people: why the file cannot be opened.
    pub fn open(shared: &'static Shared, format: AccessFormat, path: &str) -> Result<Writer, String> {
        let target = target(path)?;
        let path = path.to_owned();
        Ok(Writer {
            shared,
            format,
            path,
            target,
            names: Names::default(),
            lines: Vec::with_capacity(BATCH_BYTES + 4096),
            count: 0,
            complained: None,
        })
    }

    /// Writes until told to stop (or the other end is gone), and then what is left.
    pub fn run(mut self, stop: &Receiver<()>) {
        loop {
            if self.shared.access.take_reopen() {
                self.reopen();
            }
            let pause = match self.round() {
                0 => CALM,
                TURN.. => Duration::ZERO,
                _ => BUSY,
            };
            if !matches!(stop.recv_timeout(pause), Err(RecvTimeoutError::Timeout)) {
                while self.round() > 0 {}
                return;
            }
        }
    }

    /// Writes what is there, up to a turn of every lane; how many lines of the lane that had the most.
    fn round(&mut self) -> usize {
        self.names.learn(self.shared);
        let mut most = 0;
        for lane in 0..self.shared.access.lanes() {
            for taken in 1..=TURN {
                let Some(record) = self.shared.access.take(lane) else { break };
                most = most.max(taken);
                self.count += 1;
                write_line(&mut self.lines, self.format, &record, &self.names);
                if self.lines.len() >= BATCH_BYTES {
                    self.flush();
                }
            }
        }
        self.flush();
        most
    }

    fn flush(&mut self) {
        if self.lines.is_empty() {
            return;
        }
        let written = match &mut self.target {
            Target::Stderr => to_standard_error(&self.lines),
            Target::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(&self.lines).and_then(|()| out.flush())
            }
            Target::File(file) => file.write_all(&self.lines),
        };
        self.lines.clear();
        self.shared.access.wrote(std::mem::take(&mut self.count), written.is_ok());
        if let Err(e) = written {
            self.complain("could not be written", &e);
        }
    }

    fn reopen(&mut self) {
        if let Target::File(file) = &mut self.target {
            match open(&self.path) {
                Ok(new) => {
                    *file = new;
                    tracing::info!(path = %self.path, "the access log was opened anew");
                }
                Err(e) => self.complain("could not be opened anew; the old file is written on", &e),
            }
        }
    }

    fn complain(&mut self, what: &str, why: &io::Error) {
        if self.complained.is_none_or(|at| at.elapsed() >= COMPLAIN) {
            self.complained = Some(Instant::now());
            tracing::error!(path = %self.path, reason = %why, "the access log {what}");
        }
    }
}

/// Waits for as long as it takes, but leaves standard error to the process's own log meanwhile.
fn to_standard_error(mut lines: &[u8]) -> io::Result<()> {
    while !lines.is_empty() {
        match standard_error::write_some(lines) {
            Ok(n) => lines = &lines[n..],
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(CALM),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Whether a writer to `path` could start here, as this user; nothing is opened or made for it, so that nobody reads the
/// other end of a pipe is not seen.
///
/// # Errors
/// See [`Writer::open`].
pub fn try_open(path: &str) -> Result<(), String> {
    use rustix::fs::{Access, access};
    let mut at = Path::new(path).to_owned();
    let allowed = match at.metadata() {
        _ if matches!(path, "stderr" | "stdout") => Ok(()),
        Ok(found) if found.is_dir() => Err(rustix::io::Errno::ISDIR),
        Ok(found) if found.file_type().is_socket() => Err(rustix::io::Errno::NXIO),
        Ok(_) => access(&at, Access::WRITE_OK),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            // The file that a link names is made, if there is none. More links than the kernel follows are no NotFound.
            while let Ok(to) = at.read_link() {
                at = at.parent().unwrap_or(Path::new("")).join(to);
            }
            let dir = at.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
            access(dir, Access::WRITE_OK | Access::EXEC_OK)
        }
        Err(e) => return Err(refusal(path, &e)),
    };
    allowed.map_err(|e| refusal(path, &e.into()))
}

fn target(path: &str) -> Result<Target, String> {
    Ok(match path {
        "stderr" => Target::Stderr,
        "stdout" => Target::Stdout,
        _ => Target::File(open(path).map_err(|e| refusal(path, &e))?),
    })
}

fn refusal(path: &str, e: &io::Error) -> String {
    format!("the access log {path} cannot be opened: {e}; change --access-log-path or its rights")
}

/// A pipe that has no reader is an error: to wait for one would stop the start, or the writer. One that has one is
/// waited for when it is written to.
fn open(path: &str) -> io::Result<File> {
    let file = OpenOptions::new().create(true).append(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    rustix::io::ioctl_fionbio(&file, false)?;
    Ok(file)
}

/// Has the file opened anew whenever the process gets SIGUSR1, for whoever rotates logs.
pub async fn keep_reopening(shared: &'static Shared) {
    use tokio::signal::unix::{SignalKind, signal};
    match signal(SignalKind::user_defined1()) {
        Ok(mut signals) => {
            while signals.recv().await.is_some() {
                shared.access.reopen();
            }
        }
        Err(e) => tracing::warn!(reason = %e, "SIGUSR1 cannot be handled: the access log cannot be opened anew"),
    }
}

/// Who the workers are: of each slot the present tenant and the one before, whose records may still come.
#[derive(Default)]
struct Names {
    generation: Option<u64>,
    slots: Vec<[Option<Named>; 2]>,
}

#[derive(Clone)]
struct Named {
    era: u32,
    url: Box<str>,
    role: Role,
}

impl Names {
    fn learn(&mut self, shared: &Shared) {
        if self.generation == Some(shared.roster.generation()) {
            return;
        }
        let snapshot = shared.roster.snapshot();
        self.generation = Some(snapshot.generation);
        snapshot.workers.iter().for_each(|worker| self.note(worker));
    }

    fn note(&mut self, worker: &Worker) {
        let at = worker.slot as usize;
        if self.slots.len() <= at {
            self.slots.resize(at + 1, [None, None]);
        }
        let [now, before] = &mut self.slots[at];
        if now.as_ref().is_none_or(|named| named.era != worker.era) {
            let named = Named { era: worker.era, url: worker.url.clone(), role: worker.role };
            *before = now.replace(named);
        }
    }

    fn of(&self, (slot, era): (Slot, u32)) -> Option<&Named> {
        self.slots.get(slot as usize)?.iter().flatten().find(|named| named.era == era)
    }
}

/// A line under way: pairs of names and values.
struct Line<'a> {
    out: &'a mut Vec<u8>,
    format: AccessFormat,
    any: bool,
}

impl Line<'_> {
    fn key(&mut self, key: &str) {
        let (before, after) = match (self.format, std::mem::replace(&mut self.any, true)) {
            (AccessFormat::Json, false) => ("{\"", "\":"),
            (AccessFormat::Json, true) => (",\"", "\":"),
            (AccessFormat::Text, false) => ("", "="),
            (AccessFormat::Text, true) => (" ", "="),
        };
        [before, key, after].iter().for_each(|part| self.out.extend_from_slice(part.as_bytes()));
    }

    /// A value that needs no quotes in either format: numbers and the like.
    fn bare(&mut self, key: &str, value: impl std::fmt::Display) {
        self.key(key);
        // Writing to a vector does not fail.
        let _ = write!(self.out, "{value}");
    }

    fn text(&mut self, key: &str, value: &str) {
        self.piece(key, Piece { bytes: value.as_bytes(), cut: false });
    }

    /// A text of anybody's: what is not visible ASCII or a space is escaped, as JSON does it.
    fn piece(&mut self, key: &str, Piece { bytes, cut }: Piece) {
        self.key(key);
        let plain = |b: &u8| b.is_ascii_graphic() && !matches!(b, b'"' | b'\\' | b'=');
        if self.format == AccessFormat::Text && !bytes.is_empty() && !cut && bytes.iter().all(plain) {
            return self.out.extend_from_slice(bytes);
        }
        self.out.push(b'"');
        for c in String::from_utf8_lossy(bytes).chars() {
            match c {
                '"' | '\\' => self.out.extend_from_slice(&[b'\\', c as u8]),
                ' '..='~' => self.out.push(c as u8),
                _ => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
            }
        }
        if cut {
            self.out.extend_from_slice(b"...");
        }
        self.out.push(b'"');
    }

    /// Microseconds as milliseconds.
    fn ms(&mut self, key: &str, us: u64) {
        self.bare(key, format_args!("{}.{:03}", us / 1000, us % 1000));
    }

    fn end(self) {
        self.out.extend_from_slice(if self.format == AccessFormat::Json { b"}\n" } else { b"\n" });
    }
}

fn write_line(out: &mut Vec<u8>, format: AccessFormat, record: &Record, names: &Names) {
    let mut line = Line { out, format, any: false };
    line.text("time", &Moment(record.begun_us).to_string());
    line.piece("id", record.text.id());
    if record.trace != 0 {
        line.text("trace", &format!("{:032x}", record.trace));
    }
    line.text("client", &record.client.to_string());
    if record.head_us.is_some() {
        line.text("method", record.method.as_str());
        let route = ROUTES.get(usize::from(record.route)).map_or("other", |route| route.path);
        line.text("route", route);
        let path = record.text.path();
        if path.bytes != route.as_bytes() {
            line.piece("path", path);
        }
    }
    if !record.text.model().bytes.is_empty() {
        line.piece("model", record.text.model());
    }
    if record.stream {
        line.bare("stream", true);
    }
    let paired = record.workers[1].is_some();
    for (at, worker) in record.workers.iter().enumerate().filter_map(|(at, w)| w.map(|w| (at, w))) {
        let key = if paired { ["prefill", "decode"][at] } else { "worker" };
        match names.of(worker) {
            Some(named) => {
                line.text(key, &named.url);
                if !paired {
                    line.text("role", named.role.name());
                }
            }
            None => line.text(key, &format!("{}-{}", worker.0, worker.1)),
        }
    }
    if let Some((_, reason)) = record.reason.and_then(|tally: Tally| tally.labels().next()) {
        line.text("decision", reason);
    }
    if let (matched, symbols @ 1..) = record.matched {
        line.bare("match", format_args!("{:.3}", f64::from(matched) / f64::from(symbols)));
    }
    line.bare("status", record.status);
    line.text("end", record.fault.map_or("complete", |what| what.row().code));
    line.bare("attempts", record.attempts);
    line.bare("bytes_in", record.bytes_in);
    line.bare("bytes_out", record.bytes_out);
    let queue = record.body_us.map(|_| record.queue_us);
    for (key, us) in [
        ("head_ms", record.head_us),
        ("body_ms", record.body_us),
        ("queue_ms", queue),
        ("upstream_ms", record.upstream_us),
        ("total_ms", Some(record.total_us)),
    ] {
        if let Some(us) = us {
            line.ms(key, us);
        }
    }
    line.end();
}

/// Microseconds since 1970, shown as RFC 3339 has it.
struct Moment(u64);

impl std::fmt::Display for Moment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (seconds, us) = (self.0 / 1_000_000, self.0 % 1_000_000);
        let (mut days, second) = (seconds / 86400, seconds % 86400);
        let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let mut year = 1970;
        while days >= 365 + u64::from(leap(year)) {
            days -= 365 + u64::from(leap(year));
            year += 1;
        }
        let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let mut month = 0;
        while days >= lengths[month] {
            days -= lengths[month];
            month += 1;
        }
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        write!(f, "{year:04}-{:02}-{:02}T{hour:02}:{minute:02}:{second:02}.{us:06}Z", month + 1, days + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::What;
    use crate::http1::Method;
    use crate::shared::access::Text;

    fn record(id: &[u8], model: &[u8], path: &[u8]) -> Record {
        Record {
            begun_us: 1_795_957_412_000_123,
            client: ([10, 0, 0, 7], 50000).into(),
            trace: 0xabc,
            method: Method::Post,
            route: 0,
            status: 200,
            fault: None,
            stream: true,
            workers: [Some((3, 2)), None],
            reason: Some(Tally::DecisionHit),
            matched: (3, 4),
            attempts: 1,
            bytes_in: 300,
            bytes_out: 4000,
            head_us: Some(12),
            body_us: Some(1003),
            queue_us: 0,
            upstream_us: Some(40_000),
            total_us: 2_000_001,
            text: Text::new(id, model, path),
        }
    }

    fn line(format: AccessFormat, record: &Record) -> String {
        let mut out = Vec::new();
        write_line(&mut out, format, record, &Names::default());
        String::from_utf8(out).expect("ASCII")
    }

    #[test]
    fn lines_say_all_of_a_request() {
        let ok = record(b"r-1", b"llama", b"/v1/chat/completions");
        assert_eq!(
            line(AccessFormat::Json, &ok),
            concat!(
                r#"{"time":"2026-11-29T13:03:32.000123Z","id":"r-1","trace":"00000000000000000000000000000abc","#,
                r#""client":"10.0.0.7:50000","method":"POST","route":"/v1/chat/completions","model":"llama","#,
                r#""stream":true,"worker":"3-2","decision":"hit","match":0.750,"status":200,"end":"complete","#,
                r#""attempts":1,"bytes_in":300,"bytes_out":4000,"head_ms":0.012,"body_ms":1.003,"queue_ms":0.000,"#,
                r#""upstream_ms":40.000,"total_ms":2000.001}"#,
                "\n"
            )
        );
        let text = line(AccessFormat::Text, &ok);
        assert!(
            text.contains(" client=10.0.0.7:50000 method=POST route=/v1/chat/completions model=llama stream=true ")
        );
        let cut = Record {
            fault: Some(What::ClientGone),
            status: 0,
            head_us: None,
            body_us: None,
            upstream_us: None,
            workers: [None; 2],
            reason: None,
            matched: (0, 0),
            trace: 0,
            ..record(b"", b"", b"")
        };
        assert_eq!(
            line(AccessFormat::Text, &cut),
            "time=2026-11-29T13:03:32.000123Z id=\"\" client=10.0.0.7:50000 stream=true status=0 end=client_gone \
             attempts=1 bytes_in=300 bytes_out=4000 total_ms=2000.001\n"
        );
    }

    #[test]
    fn nobody_writes_lines_of_his_own() {
        let evil = "a\"b\\c\nd\re\u{1b}[31m\u{2028}\u{85}é😀=\u{7f} x";
        for format in AccessFormat::ALL {
            let line = line(*format, &record(evil.as_bytes(), evil.as_bytes(), b"/\xff\xfe\n"));
            assert_eq!(line.matches('\n').count(), 1, "{line}");
            assert!(line.trim_end().bytes().all(|b| (b' '..=b'~').contains(&b)), "{line}");
        }
        let line = line(AccessFormat::Json, &record(evil.as_bytes(), &[b'm'; 500], b"/p"));
        let read: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(read["id"], evil);
        assert_eq!((&read["route"], &read["path"]), (&"/v1/chat/completions".into(), &"/p".into()));
        assert!(read["model"].as_str().is_some_and(|m| m.ends_with("mmm...")));
    }

    #[test]
    fn moments_are_dates() {
        for (unix, shown) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000Z"),
            (1_709_164_799, "2024-02-28T23:59:59.000000Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ] {
            assert_eq!(Moment(unix * 1_000_000).to_string(), shown);
        }
    }

    #[test]
    fn a_slot_is_known_by_its_last_two_tenants() {
        let shared = Shared::leak(1);
        let worker = |era, url: &str| {
            std::sync::Arc::new(Worker {
                slot: 1,
                era,
                role: Role::Regular,
                url: url.into(),
                prefix: "".into(),
                addrs: Box::default(),
                api_key: None,
                models: Box::default(),
                server_info: None,
                pairing: Default::default(),
            })
        };
        let mut names = Names::default();
        let url = |names: &Names, era| names.of((1, era)).map(|named| named.url.to_string());
        for era in 1..4 {
            shared.roster.publish(vec![worker(era, &format!("http://w:{era}"))]);
            names.learn(shared);
        }
        shared.roster.publish(Vec::new());
        names.learn(shared);
        assert_eq!(url(&names, 3).as_deref(), Some("http://w:3"));
        assert_eq!(url(&names, 2).as_deref(), Some("http://w:2"));
        assert_eq!(url(&names, 1), None);
    }
}
