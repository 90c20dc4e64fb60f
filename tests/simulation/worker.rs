//! Simulated workers: regular ones, and both sides of pairs.
//!
//! Takes connections of the gateway's, gives answers of every kind and breaks off in every way that the dice say. Never
//! accepts what no worker may see: a request of which a part is missing or another's, a connection that was not clean,
//! a room twice.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use corelane::config::{Backend, Role};

use crate::client::Route;
use crate::facts::{Delivery, Facts, Given};
use crate::http::Head;
use crate::net::{Line, Peer};
use crate::plan::{Fleet, MOST_BODY, Mood, Plan, manners};
use crate::world::{Bell, Who, World};

/// A worker.
pub struct Host {
    pub world: Rc<World>,
    pub facts: Rc<Facts>,
    pub plan: Rc<Plan>,
    /// Its place, which is its slot's number at first and its port's without one.
    pub id: usize,
    pub role: Role,
    /// Tokens by room or transfer, over all workers of a role.
    pub rooms: Rc<RefCell<BTreeMap<(u8, String), usize>>>,
}

/// How a connection is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exit {
    Fin,
    Rst,
    /// It is not: the other side has to.
    Stall,
}

/// What a worker is going to do with a request.
struct Act {
    /// It answers when it has read so much of the body.
    reads: Option<usize>,
    first_us: u64,
    gap_us: u64,
    status: u16,
    bytes: Vec<u8>,
    /// Where the head of the final answer ends in `bytes`.
    head_end: usize,
    /// It breaks off behind so many bytes.
    cut: Option<(usize, Exit)>,
    /// What it does behind the answer; `None`: it waits for the next request.
    exit: Option<Exit>,
    excess: bool,
    well: bool,
    late: bool,
}

impl Host {
    /// How long opening a connection takes and what comes of it: an error's number, 0 for nothing at all.
    pub fn fate_of_connect(&self) -> (u64, Result<(), i32>) {
        let world = &self.world;
        let delay_us = world.roll(0, 2_000);
        let fate = match self.plan.fault() {
            n if !world.once_in(3 * n) => Ok(()),
            _ => Err(world.one(&[libc::ECONNREFUSED, libc::ECONNREFUSED, libc::ECONNRESET, 0, libc::EMFILE])),
        };
        world.note("connect", self.id as u64, delay_us, fate.map_or(1, |()| 0));
        if fate.is_err() {
            self.facts.unconnected_us.borrow_mut().push(world.now_us());
        }
        (delay_us, fate)
    }

    /// Takes a connection.
    pub fn accept(self: &Rc<Self>) -> Rc<Line> {
        let line = Line::new(&self.world, manners(&self.world));
        let (host, peer) = (self.clone(), Peer::new(&line));
        self.world.spawn(Who::Worker, async move {
            host.serve(&peer).await;
            peer.close();
        });
        line
    }

    fn wrong(&self, what: impl FnOnce() -> String) {
        self.world.violated(|| format!("worker {}: {}", self.id, what()));
    }

