//! The scan of JSON bodies: however they arrive it finds the same, and that is what a plain parser finds.
//!
//! Takes a body, gives nothing. Never accepts what serde_json refuses, nor the other way round, but for the depth.

use corelane::config::routes::Body;
use corelane::fault::{Fault, What};
use corelane::flow::inspect::{Ask, Inspector, KeyRules, Mark, PromptKind};
use corelane::limits::MAX_MARKS;
use corelane::shared::prefix::Kind;
use corelane::span::Span;

use super::cuts::cuts;
use super::plain::{Entry, elements, entries, is_json};

const PROMPTS: &[&str] = &["prompt", "messages", "text", "input_ids"];

/// All that is found.
#[derive(Debug, PartialEq)]
struct Found {
    ask: Ask,
    marks: Vec<Mark>,
    object: Span,
    key: (Kind, Vec<u64>),
}

/// Checks one input.
pub fn json_scan(data: &[u8]) {
    let whole = read(data, &[]);
    for cuts in cuts(data) {
        assert_eq!(read(data, &cuts), whole, "cut at {cuts:?}");
    }
    if let Err(fault) = &whole
        && fault.detail.contains("levels of nesting")
    {
        return;
    }
    let text = std::str::from_utf8(data).ok().filter(|text| is_json(text) && text.trim_ascii().starts_with('{'));
    let accepted = !matches!(&whole, Err(fault) if fault.what == What::BadJson);
    assert_eq!(accepted, text.is_some(), "{whole:?}");
    if let Some(text) = text
        && let Some(entries) = entries(text)
    {
        let plain = Plain { entries };
        if plain.has_named_params() {
            compare(text, &plain, &whole);
        }
    }
}

fn read(data: &[u8], cuts: &[usize]) -> Result<Found, Fault> {
    let mut inspector = Inspector::new();
    inspector.begin(Body::Json(PROMPTS), b"");
    inspector.want_key(KeyRules { seed: 1, max_bytes: 1000 });
    for end in cuts {
        inspector.feed(&data[..*end])?;
    }
    let ask = inspector.finish(data)?;
    while !inspector.hash(&ask, data) {}
    let (kind, symbols) = inspector.key();
    let key = (kind, symbols.to_vec());
    Ok(Found { ask, marks: inspector.marks().to_vec(), object: inspector.object(), key })
}

/// A body as a plain parser sees it.
struct Plain<'a> {
    entries: Vec<Entry<'a>>,
}

impl<'a> Plain<'a> {
    /// The last value of this name, if it is not null.
    fn value(&self, name: &str) -> Option<&'a str> {
        let last = self.entries.iter().rev().find(|entry| entry.name == name)?.value;
        (last != "null").then_some(last)
    }

    fn marks(&self) -> Vec<&Entry<'a>> {
        self.entries.iter().filter(|entry| is_private(&entry.name) || REPLACED.contains(&&*entry.name)).collect()
    }

    /// Whether all members of the objects in `sampling_params` have names in Rust.
    fn has_named_params(&self) -> bool {
        let params = self.value("sampling_params").unwrap_or("null");
        let all = elements(params).unwrap_or_else(|| vec![params]);
        all.iter().filter(|value| value.starts_with('{')).all(|object| entries(object).is_some())
    }

    /// What is asked for in `n` and `sampling_params`; `None` where that is no positive number.
    fn samples(&self) -> Option<u32> {
        let mut most = number(self.value("n").unwrap_or("1"))?;
        let params = self.value("sampling_params").unwrap_or("null");
        if let Some(entries) = entries(params) {
            let last = entries.iter().rev().find(|entry| entry.name == "n");
            most = most.max(number(last.map_or("1", |entry| entry.value))?);
        }
        for entry in elements(params).unwrap_or_default().into_iter().filter_map(entries).flatten() {
            if entry.name == "n" {
                most = most.max(number(entry.value)?);
            }
        }
        Some(most)
    }

    fn prompt(&self) -> Option<&'a str> {
        PROMPTS.iter().find_map(|name| self.value(name))
    }

    fn logprobs(&self) -> bool {
        let wanted = self.value("logprobs").is_some_and(|value| {
            value == "true" || value.bytes().take_while(u8::is_ascii_digit).any(|digit| digit != b'0')
        });
        let returned = self.value("return_logprob").is_some_and(|value| match elements(value) {
            Some(all) => all.contains(&"true"),
            None => value == "true",
        });
        wanted || returned
    }
}

