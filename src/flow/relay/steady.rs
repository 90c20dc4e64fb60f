//! What passes without the walk: the even flow of small pieces that an answer consists of once it has begun.
//!
//! Takes pieces from the wire as they arrive, says whether they may go on as they are, and counts them as the walk would.
//! Never takes one that the walk has to see: the last, a large one, one that breaks the framing or exceeds it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::{Framing, Passing};
use crate::flow::passage::Request;
use crate::lane::Lane;
use crate::lane::view::View;
use crate::lane::wire::{Pass, Wire};
use crate::limits::{RECV_BUFFER_BYTES, SPLICE_CHUNK_BYTES};
use crate::metrics::{Tally, Time};
use crate::shared::roster::Label;
use crate::shared::tallies;

/// One answer's.
pub(super) struct Steady {
    tallies: &'static tallies::Lane,
    view: Rc<RefCell<View>>,
    route: usize,
    label: Label,
    is_stream: bool,
    frame: Cell<Framing>,
    /// Payload, and all bytes, that went on since the walk last looked.
    payload: Cell<u64>,
    sent: Cell<u64>,
    /// Clock when something last did, or when the walk began to wait.
    last_us: Cell<u64>,
}

impl Steady {
    /// For an answer of which something was given already.
    pub(super) fn new<W: Wire>(lane: &Lane<W>, request: &Request) -> Rc<Self> {
        Rc::new(Steady {
            tallies: lane.tallies(),
            view: lane.view.clone(),
            route: request.route,
            label: request.label,
            is_stream: request.ask.stream,
            frame: Cell::new(Framing::UntilClose),
            payload: Cell::new(0),
            sent: Cell::new(0),
            last_us: Cell::new(0),
        })
    }

    /// Takes over where the walk stands.
    pub(super) fn begin(&self, frame: Framing, now_us: u64) {
        self.frame.set(frame);
        self.last_us.set(now_us);
    }

    /// Clock when something last went on, or when the walk began to wait.
    pub(super) fn last_us(&self) -> u64 {
        self.last_us.get()
    }

    /// Tells the walk what went on meanwhile.
    pub(super) fn end(&self, passing: &mut Passing, request: &Request) {
        let sent = self.sent.take();
        if sent == 0 {
            return;
        }
        request.sent.set(request.sent.get() + sent);
        if self.is_stream {
            request.event_us.set(self.last_us.get());
        }
        passing.passed(self.frame.get(), self.payload.take());
    }
}

