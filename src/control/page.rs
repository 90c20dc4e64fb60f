//! The page of the admin listener: one file that shows [`super::stats`] anew each second.
//!
//! Takes nothing, gives the page with headers that let it load nothing, be framed by nobody, and talk to nobody but this
//! listener. Never puts anything into the page but a nonce: all figures come later, as text.

use std::hash::{BuildHasher, RandomState};

use axum::http::{HeaderName, header};
use axum::response::{Html, IntoResponse, Response};

/// Style and script included; [`NONCE`] stands where each begins.
const PAGE: &str = include_str!("page.html");
/// What stands for the nonce in [`PAGE`].
const NONCE: &str = "NONCE";

/// Header fields of an answer that is not to be kept or guessed at.
pub const NOT_KEPT: [(HeaderName, &str); 2] =
    [(header::CACHE_CONTROL, "no-store"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];

/// The page.
pub fn response() -> Response {
    let nonce = nonce();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let more = [
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::REFERRER_POLICY, "no-referrer".to_owned()),
        (header::X_FRAME_OPTIONS, "DENY".to_owned()),
    ];
    (NOT_KEPT, more, Html(PAGE.replace(NONCE, &nonce))).into_response()
}

/// 128 bits that nobody can foresee: hashes under keys of the operating system's.
fn nonce() -> String {
    let [a, b] = [0u8, 1].map(|salt| RandomState::new().hash_one(salt));
    format!("{a:016x}{b:016x}")
}
