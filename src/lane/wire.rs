//! The wire: sockets of one lane, behind traits so that scripted wires can drive the real walk.
//!
//! Takes buffers by value and gives them back when the kernel is done with them. Never lends a buffer to
//! the kernel that a dropped future could free: whatever is in flight is owned by the ring (see [`ring`]).
//!
//! The operations belong to the connection, not to the future that waits: dropping a future at any moment
//! loses no byte, and dropping the connection cancels, reaps and only then closes.

pub mod bufring;
pub mod chunk;
pub mod driver;
pub mod pipe;
pub mod ring;
pub mod socket;

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll};

pub use chunk::{Chunk, Outgoing};

/// Makes connections and tells the time. One value a lane, shared by its tasks.
pub trait Wire: 'static {
    /// A connection of this wire.
    type Conn: Conn;

    /// Opens a connection to a worker. No timeout of its own: the caller waits as long as it likes and drops.
    fn connect(&self, to: SocketAddr) -> impl Future<Output = io::Result<Self::Conn>>;

    /// Microseconds of a monotonic clock, as of the last turn of the lane.
    fn now_us(&self) -> u64;
}

/// Bytes on their way between two connections, in the kernel.
pub trait Pipe: Sized + 'static {
    /// An empty pipe that holds so many bytes, or fewer where the system allows fewer.
    ///
    /// # Errors
    /// When there is none to be had, or none that would be of use.
    fn open(bytes: usize) -> io::Result<Self>;

    /// Bytes in it.
    fn held(&self) -> usize;
}

/// The pipe of a wire that has none.
pub enum NoPipe {}

impl Pipe for NoPipe {
    fn open(_: usize) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn held(&self) -> usize {
        match *self {}
    }
}

/// Who lets arrivals pass without being woken for them, see [`Conn::pass_to`].
pub trait Pass {
    /// Whether all of these bytes go on as they are. If not, nothing about them is noted: they are received as usual.
    /// `now_us` is the lane's clock. Neither this nor the drop may come back to the wire. A panic counts as no.
    fn take(&self, bytes: &[u8], now_us: u64) -> bool;
}

/// What came of drawing from a connection.
pub enum Drawn {
    /// So many bytes are in the pipe.
    Piped(usize),
    /// This was received before, or could not be had otherwise; an empty chunk is the end of the peer's stream.
    Received(Chunk),
}

/// One stream socket. At most one receive and one send are in flight at a time; both belong to the
/// connection and outlive the futures that look at them.
pub trait Conn: 'static {
    /// What bytes move through from one connection to another without being seen.
    type Pipe: Pipe;

    /// Asks for the next bytes now, so that the request for them travels with what is already queued.
    /// Does nothing while a receive is in flight.
    fn arm(&self);

    /// The next bytes; an empty chunk is the end of the peer's stream. No buffer is held while it waits.
    fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<io::Result<Chunk>>;

    /// Appends up to `max` bytes to `to`; 0 is the end of the peer's stream. The vector travels into the
    /// operation and comes back: while pending, `to` is left empty.
    fn poll_fill(&self, cx: &mut Context<'_>, to: &mut Vec<u8>, max: usize) -> Poll<io::Result<usize>>;

    /// On a lazy connection what arrives stays in the kernel until somebody asks for it, on any other it is received as
    /// it comes, which is cheaper for small pieces. What was received already is given first. A wire that moves
    /// nothing through pipes need not know the difference.
    fn set_lazy(&self, _lazy: bool) {}

    /// Whether the connection is lazy.
    fn is_lazy(&self) -> bool {
        false
    }

    /// The next bytes; of a lazy connection as many as `pick` says (at least 1) of those in sight, which are `sight` at
    /// most and not all that are there.
    fn poll_part(
        &self,
        cx: &mut Context<'_>,
        _sight: usize,
        _pick: &mut dyn FnMut(&[u8]) -> usize,
    ) -> Poll<io::Result<Chunk>> {
        self.poll_recv(cx)
    }

    /// Moves up to `max` bytes of a lazy connection into a pipe. While the pipe holds bytes, pending may mean that it is
    /// full, and nobody is woken for this connection: pour first.
    fn poll_draw(&self, _: &mut Context<'_>, _pipe: &mut Self::Pipe, _max: usize) -> Poll<io::Result<Drawn>> {
        Poll::Ready(Err(io::ErrorKind::Unsupported.into()))
    }

    /// Moves what a pipe holds to the peer, as far as the socket takes it at once. No send may be in flight.
    fn poll_pour(&self, _: &mut Context<'_>, _pipe: &mut Self::Pipe) -> Poll<io::Result<usize>> {
        Poll::Ready(Err(io::ErrorKind::Unsupported.into()))
    }

    /// From now on what arrives is sent on to `to`, as long as `pass` takes it and what was last sent there is a chunk that
    /// is gone and that nobody has collected; nobody is woken for that. What does not go on ends it: that and all behind
    /// it is received as usual, by the task that waited last. So do the peer's end, and a receive that is asked for
    /// otherwise. A wire may do without (rings of kernels before 6.1 do): then everything is received.
    fn pass_to(&self, _to: &Self, _pass: Rc<dyn Pass>) {}

    /// Puts bytes back that were received too early; the next receive gives them again.
    fn unread(&self, chunk: Chunk);

    /// Starts sending all of `what`.
    ///
    /// # Panics
    /// When a send is in flight: a bug of ours.
    fn start_send(&self, what: Outgoing);

    /// Whether the send has ended; gives the buffer back for reuse. Ready with `None` when there was none.
    fn poll_sent(&self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Outgoing>>>;

    /// Whether a send has not ended yet or a pipe waits to be poured, without asking to be woken.
    fn is_sending(&self) -> bool;

    /// For stall clocks: a number that is another one whenever the peer has taken something of the send in flight, or
    /// of what was sent before it.
    fn taken(&self) -> usize;

    /// Ready once the peer has closed its sending side or the connection broke, as far as that is known
    /// without reading. Never ready otherwise.
    fn poll_gone(&self, cx: &mut Context<'_>) -> Poll<()>;

    /// Ready once the connection is broken or closed in both directions, as far as that is known without sending;
    /// a peer that only stopped sending is not enough.
    fn poll_broken(&self, cx: &mut Context<'_>) -> Poll<()>;

    /// Whether a send met a break that came before the peer's end. The kernel tells the first who asks of a break, and
    /// everybody after that of a usual end.
    fn met_break(&self) -> bool;

    /// Whether the peer has acknowledged everything that was sent.
    fn is_taken(&self) -> bool;

    /// For a connection that should have nothing to say: whether it is still silent and open.
    fn is_silent(&self) -> bool;

    /// Closes the sending side; what was sent still arrives.
    fn shutdown(&self);

    /// Makes the coming close a reset, whoever closes, the end of the process too; or a usual one again. Of an answer
    /// that ends with its connection the peer could take what it has for the whole.
    fn set_abortive(&self, abortive: bool);
}
