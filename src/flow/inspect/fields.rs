//! The members of the body that routing reads.
//!
//! Takes keys and the bounds of values from the scanner, gives the [`Ask`]. Never checks JSON: what it sees has
//! been checked. A member counts when its value is complete, so that the last of duplicates wins; wrong types are
//! told at the end, for the same reason and because bad JSON goes first.

use super::keys::Source;
use super::marks::{Mark, Marked, Marks};
use super::{Ask, PromptKind};
use crate::config::routes::{Body, ROUTES};
use crate::fault::{Fault, What};
use crate::shared::prefix::Kind;
use crate::span::Span;

/// What the sender of a body with more than [`crate::limits::MAX_MARKS`] of them is told.
const TOO_MANY_MARKS: &str = "It has too many members that steer the worker.";

/// Most prompt-bearing keys of one route.
const MAX_PROMPT_KEYS: usize = 4;
/// Longest key that is looked for, in bytes.
const MAX_KEY_BYTES: usize = 32;

const _: () = {
    let mut i = 0;
    while i < ROUTES.len() {
        if let Body::Json(keys) = ROUTES[i].body {
            assert!(keys.len() <= MAX_PROMPT_KEYS);
            let mut k = 0;
            while k < keys.len() {
                assert!(keys[k].len() <= MAX_KEY_BYTES);
                k += 1;
            }
        }
        i += 1;
    }
};

/// The top-level members whose values are kept, prompts aside.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Member {
    Model,
    Stream,
    N,
    Sampling,
    Logprobs,
    ReturnLogprob,
    Rid,
    LoraPath,
    LoraName,
    Tools,
    System,
    Instructions,
    CacheSalt,
}

/// How many members there are; `CacheSalt` is the last.
const MEMBERS: usize = Member::CacheSalt as usize + 1;

/// The top-level member whose value is being read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Current {
    Other,
    Member(Member),
    Prompt(u8),
}

/// A prompt-bearing value.
#[derive(Clone, Copy, Default)]
struct Prompt {
    /// The whole value; empty when it is absent.
    all: Span,
    /// Its first element; empty when it has none, or when that was not worth noting.
    first: Span,
    /// Its elements, as far as they were worth counting.
    items: u32,
}

/// What is said of the number of samples in one place.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Samples {
    Of(u32),
    Bad,
}

pub(super) struct Fields {
    keys: &'static [&'static str],
    /// Objects and arrays deeper than this are no business of ours; the scanner asks before each call.
    watch: usize,
    current: Current,
    /// Whether its value has begun and not ended.
    is_open: bool,
    /// Where the current top-level value begins.
    value_at: usize,
    values: [Span; MEMBERS],
    prompts: [Prompt; MAX_PROMPT_KEYS],
    /// The prompt being read, and where its first element begins.
    prompt: Prompt,
    first_at: usize,
    /// `n` within `sampling_params`: the depth where it may stand, whether it is being read, since where, the result.
    n_depth: usize,
    n_reading: bool,
    n_at: usize,
    sampling_n: Samples,
    /// Whether `return_logprob` is an array that has a `true`.
    any_logprob: bool,
    marks: Marks,
}

impl Fields {
    pub(super) fn new() -> Self {
        Fields {
            keys: &[],
            watch: 1,
            current: Current::Other,
            is_open: false,
            value_at: 0,
            values: [Span::default(); MEMBERS],
            prompts: [Prompt::default(); MAX_PROMPT_KEYS],
            prompt: Prompt::default(),
            first_at: 0,
            n_depth: 0,
            n_reading: false,
            n_at: 0,
            sampling_n: Samples::Of(1),
            any_logprob: false,
            marks: Marks::default(),
        }
    }

