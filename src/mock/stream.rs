//! The words of an answer, in the dialect of its path.
//!
//! Takes what is known of a request and how far its generation has come, gives SSE events (each the whole text of one
//! event) or the body of an answer that is no stream. Never sends anything.

use serde_json::{Value, json};

/// Which shape answers have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    Chat,
    Completion,
    Generate,
    Responses,
    Messages,
}

/// What the events of one answer have in common.
pub(super) struct Script<'a> {
    pub dialect: Dialect,
    pub id: &'a str,
    pub model: &'a str,
    pub created: u64,
    pub prompt_tokens: usize,
    pub cached: usize,
    pub samples: usize,
    pub batch: bool,
    pub logprob: bool,
    /// With `logprob`: the likeliest tokens, and chosen ones, too.
    pub top_logprobs: bool,
    pub ids_logprob: bool,
    /// Decode workers do not know the prompt's log-probabilities.
    pub knows_prompt: bool,
    pub include_usage: bool,
    /// Opaque parameters that a vLLM prefill worker hands to the decode worker.
    pub kv_transfer: Option<Value>,
}

const WORDS: [&str; 16] = [
    "the",
    " lane",
    " keeps",
    " its",
    " own",
    " core",
    " and",
    " every",
    " token",
    " that",
    " leaves",
    " it",
    " goes",
    " straight",
    " home",
    ".",
];

/// The text of token number `i`.
pub(super) fn word(i: usize) -> &'static str {
    WORDS[i % WORDS.len()]
}

/// A JSON string.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn data(v: &Value) -> String {
    format!("data: {v}\n\n")
}

fn named(name: &str, mut v: Value) -> String {
    v["type"] = name.into();
    format!("event: {name}\ndata: {v}\n\n")
}

