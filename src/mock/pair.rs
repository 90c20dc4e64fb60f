//! Prefill/decode pairs: what the engines of one process know of each other.
//!
//! Takes a request and the engine that it came to, gives the leg that the request is: what it does wrong, whom it
//! waits for, what it leaves behind. Never touches a socket. A leg that is dropped has left its partner, but its room
//! or transfer id stays used.
//!
//! SGLang: both legs name a room. The decode leg asks for it, the prefill leg works its prompt off and moves the cache
//! as soon as the decode leg has asked; then it answers, and the decode leg generates. vLLM with NIXL: the prefill leg
//! leaves a parcel, and its answer says where; the decode leg brings those words back. vLLM with Mooncake: both legs
//! name a transfer of a prefill engine; the prefill leg leaves the cache there, the decode leg waits for it.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout_at};

use super::ask::Ask;
use super::engine::{Aborted, Inner};
use super::http::Request;
use super::stats::{down, up};
use super::{Connector, Role, span_ms};

/// Rooms and transfer ids that are known to be used; the oldest are forgotten first.
const MAX_USED: usize = 1 << 20;
/// NIXL parcels that wait to be fetched; the oldest are forgotten first.
const MAX_PARCELS: usize = 1 << 16;
/// Largest room: the engines keep it in a signed 64-bit integer.
const MAX_ROOM: u64 = i64::MAX as u64;
/// Bootstrap port of an engine without a listener of its own for it.
pub(super) const DEFAULT_BOOTSTRAP_PORT: u16 = 8998;

/// Why a request is not served.
pub(super) struct Refused {
    pub status: u16,
    pub message: String,
}

impl From<Aborted> for Refused {
    fn from(_: Aborted) -> Self {
        Refused { status: 400, message: "Aborted".to_owned() }
    }
}

fn wrong(counter: &AtomicU64, message: impl Into<String>) -> Refused {
    up(counter);
    Refused { status: 400, message: message.into() }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Prefill,
    Decode,
}

/// Where two legs meet.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Key {
    Room(u64),
    /// Engine id and transfer id.
    Transfer(String, String),
}

impl Key {
    /// The rank among `size` that a prefill engine takes for it by itself.
    fn rank(&self, size: u64) -> u64 {
        match self {
            Key::Room(room) => room % size,
            Key::Transfer(..) => 0,
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Room(room) => write!(f, "bootstrap room {room}"),
            Key::Transfer(engine, id) => write!(f, "transfer {id} of engine {engine}"),
        }
    }
}

/// A prefill leg that has come.
struct Sender {
    rank: u64,
    /// Data-parallel size of its engine.
    size: u64,
    /// Whether its rank is the one that its fields announce.
    sound: bool,
    request_id: Option<Vec<u8>>,
}

/// What the two legs of a room show each other.
#[derive(Default)]
struct State {
    sender: Option<Sender>,
    /// The decode leg has asked; with the prefill rank that it was told.
    asked: Option<Option<u64>>,
    /// The cache was moved, or (Mooncake) can be: tokens of the prompt that the prefill engine's cache held.
    moved: Option<usize>,
    staged: Option<Staged>,
}

impl State {
    /// Whether the decode leg was told the rank of the prefill leg; `None` while the latter is not there.
    fn agrees(&self, key: &Key, told: Option<u64>) -> Option<bool> {
        self.sender.as_ref().map(|s| told.unwrap_or_else(|| key.rank(s.size)) == s.rank)
    }

    /// Whether a transfer can begin.
    fn fits(&self, key: &Key) -> bool {
        let sound = self.sender.as_ref().is_some_and(|s| s.sound);
        sound && self.asked.is_some_and(|told| self.agrees(key, told) == Some(true))
    }
}

type Meeting = watch::Sender<State>;

/// A cache that a prefill engine keeps for a decode engine.
struct Staged(Arc<AtomicU64>);

impl Staged {
    fn new(engine: &Inner) -> Staged {
        up(&engine.counters.staged);
        Staged(engine.counters.staged.clone())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        down(&self.0);
    }
}

/// The time that is left to fetch a parcel.
struct Expiry(AbortHandle);

impl Expiry {
    fn start(words: String, ms: u64) -> Expiry {
        let task = tokio::spawn(async move {
            sleep(Duration::from_millis(ms)).await;
            REGISTRY.lock().unwrap().parcels.remove(&words);
        });
        Expiry(task.abort_handle())
    }
}

