//! What single settings of a worker may be, wherever they are given: in the file or to the admin listener.
//!
//! Takes texts, gives checked values. Never quotes an API key.

use super::mistakes::{Wrong, quote};
use super::values::choice;
pub use super::values::target;
use super::{Connector, Engine, Role, WorkerSpec};
use crate::limits::{MAX_GROUP_BYTES, MAX_LABEL_BYTES};

/// Range of a probe's timeout and interval, in seconds.
pub const PROBE_SECS: (f64, f64) = (0.1, 3600.0);
/// Range of the thresholds of probes.
pub const THRESHOLD: (u64, u64) = (1, 1000);

/// The key that a worker wants.
///
/// # Errors
/// What is wrong, and what to give instead.
pub fn api_key(text: &str) -> Result<String, Wrong> {
    if text.is_empty() {
        return Err(Wrong::new("is empty", "leave it out, or give the worker's key"));
    }
    // It becomes a header value: a line end would forge headers.
    if !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(Wrong::new("has characters other than visible ASCII", "leave out spaces and line ends"));
    }
    Ok(text.to_owned())
}

/// The name of a model.
///
/// # Errors
/// See [`api_key`].
pub fn model(text: &str) -> Result<String, Wrong> {
    if text.is_empty() || text.chars().any(char::is_control) {
        return Err(Wrong::new(format!("{} is no model name", quote(text)), "give the name that clients send"));
    }
    Ok(text.to_owned())
}

/// What a worker is for.
///
/// # Errors
/// See [`api_key`].
pub fn role(text: &str) -> Result<Role, Wrong> {
    choice(text, &Role::ALL.map(Role::name)).map(|at| Role::ALL[at])
}

/// Which engine a worker is.
///
/// # Errors
/// See [`api_key`].
pub fn engine(text: &str) -> Result<Engine, Wrong> {
    choice(text, Engine::NAMES).map(|at| Engine::ALL[at])
}

/// By what vLLM hands caches over.
///
/// # Errors
/// See [`api_key`].
pub fn connector(text: &str) -> Result<Connector, Wrong> {
    choice(text, Connector::NAMES).map(|at| Connector::ALL[at])
}

/// The name of a group, which is shown in the admin API and in mistakes.
///
/// # Errors
/// See [`api_key`].
pub fn group(text: &str) -> Result<String, Wrong> {
    if text.len() > MAX_GROUP_BYTES || text.chars().any(char::is_control) {
        return Err(Wrong::new(format!("{} is no name of a group", quote(text)), "give a short name"));
    }
    Ok(text.to_owned())
}

/// The name or the value of a label.
///
/// # Errors
/// See [`api_key`].
pub fn label(text: &str) -> Result<String, Wrong> {
    if text.len() > MAX_LABEL_BYTES || text.chars().any(char::is_control) {
        let fix = format!("give a text of at most {MAX_LABEL_BYTES} bytes without control characters");
        return Err(Wrong::new(format!("{} is no label", quote(text)), fix));
    }
    Ok(text.to_owned())
}

/// What does not go together in a worker's settings.
pub fn misfit(spec: &WorkerSpec) -> Option<Wrong> {
    let only = |what: &str, whose: &str| {
        let what = format!("{what}: is for {whose}, and this one is {}", spec.role.name());
        Some(Wrong::new(what, "leave it out, or give the role"))
    };
    match spec.role {
        Role::Regular | Role::Decode if spec.bootstrap_port.is_some() => only("bootstrap_port", "prefill workers"),
        Role::Regular if !spec.group.is_empty() => only("group", "prefill and decode workers"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_never_forge_headers() {
        assert!(api_key("sk-abc_123").is_ok());
        for text in ["", "a b", "a\r\nx: y", "a\n", "ä", "a\0"] {
            let wrong = api_key(text).unwrap_err();
            assert!(text.is_empty() || !wrong.to_string().contains(text));
        }
    }

    #[test]
    fn labels_are_short_and_on_one_line() {
        assert!(label("").is_ok() && label(&"x".repeat(MAX_LABEL_BYTES)).is_ok());
        assert!(label("a\nb").is_err() && label(&"x".repeat(MAX_LABEL_BYTES + 1)).is_err());
    }
}
