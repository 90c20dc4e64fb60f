//! Everything that can go wrong on one leg, with a client that stays or leaves, streaming or not (field reports 12, 15,
//! 17, 19, 20): bounded time, the right status, the other leg closed, nothing left behind.

use std::time::Duration;

use corelane::mock::{Controls, Engine, Settings, Stats};
use serde_json::{Value, json};

use crate::Pairs;
use crate::rig::{Answer, End, in_flight, post, until};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Prefill,
    Decode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    Refuses,
    Resets,
    Answers(u16),
    Hangs,
    DiesMidway,
}

const TROUBLES: [Trouble; 9] = [
    Trouble::Refuses,
    Trouble::Resets,
    Trouble::Answers(400),
    Trouble::Answers(422),
    Trouble::Answers(429),
    Trouble::Answers(500),
    Trouble::Answers(503),
    Trouble::Hangs,
    Trouble::DiesMidway,
];

fn controls(of: impl FnOnce(&mut Controls)) -> Option<Controls> {
    let mut controls = Controls::default();
    of(&mut controls);
    Some(controls)
}

fn ask(stream: bool) -> Value {
    json!({"model": "mock", "prompt": "Hello", "max_tokens": 8, "stream": stream})
}

/// One pair, with the trouble on one side.
struct Case {
    pairs: Pairs,
    side: Side,
    trouble: Trouble,
}

impl Case {
    fn new(side: Side, trouble: Trouble) -> Case {
        let pairs = Pairs::with(Settings::default(), 1, 1, |config| {
            config.health_check = false;
            config.pool_idle = Duration::from_millis(100);
            let limit = Duration::from_millis(250);
            match (trouble, side) {
                (Trouble::Hangs, Side::Prefill) => config.prefill_first_byte_timeout = limit,
                (Trouble::Hangs, Side::Decode) => config.decode_first_byte_timeout = limit,
                _ => {}
            }
        });
        // A pair that works, with connections that are kept.
        for stream in [false, true] {
            pairs.http().post("/v1/completions", &ask(stream)).expect(200);
        }
        pairs.settles();
        Case { pairs, side, trouble }
    }

    fn engine(&self, side: Side) -> &Engine {
        match side {
            Side::Prefill => self.pairs.prefill.engine(0),
            Side::Decode => self.pairs.decode.engine(0),
        }
    }

    fn other(&self) -> Side {
        if self.side == Side::Prefill { Side::Decode } else { Side::Prefill }
    }

    fn begin(&self) {
        let engine = self.engine(self.side);
        match self.trouble {
            Trouble::Refuses => engine.kill(),
            Trouble::Resets => engine.misbehave(controls(|c| c.reset_before_head = true)),
            Trouble::Answers(status) => engine.misbehave(controls(|c| c.status = Some(status))),
            Trouble::Hangs => engine.misbehave(controls(|c| c.hang = true)),
            Trouble::DiesMidway => engine.misbehave(controls(|c| c.reset_after_events = Some(1))),
        }
        if (self.side, self.trouble) == (Side::Prefill, Trouble::DiesMidway) {
            // Else the decode worker may have what it needs before the prefill's answer breaks off.
            self.engine(Side::Decode).misbehave(controls(|c| c.gap_ms = Some(3000.0)));
        }
    }

    fn end(&self) {
        if self.trouble == Trouble::Refuses {
            self.engine(self.side).restart().expect("the port is still free");
        }
        for side in [Side::Prefill, Side::Decode] {
            self.engine(side).misbehave(None);
        }
    }

    /// What a client that stays is told.
    fn check(&self, answer: &Answer, stream: bool) {
        let name = if self.side == Side::Prefill { "prefill" } else { "decode" };
        let error = |status, what: &str| {
            answer.clone().expect_error(status, &format!("{name}_{what}"));
        };
        match self.trouble {
            Trouble::Refuses => error(502, "worker_unreachable"),
            Trouble::Resets => error(502, "worker_reset"),
            Trouble::Hangs => error(504, "worker_silent"),
            Trouble::Answers(status) => {
                assert_eq!((answer.status, answer.end), (status, End::Whole), "{}", answer.head);
                assert!(answer.header("x-corelane-error").is_none(), "the engine's own error: {}", answer.head);
                assert!(!answer.body.is_empty());
            }
            Trouble::DiesMidway if self.side == Side::Prefill && !stream => error(502, "worker_reset"),
            // The head may be out when the prefill's answer breaks off.
            Trouble::DiesMidway if answer.status == 502 => error(502, "worker_reset"),
            Trouble::DiesMidway => assert_ne!(answer.end, End::Whole, "{}\n{}", answer.head, answer.text()),
        }
    }

    /// Nothing is left: asked of the workers' sockets first.
    fn is_over(&self, before: &Stats) {
        self.pairs.settles();
        let other = self.engine(self.other()).stats();
        if self.trouble != Trouble::DiesMidway {
            assert_eq!(other.output_tokens, before.output_tokens, "the other leg went on: {other:?}");
        }
        let connections = || self.pairs.gateway.shared().handover.connections(0);
        until("no client's connection is left", || connections() == 0);
        let open = || self.pairs.engines().map(|engine| engine.stats().connections).sum::<u64>();
        until("no worker's connection is left", || open() == 0);
    }
}

fn run(side: Side, trouble: Trouble) {
    let case = Case::new(side, trouble);
    for stream in [false, true] {
        for stays in [true, false] {
            let before = case.engine(case.other()).stats();
            case.begin();
            let mut http = case.pairs.http();
            http.send(&post("/v1/completions", &ask(stream)));
            if stays {
                let answer = http.try_answer_to("POST");
                let answer = answer.unwrap_or_else(|end| Answer {
                    status: 0,
                    head: String::new(),
                    fields: Vec::new(),
                    body: Vec::new(),
                    trailers: String::new(),
                    end,
                });
                case.check(&answer, stream);
            } else {
                // As early as it gets, or when both workers have the request.
                if trouble == Trouble::Hangs {
                    until("both have it", || {
                        case.pairs.engines().all(|engine| engine.stats().active > 0)
                            || in_flight(&case.pairs.gateway) == 0
                    });
                }
            }
            drop(http);
            case.is_over(&before);
            case.end();
            // And the pair works as if nothing had been.
            case.pairs.http().post("/v1/completions", &ask(stream)).expect(200);
            case.pairs.settles();
        }
    }
    for engine in case.pairs.engines() {
        assert_eq!(engine.stats().duplicate_rooms, 0);
    }
}

macro_rules! matrix {
    ($( $name:ident: $side:ident $at:literal; )*) => {
        $( #[test] fn $name() { run(Side::$side, TROUBLES[$at]); } )*
    };
}

matrix! {
    prefill_refuses: Prefill 0;
    prefill_resets: Prefill 1;
    prefill_answers_400: Prefill 2;
    prefill_answers_422: Prefill 3;
    prefill_answers_429: Prefill 4;
    prefill_answers_500: Prefill 5;
    prefill_answers_503: Prefill 6;
    prefill_hangs: Prefill 7;
    prefill_dies_midway: Prefill 8;
    decode_refuses: Decode 0;
    decode_resets: Decode 1;
    decode_answers_400: Decode 2;
    decode_answers_422: Decode 3;
    decode_answers_429: Decode 4;
    decode_answers_500: Decode 5;
    decode_answers_503: Decode 6;
    decode_hangs: Decode 7;
    decode_dies_midway: Decode 8;
}
