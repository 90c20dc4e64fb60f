//! The members of a body that some leg must not carry.
//!
//! Takes top-level keys and where their values end, gives names and bounds in the order of the body. Never looks
//! at a value, never allocates once its list has grown.

use crate::limits::MAX_MARKS;
use crate::span::Span;

/// Which member it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marked {
    /// One that pairs and ranks workers: `bootstrap_*`, `routed_dp_rank`, `disagg_prefill_dp_rank`,
    /// `data_parallel_rank`, `kv_transfer_params`, `kv_hints`. Not for the public side to say (a room number used
    /// twice crashes both schedulers), so it is never forwarded.
    Private,
    /// `stream`. This and the following are replaced or left out where a vLLM worker is only to prefill.
    Stream,
    /// `max_tokens`.
    MaxTokens,
    /// `max_completion_tokens`.
    MaxCompletionTokens,
    /// `max_output_tokens`.
    MaxOutputTokens,
    /// `stream_options`.
    StreamOptions,
    /// `min_tokens`.
    MinTokens,
    /// `min_completion_tokens`.
    MinCompletionTokens,
    /// `n`.
    N,
}

/// A member of the body's object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub field: Marked,
    /// From the key's opening quote to the end of the value.
    pub span: Span,
}

/// The list in the making.
#[derive(Default)]
pub(super) struct Marks {
    list: Vec<Mark>,
    /// The member whose value is being read, if it is one.
    open: Option<(Marked, usize)>,
    /// Whether there were more than are kept.
    overflowed: bool,
}

impl Marks {
    /// Starts over.
    pub(super) fn begin(&mut self) {
        self.list.clear();
        (self.open, self.overflowed) = (None, false);
    }

    /// A key of the body's object, unescaped; its quote opens at `pos`.
    #[inline]
    pub(super) fn key(&mut self, pos: usize, name: &[u8]) {
        self.open = marked(name).map(|field| (field, pos));
    }

    /// The value behind the last key ended before `end`.
    #[inline]
    pub(super) fn ends(&mut self, end: usize) {
        let Some((field, start)) = self.open else { return };
        if self.list.len() == MAX_MARKS {
            self.overflowed = true;
        } else {
            self.list.push(Mark { field, span: Span::new(start, end) });
        }
    }

    pub(super) fn all(&self) -> &[Mark] {
        &self.list
    }

    pub(super) fn overflowed(&self) -> bool {
        self.overflowed
    }
}

fn marked(name: &[u8]) -> Option<Marked> {
    Some(match name {
        b"stream" => Marked::Stream,
        b"max_tokens" => Marked::MaxTokens,
        b"max_completion_tokens" => Marked::MaxCompletionTokens,
        b"max_output_tokens" => Marked::MaxOutputTokens,
        b"stream_options" => Marked::StreamOptions,
        b"min_tokens" => Marked::MinTokens,
        b"min_completion_tokens" => Marked::MinCompletionTokens,
        b"n" => Marked::N,
        b"routed_dp_rank" | b"disagg_prefill_dp_rank" | b"data_parallel_rank" => Marked::Private,
        b"kv_transfer_params" | b"kv_hints" => Marked::Private,
        _ if name.starts_with(b"bootstrap_") => Marked::Private,
        _ => return None,
    })
}
