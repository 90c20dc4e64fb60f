//! Log probabilities of a prompt, which only the prefill knows, put into the decode's answer.
//!
//! Takes the prefill's answer to `/generate` and the decode's, whole or as a stream, gives the decode's with the
//! arrays of both one behind the other. Never changes a byte outside of those arrays, never drops what it cannot read:
//! that passes as it came.

mod events;

pub use events::Stream;

use crate::json;
use crate::limits::MAX_PAIR_BATCH;
use crate::span::Span;

/// The members of `meta_info` that tell of the prompt's tokens.
const NAMES: [&str; 3] = ["input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"];

/// What the prefill said of one prompt: the arrays' contents, without brackets, in the order of [`NAMES`].
type Prompt = [Option<Box<[u8]>>; NAMES.len()];

/// What the prefill said of the prompts of one request.
pub struct Prefilled {
    /// By the place in the batch; one for a request that isn't a batch.
    prompts: Vec<Prompt>,
}

impl Prefilled {
    /// Reads the body of a prefill's answer: an object, an array of such for a batch, or (`streamed`) events.
    /// `None` when there is nothing in it that could be merged.
    pub fn read(body: &[u8], streamed: bool) -> Option<Prefilled> {
        let mut prefilled = Prefilled { prompts: Vec::new() };
        if streamed {
            for event in events::split(body) {
                if let Some(data) = events::data(event) {
                    let answer = data.of(event);
                    prefilled.note(index(answer), answer);
                }
            }
        } else if is_array(body) {
            json::elements(body, |nth, at| prefilled.note(nth, at.of(body)))?;
        } else {
            prefilled.note(0, body);
        }
        Some(prefilled).filter(|all| all.prompts.iter().flatten().any(Option::is_some))
    }

    /// Keeps the arrays of one answer; a later event's count where they are not empty.
    fn note(&mut self, nth: usize, answer: &[u8]) {
        let Some((meta, arrays)) = arrays(answer) else { return };
        if nth >= MAX_PAIR_BATCH as usize {
            return;
        }
        if self.prompts.len() <= nth {
            self.prompts.resize(nth + 1, Prompt::default());
        }
        for (kept, array) in self.prompts[nth].iter_mut().zip(arrays) {
            let Some(contents) = array.and_then(|array| contents(array.of(meta.of(answer)))) else { continue };
            if kept.is_none() || !contents.is_empty() {
                // A line of an event's data has no line ends; in JSON they stand between values alone, where a space does.
                let space = |byte: &u8| if matches!(byte, b'\n' | b'\r') { b' ' } else { *byte };
                *kept = Some(contents.iter().map(space).collect());
            }
        }
    }

    /// Appends a decode's whole answer with the arrays merged. False when there is nothing to merge: `out` is as it
    /// was, and the answer is to be passed as it came.
    pub fn merge_json(&self, body: &[u8], out: &mut Vec<u8>) -> bool {
        let before = out.len();
        let mut edit = Edit { body, pos: 0, out };
        let read = if is_array(body) {
            json::elements(body, |nth, at| self.merge(nth, at, &mut edit))
        } else {
            self.merge(0, Span::new(0, body.len()), &mut edit);
            Some(())
        };
        if read.is_none() || edit.pos == 0 {
            edit.out.truncate(before);
            return false;
        }
        edit.copy(body.len());
        true
    }

    /// Appends one event of a decode's stream, up to and including its empty line, with the arrays merged.
    pub fn merge_event(&self, event: &[u8], out: &mut Vec<u8>) {
        let mut edit = Edit { body: event, pos: 0, out };
        if let Some(data) = events::data(event) {
            self.merge(index(data.of(event)), data, &mut edit);
        }
        edit.copy(event.len());
    }

    /// Merges into the answer that lies at `at`.
    fn merge(&self, nth: usize, at: Span, edit: &mut Edit<'_>) {
        let body = edit.body;
        let (Some(prompt), Some((meta, arrays))) = (self.prompts.get(nth), arrays(at.of(body))) else { return };
        let meta_at = at.start as usize + meta.start as usize;
        let meta = &body[meta_at..][..meta.len as usize];
        // In the order of the text.
        let mut places = [0, 1, 2];
        places.sort_unstable_by_key(|which| arrays[*which].map_or(u32::MAX, |array| array.start));
        let mut is_empty = meta[1..meta.len() - 1].trim_ascii().is_empty();
        for which in places {
            let Some(first) = &prompt[which] else { continue };
            let Some(array) = arrays[which] else {
                edit.copy(meta_at + meta.len() - 1);
                if !is_empty {
                    edit.out.push(b',');
                }
                is_empty = false;
                edit.put(&[b"\"", NAMES[which].as_bytes(), b"\":[", first, b"]"]);
                continue;
            };
            let second = match array.of(meta) {
                b"null" => b"",
                array => match contents(array) {
                    Some(second) if !first.is_empty() => second,
                    _ => continue,
                },
            };
            edit.copy(meta_at + array.start as usize);
            let comma: &[u8] = if first.is_empty() || second.is_empty() { b"" } else { b"," };
            edit.put(&[b"[", first, comma, second, b"]"]);
            edit.pos = meta_at + array.end();
        }
    }
}

/// A text on its way from `body` to `out`.
struct Edit<'a> {
    body: &'a [u8],
    /// Up to where it has been copied or replaced.
    pos: usize,
    out: &'a mut Vec<u8>,
}

impl Edit<'_> {
    fn copy(&mut self, end: usize) {
        self.out.extend_from_slice(&self.body[self.pos..end]);
        self.pos = end;
    }

    fn put(&mut self, parts: &[&[u8]]) {
        for part in parts {
            self.out.extend_from_slice(part);
        }
    }
}

/// Where `meta_info` lies in an answer, and in that the values of [`NAMES`].
fn arrays(answer: &[u8]) -> Option<(Span, [Option<Span>; NAMES.len()])> {
    let [meta] = json::members(answer, ["meta_info"])?;
    let meta = meta?;
    Some((meta, json::members(meta.of(answer), NAMES)?))
}

/// Which prompt of a batch an event is about.
fn index(answer: &[u8]) -> usize {
    let index = json::members(answer, ["index"]).and_then(|[index]| std::str::from_utf8(index?.of(answer)).ok());
    index.and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// What stands between an array's brackets; `None` for any other value.
fn contents(value: &[u8]) -> Option<&[u8]> {
    Some(value.strip_prefix(b"[")?.strip_suffix(b"]")?.trim_ascii())
}

fn is_array(body: &[u8]) -> bool {
    body.trim_ascii_start().first() == Some(&b'[')
}

#[cfg(test)]
mod tests;
