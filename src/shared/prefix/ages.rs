//! How many bytes have been idle for how long.
//!
//! Takes idle times with bytes, gives the tick up to which things must go so that enough bytes do. Never exact:
//! times are kept in four classes an octave, so a cut is right within a quarter of an age.

/// Four classes an octave of 24-bit ages.
const CLASSES: usize = 4 * 24;

#[derive(Clone, Debug)]
pub(super) struct Ages {
    now: u32,
    bytes: [u64; CLASSES],
}

impl Default for Ages {
    fn default() -> Self {
        Ages::new(0)
    }
}

impl Ages {
    pub fn new(now: u32) -> Self {
        Ages { now, bytes: [0; CLASSES] }
    }

    pub fn add(&mut self, idle: u32, bytes: u64) {
        self.bytes[class(idle)] += bytes;
    }

    /// The tick such that about `bytes` were last used then or earlier. The class in which the sum is reached is left
    /// for the next time if those above it make half of it: they are surely older.
    pub fn cut(&self, bytes: u64) -> u32 {
        let mut above = 0;
        let mut last = 0;
        for class in (0..CLASSES).rev() {
            last = class;
            if above + self.bytes[class] >= bytes {
                break;
            }
            above += self.bytes[class];
        }
        let class = if above >= bytes.div_ceil(2) { last + 1 } else { last };
        self.now.wrapping_sub(floor(class))
    }
}

fn class(idle: u32) -> usize {
    if idle < 4 {
        return idle as usize;
    }
    let octave = idle.ilog2();
    (4 * (octave as usize - 1) + (idle >> (octave - 2)) as usize % 4).min(CLASSES - 1)
}

/// The least idle time of a class.
fn floor(class: usize) -> u32 {
    if class < 4 {
        return class as u32;
    }
    let octave = class / 4 + 1;
    (4 + class as u32 % 4) << (octave - 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_within_a_quarter() {
        for idle in (0..2000).chain([1 << 20, (1 << 24) - 1]) {
            let least = floor(class(idle));
            assert!(least <= idle && idle - least <= idle / 4, "{idle}: {least}");
        }
    }

    #[test]
    fn the_cut_takes_the_oldest_first() {
        let mut ages = Ages::new(1000);
        ages.add(0, 10);
        ages.add(64, 10);
        ages.add(512, 10);
        assert_eq!(ages.cut(1), 1000 - 512);
        assert_eq!(ages.cut(10), 1000 - 512);
        assert_eq!(ages.cut(11), 1000 - 80, "those of 80 ticks or more make half");
        assert_eq!(ages.cut(25), 1000 - 1);
        assert_eq!(Ages::new(7).cut(5), 7);
    }
}
