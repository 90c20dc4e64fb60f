//! Simulated clients: what they ask, how they send it, how they read, when they leave.
//!
//! Takes a plan's dice, gives requests as bytes and notes of what came back. Never knows what a right answer is, only
//! what HTTP/1.1 says about where it ends.

use std::cell::Cell;
use std::rc::Rc;

use corelane::config::{Backend, Relay};

use crate::facts::{Answer, Asked, Ended, Facts, Kind};
use crate::http::{Body, Head};
use crate::net::{Line, Peer};
use crate::plan::{Fleet, KEY, Mood, Plan};
use crate::world::{Bell, Who, World};

/// Where a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    Chat,
    Completions,
    Generate,
    Embeddings,
    /// Nobody looks into its body, which may follow to a worker that is chosen without it.
    Upload,
    Info,
    Holder,
    Models,
    Health,
    Unknown,
}

impl Route {
    fn path(self) -> &'static str {
        match self {
            Route::Chat => "/v1/chat/completions",
            Route::Completions => "/v1/completions",
            Route::Generate => "/generate",
            Route::Embeddings => "/v1/embeddings",
            Route::Upload => UPLOAD,
            Route::Info => "/model_info",
            Route::Holder => "/v1/responses/resp_1",
            Route::Models => "/v1/models",
            Route::Health => "/health",
            Route::Unknown => "/v1/unknown",
        }
    }

    pub fn generates(self) -> bool {
        matches!(self, Route::Chat | Route::Completions | Route::Generate)
    }

    pub fn is_forwarded(self) -> bool {
        !matches!(self, Route::Models | Route::Health | Route::Unknown)
    }

    fn has_body(self) -> bool {
        self.generates() || matches!(self, Route::Embeddings | Route::Upload)
    }
}

/// The extra route.
pub const UPLOAD: &str = "/up";

/// One request as it will be sent.
pub struct Ask {
    pub route: Route,
    /// All its bytes.
    pub bytes: Vec<u8>,
    /// Where its head ends.
    pub head_end: usize,
    /// The body as a worker has to get it, but for what pairs are told.
    pub forwarded: Vec<u8>,
    pub streams: bool,
    pub logprobs: bool,
    /// What is wrong with it: no worker may see it then.
    pub malformed: Option<&'static str>,
    /// The client waits to be invited.
    pub expects: bool,
    pub is_head: bool,
    /// It sends no more than so many bytes, and waits.
    pub stops: Option<usize>,
    /// Longest pause between two pieces.
    pub gap_us: u64,
}

