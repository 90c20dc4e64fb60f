//! A kernel's pipe, with a count of what is in it.
//!
//! Takes bytes of one socket, gives them to another, without showing them. Never blocks, never is smaller than what
//! makes splicing worth while.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with, splice};

use super::Pipe;
use crate::limits::PIPE_BYTES;

/// Both ends of a pipe. SPLICE_F_MORE is not used: a stream's last bytes would wait for more.
pub struct KernelPipe {
    read: OwnedFd,
    write: OwnedFd,
    held: usize,
    /// Most that it is given. It may be full with less, which depends on how the bytes lie; and it would take more,
    /// because it holds pages of sockets, which are larger than its own.
    size: usize,
}

const FLAGS: SpliceFlags = SpliceFlags::NONBLOCK.union(SpliceFlags::MOVE);

impl KernelPipe {
    /// Moves up to `max` bytes of a socket into the pipe; 0 is the end of the stream. `WouldBlock` says that the
    /// socket has none or that the pipe is full.
    pub fn draw(&mut self, from: impl AsFd, max: usize) -> io::Result<usize> {
        let room = self.size - self.held;
        if room == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let n = splice(from, None, &self.write, None, max.min(room), FLAGS)?;
        self.held += n;
        Ok(n)
    }

    /// Moves what the pipe holds into a socket, as far as that takes it.
    pub fn pour(&mut self, to: impl AsFd) -> io::Result<usize> {
        let n = splice(&self.read, None, to, None, self.held, FLAGS)?;
        self.held -= n;
        Ok(n)
    }
}

impl Pipe for KernelPipe {
    fn open(bytes: usize) -> io::Result<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // Above fs.pipe-max-size, or beyond fs.pipe-user-pages-soft, the kernel refuses; then half of it may do.
        let (mut size, mut want) = (fcntl_getpipe_size(&write)?, bytes);
        while want > size {
            match fcntl_setpipe_size(&write, want) {
                Ok(_) => size = fcntl_getpipe_size(&write)?,
                Err(_) => want /= 2,
            }
        }
        if size < PIPE_BYTES {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        Ok(KernelPipe { read, write, held: 0, size })
    }

    fn held(&self) -> usize {
        self.held
    }
}