impl Drop for Expiry {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What a NIXL prefill leg has left.
struct Parcel {
    _staged: Staged,
    _expiry: Expiry,
    cached: usize,
    request_id: Option<Vec<u8>>,
}

/// What the engines of the process share.
#[derive(Default)]
struct Registry {
    /// Meetings, with the number of legs that are there.
    live: HashMap<Key, (Arc<Meeting>, u32)>,
    /// Which sides (prefill, decode) have been played.
    used: HashMap<Key, [bool; 2]>,
    order: VecDeque<Key>,
    /// By the words that the prefill leg answered.
    parcels: HashMap<String, Parcel>,
    parcel_order: VecDeque<String>,
    /// Bootstrap addresses by engine id.
    engines: HashMap<String, String>,
}

static REGISTRY: LazyLock<Mutex<Registry>> = LazyLock::new(Mutex::default);

impl Registry {
    /// `None` when this side was played before.
    fn claim(&mut self, key: &Key, side: Side) -> Option<Seat> {
        let order = &mut self.order;
        let sides = self.used.entry(key.clone()).or_insert_with(|| {
            order.push_back(key.clone());
            [false; 2]
        });
        if std::mem::replace(&mut sides[side as usize], true) {
            return None;
        }
        if self.order.len() > MAX_USED
            && let Some(old) = self.order.pop_front()
        {
            self.used.remove(&old);
            if self.live.get(&old).is_some_and(|(_, legs)| *legs == 0) {
                self.live.remove(&old);
            }
        }
        let (meeting, legs) = self.live.entry(key.clone()).or_default();
        *legs += 1;
        Some(Seat { key: key.clone(), side, meeting: meeting.clone(), complete: false })
    }

    fn leave(&mut self, key: &Key) {
        let Some((meeting, legs)) = self.live.get_mut(key) else { return };
        *legs -= 1;
        if *legs == 0 && meeting.borrow().staged.is_none() {
            self.live.remove(key);
        }
    }
}

/// Makes an engine known: its ids (one a rank) and its bootstrap address.
pub(super) fn introduce(ids: &[String], bootstrap: &str) {
    let mut registry = REGISTRY.lock().unwrap();
    registry.engines.extend(ids.iter().map(|id| (id.clone(), bootstrap.to_owned())));
}

/// Forgets what [`introduce`] made known.
pub(super) fn forget(ids: &[String]) {
    let mut registry = REGISTRY.lock().unwrap();
    ids.iter().for_each(|id| drop(registry.engines.remove(id)));
}

/// A leg's place in a meeting.
struct Seat {
    key: Key,
    side: Side,
    meeting: Arc<Meeting>,
    /// A prefill leg has answered; a decode leg was refused before it asked.
    complete: bool,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.meeting.send_modify(|s| match self.side {
            Side::Prefill => {
                // What an engine staged for an answer that it did not finish is gone with it.
                if !self.complete && s.staged.take().is_some() {
                    s.moved = None;
                }
                if s.moved.is_none() {
                    s.sender = None;
                }
            }
            Side::Decode => {
                s.asked = None;
                if !self.complete {
                    s.staged = None;
                }
            }
        });
        REGISTRY.lock().unwrap().leave(&self.key);
    }
}

/// A request's part in a pair.
pub(super) struct Leg {
    engine: Arc<Inner>,
    kind: Kind,
    request_id: Option<Vec<u8>>,
}

enum Kind {
    Alone,
    /// Rooms of SGLang, or one transfer of Mooncake; `told` is the prefill rank that the fields state.
    Seats {
        side: Side,
        seats: Vec<Seat>,
        chosen: Option<u64>,
        told: Option<u64>,
    },
    /// NIXL: the words of the answer, and whether they lead to a parcel that is to be taken back.
    Stage {
        params: Option<Value>,
        unsent: bool,
    },
    /// NIXL: the words that the decode leg brought; `None` once the parcel is not to be touched.
    Fetch {
        words: Option<String>,
    },
}

