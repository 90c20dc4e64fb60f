//! What a body asks of a mock engine.
//!
//! Takes the raw bytes of a JSON body, gives the few fields that matter and the faults to play. Never builds
//! a tree of the body: prompts are measured and hashed as they stand.

use serde::Deserialize;
use serde_json::Value;

use super::cache::{chain_of_bytes, chain_of_ids};

/// Most tokens one request may ask for.
const MAX_TOKENS: usize = 1 << 20;
/// Most answers (`n` times prompts) of one request.
const MAX_SAMPLES: usize = 1024;

/// Faults and oddities that a request asks for, in its top-level object `"mock"` (in a multipart body: the
/// part named `mock`), or in an array of such objects, of which the first counts that is meant for the engine
/// (see `only` and `on`): so each leg of a pair can have its own. Unknown members are answered with 400. Events are
/// counted from the first one of the stream; where an answer is no stream, breaking off after events means: after half
/// of its body.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Controls {
    /// Obey all this only in engines of this role.
    pub only: Option<super::Role>,
    /// Obey all this only in engines on these ports.
    pub on: Option<Vec<u16>>,
    /// Status of the answer; from 400 on the body is an error.
    pub status: Option<u16>,
    /// Further header lines of the answer.
    pub headers: Vec<(String, String)>,
    /// Milliseconds before anything is answered.
    pub delay_ms: f64,
    /// Never answer.
    pub hang: bool,
    /// Reset the connection (RST) after so many events.
    pub reset_after_events: Option<u64>,
    /// Close the connection (FIN), without the end that the framing needs, after so many events.
    pub close_after_events: Option<u64>,
    /// Stop writing, and keep the connection open, after so many events.
    pub stall_after_events: Option<u64>,
    /// Reset the connection before the first byte.
    pub reset_before_head: bool,
    /// Close the connection before the first byte.
    pub close_before_head: bool,
    /// Write these bytes as they are (each character up to U+00FF is one byte), then close.
    pub raw: Option<String>,
    /// Bytes of text in each event.
    pub event_bytes: Option<usize>,
    /// The text of each event.
    pub text: Option<String>,
    /// Milliseconds between events, instead of the engine's decode step; every event is then a write of its own.
    pub gap_ms: Option<f64>,
    /// Frame the answer by closing the connection.
    pub no_length: bool,
    /// Chunked coding with a trailer field `x-mock-trailer: 1` after the body, whatever the answer is.
    pub trailers: bool,
    /// Answer before the body has been read: `true`, or `"close"` to close afterwards. Works when the controls
    /// stand in the first 64 KiB of a body that has not arrived whole.
    pub early: Option<Early>,
    /// Send so many 1xx answers first.
    pub interim: u32,
    /// Send bytes after the end of the answer.
    pub excess: bool,
    /// Answer `connection: close` and close.
    pub close: bool,
    /// Answer with a JSON object that describes the request: `method`, `target`, `head` (lines), `trailers` (lines),
    /// `body_length`, `body_fnv1a64` (16 hex digits), `port`.
    pub echo: bool,
    /// Answer with the request's body.
    pub echo_body: bool,
    /// vLLM with NIXL: the prefill engine answers `kv_transfer_params` null, and the decode engine works the prompt
    /// off by itself.
    pub no_transfer: bool,
}

/// What an early answer does to the rest of the body: `true` or `"close"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Value")]
pub enum Early {
    /// Read it and keep the connection.
    Read,
    /// Leave it and close the connection.
    Close,
}

impl TryFrom<Value> for Early {
    type Error = &'static str;
    fn try_from(v: Value) -> Result<Self, Self::Error> {
        match v {
            Value::Bool(true) => Ok(Early::Read),
            Value::String(s) if s == "close" => Ok(Early::Close),
            _ => Err("early is true or \"close\""),
        }
    }
}

/// Who may be meant by `only` and `on`: an engine's role and port.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addressee {
    pub role: super::Role,
    pub port: u16,
}

impl Controls {
    /// The first that is meant for the engine; the default where none is.
    pub(super) fn first_for(all: Vec<Controls>, engine: Addressee) -> Controls {
        let meant = |c: &Controls| {
            c.only.is_none_or(|role| role == engine.role) && c.on.as_ref().is_none_or(|on| on.contains(&engine.port))
        };
        all.into_iter().find(meant).unwrap_or_default()
    }

