//! Bytes looked at side by side.
//!
//! Takes 8 or 64 bytes, gives whether (and where) one of them matters. Never knows what state a scan is in.
//!
//! All plain arithmetic: words hold eight bytes at a time, and the loops over 64 bytes have no branches, so that the
//! compiler turns them into the widest vectors that the build's target has.

/// Whether a byte ends the plain run of a string: a quote, a backslash or a control byte.
pub(super) const fn stops(byte: u8) -> bool {
    // Flipping bit 1 maps the controls onto themselves and the quote (0x22) next to them, to 0x20.
    byte ^ 2 <= 0x20 || byte == b'\\'
}

const fn every(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

/// The first byte of eight that stops a string; collects the high bits of all in `high`.
#[inline(always)]
pub(super) fn first_stop(bytes: &[u8; 8], high: &mut u64) -> Option<usize> {
    let word = u64::from_le_bytes(*bytes);
    *high |= word & every(0x80);
    // A byte that is less than what is taken from it borrows, which only a hit does: the lowest one is exact.
    let low = word ^ every(2);
    let slash = word ^ every(b'\\');
    let hits = (low.wrapping_sub(every(0x21)) & !low | slash.wrapping_sub(every(1)) & !slash) & every(0x80);
    (hits != 0).then(|| hits.trailing_zeros() as usize / 8)
}

/// Whether a byte of 64 stops a string; collects the high bits of all in `high`.
#[inline(always)]
pub(super) fn any_stop(block: &[u8; 64], high: &mut u64) -> bool {
    let mut stop = 0;
    let mut all = 0;
    for &byte in block {
        stop |= u8::from(byte ^ 2 <= 0x20) | u8::from(byte == b'\\');
        all |= byte;
    }
    *high |= u64::from(all & 0x80);
    stop != 0
}

/// Whether the last 64 of 66 bytes go on with a list of JSON integers without sign: digits without leading zeros,
/// commas that follow a digit, spaces that follow a comma or a space.
#[inline(always)]
pub(super) fn all_integers(window: &[u8; 66]) -> bool {
    let mut bad = 0;
    for i in 0..64 {
        let (before, last, byte) = (window[i], window[i + 1], window[i + 2]);
        let digit = |byte: u8| u8::from(byte.wrapping_sub(b'0') < 10);
        let is = |byte: u8, what: u8| u8::from(byte == what);
        let after_digit = digit(last);
        let after_lone_zero = is(last, b'0') & (digit(before) ^ 1);
        let fine = digit(byte) & (after_lone_zero ^ 1)
            | is(byte, b',') & after_digit
            | is(byte, b' ') & (is(last, b',') | is(last, b' '));
        bad |= fine ^ 1;
    }
    bad == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stops_are_found_among_their_neighbours() {
        for byte in 0..=255u8 {
            for neighbour in [b'a', 0x7F, 0x80, 0xFF, 0x20, 0x21, 0x23, 0x5B, 0x5D] {
                for at in 0..64 {
                    let mut block = [neighbour; 64];
                    block[at] = byte;
                    let mut high = 0;
                    assert_eq!(any_stop(&block, &mut high), stops(byte), "{byte} in {neighbour}");
                    assert_eq!(high != 0, byte.max(neighbour) >= 0x80);
                    let word: &[u8; 8] = block[at / 8 * 8..][..8].try_into().unwrap();
                    let mut high = 0;
                    assert_eq!(first_stop(word, &mut high), stops(byte).then_some(at % 8), "{byte} in {neighbour}");
                    assert_eq!(high != 0, byte.max(neighbour) >= 0x80);
                }
            }
        }
        assert_eq!(first_stop(b"a\x01\"\\\x00\"\\\x1F", &mut 0), Some(1));
    }

    #[test]
    fn integers_are_told_from_the_rest() {
        let fine = |text: &str| {
            let mut window = [b'1'; 66];
            window[20..20 + text.len()].copy_from_slice(text.as_bytes());
            all_integers(&window)
        };
        for text in ["1", ",1", ", 1", ",   10", ",0,0, 0,10", ",9,100"] {
            assert!(fine(text), "{text}");
        }
        for text in [",,", " ,", " 1", ",01", ", 00", ",1 ", "-", "]", ".", "e", "\n", "/", ":", "\u{e9}", ",0 ,"] {
            assert!(!fine(text), "{text}");
        }
    }
}