    /// Starts over, for a route whose prompt-bearing keys are `keys`.
    pub(super) fn begin(&mut self, keys: &'static [&'static str]) {
        let mut marks = std::mem::take(&mut self.marks);
        marks.begin();
        *self = Fields { keys: &keys[..keys.len().min(MAX_PROMPT_KEYS)], marks, ..Fields::new() };
    }

    /// How deep objects and arrays are of interest; calls for deeper ones are to be left out.
    #[inline(always)]
    pub(super) fn watch(&self) -> usize {
        self.watch
    }

    /// A key of the object at `depth`, whose quote opens at `pos`; `raw` is the string's contents.
    #[inline]
    pub(super) fn key(&mut self, depth: usize, pos: usize, raw: &[u8]) {
        // A longer name counts by its beginning, which is longer than any that is looked for as a whole.
        let mut plain = [0; MAX_KEY_BYTES + 1];
        let name = if raw.contains(&b'\\') {
            let mut len = 0;
            unescape(raw, |byte| {
                if let Some(place) = plain.get_mut(len) {
                    *place = byte;
                }
                len += 1;
            });
            &plain[..len.min(plain.len())]
        } else {
            raw
        };
        if depth == 1 {
            self.current = self.find(name);
            self.marks.key(pos, name);
        } else if depth == self.n_depth {
            self.n_reading = name == b"n";
        }
    }

    fn find(&self, name: &[u8]) -> Current {
        if let Some(i) = self.keys.iter().position(|key| key.as_bytes() == name) {
            return Current::Prompt(i as u8);
        }
        Current::Member(match name {
            b"model" => Member::Model,
            b"stream" => Member::Stream,
            b"n" => Member::N,
            b"sampling_params" => Member::Sampling,
            b"logprobs" => Member::Logprobs,
            b"return_logprob" => Member::ReturnLogprob,
            b"rid" => Member::Rid,
            b"lora_path" => Member::LoraPath,
            b"lora_name" => Member::LoraName,
            b"tools" => Member::Tools,
            b"system" => Member::System,
            b"instructions" => Member::Instructions,
            b"cache_salt" => Member::CacheSalt,
            _ => return Current::Other,
        })
    }

    /// A value within the object or array at `depth` begins with `byte` at `pos`.
    #[inline]
    pub(super) fn begins(&mut self, depth: usize, pos: usize, byte: u8) {
        if depth == 1 {
            self.value_at = pos;
            self.is_open = true;
            self.watch = 1;
            match self.current {
                Current::Prompt(_) => {
                    self.prompt = Prompt::default();
                    self.watch = if byte == b'[' { 2 } else { 1 };
                }
                Current::Member(Member::Sampling) => {
                    self.sampling_n = Samples::Of(1);
                    self.n_reading = false;
                    self.n_depth = match byte {
                        b'{' => 2,
                        b'[' => 3,
                        _ => 1,
                    };
                    self.watch = self.n_depth;
                }
                Current::Member(Member::ReturnLogprob) => {
                    self.any_logprob = false;
                    self.watch = if byte == b'[' { 2 } else { 1 };
                }
                _ => {}
            }
            return;
        }
        match self.current {
            Current::Prompt(_) => {
                if self.prompt.items == 0 {
                    self.first_at = pos;
                }
                self.prompt.items = self.prompt.items.saturating_add(1);
                if byte != b'"' && byte != b'[' && self.prompt.items == 1 {
                    // Neither texts nor lists of ids: nothing to count, and token ids are many.
                    self.prompt.first = Span::new(pos, pos + 1);
                    self.watch = 1;
                }
            }
            Current::Member(Member::Sampling) if depth == self.n_depth && self.n_reading => self.n_at = pos,
            Current::Member(Member::ReturnLogprob) => self.any_logprob |= byte == b't',
            _ => {}
        }
    }

    /// The value that began last within the object or array at `depth` ended before `end`.
    #[inline]
    pub(super) fn ends(&mut self, depth: usize, end: usize, body: &[u8]) {
        if depth == 1 {
            self.is_open = false;
            self.marks.ends(end);
            let span = Span::new(self.value_at, end);
            match self.current {
                Current::Member(member) => self.values[member as usize] = span,
                Current::Prompt(i) => self.prompts[usize::from(i)] = Prompt { all: span, ..self.prompt },
                Current::Other => {}
            }
            self.watch = 1;
            return;
        }
        match self.current {
            Current::Prompt(_) if self.prompt.items == 1 => self.prompt.first = Span::new(self.first_at, end),
            Current::Member(Member::Sampling) if depth == self.n_depth && self.n_reading => {
                self.n_reading = false;
                let here = samples(&body[self.n_at..end]);
                self.sampling_n = match (self.sampling_n, here) {
                    // One object: the last of duplicates. A list of them: the largest.
                    _ if depth == 2 => here,
                    (Samples::Of(a), Samples::Of(b)) => Samples::Of(a.max(b)),
                    _ => Samples::Bad,
                };
            }
            _ => {}
        }
    }

    /// The members that were marked.
    pub(super) fn marks(&self) -> &[Mark] {
        self.marks.all()
    }

    /// What the body, now complete, asks for.
    pub(super) fn ask(&self, body: &[u8]) -> Result<Ask, Fault> {
        if self.marks.overflowed() {
            return Err(Fault::with(What::BadField, TOO_MANY_MARKS));
        }
        let mut ask = Ask {
            rid: self.value(Member::Rid, body),
            adapter: self.value(Member::LoraPath, body).or(self.value(Member::LoraName, body)),
            tools: self.value(Member::Tools, body),
            system: self.value(Member::System, body),
            instructions: self.value(Member::Instructions, body),
            cache_salt: self.value(Member::CacheSalt, body),
            private: self.marks.all().iter().any(|mark| mark.field == Marked::Private),
            ..Ask::default()
        };
        if let Some(model) = self.value(Member::Model, body) {
            let raw = model.of(body);
            if raw[0] != b'"' {
                return Err(bad("model", "a string"));
            }
            ask.model = Some(Span { start: model.start + 1, len: model.len - 2 });
            ask.model_escaped = memchr::memchr(b'\\', raw).is_some();
        }
        if let Some(stream) = self.value(Member::Stream, body) {
            ask.stream = match stream.of(body) {
                b"true" => true,
                b"false" => false,
                _ => return Err(bad("stream", "true or false")),
            };
        }
        let top_n = self.value(Member::N, body).map_or(Samples::Of(1), |n| samples(n.of(body)));
        ask.n = match (top_n, self.sampling_n) {
            (Samples::Bad, _) => return Err(bad("n", "a positive integer")),
            (_, Samples::Bad) => return Err(bad("sampling_params.n", "a positive integer")),
            (Samples::Of(a), Samples::Of(b)) => a.max(b),
        };
        ask.logprobs = self.value(Member::Logprobs, body).is_some_and(|value| is_true(value.of(body)))
            || self.value(Member::ReturnLogprob, body).is_some_and(|value| match value.of(body) {
                [b'[', ..] => self.any_logprob,
                other => other == b"true",
            });
        let prompt = self.prompts[..self.keys.len()].iter().find(|prompt| present(prompt.all, body));
        if let Some(prompt) = prompt {
            ask.prompt = Some(prompt.all);
            ask.prompt_kind = prompt_kind(prompt, body);
            if matches!(ask.prompt_kind, PromptKind::TextBatch | PromptKind::TokenBatch) {
                ask.batch = prompt.items;
                ask.first_prompt = Some(prompt.first);
            }
        }
        Ok(ask)
    }

    /// What the key is made of, as far as is known when the bytes up to `end` have been read: the prompt that counts,
    /// or would if the body ended here. `end` leaves out the last byte of a value that has ended.
    pub(super) fn source(&self, body: &[u8], end: usize) -> Option<Source> {
        let known = self.prompts[..self.keys.len()].iter().position(|prompt| present(prompt.all, body));
        let open = match self.current {
            Current::Prompt(i) if self.is_open && body[self.value_at] != b'n' => Some(usize::from(i)),
            _ => None,
        };
        match (known, open) {
            (None, None) => None,
            (known, Some(open)) if known.is_none_or(|known| open <= known) => {
                let first = match self.prompt {
                    Prompt { first, .. } if !first.is_empty() => Some((first.start as usize, Some(first.end()))),
                    Prompt { items: 0, .. } => None,
                    _ => Some((self.first_at, None)),
                };
                source(body, self.value_at, None, first, end)
            }
            (Some(known), _) | (None, Some(known)) => {
                let prompt = &self.prompts[known];
                let first = Some((prompt.first.start as usize, Some(prompt.first.end())));
                let first = first.filter(|_| !prompt.first.is_empty());
                source(body, prompt.all.start as usize, Some(prompt.all.end()), first, end)
            }
        }
    }

    fn value(&self, member: Member, body: &[u8]) -> Option<Span> {
        let span = self.values[member as usize];
        present(span, body).then_some(span)
    }
}

