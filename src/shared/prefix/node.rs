//! The parts of a tree: links, edges, bodies, tables; the only file that makes and frees them.
//!
//! Takes symbols and owners, gives references that live as long as a guard. Never frees what a link still leads to:
//! who unlinks a part hands it to the collector, and what was never published is freed at once.
//!
//! ```text
//! link ─▶ edge: a run of symbols (immutable) ─▶ body: owners, and a link to the children
//! link ─▶ table of 8, 16 or 256 links, by the next bits of the first symbol; several levels where many children are
//! ```
//!
//! A link that is *frozen* never changes again. Its container (the body, or the table) is about to be replaced, by
//! whoever comes first, through the link that leads to the container.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crossbeam::epoch::Guard;

use super::meter::{Meter, class};
use super::word::Word;

/// Low bits of a link's pointer: what it leads to.
const KIND: usize = 3;
const EDGE: usize = 0;
const FROZEN: usize = 4;
/// Tag of a body's block pointer: owners of its only child may be missing in it (see [`Body::is_young`]).
const YOUNG: usize = 1;

/// Bits that a table of each kind looks at.
const TABLE_BITS: [u32; 4] = [0, 3, 4, 8];

/// Owners in a body itself, and in each block beside it.
const INLINE: usize = 2;
const BLOCK: usize = 7;
/// Most owners of a node; a further one takes the place of the least recently used, if that was in
/// an earlier tick.
pub const MAX_OWNERS: usize = INLINE + 9 * BLOCK;

/// A place that leads to an edge, a table or nothing.
#[derive(Default)]
pub(super) struct Link(AtomicPtr<u8>);

/// What a link held at some time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Ptr<'g> {
    raw: *mut u8,
    guard: PhantomData<&'g Guard>,
}

/// What a pointer leads to.
#[derive(Clone, Copy)]
pub(super) enum Target<'g> {
    Nothing,
    Edge(Edge<'g>),
    Table(Table<'g>),
}

impl Link {
    pub fn new(to: Ptr<'_>) -> Self {
        Link(AtomicPtr::new(to.raw))
    }

    /// SeqCst, so that a check after an owner was written is ordered against who freezes or splits and then reads
    /// owners; it also acquires what `swap` released.
    #[inline]
    pub fn load<'g>(&self, _: &'g Guard) -> Ptr<'g> {
        Ptr { raw: self.0.load(Ordering::SeqCst), guard: PhantomData }
    }

    /// Publishes `to` in the place of `from`; false, and nothing changed, when the link holds something else or is
    /// frozen (as `from` says then).
    ///
    /// SeqCst on success: releases what `to` leads to for `load`, and is ordered before the reading of owners that
    /// follows a freeze or a split. Relaxed on failure: the link is loaded again.
    #[inline]
    pub fn swap(&self, from: Ptr<'_>, to: Ptr<'_>) -> bool {
        !from.is_frozen() && self.0.compare_exchange(from.raw, to.raw, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Freezes the link for good; gives what it holds, thawed.
    pub fn freeze<'g>(&self, guard: &'g Guard) -> Ptr<'g> {
        loop {
            let seen = self.load(guard);
            if seen.is_frozen() || self.swap(seen, seen.frozen()) {
                return seen.thawed();
            }
        }
    }
}

impl<'g> Ptr<'g> {
    pub const NULL: Ptr<'static> = Ptr { raw: null_mut(), guard: PhantomData };

    #[inline]
    pub fn is_frozen(self) -> bool {
        self.raw.addr() & FROZEN != 0
    }

    pub fn frozen(self) -> Self {
        Ptr { raw: self.raw.map_addr(|a| a | FROZEN), ..self }
    }

    pub fn thawed(self) -> Self {
        Ptr { raw: self.raw.map_addr(|a| a & !FROZEN), ..self }
    }

    /// What it leads to, frozen or not.
    #[inline]
    pub fn target(self) -> Target<'g> {
        let kind = self.raw.addr() & KIND;
        let Some(place) = NonNull::new(self.raw.map_addr(|a| a & !(KIND | FROZEN))) else { return Target::Nothing };
        match kind {
            EDGE => Target::Edge(Edge { head: place.cast(), guard: PhantomData }),
            _ => Target::Table(Table { links: place.cast(), kind, guard: PhantomData }),
        }
    }
}

