//! Receive buffers that the kernel picks from when bytes arrive, so that waiting costs no memory.
//!
//! Takes a ring at registration, gives buffers by the id that a completion names. Never has a buffer in two
//! hands: it is with the kernel, lent as a [`Lent`], or on the free stack.
//!
//! Only a small stock is offered to the kernel, last-in first-out from the free stack: the kernel consumes
//! its ring in order, and a thousand cold buffers would be walked through the caches. The stock doubles
//! whenever the kernel ran dry.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::{Cell, RefCell};
use std::io;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::types::BufRingEntry;
use io_uring::{IoUring, Submitter};

use crate::limits::{RECV_BUFFER_BYTES, RECV_BUFFERS};

/// The one buffer group of a lane's ring.
pub const GROUP: u16 = 0;
/// Buffers that are offered at first; grows on demand up to [`RECV_BUFFERS`].
const FIRST_STOCK: usize = 32;
const PAGE: usize = 4096;

/// A lane's receive buffers.
pub struct BufRing {
    entries: NonNull<BufRingEntry>,
    memory: NonNull<u8>,
    tail: Cell<u16>,
    offered: Cell<usize>,
    stock: Cell<usize>,
    free: RefCell<Vec<u16>>,
}

fn entries_layout() -> Layout {
    Layout::from_size_align(RECV_BUFFERS * size_of::<BufRingEntry>(), PAGE).expect("constant layout")
}

fn memory_layout() -> Layout {
    Layout::from_size_align(RECV_BUFFERS * RECV_BUFFER_BYTES, PAGE).expect("constant layout")
}

impl BufRing {
    /// Registers the buffers with a ring (kernel 5.19 or newer).
    pub fn register(ring: &IoUring) -> io::Result<Rc<BufRing>> {
        // SAFETY: both layouts have a non-zero size; failure is checked. Zeroed pages are not touched until
        // the kernel fills them, so the resident size follows use.
        let (entries, memory) = unsafe {
            let entries = NonNull::new(alloc_zeroed(entries_layout()).cast::<BufRingEntry>());
            let memory = NonNull::new(alloc_zeroed(memory_layout()));
            match (entries, memory) {
                (Some(e), Some(m)) => (e, m),
                _ => return Err(io::ErrorKind::OutOfMemory.into()),
            }
        };
        let this = Rc::new(BufRing {
            entries,
            memory,
            tail: Cell::new(0),
            offered: Cell::new(0),
            stock: Cell::new(FIRST_STOCK),
            free: RefCell::new((0..RECV_BUFFERS as u16).rev().collect()),
        });
        // SAFETY: the entries are page-aligned, RECV_BUFFERS long, and live until after the ring is dropped
        // (`Ring` drops its IoUring before its Rc<BufRing>).
        unsafe {
            ring.submitter().register_buf_ring_with_flags(entries.as_ptr() as u64, RECV_BUFFERS as u16, GROUP, 0)?;
        }
        this.restock();
        Ok(this)
    }

    /// Ends the registration; the kernel touches no buffer afterwards.
    pub fn unregister(&self, submitter: &Submitter<'_>) {
        let _ = submitter.unregister_buf_ring(GROUP);
    }

    /// Offers free buffers to the kernel until the stock is full.
    pub fn restock(&self) {
        let mut free = self.free.borrow_mut();
        let mut tail = self.tail.get();
        while self.offered.get() < self.stock.get() {
            let Some(id) = free.pop() else { break };
            let at = tail as usize & (RECV_BUFFERS - 1);
            // SAFETY: `at` is inside the entry array; the kernel reads an entry only after the tail that
            // covers it was published below. `set_*` leave the `resv` field (the tail, in entry 0) alone.
            unsafe {
                let entry = &mut *self.entries.as_ptr().add(at);
                entry.set_addr(self.memory.as_ptr().add(id as usize * RECV_BUFFER_BYTES) as u64);
                entry.set_len(RECV_BUFFER_BYTES as u32);
                entry.set_bid(id);
            }
            tail = tail.wrapping_add(1);
            self.offered.set(self.offered.get() + 1);
        }
        if tail != self.tail.get() {
            self.tail.set(tail);
            // SAFETY: entry 0 is valid and its `resv` field is the ring's tail by the kernel's ABI; the
            // release store pairs with the kernel's acquire load of the tail.
            unsafe {
                let at = BufRingEntry::tail(self.entries.as_ptr()).cast::<AtomicU16>();
                (*at).store(tail, Ordering::Release);
            }
        }
    }

    /// The kernel ran dry: offer more from now on.
    pub fn ran_dry(&self) {
        self.stock.set((self.stock.get() * 2).min(RECV_BUFFERS));
        self.restock();
    }

    /// Takes the buffer that a completion named.
    pub fn lend(self: &Rc<Self>, id: u16) -> Lent {
        self.offered.set(self.offered.get() - 1);
        Lent { ring: self.clone(), id }
    }

    /// Buffers that are lent at the moment.
    pub fn lent(&self) -> usize {
        RECV_BUFFERS - self.offered.get() - self.free.borrow().len()
    }
}

impl Drop for BufRing {
    fn drop(&mut self) {
        // SAFETY: allocated with these layouts in `register`; the ring that knew them is gone.
        unsafe {
            dealloc(self.entries.as_ptr().cast(), entries_layout());
            dealloc(self.memory.as_ptr(), memory_layout());
        }
    }
}

/// A buffer that holds received bytes; goes back on drop.
pub struct Lent {
    ring: Rc<BufRing>,
    id: u16,
}

impl Lent {
    /// The whole buffer; only what the completion said was filled is meaningful.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: a lent buffer belongs to this value alone: the kernel got its id out of the ring and gets
        // it back only after the drop below. The memory is initialised (zeroed at first).
        unsafe {
            std::slice::from_raw_parts(
                self.ring.memory.as_ptr().add(self.id as usize * RECV_BUFFER_BYTES),
                RECV_BUFFER_BYTES,
            )
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.ring.free.borrow_mut().push(self.id);
    }
}
