//! The printed table of transitions, random sequences against a naive model, and threads.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use super::*;
use crate::limits::MAX_TRIALS;
use crate::shared::Shared;
use crate::shared::roster::{Pairing, Role, Worker};

const RULES: Breaker = Breaker { on: true, failures: 3, successes: 2, open_s: 2, window_s: 120 };

fn after(vital: Vital, events: &[Event], rules: &Breaker) -> Vital {
    events.iter().fold(vital, |vital, &event| vital.after(event, rules).0)
}

fn show(vital: Vital) -> String {
    let mut out = vital.state().name().to_owned();
    let mut more = |name: &str, n: u32| {
        if n > 0 {
            let _ = write!(out, ", {name} {n}");
        }
    };
    more("failures", vital.failures());
    more("left", vital.open_left_s());
    more("trials", vital.trials());
    more("successes", vital.successes());
    out
}

/// The table as the text of `tuning/breaker.md`.
fn markdown() -> String {
    use Event::{BadWindow, Failed, MayOpen, MustYield, Second, Succeeded, TrialBegins, TrialEnds};
    let ready = Vital::default().after(Event::Judged(Health::Ready), &RULES).0;
    let failing = after(ready, &[Failed, Failed], &RULES);
    let held = after(failing, &[Failed], &RULES);
    let open = after(held, &[MayOpen], &RULES);
    let due = after(open, &[Second, Second], &RULES);
    let half = after(due, &[Second], &RULES);
    let tried = after(half, &[TrialBegins], &RULES);
    let full = after(half, &[TrialBegins; MAX_TRIALS as usize], &RULES);
    let nearly = after(tried, &[Succeeded, TrialEnds], &RULES);
    let mut page = String::from(
        "# Circuit breaker\n\nWhat becomes of a worker's breaker, from the transition function in \
         `src/shared/vitals/word.rs` (`CORELANE_BLESS=1 cargo test --lib vitals` rewrites this page), with 3 failures in \
         a row (`cb_failure_threshold`), 2 successes (`cb_success_threshold`) and 2 seconds \
         (`cb_timeout_duration_secs`). *Usable*: it may be given requests, if its probes agree. Seconds left are \
         counted with one more, because the first may pass at once. *Held*: it would be open, but half of a pool \
         is; it takes requests, weighed by its failures in a row, and opens when there is room. A dash: nothing \
         happens.\n\n| before | event | after | usable | effect |\n|---|---|---|---|---|\n",
    );
    for before in [ready, failing, held, open, due, half, tried, full, nearly] {
        for event in [Succeeded, Failed, BadWindow, MayOpen, MustYield, TrialBegins, TrialEnds, Second] {
            let (next, effect) = before.after(event, &RULES);
            let (effect, usable) = match effect {
                None => (String::new(), next.usable()),
                Some(Effect::Trips) => ("asks whether it may open".into(), next.usable()),
                Some(Effect::Moves(to)) => (format!("is {}", to.name()), next.usable()),
                Some(Effect::OnTrial) => ("the request is a trial".into(), next.usable()),
            };
            let usable = if usable { "yes" } else { "no" };
            let changed = if next == before { "–".into() } else { show(next) };
            let _ = writeln!(page, "| {} | {event:?} | {changed} | {usable} | {effect} |", show(before));
        }
    }
    page
}

#[test]
fn breaker_page_matches_the_function() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tuning/breaker.md");
    if std::env::var_os("CORELANE_BLESS").is_some() {
        std::fs::write(path, markdown()).expect("the page can be written");
    }
    let page = std::fs::read_to_string(path).unwrap_or_default();
    assert!(page == markdown(), "tuning/breaker.md is stale; CORELANE_BLESS=1 cargo test --lib vitals rewrites it");
}

/// The breaker as one would write it without counting bits.
#[derive(Clone, Debug)]
struct Naive {
    health: Health,
    shed: bool,
    state: State,
    row: u32,
    pause: u32,
    trials: u32,
    successes: u32,
    left: u32,
}

impl Naive {
    fn to(&mut self, state: State) {
        (self.state, self.successes) = (state, 0);
    }

    fn open(&mut self, rules: &Breaker) {
        self.left = rules.open_s + 1;
        self.to(State::Open);
    }

