//! What a worker serves: its models, and the harmless part of what it says of itself.
//!
//! Takes the worker's answers, gives model names and a filtered description. Never passes on a field that is
//! not on the list (engines put their keys into the same answer), never a name that cannot be a label.

use serde_json::{Map, Value};

use super::Tended;
use super::fetch::Reply;
use super::fleet::News;
use crate::limits::{MAX_DP_SIZE, MAX_MODELS_PER_WORKER};

/// Longest model name that is taken, in bytes.
pub const MAX_MODEL_BYTES: usize = 256;
/// Longest text of a field of the description, in bytes.
const MAX_FIELD_BYTES: usize = 1024;
/// Times the description is asked for before it is let be: not every engine has one.
const INFO_TRIES: u32 = 3;

/// Fields of `/get_server_info` that are kept, when they are plain values.
pub const HARMLESS: [&str; 14] = [
    "model_path",
    "served_model_name",
    "tp_size",
    "dp_size",
    "pp_size",
    "context_length",
    "max_model_len",
    "max_total_num_tokens",
    "version",
    "dtype",
    "kv_cache_dtype",
    "page_size",
    "chunked_prefill_size",
    "is_embedding",
];

/// Model names as the roster keeps them.
pub type Names = Box<[Box<str>]>;

/// Model names out of the body of `/v1/models`, in the engine's order, and how many were dropped for being
/// too long, too many or full of control characters.
///
/// # Errors
/// A sentence about what is wrong with the body; an empty list is wrong too.
pub fn models(body: &[u8]) -> Result<(Names, usize), &'static str> {
    let body: Value = serde_json::from_slice(body).map_err(|_| "not JSON")?;
    let data = body.get("data").and_then(Value::as_array).ok_or("no list `data`")?;
    let mut names: Vec<Box<str>> = Vec::new();
    let mut dropped = 0;
    for id in data.iter().filter_map(|m| m.get("id")) {
        match id.as_str().filter(|id| fit(id)) {
            Some(id) if names.iter().any(|n| &**n == id) => {}
            Some(id) if names.len() < MAX_MODELS_PER_WORKER => names.push(id.into()),
            _ => dropped += 1,
        }
    }
    if names.is_empty() {
        return Err("no model in it");
    }
    Ok((names.into_boxed_slice(), dropped))
}

fn fit(id: &str) -> bool {
    !id.is_empty() && id.len() <= MAX_MODEL_BYTES && !id.contains(char::is_control)
}

/// The [`HARMLESS`] fields of a worker's description as compact JSON; `None` when there are none.
pub fn harmless(body: &[u8]) -> Option<Box<str>> {
    let Ok(Value::Object(mut said)) = serde_json::from_slice(body) else { return None };
    let kept: Map<String, Value> =
        HARMLESS.iter().filter_map(|key| said.remove(*key).filter(plain).map(|v| (key.to_string(), v))).collect();
    (!kept.is_empty()).then(|| Value::Object(kept).to_string().into_boxed_str())
}

/// Number of data-parallel ranks that a worker's description states.
pub fn dp_size(body: &[u8]) -> Option<u32> {
    let said: Value = serde_json::from_slice(body).ok()?;
    let size = said.get("dp_size")?.as_u64()?;
    u32::try_from(size).ok().filter(|size| (1..=MAX_DP_SIZE).contains(size))
}

fn plain(value: &Value) -> bool {
    match value {
        Value::Bool(_) | Value::Number(_) => true,
        Value::String(s) => s.len() <= MAX_FIELD_BYTES,
        _ => false,
    }
}

/// Learns at start and whenever it is asked for again, each time until the models are known.
pub(super) async fn keep_learning(tended: &Tended) {
    tended.resolved().await;
    let mut asked = tended.asked.subscribe();
    loop {
        let round = *asked.borrow_and_update();
        tokio::select! {
            () = learn(tended, round) => {
                // The sender lives as long as `tended`, so this waits for the next round.
                let _ = asked.changed().await;
            }
            _ = asked.changed() => {}
        }
    }
}

async fn learn(tended: &Tended, round: u64) {
    tokio::join!(learn_models(tended, round), learn_info(tended));
}

async fn learn_models(tended: &Tended, round: u64) {
    let mut complained = false;
    while tended.asks_models() {
        let found = ask_models(tended).await;
        let known = found.is_ok();
        match found {
            Ok(names) => tended.tell(News::Models(names)),
            Err(why) if !std::mem::replace(&mut complained, true) => {
                tracing::warn!(worker = %tended.url, reason = %why, "models of the worker are not known yet");
            }
            Err(_) => {}
        }
        tended.answered.send_replace(Some(round));
        if known {
            break;
        }
        tokio::time::sleep(tended.pace.eager).await;
    }
    tended.answered.send_replace(Some(round));
}

