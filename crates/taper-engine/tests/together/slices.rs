//! Prompts whose method chooses by all of them at once go in beside others all the same, and do not show it.

use crate::faults::{Faulty, wait};
use crate::{Answer, Watched, answer, backend, collect, engine, request, sound, start, together};
use candle_core::Result;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use taper_attention::method::{Carry, PrefillChoice, PrefillLayer, PrefillMethod, PrefillOutput};
use taper_engine::{Backend, CacheOptions, EngineConfig, Input, Request, RequestError, StopRules};

/// Prefill methods that want much of a prompt at once, and Delta over each.
pub fn methods() -> Vec<Value> {
    let plain = [
        json!({ "method": "minference", "vertical": 40, "slash": 100, "init": 16 }),
        json!({ "method": "minference", "pattern": "vertical_slash", "vertical": 60, "slash": 100, "queries": 30 }),
        json!({ "method": "sample_attention", "min_tokens": 0, "alpha_c": 0.7, "alpha_s": 0.7 }),
        json!({ "method": "sample_attention", "min_tokens": 0, "alpha_c": 0.5, "alpha_s": 0.5, "chunks": 3 }),
    ];
    let delta = |base: &Value| json!({ "method": "delta", "gamma": 24, "base": base });
    plain.iter().cloned().chain(plain.iter().map(delta)).collect()
}

/// A prompt of so many tokens and an answer.
fn long(number: usize, attention: &Value, (prompt, answer): (usize, usize)) -> Request {
    Request {
        prompt: (0..prompt).map(|i| ((i * i + 7 * i + number * 13) % 64) as u32).collect(),
        stop: StopRules { ignore_eos: true, max_tokens: Some(answer), ..StopRules::default() },
        choices: 1 + number % 2,
        ..request(number, attention)
    }
}

/// Long prompts by all of them, and what each gets alone, its chunks in one piece.
fn requests() -> (Vec<Request>, Vec<Answer>) {
    let decode = json!({ "method": "quest", "k": 24, "sink": 8, "window": 16 });
    let with = |(i, prefill): (usize, Value)| {
        let spec = json!({ "prefill": prefill, "decode": decode, "audit": 0.1, "question": "dense" });
        Request { question_tokens: i % 3 * 10, ..long(i, &spec, (500 + 97 * i, 20)) }
    };
    let requests: Vec<Request> = methods().into_iter().enumerate().map(with).collect();
    let quiet = engine(64, false, EngineConfig { chunk_tokens: 2048, ..EngineConfig::default() });
    let alone = requests.iter().map(|r| answer(quiet.submit(r.clone()).unwrap())).collect();
    (requests, alone)
}

#[test]
fn a_prompt_in_slices_gets_what_it_gets_in_one_piece() {
    let (requests, alone) = requests();
    let (mut watched, steps) = (Watched::new(backend(64, CacheOptions::default()).unwrap()), Arc::default());
    let count: Arc<AtomicUsize> = Arc::clone(&steps);
    watched.before = Box::new(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
    });
    let quiet = start(watched, EngineConfig { chunk_tokens: 37, ..EngineConfig::default() });
    for (request, expected) in requests.iter().zip(&alone) {
        let before = steps.load(Ordering::SeqCst);
        together(&quiet, std::slice::from_ref(request), std::slice::from_ref(expected));
        // A slice may be up to a block of 64 more than was asked for, and a choice counts as 256 rows.
        let least = request.prompt.len() / (37 + (64 + 256) / 3) + 19;
        assert!(steps.load(Ordering::SeqCst) - before >= least, "a step does little of a prompt");
    }
    // All beside one another, and beside answers.
    for chunk_tokens in [512, 100] {
        let busy = engine(1000, true, EngineConfig { chunk_tokens, ..EngineConfig::default() });
        let answers: Vec<_> = (0..4).map(|i| long(i, &json!({}), (20, 400))).collect();
        let events: Vec<_> = answers.iter().map(|r| busy.submit(r.clone()).unwrap()).collect();
        together(&busy, &requests, &alone);
        events.into_iter().for_each(|events| drop(collect(events).unwrap()));
        assert_eq!(busy.load().counts.preemptions, 0);
    }
}

/// Behind many tokens a chunk that could be cut short goes in slices all the same.
#[test]
fn a_long_dense_prompt_goes_in_slices_behind_its_first_tokens() {
    let window = json!({ "method": "streaming_llm", "sink": 4, "window": 500 });
    for prefill in [json!({ "method": "dense" }), json!({ "method": "delta", "gamma": 16, "base": window }), window] {
        let prompt = long(2, &json!({ "prefill": prefill, "audit": 0.1 }), (2600, 5));
        let quiet = engine(64, false, EngineConfig { chunk_tokens: 4096, ..EngineConfig::default() });
        let alone = answer(quiet.submit(prompt.clone()).unwrap());
        let busy = engine(200, false, EngineConfig { chunk_tokens: 9, ..EngineConfig::default() });
        let beside = busy.submit(long(4, &json!({}), (20, 900))).unwrap();
        together(&busy, std::slice::from_ref(&prompt), std::slice::from_ref(&alone));
        drop(collect(beside).unwrap());
        let mut backend = backend(64, CacheOptions::default()).unwrap();
        let mut sequence = backend.open(&prompt.attention, 1, &prompt.prompt, 0).unwrap();
        let first = backend.chunk(&sequence, 9);
        backend.forward(vec![Input::whole(&mut sequence, &prompt.prompt[..2048], None)]).unwrap();
        let behind = backend.chunk(&sequence, 9);
        assert!(first < 64 && behind >= 64, "chunks of {first} and {behind} tokens");
        backend.close(sequence);
    }
}

