//! Random histories of the real model: requests by random methods come when they like, and some of their clients leave.

use crate::{Answer, Watched, answer, backend, collect, engine, pairs, request, slices, sound, start};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use taper_engine::{CacheOptions, EngineConfig, Request, StopRules};

const HISTORIES: u64 = 12;

/// One of all requests, by number: methods, lengths and choices go with it.
fn any(number: usize, specs: &[Value]) -> Request {
    // Answers that grow by more than they are let in with.
    let stop = StopRules { ignore_eos: true, max_tokens: Some(40 + number % 5 * 60), ..StopRules::default() };
    Request { stop, ..request(number, &specs[number % specs.len()]) }
}

#[test]
fn whatever_happens_each_gets_what_it_gets_alone() {
    let whole = slices::methods().into_iter().map(|prefill| json!({ "prefill": prefill, "audit": 0.1 }));
    let specs: Vec<Value> = pairs().into_iter().chain(whole).collect();
    let quiet = engine(64, false, EngineConfig::default());
    let mut alone: HashMap<usize, Answer> = HashMap::new();
    let (mut preempted, mut left) = (0, 0);
    for history in 0..HISTORIES {
        let mut random = ChaCha8Rng::seed_from_u64(history);
        let config = EngineConfig {
            chunk_tokens: [1, 30, 100, 512][random.random_range(0..4)],
            sequences: random.random_range(2..12),
            ..EngineConfig::default()
        };
        let blocks = random.random_range(22..34);
        let watched = Watched::new(backend(blocks, CacheOptions::default()).unwrap());
        let seen = Arc::clone(&watched.seen);
        let busy = start(watched, config);
        let mut waiting = Vec::new();
        for _ in 0..10 {
            let number = random.random_range(0..200);
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
            let expected = alone.entry(number).or_insert_with(|| answer(quiet.submit(request).unwrap()));
            let (tokens, usage) = collect(events).unwrap();
            assert_eq!(tokens, expected.0, "history {history}, {}", specs[number % specs.len()]);
            assert_eq!(serde_json::to_value(&usage.attention).unwrap(), expected.1, "history {history}");
        }
        sound(&busy, &seen, blocks as usize);
        preempted += busy.load().preemptions;
    }
    assert!(preempted > 0 && left > 0, "{preempted} preemptions, {left} clients left");
}