/// The head of an edge; its symbols follow it in the same allocation.
#[repr(C)]
struct Head {
    body: NonNull<Body>,
    len: usize,
}

/// A run of symbols and the body at its end.
#[derive(Clone, Copy)]
pub(super) struct Edge<'g> {
    head: NonNull<Head>,
    guard: PhantomData<&'g Guard>,
}

impl<'g> Edge<'g> {
    /// A new edge over `upper` and `lower` one after the other, not empty together.
    pub fn new(meter: &Meter, upper: &[u64], lower: &[u64], body: &'g Body) -> Self {
        let len = upper.len() + lower.len();
        debug_assert!(len > 0);
        let layout = Self::layout(len);
        // SAFETY: the layout has room for the head (16 bytes) and `len` symbols behind it, at alignment 8; all of it is
        // written before anybody else learns of it.
        let head = unsafe {
            let Some(head) = NonNull::new(alloc(layout).cast::<Head>()) else { handle_alloc_error(layout) };
            head.write(Head { body: NonNull::from(body), len });
            let symbols = head.add(1).cast::<u64>();
            symbols.copy_from_nonoverlapping(NonNull::from(upper).cast(), upper.len());
            symbols.add(upper.len()).copy_from_nonoverlapping(NonNull::from(lower).cast(), lower.len());
            head
        };
        meter.allocated(layout.size());
        Edge { head, guard: PhantomData }
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(size_of::<Head>() + len * 8, 8).expect("runs are short")
    }

    #[inline]
    pub fn symbols(self) -> &'g [u64] {
        // SAFETY: the head and its symbols were written before publication, never change, and are freed only when no
        // guard of the time of unlinking is left ('g is within one).
        unsafe { NonNull::slice_from_raw_parts(self.head.add(1).cast(), (*self.head.as_ptr()).len).as_ref() }
    }

    #[inline]
    pub fn body(self) -> &'g Body {
        // SAFETY: as above; a body is handed to the collector no earlier than the last edge that led to it.
        unsafe { (*self.head.as_ptr()).body.as_ref() }
    }

    pub fn ptr(self) -> Ptr<'g> {
        Ptr { raw: self.head.as_ptr().cast(), guard: PhantomData }
    }

    /// Bytes of this edge, its body not included.
    pub fn bytes(self) -> i64 {
        class(Self::layout(self.symbols().len()).size())
    }

    /// # Safety
    /// Nobody can reach the edge any more.
    pub unsafe fn free(self, meter: &Meter) {
        let layout = Self::layout(self.symbols().len());
        meter.freed(layout.size());
        // SAFETY: made by `new` with this layout; nobody else knows it (the caller's promise).
        unsafe { dealloc(self.head.as_ptr().cast(), layout) }
    }
}

/// A power of two of links.
#[derive(Clone, Copy)]
pub(super) struct Table<'g> {
    links: NonNull<Link>,
    kind: usize,
    guard: PhantomData<&'g Guard>,
}

impl<'g> Table<'g> {
    /// A table for a level, empty.
    pub fn new(meter: &Meter, level: Level) -> Self {
        Self::filled(meter, level, std::iter::empty())
    }

    /// A table for a level whose first links lead to `held`.
    pub fn filled(meter: &Meter, level: Level, held: impl Iterator<Item = Ptr<'g>>) -> Self {
        let kind = level.kind();
        let all = held.chain(std::iter::repeat(Ptr::NULL));
        let links: Box<[Link]> = all.take(1 << TABLE_BITS[kind]).map(Link::new).collect();
        meter.allocated(size_of_val(&*links));
        let links = NonNull::from(Box::leak(links)).cast();
        Table { links, kind, guard: PhantomData }
    }

