//! What a request asks for, read from its body in place.
//!
//! Takes a body piece by piece as it arrives, gives an [`Ask`]: spans and small values, never copies.
//! Looks at each byte once and allocates nothing. Never waits, reads no clock, changes no byte of the body.
//!
//! JSON is validated whole and strictly by RFC 8259, because a body that the gateway and the engine read
//! differently would be routed by one meaning and served by another. What Python's parser takes beyond the
//! RFC (`NaN`, `Infinity`, `-Infinity`) is refused, so is a byte order mark. Of duplicate keys the last
//! counts, as in Python; a key that is written with escapes counts as its unescaped name.

mod block;
mod fields;
mod keys;
mod marks;
mod multipart;
mod scan;

use crate::config::routes;
use crate::fault::{Fault, What};
use crate::shared::prefix::Kind;
use crate::span::Span;
use fields::Fields;
pub use keys::{BLOCK_BYTES, KeyRules, PAGE_IDS, TURN_BYTES};
pub use marks::{Mark, Marked};
use multipart::Multipart;
use scan::Scanner;

/// The shape of the prompt-bearing value, told by the value's first element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptKind {
    /// There is none, or its shape is none of the below (an empty array, an object, a number).
    #[default]
    None,
    /// A string.
    Text,
    /// An array of objects: messages, or parts of one.
    Chat,
    /// An array of strings.
    TextBatch,
    /// An array of token ids.
    Tokens,
    /// An array of arrays of token ids.
    TokenBatch,
}

/// What one request asks for. Spans lie in the body that it was read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Contents of the `model` string, without quotes; see [`Ask::model`].
    pub model: Option<Span>,
    /// Whether the model's name is written with escapes.
    pub model_escaped: bool,
    /// Raw JSON of the prompt-bearing value: the first of the route's keys that is there and not null.
    pub prompt: Option<Span>,
    /// The prompt's shape.
    pub prompt_kind: PromptKind,
    /// Raw JSON of a batch's first prompt.
    pub first_prompt: Option<Span>,
    /// Prompts in a batch, which may be 1; 0 when the request isn't a batch. So many room numbers a pair needs: one for
    /// each, in an array, or a single one that isn't.
    pub batch: u32,
    /// Whether the answer is wanted as a stream.
    pub stream: bool,
    /// Samples wanted of each prompt: the larger of `n` and `sampling_params.n`, 1 by default.
    pub n: u32,
    /// Whether log probabilities are wanted: `logprobs` true or above 0, or (any of) `return_logprob` true.
    pub logprobs: bool,
    /// Raw JSON of `rid`.
    pub rid: Option<Span>,
    /// Raw JSON of `lora_path`, else of `lora_name`.
    pub adapter: Option<Span>,
    /// Raw JSON of `tools`.
    pub tools: Option<Span>,
    /// Raw JSON of `system`.
    pub system: Option<Span>,
    /// Raw JSON of `instructions`.
    pub instructions: Option<Span>,
    /// Raw JSON of `cache_salt`.
    pub cache_salt: Option<Span>,
    /// Whether a member is there that is never forwarded ([`Marked::Private`]).
    pub private: bool,
}

impl Default for Ask {
    fn default() -> Self {
        Ask {
            model: None,
            model_escaped: false,
            prompt: None,
            prompt_kind: PromptKind::None,
            first_prompt: None,
            batch: 0,
            stream: false,
            n: 1,
            logprobs: false,
            rid: None,
            adapter: None,
            tools: None,
            system: None,
            instructions: None,
            cache_salt: None,
            private: false,
        }
    }
}

impl Ask {
    /// The model's name; `scratch` is used (and cleared) only when the name is written with escapes.
    pub fn model<'a>(&self, body: &'a [u8], scratch: &'a mut Vec<u8>) -> Option<&'a [u8]> {
        let raw = self.model?.of(body);
        if !self.model_escaped {
            return Some(raw);
        }
        scratch.clear();
        fields::unescape(raw, |byte| scratch.push(byte));
        Some(scratch)
    }
}

/// The kind of body at hand.
enum Form {
    Unread,
    Json,
    /// Boxed: few requests have one, and every one would have the room for it.
    Multipart(Box<Multipart>),
}