    async fn serve(&self, peer: &Peer) {
        let world = &self.world;
        let idle_us = match self.plan.mood {
            Mood::Calm => 60_000_000,
            _ => world.one(&[60_000_000, 60_000_000, 5_000_000, 1_000_000, 50_000, 20_000, 5_000, 1_000, 0]),
        };
        let mut buf = Vec::new();
        // Whether another request may come: no, or not once what was said too much has arrived.
        let (mut clean, mut excess) = (true, false);
        let mut last: Option<Rc<Delivery>> = None;
        for nth in 0.. {
            let idle = Bell::new();
            let ring = idle.clone();
            world.after(if nth == 0 { 60_000_000 } else { idle_us }, move || ring.ring());
            if buf.is_empty() {
                match peer.recv_or(&mut buf, &idle).await {
                    None if world.once_in(4) => {
                        // What it said last may still be on its way.
                        if let Some(last) = &last {
                            last.silent.set(true);
                            last.well.set(false);
                        }
                        return peer.reset();
                    }
                    None | Some(Ok(false) | Err(_)) => return,
                    Some(Ok(true)) => {}
                }
            }
            if !clean {
                self.wrong(|| "a connection that is not clean was used again".into());
            }
            if excess {
                let (acked, since_us) = peer.line.acked_all(1);
                if acked && since_us + 2 * peer.line.manners.delay_us + 20_000 < world.now_us() {
                    self.wrong(|| "a connection on which too much was said was used again".into());
                }
            }
            let head = loop {
                match Head::take(&mut buf) {
                    Some(Ok(head)) => break head,
                    Some(Err(what)) => return self.wrong(|| format!("it was sent {what}")),
                    None => {}
                }
                if !matches!(peer.recv(&mut buf, usize::MAX).await, Ok(true)) {
                    return;
                }
            };
            let Some(delivery) = self.meet(&head, nth) else { return };
            match self.answer(&head, peer, &mut buf, &delivery).await {
                Some(soiled) => (clean, excess) = (clean && !soiled.0, soiled.1),
                None => return,
            }
            last = Some(delivery);
        }
    }

    /// Notes a request.
    fn meet(&self, head: &Head, nth: u32) -> Option<Rc<Delivery>> {
        let world = &self.world;
        let Some(token) = head.number("x-sim") else {
            self.wrong(|| format!("it was sent what nobody asked: {}", head.first));
            return None;
        };
        let token = token as usize;
        world.note("meet", self.id as u64, token as u64, nth.into());
        let asked = self.facts.asked.borrow()[token].clone();
        if !asked.ask.may_be_seen(&self.plan) {
            self.wrong(|| format!("it was sent request {token}, which is not for workers: {:?}", asked.ask.malformed));
        }
        if head.get("transfer-encoding").is_some() || head.get("expect").is_some() || head.get("connection").is_some() {
            self.wrong(|| format!("it was sent a head that is not the gateway's: {head:?}"));
        }
        let delivery = Rc::new(Delivery {
            token,
            worker: self.id,
            role: self.role,
            nth,
            at_us: world.now_us(),
            whole: Cell::new(false),
            whole_us: Cell::new(0),
            status: Cell::new(None),
            silent: Cell::new(true),
            late: Cell::new(false),
            said_us: Cell::new(None),
            left_us: Cell::new(None),
            stalls_us: Cell::new(None),
            well: Cell::new(false),
            empty: Cell::new(false),
        });
        self.facts.deliveries.borrow_mut().push(delivery.clone());
        Some(delivery)
    }