    #[inline]
    pub fn links(self) -> &'g [Link] {
        // SAFETY: `new` made as many links as the kind says; they are freed only when no guard of the time of
        // unlinking is left ('g is within one).
        unsafe { NonNull::slice_from_raw_parts(self.links, 1 << TABLE_BITS[self.kind]).as_ref() }
    }

    pub fn ptr(self) -> Ptr<'g> {
        Ptr { raw: self.links.as_ptr().cast::<u8>().map_addr(|a| a | self.kind), guard: PhantomData }
    }

    pub fn bytes(self) -> i64 {
        class(size_of_val(self.links()))
    }

    /// # Safety
    /// Nobody can reach the table any more. What its links lead to stays.
    pub unsafe fn free(self, meter: &Meter) {
        meter.freed(size_of_val(self.links()));
        let links = NonNull::slice_from_raw_parts(self.links, 1 << TABLE_BITS[self.kind]);
        // SAFETY: made by `new` from a box of this length; nobody else knows it (the caller's promise).
        drop(unsafe { Box::from_raw(links.as_ptr()) });
    }
}

/// How far down the tables of one node a link lies: which bits of the first symbol choose the way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Level {
    used: u32,
    bits: u32,
}

impl Level {
    /// Below the root of a tree, where very many children are expected.
    pub const ROOT: Level = Level { used: 0, bits: TABLE_BITS[3] };
    /// Below a node.
    pub const NODE: Level = Level { used: 0, bits: TABLE_BITS[1] };

    fn kind(self) -> usize {
        TABLE_BITS.iter().position(|&bits| bits == self.bits).expect("levels have the bits of some table")
    }

    /// The highest bits come first, so that tables list children in the order of their first symbols.
    #[inline]
    pub fn index(self, symbol: u64) -> usize {
        // Two different symbols differ in some bit, so no table is ever looked into beyond the last one.
        ((symbol << (self.used & 63)) >> (64 - self.bits)) as usize
    }

    #[inline]
    pub fn down(self) -> Level {
        Level { used: self.used + self.bits, bits: TABLE_BITS[2] }
    }
}

/// What lies at the end of an edge: who owns the node, and the link to its children.
pub(super) struct Body {
    pub children: Link,
    words: [AtomicU64; INLINE],
    more: AtomicPtr<Block>,
}

/// Further owners.
struct Block {
    next: *mut Block,
    words: [AtomicU64; BLOCK],
}

const _: () = assert!(size_of::<Body>() == 32 && size_of::<Block>() == 64);

/// What became of an owner's entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// It was there, and nothing was written.
    Known,
    /// It is new, or its last use has moved: the node must be checked to be in its place still.
    Written,
}

