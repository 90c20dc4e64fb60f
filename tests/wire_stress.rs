//! The ring under abuse: tens of thousands of operations given up at random points, against peers that answer,
//! stall, reset or close. Nothing may leak, and no byte may reach the wrong stream.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};

use corelane::lane::spawn::{Pulse, spawn};
use corelane::lane::timers::{Timer, Timers};
use corelane::lane::wire::driver::Driver;
use corelane::lane::wire::ring::{Mode, Ring};
use corelane::lane::wire::socket::{Listener, RingWire, Socket};
use corelane::lane::wire::{Conn, Outgoing, Pass, Wire};
use glommio::{LocalExecutorBuilder, Placement};

/// One test at a time: some count the descriptors of the process.
static ALONE: Mutex<()> = Mutex::new(());

/// What the process has open, sockets and pipes by kind.
fn open_fds() -> Vec<String> {
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    let mut names: Vec<String> = links
        .filter_map(|l| std::fs::read_link(l.unwrap().path()).ok())
        .map(|t| {
            t.to_string_lossy()
                .split(':')
                .take(2)
                .filter(|p| !p.starts_with('[') || p.contains("ring") || p.contains("event"))
                .collect::<String>()
        })
        .collect();
    names.sort();
    names
}

/// The byte of a stream at an offset: tells streams apart.
fn pattern(id: u32, offset: usize) -> u8 {
    (id.wrapping_mul(0x9E37_79B9) >> (offset % 4 * 8)) as u8 ^ offset as u8
}

/// A peer reads (id, behaviour) and then does as told.
fn peer(mut s: TcpStream) -> std::io::Result<()> {
    s.set_read_timeout(Some(Duration::from_secs(10)))?;
    s.set_write_timeout(Some(Duration::from_secs(10)))?;
    let mut head = [0u8; 8];
    s.read_exact(&mut head)?;
    let id = u32::from_le_bytes(head[..4].try_into().unwrap());
    let (behaviour, size) = (head[4], u16::from_le_bytes([head[5], head[6]]) as usize * 7);
    let answer: Vec<u8> = (0..size).map(|o| pattern(id, o)).collect();
    match behaviour {
        // answers in pieces
        0..=3 => {
            for piece in answer.chunks(1 + size / 3) {
                s.write_all(piece)?;
            }
        }
        // stalls until the other side goes
        4 => {}
        // resets half-way
        5 => {
            s.write_all(&answer[..size / 2])?;
            socket2::SockRef::from(&s).set_linger(Some(Duration::ZERO))?;
            return Ok(());
        }
        // closes half-way
        6 => {
            s.write_all(&answer[..size / 2])?;
            return Ok(());
        }
        // answers steadily
        8 => {
            for piece in answer.chunks(1 + size / 30) {
                s.write_all(piece)?;
                std::thread::sleep(Duration::from_micros(300));
            }
        }
        // answers late, a byte at a time at first
        _ => {
            std::thread::sleep(Duration::from_millis(2));
            for b in answer.iter().take(20) {
                s.write_all(&[*b])?;
            }
            s.write_all(&answer[answer.len().min(20)..])?;
        }
    }
    let mut sink = [0u8; 65536];
    while s.read(&mut sink)? > 0 {}
    Ok(())
}

fn start_peers(threads: usize) -> SocketAddr {
    let listener = Arc::new(TcpListener::bind("127.0.0.1:0").unwrap());
    let address = listener.local_addr().unwrap();
    for _ in 0..threads {
        let listener = listener.clone();
        std::thread::spawn(move || {
            loop {
                if let Ok((s, _)) = listener.accept() {
                    let _ = peer(s);
                }
            }
        });
    }
    address
}

struct Bench {
    wire: RingWire,
    timers: Rc<Timers>,
    rng: RefCell<fastrand::Rng>,
    dropped: Cell<usize>,
    verified: Cell<usize>,
    blocked: Cell<usize>,
}