    /// The controls in the beginning of a body, if their object or array is complete there.
    pub(super) fn in_prefix(body: &[u8]) -> Option<Vec<Controls>> {
        let at = super::find(body, b"\"mock\"")? + 6;
        Self::leading(body[at..].trim_ascii_start().strip_prefix(b":")?).ok()
    }

    fn in_multipart(body: &[u8]) -> Option<Vec<Controls>> {
        let at = super::find(body, b"name=\"mock\"")?;
        let value = at + super::find(&body[at..], b"\r\n\r\n")? + 4;
        Self::leading(&body[value..]).ok()
    }

    /// One object, or an array of them, with which `json` begins.
    fn leading(json: &[u8]) -> serde_json::Result<Vec<Controls>> {
        let many = json.trim_ascii_start().starts_with(b"[");
        let mut json = serde_json::Deserializer::from_slice(json);
        if many { Vec::deserialize(&mut json) } else { Controls::deserialize(&mut json).map(|one| vec![one]) }
    }
}

/// The fields of a request that an engine acts on.
#[derive(Debug, Default)]
pub(super) struct Ask {
    /// The faults that the body asks for itself.
    pub controls: Option<Vec<Controls>>,
    pub model: Option<String>,
    pub rid: Option<String>,
    pub stream: bool,
    pub include_usage: bool,
    pub logprob: bool,
    pub store: bool,
    /// Tokens to generate; `None` for the engine's default.
    pub max_tokens: Option<usize>,
    pub prompt_tokens: usize,
    /// Hashes of the prompt's 64-token blocks.
    pub chain: Vec<u64>,
    /// Answers wanted: `n` times the number of prompts.
    pub samples: usize,
    /// Whether the prompt is an array of prompts.
    pub batch: bool,
    /// Elements of the array that the answer mirrors: inputs, documents, pairs.
    pub items: usize,
    /// Answers wanted of each prompt.
    pub n: usize,
    /// `top_logprobs_num` is above 0.
    pub top_logprobs: bool,
    /// `token_ids_logprob` is given.
    pub ids_logprob: bool,
    pub bootstrap_host: Option<Value>,
    pub bootstrap_port: Option<Value>,
    pub bootstrap_room: Option<Value>,
    /// `routed_dp_rank`, its alias `data_parallel_rank`, and `disagg_prefill_dp_rank`; `None` for null.
    pub routed_rank: Option<Value>,
    pub rank_alias: Option<Value>,
    pub prefill_rank: Option<Value>,
    /// `kv_transfer_params`; `None` for null.
    pub kv_params: Option<Value>,
    /// Which of `max_tokens`, `max_completion_tokens`, `max_output_tokens` are given, and with what.
    caps: Vec<(&'static str, usize)>,
    /// Given fields that a vLLM prefill request must not have.
    excess: Vec<&'static str>,
    responses: bool,
}

/// Fields that limit the answer's length.
const CAPS: [&str; 4] = ["max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"];
/// Fields that make no sense in a request whose answer is one token and no stream.
const EXCESS: [&str; 3] = ["stream_options", "min_tokens", "min_completion_tokens"];

/// The top-level keys that carry the prompt of a path, in the order in which an engine would join them.
fn prompt_keys(path: &str) -> &'static [&'static str] {
    match path.strip_prefix("/v1").unwrap_or(path) {
        "/messages" | "/messages/count_tokens" => &["system", "messages"],
        "/responses" => &["instructions", "input"],
        "/rerank" => &["query", "documents"],
        "/score" => &["query", "text_1", "text_2", "items"],
        _ => &["messages", "prompt", "text", "input_ids", "input", "tokens"],
    }
}

