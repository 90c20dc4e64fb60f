//! One owner of a node in one word: slot (16 bits), era (24), tick of last use (24).
//!
//! Takes the parts, gives them back. Never zero for an owner: zero is a free place.

/// Bits of a tick, and of an era.
const BITS: u32 = 24;
const MASK: u32 = (1 << BITS) - 1;

/// Eras are told apart up to here; a slot would have to change its tenant 16 million times.
pub const MAX_ERA: u32 = MASK;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word(pub u64);

impl Word {
    pub const FREE: Word = Word(0);

    pub fn new(slot: u16, era: u32, tick: u32) -> Self {
        debug_assert!(0 < era && era <= MAX_ERA, "era {era}");
        Word(u64::from(slot) << (2 * BITS) | u64::from((era & MASK).max(1)) << BITS | u64::from(tick & MASK))
    }

    #[inline]
    pub fn is_free(self) -> bool {
        self.0 == 0
    }

    #[inline]
    pub fn slot(self) -> u16 {
        (self.0 >> (2 * BITS)) as u16
    }

    #[inline]
    pub fn era(self) -> u32 {
        (self.0 >> BITS) as u32 & MASK
    }

    #[inline]
    pub fn tick(self) -> u32 {
        self.0 as u32 & MASK
    }

    #[inline]
    pub fn is_owner(self, other: Word) -> bool {
        (self.0 ^ other.0) >> BITS == 0
    }
}

/// Ticks from `tick` to `now`; 0 when `tick` lies ahead. Ticks wrap: what is older than 2^23 ticks counts as new.
#[inline]
pub(super) fn age(now: u32, tick: u32) -> u32 {
    let age = now.wrapping_sub(tick) & MASK;
    if age > MASK / 2 { 0 } else { age }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_back() {
        let word = Word::new(u16::MAX, MAX_ERA, MASK);
        assert_eq!((word.slot(), word.era(), word.tick()), (u16::MAX, MAX_ERA, MASK));
        assert!(!Word::new(0, 1, 0).is_free());
        assert!(Word::new(3, 4, 5).is_owner(Word::new(3, 4, 9)) && !Word::new(3, 4, 5).is_owner(Word::new(3, 5, 5)));
    }

    #[test]
    fn ages_wrap_and_never_run_backwards() {
        assert_eq!(age(10, 7), 3);
        assert_eq!(age(7, 10), 0);
        assert_eq!(age(1 << 24, MASK), 1);
    }
}