impl Bench {
    fn new(wire: RingWire, timers: &Rc<Timers>, seed: u64) -> Rc<Bench> {
        Rc::new(Bench {
            wire,
            timers: timers.clone(),
            rng: RefCell::new(fastrand::Rng::with_seed(seed)),
            dropped: Cell::new(0),
            verified: Cell::new(0),
            blocked: Cell::new(0),
        })
    }

    /// Waits, looking so often, until no more than so many tasks are alive.
    async fn down_to(&self, pulse: &Pulse, most: usize, step_us: u64) {
        let timer = self.timers.timer();
        while pulse.alive() > most {
            timer.set(timer.now_us() + step_us);
            timer.due().await;
        }
    }
}

/// `WIRE_SEED`, or any.
fn seed() -> u64 {
    let seed = std::env::var("WIRE_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(|| fastrand::u64(..));
    println!("WIRE_SEED={seed}");
    seed
}

/// Ready with `None` when the timer was first.
async fn within<T>(timer: &Timer, us: u64, mut poll: impl FnMut(&mut std::task::Context<'_>) -> Poll<T>) -> Option<T> {
    timer.set(timer.now_us() + us);
    let got = poll_fn(|cx| {
        if let Poll::Ready(t) = poll(cx) {
            return Poll::Ready(Some(t));
        }
        timer.poll_due(cx).map(|()| None)
    })
    .await;
    timer.clear();
    got
}

/// One connection's life: random operations, given up at random points, whatever arrives is checked.
async fn abuse(bench: Rc<Bench>, to: SocketAddr, id: u32) {
    let timer = bench.timers.timer();
    let (behaviour, size, patience, big) = {
        let mut r = bench.rng.borrow_mut();
        (r.u8(..8), r.u16(1..12_000), r.u64(1..30_000), r.bool())
    };
    let mut connecting = Box::pin(bench.wire.connect(to));
    let first = if bench.rng.borrow_mut().u8(..50) == 0 { 0 } else { 2_000_000 };
    let connected = within(&timer, first, |cx| connecting.as_mut().poll(cx)).await;
    drop(connecting);
    let Some(Ok(conn)) = connected else { return bench.dropped.set(bench.dropped.get() + 1) };
    let mut head = vec![0u8; 8];
    head[..4].copy_from_slice(&id.to_le_bytes());
    head[4] = behaviour;
    head[5..7].copy_from_slice(&size.to_le_bytes());
    if big {
        head.resize(200_000, 1);
    }
    conn.start_send(Outgoing::Heap(head));
    let mut at = 0;
    let total = size as usize * 7;
    for _ in 0..40 {
        let action = bench.rng.borrow_mut().u8(..20);
        match action {
            0 => return bench.dropped.set(bench.dropped.get() + 1),
            1 => {
                let _ = within(&timer, 1, |cx| conn.poll_sent(cx)).await;
            }
            2 => {
                let _ = within(&timer, 1, |cx| conn.poll_gone(cx)).await;
            }
            3 => conn.arm(),
            4..=8 => {
                let mut v = b"front".to_vec();
                // A large one stops the stream of receives first.
                let max = if action < 7 { 5000 } else { 60_000 };
                let got = within(&timer, patience, |cx| conn.poll_fill(cx, &mut v, max)).await;
                match got {
                    Some(Ok(0)) | Some(Err(_)) => return,
                    Some(Ok(n)) => {
                        // A fill that an earlier, given up one began brings that one's vector.
                        assert!(v.starts_with(b"front"));
                        for b in &v[v.len() - n..] {
                            assert_eq!(*b, pattern(id, at), "stream {id} at {at}");
                            at += 1;
                        }
                    }
                    None => bench.dropped.set(bench.dropped.get() + 1),
                }
            }
            _ => match within(&timer, patience, |cx| conn.poll_recv(cx)).await {
                Some(Ok(chunk)) if !chunk.is_empty() => {
                    for b in chunk.iter() {
                        assert_eq!(*b, pattern(id, at), "stream {id} at {at}");
                        at += 1;
                    }
                    if action == 19 {
                        // Put back what was read, and read it again.
                        at -= chunk.len();
                        conn.unread(chunk);
                    }
                }
                Some(_) => break,
                None => bench.dropped.set(bench.dropped.get() + 1),
            },
        }
        if at == total {
            bench.verified.set(bench.verified.get() + 1);
            break;
        }
    }
    assert!(at <= total);
    if behaviour < 4 && bench.rng.borrow_mut().bool() {
        conn.shutdown();
    }
}

/// Reads what came through the lane: (id, offset so far) and the bytes of the stream, at its own pace; tells how many.
fn sink(mut s: TcpStream, seen: &Mutex<Vec<(u32, usize)>>) -> std::io::Result<()> {
    s.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut head = [0u8; 4];
    s.read_exact(&mut head)?;
    let id = u32::from_le_bytes(head);
    let mut buf = vec![0u8; if id % 3 == 0 { 700 } else { 65536 }];
    let mut at = 0;
    loop {
        if id % 5 == 0 {
            std::thread::sleep(Duration::from_millis(3));
        }
        let n = match s.read(&mut buf) {
            Ok(0) | Err(_) => break,
            Ok(n) => n,
        };
        for b in &buf[..n] {
            assert_eq!(*b, pattern(id, at), "stream {id} at {at}");
            at += 1;
        }
    }
    seen.lock().unwrap().push((id, at));
    Ok(())
}

/// Lets most pieces pass.
struct Gate {
    rng: RefCell<fastrand::Rng>,
    bytes: Cell<usize>,
}

impl Pass for Gate {
    fn take(&self, bytes: &[u8], _: u64) -> bool {
        let takes = self.rng.borrow_mut().u8(..8) > 0;
        self.bytes.set(self.bytes.get() + if takes { bytes.len() } else { 0 });
        takes
    }
}

/// One stream from a peer to a sink, most of which passes without its task; given up at a random point, or brought to
/// its end. Gives how many bytes the sink has to get: at least, and at most.
async fn ferry(bench: Rc<Bench>, from: SocketAddr, to: SocketAddr, id: u32) -> Option<(usize, usize)> {
    let timer = bench.timers.timer();
    let (behaviour, size, seed) = {
        let mut r = bench.rng.borrow_mut();
        (if r.bool() { 8 } else { r.u8(..8) }, r.u16(1..12_000), r.u64(..))
    };
    let mut rng = fastrand::Rng::with_seed(seed);
    let source = bench.wire.connect(from).await.ok()?;
    // Often with so little room that sends are taken in parts, and what passes meets one that has not ended.
    let peer = TcpStream::connect(to).ok()?;
    if id.is_multiple_of(2) {
        socket2::SockRef::from(&peer).set_send_buffer_size(1).ok()?;
    }
    peer.set_nonblocking(true).ok()?;
    let drain = Socket::new(peer.into(), bench.wire.ring());
    let mut head = vec![0u8; 8];
    head[..4].copy_from_slice(&id.to_le_bytes());
    head[4] = behaviour;
    head[5..7].copy_from_slice(&size.to_le_bytes());
    source.start_send(Outgoing::Heap(head));
    drain.start_send(Outgoing::Heap(id.to_le_bytes().to_vec()));
    let gate = Rc::new(Gate { rng: RefCell::new(rng.fork()), bytes: Cell::new(0) });
    let mut taken = 0;
    for _ in 0..400 {
        let patience = rng.u64(1..20_000);
        let got = within(&timer, patience, |cx| {
            let got = source.poll_recv(cx);
            if got.is_pending() && rng.u8(..4) > 0 {
                source.pass_to(&drain, gate.clone());
            }
            got
        })
        .await;
        match got {
            Some(Ok(chunk)) if !chunk.is_empty() => {
                taken += chunk.len();
                if drain.is_sending() {
                    bench.blocked.set(bench.blocked.get() + 1);
                }
                if poll_fn(|cx| drain.poll_sent(cx)).await.is_err() {
                    return Some((0, size as usize * 7));
                }
                drain.start_send(Outgoing::Chunk(chunk));
            }
            Some(_) => {
                // The stream has ended: all that came goes to its end.
                poll_fn(|cx| drain.poll_sent(cx)).await.ok()?;
                drain.shutdown();
                bench.verified.set(bench.verified.get() + gate.bytes.get());
                // It closes when it has read everything.
                poll_fn(|cx| drain.poll_recv(cx)).await.ok()?;
                return Some((taken + gate.bytes.get(), taken + gate.bytes.get()));
            }
            // Nobody comes back for it: behaviour 4 sends nothing for ever.
            None if rng.u8(..if behaviour == 4 { 4 } else { 30 }) == 0 => {
                bench.dropped.set(bench.dropped.get() + 1);
                return Some((0, taken + gate.bytes.get()));
            }
            None => {}
        }
        if (behaviour < 4 || behaviour == 8) && taken + gate.bytes.get() == size as usize * 7 {
            source.shutdown();
        }
    }
    Some((0, taken + gate.bytes.get()))
}

/// A lane that sleeps when it has nothing to do.
fn on_lane<F: Future<Output = ()> + 'static>(
    body: impl FnOnce(Rc<Ring>, Rc<Timers>, Rc<Pulse>, RingWire) -> F + Send + 'static,
) {
    on_looking_lane(0, body)
}

/// One that looks for work for a while before it does.
fn on_looking_lane<F: Future<Output = ()> + 'static>(
    busy_poll_us: u64,
    body: impl FnOnce(Rc<Ring>, Rc<Timers>, Rc<Pulse>, RingWire) -> F + Send + 'static,
) {
    LocalExecutorBuilder::new(Placement::Unbound)
        .io_memory(65536)
        .ring_depth(16)
        .spawn(move || async move {
            let ring = Ring::new().expect("io_uring works here");
            let now_us = Rc::new(Cell::new(0));
            let timers = Timers::new(0);
            let pulse = Rc::new(Pulse::default());
            let wire = RingWire::new(&ring, &now_us);
            let late_wakes = Rc::new(Cell::new(0));
            let driver = Driver {
                ring: ring.clone(),
                timers: timers.clone(),
                pulse: pulse.clone(),
                now_us,
                epoch: Instant::now(),
                busy_poll_us,
                spun_us: Rc::default(),
                slept_us: Rc::default(),
                late_wakes: late_wakes.clone(),
            };
            let queue = glommio::executor().current_task_queue();
            spawn(&pulse, queue, body(ring.clone(), timers, pulse.clone(), wire));
            let watched = pulse.clone();
            driver.drive(move || watched.alive() == 0).await;
            assert_eq!(pulse.panics(), 0, "a task panicked; see above");
            assert_eq!(late_wakes.get(), 0, "the lane slept with runnable work");
            let until = Instant::now() + Duration::from_secs(5);
            let mut woken = Vec::new();
            while ring.in_flight() > 0 && Instant::now() < until {
                ring.turn(Some(Duration::from_millis(5)), &mut woken, || None);
            }
            assert_eq!(ring.in_flight(), 0, "operations leaked");
            assert_eq!(ring.lent(), 0, "receive buffers leaked");
            ring.wind_down();
        })
        .unwrap()
        .join()
        .unwrap();
}