/// Where the bytes of a key lie, in a prompt from `start` on with (where it has any) a first element; `None` for an end
/// that is still to come.
fn source(
    body: &[u8],
    start: usize,
    ended: Option<usize>,
    first: Option<(usize, Option<usize>)>,
    end: usize,
) -> Option<Source> {
    let text = |start, ended: Option<usize>| Source { kind: Kind::Text, start, end: ended.map_or(end, |e| e - 1) };
    // Behind the bracket; the closing one ends the last id.
    let ids = |start, ended: Option<usize>| Source { kind: Kind::Tokens, start: start + 1, end: ended.unwrap_or(end) };
    if body[start] == b'"' {
        return Some(text(start, ended));
    }
    let (at, first_ended) = first.filter(|_| body[start] == b'[')?;
    match body[at] {
        b'{' => Some(text(start, ended)),
        b'"' => Some(text(at, first_ended)),
        b'[' => Some(ids(at, first_ended)),
        b'0'..=b'9' | b'-' => Some(ids(start, ended)),
        _ => None,
    }
}

/// Whether a value is there and not null, which is the same as absent.
fn present(span: Span, body: &[u8]) -> bool {
    !span.is_empty() && body[span.start as usize] != b'n'
}

fn prompt_kind(prompt: &Prompt, body: &[u8]) -> PromptKind {
    match (body[prompt.all.start as usize], prompt.first.of(body).first()) {
        (b'"', _) => PromptKind::Text,
        (b'[', Some(b'"')) => PromptKind::TextBatch,
        (b'[', Some(b'[')) => PromptKind::TokenBatch,
        (b'[', Some(b'{')) => PromptKind::Chat,
        (b'[', Some(b'0'..=b'9' | b'-')) => PromptKind::Tokens,
        _ => PromptKind::None,
    }
}