impl Ask {
    /// Reads a JSON body. The error is a sentence for the client.
    pub fn read(path: &str, body: &[u8]) -> Result<Ask, String> {
        let fields = members(body).ok_or("the body is not a JSON object")?;
        let responses = path == "/v1/responses";
        let mut ask = Ask { samples: 1, items: 1, store: true, responses, ..Ask::default() };
        let keys = prompt_keys(path);
        let mut prompts: Vec<Option<&[u8]>> = vec![None; keys.len()];
        let mut seed = 0u64;
        let mut n = 1;
        for (key, value) in fields {
            let Ok(key) = std::str::from_utf8(key) else { continue };
            if let Some(i) = keys.iter().position(|k| *k == key)
                && value != b"null"
            {
                prompts[i] = Some(value);
            }
            if value != b"null"
                && let Some(name) = EXCESS.iter().find(|name| **name == key)
            {
                ask.excess.push(name);
            }
            match key {
                "mock" if value.starts_with(b"[") => ask.controls = Some(typed(key, value)?),
                "mock" => ask.controls = Some(vec![typed(key, value)?]),
                "model" => ask.model = typed(key, value)?,
                "rid" => ask.rid = serde_json::from_slice::<String>(value).ok(),
                "stream" => ask.stream = typed::<Option<bool>>(key, value)?.unwrap_or(false),
                "store" => ask.store = value != b"false",
                "return_logprob" => ask.logprob = value == b"true",
                "n" => n = typed::<Option<usize>>(key, value)?.unwrap_or(1),
                "top_logprobs_num" => ask.top_logprobs = !matches!(value, b"0" | b"null"),
                "token_ids_logprob" => ask.ids_logprob = value != b"null",
                "bootstrap_host" => ask.bootstrap_host = Some(typed(key, value)?),
                "bootstrap_port" => ask.bootstrap_port = Some(typed(key, value)?),
                "bootstrap_room" => ask.bootstrap_room = Some(typed(key, value)?),
                "routed_dp_rank" => ask.routed_rank = typed(key, value)?,
                "data_parallel_rank" => ask.rank_alias = typed(key, value)?,
                "disagg_prefill_dp_rank" => ask.prefill_rank = typed(key, value)?,
                "kv_transfer_params" => ask.kv_params = typed(key, value)?,
                "sampling_params" => {
                    for (key, value) in members(value).unwrap_or_default() {
                        match key {
                            b"max_new_tokens" => ask.cap("max_new_tokens", typed("max_new_tokens", value)?),
                            b"n" => n = typed::<Option<usize>>("n", value)?.unwrap_or(1),
                            _ => {}
                        }
                    }
                }
                "stream_options" => {
                    let options = members(value).unwrap_or_default();
                    ask.include_usage = options.iter().any(|(k, v)| *k == b"include_usage" && *v == b"true");
                }
                "tools" | "lora_path" | "cache_salt" => seed ^= super::fnv1a64(value),
                _ => {
                    if let Some(name) = CAPS.iter().find(|name| **name == key) {
                        ask.cap(name, typed(key, value)?);
                    }
                }
            }
        }
        seed ^= super::fnv1a64(ask.model.as_deref().unwrap_or("").as_bytes());
        ask.measure(seed, &prompts);
        let prompts = if ask.batch { ask.items } else { 1 };
        ask.n = n;
        ask.samples = n.saturating_mul(prompts).clamp(1, MAX_SAMPLES);
        Ok(ask)
    }

    /// Reads a multipart body: only its controls; the prompt counts as 16 tokens.
    pub fn read_multipart(body: &[u8]) -> Ask {
        let controls = Controls::in_multipart(body);
        Ask { samples: 1, items: 1, n: 1, prompt_tokens: 16, controls, ..Ask::default() }
    }

    /// What a vLLM prefill request must not have, and this one has.
    pub fn unsanitised(&self) -> Option<String> {
        let must = if self.responses { "max_output_tokens" } else { "max_tokens" };
        if self.stream {
            return Some("stream true".to_owned());
        }
        if self.n != 1 {
            return Some(format!("n {}", self.n));
        }
        if let Some((name, tokens)) = self.caps.iter().find(|(_, tokens)| *tokens != 1) {
            return Some(format!("{name} {tokens}"));
        }
        if !self.caps.iter().any(|(name, _)| *name == must) {
            return Some(format!("no {must}"));
        }
        self.excess.first().map(|name| (*name).to_owned())
    }

    fn cap(&mut self, name: &'static str, tokens: Option<usize>) {
        if let Some(tokens) = tokens {
            self.caps.push((name, tokens));
            self.max_tokens = Some(self.max_tokens.unwrap_or(MAX_TOKENS).min(tokens));
        }
    }