    fn take(&mut self, event: Event, rules: &Breaker) {
        match event {
            Event::Succeeded => {
                (self.row, self.pause) = (0, 0);
                if self.state == State::HalfOpen {
                    self.successes += 1;
                    if self.successes >= rules.successes.into() {
                        self.to(State::Closed);
                    }
                } else if self.state == State::Held {
                    self.state = State::Closed;
                }
            }
            Event::Failed => {
                self.row = (self.row + 1).min(255);
                self.pause = if self.row > 6 { 60 } else { 1 << (self.row - 1) };
                if self.state == State::HalfOpen {
                    self.open(rules);
                } else if self.state == State::Closed && rules.on && self.row >= rules.failures.into() {
                    self.state = State::Held;
                }
            }
            Event::BadWindow if self.state == State::Closed && rules.on => self.state = State::Held,
            Event::MayOpen if self.state == State::Held => self.open(rules),
            Event::MustYield if matches!(self.state, State::Open | State::HalfOpen) => {
                self.left = 0;
                self.to(State::Held);
            }
            Event::TrialBegins if self.state == State::HalfOpen && self.trials < MAX_TRIALS => self.trials += 1,
            Event::TrialEnds => self.trials = self.trials.saturating_sub(1),
            Event::Second => {
                (self.pause, self.left) = (self.pause.saturating_sub(1), self.left.saturating_sub(1));
                if self.state == State::Open && self.left == 0 {
                    self.to(State::HalfOpen);
                }
            }
            Event::Judged(health) => self.health = health,
            Event::Shed(is) => self.shed = is,
            _ => {}
        }
    }

    fn usable(&self) -> bool {
        self.health == Health::Ready
            && match self.state {
                State::Closed | State::Held => true,
                State::HalfOpen => self.trials < MAX_TRIALS,
                State::Open => false,
            }
    }

    fn weight(&self, in_flight: u32) -> u32 {
        if self.row == 0 || self.state == State::HalfOpen || self.pause == 0 && in_flight == 0 {
            return 0;
        }
        FIRST_WEIGHT << (self.row - 1).min(16)
    }
}

#[test]
fn words_agree_with_a_naive_model() {
    let mut rng = fastrand::Rng::with_seed(11);
    let mut seen = [0u32; 4];
    for round in 0..400 {
        let rules = Breaker {
            on: rng.u8(..8) != 0,
            failures: [1, 2, 10, 255][rng.usize(..4)],
            successes: [1, 3, 255][rng.usize(..3)],
            open_s: [1, 3, 86400][rng.usize(..3)],
            window_s: 120,
        };
        let mut word = Vital::default();
        let mut naive = Naive {
            health: Health::Pending,
            shed: false,
            state: State::Closed,
            row: 0,
            pause: 0,
            trials: 0,
            successes: 0,
            left: 0,
        };
        let ill = rng.u8(..=100);
        for step in 0..600 {
            let event = match rng.u8(..10) {
                0..4 if rng.u8(..100) < ill => Event::Failed,
                0..4 => Event::Succeeded,
                4 => Event::MayOpen,
                5 => Event::TrialBegins,
                6 => Event::TrialEnds,
                7 => Event::Second,
                8 => [Event::BadWindow, Event::MustYield, Event::Second, Event::Shed(rng.bool())][rng.usize(..4)],
                _ => Event::Judged([Health::Ready, Health::Ready, Health::Unhealthy, Health::Draining][rng.usize(..4)]),
            };
            let (next, effect) = word.after(event, &rules);
            let was = naive.clone();
            naive.take(event, &rules);
            let told =
                (next.health(), next.state(), next.failures(), next.trials(), next.successes(), next.open_left_s());
            let meant = (naive.health, naive.state, naive.row, naive.trials, naive.successes, naive.left);
            assert_eq!(told, meant, "round {round}, step {step}: {event:?} after {was:?}");
            assert_eq!(next.usable(), naive.usable(), "{naive:?}");
            assert_eq!((next.is_shed(), next.open_to(Reach::Usable)), (naive.shed, naive.usable()), "{naive:?}");
            assert_eq!(next.open_to(Reach::Unshed), naive.usable() && !naive.shed, "{naive:?}");
            for in_flight in [0, 1, 5] {
                assert_eq!(next.weight(in_flight), naive.weight(in_flight), "{naive:?}");
            }
            let moved = was.state != naive.state
                && naive.state != State::Held
                && !(was.state == State::Held && naive.state == State::Closed);
            assert_eq!(
                matches!(effect, Some(Effect::Moves(to)) if to == naive.state),
                moved,
                "{event:?} after {was:?}"
            );
            let trips = naive.state == State::Held && was.state == State::Closed;
            assert_eq!(effect == Some(Effect::Trips), trips);
            assert_eq!(effect == Some(Effect::OnTrial), naive.trials > was.trials);
            assert_eq!(next.counts_down(), naive.pause > 0 || naive.left > 0);
            assert!(rules.on || naive.state == State::Closed, "off is off");
            seen[naive.state as usize] += 1;
            word = next;
        }
    }
    assert!(seen.iter().all(|&n| n > 1000), "{seen:?}");
}