/// Reads one body after another; reusable, so that a connection allocates none per request.
///
/// After a fault the body is done with: the next call is [`Inspector::begin`].
pub struct Inspector {
    form: Form,
    scanner: Scanner,
    fields: Fields,
    keys: keys::Keys,
}

impl Default for Inspector {
    fn default() -> Self {
        Self::new()
    }
}

impl Inspector {
    /// An inspector that reads nothing until [`Inspector::begin`].
    pub fn new() -> Self {
        Inspector { form: Form::Unread, scanner: Scanner::new(), fields: Fields::new(), keys: keys::Keys::new() }
    }

    /// Prepares for a body of the given kind. `content_type` matters for multipart only.
    pub fn begin(&mut self, body: routes::Body, content_type: &[u8]) {
        self.keys.begin(None);
        self.form = match body {
            routes::Body::None | routes::Body::Opaque => Form::Unread,
            routes::Body::Json(prompts) => {
                self.scanner.begin();
                self.fields.begin(prompts);
                Form::Json
            }
            routes::Body::Multipart => {
                let mut multipart = Box::new(Multipart::new());
                multipart.begin(content_type);
                Form::Multipart(multipart)
            }
        };
    }

    /// Has a key made of the prompt of the body that [`Inspector::begin`] has just been called for.
    pub fn want_key(&mut self, rules: KeyRules) {
        self.keys.begin(Some(rules));
    }

    /// The prompt's key, once [`Inspector::hash`] has said that it is done: kind and symbols. Empty when there is no
    /// prompt, or not a whole block of one.
    pub fn key(&self) -> (Kind, &[u64]) {
        self.keys.key()
    }

    /// Members that some leg must not carry, in the order of the body, duplicates too; good after
    /// [`Inspector::finish`]. Empty for bodies other than JSON.
    pub fn marks(&self) -> &[Mark] {
        if matches!(self.form, Form::Json) { self.fields.marks() } else { &[] }
    }

    /// The body's object, from brace to brace; good after [`Inspector::finish`]. Empty for bodies other than JSON.
    pub fn object(&self) -> Span {
        if matches!(self.form, Form::Json) { self.scanner.object() } else { Span::default() }
    }

    /// Goes on with the key of the whole body, after [`Inspector::finish`]; whether it is done. When the body was
    /// fed in pieces of at most [`TURN_BYTES`], the first call is the last one, but for prompts that displace others.
    pub fn hash(&mut self, ask: &Ask, body: &[u8]) -> bool {
        if !self.keys.is_wanted() || !matches!(self.form, Form::Json) {
            return true;
        }
        match self.fields.source(body, body.len()) {
            None => self.keys.none(),
            Some(source) if !self.keys.advance(body, source) => return false,
            Some(_) => self.keys.finish(ask, body),
        }
        true
    }

    /// Reads on. `body` is all that has arrived so far, from its first byte on, wherever it lies by now.
    ///
    /// # Errors
    /// [`What::BadJson`] and [`What::BadMultipart`], with the offset. How the body was cut into pieces
    /// changes neither the answer nor the fault.
    pub fn feed(&mut self, body: &[u8]) -> Result<(), Fault> {
        match &mut self.form {
            Form::Unread => Ok(()),
            Form::Json => {
                self.scanner.feed(body, &mut self.fields)?;
                if self.keys.is_wanted()
                    && let Some(source) = self.fields.source(body, self.scanner.reached())
                {
                    self.keys.advance(body, source);
                }
                Ok(())
            }
            Form::Multipart(multipart) => multipart.feed(body),
        }
    }

    /// Reads what has not been fed yet and says what the whole body asks for.
    ///
    /// # Errors
    /// Those of [`Inspector::feed`]; [`What::BadField`] for a `model`, `stream` or `n` of the wrong type, or more than
    /// [`MAX_MARKS`](crate::limits::MAX_MARKS) members that some leg must not carry.
    pub fn finish(&mut self, body: &[u8]) -> Result<Ask, Fault> {
        if matches!(self.form, Form::Json) && body.is_empty() {
            return Err(Fault::with(What::BadJson, "The body is empty."));
        }
        self.feed(body)?;
        match &mut self.form {
            Form::Unread => Ok(Ask::default()),
            Form::Json => {
                self.scanner.finish(body)?;
                self.fields.ask(body)
            }
            Form::Multipart(multipart) => multipart.finish(body),
        }
    }
}

#[cfg(test)]
mod tests;