#[test]
fn abused_operations_leak_nothing_and_mix_nothing_up() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let to = start_peers(64);
    std::thread::sleep(Duration::from_millis(50));
    // An executor of glommio 0.9 leaves one eventfd of its own behind: an empty lane shows how much.
    let bare = open_fds();
    on_lane(|_, _, _, _| async {});
    let before = open_fds();
    let executors = before.len() - bare.len();
    let operations = Arc::new(AtomicUsize::new(0));
    let counted = operations.clone();
    let seed = seed();
    // By the seed, the lane sleeps at once or looks for work before it does.
    on_looking_lane(seed % 2 * 50, move |ring, timers, pulse, wire| async move {
        let bench = Bench::new(wire, &timers, seed);
        let streams: u32 = std::env::var("WIRE_STREAMS").ok().and_then(|s| s.parse().ok()).unwrap_or(4000);
        let queue = glommio::executor().current_task_queue();
        for id in 0..streams {
            // No more at once than there are peers to serve them.
            bench.down_to(&pulse, 60, 1).await;
            spawn(&pulse, queue, abuse(bench.clone(), to, id));
        }
        bench.down_to(&pulse, 1, 10_000).await;
        assert!(bench.dropped.get() > streams as usize / 4, "only {} operations were given up", bench.dropped.get());
        assert!(bench.verified.get() > streams as usize / 10, "only {} streams came whole", bench.verified.get());
        counted.store(ring.completions.get() as usize, Ordering::Relaxed);
    });
    let n = operations.load(Ordering::Relaxed);
    println!("{n} completions");
    assert!(n > 20_000, "only {n} completions");
    let until = Instant::now() + Duration::from_secs(12);
    while open_fds().len() > before.len() + executors && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(
        open_fds().len() <= before.len() + executors,
        "descriptors leaked: {before:?} before, {:?} after",
        open_fds()
    );
}

