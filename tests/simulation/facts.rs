//! What happened, as those tell it who do not belong to the gateway.
//!
//! Takes notes of clients and workers, gives them to the judge. Never asks the gateway.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use corelane::config::Role;

use crate::net::Line;

/// A request of a client's, by its place in [`Facts::asked`]; the place is what it carries as `x-sim`.
pub struct Asked {
    pub client: usize,
    pub line: Rc<Line>,
    /// Its number on its connection.
    pub nth: usize,
    pub ask: crate::client::Ask,
    /// Clock at its first byte, and when all of it was sent.
    pub begun_us: Cell<Option<u64>>,
    pub sent_us: Cell<Option<u64>>,
    /// When its client left, and whether that was all of it.
    pub left_us: Cell<Option<u64>>,
    /// Its client means to leave while a worker has it.
    pub leaves: Cell<bool>,
    /// The client reads slowly or has stopped.
    pub slow: Cell<bool>,
    pub end: RefCell<Option<Ended>>,
}

/// How a request ended for its client.
#[derive(Clone, Debug)]
pub struct Ended {
    pub at_us: u64,
    pub kind: Kind,
}

#[derive(Clone, Debug)]
pub enum Kind {
    /// A whole answer.
    Answer(Answer),
    /// The connection ended or broke before the answer was whole; what there was of it.
    Cut { reset: bool, answer: Option<Answer>, partial_head: usize },
    /// The client left before.
    Left,
    /// It stands behind one after which the connection was closed.
    Unserved,
}

/// An answer as a client reads it.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
    /// Which worker's answer it says to be.
    pub of: Option<u64>,
    /// The gateway's own code.
    pub fault: Option<String>,
    pub closes: bool,
    pub by_close: bool,
}

/// A request as a worker met it.
pub struct Delivery {
    pub token: usize,
    pub worker: usize,
    pub role: Role,
    /// How many requests came on the connection before.
    pub nth: u32,
    pub at_us: u64,
    /// All of it has arrived.
    pub whole: Cell<bool>,
    pub whole_us: Cell<u64>,
    /// The status, once a whole head of an answer was sent.
    pub status: Cell<Option<u16>>,
    /// Nothing was said, or a reset may have taken what was.
    pub silent: Cell<bool>,
    /// Nothing came for long, or something came late.
    pub late: Cell<bool>,
    /// The worker had said all that it wanted to.
    pub said_us: Cell<Option<u64>>,
    /// The worker saw the connection's end before it had given its whole answer.
    pub left_us: Cell<Option<u64>>,
    /// It waits without an end for the connection's.
    pub stalls_us: Cell<Option<u64>>,
    /// Nothing wrong was done to it by its worker.
    pub well: Cell<bool>,
    /// Its answer is to end with the connection, and that ends before the first byte of a body. Of a pair such a decode
    /// worker counts as one that broke off.
    pub empty: Cell<bool>,
}

/// An answer as its worker means it; its place is what it carries as `x-sim-answer`.
pub struct Given {
    pub token: usize,
    pub status: u16,
    pub body: RefCell<Vec<u8>>,
    /// Whether all of it was said, and rightly.
    pub complete: Cell<bool>,
    pub role: Role,
}

/// All that is known.
#[derive(Default)]
pub struct Facts {
    pub asked: RefCell<Vec<Rc<Asked>>>,
    pub deliveries: RefCell<Vec<Rc<Delivery>>>,
    pub given: RefCell<Vec<Rc<Given>>>,
    /// When connections to workers failed.
    pub unconnected_us: RefCell<Vec<u64>>,
    /// When the lane was told to drain, and to end.
    pub draining_us: Cell<Option<u64>>,
    pub ending_us: Cell<Option<u64>>,
    /// What NIXL prefills handed over, by token.
    pub handed: RefCell<Vec<(usize, String)>>,
    /// Clients that found no room.
    pub turned_away: RefCell<Vec<usize>>,
}
