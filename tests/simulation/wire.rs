//! The gateway's side of the simulated network: `Wire`, `Conn` and `Pipe` as the real ring has them.
//!
//! Takes what the walk does with its connections, gives what a kernel might answer. Never wakes a task that did not ask
//! for just that, so a walk that forgets to ask hangs here as it would there.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use corelane::lane::wire::{Chunk, Conn, Drawn, Outgoing, Pass, Pipe, Wire};
use corelane::limits::RECV_BUFFER_BYTES;

use crate::net::Line;
use crate::worker::Host;
use crate::world::World;

/// The end of a connection that is the gateway's.
const HERE: usize = 0;

thread_local! {
    /// Pipes that exist on this thread, and once in how many times there is none to be had.
    static PIPES: Cell<usize> = const { Cell::new(0) };
    static NO_PIPE: Cell<u64> = const { Cell::new(0) };
}

/// Pipes that exist.
pub fn pipes() -> usize {
    PIPES.get()
}

/// Sets how often there is no pipe (0: there always is) for the seed that begins.
pub fn begin(no_pipe: u64) {
    PIPES.set(0);
    NO_PIPE.set(no_pipe);
}

/// Bytes between two sockets.
pub struct SimPipe {
    bytes: Vec<u8>,
    room: usize,
}

impl Pipe for SimPipe {
    fn open(bytes: usize) -> io::Result<Self> {
        // `open` is told of nothing that belongs to a lane: the lane's own thread of chance does.
        if NO_PIPE.get() > 0 && fastrand::u64(..NO_PIPE.get()) == 0 {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        PIPES.set(PIPES.get() + 1);
        Ok(SimPipe { bytes: Vec::new(), room: bytes })
    }

    fn held(&self) -> usize {
        self.bytes.len()
    }
}

impl Drop for SimPipe {
    fn drop(&mut self) {
        PIPES.set(PIPES.get() - 1);
    }
}

/// The wire of the simulated lane.
pub struct SimWire {
    pub world: Rc<World>,
    /// Workers by the last part of their address.
    pub hosts: Vec<Rc<Host>>,
    /// Connections to workers that the gateway has.
    pub open: Rc<Cell<usize>>,
}

impl Wire for SimWire {
    type Conn = SimConn;

    async fn connect(&self, to: SocketAddr) -> io::Result<SimConn> {
        let host = &self.hosts[usize::from(to.port()) - 1];
        let (delay_us, fate) = host.fate_of_connect();
        self.world.sleep(delay_us).await;
        match fate {
            Ok(()) => {
                let line = host.accept();
                Ok(SimConn::new(&line, Some(self.open.clone())))
            }
            Err(0) => pending().await,
            Err(code) => Err(io::Error::from_raw_os_error(code)),
        }
    }

    fn now_us(&self) -> u64 {
        self.world.now_us()
    }
}

/// A connection of the gateway's.
pub struct SimConn {
    line: Rc<Line>,
    kept: RefCell<Option<Chunk>>,
    /// Received before the connection became lazy.
    early: RefCell<VecDeque<Vec<u8>>>,
    lazy: Cell<bool>,
    /// What is known of the peer's end.
    over: Cell<bool>,
    broken: Cell<bool>,
    reset: Cell<bool>,
    /// A pipe waits for room.
    pours: Cell<bool>,
    /// The count of connections to workers.
    open: Option<Rc<Cell<usize>>>,
}

impl SimConn {
    pub fn new(line: &Rc<Line>, open: Option<Rc<Cell<usize>>>) -> SimConn {
        if let Some(open) = &open {
            open.set(open.get() + 1);
        }
        SimConn {
            line: line.clone(),
            kept: RefCell::new(None),
            early: RefCell::default(),
            lazy: Cell::new(false),
            over: Cell::new(false),
            broken: Cell::new(false),
            reset: Cell::new(false),
            pours: Cell::new(false),
            open,
        }
    }

    fn world(&self) -> &World {
        &self.line.world
    }

    fn early(&self) -> Option<Chunk> {
        self.kept.borrow_mut().take().or_else(|| self.early.borrow_mut().pop_front().map(Chunk::heap))
    }

    fn read(&self, cx: &mut Context<'_>, max: usize) -> Poll<io::Result<Chunk>> {
        let most = self.world().portion(max);
        let bytes = ready!(self.line.poll_read(HERE, most, cx))?;
        Poll::Ready(Ok(if bytes.is_empty() { Chunk::empty() } else { Chunk::heap(bytes) }))
    }

    fn poll_end(&self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.over.get() {
            ready!(self.line.poll_over(HERE, cx));
            self.over.set(true);
            // A break that follows a half-close is seen at the next send only.
            self.broken.set(self.line.is_reset(HERE));
        }
        Poll::Ready(())
    }
}

impl Conn for SimConn {
    type Pipe = SimPipe;

    fn arm(&self) {}

    fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<io::Result<Chunk>> {
        match self.early() {
            Some(chunk) => Poll::Ready(Ok(chunk)),
            None => self.read(cx, RECV_BUFFER_BYTES),
        }
    }

    fn poll_fill(&self, cx: &mut Context<'_>, to: &mut Vec<u8>, max: usize) -> Poll<io::Result<usize>> {
        let mut chunk = match self.early() {
            Some(chunk) => chunk,
            None => ready!(self.read(cx, max))?,
        };
        let n = chunk.len().min(max);
        to.extend_from_slice(&chunk[..n]);
        chunk.advance(n);
        if !chunk.is_empty() {
            self.unread(chunk);
        }
        Poll::Ready(Ok(n))
    }