#[test]
fn failures_weigh_until_a_success_and_pause_before_a_trial() {
    let vitals = Vitals::new();
    vitals.set_rules(Breaker { on: false, ..Breaker::DEFAULT });
    vitals.set_health(3, Health::Ready);
    let weight = |in_flight| vitals.vital(3).weight(in_flight);
    assert_eq!(weight(0), 0);
    for failures in 1..=300u32 {
        assert!(!vitals.ended(3, false));
        assert_eq!(vitals.vital(3).failures(), failures.min(255));
        assert_eq!(weight(0), FIRST_WEIGHT << (failures - 1).min(16), "{failures}");
    }
    assert_eq!(vitals.failed(3), 300);
    for _ in 0..59 {
        vitals.second(3);
        assert_ne!(weight(0), 0);
    }
    vitals.second(3);
    assert_eq!((weight(0), weight(1)), (0, FIRST_WEIGHT << 16), "one request on trial");
    vitals.second(3);
    vitals.ended(3, false);
    assert_ne!(weight(0), 0);
    assert!(vitals.usable(3) && vitals.vital(3).usable());
    vitals.ended(3, true);
    assert_eq!((weight(0), weight(1), vitals.vital(3).failures()), (0, 0, 0));
    vitals.ended(3, false);
    vitals.second(3);
    assert_eq!(weight(0), 0, "the first pause is a second");
    vitals.vacate(3);
    assert_eq!((vitals.vital(3).failures(), vitals.health(3), vitals.failed(3)), (0, Health::Pending, 0));
}

#[test]
fn only_ready_is_usable_and_other_bits_stay() {
    let vitals = Vitals::new();
    for _ in 0..5 {
        vitals.ended(9, false);
    }
    let mut before = Health::Pending;
    for (at, health) in [Health::Unhealthy, Health::Ready, Health::Draining, Health::Pending].into_iter().enumerate() {
        assert_eq!(vitals.set_health(9, health), before);
        assert_eq!(vitals.set_health(9, health), health);
        assert_eq!(vitals.flips(9, health), 1, "{at}");
        assert_eq!(vitals.usable(9), health == Health::Ready);
        assert_eq!(vitals.vital(9).failures(), 5);
        before = health;
    }
}

