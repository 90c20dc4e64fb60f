//! Sans-I/O HTTP/1.1: strict heads, framing, writing heads, local answers.
//!
//! Takes bytes, gives spans, lengths and bytes. Never does I/O, reads a clock or guesses what a malformed
//! message could have meant: what two parsers might read differently is refused (RFC 9112, section 11.2).

mod chunked;
mod head;
mod reply;
mod request;
mod response;
mod write;

pub use chunked::{BadChunk, Chunked, Piece, Skim, Squeezed};
pub use head::{Field, FieldKind, HeadLimits, MAX_FIELDS, Method, Parsed, Version};
pub use reply::{CONTINUE, Extra, error, local};
pub use request::{BodyLength, RequestHead, request_id};
pub use response::{AnswerBody, ResponseHead};
pub use write::{Answer, Forward, LAST_CHUNK, chunk, request_head, response_head};
