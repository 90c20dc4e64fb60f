//! Every bound of the process, named, with const asserts that tie them together.
//!
//! Takes nothing, gives constants. Never holds a default that a user may change: those stand in the
//! option table (`config::options`); what stands here is what the code's own shapes depend on.

/// Most workers that one process can know at a time (slots of the load and vitals arrays).
pub const MAX_WORKERS: usize = 4096;
/// Most lanes (data-plane cores) of one process.
pub const MAX_LANES: usize = 256;
/// Most model names that a single worker may announce; further ones are ignored with a warning.
pub const MAX_MODELS_PER_WORKER: usize = 256;
/// Most models that have metrics of their own; further ones are counted together.
pub const MAX_MODEL_LABELS: usize = 64;
/// Records of the access log that a lane may be ahead of the writer.
pub const ACCESS_QUEUE: usize = 2048;
/// Bytes of an access log's record for the request's id, model and path.
pub const ACCESS_TEXT_BYTES: usize = 448;
/// Most data-parallel ranks of one engine.
pub const MAX_DP_SIZE: u32 = 1024;
/// Longest name of a group of prefill and decode workers, in bytes.
pub const MAX_GROUP_BYTES: usize = 128;
/// Most labels of a worker.
pub const MAX_LABELS: usize = 64;
/// Longest name and longest value of a label, in bytes.
pub const MAX_LABEL_BYTES: usize = 256;
/// Longest body of a request to the admin listener, in bytes: a worker with all its models and labels fits.
pub const MAX_ADMIN_BODY_BYTES: usize = 256 * 1024;
/// Connections of the admin listener; further ones wait for a place.
pub const MAX_ADMIN_CONNECTIONS: usize = 64;
/// Workers that are asked at the same time by one request to the admin listener.
pub const MAX_ASKED_AT_ONCE: usize = 64;
/// Bytes of metrics of engines that are put together for one answer; further engines are left out of it.
pub const MAX_MERGED_BYTES: usize = 64 << 20;
/// Longest file of a configuration, in bytes: all workers with all their models fit.
pub const MAX_CONFIG_BYTES: u64 = 64 << 20;
/// Bits of the packed load word that hold the processed work; the in-flight count lies above.
pub const PROCESSED_BITS: u32 = 40;
/// Bytes of a request that count as one unit of work: what one symbol of a text's key stands for.
pub const WORK_BYTES: usize = 64;
/// Part of a worker's lead in processed work that fades each second: half of a lead is gone in 44 s.
pub const WORK_FADE: u64 = 64;
/// Processed work at which all counts are taken back. 100 000 requests of 8 KiB a second, all of them to one worker,
/// take 12 hours to come here and as long again to the end of the range.
pub const MOST_WORK: u64 = 1 << (PROCESSED_BITS - 1);
/// Bits of the packed load word that hold the in-flight count.
pub const IN_FLIGHT_BITS: u32 = 24;
/// Fleets up to this size are always read fresh; larger ones through the shard-local copy.
pub const FRESH_FLEET: usize = 64;
/// Age in microseconds after which a lane's copy of the load words is refreshed whole.
pub const VIEW_AGE_US: u64 = 50;
/// Age in microseconds after which the fleet's mean load is worked out anew for a decision that needs it.
pub const MEAN_AGE_US: u64 = 1000;
/// Virtual nodes of a worker on the ring of consistent hashing (as the peers have it).
pub const RING_NODES: usize = 150;
/// Symbols at the head of a prompt by which prefix_hash knows it: 1024 bytes.
pub const HEAD_SYMBOLS: usize = 16;
/// Sticky routing keys that are remembered.
pub const STICKY_KEYS: usize = 256 * 1024;
/// Requests that a worker with a half-open breaker gets at a time.
pub const MAX_TRIALS: u32 = 3;
/// Fewest outcomes in the breaker's window of which a share of failures says anything.
pub const MIN_OUTCOMES: u64 = 20;
/// Failed compare-and-swap tries of one selection before it takes what it has with an unconditional add.
pub const RESERVE_TRIES: usize = 8;