impl Script<'_> {
    /// The id of sample `i`: only `/generate` gives each its own.
    fn sample_id(&self, i: usize) -> String {
        if self.samples == 1 { self.id.to_owned() } else { format!("{}-{i}", self.id) }
    }

    /// Events before the first token.
    pub fn opening(&self) -> Vec<String> {
        match self.dialect {
            Dialect::Chat => {
                let first = |i| self.chat_chunk(i, r#"{"role":"assistant","content":""}"#, "null");
                (0..self.samples).map(first).collect()
            }
            Dialect::Completion | Dialect::Generate => Vec::new(),
            Dialect::Responses => {
                let response = self.response("in_progress", 0, "");
                let item = json!({"id": "msg_0", "type": "message", "role": "assistant", "status": "in_progress", "content": []});
                let part = json!({"type": "output_text", "text": "", "annotations": []});
                vec![
                    named("response.created", json!({"sequence_number": 0, "response": response})),
                    named("response.in_progress", json!({"sequence_number": 1, "response": response})),
                    named("response.output_item.added", json!({"sequence_number": 2, "output_index": 0, "item": item})),
                    named(
                        "response.content_part.added",
                        json!({"sequence_number": 3, "item_id": "msg_0", "output_index": 0, "content_index": 0, "part": part}),
                    ),
                ]
            }
            Dialect::Messages => {
                let mut message = self.message(0, "", None);
                message["content"] = json!([]);
                vec![
                    named("message_start", json!({"message": message})),
                    named("content_block_start", json!({"index": 0, "content_block": {"type": "text", "text": ""}})),
                ]
            }
        }
    }

    /// The event of one token of one sample; `count` tokens with it, `whole` is the text with it.
    pub fn token(&self, sample: usize, count: usize, text: &str, whole: &str) -> String {
        match self.dialect {
            Dialect::Chat => self.chat_chunk(sample, &format!(r#"{{"content":{}}}"#, quoted(text)), "null"),
            Dialect::Completion => self.completion_chunk(sample, &quoted(text), "null"),
            Dialect::Generate => {
                let mut v = self.generated(sample, count, whole, Value::Null);
                v["index"] = sample.into();
                data(&v)
            }
            Dialect::Responses => named(
                "response.output_text.delta",
                json!({"sequence_number": 3 + count, "item_id": "msg_0", "output_index": 0, "content_index": 0, "delta": text}),
            ),
            Dialect::Messages => {
                named("content_block_delta", json!({"index": 0, "delta": {"type": "text_delta", "text": text}}))
            }
        }
    }

    /// Events after the last token.
    pub fn closing(&self, count: usize, whole: &str, finish: &str) -> Vec<String> {
        let done = || "data: [DONE]\n\n".to_owned();
        let mut events = Vec::new();
        match self.dialect {
            Dialect::Chat | Dialect::Completion => {
                for i in 0..self.samples {
                    events.push(match self.dialect {
                        Dialect::Chat => self.chat_chunk(i, r#"{"content":null}"#, &quoted(finish)),
                        _ => self.completion_chunk(i, "\"\"", &quoted(finish)),
                    });
                }
                if self.include_usage {
                    let object =
                        if self.dialect == Dialect::Chat { "chat.completion.chunk" } else { "text_completion" };
                    events.push(data(&json!({
                        "id": self.id, "object": object, "created": self.created, "model": self.model,
                        "choices": [], "usage": self.usage(count),
                    })));
                }
                events.push(done());
            }
            Dialect::Generate => {
                for i in 0..self.samples {
                    let mut v = self.generated(i, count, whole, finish_reason(finish, count));
                    v["index"] = i.into();
                    events.push(data(&v));
                }
                events.push(done());
            }
            Dialect::Responses => {
                let n = 4 + count;
                let at = json!({"item_id": "msg_0", "output_index": 0, "content_index": 0});
                let (mut text, mut part) = (at.clone(), at);
                (text["sequence_number"], text["text"]) = (n.into(), whole.into());
                (part["sequence_number"], part["part"]) =
                    ((n + 1).into(), json!({"type": "output_text", "text": whole, "annotations": []}));
                let response = self.response("completed", count, whole);
                events.push(named("response.output_text.done", text));
                events.push(named("response.content_part.done", part));
                events.push(named(
                    "response.output_item.done",
                    json!({"sequence_number": n + 2, "output_index": 0, "item": response["output"][0]}),
                ));
                events.push(named("response.completed", json!({"sequence_number": n + 3, "response": response})));
            }
            Dialect::Messages => {
                events.push(named("content_block_stop", json!({"index": 0})));
                let delta = json!({"stop_reason": "max_tokens", "stop_sequence": null});
                events.push(named("message_delta", json!({"delta": delta, "usage": self.anthropic_usage(count)})));
                events.push(named("message_stop", json!({})));
            }
        }
        events
    }

    /// The body of an answer that is no stream.
    pub fn whole(&self, count: usize, text: &str, finish: &str) -> String {
        let mut v = match self.dialect {
            Dialect::Chat => {
                let message =
                    json!({"role": "assistant", "content": text, "reasoning_content": null, "tool_calls": null});
                let choice = |i| json!({"index": i, "message": message, "logprobs": null, "finish_reason": finish, "matched_stop": null});
                json!({
                    "id": self.id, "object": "chat.completion", "created": self.created, "model": self.model,
                    "choices": (0..self.samples).map(choice).collect::<Vec<_>>(), "usage": self.usage(count),
                })
            }
            Dialect::Completion => {
                let choice = |i| json!({"index": i, "text": text, "logprobs": null, "finish_reason": finish, "matched_stop": null});
                json!({
                    "id": self.id, "object": "text_completion", "created": self.created, "model": self.model,
                    "choices": (0..self.samples).map(choice).collect::<Vec<_>>(), "usage": self.usage(count),
                })
            }
            Dialect::Generate => {
                let one = |i| self.generated(i, count, text, finish_reason(finish, count));
                if self.batch || self.samples > 1 { (0..self.samples).map(one).collect() } else { one(0) }
            }
            Dialect::Responses => self.response("completed", count, text),
            Dialect::Messages => self.message(count, text, Some("max_tokens")),
        };
        if let (Some(params), Value::Object(o)) = (&self.kv_transfer, &mut v) {
            o.insert("kv_transfer_params".to_owned(), params.clone());
        }
        v.to_string()
    }

    fn chat_chunk(&self, sample: usize, delta: &str, finish: &str) -> String {
        format!(
            "data: {{\"id\":{},\"object\":\"chat.completion.chunk\",\"created\":{},\"model\":{},\"choices\":[{{\"index\":{sample},\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{finish},\"matched_stop\":null}}],\"usage\":null}}\n\n",
            quoted(self.id),
            self.created,
            quoted(self.model),
        )
    }

    fn completion_chunk(&self, sample: usize, text: &str, finish: &str) -> String {
        format!(
            "data: {{\"id\":{},\"object\":\"text_completion\",\"created\":{},\"model\":{},\"choices\":[{{\"index\":{sample},\"text\":{text},\"logprobs\":null,\"finish_reason\":{finish},\"matched_stop\":null}}],\"usage\":null}}\n\n",
            quoted(self.id),
            self.created,
            quoted(self.model),
        )
    }

    fn usage(&self, count: usize) -> Value {
        let completion = count * self.samples;
        json!({
            "prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens + completion,
            "completion_tokens": completion, "prompt_tokens_details": {"cached_tokens": self.cached}, "reasoning_tokens": 0,
        })
    }

    fn anthropic_usage(&self, count: usize) -> Value {
        json!({
            "input_tokens": self.prompt_tokens - self.cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached, "output_tokens": count,
        })
    }

    /// One object of `/generate`: the text so far and what is known of it.
    fn generated(&self, sample: usize, count: usize, text: &str, finish: Value) -> Value {
        let mut meta = json!({
            "id": self.sample_id(sample), "finish_reason": finish, "prompt_tokens": self.prompt_tokens,
            "weight_version": "default", "completion_tokens": count, "cached_tokens": self.cached, "e2e_latency": 0.0,
        });
        if self.logprob {
            let input = if self.knows_prompt { self.prompt_tokens } else { 0 };
            let one = |i: usize| if i == 0 { json!([null, 0, null]) } else { json!([-0.5, i, null]) };
            meta["input_token_logprobs"] = (0..input).map(one).collect();
            meta["output_token_logprobs"] = (0..count).map(|i| json!([-0.25, i, null])).collect();
            let some = |i: usize| if i == 0 { Value::Null } else { json!([[-0.5, i, null]]) };
            for (wanted, kind) in [(self.top_logprobs, "top"), (self.ids_logprob, "token_ids")] {
                if wanted {
                    meta[format!("input_{kind}_logprobs")] = (0..input).map(some).collect();
                    meta[format!("output_{kind}_logprobs")] = (0..count).map(|i| json!([[-0.25, i, null]])).collect();
                }
            }
        }
        json!({"text": text, "output_ids": (0..count).collect::<Vec<_>>(), "meta_info": meta})
    }

    fn response(&self, status: &str, count: usize, text: &str) -> Value {
        let content = json!([{"type": "output_text", "text": text, "annotations": [], "logprobs": null}]);
        let item = json!({"id": "msg_0", "type": "message", "role": "assistant", "status": status, "content": content});
        let usage = json!({
            "input_tokens": self.prompt_tokens, "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": count, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": self.prompt_tokens + count,
        });
        let completed = status == "completed";
        json!({
            "id": self.id, "object": "response", "created_at": self.created, "model": self.model, "status": status,
            "output": if completed { json!([item]) } else { json!([]) },
            "usage": if completed { usage } else { Value::Null }, "parallel_tool_calls": true, "tool_choice": "auto", "tools": [],
        })
    }

    fn message(&self, count: usize, text: &str, stop: Option<&str>) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model,
            "content": [{"type": "text", "text": text}], "stop_reason": stop, "stop_sequence": null,
            "usage": self.anthropic_usage(count),
        })
    }
}

fn finish_reason(finish: &str, count: usize) -> Value {
    match finish {
        "abort" => json!({"type": "abort", "message": "Aborted", "status_code": null, "err_type": null}),
        other => json!({"type": other, "length": count}),
    }
}
