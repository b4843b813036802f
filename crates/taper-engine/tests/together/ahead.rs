//! Steps that are begun before they are asked for: answers are those without.

use crate::{Answer, Watched, answer, backend, collect, engine, idle, request, start};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use taper_engine::{CacheOptions, EngineConfig, Request, SamplingParams, StopRules};

/// Requests whose tokens are drawn where the logits are; some end at a token that nobody foresees, many choose their keys.
fn requests() -> Vec<Request> {
    let quest = json!({ "method": "quest", "dense_layers": 0, "sink": 8, "window": 16, "k": 24 });
    let methods: [Value; 8] = [
        json!({ "method": "dense" }),
        json!({ "method": "vattention", "sink": 8, "window": 16, "pilot_tokens": 8, "epsilon": 0.3, "top": { "method": "quest" } }),
        json!({ "method": "dense" }),
        json!({ "method": "santa", "samples": 16 }),
        json!({ "method": "streaming_llm", "sink": 4, "window": 50 }),
        json!({ "method": "random_sample" }),
        json!({ "method": "santa", "samples": 16, "within": quest }),
        quest,
    ];
    let with = |number: usize| {
        let decode = &methods[number % 8];
        let stop = StopRules {
            ignore_eos: true,
            tokens: if number % 3 == 1 { (0..16).collect() } else { Vec::new() },
            max_tokens: Some(1 + number * 61 % 400),
            ..StopRules::default()
        };
        let temperature = [0.0, 1.0, 0.7][number % 3];
        let top_p = if number.is_multiple_of(2) { 1.0 } else { 0.9 };
        let sampling = SamplingParams { temperature, top_p, seed: number as u64, ..SamplingParams::default() };
        let repeats = if number == 11 { 1.3 } else { 1.0 };
        let sampling = SamplingParams { repetition_penalty: repeats, ..sampling };
        let logprobs = (number == 10).then_some(0);
        Request {
            stop,
            sampling,
            logprobs,
            choices: 1 + number % 5 / 4,
            ..request(number, &json!({ "decode": decode }))
        }
    };
    (0..16).map(with).collect()
}

#[test]
fn answers_are_those_of_steps_that_wait_to_be_asked_for() {
    let quiet = engine(64, false, EngineConfig::default());
    let alone: Vec<Answer> = requests().into_iter().map(|r| answer(quiet.submit(r).unwrap())).collect();
    // In plenty of room, and in so little that some lose their place while their next step is underway.
    let roomy = [(1000, false, 512, 60), (1000, true, 48, 60)];
    // Who loses its place depends on who answers when others come, and that on the machine: later and later, until somebody has.
    let narrow = [30, 60, 120, 240].map(|later| [(16, false, 512, later), (16, true, 48, later)]);
    let mut lost = [false; 2];
    for (blocks, prefix, chunk_tokens, later) in roomy.into_iter().chain(narrow.into_iter().flatten()) {
        if blocks == 16 && lost[usize::from(prefix)] {
            continue;
        }
        let mut watched = Watched::new(backend(blocks, CacheOptions { prefix, ..CacheOptions::default() }).unwrap());
        watched.inner.run_ahead(true);
        let followed = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&followed);
        watched.after = Box::new(move |inner| {
            count.store(inner.followed(), Ordering::SeqCst);
            Ok(())
        });
        let busy = start(watched, EngineConfig { chunk_tokens, ..EngineConfig::default() });
        let submit = |(number, request): (usize, Request)| {
            // Some come while others answer, however slow the machine.
            let (begun, tokens) = (Instant::now(), busy.load().counts.generated_tokens);
            while number % 4 == 3
                && busy.load().counts.generated_tokens < tokens + later
                && begun.elapsed() < Duration::from_secs(5)
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            busy.submit(request).unwrap()
        };
        let events: Vec<_> = requests().into_iter().enumerate().map(submit).collect();
        for ((number, events), expected) in events.into_iter().enumerate().zip(&alone) {
            let (tokens, usage) = collect(events).unwrap();
            assert_eq!(tokens, expected.0, "request {number}, {blocks} blocks");
            let cached = usage.cached_tokens > 0;
            let attention = serde_json::to_value(&usage.attention).unwrap();
            assert!(cached || attention == expected.1, "request {number}: {attention}, not {}", expected.1);
        }
        idle(&busy);
        let followed = followed.load(Ordering::SeqCst);
        assert!(followed > 30, "{followed} rows of steps that were underway");
        let preemptions = busy.load().counts.preemptions;
        assert!(preemptions == 0 || blocks == 16, "{:?}", busy.load());
        lost[usize::from(prefix)] |= preemptions > 0;
    }
    assert_eq!(lost, [true; 2], "nobody lost its place");
}