/// Bytes of one receive buffer of the lane's provided-buffer ring.
pub const RECV_BUFFER_BYTES: usize = 16 * 1024;
/// Receive buffers a lane registers with its ring; a power of two (the kernel masks the index).
pub const RECV_BUFFERS: usize = 1024;
/// Payload of at least this length is moved by the kernel instead of being copied, when that much is known to come
/// (tuning/README.md has the table).
pub const SPLICE_BYTES: usize = 32 * 1024;
/// The same for a chunk: its line has to be looked for, and received, apart from it.
pub const SPLICE_CHUNK_BYTES: u64 = 48 * 1024;
/// Rest of a request's body, on a route whose bodies nobody looks into, from which on it is not held but follows the
/// request to its worker (with `relay = "splice"`: [`SPLICE_BYTES`]). What is shorter is held, so that the request can be
/// tried again and needs no connection of its own.
pub const UPLOAD_BYTES: usize = 1024 * 1024;
/// Least that a pipe must hold to be of use: what pipes hold by default.
pub const PIPE_BYTES: usize = 64 * 1024;
/// Spliced bytes after which other connections of the lane get a turn.
pub const SPLICE_TURN_BYTES: u64 = 1024 * 1024;
/// Bytes that an answer copies before it asks for a pipe again, when there was none.
pub const PIPELESS_BYTES: u64 = 1024 * 1024;
/// How far a worker's answer is looked into for the end of its head, when what follows shall stay in the kernel.
pub const HEAD_SIGHT_BYTES: usize = 4 * 1024;
/// The same for what stands between two chunks: line ends, 16 digits, and some of the next chunk, which tells that it
/// is there.
pub const FRAME_SIGHT_BYTES: usize = 32;
/// Longest time in microseconds that a lane may be told to look for work before it sleeps: far below its chores' 500 ms,
/// so that an idle lane costs next to nothing.
pub const MAX_BUSY_POLL_US: u64 = 1000;
/// Locked memory that a lane's executor takes at its start.
pub const LANE_LOCKED_BYTES: u64 = 512 * 1024;
/// Entries of a lane's submission queue.
pub const RING_ENTRIES: u32 = 4096;
/// Entries of a lane's completion queue; the kernel keeps overflow, so this is about speed only.
pub const RING_COMPLETIONS: u32 = 16 * 1024;
/// Body bytes received and scanned before other connections of the lane get a turn.
pub const BODY_TURN_BYTES: usize = 64 * 1024;
/// Bodies up to this size travel in the same send as the head.
pub const ONE_SEND_BYTES: usize = 32 * 1024;
/// Longest request target (path and query) in bytes.
pub const MAX_TARGET_BYTES: usize = 8 * 1024;
/// Longest request or trace id that is passed on, in bytes; a longer one is replaced.
pub const MAX_REQUEST_ID_BYTES: usize = 256;
/// Longest chunk-size line of chunked coding, extensions included, in bytes.
pub const MAX_CHUNK_LINE_BYTES: usize = 4 * 1024;
/// Bytes of chunk extensions that one request body may have in all.
pub const MAX_CHUNK_EXTENSION_BYTES: u64 = 16 * 1024;
/// Bytes of chunk framing that a request body may have besides [`CHUNK_FRAMING_FACTOR`] times its payload.
pub const MAX_CHUNK_FRAMING_BYTES: u64 = 64 * 1024;
/// Bytes of chunk framing for a byte of payload: chunks of one byte take 5, chunks of a token 1 or 2.
pub const CHUNK_FRAMING_FACTOR: u64 = 8;
/// Longest trailer section in bytes.
pub const MAX_TRAILER_BYTES: usize = 16 * 1024;
/// Deepest nesting of a JSON body (the peers' parser, Python's, gives up near 1000).
pub const MAX_JSON_DEPTH: usize = 512;
/// Members of one body that some leg must not carry; an honest body has each name once.
pub const MAX_MARKS: usize = 64;
/// Prompts of one request that a prefill/decode pair takes: each costs some 50 bytes of room numbers and addresses in
/// both bodies, where it may be one of 3 bytes in the client's.
pub const MAX_PAIR_BATCH: u32 = 4096;
/// Longest event of a stream into which the prefill's log probabilities are put; a longer one passes without them.
pub const MAX_EVENT_BYTES: usize = 8 * 1024 * 1024;
/// Bytes of merged events that are made before the client is given them: each event can repeat all that the prefill said.
pub const MERGED_TURN_BYTES: usize = 1024 * 1024;
/// New connections that may wait for one lane to take them over.
pub const HANDOVER_QUEUE: usize = 1024;
/// Further attempts that a lane may make beyond the share of its requests: what it starts with, and can save up again.
pub const FREE_RETRIES: f64 = 32.0;
/// Longest pause that the only worker left may ask for (Retry-After); its answer is passed on if it asks for more.
pub const MAX_RETRY_AFTER_US: u64 = 5_000_000;
/// Workers that are asked for one that holds an id.
pub const MAX_HOLDER_TRIES: u32 = 16;
/// Longest body of an answer that is read whole: a prefill's, for what the decode worker or the client needs of it, and
/// a decode's into which that is put.
pub const MAX_KEPT_ANSWER_BYTES: usize = 64 << 20;
/// Interim (1xx) answers accepted from a worker before its final one.
pub const MAX_INTERIM: usize = 16;

const _: () = assert!(PROCESSED_BITS + IN_FLIGHT_BITS == 64);
const _: () = assert!(MAX_WORKERS <= u16::MAX as usize);
const _: () = assert!(MAX_DP_SIZE as usize <= MAX_WORKERS);
const _: () = assert!(MAX_ADMIN_BODY_BYTES > MAX_LABELS * 2 * MAX_LABEL_BYTES);
const _: () = assert!(RECV_BUFFERS.is_power_of_two() && RECV_BUFFERS <= 32768);
const _: () = assert!(RING_COMPLETIONS >= RING_ENTRIES);
const _: () = assert!(BODY_TURN_BYTES >= RECV_BUFFER_BYTES);
const _: () = assert!(SPLICE_BYTES > RECV_BUFFER_BYTES && SPLICE_BYTES <= PIPE_BYTES);
const _: () = assert!(UPLOAD_BYTES >= SPLICE_BYTES);
const _: () = assert!(SPLICE_TURN_BYTES >= PIPE_BYTES as u64);