fn fleet(lanes: usize, workers: Slot, models: impl Fn(Slot) -> Vec<&'static str>) -> &'static Shared {
    let shared = Shared::leak(lanes);
    shared.vitals.set_rules(RULES);
    publish(shared, 0..workers, &models);
    for slot in 0..workers {
        shared.vitals.set_health(slot, Health::Ready);
    }
    shared
}

fn publish(shared: &Shared, slots: impl Iterator<Item = Slot>, models: &impl Fn(Slot) -> Vec<&'static str>) {
    let worker = |slot: Slot| {
        Arc::new(Worker {
            slot,
            era: 1,
            role: Role::Regular,
            url: format!("http://10.0.0.1:{slot}").into(),
            prefix: "".into(),
            addrs: [([10, 0, 0, 1], 80).into()].into(),
            api_key: None,
            models: models(slot).iter().map(|&m| m.into()).collect(),
            server_info: None,
            pairing: Pairing::default(),
        })
    };
    shared.roster.publish(slots.map(worker).collect());
}

fn fail(shared: &Shared, slot: Slot) -> State {
    for _ in 0..RULES.failures {
        if shared.vitals.ended(slot, false) {
            shared.try_open(slot);
        }
    }
    shared.vitals.vital(slot).state()
}

/// So many seconds that an open breaker half-opens.
fn wait(shared: &Shared, slot: Slot) {
    for _ in 0..=RULES.open_s {
        shared.vitals.second(slot);
    }
}

/// So many successes that a half-open one closes.
fn recover(shared: &Shared, slot: Slot) {
    for _ in 0..RULES.successes {
        shared.vitals.ended(slot, true);
    }
}

#[test]
fn at_most_half_of_every_pool_opens() {
    // `a` has four workers, `b` three, one of them both, and the last one is `c`'s only one.
    let models = |slot| match slot {
        0..3 => vec!["a"],
        3 => vec!["a", "b"],
        4..6 => vec!["b"],
        _ => vec!["c"],
    };
    let shared = fleet(1, 7, models);
    use State::{HalfOpen, Held, Open};
    assert_eq!([0, 3].map(|slot| fail(shared, slot)), [Open, Open], "two of a");
    assert_eq!([1, 2, 4, 5, 6].map(|slot| fail(shared, slot)), [Held; 5], "a is full, b too, and c has nobody else");
    assert!([1, 2, 4, 5, 6].iter().all(|&slot| shared.vitals.usable(slot)));
    // Half-open ones count as well.
    wait(shared, 0);
    assert_eq!(shared.vitals.vital(0).state(), HalfOpen);
    assert!(!shared.try_open(1));
    // One closes: there is room.
    recover(shared, 0);
    assert!(shared.try_open(1) && !shared.try_open(2));
    assert_eq!(shared.vitals.moves(1, Open), 1);
    // A pool shrinks: of 1, 2 and 3 two are out. The one that is nearest to its end yields.
    publish(shared, 1..7, &models);
    shared.vitals.second(3);
    shared.keep_half();
    assert_eq!([1, 2, 3].map(|slot| shared.vitals.vital(slot).state()), [Open, Held, Held]);
    assert!(shared.try_open(4), "b has room now");
    // Those that the probes have put out are no reason to lose more.
    let shared = fleet(1, 4, |_| vec!["a"]);
    shared.vitals.set_health(0, Health::Unhealthy);
    shared.vitals.set_health(1, Health::Unhealthy);
    assert_eq!([fail(shared, 2), fail(shared, 3)], [Open, Held]);
    assert!(!shared.try_open(9), "nobody is there");
}

#[test]
fn breakers_that_are_switched_off_close() {
    let shared = fleet(1, 3, |_| vec!["a"]);
    let others = Breaker { on: true, failures: 255, successes: 255, open_s: MOST_OPEN_S as u32, window_s: 86400 };
    for rules in [others, Breaker { on: false, ..RULES }, RULES] {
        shared.vitals.set_rules(rules);
        assert_eq!(shared.vitals.rules(), rules);
    }
    assert_eq!([0, 1].map(|slot| fail(shared, slot)), [State::Open, State::Held]);
    shared.vitals.set_rules(Breaker { on: false, ..RULES });
    shared.close_breakers();
    assert_eq!([0, 1].map(|slot| fail(shared, slot)), [State::Closed; 2]);
    assert!([0, 1, 2].iter().all(|&slot| shared.vitals.usable(slot)));
    assert_eq!([0, 1].map(|slot| shared.vitals.moves(slot, State::Closed)), [1, 0]);
}

/// Lanes fail, succeed, try and open all at once; control counts seconds and changes the roster.
#[test]
fn under_threads_no_pool_loses_more_than_half_and_trials_stay_few() {
    const WORKERS: Slot = 9;
    const LANES: u64 = 4;
    const SECONDS: u32 = 300;
    let shared = fleet(LANES as usize, WORKERS, |_| vec!["a"]);
    let vitals = &shared.vitals;
    let in_trial: [AtomicU32; WORKERS as usize] = Default::default();
    let most_out = AtomicU32::new(0);
    // Seen under the turn: nobody opens then, so a count can only be too high by what closes meanwhile.
    let look = || {
        if let Some(_turn) = vitals.turn() {
            let out = (0..WORKERS).filter(|&slot| vitals.vital(slot).is_out()).count();
            most_out.fetch_max(out as u32, Ordering::Relaxed);
            assert!(2 * out <= WORKERS.into(), "{out} are out");
        }
    };
    let count = |state| (0..WORKERS).map(|slot| vitals.moves(slot, state)).sum::<u64>();
    let over = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        for lane in 0..LANES {
            let (in_trial, look) = (&in_trial, &look);
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(lane);
                while !over.load(Ordering::SeqCst) {
                    let slot = rng.u16(..WORKERS);
                    if let Some(trial) = vitals.try_trial(slot) {
                        let now = in_trial[usize::from(slot)].fetch_add(1, Ordering::SeqCst) + 1;
                        assert!(now <= MAX_TRIALS, "{now} trials");
                        if rng.bool() {
                            vitals.ended(slot, rng.u8(..4) != 0);
                        }
                        in_trial[usize::from(slot)].fetch_sub(1, Ordering::SeqCst);
                        drop(trial);
                    }
                    if vitals.ended(slot, rng.u8(..5) < 2) {
                        shared.try_open(slot);
                    }
                    look();
                }
            });
        }
        scope.spawn(|| {
            // On a busy machine the lanes may have done little by then.
            for second in 0..1000 * SECONDS {
                if second >= SECONDS && count(State::Closed) > 5 {
                    break;
                }
                for slot in 0..WORKERS {
                    vitals.second(slot);
                    if vitals.vital(slot).state() == State::Held {
                        shared.try_open(slot);
                    }
                }
                std::thread::yield_now();
            }
            over.store(true, Ordering::SeqCst);
        });
    });
    assert!(most_out.into_inner() >= 2, "several were out at a time");
    for slot in 0..WORKERS {
        assert_eq!(vitals.vital(slot).trials(), 0, "every place was given back");
    }
    for state in [State::Open, State::HalfOpen, State::Closed] {
        assert!(count(state) > 5, "{state:?}");
    }
    // From anywhere: when its requests go well it closes.
    for slot in 0..WORKERS {
        wait(shared, slot);
        recover(shared, slot);
        assert_eq!(vitals.vital(slot).state(), State::Closed);
        assert!(vitals.usable(slot));
    }
}
