//! The rooms of the walk over a wire that does what it is told: states of a socket that real ones reach by chance.
//!
//! Takes nothing, gives verdicts. Never opens a socket; the clock is set by hand.

use std::cell::Cell;
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use corelane::config::Config;
use corelane::fault::What;
use corelane::flow::passage::{Client, Request};
use corelane::flow::receive::receive;
use corelane::lane::Lane;
use corelane::lane::timers::Timers;
use corelane::lane::wire::{Chunk, Conn, NoPipe, Outgoing, Wire};
use corelane::shared::Shared;

/// A wire on which nothing arrives.
struct Still {
    now_us: Rc<Cell<u64>>,
}

/// A connection whose peer sends nothing, takes nothing and stays.
struct Stuck;

impl Wire for Still {
    type Conn = Stuck;

    async fn connect(&self, _: SocketAddr) -> io::Result<Stuck> {
        pending().await
    }

    fn now_us(&self) -> u64 {
        self.now_us.get()
    }
}

impl Conn for Stuck {
    type Pipe = NoPipe;

    fn arm(&self) {}
    fn poll_recv(&self, _: &mut Context<'_>) -> Poll<io::Result<Chunk>> {
        Poll::Pending
    }
    fn poll_fill(&self, _: &mut Context<'_>, _: &mut Vec<u8>, _: usize) -> Poll<io::Result<usize>> {
        Poll::Pending
    }
    fn unread(&self, _: Chunk) {}
    fn start_send(&self, _: Outgoing) {}
    fn poll_sent(&self, _: &mut Context<'_>) -> Poll<io::Result<Option<Outgoing>>> {
        Poll::Pending
    }
    fn is_sending(&self) -> bool {
        true
    }
    fn taken(&self) -> usize {
        0
    }
    fn poll_gone(&self, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
    fn poll_broken(&self, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
    fn is_silent(&self) -> bool {
        true
    }
    fn shutdown(&self) {}
    fn set_abortive(&self, _: bool) {}

    fn met_break(&self) -> bool {
        false
    }

    fn is_taken(&self) -> bool {
        false
    }
}

/// A configuration lives as long as somebody goes by it, however many come after it.
#[test]
fn old_configurations_go_when_nobody_goes_by_them() {
    let wire = Still { now_us: Rc::new(Cell::new(0)) };
    let mut config = Config::with_workers(vec![]);
    let shared = Shared::leak(1);
    let lane = Lane::new(0, shared, Rc::new(config.clone()), wire, Timers::new(0), 1);
    let mut request = Request::new(lane.config());
    let kept = lane.config();
    let mut seen = Vec::new();
    for round in 0..300 {
        config.max_headers = 50 + round;
        (config.default_model, config.pool_size) = (Some(format!("m{round}")), round);
        shared.settings.publish(&config);
        assert_eq!(request.config.max_headers, if round == 0 { kept.max_headers } else { 49 + round });
        lane.renew(&mut request.config);
        assert_eq!(request.config.max_headers, 50 + round);
        assert_eq!(lane.view.borrow().model(None), Some(format!("m{round}").as_bytes()));
        seen.push(Rc::downgrade(&request.config));
    }
    assert_eq!(seen.iter().filter(|config| config.upgrade().is_some()).count(), 1);
    assert!(Rc::ptr_eq(&request.config, &lane.config()) && kept.default_model.is_none());
}

/// A client that reads nothing has a full socket some day, and `100 Continue` may be what does not fit any more.
#[test]
fn an_invitation_that_nobody_takes_is_given_up() {
    let now_us = Rc::new(Cell::new(0));
    let timers = Timers::new(0);
    let mut config = Config::with_workers(vec![]);
    config.write_stall_timeout = Duration::from_secs(3);
    let wire = Still { now_us: now_us.clone() };
    let lane = Lane::new(0, Shared::leak(1), Rc::new(config), wire, timers.clone(), 1);
    for framing in ["Content-Length: 2", "Transfer-Encoding: chunked"] {
        let peer = "127.0.0.1:9".parse().unwrap();
        let client = Client::new(Stuck, peer, timers.timer(), lane.config());
        let head = format!("POST /generate HTTP/1.1\r\nHost: g\r\nExpect: 100-continue\r\n{framing}\r\n\r\n");
        let mut request = Request::new(lane.config());
        let begun = now_us.get();
        request.started_us = begun;
        let mut receiving = pin!(receive(&lane, &client, &mut request, Chunk::heap(head.into_bytes())));
        let mut cx = Context::from_waker(Waker::noop());
        let fault = loop {
            if let Poll::Ready(received) = receiving.as_mut().poll(&mut cx) {
                break received.unwrap_err();
            }
            now_us.set(now_us.get() + 100_000);
            assert!(now_us.get() < begun + 60_000_000, "{framing}: waits for ever");
            timers.advance(now_us.get(), &mut Vec::new());
        };
        assert_eq!(fault.what, What::ClientStalled, "{framing}");
        let took = now_us.get() - begun;
        assert!((3_000_000..4_000_000).contains(&took), "{framing}: {took}");
    }
}
