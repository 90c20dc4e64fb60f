//! The access log's way off the lanes: records of fixed size in one bounded queue a lane.
//!
//! Takes a record of every request that is to be logged from its lane, gives them to one writer. Never allocates for a
//! record, never makes a lane wait: what does not fit the queue is the lane's to count. Holds no byte of a prompt, and
//! no key.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::SystemTime;

use crossbeam::queue::ArrayQueue;
use crossbeam::utils::CachePadded;

use super::roster::Slot;
use crate::fault::What;
use crate::http1::Method;
use crate::limits::{ACCESS_QUEUE, ACCESS_TEXT_BYTES, MAX_REQUEST_ID_BYTES};
use crate::metrics::Tally;

/// One request that has ended. Times are in microseconds; `None` where it did not come so far.
#[derive(Clone, Debug)]
pub struct Record {
    /// When its first byte came, since 1970.
    pub begun_us: u64,
    pub client: SocketAddr,
    /// The trace id that it brought; 0 for none.
    pub trace: u128,
    pub method: Method,
    /// Its row of the route table, or the table's length.
    pub route: u16,
    /// What the client was told; 0 when it was cut.
    pub status: u16,
    /// What ended it otherwise than well.
    pub fault: Option<What>,
    /// Whether it asked for a stream.
    pub stream: bool,
    /// The workers that it was last given to: one, or prefill and decode.
    pub workers: [Option<(Slot, u32)>; 2],
    /// What that choice went by.
    pub reason: Option<Tally>,
    /// Symbols of its prompt that some worker had, of how many; 0 of 0 where nobody looked.
    pub matched: (u32, u32),
    pub attempts: u32,
    /// Head and payload.
    pub bytes_in: u64,
    /// All that was sent to the client.
    pub bytes_out: u64,
    /// From the first byte to the end of the head.
    pub head_us: Option<u64>,
    /// From there to the end of the body, or of what was held of one that did not end.
    pub body_us: Option<u64>,
    /// In the queue of the admission; 0 when it did not have to wait.
    pub queue_us: u64,
    /// From the last choice of a worker to the first byte for the client; the client's sending of a body that is not held is
    /// part of it.
    pub upstream_us: Option<u64>,
    /// From the first byte to the end of the answer.
    pub total_us: u64,
    pub text: Text,
}

/// Request id, model and path of a record, cut where they do not fit.
#[derive(Clone, Debug)]
pub struct Text {
    bytes: [u8; ACCESS_TEXT_BYTES],
    ends: [u16; 3],
    cut: [bool; 3],
}

/// Bytes that are always there for the model, and for the path.
const SHARE: usize = 96;

impl Text {
    /// The three of them, as they came.
    pub fn new(id: &[u8], model: &[u8], path: &[u8]) -> Text {
        let mut text = Text { bytes: [0; ACCESS_TEXT_BYTES], ends: [0; 3], cut: [false; 3] };
        let mut end = 0;
        for (i, (part, keep)) in [(id, 2 * SHARE), (model, SHARE), (path, 0)].into_iter().enumerate() {
            let len = part.len().min(ACCESS_TEXT_BYTES - end - keep);
            text.bytes[end..end + len].copy_from_slice(&part[..len]);
            end += len;
            (text.ends[i], text.cut[i]) = (end as u16, len < part.len());
        }
        text
    }

    /// The request's id.
    pub fn id(&self) -> Piece<'_> {
        self.piece(0)
    }

    /// The model's name as the client gave it; empty for none.
    pub fn model(&self) -> Piece<'_> {
        self.piece(1)
    }

    /// The path without the query.
    pub fn path(&self) -> Piece<'_> {
        self.piece(2)
    }

    fn piece(&self, at: usize) -> Piece<'_> {
        let from = if at == 0 { 0 } else { self.ends[at - 1] as usize };
        Piece { bytes: &self.bytes[from..self.ends[at] as usize], cut: self.cut[at] }
    }
}

/// A part of a record's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<'a> {
    /// Anything that a client can send.
    pub bytes: &'a [u8],
    /// There was more.
    pub cut: bool,
}