    fn measure(&mut self, seed: u64, prompts: &[Option<&[u8]>]) {
        let mut joined = Vec::new();
        for value in prompts.iter().flatten() {
            let inner = value.strip_prefix(b"[").map(<[u8]>::trim_ascii_start);
            match inner.and_then(<[u8]>::first) {
                Some(b'0'..=b'9') => {
                    let ids: Vec<u64> = serde_json::from_slice(value).unwrap_or_default();
                    self.prompt_tokens += ids.len();
                    self.chain.extend(chain_of_ids(seed, &ids));
                    continue;
                }
                Some(b'[') => {
                    let rows: Vec<Vec<u64>> = serde_json::from_slice(value).unwrap_or_default();
                    let ids = rows.concat();
                    (self.batch, self.items) = (true, rows.len().max(1));
                    self.prompt_tokens += ids.len();
                    self.chain.extend(chain_of_ids(seed, &ids));
                    continue;
                }
                Some(b'"') => (self.batch, self.items) = (true, elements(value).max(1)),
                Some(b'{') => self.items = elements(value).max(1),
                _ => {}
            }
            self.prompt_tokens += value.len() / 4;
            joined.extend_from_slice(value);
        }
        self.chain.extend(chain_of_bytes(seed, &joined));
        self.prompt_tokens = self.prompt_tokens.max(1);
    }
}

fn typed<T: serde::de::DeserializeOwned>(key: &str, value: &[u8]) -> Result<T, String> {
    serde_json::from_slice(value).map_err(|e| format!("{key}: {e}"))
}

/// A member of an object: the key's raw bytes between its quotes, and the value's raw bytes.
type Member<'a> = (&'a [u8], &'a [u8]);

/// The members of a JSON object, in order. Checks the outline of nested values (brackets, strings), not each scalar.
fn members(json: &[u8]) -> Option<Vec<Member<'_>>> {
    let mut found = Vec::new();
    let mut at = space(json, 0);
    if json.get(at) != Some(&b'{') {
        return None;
    }
    at = space(json, at + 1);
    if json.get(at) == Some(&b'}') {
        return (space(json, at + 1) == json.len()).then_some(found);
    }
    loop {
        if json.get(at) != Some(&b'"') {
            return None;
        }
        let key_end = string_end(json, at)?;
        let key = &json[at + 1..key_end - 1];
        at = space(json, key_end);
        if json.get(at) != Some(&b':') {
            return None;
        }
        at = space(json, at + 1);
        let end = value_end(json, at)?;
        found.push((key, &json[at..end]));
        at = space(json, end);
        match json.get(at)? {
            b',' => at = space(json, at + 1),
            b'}' => return (space(json, at + 1) == json.len()).then_some(found),
            _ => return None,
        }
    }
}

/// Elements of a JSON array.
fn elements(json: &[u8]) -> usize {
    let mut n = 0;
    let mut at = space(json, 1);
    while at < json.len() && json[at] != b']' {
        let Some(end) = value_end(json, at) else { return n };
        n += 1;
        at = space(json, end);
        if json.get(at) == Some(&b',') {
            at = space(json, at + 1);
        }
    }
    n
}

fn space(json: &[u8], mut at: usize) -> usize {
    while matches!(json.get(at), Some(b' ' | b'\t' | b'\r' | b'\n')) {
        at += 1;
    }
    at
}

fn string_end(json: &[u8], quote: usize) -> Option<usize> {
    let mut at = quote + 1;
    loop {
        at += memchr::memchr2(b'"', b'\\', json.get(at..)?)?;
        if json[at] == b'"' {
            return Some(at + 1);
        }
        at += 2;
    }
}

