//! The routes: which paths exist, with which methods, what their bodies are, who answers them.
//!
//! Takes a path, gives a row. Never knows where a request goes: that is `flow`'s.

use std::fmt::Write as _;

/// What a route's body is and which of its fields carry the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// No body is expected; one that comes is forwarded unread.
    None,
    /// A JSON object; the prompt-bearing top-level keys, the first that is present counts.
    Json(&'static [&'static str]),
    /// `multipart/form-data` with a `model` part.
    Multipart,
    /// Anything; forwarded unread.
    Opaque,
}

/// Who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A worker that serves the body's model.
    Worker,
    /// Any usable worker.
    AnyWorker,
    /// The worker that knows the id in the path: workers are asked in turn while they say 404.
    Holder,
    /// The gateway: 200 while the process lives.
    Alive,
    /// The gateway: 200 or 503 with counts and a reason.
    Ready,
    /// The gateway: union of the usable workers' models.
    Models,
    /// The gateway: the model whose name ends the path, if a usable worker serves it.
    Model,
    /// The gateway: the harmless part of what workers say of themselves.
    ServerInfo,
}

/// A row of the route table.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// Exact path, or with `*` for one path segment.
    pub path: &'static str,
    /// Methods, as on the wire and in `Allow`.
    pub methods: &'static [&'static str],
    pub body: Body,
    pub answer: Answer,
    /// Whether a prompt is only taken apart or counted, not computed.
    pub counts_only: bool,
    /// Whether tokens are generated, so that pairs of prefill and decode workers can share the work.
    pub generates: bool,
}

impl Route {
    /// Whether the answer takes a pass over the prompt, so that the worker's cache has the prompt afterwards.
    pub const fn prefills(&self) -> bool {
        matches!(self.body, Body::Json(_)) && !self.counts_only
    }
}

const POST: &[&str] = &["POST"];
const GET: &[&str] = &["GET", "HEAD"];