    /// Reads the body and answers. Gives whether the connection is soiled, and whether too much was said on it; `None`
    /// when it has ended.
    async fn answer(
        &self,
        head: &Head,
        peer: &Peer,
        buf: &mut Vec<u8>,
        delivery: &Rc<Delivery>,
    ) -> Option<(bool, bool)> {
        let world = &self.world;
        let length = head.number("content-length").unwrap_or(0) as usize;
        let act = self.decide(head, delivery, length);
        delivery.well.set(act.well);
        delivery.late.set(act.late);
        let reads = act.reads.unwrap_or(length);
        while buf.len() < reads {
            if !matches!(peer.recv(buf, usize::MAX).await, Ok(true)) {
                return None;
            }
        }
        if act.reads.is_none() {
            let body: Vec<u8> = buf.drain(..length).collect();
            self.read(&body, delivery);
        }
        if act.first_us > 0 {
            let (bell, since_us) = (Bell::new(), world.now_us());
            let ring = bell.clone();
            world.after(act.first_us, move || ring.ring());
            peer.over_or(&bell).await;
            if peer.is_over() {
                delivery.stalls_us.set(Some(since_us));
                delivery.left_us.set(Some(world.now_us()));
                return None;
            }
        }
        let end = act.cut.map_or(act.bytes.len(), |(at, _)| at);
        let mut at = 0;
        while at < end {
            let n = if act.gap_us == 0 { end - at } else { world.portion(end - at) };
            delivery.silent.set(false);
            if at + n >= act.head_end && act.head_end > 0 {
                delivery.status.set(Some(act.status));
            }
            if peer.send(&act.bytes[at..at + n]).await.is_err() {
                delivery.left_us.set(Some(world.now_us()));
                return None;
            }
            at += n;
            if act.gap_us > 0 && at < end {
                world.sleep(world.roll(0, act.gap_us)).await;
            }
        }
        delivery.said_us.set(Some(world.now_us()).filter(|_| act.cut.is_none()));
        world.note("answered", self.id as u64, delivery.token as u64, end as u64);
        match act.cut.map(|(_, exit)| exit).or(act.exit) {
            Some(Exit::Fin) => None,
            Some(Exit::Rst) => {
                // It may take with it what was said.
                delivery.silent.set(true);
                peer.reset();
                None
            }
            Some(Exit::Stall) => {
                delivery.stalls_us.set(Some(world.now_us()));
                peer.over().await;
                delivery.left_us.set(Some(world.now_us()));
                None
            }
            None => {
                if act.reads.is_some() {
                    while buf.len() < length {
                        if !matches!(peer.recv(buf, usize::MAX).await, Ok(true)) {
                            return None;
                        }
                    }
                    let body: Vec<u8> = buf.drain(..length).collect();
                    self.read(&body, delivery);
                }
                Some((false, act.excess))
            }
        }
    }

    /// Looks at a body that has arrived whole.
    fn read(&self, body: &[u8], delivery: &Delivery) {
        delivery.whole.set(true);
        delivery.whole_us.set(self.world.now_us());
        let asked = self.facts.asked.borrow()[delivery.token].clone();
        let want = &asked.ask.forwarded[..];
        let Fleet::Pairs(backend) = self.plan.fleet else {
            if body != want {
                self.wrong(|| format!("request {} arrived changed: {}", delivery.token, shown(body)));
            }
            return;
        };
        if !asked.ask.route.generates() {
            if body != want {
                self.wrong(|| format!("request {} arrived changed: {}", delivery.token, shown(body)));
            }
            return;
        }
        let Ok(json) = serde_json::from_slice::<serde_json::Value>(body) else {
            return self.wrong(|| format!("request {} arrived as no JSON: {}", delivery.token, shown(body)));
        };
        let kept = want.len() - 1;
        let only_added = body.starts_with(&want[..kept]);
        match (backend, self.role) {
            (Backend::Sglang, _) => {
                let Some(room) = json["bootstrap_room"].as_u64().filter(|room| *room > 0) else {
                    return self.wrong(|| format!("request {} has no room", delivery.token));
                };
                if !only_added {
                    self.wrong(|| format!("request {} arrived changed: {}", delivery.token, shown(body)));
                }
                self.enter(&room.to_string(), delivery);
            }
            (Backend::VllmMooncake, role) => {
                let Some(transfer) = json["kv_transfer_params"]["transfer_id"].as_str() else {
                    return self.wrong(|| format!("request {} has no transfer", delivery.token));
                };
                if role == Role::Decode && !only_added || role == Role::Prefill && json["max_tokens"] != 1 {
                    self.wrong(|| format!("request {} arrived changed: {}", delivery.token, shown(body)));
                }
                self.enter(transfer, delivery);
            }
            (_, Role::Prefill) => {
                if json["stream"] != false || json["max_tokens"] != 1 {
                    self.wrong(|| format!("a prefill leg is asked for more than a token: {}", shown(body)));
                }
            }
            _ => {
                if !only_added {
                    self.wrong(|| format!("request {} arrived changed: {}", delivery.token, shown(body)));
                }
                let params = match &json["kv_transfer_params"] {
                    serde_json::Value::Null => String::new(),
                    params => params.to_string(),
                };
                let handed = self.facts.handed.borrow();
                if !handed.iter().any(|(token, said)| *token == delivery.token && *said == params) {
                    self.wrong(|| format!("request {} hands over what no prefill said: {params}", delivery.token));
                }
            }
        }
    }