impl Pass for Steady {
    fn take(&self, bytes: &[u8], now_us: u64) -> bool {
        let mut frame = self.frame.get();
        let Ok(piece) = frame.take(bytes) else { return false };
        let is_large = bytes.len() >= RECV_BUFFER_BYTES
            || matches!(&frame, Framing::Chunked(state) if state.chunk() >= SPLICE_CHUNK_BYTES);
        if piece.done || piece.len < bytes.len() || is_large {
            return false;
        }
        let len = bytes.len() as u64;
        if self.is_stream {
            let place = self.view.borrow().label_place(self.label);
            self.tallies.took(self.route, place, Time::Gap, now_us.saturating_sub(self.last_us.get()));
        }
        self.tallies.add(Tally::RelayCopied, piece.payload);
        self.tallies.add(Tally::RelayEvents, 1);
        self.tallies.add(Tally::RelaySteady, 1);
        self.tallies.add(Tally::ClientBytesOut, len);
        // Last, because a piece over which something panics was not taken.
        self.frame.set(frame);
        self.payload.set(self.payload.get() + piece.payload);
        self.sent.set(self.sent.get() + len);
        self.last_us.set(now_us);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Relay;
    use crate::http1::{AnswerBody, Chunked};
    use crate::shared::Shared;

    fn steady(shared: &'static Shared, frame: Framing) -> Steady {
        let view = Rc::new(RefCell::new(View::new(0, shared, None)));
        let tallies = shared.tallies.lane(0);
        let [payload, sent, last_us] = [const { Cell::new(0) }; 3];
        let (route, label) = (0, Label::default());
        Steady { tallies, view, route, label, is_stream: true, frame: Cell::new(frame), payload, sent, last_us }
    }

    fn counted(steady: &Steady) -> [u64; 4] {
        let tallies = [Tally::RelayEvents, Tally::RelaySteady, Tally::ClientBytesOut, Tally::RelayCopied];
        tallies.map(|tally| steady.tallies.get(tally))
    }

    /// Wherever an answer is cut in three, what goes on and what is left to the walk are all of it, in its framing.
    #[test]
    fn what_goes_on_and_what_the_walk_takes_are_the_whole_answer() {
        let wire = b"5\r\nhello\r\n6;a=\"b\"\r\n world\r\n0\r\nX-T: 1\r\n\r\n";
        let shared = Shared::leak(1);
        for first in 1..wire.len() - 1 {
            for second in first + 1..wire.len() {
                let steady = steady(shared, Framing::Chunked(Chunked::new()));
                let before = counted(&steady);
                let pieces = [&wire[..first], &wire[first..second], &wire[second..]];
                let (mut bytes, mut at) = (0, 0);
                while at < 2 && steady.take(pieces[at], 7) {
                    bytes += pieces[at].len() as u64;
                    at += 1;
                }
                assert_eq!(at, 2, "cut at {first} and {second}");
                assert!(!steady.take(pieces[2], 8), "the end is the walk's");
                let copied = steady.payload.get();
                let more = counted(&steady).into_iter().zip(before).map(|(after, before)| after - before);
                assert_eq!(more.collect::<Vec<_>>(), [2, 2, bytes, copied]);
                assert_eq!((steady.sent.get(), steady.last_us()), (bytes, 7));
                let mut frame = steady.frame.get();
                let piece = frame.take(pieces[2]).unwrap_or_else(|_| panic!("cut at {first} and {second}"));
                assert_eq!((piece.done, piece.len, copied + piece.payload), (true, pieces[2].len(), 11));
            }
        }
    }

    #[test]
    fn what_the_walk_has_to_see_is_left_alone() {
        let chunked = || Framing::Chunked(Chunked::new());
        let large = format!("{SPLICE_CHUNK_BYTES:x}\r\n");
        let full = vec![b'x'; RECV_BUFFER_BYTES];
        let cases: [(&str, Framing, &[u8]); 7] = [
            ("the last chunk", chunked(), b"1\r\nx\r\n0\r\n\r\n"),
            ("more than the answer", chunked(), b"0\r\n\r\nHTTP/1.1 200 OK"),
            ("broken framing", chunked(), b"1\r\nxx\r\n"),
            ("a large chunk's line", chunked(), large.as_bytes()),
            ("the last bytes", Framing::Length(3), b"abc"),
            ("more bytes than were told", Framing::Length(3), b"abcd"),
            ("a full buffer", Framing::UntilClose, &full),
        ];
        let shared = Shared::leak(1);
        for (what, frame, bytes) in cases {
            let steady = steady(shared, frame);
            assert!(!steady.take(bytes, 7), "{what}");
            assert_eq!(counted(&steady), [0; 4], "{what}");
            assert_eq!((steady.payload.get(), steady.sent.get(), steady.last_us()), (0, 0, 0), "{what}");
            let unchanged = match (frame, steady.frame.get()) {
                (Framing::Chunked(was), Framing::Chunked(is)) => was == is,
                (Framing::Length(was), Framing::Length(is)) => was == is,
                (was, is) => matches!((was, is), (Framing::UntilClose, Framing::UntilClose)),
            };
            assert!(unchanged, "{what}");
        }
        let mut passing = Passing::new(AnswerBody::Length(10), Relay::Auto, false, false);
        let even = steady(shared, Framing::Length(10));
        assert!(even.take(b"abc", 7));
        passing.passed(even.frame.get(), even.payload.get());
        assert!(matches!(passing.frame, Framing::Length(7)) && passing.copied == 3);
    }
}
