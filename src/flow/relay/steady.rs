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
        self.frame.set(frame);
        let len = bytes.len() as u64;
        self.payload.set(self.payload.get() + piece.payload);
        self.sent.set(self.sent.get() + len);
        self.tallies.add(Tally::RelayCopied, piece.payload);
        self.tallies.add(Tally::RelayEvents, 1);
        self.tallies.add(Tally::RelaySteady, 1);
        self.tallies.add(Tally::ClientBytesOut, len);
        let last_us = self.last_us.replace(now_us);
        if self.is_stream {
            let place = self.view.borrow().label_place(self.label);
            self.tallies.took(self.route, place, Time::Gap, now_us.saturating_sub(last_us));
        }
        true
    }
}