const REPLACED: [&str; 8] = [
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "stream_options",
    "min_tokens",
    "min_completion_tokens",
    "n",
];
const PRIVATE: [&str; 5] =
    ["routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "kv_transfer_params", "kv_hints"];

/// Whether a member of this name is never forwarded.
pub fn is_private(name: &str) -> bool {
    PRIVATE.contains(&name) || name.starts_with("bootstrap_")
}

/// Whether a member of this name is left out where a vLLM worker is only to prefill.
pub fn is_marked(name: &str) -> bool {
    is_private(name) || REPLACED.contains(&name)
}

fn number(value: &str) -> Option<u32> {
    if value == "null" { Some(1) } else { value.parse().ok().filter(|n| *n > 0) }
}

fn compare(text: &str, plain: &Plain<'_>, whole: &Result<Found, Fault>) {
    let of = |span: Span| std::str::from_utf8(span.of(text.as_bytes())).expect("pieces of UTF-8 end at characters");
    let model = plain.value("model");
    let stream = plain.value("stream").unwrap_or("false");
    let bad = plain.marks().len() > MAX_MARKS
        || model.is_some_and(|model| !model.starts_with('"'))
        || !matches!(stream, "true" | "false")
        || plain.samples().is_none();
    assert_eq!(matches!(whole, Err(fault) if fault.what == What::BadField), bad, "{whole:?}");
    let Ok(Found { ask, marks, object, .. }) = whole else { return };
    assert_eq!(ask.model.map(of), model.map(|model| &model[1..model.len() - 1]));
    if let Some(Ok(name)) = model.map(serde_json::from_str::<String>) {
        assert_eq!(ask.model(text.as_bytes(), &mut Vec::new()), Some(name.as_bytes()));
    }
    assert_eq!((ask.stream, Some(ask.n), ask.logprobs), (stream == "true", plain.samples(), plain.logprobs()));
    for (span, value) in [
        (ask.rid, plain.value("rid")),
        (ask.adapter, plain.value("lora_path").or(plain.value("lora_name"))),
        (ask.tools, plain.value("tools")),
        (ask.system, plain.value("system")),
        (ask.instructions, plain.value("instructions")),
        (ask.cache_salt, plain.value("cache_salt")),
        (ask.prompt, plain.prompt()),
    ] {
        assert_eq!(span.map(of), value);
    }
    let all = plain.prompt().and_then(elements).unwrap_or_default();
    let kind = match (plain.prompt().map(|prompt| prompt.as_bytes()[0]), all.first().map(|first| first.as_bytes()[0])) {
        (Some(b'"'), _) => PromptKind::Text,
        (_, Some(b'"')) => PromptKind::TextBatch,
        (_, Some(b'[')) => PromptKind::TokenBatch,
        (_, Some(b'{')) => PromptKind::Chat,
        (_, Some(b'0'..=b'9' | b'-')) => PromptKind::Tokens,
        _ => PromptKind::None,
    };
    let is_batch = matches!(kind, PromptKind::TextBatch | PromptKind::TokenBatch);
    assert_eq!((ask.prompt_kind, ask.batch as usize), (kind, if is_batch { all.len() } else { 0 }));
    assert_eq!(ask.first_prompt.map(of), all.first().copied().filter(|_| is_batch));
    assert_eq!(of(*object), text.trim_ascii());
    let plain_marks = plain.marks();
    assert_eq!(ask.private, plain_marks.iter().any(|entry| is_private(&entry.name)));
    assert_eq!(marks.len(), plain_marks.len());
    for (mark, entry) in marks.iter().zip(plain_marks) {
        let member = of(mark.span);
        assert!(member.starts_with(entry.key) && member.ends_with(entry.value), "{member}");
    }
}