impl Body {
    /// A new body; young if it is the upper part of a split.
    pub fn new<'g>(meter: &Meter, children: Ptr<'g>, young: bool) -> &'g Body {
        let more = null_mut::<Block>().map_addr(|a| a | (usize::from(young) * YOUNG));
        let body =
            Body { children: Link::new(children), words: [const { AtomicU64::new(0) }; 2], more: AtomicPtr::new(more) };
        meter.allocated(size_of::<Body>());
        meter.nodes(1);
        // It is freed by `free` only.
        Box::leak(Box::new(body))
    }

    /// Bytes with its blocks.
    pub fn bytes(&self, guard: &Guard) -> i64 {
        let blocks = self.words(guard).count().saturating_sub(INLINE) / BLOCK;
        class(size_of::<Body>()) + blocks as i64 * class(size_of::<Block>())
    }

    /// # Safety
    /// Nobody can reach the body any more, nor will; nor has it been freed. What its link leads to stays.
    pub unsafe fn free(body: NonNull<Body>, meter: &Meter) {
        // SAFETY: made by `new` from a box; nobody else knows it (the caller's promise).
        let mut body = unsafe { Box::from_raw(body.as_ptr()) };
        let mut owners = used(&mut body.words);
        let mut at = untagged(*body.more.get_mut());
        while let Some(block) = NonNull::new(at) {
            // SAFETY: made by `push` from a box, and known to this body alone.
            let mut block = unsafe { Box::from_raw(block.as_ptr()) };
            owners += used(&mut block.words);
            meter.freed(size_of::<Block>());
            at = block.next;
        }
        meter.owners(-(owners as i64));
        meter.nodes(-1);
        meter.freed(size_of::<Body>());
    }

    /// Every place of an owner.
    #[inline]
    fn words<'g>(&'g self, _: &'g Guard) -> impl Iterator<Item = &'g AtomicU64> + 'g {
        // Acquire pairs with the release in `push`.
        let mut next = untagged(self.more.load(Ordering::Acquire));
        let blocks = std::iter::from_fn(move || {
            // SAFETY: blocks are published whole, never change but in their words, and are freed with the body only.
            let block = unsafe { next.as_ref() }?;
            next = block.next;
            Some(&block.words)
        });
        self.words.iter().chain(blocks.flatten())
    }

    /// Owners, in no order; one may come twice after a race.
    #[inline]
    pub fn owners<'g>(&'g self, guard: &'g Guard) -> impl Iterator<Item = Word> + 'g {
        // SeqCst: ordered after the freeze or the split that the caller may just have made (pairs with `put`).
        self.words(guard).map(|word| Word(word.load(Ordering::SeqCst))).filter(|word| !word.is_free())
    }

    /// Whether nobody but this one owner has ever been here, and who. For leaving out nodes that add nothing.
    #[inline]
    pub fn sole_owner(&self) -> Option<Word> {
        // Relaxed: a hint.
        let [first, second] = [0, 1].map(|i| self.words[i].load(Ordering::Relaxed));
        (second == 0 && self.more.load(Ordering::Relaxed).is_null()).then_some(Word(first))
    }

    /// Whether owners of the only child may be missing here: a split was published and its late owners not yet
    /// copied. The child is the link's target itself then.
    #[inline]
    pub fn is_young(&self) -> bool {
        // Acquire pairs with the release in `grown`.
        self.more.load(Ordering::Acquire).addr() & YOUNG != 0
    }

    /// Ends youth.
    pub fn grown(&self) {
        let mut seen = self.more.load(Ordering::Relaxed);
        // Release pairs with `is_young`: who sees the end of youth sees the copied owners.
        while let Err(now) =
            self.more.compare_exchange(seen, seen.map_addr(|a| a & !YOUNG), Ordering::Release, Ordering::Relaxed)
        {
            seen = now;
        }
    }

    /// Sets the last use of `owner` if it owns the node and the tick has moved; `None` if it does not.
    #[inline]
    pub fn touch(&self, owner: Word, guard: &Guard) -> Option<Entry> {
        for place in self.words(guard) {
            let seen = Word(place.load(Ordering::Relaxed));
            if seen.is_owner(owner) {
                return refresh(place, seen, owner);
            }
        }
        None
    }

    /// Makes `owner` an owner, in the place of an older tenant of its slot if there is one.
    pub fn put(&self, meter: &Meter, owner: Word, guard: &Guard) -> Entry {
        loop {
            if let Some(entry) = self.try_put(meter, owner, guard) {
                return entry;
            }
        }
    }

    fn try_put(&self, meter: &Meter, owner: Word, guard: &Guard) -> Option<Entry> {
        let (mut free, mut oldest, mut places) = (None, None, 0);
        for place in self.words(guard) {
            let seen = Word(place.load(Ordering::Relaxed));
            if seen.is_owner(owner) {
                return refresh(place, seen, owner);
            }
            places += 1;
            if seen.is_free() {
                free = free.or(Some(place));
            } else if seen.slot() == owner.slot() {
                // A tenant before this one, or after: owners that are copied may be late.
                let late = seen.era() > owner.era();
                return (late || replace(place, seen, owner)).then_some(Entry::Written);
            } else if oldest.is_none_or(|(_, old): (_, Word)| super::word::age(seen.tick(), old.tick()) == 0) {
                oldest = Some((place, seen));
            }
        }
        match (free, oldest) {
            (Some(place), _) => {
                replace(place, Word::FREE, owner).then(|| meter.owners(1))?;
            }
            (None, Some((place, old))) if places >= MAX_OWNERS => {
                // At most once a tick and place: where very many own a node, they would take turns for ever.
                let same_age = super::word::age(owner.tick(), old.tick()) == 0;
                return if same_age {
                    Some(Entry::Known)
                } else {
                    replace(place, old, owner).then_some(Entry::Written)
                };
            }
            _ => {
                self.push(meter, owner).then_some(())?;
            }
        }
        Some(Entry::Written)
    }

    fn push(&self, meter: &Meter, owner: Word) -> bool {
        let seen = self.more.load(Ordering::Acquire);
        let mut words = [const { AtomicU64::new(0) }; BLOCK];
        *words[0].get_mut() = owner.0;
        let block = Box::into_raw(Box::new(Block { next: untagged(seen), words }));
        let tagged = block.map_addr(|a| a | seen.addr() & YOUNG);
        // SeqCst: releases the block for `words`, and is ordered before the check of the node's place that follows.
        if self.more.compare_exchange(seen, tagged, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            meter.allocated(size_of::<Block>());
            meter.owners(1);
            return true;
        }
        // SAFETY: it was not published.
        drop(unsafe { Box::from_raw(block) });
        false
    }

    /// Clears the entries of owners that are to go.
    pub fn clear(&self, meter: &Meter, gone: impl Fn(Word) -> bool, guard: &Guard) {
        for place in self.words(guard) {
            let seen = Word(place.load(Ordering::Relaxed));
            if !seen.is_free() && gone(seen) && replace(place, seen, Word::FREE) {
                meter.owners(-1);
            }
        }
    }
}

