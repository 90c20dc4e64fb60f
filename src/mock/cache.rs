//! The prefix cache of one mock engine: an LRU of 64-token blocks, each named by the hash of everything up to its end.
//!
//! Takes chains of block hashes, gives how many leading blocks are held. Never holds more than its capacity
//! and never evicts a block before the blocks that extend it, unless others touched those later.

use std::collections::HashMap;

/// Tokens in one block of the cache.
pub const BLOCK_TOKENS: usize = 64;

const NONE: u32 = u32::MAX;

struct Node {
    hash: u64,
    newer: u32,
    older: u32,
}

/// An LRU of block hashes.
pub struct Cache {
    capacity: usize,
    places: HashMap<u64, u32>,
    nodes: Vec<Node>,
    newest: u32,
    oldest: u32,
}

impl Cache {
    /// An empty cache for `tokens` tokens; 0 caches nothing. Memory grows with use only.
    pub fn new(tokens: usize) -> Self {
        let capacity = (tokens / BLOCK_TOKENS).min(NONE as usize - 1);
        Cache { capacity, places: HashMap::new(), nodes: Vec::new(), newest: NONE, oldest: NONE }
    }

    /// Leading blocks of `chain` that are held.
    pub fn held(&self, chain: &[u64]) -> usize {
        chain.iter().take_while(|h| self.places.contains_key(h)).count()
    }

    /// Holds every block of `chain`, the first most recent, and evicts what is oldest.
    pub fn hold(&mut self, chain: &[u64]) {
        for &hash in chain.iter().take(self.capacity).rev() {
            if let Some(&at) = self.places.get(&hash) {
                self.unlink(at);
                self.link(at);
                continue;
            }
            let at = if self.nodes.len() < self.capacity {
                self.nodes.push(Node { hash, newer: NONE, older: NONE });
                (self.nodes.len() - 1) as u32
            } else {
                let at = self.oldest;
                self.unlink(at);
                self.places.remove(&self.nodes[at as usize].hash);
                self.nodes[at as usize].hash = hash;
                at
            };
            self.places.insert(hash, at);
            self.link(at);
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.places = HashMap::new();
        self.nodes = Vec::new();
        (self.newest, self.oldest) = (NONE, NONE);
    }

    /// Blocks held now.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    fn unlink(&mut self, at: u32) {
        let Node { newer, older, .. } = self.nodes[at as usize];
        match newer {
            NONE => self.newest = older,
            n => self.nodes[n as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            o => self.nodes[o as usize].newer = newer,
        }
    }

    fn link(&mut self, at: u32) {
        let older = self.newest;
        self.nodes[at as usize].newer = NONE;
        self.nodes[at as usize].older = older;
        match older {
            NONE => self.oldest = at,
            o => self.nodes[o as usize].newer = at,
        }
        self.newest = at;
    }
}

/// The chain of a prompt given as bytes, four of which are one token; a last, partial block has no hash.
pub fn chain_of_bytes(seed: u64, prompt: &[u8]) -> Vec<u64> {
    let mut h = seed;
    prompt
        .chunks_exact(BLOCK_TOKENS * 4)
        .map(|block| {
            for w in block.as_chunks::<8>().0 {
                h = mix(h, u64::from_le_bytes(*w));
            }
            h
        })
        .collect()
}

/// The chain of a prompt given as token ids.
pub fn chain_of_ids(seed: u64, ids: &[u64]) -> Vec<u64> {
    let mut h = seed;
    ids.chunks_exact(BLOCK_TOKENS)
        .map(|block| {
            h = block.iter().fold(h, |h, id| mix(h, *id));
            h
        })
        .collect()
}

fn mix(h: u64, word: u64) -> u64 {
    let x = (h ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^ (x >> 29)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefix_is_found_and_the_oldest_leaves_first() {
        let mut c = Cache::new(4 * BLOCK_TOKENS + 1);
        c.hold(&[1, 2, 3]);
        assert_eq!(c.held(&[1, 2, 9]), 2);
        c.hold(&[1, 7, 8]); // 3 was the oldest
        assert_eq!((c.held(&[1, 2, 3]), c.held(&[1, 7, 8])), (2, 3));
        assert_eq!(c.len(), 4);
        c.hold(&[20, 21, 22, 23, 24, 25]); // longer than the cache: its beginning stays
        assert_eq!((c.held(&[20, 21, 22, 23, 24]), c.held(&[1])), (4, 0));
        c.clear();
        assert!(c.is_empty() && c.held(&[20]) == 0);
    }

    #[test]
    fn nothing_is_cached_without_capacity() {
        let mut c = Cache::new(BLOCK_TOKENS - 1);
        c.hold(&[1, 2]);
        assert_eq!(c.held(&[1]), 0);
    }

    #[test]
    fn chains_share_what_prompts_share() {
        let (a, b) = (chain_of_bytes(1, &[b'a'; 1000]), chain_of_bytes(1, &[b'a'; 513]));
        assert_eq!((a.len(), &a[..2]), (3, &b[..]));
        assert_ne!(chain_of_bytes(2, &[b'a'; 513]), b);
        assert_eq!(chain_of_ids(0, &[5; 130]).len(), 2);
    }
}