impl Leg {
    /// What this request is in a pair, with everything checked that real engines (or their operators) stumble over.
    /// `generates` is false for requests that no pair serves; `bare` allows a NIXL leg without parameters.
    pub fn of(engine: &Arc<Inner>, request: &Request, ask: &Ask, generates: bool, bare: bool) -> Result<Leg, Refused> {
        let s = &engine.settings;
        let chosen = chosen_rank(engine, request, ask)?;
        let request_id = request.header("x-request-id").map(<[u8]>::to_vec);
        let side = match s.role {
            Role::Prefill if generates => Side::Prefill,
            Role::Decode if generates => Side::Decode,
            _ => {
                engine.saw_rank(chosen);
                return Ok(Leg { engine: engine.clone(), kind: Kind::Alone, request_id });
            }
        };
        let kind = match (s.vllm, s.connector) {
            (false, _) => rooms(engine, ask, side, chosen)?,
            (true, connector) => {
                if side == Side::Prefill
                    && let Some(why) = ask.unsanitised()
                {
                    return Err(wrong(&engine.counters.unsanitised, format!("a prefill request must not have {why}")));
                }
                engine.saw_rank(Some(chosen.unwrap_or(0)));
                match connector {
                    Connector::Nixl if bare => Kind::bare(side),
                    Connector::Nixl => nixl(engine, ask, side, request_id.as_deref())?,
                    Connector::Mooncake => mooncake(engine, ask, side, chosen)?,
                }
            }
        };
        Ok(Leg { engine: engine.clone(), kind, request_id })
    }

    /// The part it plays in a pair; `None` for a request that is served alone.
    pub fn side(&self) -> Option<Side> {
        match &self.kind {
            Kind::Alone => None,
            Kind::Seats { side, .. } => Some(*side),
            Kind::Stage { .. } => Some(Side::Prefill),
            Kind::Fetch { .. } => Some(Side::Decode),
        }
    }

    /// Whether it meets its partner in a room of SGLang's.
    pub fn has_room(&self) -> bool {
        matches!(&self.kind, Kind::Seats { seats, .. } if matches!(seats.first(), Some(Seat { key: Key::Room(_), .. })))
    }

    /// It was refused before the engine saw it: what waits for it stays where it is.
    pub fn spare(&mut self) {
        match &mut self.kind {
            Kind::Seats { side: Side::Decode, seats, .. } => seats.iter_mut().for_each(|seat| seat.complete = true),
            Kind::Fetch { words } => *words = None,
            _ => {}
        }
    }

    /// The engine has it: its partner can see it.
    pub fn arrive(&self) {
        let Kind::Seats { side, seats, chosen, told } = &self.kind else { return };
        let size = self.engine.settings.dp_size.max(1) as u64;
        for seat in seats {
            seat.meeting.send_modify(|s| match side {
                Side::Prefill => {
                    let rank = chosen.unwrap_or_else(|| seat.key.rank(size));
                    let sound = told.unwrap_or_else(|| seat.key.rank(size)) == rank;
                    s.sender = Some(Sender { rank, size, sound, request_id: self.request_id.clone() });
                }
                Side::Decode => s.asked = Some(*told),
            });
        }
    }

