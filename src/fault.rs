//! Every way a request can fail, in one table.
//!
//! Takes a [`What`], gives status, blame, error code and label. Never does I/O; a room that meets a
//! fault returns it, and `flow` alone decides what the client sees of it.

use std::fmt::{self, Write as _};

/// The room in which the fault was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    Receive,
    Inspect,
    Admit,
    Route,
    Dispatch,
    Relay,
}

/// Who is to blame; decides what the breaker and the logs make of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    Client,
    Worker,
    Gateway,
}

macro_rules! faults {
    ($( $what:ident = $at:ident $whose:ident $status:literal $code:literal $retry:literal $text:literal; )*) => {
        /// What went wrong. The variants' texts are what the client reads.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum What { $( #[doc = $text] $what, )* }

        impl What {
            /// All faults, in table order.
            pub const ALL: &'static [What] = &[ $( What::$what, )* ];

            /// The fault's row of the table.
            pub const fn row(self) -> Row {
                match self {
                    $( What::$what => Row { at: Where::$at, whose: Whose::$whose, status: $status, code: $code, retry: $retry, text: $text }, )*
                }
            }
        }
    };
}

/// A row of the fault table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The room that meets it.
    pub at: Where,
    /// Who is to blame.
    pub whose: Whose,
    /// HTTP status for the client; 0 where no answer is possible (the connection ends).
    pub status: u16,
    /// Machine-readable code: `error.code` of the body, the `X-Corelane-Error` header and the metric label.
    pub code: &'static str,
    /// Whether another worker may be tried, as long as the client has not seen a byte.
    pub retry: bool,
    /// Sentence for people; a detail may follow.
    pub text: &'static str,
}