/// Arrivals that nobody is woken for: in order, whole, to the right stream, whatever is given up when.
#[test]
fn what_passes_without_its_task_reaches_the_other_side_as_it_came() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let from = start_peers(32);
    let seen: &'static Mutex<Vec<(u32, usize)>> = Box::leak(Box::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    // Connections inherit it.
    socket2::SockRef::from(&listener).set_recv_buffer_size(8192).unwrap();
    std::thread::spawn(move || {
        for s in listener.incoming().flatten() {
            std::thread::spawn(move || sink(s, seen));
        }
    });
    let before = open_fds();
    let seed = seed();
    let streams: u32 = 1500;
    let expected: Arc<Mutex<Vec<(u32, usize, usize)>>> = Arc::default();
    let noted = expected.clone();
    on_looking_lane(seed % 2 * 50, move |ring, timers, pulse, wire| async move {
        let bench = Bench::new(wire, &timers, seed);
        let queue = glommio::executor().current_task_queue();
        for id in 0..streams {
            bench.down_to(&pulse, 30, 1).await;
            let (bench, noted) = (bench.clone(), noted.clone());
            spawn(&pulse, queue, async move {
                if let Some((least, most)) = ferry(bench, from, to, id).await {
                    noted.lock().unwrap().push((id, least, most));
                }
            });
        }
        bench.down_to(&pulse, 1, 10_000).await;
        println!(
            "{} arrivals passed, {} were collected behind a send under way",
            ring.passed.get(),
            bench.blocked.get()
        );
        if ring.mode() == Mode::Defer {
            assert!(ring.passed.get() > 5000, "only {} arrivals passed", ring.passed.get());
            assert!(bench.verified.get() > 5_000_000, "only {} bytes passed to the end", bench.verified.get());
        }
        assert!(bench.blocked.get() > 500, "only {} were collected behind a send under way", bench.blocked.get());
        assert!(bench.dropped.get() > streams as usize / 50, "only {} streams were given up", bench.dropped.get());
    });
    let expected = std::mem::take(&mut *expected.lock().unwrap());
    assert!(expected.len() > streams as usize / 2, "only {} streams were under way", expected.len());
    let until = Instant::now() + Duration::from_secs(12);
    for (id, least, most) in expected {
        let got = loop {
            let got = seen.lock().unwrap().iter().find(|(seen, _)| *seen == id).map(|(_, at)| *at);
            if got.is_some() || Instant::now() > until {
                break got;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let got = got.unwrap_or_else(|| panic!("stream {id} never ended, or was not what was sent"));
        assert!((least..=most).contains(&got), "stream {id}: {got} bytes of {least} to {most}");
    }
    let until = Instant::now() + Duration::from_secs(12);
    // An executor of glommio's leaves one eventfd behind.
    while open_fds().len() > before.len() + 1 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(open_fds().len() <= before.len() + 1, "leaked: {before:?} before, {:?} after", open_fds());
}

#[test]
fn a_panicking_task_ends_alone_and_gives_everything_back() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let to = start_peers(4);
    std::panic::set_hook(Box::new(|_| {}));
    LocalExecutorBuilder::new(Placement::Unbound)
        .io_memory(65536)
        .ring_depth(16)
        .spawn(move || async move {
            let ring = Ring::new().unwrap();
            let (now_us, timers, pulse) = (Rc::new(Cell::new(0)), Timers::new(0), Rc::new(Pulse::default()));
            let wire = Rc::new(RingWire::new(&ring, &now_us));
            let driver = Driver {
                ring: ring.clone(),
                timers: timers.clone(),
                pulse: pulse.clone(),
                now_us,
                epoch: Instant::now(),
                busy_poll_us: 0,
                spun_us: Rc::default(),
                slept_us: Rc::default(),
                late_wakes: Rc::new(Cell::new(0)),
            };
            let queue = glommio::executor().current_task_queue();
            for _ in 0..20 {
                let wire = wire.clone();
                spawn(&pulse, queue, async move {
                    let conn = wire.connect(to).await.unwrap();
                    conn.arm();
                    conn.start_send(Outgoing::Static(b"half a he"));
                    panic!("as planned");
                });
            }
            let watched = pulse.clone();
            driver.drive(move || watched.alive() == 0).await;
            assert_eq!(pulse.panics(), 20);
            let mut woken = Vec::new();
            for _ in 0..100 {
                ring.turn(Some(Duration::from_millis(2)), &mut woken, || None);
            }
            assert_eq!(ring.in_flight(), 0);
            ring.wind_down();
        })
        .unwrap()
        .join()
        .unwrap();
    let _ = std::panic::take_hook();
}