    fn pass_to(&self, to: &SimConn, pass: Rc<dyn Pass>) {
        if !self.lazy.get()
            && self.kept.borrow().is_none()
            && self.early.borrow().is_empty()
            && self.line.waiting(HERE) == 0
        {
            self.line.pass_to(HERE, &to.line, pass);
        }
    }

    fn set_lazy(&self, lazy: bool) {
        self.line.pass_no_more(HERE);
        if !self.lazy.replace(lazy) && lazy && self.world().once_in(2) {
            // What the stream of receives had taken by then.
            let waiting = self.line.waiting(HERE);
            if waiting > 0 {
                let n = self.world().portion(waiting.min(2 * RECV_BUFFER_BYTES));
                let mut cx = Context::from_waker(std::task::Waker::noop());
                if let Poll::Ready(Ok(bytes)) = self.line.poll_read(HERE, n, &mut cx) {
                    self.early.borrow_mut().extend(bytes.chunks(RECV_BUFFER_BYTES).map(<[u8]>::to_vec));
                }
            }
        }
    }

    fn is_lazy(&self) -> bool {
        self.lazy.get()
    }

    fn poll_part(
        &self,
        cx: &mut Context<'_>,
        sight: usize,
        pick: &mut dyn FnMut(&[u8]) -> usize,
    ) -> Poll<io::Result<Chunk>> {
        if !self.lazy.get() {
            return self.poll_recv(cx);
        }
        if let Some(chunk) = self.early() {
            return Poll::Ready(Ok(chunk));
        }
        if self.line.waiting(HERE) == 0 {
            return self.read(cx, 1);
        }
        let seen = self.line.peek(HERE, sight);
        let n = pick(&seen).clamp(1, seen.len());
        self.line.poll_read(HERE, n, cx).map_ok(Chunk::heap)
    }

    fn poll_draw(&self, cx: &mut Context<'_>, pipe: &mut SimPipe, max: usize) -> Poll<io::Result<Drawn>> {
        assert!(self.lazy.get(), "drawn from a connection that receives");
        if let Some(chunk) = self.early() {
            return Poll::Ready(Ok(Drawn::Received(chunk)));
        }
        let room = max.min(pipe.room - pipe.bytes.len());
        if !pipe.bytes.is_empty() && (room == 0 || self.line.waiting(HERE) == 0 || self.world().once_in(4)) {
            return Poll::Pending;
        }
        if self.world().once_in(16) {
            // As behind a mark of urgent data.
            return self.read(cx, max.min(RECV_BUFFER_BYTES)).map_ok(Drawn::Received);
        }
        let most = self.world().portion(room);
        let bytes = ready!(self.line.poll_read(HERE, most, cx))?;
        if bytes.is_empty() {
            return Poll::Ready(Ok(Drawn::Received(Chunk::empty())));
        }
        pipe.bytes.extend_from_slice(&bytes);
        Poll::Ready(Ok(Drawn::Piped(bytes.len())))
    }

    fn poll_pour(&self, cx: &mut Context<'_>, pipe: &mut SimPipe) -> Poll<io::Result<usize>> {
        assert!(!self.line.is_sending(HERE), "a send is in flight");
        let written = self.line.poll_write(HERE, &pipe.bytes, cx);
        self.pours.set(written.is_pending());
        let n = ready!(written)?;
        pipe.bytes.drain(..n);
        Poll::Ready(Ok(n))
    }

    fn unread(&self, chunk: Chunk) {
        let old = self.kept.borrow_mut().replace(chunk);
        assert!(old.is_none(), "bytes kept twice");
    }

    fn start_send(&self, what: Outgoing) {
        if what.is_empty() {
            return;
        }
        self.line.start_send(HERE, what);
    }

    fn poll_sent(&self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Outgoing>>> {
        self.line.poll_sent(HERE, cx)
    }

    fn is_sending(&self) -> bool {
        self.line.is_sending(HERE) || self.pours.get()
    }

    fn taken(&self) -> usize {
        self.line.acked(HERE)
    }

    fn poll_gone(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll_end(cx)
    }

    fn poll_broken(&self, cx: &mut Context<'_>) -> Poll<()> {
        ready!(self.poll_end(cx));
        if self.broken.get() { Poll::Ready(()) } else { Poll::Pending }
    }

    fn met_break(&self) -> bool {
        self.line.met_break(HERE)
    }

    fn is_taken(&self) -> bool {
        self.line.acked_all(HERE).0
    }

    fn is_silent(&self) -> bool {
        self.kept.borrow().is_none()
            && self.early.borrow().is_empty()
            && self.line.waiting(HERE) == 0
            && !self.line.is_over(HERE)
    }

    fn shutdown(&self) {
        self.line.shut(HERE);
    }

    fn set_abortive(&self, abortive: bool) {
        self.reset.set(abortive);
    }
}

impl Drop for SimConn {
    fn drop(&mut self) {
        // What was received early counts as unread no more: the kernel has given it away.
        self.line.close(HERE, self.reset.get());
        if let Some(open) = &self.open {
            open.set(open.get() - 1);
        }
    }
}
