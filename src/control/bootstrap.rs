//! Mooncake's id of a prefill worker's engine, which decode workers have to be told.
//!
//! Takes the answers of the worker's bootstrap server, gives ids by data-parallel rank. Never gives an id up because a
//! later question failed: the probes judge workers.

use std::net::SocketAddr;

use serde_json::Value;

use super::Tended;
use super::fetch::{Question, Reply};
use super::fleet::News;
use crate::limits::MAX_DP_SIZE;

/// Ids by data-parallel rank, in rank order; one of an engine without ranks stands under 0.
pub type EngineIds = Box<[(u32, Box<str>)]>;

/// Longest id that is taken, in bytes.
const MAX_ID_BYTES: usize = 256;

/// Ids out of an answer: an object with a text `engine_id`, or an object of such objects by rank, 0 among them; what is
/// said by rank counts where both are.
///
/// # Errors
/// A few words about what is wrong with the answer.
pub fn engine_ids(body: &[u8]) -> Result<EngineIds, &'static str> {
    let body: Value = serde_json::from_slice(body).map_err(|_| "not JSON")?;
    let said = body.as_object().ok_or("not an object")?;
    let mut ids: Vec<(u32, Box<str>)> = Vec::new();
    for (rank, of_rank) in said {
        let Some(rank) = rank.parse().ok().filter(|rank| *rank < MAX_DP_SIZE) else { continue };
        let Some(id) = of_rank.get("engine_id") else { continue };
        ids.push((rank, engine_id(id)?));
    }
    ids.sort_unstable();
    ids.dedup_by_key(|(rank, _)| *rank);
    match (ids.first(), said.get("engine_id")) {
        (Some((0, _)), _) => Ok(ids.into()),
        (_, Some(id)) => Ok([(0, engine_id(id)?)].into()),
        _ => Err("no engine_id in it, nor one of rank 0"),
    }
}

fn engine_id(id: &Value) -> Result<Box<str>, &'static str> {
    let fit = |id: &&str| !id.is_empty() && id.len() <= MAX_ID_BYTES && !id.contains(char::is_control);
    id.as_str().filter(fit).map(Into::into).ok_or("engine_id is no short text")
}

/// Asks for as long as the worker is known: until there is an answer, then now and then, and whenever everything else is
/// asked for anew.
pub(super) async fn keep_asking(tended: &Tended) {
    let Some(port) = tended.bootstrap_port else { return };
    tended.resolved().await;
    let mut asked = tended.asked.subscribe();
    let mut complained = false;
    loop {
        let pause = match ask(tended, port).await {
            Ok(ids) => {
                complained = false;
                tended.tell(News::EngineIds(ids));
                tended.pace.look_up_again
            }
            Err(why) => {
                if !std::mem::replace(&mut complained, true) {
                    tracing::warn!(worker = %tended.url, reason = %why, "Mooncake's id of the engine cannot be asked for");
                }
                tended.pace.eager
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // The sender lives as long as `tended`.
            _ = asked.changed() => {}
        }
    }
}

async fn ask(tended: &Tended, port: u16) -> Result<EngineIds, String> {
    let known = tended.addrs.borrow().clone().unwrap_or_default();
    let addrs: Vec<SocketAddr> = known.iter().map(|addr| SocketAddr::new(addr.ip(), port)).collect();
    let authority = format!("{}:{port}", tended.endpoint.bracketed());
    let url = format!("http://{authority}/query");
    // The bootstrap server is not the engine: it has no use for the engine's key.
    let (limit, api_key) = (tended.health_timeout, None);
    match (Question { addrs: &addrs, authority: &authority, path: "/query", api_key, limit }).get().await {
        Ok(Reply { status: 200, truncated: false, body }) => engine_ids(&body).map_err(|why| format!("{url}: {why}")),
        Ok(Reply { status: 200, .. }) => Err(format!("{url}: the answer is too long")),
        Ok(Reply { status, .. }) => Err(format!("{url} answers {status}")),
        Err(failure) => Err(format!("{url}: {failure}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_come_alone_or_by_rank() {
        let read = |body: &str| engine_ids(body.as_bytes()).map(|ids| ids.into_vec());
        assert_eq!(read(r#"{"engine_id":"e","x":1}"#), Ok(vec![(0, "e".into())]));
        let both = r#"{"engine_id":"a","0":{"engine_id":"a"},"1":{"engine_id":"b"}}"#;
        assert_eq!(read(both), Ok(vec![(0, "a".into()), (1, "b".into())]));
        let by_rank = r#"{"10":{"engine_id":"k"},"0":{"engine_id":"a","worker_addr":{}},"x":{"engine_id":"?"},"2":{},"1":{"engine_id":"b"}}"#;
        assert_eq!(read(by_rank), Ok(vec![(0, "a".into()), (1, "b".into()), (10, "k".into())]));
        let long = format!(r#"{{"engine_id":"{}"}}"#, "x".repeat(MAX_ID_BYTES + 1));
        for bad in [
            "",
            "[]",
            "{}",
            r#"{"engine_id":7}"#,
            r#"{"engine_id":""}"#,
            r#"{"engine_id":"a\nb"}"#,
            r#"{"1":{"engine_id":"b"}}"#,
            r#"{"0":{"engine_id":null}}"#,
            r#"{"0":"e"}"#,
            &long,
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
