//! Random histories of the real model: requests by random methods come when they like, and some of their clients leave; in
//! memory, and with most of the cache in a file.

use crate::faults::Faulty;
use crate::offload::nearly_all_in_a_file;
use crate::{Answer, Watched, answer, backend, collect, engine, pairs, request, slices, sound, start};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use taper_engine::{CacheOptions, EngineConfig, Request, RequestError, StopRules};

const HISTORIES: u64 = 18;

/// One of all requests, by number: methods, lengths and choices go with it, and whether its prompt begins as one of four
/// that many have.
fn any(number: usize, specs: &[Value]) -> Request {
    // Answers that grow by more than they are let in with.
    let stop = StopRules { ignore_eos: true, max_tokens: Some(40 + number % 5 * 60), ..StopRules::default() };
    let mut request = Request { stop, ..request(number, &specs[number % specs.len()]) };
    if !number.is_multiple_of(3) {
        let shared = request.prompt.len() * 3 / 4;
        (0..shared).for_each(|i| request.prompt[i] = ((i * i * i + number % 4 * i) % 64) as u32);
    }
    request.question_tokens = number % 15;
    request
}

/// Whether a request's method panics at its fourth token.
fn faulty(number: usize) -> bool {
    number % 10 == 7
}

#[test]
fn whatever_happens_each_gets_what_it_gets_alone() {
    let whole = slices::methods().into_iter().map(|prefill| json!({ "prefill": prefill, "audit": 0.1 }));
    let drafts = [("streaming_llm", "dense"), ("quest", "vattention"), ("dense", "santa")].map(|(draft, decode)| {
        let speculate = json!({ "method": draft, "tokens": 3, "lookup": if draft == "quest" { 2 } else { 0 } });
        json!({ "decode": { "method": decode }, "speculate": speculate, "question": "decode" })
    });
    let specs: Vec<Value> = pairs().into_iter().chain(whole).chain(drafts).collect();
    let quiet = engine(64, false, EngineConfig::default());
    let mut alone: HashMap<usize, Answer> = HashMap::new();
    let (mut preempted, mut left, mut shared, mut failed) = (0, 0, 0, 0);
    for history in 0..HISTORIES {
        let mut random = ChaCha8Rng::seed_from_u64(history);
        let config = EngineConfig {
            chunk_tokens: [1, 30, 100, 512][random.random_range(0..4)],
            sequences: random.random_range(2..12),
            ..EngineConfig::default()
        };
        let blocks = random.random_range(22..34);
        let prefix = random.random_bool(0.7);
        let folder = tempfile::tempdir().unwrap();
        let mut watched = match history % 3 {
            0 => nearly_all_in_a_file(blocks, folder.path()),
            _ => Watched::new(backend(blocks, CacheOptions { prefix, ..CacheOptions::default() }).unwrap()),
        };
        watched.inner.run_ahead(history % 2 == 0);
        let faults: Vec<Vec<u32>> =
            (0..HISTORIES as usize * 15 + 20).filter(|n| faulty(*n)).map(|n| any(n, &specs).prompt).collect();
        watched.opened = Box::new(move |sequence, prompt| {
            if faults.iter().any(|of| of == prompt) {
                sequence.decode_by_own("faulty", Arc::new(Faulty(prompt.len() + 3)));
            }
        });
        let seen = Arc::clone(&watched.seen);
        let busy = start(watched, config);
        let mut waiting = Vec::new();
        for _ in 0..10 {
            // Few numbers, so that some come again.
            let number = history as usize * 15 + random.random_range(0..20);
            let request = any(number, &specs);
            let events = busy.submit(request.clone()).unwrap();
            match random.random_bool(0.2) {
                // Its client leaves after a while.
                true => {
                    let time = Duration::from_millis(random.random_range(0..200));
                    std::thread::spawn(move || {
                        std::thread::sleep(time);
                        drop(events);
                    });
                    left += 1;
                }
                false => waiting.push((number, request, events)),
            }
            std::thread::sleep(Duration::from_millis(random.random_range(0..30)));
        }
        for (number, request, events) in waiting {
            if faulty(number) {
                let error = collect(events).unwrap_err();
                assert!(matches!(&error, RequestError::Panic(why) if why.contains("asked for")), "{error}");
                failed += 1;
                continue;
            }
            let spec = &specs[number % specs.len()];
            let expected = alone.entry(number).or_insert_with(|| answer(quiet.submit(request).unwrap()));
            let (tokens, usage) = collect(events).unwrap();
            assert_eq!(tokens, expected.0, "history {history}, {spec}");
            // What was cached already is not attended for; drafts begin anew where a place in the cache was lost.
            if usage.cached_tokens == 0 && spec["speculate"].is_null() {
                assert_eq!(serde_json::to_value(&usage.attention).unwrap(), expected.1, "history {history}, {spec}");
            }
            shared += usage.cached_tokens;
        }
        sound(&busy, &seen, blocks as usize);
        preempted += busy.load().counts.preemptions;
    }
    let seen = (preempted > 0, left > 0, shared > 0, failed > 0);
    assert_eq!(
        seen,
        (true, true, true, true),
        "{preempted} preemptions, {left} left, {shared} shared, {failed} failed"
    );
}