#[test]
fn a_closed_client_is_noticed_behind_pipelined_bytes() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    on_lane(|ring, timers, _, _| async move {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        tcp.set_nonblocking(true).unwrap();
        let to = tcp.local_addr().unwrap();
        let listener = Listener::new(tcp.into(), &ring);
        for pipelined in [false, true] {
            let mut peer = TcpStream::connect(to).unwrap();
            let fd = poll_fn(|cx| listener.poll_accept(cx)).await.unwrap();
            let conn = Socket::new(fd, &ring);
            if pipelined {
                peer.write_all(b"more to come").unwrap();
            }
            let timer = timers.timer();
            assert!(within(&timer, 100_000, |cx| conn.poll_gone(cx)).await.is_none(), "the peer is still there");
            drop(peer);
            assert!(within(&timer, 1_000_000, |cx| conn.poll_gone(cx)).await.is_some(), "the peer left");
            if pipelined {
                let chunk = poll_fn(|cx| conn.poll_recv(cx)).await.unwrap();
                assert_eq!(&*chunk, b"more to come", "what came before is still there");
            }
            assert!(poll_fn(|cx| conn.poll_recv(cx)).await.unwrap().is_empty());
        }
    });
}

#[test]
fn waiting_sockets_hold_no_receive_buffer() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    on_lane(|ring, timers, _, _| async move {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        tcp.set_nonblocking(true).unwrap();
        let to = tcp.local_addr().unwrap();
        let listener = Listener::new(tcp.into(), &ring);
        let mut pairs = Vec::new();
        for _ in 0..200 {
            let peer = TcpStream::connect(to).unwrap();
            let fd = poll_fn(|cx| listener.poll_accept(cx)).await.unwrap();
            let conn = Socket::new(fd, &ring);
            conn.arm();
            pairs.push((peer, conn));
        }
        let timer = timers.timer();
        timer.set(timer.now_us() + 50_000);
        timer.due().await;
        assert_eq!(ring.lent(), 0, "200 sockets wait");
        assert!(pairs.iter().all(|(_, conn)| conn.is_silent()));
        for (peer, _) in &mut pairs {
            peer.write_all(b"now").unwrap();
        }
        let mut chunks = Vec::new();
        for (_, conn) in &pairs {
            chunks.push(poll_fn(|cx| conn.poll_recv(cx)).await.unwrap());
        }
        assert!(chunks.iter().all(|c| &**c == b"now"));
        assert!(ring.lent() > 0, "what arrived lies in the ring's buffers");
        drop(chunks);
        assert_eq!(ring.lent(), 0);
    });
}