/// The number of samples that a value asks for.
fn samples(raw: &[u8]) -> Samples {
    if raw == b"null" {
        return Samples::Of(1);
    }
    if !raw.iter().all(u8::is_ascii_digit) {
        return Samples::Bad;
    }
    match std::str::from_utf8(raw).ok().and_then(|digits| digits.parse().ok()) {
        None | Some(0) => Samples::Bad,
        Some(n) => Samples::Of(n),
    }
}

/// Whether `logprobs` is true, or a number above 0.
fn is_true(raw: &[u8]) -> bool {
    match raw[0] {
        b't' => true,
        b'0'..=b'9' => raw.iter().take_while(|byte| byte.is_ascii_digit()).any(|digit| *digit != b'0'),
        _ => false,
    }
}

#[cold]
fn bad(field: &str, must: &str) -> Fault {
    Fault::with(What::BadField, format!("`{field}` must be {must}."))
}

/// Gives the bytes that the contents of a JSON string stand for; half a surrogate pair becomes U+FFFD.
///
/// `raw` has been checked, so an escape is never cut short.
pub(super) fn unescape(raw: &[u8], mut push: impl FnMut(u8)) {
    let mut pos = 0;
    while pos < raw.len() {
        if raw[pos] != b'\\' {
            push(raw[pos]);
            pos += 1;
            continue;
        }
        pos += 2;
        match raw[pos - 1] {
            b'b' => push(8),
            b'f' => push(12),
            b'n' => push(b'\n'),
            b'r' => push(b'\r'),
            b't' => push(b'\t'),
            b'u' => {
                let mut code = hex(&raw[pos..]);
                pos += 4;
                if (0xD800..0xDC00).contains(&code) && raw[pos..].starts_with(b"\\u") {
                    let low = hex(&raw[pos + 2..]);
                    if (0xDC00..0xE000).contains(&low) {
                        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
                        pos += 6;
                    }
                }
                let char = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
                char.encode_utf8(&mut [0; 4]).bytes().for_each(&mut push);
            }
            plain => push(plain),
        }
    }
}

/// The value of four hexadecimal digits.
fn hex(digits: &[u8]) -> u32 {
    digits.iter().take(4).fold(0, |code, digit| code << 4 | char::from(*digit).to_digit(16).unwrap_or(0))
}
