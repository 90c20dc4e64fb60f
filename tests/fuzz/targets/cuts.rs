//! Where an input arrives in pieces.
//!
//! Takes the input, gives places at which it is cut, always the same for the same input. Never reads a clock.

/// A source of numbers that depends on the input alone.
pub fn random(data: &[u8]) -> fastrand::Rng {
    let fnv = data
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    fastrand::Rng::with_seed(fnv)
}

/// Inputs up to this length are also fed byte by byte.
const BYTEWISE: usize = 512;

/// Lists of places where an input of this length is cut, in order, to be tried one after the other.
pub fn cuts(data: &[u8]) -> Vec<Vec<usize>> {
    let mut random = random(data);
    let mut lists: Vec<Vec<usize>> = (0..3)
        .map(|_| {
            let mut list: Vec<usize> = (0..random.usize(1..6)).map(|_| random.usize(0..=data.len())).collect();
            list.sort_unstable();
            list
        })
        .collect();
    if data.len() <= BYTEWISE {
        lists.push((0..data.len()).collect());
    }
    lists
}