    /// A leg meets its partner where nobody else is, and nobody was.
    fn enter(&self, room: &str, delivery: &Delivery) {
        let mut rooms = self.rooms.borrow_mut();
        if rooms.insert((self.role as u8, room.to_owned()), delivery.token).is_some() {
            self.wrong(|| format!("room {room} was used twice, now by request {}", delivery.token));
        }
        let partner = if self.role == Role::Prefill { Role::Decode } else { Role::Prefill };
        if rooms.get(&(partner as u8, room.to_owned())).is_some_and(|token| *token != delivery.token) {
            self.wrong(|| format!("room {room} is shared by two requests"));
        }
    }

    /// What it is going to do with a request.
    fn decide(&self, head: &Head, delivery: &Delivery, length: usize) -> Act {
        let (world, n) = (&self.world, self.plan.fault());
        let asked = self.facts.asked.borrow()[delivery.token].clone();
        let ask = &asked.ask;
        let fault = |often: u64| world.once_in(n * often);
        let storms = self.plan.mood == Mood::Storm && !world.once_in(3);
        let statuses = &self.plan.config.retry.statuses;
        let status = match () {
            () if storms && !statuses.is_empty() => world.one(statuses),
            () if ask.route == Route::Holder && world.once_in(2) => 404,
            () if fault(2) => world.one(&[204, 304, 400, 404, 422, 429, 500, 502, 503, 503]),
            () => 200,
        };
        let id = self.facts.given.borrow().len() as u64;
        let bare = matches!(status, 204 | 304) || head.first.starts_with("HEAD ");
        let body = if matches!(status, 204 | 304) { Vec::new() } else { self.body(id, status, delivery, ask) };
        let (chunked, by_close) = match world.roll(0, 10) {
            _ if bare || body.is_empty() => (false, false),
            _ if ask.streams && status == 200 => (!world.once_in(8), false),
            0..5 => (false, false),
            5..9 => (true, false),
            _ => (false, true),
        };
        let old = by_close && world.once_in(3);
        let says_close = !by_close && n > 0 && world.once_in(12);
        let broken = if !bare && !body.is_empty() && fault(9) { world.one(&[1, 2, 3, 4, 5, 6, 6, 6]) } else { 0 };
        let mut bytes = Vec::new();
        let interims = if n > 0 && world.once_in(6) { world.one(&[1, 1, 2, 17]) } else { 0 };
        for _ in 0..interims {
            bytes.extend_from_slice(world.one(&[
                b"HTTP/1.1 100 Continue\r\n\r\n".as_slice(),
                b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n",
            ]));
        }
        let version = if old { "HTTP/1.0" } else { "HTTP/1.1" };
        bytes.extend_from_slice(
            match broken {
                1 => "HTP/1.1 200 OK\r\n".to_owned(),
                2 => "HTTP/1.1 101 Switching Protocols\r\n".to_owned(),
                _ => format!("{version} {status} Said\r\n"),
            }
            .as_bytes(),
        );
        bytes.extend_from_slice(format!("x-sim-answer: {id}\r\n").as_bytes());
        if status == 503 && world.once_in(2) {
            let secs = world.one(&[0, 1, 2, 60]);
            bytes.extend_from_slice(format!("retry-after: {secs}\r\n").as_bytes());
        }
        if says_close {
            bytes.extend_from_slice(b"connection: close\r\n");
        }
        match broken {
            3 => bytes.extend_from_slice(b"content-length: 3\r\ntransfer-encoding: chunked\r\n"),
            4 => bytes.extend_from_slice(b"content-length: 3\r\ncontent-length: 4\r\n"),
            5 => bytes.extend_from_slice(b"no colon here\r\n"),
            _ => {}
        }
        match () {
            () if bare && status == 204 => {}
            () if chunked || broken == 6 => bytes.extend_from_slice(b"transfer-encoding: chunked\r\n"),
            () if by_close => {}
            () => bytes.extend_from_slice(format!("content-length: {}\r\n", body.len()).as_bytes()),
        }
        bytes.extend_from_slice(b"\r\n");
        let head_end = bytes.len();
        match () {
            () if bare => {}
            () if broken == 6 => {
                bytes.extend_from_slice(format!("{:x}\r\n", body.len()).as_bytes());
                bytes.extend_from_slice(&body);
                bytes.extend_from_slice(b"\r\nzz\r\nno chunk");
            }
            () if chunked => self.chunks(&body, &mut bytes),
            () => bytes.extend_from_slice(&body),
        }
        let excess = broken == 0 && !by_close && fault(6);
        let cut = fault(3).then(|| {
            // Ends of heads, lines and bodies are where things go wrong.
            let near = world.one(&[0, head_end, bytes.len(), bytes.len()]);
            let far = world.roll(0, bytes.len() as u64 + 1) as usize;
            let at = if world.once_in(2) { near.saturating_sub(world.roll(0, 4) as usize) } else { far };
            (at, world.one(&[Exit::Fin, Exit::Fin, Exit::Rst, Exit::Stall]))
        });
        // While a body follows, what happens before its end is of interest.
        let early = n > 0 && ask.route == Route::Upload && length > 40_000 && world.once_in(3);
        // Of a body that comes slowly it waits for the rest, and then gives up, perhaps before its client has sent all.
        let patient =
            n > 0 && ask.route == Route::Upload && length > 40_000 && (ask.gap_us > 100_000 || ask.stops.is_some());
        let cut = if patient || early && world.once_in(2) { Some((0, Exit::Fin)) } else { cut };
        let whole = cut.is_none_or(|(at, exit)| at == bytes.len() && !(by_close && exit != Exit::Fin));
        let given = Given {
            token: delivery.token,
            status,
            role: self.role,
            complete: Cell::new(whole && broken == 0),
            body: RefCell::new(match () {
                () if bare => Vec::new(),
                () => body,
            }),
        };
        let exit = match () {
            () if by_close || says_close => Some(Exit::Fin),
            () if broken > 0 => Some(world.one(&[Exit::Fin, Exit::Rst, Exit::Stall])),
            () if fault(4) => Some(world.one(&[Exit::Fin, Exit::Rst])),
            () => None,
        };
        if by_close {
            let end = cut.map_or((bytes.len(), Exit::Fin), |cut| cut);
            // Whatever has come when the connection ends well is the answer.
            given.complete.set(end.1 == Exit::Fin && end.0 >= head_end && broken == 0);
            given.body.borrow_mut().truncate(end.0.saturating_sub(head_end));
            delivery.empty.set(given.body.borrow().is_empty());
        }
        if self.role == Role::Prefill && status < 300 && given.complete.get() {
            self.hand_over(&given);
        }
        self.facts.given.borrow_mut().push(Rc::new(given));
        if excess {
            bytes.extend_from_slice(b"EXCESS");
        }
        let late = fault(5) || asked.leaves.get() && world.once_in(2);
        let slow = fault(4);
        let reads = (patient || early || length > 0 && fault(4)).then(|| world.roll(0, length as u64) as usize);
        let well = cut.is_none() && broken == 0 && !late && !slow && reads.is_none() && exit.is_none() && !excess;
        Act {
            reads,
            first_us: match (late, patient) {
                (true, _) => world.roll(0, 5_000_000),
                (_, true) => world.roll(200_000, 2_500_000),
                _ => world.one(&[0, world.roll(0, 40_000)]),
            },
            gap_us: if slow { world.roll(1, 1_500_000) } else { world.one(&[0, 0, 100, 5_000]) },
            status,
            bytes,
            head_end: if matches!(broken, 1..6) || interims > 16 { 0 } else { head_end },
            cut,
            exit,
            excess,
            well: well && interims <= 16,
            late: late || slow,
        }
    }

