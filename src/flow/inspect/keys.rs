//! The key of a prompt: what the prefix tree and the prefix policies know it by.
//!
//! Takes the prompt's bytes as they arrive, gives a sequence of 64-bit symbols: one for every 64 bytes of text, one
//! for every page of 16 token ids. Never reads a byte twice, but for a prompt that another one displaces; never
//! allocates once its buffer has grown; never works for longer than [`TURN_BYTES`] at a time.
//!
//! Text is hashed as the raw JSON it is, from its first byte on, so that a conversation that grows keeps its blocks.
//! What changes with the next turn is left out: the closing bracket or quote, and a last block that is not whole.
//! Symbols are not chained, because a tree compares them from the first on. What changes an engine's prefix without
//! standing in the prompt (model, adapter, tools, system, instructions, cache salt) is mixed into the first symbol,
//! which is known at the end only, as those may come behind the prompt.

use rapidhash::v3::{RapidSecrets, rapidhash_v3_inline};

use super::Ask;
use crate::shared::prefix::Kind;

/// Bytes of one text block.
pub const BLOCK_BYTES: usize = 64;
/// Token ids of one page; as 32-bit numbers they fill a block.
pub const PAGE_IDS: usize = BLOCK_BYTES / 4;
/// Bytes hashed at most in one go: about 20 µs of text, 100 µs of token ids.
pub const TURN_BYTES: usize = 64 * 1024;
/// Symbols whose room is kept from one request to the next.
const REST_SYMBOLS: usize = 8 * 1024;

/// A seed of the hashes, and how much of a prompt counts. Keys of different seeds have nothing in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRules {
    pub seed: u64,
    /// Bytes of a prompt that are read; what lies behind does not count.
    pub max_bytes: usize,
}

/// The value that the key is made of, as far as it has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub kind: Kind,
    /// Where its bytes begin in the body.
    pub start: usize,
    /// Where the bytes end that are there and belong to the key.
    pub end: usize,
}

/// Makes one key after another.
pub(super) struct Keys {
    rules: Option<KeyRules>,
    secrets: RapidSecrets,
    secrets_of: u64,
    kind: Kind,
    start: usize,
    /// Up to where the body has been read.
    pos: usize,
    symbols: Vec<u64>,
    /// Token ids of the page at hand.
    page: [u8; BLOCK_BYTES],
    ids: usize,
    /// The id at hand.
    id: Id,
}

/// The number that is being read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Id {
    None,
    Of {
        value: u32,
        negative: bool,
    },
    /// Something that is no list of ids: the key ends before it.
    Broken,
}

impl Keys {
    pub(super) fn new() -> Self {
        Keys {
            rules: None,
            secrets: RapidSecrets::seed(0),
            secrets_of: 0,
            kind: Kind::Text,
            start: 0,
            pos: 0,
            symbols: Vec::new(),
            page: [0; BLOCK_BYTES],
            ids: 0,
            id: Id::None,
        }
    }

    /// Prepares for a body; without rules no key is made of it.
    pub(super) fn begin(&mut self, rules: Option<KeyRules>) {
        self.rules = rules;
        self.restart(Source { kind: Kind::Text, start: 0, end: 0 });
        self.symbols.shrink_to(REST_SYMBOLS);
        if let Some(rules) = rules.filter(|rules| rules.seed != self.secrets_of) {
            self.secrets = RapidSecrets::seed(rules.seed);
            self.secrets_of = rules.seed;
        }
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.rules.is_some()
    }

    /// Kind and symbols, once [`Keys::finish`] was called.
    pub(super) fn key(&self) -> (Kind, &[u64]) {
        (self.kind, &self.symbols)
    }

    fn restart(&mut self, source: Source) {
        (self.kind, self.start, self.pos) = (source.kind, source.start, source.start);
        self.symbols.clear();
        (self.ids, self.id) = (0, Id::None);
    }