const fn json(path: &'static str, prompt: &'static [&'static str]) -> Route {
    Route {
        path,
        methods: POST,
        body: Body::Json(prompt),
        answer: Answer::Worker,
        counts_only: false,
        generates: false,
    }
}

const fn generating(path: &'static str, prompt: &'static [&'static str]) -> Route {
    Route { generates: true, ..json(path, prompt) }
}

const fn counting(path: &'static str, prompt: &'static [&'static str]) -> Route {
    Route { counts_only: true, ..json(path, prompt) }
}

const fn get(path: &'static str, answer: Answer) -> Route {
    Route { path, methods: GET, body: Body::None, answer, counts_only: false, generates: false }
}

/// Every built-in route. The index is the route's number in the tallies.
pub const ROUTES: &[Route] = &[
    generating("/v1/chat/completions", &["messages"]),
    generating("/v1/completions", &["prompt"]),
    generating("/generate", &["text", "input_ids"]),
    json("/v1/embeddings", &["input"]),
    generating("/v1/responses", &["input"]),
    generating("/v1/messages", &["messages"]),
    counting("/v1/messages/count_tokens", &["messages"]),
    json("/v1/rerank", &["documents", "query"]),
    json("/rerank", &["documents", "query"]),
    json("/v1/classify", &["input"]),
    json("/classify", &["input"]),
    json("/v1/score", &["text_1", "query"]),
    json("/score", &["text_1", "query"]),
    json("/pooling", &["input", "messages"]),
    counting("/v1/tokenize", &["prompt", "messages"]),
    counting("/tokenize", &["prompt", "messages"]),
    counting("/v1/detokenize", &["tokens"]),
    counting("/detokenize", &["tokens"]),
    Route {
        path: "/v1/audio/transcriptions",
        methods: POST,
        body: Body::Multipart,
        answer: Answer::Worker,
        counts_only: false,
        generates: false,
    },
    Route {
        path: "/v1/responses/*",
        methods: GET,
        body: Body::None,
        answer: Answer::Holder,
        counts_only: false,
        generates: false,
    },
    Route {
        path: "/v1/responses/*/cancel",
        methods: POST,
        body: Body::Opaque,
        answer: Answer::Holder,
        counts_only: false,
        generates: false,
    },
    get("/health", Answer::Alive),
    get("/liveness", Answer::Alive),
    get("/readiness", Answer::Ready),
    get("/v1/models", Answer::Models),
    get("/v1/models/*", Answer::Model),
    // Names may have an owner before them.
    get("/v1/models/*/*", Answer::Model),
    get("/get_model_info", Answer::AnyWorker),
    get("/model_info", Answer::AnyWorker),
    get("/get_server_info", Answer::ServerInfo),
    get("/health_generate", Answer::AnyWorker),
];

/// The table as the text of `tuning/routes.md`.
pub fn markdown() -> String {
    let mut page = String::from(
        "# Routes\n\nEvery path that is answered on the public address, besides those of `[[extra_routes]]`; any other is \
         404, another method 405. `*` stands for one segment, which where a worker answers is not `.` or `..` and has \
         no encoded slash and no backslash. *Pairs*: a prefill and a decode worker serve it together, where the model \
         has such pairs. Written from the table in `src/config/routes.rs` \
         (`CORELANE_BLESS=1 cargo test routes_page_matches_the_table` rewrites this page).\n\n\
         | path | methods | body | answered by | pairs |\n|---|---|---|---|---|\n",
    );
    for route in ROUTES {
        let body = match route.body {
            Body::None => "–".to_owned(),
            Body::Json(keys) => {
                let keys: Vec<String> = keys.iter().map(|key| format!("`{key}`")).collect();
                let what = if route.counts_only { "taken apart, not computed" } else { "the prompt" };
                format!("JSON; {what}: {}", keys.join(", else "))
            }
            Body::Multipart => "multipart/form-data with a part `model`".to_owned(),
            Body::Opaque => "anything, unread".to_owned(),
        };
        let answer = match route.answer {
            Answer::Worker => "a worker that serves the model",
            Answer::AnyWorker => "any usable worker",
            Answer::Holder => "the worker that knows the id: they are asked in turn while they say 404",
            Answer::Alive => "the gateway: 200 while the process lives",
            Answer::Ready => "the gateway: 200 or 503, with counts and a reason",
            Answer::Models => "the gateway: the models of all usable workers",
            Answer::Model => "the gateway: the model, if a usable worker serves it",
            Answer::ServerInfo => "the gateway: the harmless part of what workers say of themselves",
        };
        let pairs = if route.generates { "yes" } else { "" };
        let _ = writeln!(page, "| `{}` | {} | {body} | {answer} | {pairs} |", route.path, route.methods.join(", "));
    }
    page
}

/// The row number of a path (without query), if the table has it.
pub fn find(path: &[u8]) -> Option<usize> {
    ROUTES.iter().position(|r| match r.answer {
        // The name of a model may have a slash, which clients encode; no worker sees it.
        Answer::Model => fits(r.path.as_bytes(), path, |segment| !segment.is_empty()),
        _ => matches(r.path.as_bytes(), path),
    })
}

/// Whether everybody takes it for one segment: it is neither empty nor `.` or `..`, and has nothing that becomes a slash
/// where it is decoded. Percent-encoding is looked through once, as a worker does.
pub fn is_segment(segment: &[u8]) -> bool {
    let mut dots = 0;
    let mut rest = segment;
    while let [first, more @ ..] = rest {
        let escape = if *first == b'%' { more.get(..2) } else { None };
        match (first, escape) {
            (b'\\', _) | (_, Some([b'2', b'f' | b'F'] | [b'5', b'c' | b'C'])) => return false,
            (_, Some([b'2', b'e' | b'E'])) => (dots, rest) = (dots + 1, &more[2..]),
            (b'.', _) => (dots, rest) = (dots + 1, more),
            _ => (dots, rest) = (3, more),
        }
    }
    dots > 2
}

/// Whether a path is what a pattern (with `*` for [one segment](is_segment)) says.
pub fn matches(pattern: &[u8], path: &[u8]) -> bool {
    fits(pattern, path, is_segment)
}

fn fits(pattern: &[u8], path: &[u8], may: fn(&[u8]) -> bool) -> bool {
    if !pattern.contains(&b'*') {
        return pattern == path;
    }
    let mut have = path.split(|b| *b == b'/');
    let mut want = pattern.split(|b| *b == b'/');
    loop {
        match (want.next(), have.next()) {
            (None, None) => return true,
            (Some(b"*"), Some(segment)) if may(segment) => {}
            (Some(w), Some(h)) if w == h && w != b"*" => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_page_matches_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tuning/routes.md");
        if std::env::var_os("CORELANE_BLESS").is_some() {
            std::fs::write(path, markdown()).expect("the page can be written");
        }
        let page = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            page == markdown(),
            "tuning/routes.md is stale; CORELANE_BLESS=1 cargo test routes_page_matches_the_table rewrites it"
        );
    }

    #[test]
    fn paths_are_found_exactly() {
        for (i, r) in ROUTES.iter().enumerate() {
            assert_eq!(find(r.path.replace('*', "resp_1").as_bytes()), Some(i), "{}", r.path);
        }
        for path in
            ["/", "", "/v1/chat/completions/", "/v1/chat", "/flush_cache", "/v1/responses/", "/v1/responses/a/b"]
        {
            assert_eq!(find(path.as_bytes()), None, "{path}");
        }
    }

    /// What a worker may take for another path is no path of the table.
    #[test]
    fn a_star_is_one_segment_for_everybody() {
        for one in ["a", "...", "a..", "..a", "resp_1", "%41", "a%20b", "%2", "%", "%252f", ".%2e.", "a.b"] {
            assert!(matches(b"/v1/responses/*", format!("/v1/responses/{one}").as_bytes()), "{one}");
        }
        for other in ["", ".", "..", "%2e", "%2E.", ".%2e", "a%2fb", "..%2f..%2fflush_cache", "a%5Cb", "a\\b"] {
            assert!(!matches(b"/v1/responses/*", format!("/v1/responses/{other}").as_bytes()), "{other}");
        }
    }
}