fn value_end(json: &[u8], start: usize) -> Option<usize> {
    match json.get(start)? {
        b'"' => string_end(json, start),
        b'{' | b'[' => {
            let (mut at, mut open) = (start, Vec::new());
            loop {
                match json.get(at)? {
                    b'"' => {
                        at = string_end(json, at)?;
                        continue;
                    }
                    b'{' => open.push(b'}'),
                    b'[' => open.push(b']'),
                    b @ (b'}' | b']') => {
                        if open.pop() != Some(*b) {
                            return None;
                        }
                        if open.is_empty() {
                            return Some(at + 1);
                        }
                    }
                    _ => {}
                }
                at += 1;
            }
        }
        b'-' | b'0'..=b'9' | b't' | b'f' | b'n' => {
            let len = json[start..].iter().position(|b| matches!(b, b',' | b'}' | b']' | b' ' | b'\t' | b'\r' | b'\n'));
            let end = len.map_or(json.len(), |n| start + n);
            serde_json::from_slice::<serde::de::IgnoredAny>(&json[start..end]).ok().map(|_| end)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_measured_as_they_stand() {
        let ask = Ask::read("/generate", br#"{"input_ids":[1,2,3], "sampling_params":{"max_new_tokens":5}}"#).unwrap();
        assert_eq!((ask.prompt_tokens, ask.max_tokens, ask.batch), (3, Some(5), false));
        let ask = Ask::read("/generate", br#"{"text":["aaaa","bb\"],"]}"#).unwrap();
        assert_eq!((ask.batch, ask.items, ask.samples), (true, 2, 2));
        let ask = Ask::read("/v1/completions", br#"{"prompt":[[1,2],[3]],"n":2}"#).unwrap();
        assert_eq!((ask.prompt_tokens, ask.samples), (3, 4));
        let body = br#"{"messages":[{"role":"user","content":"0123"}],"stream":true,"stream_options":{"include_usage":true},"max_tokens":9,"max_completion_tokens":7}"#;
        let ask = Ask::read("/v1/chat/completions", body).unwrap();
        assert_eq!((ask.prompt_tokens, ask.samples, ask.max_tokens), (8, 1, Some(7)));
        assert!(ask.stream && ask.include_usage);
    }

    #[test]
    fn broken_bodies_are_refused() {
        for body in
            ["", "{", "[]", "{\"a\":}", "{\"a\":[}", "{\"a\":1}x", "{\"a\":tru}", "{\"a\":1,}", "{\"mock\":{\"no\":1}}"]
        {
            assert!(Ask::read("/generate", body.as_bytes()).is_err(), "{body}");
        }
    }

    #[test]
    fn controls_are_found_in_a_prefix() {
        let decode = Addressee { role: crate::mock::Role::Decode, port: 7 };
        let first = |body: &str| Controls::in_prefix(body.as_bytes()).map(|all| Controls::first_for(all, decode));
        let c = first(r#"{"mock": {"early":"close","status":413},"text":"unfin"#).unwrap();
        assert_eq!((c.early, c.status), (Some(Early::Close), Some(413)));
        assert!(first(r#"{"mock": {"early":tr"#).is_none());
        assert!(first(r#"{"mock": [{"status":413}, {"#).is_none());
        let all =
            r#"{"mock": [{"only":"prefill","status":1},{"on":[8],"status":2},{"on":[7],"status":3},{"status":4}],"te"#;
        assert_eq!(first(all).unwrap().status, Some(3));
    }

    #[test]
    fn prefill_requests_are_sanitised_or_not() {
        let why = |body: &str| Ask::read("/v1/completions", body.as_bytes()).unwrap().unsanitised();
        assert_eq!(
            why(r#"{"max_tokens":1,"stream":false,"n":1,"stream_options":null,"max_completion_tokens":1}"#),
            None
        );
        for (body, told) in [
            (r#"{}"#, "no max_tokens"),
            (r#"{"max_completion_tokens":1}"#, "no max_tokens"),
            (r#"{"max_tokens":1,"stream":true}"#, "stream true"),
            (r#"{"max_tokens":1,"n":2}"#, "n 2"),
            (r#"{"max_tokens":1,"max_completion_tokens":9}"#, "max_completion_tokens 9"),
            (r#"{"max_tokens":1,"min_tokens":0}"#, "min_tokens"),
            (r#"{"max_tokens":1,"stream_options":{}}"#, "stream_options"),
        ] {
            assert_eq!(why(body).as_deref(), Some(told), "{body}");
        }
        let ask = Ask::read("/v1/responses", br#"{"max_output_tokens":1}"#).unwrap();
        assert_eq!(ask.unsanitised(), None);
    }
}