/// The description is let be after some tries, unless the data-parallel size has to come out of it.
async fn learn_info(tended: &Tended) {
    let mut tries = 0;
    loop {
        if let Some(body) = ask_info(tended).await {
            tended.tell(News::ServerInfo(harmless(&body)));
            if tended.ask_size {
                tended.tell(News::Ranks(size(tended, &body)));
            }
            return;
        }
        tries += 1;
        if tries == INFO_TRIES {
            if !tended.ask_size {
                return;
            }
            tracing::warn!(worker = %tended.url, "data-parallel size of the worker is not known yet");
        }
        tokio::time::sleep(tended.pace.eager).await;
    }
}

/// The data-parallel size in a description; an engine that says none has one rank.
fn size(tended: &Tended, body: &[u8]) -> u32 {
    dp_size(body).unwrap_or_else(|| {
        tracing::warn!(
            worker = %tended.url,
            "the worker does not say its data-parallel size: taken for 1; give dp_size in [[workers]] if it has more ranks"
        );
        1
    })
}

async fn ask_models(tended: &Tended) -> Result<Names, String> {
    let reply = tended.get("/v1/models").await.map_err(|failure| failure.to_string())?;
    let url = format!("{}/v1/models", tended.url);
    let (names, dropped) = match reply {
        Reply { status: 200, truncated: false, ref body } => models(body).map_err(|e| format!("{url}: {e}"))?,
        Reply { status: 200, .. } => return Err(format!("{url}: the answer is too long")),
        Reply { status, .. } => return Err(format!("{url} answers {status}")),
    };
    if dropped > 0 {
        tracing::warn!(
            worker = %tended.url,
            dropped,
            "model names ignored: longer than {MAX_MODEL_BYTES} bytes, with control characters, \
             or more than {MAX_MODELS_PER_WORKER}"
        );
    }
    Ok(names)
}

/// The worker's description, empty if it has none; `None`: ask again.
async fn ask_info(tended: &Tended) -> Option<Vec<u8>> {
    let mut reply = tended.get("/get_server_info").await.ok()?;
    if reply.status == 404 {
        reply = tended.get("/server_info").await.ok()?;
    }
    match reply {
        Reply { status: 200, truncated: false, body } => Some(body),
        Reply { status: 404, .. } => Some(Vec::new()),
        // A description that is too long to be read still is one.
        Reply { status: 200, .. } if !tended.ask_size => Some(Vec::new()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_in_order_once_and_only_when_they_can_be_labels() {
        let long = "x".repeat(MAX_MODEL_BYTES + 1);
        let body = format!(
            r#"{{"data":[{{"id":"b"}},{{"id":"a/ü"}},{{"id":"b"}},{{"id":"x\ny"}},{{"id":"{long}"}},{{"id":7}},{{}},{{"id":""}}]}}"#
        );
        let (names, dropped) = models(body.as_bytes()).unwrap();
        assert_eq!((&*names, dropped), (&["b".into(), "a/ü".into()][..], 4));
        for bad in ["", "{}", "[]", r#"{"data":{}}"#, r#"{"data":[]}"#, r#"{"data":[{"id":"\u0000"}]}"#] {
            assert!(models(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_are_bounded() {
        let list: Vec<String> = (0..MAX_MODELS_PER_WORKER + 3).map(|i| format!(r#"{{"id":"m{i}"}}"#)).collect();
        let (names, dropped) = models(format!(r#"{{"data":[{}]}}"#, list.join(",")).as_bytes()).unwrap();
        assert_eq!((names.len(), dropped), (MAX_MODELS_PER_WORKER, 3));
    }

    #[test]
    fn only_harmless_plain_fields_are_kept() {
        let said = r#"{"api_key":"s3cret","admin_api_key":"s3cret","model_path":"/m","tp_size":2,"version":{"api_key":"s3cret"},
            "dtype":null,"is_embedding":false,"internal_states":[{"api_key":"s3cret"}],"page_size":[1]}"#;
        let kept = harmless(said.as_bytes()).unwrap();
        assert_eq!(&*kept, r#"{"is_embedding":false,"model_path":"/m","tp_size":2}"#);
        for nothing in ["", "[]", "{}", r#"{"api_key":"s3cret"}"#] {
            assert_eq!(harmless(nothing.as_bytes()), None);
        }
    }

    #[test]
    fn the_data_parallel_size_is_a_small_number() {
        assert_eq!(dp_size(br#"{"dp_size":8,"api_key":"s3cret"}"#), Some(8));
        for none in
            ["", "[]", "{}", r#"{"dp_size":0}"#, r#"{"dp_size":1025}"#, r#"{"dp_size":"8"}"#, r#"{"dp_size":-1}"#]
        {
            assert_eq!(dp_size(none.as_bytes()), None, "{none}");
        }
    }
}
