//! The fleet alone: what a drain waits for, and who goes by which name.

use std::time::{Duration, Instant};

use corelane::config::WorkerSpec;
use corelane::control::exposition::Exposition;
use corelane::control::fleet::{After, Fleet, Id, News};
use corelane::shared::Shared;
use corelane::shared::vitals::Health;

const SOON: Duration = Duration::from_secs(600);

fn ready(fleet: &mut Fleet, spec: &WorkerSpec) -> Id {
    let id = fleet.register(spec).unwrap();
    fleet.apply(id, News::Health(Health::Ready, "test".into()));
    fleet.settle();
    id
}

#[test]
fn a_drained_worker_leaves_when_no_lane_can_choose_it_and_nobody_holds_it() {
    let shared = Shared::leak(2);
    let mut fleet = Fleet::new(shared);
    let page = Exposition::new(shared, fleet.bases());
    let id = ready(&mut fleet, &WorkerSpec::new("http://10.0.0.1:1"));
    ready(&mut fleet, &WorkerSpec::new("http://10.0.0.2:1"));
    let see = |lane| shared.roster.saw(lane, shared.roster.generation());
    assert!(shared.vitals.usable(id.slot));
    assert!(fleet.drain(id, After::Remove, SOON) && fleet.is_draining());
    assert!(!shared.vitals.usable(id.slot), "at once");
    assert!(fleet.drained(Instant::now()).is_empty() && fleet.len() == 2, "it is not published yet");
    fleet.settle();
    // A lane that has not looked since may be about to reserve.
    see(0);
    assert!(fleet.drained(Instant::now()).is_empty() && fleet.len() == 2, "lane 1 has not seen it");
    let late = shared.load.reserve_unconditional(id.slot, id.era, 1).unwrap();
    see(1);
    fleet.drained(Instant::now());
    assert_eq!(fleet.len(), 2, "a request holds it");
    assert!(page.text().contains(r#"corelane_workers{state="draining"} 1"#));
    assert!(fleet.drain(id, After::Remove, SOON), "again makes no difference");
    drop(late);
    fleet.drained(Instant::now());
    assert_eq!((fleet.len(), fleet.is_draining()), (1, false));
    fleet.settle();
    assert!(!page.text().contains("10.0.0.1:1"), "its series are gone");
    assert!(!fleet.drain(id, After::Remove, SOON) && !fleet.remove(id) && !fleet.undrain(id));

    // The slot has another tenant when every lane has seen that the old one is gone.
    let early = fleet.register(&WorkerSpec::new("http://10.0.0.3:1")).unwrap();
    assert_ne!(early.slot, id.slot);
    see(0);
    see(1);
    let next = fleet.register(&WorkerSpec::new("http://10.0.0.4:1")).unwrap();
    assert_eq!((next.slot, next.era), (id.slot, id.era + 1));
}

#[test]
fn a_drain_ends_when_its_time_is_over_but_the_slot_waits() {
    let shared = Shared::leak(1);
    let mut fleet = Fleet::new(shared);
    let id = ready(&mut fleet, &WorkerSpec::new("http://10.0.0.1:1"));
    let held = shared.load.reserve_unconditional(id.slot, id.era, 1).unwrap();
    fleet.drain(id, After::Remove, Duration::from_secs(60));
    fleet.settle();
    shared.roster.saw(0, shared.roster.generation());
    fleet.drained(Instant::now() + Duration::from_secs(59));
    assert_eq!(fleet.len(), 1);
    fleet.drained(Instant::now() + Duration::from_secs(60));
    assert_eq!(fleet.len(), 0);
    fleet.settle();
    shared.roster.saw(0, shared.roster.generation());
    let other = fleet.register(&WorkerSpec::new("http://10.0.0.2:1")).unwrap();
    assert_ne!(other.slot, id.slot, "a request still holds it");
    drop(held);
    assert_eq!(fleet.register(&WorkerSpec::new("http://10.0.0.3:1")).unwrap().slot, id.slot);
}

#[test]
fn a_worker_that_stays_takes_requests_again_as_its_probes_say() {
    let shared = Shared::leak(1);
    let mut fleet = Fleet::new(shared);
    let id = ready(&mut fleet, &WorkerSpec::new("http://10.0.0.1:1"));
    fleet.drain(id, After::Stay, Duration::ZERO);
    assert!(!fleet.is_draining(), "nothing is waited for");
    fleet.settle();
    shared.roster.saw(0, shared.roster.generation());
    fleet.drained(Instant::now() + SOON);
    fleet.apply(id, News::Health(Health::Unhealthy, "test".into()));
    fleet.apply(id, News::Health(Health::Ready, "test".into()));
    fleet.settle();
    assert_eq!(shared.vitals.health(id.slot), Health::Draining, "whatever the probes say");
    assert_eq!(fleet.show(id)[0].draining.unwrap().then, "stay");
    assert!(fleet.undrain(id) && fleet.undrain(id));
    fleet.settle();
    assert_eq!(shared.vitals.health(id.slot), Health::Ready);
    assert!(fleet.show(id)[0].draining.is_none() && !fleet.is_draining());
    fleet.drain(id, After::Stay, Duration::ZERO);
    fleet.take_back(id);
    fleet.settle();
    assert_eq!(shared.vitals.health(id.slot), Health::Pending, "it is probed first");
}

#[test]
fn workers_are_found_by_id_and_by_url() {
    let shared = Shared::leak(1);
    let mut fleet = Fleet::new(shared);
    let ranked = WorkerSpec { dp_size: Some(2), ..WorkerSpec::new("http://10.0.0.1:80") };
    let (ranked, other) = (ready(&mut fleet, &ranked), ready(&mut fleet, &WorkerSpec::new("http://[::1]:9/x")));
    let second = fleet.show(ranked)[1].id.clone();
    for name in [&ranked.to_string(), &second, "http://10.0.0.1", "HTTP://10.0.0.1:80/", "http://10.0.0.1:80@1"] {
        assert_eq!(fleet.find(name), Some(ranked), "{name}");
    }
    for name in [&other.to_string(), "http://[0::1]:9/x/"] {
        assert_eq!(fleet.find(name), Some(other), "{name}");
    }
    for name in ["", "7-1", "0-2", "x", "http://10.0.0.2", "http://10.0.0.1:80@x"] {
        assert_eq!(fleet.find(name), None, "{name}");
    }
}