faults! {
    // what              room     blame   status code                     retry  text
    BadRequestLine     = Receive  Client  400 "bad_request_line"          false "The request line is not valid HTTP/1.1.";
    BadHeader          = Receive  Client  400 "bad_header"                false "A header field is not valid HTTP/1.1.";
    BadFraming         = Receive  Client  400 "bad_framing"               false "The body length is stated in a contradictory or invalid way.";
    BadChunk           = Receive  Client  400 "bad_chunk"                 false "The chunked body is not well formed.";
    BadHost            = Receive  Client  400 "bad_host"                  false "HTTP/1.1 needs exactly one valid Host header.";
    TargetTooLong      = Receive  Client  414 "target_too_long"           false "The request target is too long.";
    HeadTooLarge       = Receive  Client  431 "head_too_large"            false "The request head is too large.";
    TooManyHeaders     = Receive  Client  431 "too_many_headers"          false "The request has too many header fields.";
    BodyTooLarge       = Receive  Client  413 "body_too_large"            false "The request body is larger than this gateway accepts.";
    ExpectationUnknown = Receive  Client  417 "expectation_failed"        false "Only `Expect: 100-continue` is supported.";
    MethodUnknown      = Receive  Client  501 "method_not_implemented"    false "This method is not implemented.";
    CodingUnknown      = Receive  Client  501 "transfer_coding_unknown"   false "The only supported transfer coding is chunked.";
    UpgradeRefused     = Receive  Client  501 "upgrade_not_supported"     false "Protocol upgrades are not supported.";
    VersionUnknown     = Receive  Client  505 "http_version_unsupported"  false "Only HTTP/1.1 and HTTP/1.0 are supported.";
    HeadTimeout        = Receive  Client  408 "head_timeout"              false "The request head did not arrive in time.";
    BodyTimeout        = Receive  Client  408 "body_timeout"              false "The request body did not arrive in time.";
    ClientGone         = Receive  Client  0   "client_gone"               false "The client left before its answer began.";
    TooManyConnections = Receive  Gateway 503 "too_many_connections"      false "The gateway has as many connections as it is allowed to.";
    InvalidApiKey      = Receive  Client  401 "invalid_api_key"           false "The API key is missing or not valid.";
    PathUnknown        = Receive  Client  404 "not_found"                 false "No such route.";
    MethodNotAllowed   = Receive  Client  405 "method_not_allowed"        false "This route does not support the method.";
    BadJson            = Inspect  Client  400 "invalid_json"              false "The body is not valid JSON.";
    BadField           = Inspect  Client  400 "invalid_field"             false "A field of the body has the wrong type.";
    PairSamples        = Inspect  Client  400 "samples_not_supported"     false "Several samples of a prompt (`n` above 1) are not supported with SGLang prefill/decode pairs: send a request for each.";
    BadMultipart       = Inspect  Client  400 "invalid_multipart"         false "The body is not valid multipart/form-data.";
    QueueFull          = Admit    Gateway 429 "queue_full"                false "The gateway has as many requests as it is allowed to, and as many wait.";
    QueueTimeout       = Admit    Gateway 408 "queue_timeout"             false "The request waited too long for others to end.";
    ModelUnknown       = Route    Client  404 "model_not_found"           false "No worker serves this model.";
    NoWorker           = Route    Gateway 503 "no_usable_worker"          false "No worker is usable at the moment.";
    WorkersFull        = Route    Gateway 429 "workers_full"              false "All usable workers have as many requests as they are allowed to.";
    ShuttingDown       = Route    Gateway 503 "shutting_down"             false "The gateway is shutting down.";
    ConnectFailed      = Dispatch Worker  502 "worker_unreachable"        true  "The worker could not be reached.";
    ConnectTimeout     = Dispatch Worker  504 "worker_connect_timeout"    true  "The worker did not accept the connection in time.";
    OutOfDescriptors   = Dispatch Gateway 503 "out_of_descriptors"        false "The gateway has no file descriptor left for a connection to a worker.";
    StaleConnection    = Dispatch Gateway 502 "stale_connection"          false "A kept connection to the worker turned out dead, and there was no further attempt.";
    WorkerReset        = Dispatch Worker  502 "worker_reset"              false "The worker closed the connection before it answered.";
    WorkerGaveUp       = Dispatch Client  502 "worker_gave_up"            false "The worker closed the connection before the rest of the body had come.";
    BadAnswer          = Dispatch Worker  502 "worker_bad_answer"         false "The worker's answer is not valid HTTP/1.1.";
    RequestTimeout     = Dispatch Worker  504 "request_timeout"           false "The request took longer than this gateway allows.";
    TimeUsedUp         = Dispatch Gateway 504 "request_time_used_up"      false "The time that this gateway allows a request was over before the worker had had half of it.";
    FirstByteTimeout   = Dispatch Worker  504 "worker_silent"             false "The worker did not answer in time.";
    OutOfMemory        = Receive  Gateway 503 "out_of_buffers"            false "The gateway holds as many bytes of bodies as it is allowed to.";
    Cut                = Relay    Worker  0   "worker_cut"                false "The worker's answer broke off.";
    CutBadFraming      = Relay    Worker  0   "worker_bad_framing"        false "The worker's answer broke its own framing.";
    CutTimeout         = Relay    Worker  0   "request_timeout_midway"    false "The answer took longer than this gateway allows.";
    CutUsedUp          = Relay    Gateway 0   "request_time_used_up_midway" false "The time that this gateway allows a request was over before the worker, which was answering, had had half of it.";
    CutStalled         = Relay    Worker  0   "worker_stalled"            false "The worker's answer did not go on in time.";
    CutEnding          = Relay    Gateway 0   "shutdown_midway"           false "The gateway ended before the answer was complete.";
    ClientLeft         = Relay    Client  0   "client_left"               false "The client left before its answer was complete.";
    ClientStalled      = Relay    Client  0   "client_stalled"            false "The client stopped reading or sending, or it was waited for when the time of the request was over.";
    Panic              = Relay    Gateway 0   "internal_error"            false "The gateway met an internal error.";
}

impl Where {
    /// Lower-case name, as in the written table.
    pub const fn name(self) -> &'static str {
        match self {
            Where::Receive => "receive",
            Where::Inspect => "inspect",
            Where::Admit => "admit",
            Where::Route => "route",
            Where::Dispatch => "dispatch",
            Where::Relay => "relay",
        }
    }
}