#[test]
fn an_end_that_comes_together_with_bytes_is_seen() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    on_lane(|ring, timers, _, _| async move {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        tcp.set_nonblocking(true).unwrap();
        let to = tcp.local_addr().unwrap();
        let listener = Listener::new(tcp.into(), &ring);
        let timer = timers.timer();
        for round in 0..120 {
            let mut peer = TcpStream::connect(to).unwrap();
            let fd = poll_fn(|cx| listener.poll_accept(cx)).await.unwrap();
            let conn = Socket::new(fd, &ring);
            let (reset, busy) = (round % 2 == 0, round % 3 == 0);
            assert!(within(&timer, 1, |cx| conn.poll_recv(cx)).await.is_none(), "the receive waits in the kernel");
            // Both before the lane's next turn: one wake serves them.
            peer.write_all(b"last words").unwrap();
            if busy {
                peer.write_all(b", and more").unwrap();
            }
            if reset {
                socket2::SockRef::from(&peer).set_linger(Some(Duration::ZERO)).unwrap();
            }
            drop(peer);
            let mut seen = 0;
            loop {
                match within(&timer, 3_000_000, |cx| conn.poll_recv(cx)).await {
                    Some(Ok(chunk)) if !chunk.is_empty() => seen += chunk.len(),
                    Some(Ok(_)) => break assert!(seen == if busy { 20 } else { 10 } || reset),
                    Some(Err(_)) => break assert!(reset),
                    None => panic!("the end was missed in round {round}, after {seen} bytes"),
                }
            }
        }
    });
}