#[test]
fn a_chunk_that_loses_its_place_on_its_way_begins_again() {
    for prefill in methods().iter().step_by(2) {
        // Answers that grow from two blocks to five, the third and the fourth within 75 steps, and beside them a prompt of
        // thirty that takes some 90.
        let mut requests: Vec<Request> =
            (0..6).map(|i| Request { choices: 1, ..long(i, &json!({ "audit": 0.1 }), (120 + i, 200)) }).collect();
        requests.push(long(6, &json!({ "prefill": prefill, "audit": 0.1 }), (1900, 9)));
        let quiet = engine(64, false, EngineConfig { chunk_tokens: 2048, ..EngineConfig::default() });
        let alone: Vec<Answer> = requests.iter().map(|r| answer(quiet.submit(r.clone()).unwrap())).collect();
        let watched = Watched::new(backend(50, CacheOptions::default()).unwrap());
        let seen = Arc::clone(&watched.seen);
        let busy = start(watched, EngineConfig { stretch: 1.0, chunk_tokens: 64, ..EngineConfig::default() });
        together(&busy, &requests, &alone);
        assert!(seen.dropped.load(Ordering::SeqCst) > 0, "{prefill}");
    }
}

#[test]
fn a_client_that_leaves_ends_a_chunk_within_a_step() {
    for prefill in methods() {
        let mut watched = Watched::new(backend(40, CacheOptions::default()).unwrap());
        let steps: Arc<AtomicUsize> = Arc::default();
        let count = Arc::clone(&steps);
        watched.before = Box::new(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(20));
        });
        let seen = Arc::clone(&watched.seen);
        let busy = start(watched, EngineConfig { chunk_tokens: 16, ..EngineConfig::default() });
        let events = busy.submit(long(0, &json!({ "prefill": prefill }), (1900, 9))).unwrap();
        wait("it is on its way", || steps.load(Ordering::SeqCst) > 10);
        drop(events);
        let left = steps.load(Ordering::SeqCst);
        sound(&busy, &seen, 40);
        // One may have begun since the count was read; of some 90 in all.
        assert!(steps.load(Ordering::SeqCst) <= left + 1);
        assert_eq!(seen.dropped.load(Ordering::SeqCst), 1);
    }
}

/// Chooses nothing, by the whole prompt, and panics in the second layer: choosing, or attending for a row.
#[derive(Debug)]
struct Broken(Option<usize>);

impl PrefillMethod for Broken {
    fn choose(&self, chunk: &PrefillLayer) -> Result<PrefillChoice> {
        assert!(chunk.layer != 1 || self.0.is_some(), "asked for in choosing");
        Ok(PrefillChoice::default())
    }

    fn attend(&self, rows: &PrefillLayer, choice: &PrefillChoice, _: &mut Carry) -> Result<PrefillOutput> {
        let struck = self.0.is_some_and(|row| (rows.start..rows.start + rows.rows()).contains(&row));
        assert!(rows.layer != 1 || !struck, "asked for in attending");
        rows.attend_choice(choice)
    }

    fn cut(&self, _: usize, prompt: usize, _: usize) -> usize {
        prompt
    }
}

#[test]
fn a_panic_in_a_slice_ends_its_request_and_no_other() {
    let (requests, alone) = requests();
    let victim = Request { choices: 1, ..long(77, &json!({}), (900, 9)) };
    for (broken, message) in [(None, "asked for in choosing"), (Some(500), "asked for in attending")] {
        let prompt = victim.prompt.clone();
        let mut watched = Watched::new(backend(300, CacheOptions::default()).unwrap());
        watched.opened = Box::new(move |sequence, of| {
            if *of == prompt {
                sequence.prefill_by_own("broken", Arc::new(Broken(broken)));
            }
        });
        let seen = Arc::clone(&watched.seen);
        let busy = start(watched, EngineConfig { chunk_tokens: 64, ..EngineConfig::default() });
        let ends = busy.submit(victim.clone()).unwrap();
        together(&busy, &requests, &alone);
        assert_eq!(collect(ends).unwrap_err(), RequestError::Panic(message.into()));
        sound(&busy, &seen, 300);
        // Nor does it wait for the others to be done: beside an answer that goes on it fails as soon.
        let before = busy.load().counts.generated_tokens;
        let endless = busy.submit(long(0, &json!({}), (20, 3_000))).unwrap();
        wait("the answer has begun", || busy.load().counts.generated_tokens > before);
        assert_eq!(collect(busy.submit(victim.clone()).unwrap()).unwrap_err(), RequestError::Panic(message.into()));
        let then = busy.load().counts.generated_tokens;
        wait("the answer goes on", || busy.load().counts.generated_tokens > then);
        drop(endless);
        sound(&busy, &seen, 300);
    }
}

#[test]
fn a_panic_beside_slices_is_not_seen_in_them() {
    let (requests, alone) = requests();
    let victim = Request { choices: 1, ..long(78, &json!({}), (40, 90)) };
    let prompt = victim.prompt.clone();
    let mut watched = Watched::new(backend(300, CacheOptions::default()).unwrap());
    watched.opened = Box::new(move |sequence, of| {
        if *of == prompt {
            sequence.decode_by_own("faulty", Arc::new(Faulty(50)));
        }
    });
    let seen = Arc::clone(&watched.seen);
    let busy = start(watched, EngineConfig { chunk_tokens: 64, ..EngineConfig::default() });
    let ends = busy.submit(victim).unwrap();
    together(&busy, &requests, &alone);
    assert_eq!(collect(ends).unwrap_err(), RequestError::Panic("asked for at 50".into()));
    sound(&busy, &seen, 300);
}