    /// A prefill leg whose prompt is worked off: moves the cache, or leaves it to be fetched.
    pub async fn hand_over(&mut self, cached: usize) -> Result<(), Refused> {
        let room = self.has_room();
        match &mut self.kind {
            Kind::Seats { seats, .. } if room => move_caches(&self.engine, seats, cached).await,
            Kind::Seats { seats, .. } => {
                for seat in seats {
                    let staged = Some(Staged::new(&self.engine));
                    seat.meeting.send_modify(|s| (s.moved, s.staged) = (Some(cached), staged));
                }
                Ok(())
            }
            Kind::Stage { params: Some(params), unsent } if !params.is_null() => {
                *unsent = true;
                let staged = Staged::new(&self.engine);
                let words = params.to_string();
                let expiry = Expiry::start(words.clone(), self.engine.settings.staged_timeout_ms);
                let request_id = self.request_id.clone();
                let parcel = Parcel { _staged: staged, _expiry: expiry, cached, request_id };
                let mut registry = REGISTRY.lock().unwrap();
                registry.parcels.insert(words.clone(), parcel);
                registry.parcel_order.push_back(words);
                if registry.parcel_order.len() > MAX_PARCELS
                    && let Some(old) = registry.parcel_order.pop_front()
                {
                    registry.parcels.remove(&old);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// A decode leg: waits for the cache; gives the prompt tokens that the prefill engine's cache held.
    pub async fn receive(&mut self) -> Result<usize, Refused> {
        let transfer = span_ms(self.engine.settings.transfer_ms);
        match &mut self.kind {
            Kind::Seats { seats, told, .. } => {
                let cached = wait_for_caches(&self.engine, seats, *told, self.request_id.as_deref()).await?;
                if seats.iter().any(|seat| seat.meeting.borrow().staged.is_some()) {
                    sleep(transfer).await;
                    seats.iter().for_each(|seat| seat.meeting.send_modify(|s| s.staged = None));
                }
                Ok(cached)
            }
            Kind::Fetch { words } => {
                let words = words.take().unwrap_or_default();
                let parcel = REGISTRY.lock().unwrap().parcels.remove(&words);
                let Some(parcel) = parcel else {
                    return Err(wrong(&self.engine.counters.bad_transfer, "this cache was fetched before"));
                };
                sleep(transfer).await;
                Ok(parcel.cached)
            }
            _ => Ok(0),
        }
    }

    /// `kv_transfer_params` of the answer.
    pub fn params(&self) -> Option<Value> {
        if let Kind::Stage { params, .. } = &self.kind { params.clone() } else { None }
    }

    /// A prefill leg's answer has gone out whole.
    pub fn sent(&mut self) {
        match &mut self.kind {
            Kind::Seats { side: Side::Prefill, seats, .. } => seats.iter_mut().for_each(|seat| seat.complete = true),
            Kind::Stage { unsent, .. } => *unsent = false,
            _ => {}
        }
    }
}

impl Kind {
    /// A NIXL leg that has nothing to hand over.
    fn bare(side: Side) -> Kind {
        match side {
            Side::Prefill => Kind::Stage { params: Some(Value::Null), unsent: false },
            Side::Decode => Kind::Alone,
        }
    }
}

impl Drop for Leg {
    fn drop(&mut self) {
        let words = match &mut self.kind {
            Kind::Stage { params: Some(params), unsent: true } => params.to_string(),
            Kind::Fetch { words: Some(words) } => std::mem::take(words),
            _ => return,
        };
        REGISTRY.lock().unwrap().parcels.remove(&words);
    }
}

/// The rank that the request names, by header or (SGLang) by field; the header comes first.
fn chosen_rank(engine: &Inner, request: &Request, ask: &Ask) -> Result<Option<u64>, Refused> {
    let bad = |what: &dyn fmt::Display| {
        wrong(&engine.counters.bad_rank, format!("{what} is no rank below {}", engine.settings.dp_size.max(1)))
    };
    let below = |rank: Option<u64>| rank.filter(|r| *r < engine.settings.dp_size.max(1) as u64);
    if let Some(text) = request.header("x-data-parallel-rank") {
        let rank = std::str::from_utf8(text).ok().and_then(|t| t.trim().parse().ok());
        return below(rank).map(Some).ok_or_else(|| bad(&super::latin1(text)));
    }
    if engine.settings.vllm {
        return Ok(None);
    }
    let Some(field) = ask.routed_rank.as_ref().or(ask.rank_alias.as_ref()) else { return Ok(None) };
    below(field.as_u64()).map(Some).ok_or_else(|| bad(field))
}

/// Checks the bootstrap fields of SGLang and claims the rooms.
fn rooms(engine: &Arc<Inner>, ask: &Ask, side: Side, chosen: Option<u64>) -> Result<Kind, Refused> {
    let c = &engine.counters;
    let batch = ask.batch.then_some(ask.items);
    let bad_room = |room: &Value| wrong(&c.bad_room, format!("{room} is no room from 1 to {MAX_ROOM}"));
    let room = |v: &Value| v.as_u64().filter(|r| (1..=MAX_ROOM).contains(r)).ok_or_else(|| bad_room(v));
    let numbers: Vec<u64> = match (&ask.bootstrap_room, batch) {
        (None | Some(Value::Null), _) => {
            return Err(wrong(&c.roomless, "a disaggregated engine needs bootstrap_room"));
        }
        (Some(Value::Array(rooms)), Some(n)) if rooms.len() == n => rooms.iter().map(room).collect::<Result<_, _>>()?,
        (Some(shape @ Value::Array(_)), _) => {
            return Err(wrong(&c.bad_bootstrap, format!("bootstrap_room {shape} does not fit the prompt")));
        }
        (Some(one), n) => {
            let (first, n) = (room(one)?, n.unwrap_or(1) as u64);
            if first + (n - 1) > MAX_ROOM {
                return Err(bad_room(one));
            }
            (first..first + n).collect()
        }
    };
    let is_host = |v: &Value| v.as_str().is_some_and(|host| !host.is_empty());
    let is_port = |v: &Value| v.is_null() || v.as_u64().is_some_and(|p| (1..=u64::from(u16::MAX)).contains(&p));
    let must = side == Side::Decode;
    if !fits(ask.bootstrap_host.as_ref(), batch, must, is_host) {
        return Err(wrong(&c.bad_bootstrap, "bootstrap_host is missing or does not fit the prompt"));
    }
    if !fits(ask.bootstrap_port.as_ref(), batch, must, is_port) {
        return Err(wrong(&c.bad_bootstrap, "bootstrap_port is missing or does not fit the prompt"));
    }
    let size = engine.settings.dp_size.max(1) as u64;
    let told = match &ask.prefill_rank {
        None => None,
        Some(v) => {
            let sound = v.as_u64().filter(|r| side == Side::Decode || *r < size);
            Some(sound.ok_or_else(|| wrong(&c.bad_rank, format!("disagg_prefill_dp_rank {v} is no rank")))?)
        }
    };
    let keys: Vec<Key> = numbers.into_iter().map(Key::Room).collect();
    let seats = claim(engine, &keys, side)?;
    if side == Side::Prefill {
        let rank = |key: &Key| chosen.unwrap_or_else(|| key.rank(size));
        keys.iter().for_each(|key| engine.saw_rank(Some(rank(key))));
        if keys.iter().any(|key| told.unwrap_or_else(|| key.rank(size)) != rank(key)) {
            up(&c.bad_rank);
        }
    } else {
        engine.saw_rank(chosen);
    }
    Ok(Kind::Seats { side, seats, chosen, told })
}

/// Whether a bootstrap field suits a single prompt (`batch` is `None`) or a batch; absent only where it need not be.
fn fits(field: Option<&Value>, batch: Option<usize>, must: bool, one: impl Fn(&Value) -> bool) -> bool {
    match (field, batch) {
        (None, _) => !must,
        (Some(Value::Array(all)), Some(n)) => all.len() == n && all.iter().all(one),
        (Some(v), _) => one(v),
    }
}

fn claim(engine: &Inner, keys: &[Key], side: Side) -> Result<Vec<Seat>, Refused> {
    let mut seats = Vec::with_capacity(keys.len());
    for key in keys {
        // Bound first: a seat that is dropped takes the lock itself.
        let seat = REGISTRY.lock().unwrap().claim(key, side);
        let Some(seat) = seat else {
            up(&engine.counters.duplicate_rooms);
            return Err(Refused { status: 500, message: format!("{key} was used before") });
        };
        seats.push(seat);
    }
    Ok(seats)
}

/// Whether the parameters send a request to the prefill (or decode) side.
fn points_to(params: &Value, side: Side) -> bool {
    let (this, other) = match side {
        Side::Prefill => ("do_remote_decode", "do_remote_prefill"),
        Side::Decode => ("do_remote_prefill", "do_remote_decode"),
    };
    params[this] == true && params[other] != true
}

fn nixl(engine: &Arc<Inner>, ask: &Ask, side: Side, request_id: Option<&[u8]>) -> Result<Kind, Refused> {
    static BLOCK: AtomicU64 = AtomicU64::new(1);
    let c = &engine.counters;
    let Some(params) = ask.kv_params.as_ref().filter(|p| points_to(p, side)) else {
        return Err(wrong(&c.bad_transfer, "kv_transfer_params are missing or meant for the other side"));
    };
    match side {
        Side::Prefill => {
            let block = BLOCK.fetch_add(3, Relaxed);
            let params = json!({
                "do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": engine.engine_id(),
                "remote_block_ids": [block, block + 1, block + 2], "remote_host": engine.addr.ip().to_string(),
                "remote_port": 5600, "tp_size": 1,
                // What no gateway knows, in spellings that careless ones lose.
                "x_mock": {"exact": u64::MAX, "ratio": 0.1, "text": "caf\u{e9} \u{1f600} \"quoted\"", "none": null, "empty": [[], {}]},
            });
            Ok(Kind::Stage { params: Some(params), unsent: false })
        }
        Side::Decode => {
            let words = params.to_string();
            let registry = REGISTRY.lock().unwrap();
            let Some(parcel) = registry.parcels.get(&words) else {
                return Err(wrong(&c.bad_transfer, "kv_transfer_params are not what a prefill engine answered"));
            };
            if parcel.request_id.as_deref() != request_id {
                up(&c.bad_request_id);
            }
            Ok(Kind::Fetch { words: Some(words) })
        }
    }
}

fn mooncake(engine: &Arc<Inner>, ask: &Ask, side: Side, chosen: Option<u64>) -> Result<Kind, Refused> {
    let bad = |message: &str| wrong(&engine.counters.bad_transfer, message);
    let params = ask.kv_params.as_ref().filter(|p| points_to(p, side));
    let params = params.ok_or_else(|| bad("kv_transfer_params are missing or meant for the other side"))?;
    let id = params["transfer_id"].as_str().filter(|id| !id.is_empty()).ok_or_else(|| bad("transfer_id is missing"))?;
    let partner = match side {
        Side::Prefill => {
            let mut ids = engine.engine_ids();
            ids.swap_remove(chosen.unwrap_or(0) as usize)
        }
        Side::Decode => {
            let partner = params["remote_engine_id"].as_str().ok_or_else(|| bad("remote_engine_id is missing"))?;
            let known = REGISTRY.lock().unwrap().engines.get(partner).cloned();
            let known = known.ok_or_else(|| bad("remote_engine_id is no prefill engine's"))?;
            let named = params["remote_bootstrap_addr"].as_str();
            if named.map(|a| a.trim_end_matches('/')) != Some(&*known) {
                return Err(bad("remote_bootstrap_addr is not that of the prefill engine"));
            }
            partner.to_owned()
        }
    };
    let seats = claim(engine, &[Key::Transfer(partner, id.to_owned())], side)?;
    Ok(Kind::Seats { side, seats, chosen: None, told: None })
}

fn deadline(engine: &Inner) -> Instant {
    Instant::now() + Duration::from_millis(engine.settings.room_timeout_ms)
}

fn too_late(engine: &Inner, seat: &Seat, whom: &str) -> Refused {
    up(&engine.counters.room_timeouts);
    let ms = engine.settings.room_timeout_ms;
    Refused { status: 500, message: format!("{}: no {whom} within {ms} ms", seat.key) }
}

/// Waits until the meeting is as wanted; false when it was not in time.
async fn comes(seat: &Seat, until: Instant, wanted: impl Fn(&State) -> bool) -> bool {
    timeout_at(until, seat.meeting.subscribe().wait_for(|s| wanted(s))).await.is_ok()
}

/// The prefill side of rooms: waits for every decode leg, then moves the caches.
async fn move_caches(engine: &Inner, seats: &[Seat], cached: usize) -> Result<(), Refused> {
    let until = deadline(engine);
    let mut pause = span_ms(engine.settings.transfer_ms);
    for seat in seats {
        loop {
            if !comes(seat, until, |s| s.fits(&seat.key)).await {
                return Err(too_late(engine, seat, "decode request that asks for it"));
            }
            sleep(std::mem::take(&mut pause)).await;
            engine.thawed().await;
            // The decode leg may have left in the middle of it.
            let moved = seat.meeting.send_if_modified(|s| {
                let fits = s.fits(&seat.key);
                if fits {
                    s.moved = Some(cached);
                }
                fits
            });
            if moved {
                break;
            }
        }
    }
    Ok(())
}

/// The decode side: waits for every prefill leg, compares notes, waits for the caches.
async fn wait_for_caches(
    engine: &Inner,
    seats: &[Seat],
    told: Option<u64>,
    request_id: Option<&[u8]>,
) -> Result<usize, Refused> {
    let until = deadline(engine);
    let (mut bad_rank, mut bad_request_id, mut cached) = (false, false, 0);
    for seat in seats {
        if !comes(seat, until, |s| s.sender.is_some()).await {
            return Err(too_late(engine, seat, "prefill request"));
        }
        {
            let state = seat.meeting.borrow();
            let other = state.sender.as_ref().is_some_and(|s| s.request_id.as_deref() != request_id);
            if other && !std::mem::replace(&mut bad_request_id, true) {
                up(&engine.counters.bad_request_id);
            }
            let astray = state.agrees(&seat.key, told) == Some(false);
            if astray && !std::mem::replace(&mut bad_rank, true) {
                up(&engine.counters.bad_rank);
            }
        }
        if !comes(seat, until, |s| s.moved.is_some()).await {
            return Err(too_late(engine, seat, "transfer"));
        }
        cached = seat.meeting.borrow().moved.unwrap_or(0);
    }
    Ok(cached)
}