    /// Hashes what has arrived of `source`, in one turn; whether nothing is left to do.
    pub(super) fn advance(&mut self, body: &[u8], source: Source) -> bool {
        let Some(rules) = self.rules else { return true };
        if (self.start, self.kind) != (source.start, source.kind) {
            self.restart(source);
        }
        let all = source.end.min(source.start.saturating_add(rules.max_bytes));
        let end = all.min(self.pos + TURN_BYTES);
        if self.pos >= end {
            return true;
        }
        match self.kind {
            Kind::Tokens => self.tokens(&body[self.pos..end]),
            Kind::Text | Kind::Blocks => {
                let (blocks, _) = body[self.pos..end].as_chunks::<BLOCK_BYTES>();
                self.symbols.extend(blocks.iter().map(|block| hash(block, &self.secrets)));
                self.pos += blocks.len() * BLOCK_BYTES;
                return all - self.pos < BLOCK_BYTES;
            }
        }
        self.pos = end;
        end == all
    }

    fn tokens(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.id = match (self.id, byte) {
                (Id::Broken, _) => return,
                (Id::None, b'0'..=b'9') => Id::Of { value: u32::from(byte - b'0'), negative: false },
                (Id::Of { value, negative }, b'0'..=b'9') => {
                    Id::Of { value: value.wrapping_mul(10).wrapping_add(u32::from(byte - b'0')), negative }
                }
                (Id::None, b'-') => Id::Of { value: 0, negative: true },
                (Id::None, b',' | b' ' | b'\n' | b'\r' | b'\t') => Id::None,
                (Id::Of { value, negative }, b',' | b']' | b' ' | b'\n' | b'\r' | b'\t') => {
                    self.push(if negative { value.wrapping_neg() } else { value });
                    Id::None
                }
                _ => Id::Broken,
            };
        }
    }

    fn push(&mut self, id: u32) {
        self.page[self.ids * 4..][..4].copy_from_slice(&id.to_le_bytes());
        self.ids += 1;
        if self.ids == PAGE_IDS {
            self.ids = 0;
            self.symbols.push(hash(&self.page, &self.secrets));
        }
    }

    /// No prompt after all.
    pub(super) fn none(&mut self) {
        self.kind = Kind::Text;
        self.symbols.clear();
    }

    /// Mixes into the first symbol what the engine's prefix depends on besides the prompt. Of that no more bytes are
    /// read than of a prompt.
    pub(super) fn finish(&mut self, ask: &Ask, body: &[u8]) {
        let (Some(rules), Some(&first)) = (self.rules.take(), self.symbols.first()) else { return };
        let mut left = rules.max_bytes;
        let mut mixed = [first, 0, 0, 0];
        let context = [ask.model, ask.adapter, ask.tools, ask.system, ask.instructions, ask.cache_salt]
            .map(|s| s.map(|s| s.of(body)));
        for (tag, part) in context.into_iter().enumerate() {
            let Some(part) = part else { continue };
            let read = &part[..part.len().min(left)];
            left -= read.len();
            mixed[1..].copy_from_slice(&[tag as u64, part.len() as u64, hash(read, &self.secrets)]);
            mixed[0] = combine(mixed, &self.secrets);
        }
        self.symbols[0] = mixed[0];
    }
}

fn combine(parts: [u64; 4], secrets: &RapidSecrets) -> u64 {
    let mut bytes = [0; 32];
    for (place, part) in bytes.chunks_exact_mut(8).zip(parts) {
        place.copy_from_slice(&part.to_le_bytes());
    }
    hash(&bytes, secrets)
}

/// Protected mode: one more exclusive-or a step, so that no input cancels what was hashed before it.
#[inline(always)]
fn hash(bytes: &[u8], secrets: &RapidSecrets) -> u64 {
    rapidhash_v3_inline::<true, false, true>(bytes, secrets)
}

#[cfg(test)]
mod tests;
