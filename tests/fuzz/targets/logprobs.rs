//! Log probabilities put into a decode's answer: what comes out is what a plain parser would make of both answers.
//!
//! Takes a prefill's answer and a decode's, a line with `=` between them, gives nothing. Never lets another member change.

use corelane::flow::relay::logprobs::{Prefilled, Stream};
use corelane::limits::MAX_PAIR_BATCH;
use serde_json::Value;

use super::cuts::cuts;

const BETWEEN: &[u8] = b"\n=\n";
const NAMES: [&str; 3] = ["input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"];

/// What a prefill said of one prompt.
type Prompt = [Option<Vec<Value>>; 3];

/// Checks one input.
pub fn logprobs(data: &[u8]) {
    let at = data.windows(BETWEEN.len()).position(|window| window == BETWEEN);
    let Some((prefill, decode)) = at.map(|at| (&data[..at], &data[at + BETWEEN.len()..])) else { return };
    for streamed in [false, true] {
        let known = plain_prompts(prefill, streamed);
        let Some(prefilled) = Prefilled::read(prefill, streamed) else {
            assert!(known.is_none_or(|known| known.iter().flatten().all(Option::is_none)));
            continue;
        };
        whole(&prefilled, decode, known.as_deref());
        stream(|| Prefilled::read(prefill, streamed).expect("it was read before"), decode, known.as_deref());
    }
}

fn whole(prefilled: &Prefilled, decode: &[u8], known: Option<&[Prompt]>) {
    let mut out = b"before".to_vec();
    let changed = prefilled.merge_json(decode, &mut out);
    let out = out.strip_prefix(b"before").expect("what was there stays");
    assert_eq!(changed, !out.is_empty());
    let got = if changed { out } else { decode };
    let (Some(known), Ok(mut want)) = (known, serde_json::from_slice::<Value>(decode)) else { return };
    match &mut want {
        Value::Array(all) => all.iter_mut().enumerate().for_each(|(nth, answer)| merge(known.get(nth), answer)),
        answer => merge(known.first(), answer),
    }
    assert_eq!(serde_json::from_slice::<Value>(got).expect("a merged answer is JSON"), want);
}

fn stream(prefilled: impl Fn() -> Prefilled, decode: &[u8], known: Option<&[Prompt]>) {
    let merged = |cuts: &[usize]| {
        let (mut stream, mut out, mut begin) = (Stream::new(prefilled()), Vec::new(), 0);
        for end in cuts.iter().copied().chain([decode.len()]) {
            stream.push(&decode[begin..end], &mut out);
            begin = end;
        }
        stream.finish(&mut out);
        out
    };
    let out = merged(&[]);
    for cuts in cuts(decode) {
        assert_eq!(merged(&cuts), out, "cut at {cuts:?}");
    }
    let Some(known) = known else { return };
    let (before, after) = (events(decode), events(&out));
    assert_eq!(before.len(), after.len());
    for (before, after) in before.iter().zip(after) {
        let is_whole = before.is_whole;
        match data(before.text)
            .filter(|_| is_whole)
            .map(|at| (at, serde_json::from_slice::<Value>(&before.text[at.0..at.1])))
        {
            Some((at, Ok(mut want))) => {
                let end = after.text.len() - (before.text.len() - at.1);
                merge(known.get(index(&want)), &mut want);
                let got: Value = serde_json::from_slice(&after.text[at.0..end]).expect("merged data are JSON");
                assert_eq!(got, want);
                assert_eq!((&before.text[..at.0], &before.text[at.1..]), (&after.text[..at.0], &after.text[end..]));
            }
            // What only the crate's reader takes (numbers beyond any range) may be merged.
            Some((_, Err(_))) => {}
            None => assert_eq!(before.text, after.text),
        }
    }
}

/// An event with the line ends behind it.
struct Event<'a> {
    text: &'a [u8],
    /// Whether an empty line ends it.
    is_whole: bool,
}

fn events(stream: &[u8]) -> Vec<Event<'_>> {
    let (mut events, mut begin, mut at) = (Vec::new(), 0, 0);
    for line in stream.split_inclusive(|byte| *byte == b'\n') {
        at += line.len();
        if matches!(line, b"\n" | b"\r\n") {
            events.push(Event { text: &stream[begin..at], is_whole: true });
            begin = at;
        }
    }
    if begin < stream.len() {
        events.push(Event { text: &stream[begin..], is_whole: false });
    }
    events
}

/// Where the data of an event lie, if they stand in one line.
fn data(event: &[u8]) -> Option<(usize, usize)> {
    let (mut found, mut at) = (Vec::new(), 0);
    for line in event.split_inclusive(|byte| *byte == b'\n') {
        if line.starts_with(b"data:") {
            found.push((at + 5, at + line.trim_ascii_end().len()));
        }
        at += line.len();
    }
    (found.len() == 1).then(|| found[0])
}

fn index(answer: &Value) -> usize {
    answer.get("index").and_then(Value::as_u64).map_or(0, |n| n as usize)
}

/// What a prefill said; `None` where the plain parser cannot tell.
fn plain_prompts(prefill: &[u8], streamed: bool) -> Option<Vec<Prompt>> {
    let mut known = Vec::new();
    if streamed {
        for event in events(prefill) {
            if let Some((start, end)) = data(event.text) {
                match serde_json::from_slice::<Value>(&event.text[start..end]) {
                    Ok(answer) => note(&mut known, index(&answer), &answer),
                    Err(_) if event.text[start..end].trim_ascii().starts_with(b"{") => return None,
                    Err(_) => {}
                }
            }
        }
        return Some(known);
    }
    match serde_json::from_slice(prefill).ok()? {
        Value::Array(all) => all.iter().enumerate().for_each(|(nth, answer)| note(&mut known, nth, answer)),
        answer => note(&mut known, 0, &answer),
    }
    Some(known)
}

fn note(known: &mut Vec<Prompt>, nth: usize, answer: &Value) {
    let Some(meta) = answer.get("meta_info").and_then(Value::as_object) else { return };
    if nth >= MAX_PAIR_BATCH as usize {
        return;
    }
    if known.len() <= nth {
        known.resize(nth + 1, Prompt::default());
    }
    for (kept, name) in known[nth].iter_mut().zip(NAMES) {
        if let Some(array) = meta.get(name).and_then(Value::as_array)
            && (kept.is_none() || !array.is_empty())
        {
            *kept = Some(array.clone());
        }
    }
}

fn merge(prompt: Option<&Prompt>, answer: &mut Value) {
    let Some(meta) = answer.get_mut("meta_info").and_then(Value::as_object_mut) else { return };
    for (first, name) in prompt.into_iter().flatten().zip(NAMES) {
        let Some(first) = first else { continue };
        match meta.get_mut(name) {
            None | Some(Value::Null) => drop(meta.insert(name.to_owned(), first.clone().into())),
            Some(Value::Array(second)) => drop(second.splice(..0, first.iter().cloned())),
            Some(_) => {}
        }
    }
}