/// On a lane that would look for ten seconds before it sleeps, nothing else waits for them.
#[test]
fn a_looking_lane_minds_its_timers_its_sockets_and_its_end() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let started = Instant::now();
    on_looking_lane(10_000_000, |ring, timers, _, _| async move {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        tcp.set_nonblocking(true).unwrap();
        let to = tcp.local_addr().unwrap();
        let listener = Listener::new(tcp.into(), &ring);
        let mut peer = TcpStream::connect(to).unwrap();
        let fd = poll_fn(|cx| listener.poll_accept(cx)).await.unwrap();
        let conn = Socket::new(fd, &ring);
        let timer = timers.timer();
        for _ in 0..5 {
            let (enters, before) = (ring.enters.get(), Instant::now());
            assert!(within(&timer, 60_000, |cx| conn.poll_recv(cx)).await.is_none(), "the peer is silent");
            assert!(before.elapsed() >= Duration::from_millis(60), "no earlier than asked");
            let looks = ring.enters.get() - enters;
            assert!(looks > 100, "{looks} looks in 60 ms");
            peer.write_all(b"now").unwrap();
            let chunk = within(&timer, 3_000_000, |cx| conn.poll_recv(cx)).await.expect("no timeout").unwrap();
            assert_eq!(&*chunk, b"now");
        }
    });
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
}
