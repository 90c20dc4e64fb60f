//! Where the demo's table appears: in place on a terminal, line after line anywhere else.
//!
//! Takes a table of plain ASCII, gives it to stdout, cut to the terminal's width. Never lets the log run through
//! a table that is redrawn: what is logged meanwhile is printed above it.

use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};

/// Most log bytes that wait for the next drawing; what is beyond is left out.
const MAX_HELD_BYTES: usize = 64 * 1024;
/// Size of a terminal that does not say.
const UNKNOWN: (usize, usize) = (80, 24);

/// A table: a line of headings, one line a worker, one of totals.
pub(super) struct Table {
    pub headings: String,
    pub workers: Vec<String>,
    pub total: String,
}

impl Table {
    /// Its lines, at most `rows` of them: workers that find no room are only counted.
    fn lines(&self, rows: usize) -> Vec<String> {
        let room = rows.saturating_sub(2).max(1);
        let shown = if self.workers.len() <= room { self.workers.len() } else { room - 1 };
        let mut lines = vec![self.headings.clone()];
        lines.extend_from_slice(&self.workers[..shown]);
        if shown < self.workers.len() {
            lines.push(format!("... {} more", self.workers.len() - shown));
        }
        lines.push(self.total.clone());
        lines
    }
}

/// Standard output, with a table at its end.
pub(super) struct Screen {
    in_place: bool,
    terminal: bool,
    log: Log,
    /// Lines of the table that stand above the cursor, and the width that they were cut to.
    drawn: usize,
    width: usize,
    headed: bool,
}

impl Screen {
    /// Drawn in place on a terminal that can do that, unless `plain`.
    pub fn new(plain: bool) -> Screen {
        let terminal = io::stdout().is_terminal();
        let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
        let in_place = terminal && !dumb && !plain;
        let held = (in_place && io::stderr().is_terminal()).then(Vec::new);
        Screen { in_place, terminal, log: Log(Arc::new(Mutex::new(held))), drawn: 0, width: 0, headed: false }
    }

    /// Where log lines go.
    pub fn log(&self) -> Log {
        self.log.clone()
    }

    /// Prints lines as they are; a table above them stays.
    pub fn say(&mut self, text: &str) -> io::Result<()> {
        self.log.print();
        self.drawn = 0;
        let mut out = io::stdout().lock();
        // Over the ^C that a terminal echoes.
        out.write_all(if self.in_place { b"\r\x1b[K" } else { b"" })?;
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// Prints lines, each cut to the terminal's width.
    pub fn list(&mut self, lines: &[String]) -> io::Result<()> {
        let width = if self.terminal { size().0 } else { usize::MAX };
        let text: String = lines.iter().map(|line| format!("{}\n", cut(line, width))).collect();
        self.say(&text)
    }

    /// Shows the table, over the one before where that is possible.
    pub fn show(&mut self, table: &Table) -> io::Result<()> {
        if !self.in_place {
            let mut lines = table.lines(usize::MAX);
            if std::mem::replace(&mut self.headed, true) {
                lines.remove(0);
            }
            return self.list(&lines);
        }
        let (width, height) = size();
        let mut out = io::stdout().lock();
        // A terminal that became narrower may have wrapped the old table: how far up it begins is not known then.
        if self.drawn > 0 && width >= self.width {
            write!(out, "\r\x1b[{}A", self.drawn)?;
        }
        if self.log.is_waiting() {
            out.write_all(b"\x1b[J")?;
            out.flush()?;
            self.log.print();
        }
        let lines = table.lines(height.saturating_sub(1));
        for line in &lines {
            writeln!(out, "{}\x1b[K", cut(line, width))?;
        }
        out.write_all(b"\x1b[J")?;
        (self.drawn, self.width) = (lines.len(), width);
        out.flush()
    }
}

impl Drop for Screen {
    /// No table follows: log lines go straight to stderr again.
    fn drop(&mut self) {
        self.log.print();
        *self.log.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// The line without what does not fit. The last column stays free: a cursor behind it would wrap in some terminals.
fn cut(line: &str, width: usize) -> &str {
    let end = line.char_indices().nth(width.saturating_sub(1)).map_or(line.len(), |(at, _)| at);
    line[..end].trim_end()
}

/// Columns and rows of the terminal.
fn size() -> (usize, usize) {
    match rustix::termios::tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col as usize, size.ws_row as usize),
        _ => UNKNOWN,
    }
}

/// Takes whole log lines; holds them while a table is drawn in place on the same terminal.
#[derive(Clone)]
pub(super) struct Log(Arc<Mutex<Option<Vec<u8>>>>);

impl Log {
    fn is_waiting(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(|held| !held.is_empty())
    }

    fn print(&self) {
        if let Some(held) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = io::stderr().write_all(held);
            held.clear();
        }
    }
}

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            None => io::stderr().write_all(line)?,
            Some(held) if held.len() + line.len() <= MAX_HELD_BYTES => held.extend_from_slice(line),
            Some(_) => {}
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_to_the_width() {
        assert_eq!(cut("worker  state", 80), "worker  state");
        assert_eq!(cut("worker  state", 9), "worker");
        assert_eq!(cut("worker", 7), "worker");
        assert_eq!(cut("worker", 6), "worke");
        assert_eq!(cut("worker", 0), "");
    }

    #[test]
    fn a_held_log_waits_and_is_bounded() {
        let mut log = Log(Arc::new(Mutex::new(Some(Vec::new()))));
        assert!(!log.is_waiting());
        log.write_all(&[b'x'; MAX_HELD_BYTES]).unwrap();
        log.write_all(b"lost").unwrap();
        assert!(log.is_waiting());
        assert_eq!(log.0.lock().unwrap().as_ref().unwrap().len(), MAX_HELD_BYTES);
    }

    #[test]
    fn a_low_terminal_counts_the_rest() {
        let workers = (0..5).map(|n| format!("w{n}")).collect();
        let table = Table { headings: "worker".into(), workers, total: "total".into() };
        assert_eq!(table.lines(7).len(), 7);
        assert_eq!(table.lines(5), ["worker", "w0", "w1", "... 3 more", "total"]);
        assert_eq!(table.lines(0), ["worker", "... 5 more", "total"]);
    }
}