    /// Chunks of all sizes.
    fn chunks(&self, body: &[u8], out: &mut Vec<u8>) {
        let world = &self.world;
        let size = world.one(&[7, 100, 1_000, 20_000, 40_000, 150_000]).max(body.len() as u64 / 200);
        let mut at = 0;
        while at < body.len() {
            let n = (world.roll(1, size + 1) as usize).min(body.len() - at);
            let extension = if world.once_in(16) { ";a=b" } else { "" };
            out.extend_from_slice(format!("{n:x}{extension}\r\n").as_bytes());
            out.extend_from_slice(&body[at..at + n]);
            out.extend_from_slice(b"\r\n");
            at += n;
        }
        out.extend_from_slice(if world.once_in(8) { b"0\r\nx-end: 1\r\n\r\n".as_slice() } else { b"0\r\n\r\n" });
    }

    /// Bytes that no other answer has, nor another place of this one.
    fn body(&self, id: u64, status: u16, delivery: &Delivery, ask: &crate::client::Ask) -> Vec<u8> {
        let world = &self.world;
        let most = world.one(&[0, 100, 100, 1_000, 1_000, 5_000, 30_000, 60_000, MOST_BODY]);
        let size = world.roll(most / 2, most + 1) as usize;
        let text = |size: usize| {
            let mut text = String::with_capacity(size + 64);
            for block in 0.. {
                if text.len() >= size {
                    break;
                }
                text.push_str(&format!("<{id}/{block} of {}>", delivery.token));
                text.push_str(&"abcdefghijklmnopqrstuvwxyz012345".repeat(30));
            }
            text.truncate(size);
            text
        };
        match (self.plan.fleet, self.role) {
            (Fleet::Pairs(Backend::VllmNixl), Role::Prefill) if status == 200 && ask.route.generates() => {
                let params = match world.roll(0, 4) {
                    0 => "null".to_owned(),
                    _ => format!(r#"{{"remote_block_ids":[{id},2],"remote_engine_id":"e{id}"}}"#),
                };
                format!(r#"{{"id":"{id}","kv_transfer_params":{params},"text":"{}"}}"#, text(size.min(3000))).into()
            }
            (Fleet::Pairs(Backend::Sglang), role) if ask.logprobs && status == 200 => {
                let probs = if role == Role::Prefill { format!("[[-0.5,{id},null]]") } else { "[]".into() };
                let meta = format!(r#"{{"id":"{id}","input_token_logprobs":{probs}}}"#);
                format!(r#"{{"text":"{}","meta_info":{meta}}}"#, text(size.min(3000))).into()
            }
            _ if ask.streams && status == 200 => {
                let mut out = Vec::new();
                while out.len() < size.min(20_000) {
                    out.extend_from_slice(format!("data: {{\"n\":{},\"of\":{id}}}\n\n", out.len()).as_bytes());
                }
                out.extend_from_slice(b"data: [DONE]\n\n");
                out
            }
            _ => text(size).into(),
        }
    }

    /// Notes what a prefill says to its decode worker.
    fn hand_over(&self, given: &Given) {
        let body = given.body.borrow();
        let json: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        let params = match &json["kv_transfer_params"] {
            serde_json::Value::Null => String::new(),
            params => params.to_string(),
        };
        self.facts.handed.borrow_mut().push((given.token, params));
    }
}

/// The beginning of some bytes.
pub fn shown(bytes: &[u8]) -> String {
    format!("{} bytes {:?}", bytes.len(), String::from_utf8_lossy(&bytes[..bytes.len().min(200)]))
}