fn used(words: &mut [AtomicU64]) -> usize {
    words.iter_mut().map(|word| usize::from(*word.get_mut() != 0)).sum()
}

fn untagged(block: *mut Block) -> *mut Block {
    block.map_addr(|a| a & !YOUNG)
}

/// SeqCst on success: ordered before the check of the node's place that follows (pairs with `Link::swap` and
/// `Body::owners` of who freezes or splits). Relaxed on failure: the place is read again.
fn replace(place: &AtomicU64, from: Word, to: Word) -> bool {
    place.compare_exchange(from.0, to.0, Ordering::SeqCst, Ordering::Relaxed).is_ok()
}

/// Sets the last use of an entry if it is later; `None` if the entry vanished meanwhile. Writes nothing when the tick
/// has not moved, so that lanes share the line.
#[inline]
fn refresh(place: &AtomicU64, mut seen: Word, owner: Word) -> Option<Entry> {
    while seen.is_owner(owner) {
        if seen.tick() == owner.tick() || super::word::age(owner.tick(), seen.tick()) == 0 {
            return Some(Entry::Known);
        }
        if replace(place, seen, owner) {
            return Some(Entry::Written);
        }
        // Relaxed: it is compared again before anything follows from it.
        seen = Word(place.load(Ordering::Relaxed));
    }
    None
}

/// Symbols that two runs have in common at their beginning.
#[inline]
pub(super) fn common(a: &[u64], b: &[u64]) -> usize {
    let len = a.len().min(b.len());
    let (a, b) = (&a[..len], &b[..len]);
    let mut at = 0;
    // Eight at a time, without a branch inside: that is one cache line, and the compiler makes vectors of it.
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        if a.iter().zip(b).fold(0, |acc, (x, y)| acc | (x ^ y)) != 0 {
            break;
        }
        at += 8;
    }
    at + a[at..].iter().zip(&b[at..]).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_compared_to_their_first_difference() {
        let run: Vec<u64> = (0..40).collect();
        for len in 0..40 {
            assert_eq!(common(&run, &run[..len]), len);
            let mut other = run.clone();
            other[len] += 1;
            assert_eq!(common(&run, &other), len);
        }
    }

    #[test]
    fn levels_use_all_bits_from_the_highest_down() {
        let mut level = Level::ROOT;
        let symbol = 0xab12_3456_789a_bcde;
        assert_eq!(level.index(symbol), 0xab);
        for nibble in [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14] {
            level = level.down();
            assert_eq!(level.index(symbol), nibble);
        }
        assert_eq!(Level::NODE.index(symbol), 0b101);
        assert_eq!(Level::NODE.down().index(symbol), 0b0101);
    }
}
