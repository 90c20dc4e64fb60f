//! Decisions allocate nothing once they are warm, whatever the policy: counted, not believed.
//!
//! What the prefix tree allocates to remember something new is its business and budgeted; a prompt that it knows
//! costs nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use corelane::config::routes;
use corelane::config::{Assignment, BalanceMode, Policy, Role, Routing};
use corelane::flow::inspect::{Inspector, KeyRules};
use corelane::flow::route::{Want, choose};
use corelane::lane::view::View;
use corelane::shared::Shared;
use corelane::shared::roster::{Pairing, Slot, Worker};
use corelane::shared::vitals::Health;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: everything is the system allocator's; counting touches nothing but a number of this thread.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        // SAFETY: as required of our caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as required of our caller.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        // SAFETY: as required of our caller.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Allocations of this thread while `work` runs.
fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

fn fleet(workers: usize) -> &'static Shared {
    let shared = Shared::leak(1);
    let worker = |slot: usize| {
        shared.vitals.set_health(slot as Slot, Health::Ready);
        Arc::new(Worker {
            slot: slot as Slot,
            era: 1,
            role: Role::Regular,
            url: format!("http://10.0.0.1:{slot}").into(),
            prefix: "".into(),
            addrs: [([10, 0, 0, 1], 80).into()].into(),
            api_key: None,
            models: ["m".into()].into(),
            server_info: None,
            pairing: Pairing::default(),
        })
    };
    shared.roster.publish((0..workers).map(worker).collect());
    shared
}

#[test]
fn decisions_allocate_nothing() {
    let prompts: Vec<Vec<u64>> =
        (1..65u64).map(|id| (1..129).map(|b| (id * b).wrapping_mul(!id << 7)).collect()).collect();
    for workers in [8, 200] {
        for &policy in Policy::ALL {
            for (balance_mode, assignment) in [
                (BalanceMode::Worker, Assignment::Random),
                (BalanceMode::Fleet, Assignment::MinLoad),
                (BalanceMode::Worker, Assignment::MinGroup),
            ] {
                let shared = fleet(workers);
                let routing = Routing { balance_mode, assignment, ..Routing::DEFAULT };
                let mut view = View::new(0, shared, None);
                let mut rng = fastrand::Rng::with_seed(1);
                let mut now_us = 0;
                let mut round = |target: Option<&[u8]>| {
                    for (i, symbols) in prompts.iter().enumerate() {
                        now_us += 10;
                        let want = Want {
                            model: Some(b"m"),
                            policy,
                            routing: &routing,
                            symbols,
                            routing_key: &i.to_le_bytes(),
                            length: 100 * i,
                            target,
                            ..Want::default()
                        };
                        let tallies = shared.tallies.lane(0);
                        drop(choose(&mut view, &want, now_us, &mut rng, tallies).expect("a worker"));
                    }
                };
                // Two rounds: rings and tables are made, the tree knows all prompts.
                (0..2).for_each(|_| round(None));
                let made = allocations(|| {
                    round(None);
                    round(Some(b"3"));
                    round(Some(b"http://10.0.0.1:7"));
                });
                assert_eq!(made, 0, "{policy:?}, {workers} workers");
            }
        }
    }
}

#[test]
fn keys_allocate_nothing_once_their_buffer_has_grown() {
    let mut inspector = Inspector::new();
    let text =
        format!("{{\"messages\":[{{\"role\":\"user\",\"content\":\"{}\"}}],\"tools\":[1]}}", "word ".repeat(20_000));
    let ids = format!("{{\"messages\":[{}1]}}", "12345, ".repeat(20_000));
    let mut read = |body: &[u8]| {
        inspector.begin(routes::Body::Json(&["messages"]), b"");
        inspector.want_key(KeyRules { seed: 3, max_bytes: 1 << 20 });
        for end in (0..body.len()).step_by(16 * 1024) {
            inspector.feed(&body[..end]).unwrap();
        }
        let ask = inspector.finish(body).unwrap();
        while !inspector.hash(&ask, body) {}
        assert!(inspector.key().1.len() > 1000);
    };
    [&text, &ids].into_iter().for_each(|body| read(body.as_bytes()));
    assert_eq!(allocations(|| [&text, &ids].into_iter().for_each(|body| read(body.as_bytes()))), 0);
}