const _: () = assert!(ACCESS_TEXT_BYTES <= u16::MAX as usize && ACCESS_TEXT_BYTES >= MAX_REQUEST_ID_BYTES + 2 * SHARE);

/// One lane's queue.
struct Desk {
    queue: ArrayQueue<Record>,
    /// Where the lane's clock began, in microseconds since 1970. Writer: the lane.
    epoch_us: AtomicU64,
}

/// The queues of all lanes, once the log is opened. Writers: settle (records), the log's writer (counts), control (the wish
/// for a new file).
#[derive(Default)]
pub struct Access {
    desks: OnceLock<Box<[CachePadded<Desk>]>>,
    wants_new_file: AtomicBool,
    /// Lines written, and lines that could not be. Relaxed: counts.
    written: AtomicU64,
    failed: AtomicU64,
}

impl Access {
    /// Makes a queue for each of `lanes` lanes; before they start.
    pub fn open(&self, lanes: usize) {
        let desk = |_| CachePadded::new(Desk { queue: ArrayQueue::new(ACCESS_QUEUE), epoch_us: AtomicU64::new(0) });
        let _ = self.desks.set((0..lanes).map(desk).collect());
    }

    fn desks(&self) -> &[CachePadded<Desk>] {
        self.desks.get().map_or(&[], |desks| desks)
    }

    /// Says what the time is when a lane's clock stands at `now_us`; the lane does that now and then, because the
    /// system's clock may be set.
    pub fn set_clock(&self, lane: usize, now_us: u64) {
        if let Some(desk) = self.desks().get(lane) {
            let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            // Relaxed: the lane alone reads it.
            desk.epoch_us.store((unix.as_micros() as u64).saturating_sub(now_us), Ordering::Relaxed);
        }
    }

    /// A moment of a lane's clock in microseconds since 1970.
    pub fn unix_us(&self, lane: usize, at_us: u64) -> u64 {
        self.desks().get(lane).map_or(0, |desk| desk.epoch_us.load(Ordering::Relaxed)) + at_us
    }

    /// Hands a record over; false when the queue is full, or nobody writes.
    pub fn push(&self, lane: usize, record: Record) -> bool {
        self.desks().get(lane).is_some_and(|desk| desk.queue.push(record).is_ok())
    }

    /// The next record of a lane (the writer only).
    pub fn take(&self, lane: usize) -> Option<Record> {
        self.desks().get(lane)?.queue.pop()
    }

    /// Lanes that have a queue.
    pub fn lanes(&self) -> usize {
        self.desks().len()
    }

    /// Has the writer open its file anew.
    pub fn reopen(&self) {
        // Relaxed: nothing else is handed over.
        self.wants_new_file.store(true, Ordering::Relaxed);
    }

    /// Whether that was asked for since the last call.
    pub fn take_reopen(&self) -> bool {
        self.wants_new_file.swap(false, Ordering::Relaxed)
    }

    /// Notes what became of lines.
    pub fn wrote(&self, lines: u64, well: bool) {
        (if well { &self.written } else { &self.failed }).fetch_add(lines, Ordering::Relaxed);
    }

    /// Lines written, and lines that could not be.
    pub fn lines(&self) -> (u64, u64) {
        (self.written.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_where_they_do_not_fit() {
        let text = Text::new(b"id", b"", b"/v1");
        assert_eq!([text.id(), text.model(), text.path()].map(|p| p.bytes), [&b"id"[..], b"", b"/v1"]);
        let long = [b'x'; 5000];
        let text = Text::new(&long[..256], &long, &long);
        assert_eq!((text.id().bytes.len(), text.id().cut), (256, false));
        assert_eq!((text.model().bytes.len(), text.model().cut), (96, true));
        assert_eq!((text.path().bytes.len(), text.path().cut), (96, true));
        let text = Text::new(b"", b"m", &long);
        assert_eq!((text.path().bytes.len(), text.path().cut), (ACCESS_TEXT_BYTES - 1, true));
        assert_eq!(text.model(), Piece { bytes: b"m", cut: false });
    }
}