/// Heads that no gateway may take.
const BAD_HEADS: &[(&str, &str)] = &[
    ("request line", "GET  / HTTP/1.1\r\nHost: g\r\n\r\n"),
    ("version", "GET /health HTTP/3.0\r\nHost: g\r\n\r\n"),
    (
        "both framings",
        "POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    ),
    ("two lengths", "POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
    ("length", "POST /generate HTTP/1.1\r\nHost: g\r\nContent-Length: +2\r\n\r\n{}"),
    ("space before colon", "GET /model_info HTTP/1.1\r\nHost : g\r\n\r\n"),
    ("no host", "GET /model_info HTTP/1.1\r\n\r\n"),
    ("two hosts", "GET /model_info HTTP/1.1\r\nHost: g\r\nHost: h\r\n\r\n"),
    ("folding", "GET /model_info HTTP/1.1\r\nHost: g\r\nA: b\r\n c\r\n\r\n"),
    ("bare LF", "GET /model_info HTTP/1.1\nHost: g\n\n"),
    ("method", "BREW /model_info HTTP/1.1\r\nHost: g\r\n\r\n"),
    ("old chunks", "POST /generate HTTP/1.0\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
    ("coding", "POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
    ("upgrade", "GET /model_info HTTP/1.1\r\nHost: g\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"),
    ("expectation", "POST /generate HTTP/1.1\r\nHost: g\r\nExpect: wonders\r\nContent-Length: 2\r\n\r\n{}"),
    ("chunk size", "POST /generate HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n"),
];

impl Ask {
    /// A request with this token.
    pub fn new(world: &World, plan: &Plan, token: usize, last: bool) -> Ask {
        let n = plan.fault();
        let fault = |often: u64| world.once_in(n * often);
        if fault(4) {
            let (what, text) = world.one(BAD_HEADS);
            let mut text = text.to_owned();
            if world.once_in(5) {
                text = match world.roll(0, 4) {
                    0 | 3 => format!("GET /{} HTTP/1.1\r\nHost: g\r\n\r\n", "a".repeat(9_000)),
                    1 => format!("GET /health HTTP/1.1\r\nHost: g\r\na: {}\r\n\r\n", "b".repeat(70_000)),
                    _ => format!("GET /health HTTP/1.1\r\nHost: g\r\n{}\r\n", "c: d\r\n".repeat(300)),
                };
            }
            let head_end = text.len();
            return Ask { malformed: Some(what), head_end, ..Ask::blank(Route::Unknown, text.into_bytes()) };
        }
        let route = match world.roll(0, 20) {
            _ if plan.uploads && !world.once_in(3) => Route::Upload,
            0..8 => Route::Chat,
            8..11 => Route::Completions,
            11..15 => Route::Generate,
            15 => world.one(&[Route::Embeddings, Route::Upload]),
            16 => Route::Info,
            17 => Route::Holder,
            18 => world.one(&[Route::Models, Route::Health]),
            _ => world.one(&[Route::Upload, Route::Upload, Route::Unknown]),
        };
        let old = world.once_in(10);
        let is_head = route == Route::Info && world.once_in(3);
        let method = if route.has_body() {
            "POST"
        } else if is_head {
            "HEAD"
        } else {
            "GET"
        };
        let mut ask = Ask { is_head, ..Ask::blank(route, Vec::new()) };
        let mut body = String::new();
        if route.has_body() {
            ask.streams = route.generates() && world.once_in(2);
            ask.logprobs = route == Route::Generate && !ask.streams && world.once_in(2);
            let most = match route {
                Route::Upload => world.one(&[300, 90_000, 90_000]),
                _ => world.one(&[50, 300, 300, 2_000, 20_000, 40_000, 90_000]),
            };
            let prompt = format!("{token:>4} ") + &"what is it? ".repeat(world.roll(0, most / 12 + 1) as usize);
            let value = match route {
                Route::Chat => format!(r#""messages":[{{"role":"user","content":"{prompt}"}}]"#),
                Route::Completions => format!(r#""prompt":"{prompt}""#),
                Route::Generate => format!(r#""text":"{prompt}""#),
                _ => format!(r#""input":"{prompt}""#),
            };
            let model = if fault(12) { "unknown" } else { "m" };
            ask.malformed = (model == "unknown").then_some("model");
            let samples = plan.fleet == Fleet::Pairs(Backend::Sglang) && route == Route::Chat && fault(12);
            let mut extra = "";
            if route == Route::Upload {
                ask.malformed = None;
            } else if samples {
                (ask.malformed, extra) = (Some("samples"), r#","n":2"#);
            } else if fault(20) {
                (ask.malformed, extra) = (Some("field"), r#","model":5"#);
            }
            let logprobs = if ask.logprobs { r#","return_logprob":true"# } else { "" };
            body = format!(r#"{{"model":"{model}",{value},"stream":{}{logprobs}{extra},"max_tokens":5}}"#, ask.streams);
            ask.forwarded = body.clone().into_bytes();
            if world.once_in(12) && route != Route::Upload {
                body.insert_str(1, r#""bootstrap_room":7,"#);
            }
            if fault(15) && route != Route::Upload {
                body.truncate(body.len() - 1);
                ask.malformed = Some("JSON");
            }
        }
        let chunked = !body.is_empty() && !old && world.once_in(4);
        ask.expects = !body.is_empty() && !old && world.once_in(10);
        let opens = plan.config.api_keys.is_empty() || !fault(10);
        let wrong_method = route.has_body() && fault(20);
        let method = if wrong_method { "PUT" } else { method };
        let close = last && world.once_in(2);
        let mut head = format!("{method} {} HTTP/1.{}\r\n", route.path(), u8::from(!old));
        head += &format!("Host: gateway\r\nx-sim: {token}\r\nx-smg-routing-key: k{}\r\n", world.roll(0, 3));
        if !plan.config.api_keys.is_empty() {
            head += &format!("Authorization: Bearer {}\r\n", if opens { KEY } else { "abracadabra" });
        }
        if !opens && route != Route::Health || wrong_method {
            ask.malformed = Some("key or method");
        }
        if close {
            head += "Connection: close\r\n";
        } else if old && world.once_in(2) {
            head += "Connection: keep-alive\r\n";
        }
        if ask.expects {
            head += "Expect: 100-continue\r\n";
        }
        match () {
            () if chunked => head += "Transfer-Encoding: chunked\r\n",
            () if !body.is_empty() => head += &format!("Content-Length: {}\r\n", body.len()),
            () => {}
        }
        ask.bytes = (head + "\r\n").into_bytes();
        ask.head_end = ask.bytes.len();
        if chunked {
            let mut rest = body.as_bytes();
            while !rest.is_empty() {
                let n = world.portion(rest.len().min(world.one(&[50, 5_000, 100_000]))).min(rest.len());
                ask.bytes.extend_from_slice(format!("{n:X}\r\n").as_bytes());
                ask.bytes.extend_from_slice(&rest[..n]);
                ask.bytes.extend_from_slice(b"\r\n");
                rest = &rest[n..];
            }
            ask.bytes.extend_from_slice(b"0\r\n\r\n");
        } else {
            ask.bytes.extend_from_slice(body.as_bytes());
        }
        if fault(15) || route == Route::Upload && n > 0 && world.once_in(6) {
            ask.stops = Some(world.roll(1, ask.bytes.len() as u64) as usize);
            ask.malformed = Some("its end");
        }
        ask.gap_us = world.one(&[0, 0, 0, 200, 5_000]);
        if fault(8) || route == Route::Upload && n > 0 && world.once_in(2) {
            ask.gap_us = world.one(&[400_000, 400_000, 900_000]);
        }
        ask
    }

    /// Whether a worker may see it: it is as it should be, or what is wrong shows only when a part of it is on its way.
    pub fn may_be_seen(&self, plan: &Plan) -> bool {
        let follows = self.route == Route::Upload
            && plan.config.relay == Relay::Splice
            && self.malformed == Some("its end")
            && self.stops.is_some_and(|at| at >= self.head_end);
        follows || self.malformed.is_none() && self.route.is_forwarded()
    }

    fn blank(route: Route, bytes: Vec<u8>) -> Ask {
        Ask {
            route,
            bytes,
            head_end: 0,
            forwarded: Vec::new(),
            streams: false,
            logprobs: false,
            malformed: None,
            expects: false,
            is_head: false,
            stops: None,
            gap_us: 0,
        }
    }
}

/// How a client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Fin,
    Rst,
    /// It stops sending, and reads on.
    Half,
}

/// When a client leaves.
#[derive(Clone, Copy, Debug)]
enum When {
    /// Behind so many bytes of its request.
    Sending(usize),
    /// So long after it was sent.
    Sent(u64),
    /// When so many bytes of the answer have come.
    Reading(usize),
}

/// How it reads.
#[derive(Clone, Copy, Debug)]
enum Reading {
    Prompt,
    /// So many bytes at a time, with pauses.
    Slow(usize),
    /// No further than that.
    Stops(usize),
}

/// How long a client that does not read stays.
const BORED_US: u64 = 30_000_000;

/// One connection of a client's.
pub struct Client {
    world: Rc<World>,
    facts: Rc<Facts>,
    plan: Rc<Plan>,
    peer: Peer,
    asked: Vec<Rc<Asked>>,
    /// Rung when a request has ended, in whatever way.
    done: Vec<Rc<Bell>>,
    /// Rung when its body may come.
    invited: Vec<Rc<Bell>>,
    pipelines: bool,
    leaves: Option<(usize, When, How)>,
    reading: Reading,
    read: Cell<usize>,
    /// No more is sent.
    over: Cell<bool>,
    gone: Rc<Bell>,
}

impl Client {
    /// A client with its requests; it begins to send when [`Client::start`] is called.
    pub fn new(world: &Rc<World>, facts: &Rc<Facts>, plan: &Rc<Plan>, number: usize, line: &Rc<Line>) -> Rc<Client> {
        let requests = match plan.mood {
            Mood::Storm => world.roll(2, 14),
            _ => world.roll(1, 5),
        } as usize;
        let n = plan.fault();
        let asked: Vec<Rc<Asked>> = (0..requests)
            .map(|nth| {
                let mut all = facts.asked.borrow_mut();
                let asked = Rc::new(Asked {
                    client: number,
                    line: line.clone(),
                    nth,
                    ask: Ask::new(world, plan, all.len(), nth + 1 == requests),
                    begun_us: Cell::new(None),
                    sent_us: Cell::new(None),
                    left_us: Cell::new(None),
                    leaves: Cell::new(false),
                    slow: Cell::new(false),
                    end: Default::default(),
                });
                all.push(asked.clone());
                asked
            })
            .collect();
        let leaves = world.once_in(n * 2).then(|| {
            let at = world.roll(0, requests as u64) as usize;
            let when = match world.roll(0, 3) {
                0 => When::Sending(world.roll(0, asked[at].ask.bytes.len() as u64 + 1) as usize),
                1 => When::Sent(world.roll(0, world.one(&[100, 10_000, 1_000_000]))),
                _ => When::Reading(world.roll(1, world.one(&[100, 1_000, 50_000])) as usize),
            };
            asked[at].leaves.set(matches!(when, When::Sent(_)));
            (at, when, world.one(&[How::Fin, How::Rst, How::Half]))
        });
        let reading = match world.roll(0, 3) {
            _ if !world.once_in(n * 2) => Reading::Prompt,
            0 | 1 => Reading::Stops(world.roll(0, world.one(&[10, 1_000, 100_000])) as usize),
            _ => Reading::Slow(world.one(&[100, 3_000, 20_000])),
        };
        Rc::new(Client {
            world: world.clone(),
            facts: facts.clone(),
            plan: plan.clone(),
            peer: Peer::new(line),
            done: asked.iter().map(|_| Bell::new()).collect(),
            invited: asked.iter().map(|_| Bell::new()).collect(),
            // Half a request behind a whole one, and then no more.
            pipelines: world.once_in(5)
                || matches!(leaves, Some((1.., When::Sending(_), How::Half)) if world.once_in(2)),
            leaves,
            reading,
            read: Cell::new(0),
            over: Cell::new(false),
            gone: Bell::new(),
            asked,
        })
    }

    pub fn start(self: Rc<Self>) {
        let world = self.world.clone();
        let (writer, reader) = (self.clone(), self);
        world.spawn(Who::Client, async move { writer.write().await });
        world.spawn(Who::Client, async move {
            reader.read_all().await;
            reader.hang_up();
        });
    }

    /// Whatever has not ended never will.
    fn hang_up(&self) {
        self.over.set(true);
        self.peer.close();
        for (nth, asked) in self.asked.iter().enumerate() {
            if asked.end.borrow().is_none() && asked.begun_us.get().is_some() {
                self.ended(nth, if asked.left_us.get().is_some() { Kind::Left } else { Kind::Unserved });
            }
        }
        self.done.iter().chain(&self.invited).for_each(|bell| bell.ring());
    }

    fn ended(&self, nth: usize, kind: Kind) {
        let asked = &self.asked[nth];
        self.world.tell(|| {
            let text = match &kind {
                Kind::Answer(a) => format!("answer {} {} bytes of {:?} {:?}", a.status, a.body.len(), a.of, a.fault),
                Kind::Cut { reset, partial_head, answer } => {
                    format!("cut, reset {reset}, {partial_head} of a head, {:?}", answer.as_ref().map(|a| a.body.len()))
                }
                kind => format!("{kind:?}"),
            };
            format!("client {} request {nth}: {text}", asked.client)
        });
        *asked.end.borrow_mut() = Some(Ended { at_us: self.world.now_us(), kind });
        self.done[nth].ring();
        self.invited[nth].ring();
    }

    fn leave(&self, how: How) {
        if self.over.get() && how == How::Half || self.peer.is_closed() {
            return;
        }
        self.over.set(true);
        self.world.note("leave", self.asked[0].client as u64, how as u64, 0);
        // A half-close is leaving for a gateway that takes it for that, and for a request that is not all there.
        let serves = self.plan.config.half_close == corelane::config::HalfClose::Serve;
        for asked in self.asked.iter().filter(|asked| asked.end.borrow().is_none()) {
            if how != How::Half || !serves || asked.sent_us.get().is_none() {
                asked.left_us.set(asked.left_us.get().or(Some(self.world.now_us())));
            }
        }
        match how {
            How::Half => self.peer.shut(),
            How::Fin => self.peer.close(),
            How::Rst => self.peer.reset(),
        }
        if how != How::Half {
            self.gone.ring();
        }
    }

    // ── sending ─────────────────────────────────────────────────────────────────────────────────────────────────

    async fn write(self: Rc<Self>) {
        for nth in 0..self.asked.len() {
            if nth > 0 && !self.pipelines {
                self.done[nth - 1].rung().await;
            }
            if !self.over.get() {
                let pause_us = match self.world.roll(0, 12) {
                    0 if !matches!(self.plan.mood, Mood::Calm | Mood::Storm) => self.world.roll(0, 8_000_000),
                    1..6 => 0,
                    _ => self.world.roll(0, 50_000),
                };
                self.world.sleep(pause_us).await;
            }
            if self.over.get() || !self.send(nth).await {
                return;
            }
            if let Some((at, When::Sent(us), how)) = self.leaves
                && at == nth
            {
                let client = self.clone();
                self.world.after(us, move || client.leave(how));
            }
        }
    }

    /// Sends one request; false when no other follows.
    async fn send(&self, nth: usize) -> bool {
        let asked = &self.asked[nth];
        let ask = &asked.ask;
        let end = ask.stops.unwrap_or(ask.bytes.len());
        let leaves = match self.leaves {
            Some((at, When::Sending(behind), how)) if at == nth => Some((behind, how)),
            _ => None,
        };
        let mut at = 0;
        while at < end {
            if let Some((behind, how)) = leaves
                && at >= behind
            {
                self.leave(how);
                return false;
            }
            if ask.expects && at == ask.head_end {
                let bell = self.invited[nth].clone();
                self.world.after(500_000, move || bell.ring());
                self.invited[nth].rung().await;
                if asked.end.borrow().is_some() {
                    return false;
                }
            }
            let mut n = if ask.gap_us == 0 { end - at } else { self.world.portion(end - at) };
            if ask.expects && at < ask.head_end {
                n = n.min(ask.head_end - at);
            }
            if let Some((behind, _)) = leaves {
                n = n.min(behind - at);
            }
            if asked.begun_us.get().is_none() {
                asked.begun_us.set(Some(self.world.now_us()));
            }
            if self.peer.send(&ask.bytes[at..at + n]).await.is_err() || self.over.get() {
                return false;
            }
            at += n;
            if ask.gap_us > 0 && at < end {
                self.world.sleep(self.world.roll(0, ask.gap_us)).await;
                if self.over.get() {
                    return false;
                }
            }
        }
        self.world.note("sent", asked.client as u64, nth as u64, end as u64);
        if ask.stops.is_some() {
            return false;
        }
        asked.sent_us.set(Some(self.world.now_us()));
        true
    }

    // ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────

    /// More bytes; false when there will be none.
    async fn more(&self, buf: &mut Vec<u8>) -> bool {
        match self.reading {
            Reading::Prompt => {}
            Reading::Slow(bytes) => {
                self.mark_slow();
                let us = self.world.roll(0, 30_000);
                self.world.sleep(us).await;
                if self.peer.is_closed() {
                    return false;
                }
                let mut part = Vec::new();
                // Not more at a time than that; the network holds the rest back.
                let got = self.peer.recv_part(&mut part, bytes, &self.gone).await;
                buf.append(&mut part);
                return self.noted(got);
            }
            Reading::Stops(at) if self.read.get() >= at => {
                self.mark_slow();
                if self.gone.is_rung() {
                    return false;
                }
                // What the kernel has taken for it keeps nobody waiting but itself.
                let bored = self.gone.clone();
                self.world.after(BORED_US, move || bored.ring());
                self.peer.over_or(&self.gone).await;
                self.over.set(true);
                if !self.peer.is_over() && !self.peer.is_closed() && self.peer.line.is_sending(0) {
                    let client = self.asked[0].client;
                    self.world.violated(|| format!("client {client} takes nothing, and is waited for"));
                }
                return false;
            }
            Reading::Stops(_) => self.mark_slow(),
        }
        let got = self.peer.recv_part(buf, usize::MAX, &self.gone).await;
        self.noted(got)
    }

    fn mark_slow(&self) {
        self.asked.iter().filter(|asked| asked.end.borrow().is_none()).for_each(|asked| asked.slow.set(true));
    }

    fn noted(&self, got: Option<std::io::Result<usize>>) -> bool {
        let Some(Ok(n)) = got else { return false };
        self.read.set(self.read.get() + n);
        if let Some((_, When::Reading(bytes), how)) = self.leaves
            && self.read.get() >= bytes
            && n > 0
        {
            self.leave(how);
            return how == How::Half;
        }
        n > 0
    }

    async fn read_all(&self) {
        let mut buf = Vec::new();
        for nth in 0..self.asked.len() {
            match self.read_one(nth, &mut buf).await {
                Ok(true) => {}
                Ok(false) => break,
                Err(what) => {
                    let client = self.asked[nth].client;
                    return self.world.violated(|| format!("client {client}, request {nth}: it got {what}"));
                }
            }
        }
        if !self.world.once_in(3) && !self.peer.is_over() {
            // Some say goodbye themselves.
            let us = self.world.roll(0, 300_000);
            self.world.sleep(us).await;
            self.over.set(true);
            self.peer.shut();
        }
        while self.more(&mut buf).await {}
        let client = self.asked[0].client;
        let left = self.asked.iter().any(|asked| asked.left_us.get().is_some());
        if !buf.is_empty() && !left && !self.facts.turned_away.borrow().contains(&client) {
            self.world
                .violated(|| format!("client {client}: bytes behind the last answer: {}", crate::worker::shown(&buf)));
        }
    }

    /// Reads one answer. False when the connection has ended, or will.
    async fn read_one(&self, nth: usize, buf: &mut Vec<u8>) -> Result<bool, String> {
        let asked = &self.asked[nth];
        let head = loop {
            if let Some(head) = Head::take(buf) {
                let head = head?;
                if head.status()? >= 200 {
                    break head;
                }
                if !asked.ask.expects || head.first != "HTTP/1.1 100 Continue" || !head.fields.is_empty() {
                    return Err(format!("an interim answer that is not for it: {head:?}"));
                }
                self.invited[nth].ring();
                continue;
            }
            if !self.more(buf).await {
                self.broke_off(nth, None, buf.len());
                buf.clear();
                return Ok(false);
            }
        };
        if asked.begun_us.get().is_none() {
            if self.facts.turned_away.borrow().contains(&asked.client) {
                return Ok(false);
            }
            return Err(format!("an answer that it had not asked for: {head:?}"));
        }
        // Of half a head nobody can know its method.
        let cut_head = asked.ask.stops.is_some_and(|at| at < asked.ask.head_end);
        let none = asked.ask.is_head && !cut_head || matches!(head.status()?, 204 | 304);
        let mut body = Body::of(&head, none)?;
        let mut answer = Answer {
            status: head.status()?,
            body: Vec::new(),
            of: head.number("x-sim-answer"),
            fault: head.get("x-corelane-error").map(str::to_owned),
            closes: head.get("connection") == Some("close") || body.ends_with_connection(),
            by_close: body.ends_with_connection(),
        };
        loop {
            body.take(buf)?;
            if body.done {
                break;
            }
            if !self.more(buf).await {
                answer.body = body.bytes;
                let ends_well = self.peer.is_over() && !self.peer.line.is_reset(1) && self.peer.line.waiting(1) == 0;
                if answer.by_close && ends_well && !self.peer.is_closed() {
                    self.ended(nth, Kind::Answer(answer));
                } else {
                    self.broke_off(nth, Some(answer), 0);
                }
                buf.clear();
                return Ok(false);
            }
        }
        answer.body = body.bytes;
        let closes = answer.closes;
        self.ended(nth, Kind::Answer(answer));
        if closes {
            self.over.set(true);
        }
        Ok(!closes)
    }

    fn broke_off(&self, nth: usize, answer: Option<Answer>, partial_head: usize) {
        let asked = &self.asked[nth];
        if asked.begun_us.get().is_none() {
            return;
        }
        let reset = self.peer.line.is_reset(1);
        let kind = match asked.left_us.get() {
            Some(_) => Kind::Left,
            None => Kind::Cut { reset, answer, partial_head },
        };
        self.ended(nth, kind);
    }
}
