//! Answers that generate nothing: what an engine says of itself, embeddings, ranks, tokens, errors.
//!
//! Takes an engine and a request, gives a status and a JSON or text body. Never waits.

use serde_json::{Value, json};

use super::ask::Ask;
use super::engine::Inner;
use super::http::Request;
use super::pair::DEFAULT_BOOTSTRAP_PORT;
use super::stream::word;
use super::{Role, fnv1a64, latin1};

/// Length of the vectors of `/v1/embeddings`.
const DIMENSIONS: usize = 8;

/// A status, a content type and a body.
pub(super) type Answer = (u16, &'static str, Vec<u8>);

pub(super) fn json_answer(status: u16, v: &Value) -> Answer {
    (status, "application/json", v.to_string().into_bytes())
}

/// An error in the shape that the engine has for it.
pub(super) fn error(engine: &Inner, path: &str, status: u16, message: &str) -> Answer {
    let kind = match status {
        400 => "BadRequestError",
        401 => "AuthenticationError",
        404 => "NotFoundError",
        429 => "RateLimitError",
        503 => "ServiceUnavailableError",
        _ => "InternalServerError",
    };
    let v = if path.starts_with("/v1/messages") {
        let kind = if status < 500 { "invalid_request_error" } else { "api_error" };
        json!({"type": "error", "error": {"type": kind, "message": message}})
    } else if engine.settings.vllm {
        json!({"error": {"message": message, "type": kind, "param": null, "code": status}})
    } else if path == "/generate" {
        json!({"error": {"message": message}})
    } else {
        json!({"object": "error", "message": message, "type": kind, "param": null, "code": status})
    };
    json_answer(status, &v)
}

/// Answers of GET requests, and of the admin routes; `None` for a path that the engine does not have.
pub(super) fn about(engine: &Inner, request: &Request) -> Option<Answer> {
    let s = &engine.settings;
    let (running, queued) = engine.load();
    let (used, usage) = engine.usage();
    let model = s.models.first().map_or("mock", String::as_str);
    let method = if request.method == "HEAD" { "GET" } else { request.method.as_str() };
    let v = match (method, request.path.as_str()) {
        ("GET", "/mock/stats") => {
            let mut v = serde_json::to_value(engine.counters.snapshot()).unwrap_or_default();
            v["port"] = engine.addr.port().into();
            v
        }
        ("POST", "/mock/reset") => {
            engine.counters.reset();
            json!({})
        }
        ("GET" | "POST", "/health" | "/health_generate" | "/ready" | "/ping") => {
            return Some((200, "text/plain", Vec::new()));
        }
        ("GET", "/v1/models") => {
            let owner = if s.vllm { "vllm" } else { "sglang" };
            let one = |m: &String| json!({"id": m, "object": "model", "created": 1_700_000_000, "owned_by": owner, "root": m, "parent": null, "max_model_len": 131_072});
            json!({"object": "list", "data": s.models.iter().map(one).collect::<Vec<_>>()})
        }
        ("GET", "/get_model_info" | "/model_info") => json!({
            "model_path": model, "tokenizer_path": model, "is_generation": true, "preferred_sampling_params": null, "weight_version": "default",
        }),
        ("GET", "/get_server_info" | "/server_info") => json!({
            "model_path": model, "served_model_name": model, "tokenizer_path": model, "host": engine.addr.ip().to_string(), "port": engine.addr.port(),
            "api_key": s.api_key.as_deref().unwrap_or("sk-engine-secret"), "admin_api_key": "sk-engine-admin-secret",
            "tp_size": 1, "dp_size": s.dp_size, "version": "0.5.23", "max_total_num_tokens": s.kv_tokens, "max_running_requests": s.max_running,
            "disaggregation_mode": match s.role { Role::Regular => "null", Role::Prefill => "prefill", Role::Decode => "decode" },
            "disaggregation_bootstrap_port": DEFAULT_BOOTSTRAP_PORT, "status": "ready",
            "internal_states": [{"last_gen_throughput": 0.0, "effective_max_running_requests_per_dp": s.max_running}],
        }),
        ("GET", "/v1/loads" | "/metrics") if engine.keeps_its_load() => {
            return Some(error(engine, &request.path, 503, "The load is not to be had."));
        }
        ("GET", "/v1/loads") if !s.vllm => {
            let one = |rank: usize| {
                let mine = |n: u64| if rank == 0 { n } else { 0 }; // everything runs on rank 0
                json!({
                    "dp_rank": rank, "num_running_reqs": mine(running), "num_waiting_reqs": mine(queued), "num_total_reqs": mine(running + queued),
                    "num_used_tokens": mine(used), "max_total_num_tokens": s.kv_tokens, "token_usage": if rank == 0 { usage } else { 0.0 },
                    "gen_throughput": 0.0, "cache_hit_rate": hit_rate(engine), "utilization": 0.0, "max_running_requests": s.max_running,
                })
            };
            json!({
                "timestamp": "2025-01-01T00:00:00", "version": "0.5.23", "dp_rank_count": s.dp_size,
                "loads": (0..s.dp_size.max(1)).map(one).collect::<Vec<_>>(),
            })
        }
        ("GET", "/metrics") => return Some((200, "text/plain; version=0.0.4; charset=utf-8", metrics(engine, model))),
        ("POST" | "GET", "/flush_cache") => {
            engine.flush_cache();
            return Some((200, "text/plain; charset=utf-8", b"Cache flushed.\n".to_vec()));
        }
        ("POST", "/abort_request") => {
            let v: Value = serde_json::from_slice(&request.body).unwrap_or_default();
            if v["abort_all"] == true {
                engine.abort_all();
            } else if let Some(rid) = v["rid"].as_str() {
                engine.abort(rid);
            }
            return Some((200, "application/json", Vec::new()));
        }
        (method, path) => return response(engine, method, path.strip_prefix("/v1/responses/")?),
    };
    Some(json_answer(200, &v))
}

/// Answers of the bootstrap server: at `/query` an entry for each rank, and the engine id of rank 0 by itself.
pub(super) fn bootstrap(engine: &Inner, request: &Request) -> Answer {
    if (request.method.as_str(), request.path.as_str()) != ("GET", "/query") {
        return json_answer(404, &json!({"detail": "Not Found"}));
    }
    let mut v = json!({"engine_id": engine.engine_id()});
    for (rank, id) in engine.engine_ids().iter().enumerate() {
        let at = format!("tcp://{}:{}", engine.addr.ip(), 20_000 + rank);
        v[rank.to_string()] = json!({"engine_id": id, "worker_addr": {"0": {"0": at}}});
    }
    json_answer(200, &v)
}

/// `GET /v1/responses/{id}` and `POST /v1/responses/{id}/cancel`.
fn response(engine: &Inner, method: &str, rest: &str) -> Option<Answer> {
    let (id, status) = match (method, rest.strip_suffix("/cancel")) {
        ("POST", Some(id)) => (id, "cancelled"),
        ("GET", None) => (rest, "completed"),
        _ => return None,
    };
    if id.is_empty() || id.contains('/') {
        return None;
    }
    if !engine.made_response(id) {
        let error = json!({"message": format!("Response with id '{id}' not found."), "type": "invalid_request_error", "param": "response_id", "code": 404});
        return Some(json_answer(404, &json!({"error": error})));
    }
    if status == "cancelled" {
        engine.abort(id);
    }
    let model = engine.settings.models.first();
    Some(json_answer(200, &json!({"id": id, "object": "response", "status": status, "model": model, "output": []})))
}

fn hit_rate(engine: &Inner) -> f64 {
    let s = engine.counters.snapshot();
    s.cached_tokens as f64 / s.prompt_tokens.max(1) as f64
}

fn metrics(engine: &Inner, model: &str) -> Vec<u8> {
    let (running, queued) = engine.load();
    let (used, usage) = engine.usage();
    let rows: Vec<(&str, f64)> = if engine.settings.vllm {
        vec![
            ("vllm:num_requests_running", running as f64),
            ("vllm:num_requests_waiting", queued as f64),
            ("vllm:kv_cache_usage_perc", usage),
        ]
    } else {
        vec![
            ("sglang:num_running_reqs", running as f64),
            ("sglang:num_queue_reqs", queued as f64),
            ("sglang:num_used_tokens", used as f64),
            ("sglang:token_usage", usage),
            ("sglang:cache_hit_rate", hit_rate(engine)),
        ]
    };
    let row = |(name, value): &(&str, f64)| {
        format!("# HELP {name} Mock.\n# TYPE {name} gauge\n{name}{{model_name=\"{model}\"}} {value:?}\n")
    };
    rows.iter().map(row).collect::<String>().into_bytes()
}

/// The body of a route of inference that generates nothing.
pub(super) fn verdict(path: &str, ask: &Ask, model: &str, cached: usize) -> Answer {
    let usage = json!({
        "prompt_tokens": ask.prompt_tokens, "total_tokens": ask.prompt_tokens, "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": cached},
    });
    let id = format!("mock-{:016x}", ask.chain.last().copied().unwrap_or(ask.prompt_tokens as u64));
    let each = |one: &dyn Fn(usize) -> Value| (0..ask.items).map(one).collect::<Vec<_>>();
    let v = match path.strip_prefix("/v1").unwrap_or(path) {
        "/embeddings" => {
            let vector: Vec<f64> = (0..DIMENSIONS).map(|i| i as f64 / 8.0).collect();
            let data = each(&|i| json!({"object": "embedding", "index": i, "embedding": vector}));
            json!({"object": "list", "data": data, "model": model, "usage": usage})
        }
        "/rerank" => {
            let one = |i| json!({"score": 1.0 / (i + 1) as f64, "document": null, "index": i, "meta_info": {"id": id, "prompt_tokens": ask.prompt_tokens}});
            each(&one).into()
        }
        "/classify" => {
            let one = |i| json!({"index": i, "label": "LABEL_0", "probs": [0.75, 0.25], "num_classes": 2});
            json!({"id": id, "object": "list", "created": 1_700_000_000, "model": model, "data": each(&one), "usage": usage})
        }
        "/score" => {
            json!({"object": "scoring", "model": model, "scores": each(&|i| json!([1.0 / (i + 1) as f64])), "usage": usage})
        }
        "/pooling" => {
            let data = each(&|i| json!({"object": "pooling", "index": i, "data": [0.5, 0.25]}));
            json!({"id": id, "object": "list", "created": 1_700_000_000, "model": model, "data": data, "usage": usage})
        }
        "/tokenize" => {
            let tokens: Vec<usize> = (0..ask.prompt_tokens).collect();
            json!({"tokens": tokens, "count": tokens.len(), "max_model_len": 131_072})
        }
        "/detokenize" => {
            let text: String = (0..ask.prompt_tokens).map(word).collect();
            json!({"text": text, "prompt": text})
        }
        "/messages/count_tokens" => json!({"input_tokens": ask.prompt_tokens}),
        _ => json!({"text": "the lane keeps its own core.", "usage": {"type": "duration", "seconds": 1}}),
    };
    json_answer(200, &v)
}

/// What `echo` answers.
pub(super) fn echo(engine: &Inner, request: &Request) -> Answer {
    let lines = |bytes: &[u8]| latin1(bytes).lines().map(str::to_owned).collect::<Vec<_>>();
    let target =
        if request.query.is_empty() { request.path.clone() } else { format!("{}?{}", request.path, request.query) };
    json_answer(
        200,
        &json!({
            "method": request.method, "target": target, "head": lines(&request.head), "trailers": lines(&request.trailers),
            "body_length": request.body.len(), "body_fnv1a64": format!("{:016x}", fnv1a64(&request.body)), "port": engine.addr.port(),
        }),
    )
}
