//! Standard error: where the process's own log goes, and the access log where it has no file.
//!
//! Takes lines, gives them to whoever reads them. Never waits long for a reader that has stopped reading, and never
//! while another thread has something to say: lines are left out then, and their number is told once there is room.

use std::io::{self, StderrLock, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Bytes that never block once there is room: a page of a pipe, and what a socket has left at least when it says so.
const PIECE_BYTES: usize = 4096;
/// How long a reader that is behind is waited for, once: until there was room again, nobody waits.
const PATIENCE: Duration = Duration::from_millis(100);

/// Lines that were left out and not told of. Counted under the lock of standard error, as [`STUCK`] is written.
static LOST: AtomicU64 = AtomicU64::new(0);
/// Whether the last wait was in vain.
static STUCK: AtomicBool = AtomicBool::new(false);

/// A writer of whole lines.
pub struct StandardError;

impl Write for StandardError {
    /// Writes everything.
    ///
    /// # Errors
    /// `WouldBlock` where it takes nothing, else the system's.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut out = io::stderr().lock();
        let patience = if STUCK.load(Ordering::Relaxed) { Duration::ZERO } else { PATIENCE };
        let written = whole(&mut out, bytes, patience);
        let stuck = written.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock);
        STUCK.store(stuck, Ordering::Relaxed);
        if stuck {
            LOST.fetch_add(1, Ordering::Relaxed);
        }
        written.map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes what there is room for at the moment of some lines, up to the end of one where that can be; how much it was.
///
/// # Errors
/// `WouldBlock` where there is no room, else the system's.
pub fn write_some(lines: &[u8]) -> io::Result<usize> {
    let within = &lines[..lines.len().min(PIECE_BYTES)];
    let end = within.iter().rposition(|&b| b == b'\n').map_or(within.len(), |at| at + 1);
    whole(&mut io::stderr().lock(), &within[..end], Duration::ZERO).map(|()| end)
}

fn whole(out: &mut StderrLock, bytes: &[u8], patience: Duration) -> io::Result<()> {
    for piece in bytes.chunks(PIECE_BYTES) {
        wait(out, patience)?;
        if LOST.load(Ordering::Relaxed) > 0 {
            let lost = LOST.swap(0, Ordering::Relaxed);
            out.write_all(format!("corelane: {lost} lines were left out: standard error took nothing\n").as_bytes())?;
            wait(out, patience)?;
        }
        out.write_all(piece)?;
    }
    Ok(())
}

/// Waits for room.
fn wait(out: &StderrLock, patience: Duration) -> io::Result<()> {
    let most = Timespec { tv_sec: 0, tv_nsec: patience.subsec_nanos().into() };
    match poll(&mut [PollFd::new(out, PollFlags::OUT)], Some(&most)) {
        Ok(0) => Err(io::ErrorKind::WouldBlock.into()),
        // A signal came in between: as good as too late.
        Err(rustix::io::Errno::INTR) => Err(io::ErrorKind::WouldBlock.into()),
        Err(e) => Err(e.into()),
        Ok(_) => Ok(()),
    }
}
