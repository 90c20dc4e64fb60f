//! Prefill/decode pairs over real sockets: a gateway in this process between mock prefill and decode engines, which
//! meet in rooms as the real ones do, and a client that is written by hand.
//!
//! Takes nothing, gives verdicts. What became of a leg is asked at the worker's socket, never of the gateway.

#[allow(dead_code, reason = "other test programs use the rest")]
mod rig;

#[path = "pairs/admission.rs"]
mod admission;
#[path = "pairs/bodies.rs"]
mod bodies;
#[path = "pairs/choice.rs"]
mod choice;
#[path = "pairs/matrix.rs"]
mod matrix;
#[path = "pairs/spread.rs"]
mod spread;

use std::net::Ipv4Addr;
use std::time::Duration;

use corelane::boot::Gateway;
use corelane::config::{Backend, Config, Role, WorkerSpec};
use corelane::mock::{self, Engine, Fleet, Settings};
use rig::{Http, in_flight, until};

/// A gateway in front of mock prefill and decode engines.
pub struct Pairs {
    // Ended before the engines, so that what it still holds is not what ends it.
    pub gateway: Gateway,
    pub prefill: Fleet,
    pub decode: Fleet,
}

/// Engines that start a prefill and a decode worker with the same settings.
pub fn engines(settings: &Settings, prefill: usize, decode: usize) -> (Fleet, Fleet) {
    let start = |role, n| {
        let settings = Settings { role, ..settings.clone() };
        Fleet::start(settings, (Ipv4Addr::LOCALHOST, 0), n).expect("mock engines start")
    };
    (start(mock::Role::Prefill, prefill), start(mock::Role::Decode, decode))
}

/// Their workers.
pub fn specs(prefill: &Fleet, decode: &Fleet) -> Vec<WorkerSpec> {
    let of = |fleet: &Fleet, role| {
        let spec = move |url| WorkerSpec { role, ..WorkerSpec::new(url) };
        fleet.urls().into_iter().map(spec).collect::<Vec<_>>()
    };
    [of(prefill, Role::Prefill), of(decode, Role::Decode)].concat()
}

/// A gateway in front of one pair of this backend.
pub fn of_backend(backend: Backend, change: impl FnOnce(&mut Config)) -> Pairs {
    let bootstrap = backend == Backend::VllmMooncake;
    let connector = if bootstrap { mock::Connector::Mooncake } else { mock::Connector::Nixl };
    let vllm = backend != Backend::Sglang;
    let (prefill, decode) = engines(&Settings { vllm, connector, bootstrap, ..Settings::default() }, 1, 1);
    let mut specs = specs(&prefill, &decode);
    for spec in &mut specs {
        spec.backend = backend;
    }
    specs[0].bootstrap_port = prefill.engine(0).bootstrap_port();
    let mut config = rig::config(specs);
    change(&mut config);
    Pairs { gateway: rig::start(config), prefill, decode }
}

impl Pairs {
    pub fn new(prefill: usize, decode: usize) -> Pairs {
        Pairs::with(Settings::default(), prefill, decode, |_| {})
    }

    pub fn with(settings: Settings, prefill: usize, decode: usize, change: impl FnOnce(&mut Config)) -> Pairs {
        let (prefill, decode) = engines(&settings, prefill, decode);
        let mut config = rig::config(specs(&prefill, &decode));
        change(&mut config);
        Pairs { gateway: rig::start(config), prefill, decode }
    }

    pub fn http(&self) -> Http {
        Http::connect(self.gateway.address())
    }

    /// All engines, prefill first.
    pub fn engines(&self) -> impl Iterator<Item = &Engine> {
        self.prefill.engines().iter().chain(self.decode.engines())
    }

    /// Waits until no side has a request left.
    pub fn settles(&self) -> Duration {
        until("no request is in flight", || {
            in_flight(&self.gateway) == 0 && self.engines().all(|engine| engine.stats().active == 0)
        })
    }

    /// A sample of the admin listener's metrics, by name and labels as they are written.
    pub fn metric(&self, name: &str) -> Option<f64> {
        let page = Http::connect(self.gateway.admin()).ask("GET", "/metrics", &[], b"").text();
        page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    }
}
