//! What goes wrong in one request, or is not wanted any more, is not seen by those beside it.

use crate::{Watched, answer, backend, collect, engine, idle, pairs, request, sound, start, unhurried};
use candle_core::Result;
use serde_json::json;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use taper_attention::method::{Choice, DecodeMethod, DecodeStep};
use taper_engine::{CacheOptions, Engine, EngineConfig, Event, Request, RequestError, StopRules};
use taper_kernels::decode::Selection;

/// What the engine logs.
static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LOG.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Dense attention that panics in the second layer over the row at a position.
#[derive(Debug)]
pub(crate) struct Faulty(pub usize);

impl DecodeMethod for Faulty {
    fn select(&self, step: &DecodeStep) -> Result<Choice> {
        let struck = step.layer == 1 && step.batch.rows.iter().any(|row| row.visible.end == self.0 + 1);
        assert!(!struck, "asked for at {}", self.0);
        Ok(Selection::dense(step.batch.rows.len(), step.kv_heads).into())
    }
}

#[test]
fn a_panic_in_a_layer_ends_its_request_and_no_other() {
    // The only subscriber of this program; another test's lines do no harm.
    let _ = tracing_subscriber::fmt().with_ansi(false).with_writer(|| Log).try_init();
    let window = json!({ "method": "streaming_llm", "sink": 4, "window": 50 });
    let delta = json!({ "method": "delta", "gamma": 16, "base": window });
    let quest = json!({ "method": "quest", "k": 24, "sink": 8, "window": 16 });
    let specs = [
        json!({ "decode": quest, "audit": 1 }),
        json!({ "prefill": delta, "audit": 1 }),
        json!({ "prefill": delta, "decode": quest, "audit": 0.5 }),
        json!({ "prefill": delta, "decode": quest, "question": "decode", "audit": 0.5 }),
    ];
    let asks = |request: Request| Request { question_tokens: 20, choices: 1, ..request };
    let requests: Vec<Request> = specs.iter().enumerate().map(|(i, spec)| asks(request(i * 3, spec))).collect();
    let quiet = engine(64, false, EngineConfig::default());
    let alone: Vec<_> = requests.iter().map(|r| answer(quiet.submit(r.clone()).unwrap())).collect();

    let victim = asks(request(5, &json!({ "question": "decode", "audit": 1 })));
    let length = victim.prompt.len();
    // In the question, and in the answer.
    for position in [length - 5, length + 6] {
        let prompt = victim.prompt.clone();
        let mut watched = Watched::new(backend(200, CacheOptions::default()).unwrap());
        watched.opened = Box::new(move |sequence, of| {
            if *of == prompt {
                sequence.decode_by_own("faulty", Arc::new(Faulty(position)));
            }
        });
        let seen = Arc::clone(&watched.seen);
        let busy = start(watched, EngineConfig { chunk_tokens: 100, ..EngineConfig::default() });
        let mut all: Vec<Request> = requests.clone();
        all.insert(1, Request { id: format!("victim {position}"), ..victim.clone() });
        let mut events: Vec<_> = all.iter().map(|r| busy.submit(r.clone()).unwrap()).collect();
        let error = collect(events.remove(1)).unwrap_err();
        assert_eq!(error, RequestError::Panic(format!("asked for at {position}")));
        for ((events, expected), spec) in events.into_iter().zip(&alone).zip(&specs) {
            assert_eq!(answer(events), *expected, "{spec}");
        }
        sound(&busy, &seen, 200);
        let log = String::from_utf8(LOG.lock().unwrap().clone()).unwrap();
        let cause = |line: &&str| line.contains("request failed") && line.contains(&format!("victim {position}"));
        let line = log.lines().find(cause).expect("the failure is logged");
        assert!(line.contains("ERROR") && line.contains(&format!("asked for at {position}")), "{line}");
    }
}

pub(crate) fn wait(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// An answer of so many tokens to a prompt of a hundred.
fn long(number: usize, tokens: usize) -> Request {
    Request {
        prompt: (0..100).map(|i| ((i * i + 7 * i + number) % 64) as u32).collect(),
        stop: StopRules { ignore_eos: true, max_tokens: Some(tokens), ..StopRules::default() },
        choices: 1,
        ..request(number, &pairs()[number])
    }
}

fn alone(request: &Request) -> crate::Answer {
    answer(engine(64, false, EngineConfig::default()).submit(request.clone()).unwrap())
}

#[test]
fn a_request_that_waits_for_its_place_to_come_again_can_be_cancelled() {
    // Both would need eleven blocks.
    let watched = unhurried(Watched::new(backend(12, CacheOptions::default()).unwrap()));
    let seen = Arc::clone(&watched.seen);
    let busy = start(watched, EngineConfig::default());
    let (older, younger) = (long(0, 600), long(4, 600));
    let (first, second) = (busy.submit(older.clone()).unwrap(), busy.submit(younger).unwrap());
    wait("the younger one loses its place", || busy.load().counts.preemptions == 1);
    assert_eq!(busy.load().running, 2, "it counts as one that runs");
    drop(second);
    wait("it is let go", || busy.load().running == 1);
    assert_eq!(answer(first), alone(&older));
    sound(&busy, &seen, 12);
}

#[test]
fn a_request_that_waits_in_the_queue_can_be_cancelled() {
    let watched = unhurried(Watched::new(backend(64, CacheOptions::default()).unwrap()));
    let busy: Engine = start(watched, EngineConfig { sequences: 1, ..EngineConfig::default() });
    let (first, last) = (long(0, 600), long(4, 20));
    let mut running = busy.submit(first.clone()).unwrap();
    let waiting: Vec<_> = (1..4).map(|number| busy.submit(long(number, 600)).unwrap()).collect();
    let kept = busy.submit(last.clone()).unwrap();
    wait("they wait", || busy.load().waiting == 4);
    drop(waiting);
    wait("they are let go", || busy.load().waiting == 1);
    assert!(!matches!(running.try_recv(), Ok(Event::Done(_))), "nobody had to end for it");
    drop(running);
    assert_eq!(answer(kept), alone(&last));
    idle(&busy);
}