impl Whose {
    /// Lower-case name, as in the written table.
    pub const fn name(self) -> &'static str {
        match self {
            Whose::Client => "client",
            Whose::Worker => "worker",
            Whose::Gateway => "gateway",
        }
    }
}

/// The table as the text of `tuning/faults.md`.
pub fn markdown() -> String {
    let mut page = String::from(
        "# Faults\n\nWhat a client is told when its request fails here: the status, and the code as `error.code` of the body \
         and as `X-Corelane-Error`. The code is also the label of `corelane_faults_total`. A status of – means that there \
         is nothing left to answer, that the answer has begun, or that the gateway has a fault of its own: the connection ends, \
         with a reset where its end would make the answer look whole or the client takes nothing, else so that length or \
         chunks tell that something is missing. *Retried*: another worker may be \
         tried, as long as the client has not seen a byte. Answers of workers, errors too, pass as they came and are \
         none of these. Codes of a pair's worker begin with `prefill_` or `decode_` (the label does not). Written from the table in `src/fault.rs` \
         (`CORELANE_BLESS=1 cargo test faults_page_matches_the_table` rewrites this page).\n\n\
         | code | status | whose | met in | retried | what the client reads |\n|---|---|---|---|---|---|\n",
    );
    for row in What::ALL.iter().map(|what| what.row()) {
        let Row { code, at, whose, text, .. } = row;
        let status = if row.status == 0 { "–".to_owned() } else { row.status.to_string() };
        let (at, whose, retried) = (at.name(), whose.name(), if row.retry { "yes" } else { "" });
        let _ = writeln!(page, "| `{code}` | {status} | {whose} | {at} | {retried} | {text} |");
    }
    page
}

/// Which worker of a pair; the discriminants are places in arrays of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Prefill = 0,
    Decode = 1,
}

impl Side {
    /// What codes of faults of this worker begin with.
    pub const fn prefix(self) -> &'static str {
        match self {
            Side::Prefill => "prefill_",
            Side::Decode => "decode_",
        }
    }
}

/// One fault of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Which row of the table.
    pub what: What,
    /// The worker of a pair that it concerns; `None` where there is no pair.
    pub side: Option<Side>,
    /// What the row's sentence cannot know (an offset, a name), for the client; empty for none.
    pub detail: Box<str>,
}

impl Fault {
    /// A fault with a detail that is appended to the row's sentence.
    pub fn with(what: What, detail: impl Into<Box<str>>) -> Self {
        Fault { what, side: None, detail: detail.into() }
    }

    /// The fault, with its code naming a worker of a pair where it is a worker's.
    pub fn of(self, side: Side) -> Self {
        let named = self.row().whose == Whose::Worker;
        Fault { side: named.then_some(side), ..self }
    }

    /// What the row's code begins with; empty but for pairs.
    pub fn prefix(&self) -> &'static str {
        self.side.map_or("", Side::prefix)
    }

    /// The fault's row of the table.
    pub fn row(&self) -> Row {
        self.what.row()
    }
}

impl From<What> for Fault {
    fn from(what: What) -> Self {
        Fault { what, side: None, detail: Box::default() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().text)?;
        if !self.detail.is_empty() {
            write!(f, " {}", self.detail)?;
        }
        Ok(())
    }
}

impl std::error::Error for Fault {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_page_matches_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tuning/faults.md");
        if std::env::var_os("CORELANE_BLESS").is_some() {
            std::fs::write(path, markdown()).expect("the page can be written");
        }
        let page = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            page == markdown(),
            "tuning/faults.md is stale; CORELANE_BLESS=1 cargo test faults_page_matches_the_table rewrites it"
        );
    }

    #[test]
    fn codes_are_unique_and_statuses_are_errors() {
        for (i, a) in What::ALL.iter().enumerate() {
            let row = a.row();
            assert!(row.status == 0 || (400..600).contains(&row.status), "{a:?}");
            assert_eq!(row.status == 0, matches!(a, What::ClientGone) || row.at == Where::Relay, "{a:?}");
            for b in &What::ALL[i + 1..] {
                assert_ne!(row.code, b.row().code, "{a:?} and {b:?}");
            }
        }
    }
}
