//! What prompts begin with in common.

use crate::faults::Faulty;
use crate::{Watched, answer, backend, collect, engine, idle, request, sound, spec, start, unhurried};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use taper_engine::{CacheOptions, EngineConfig, Event, Events, Request, StopRules};

#[test]
fn prompts_share_what_they_begin_with_where_their_methods_allow_it() {
    let window = json!({ "method": "streaming_llm", "sink": 4, "window": 50 });
    let delta = |gamma: usize| json!({ "method": "delta", "gamma": gamma, "base": window });
    let prompt: Vec<u32> = (0..700u32).map(|i| (i * i + 3 * i) % 64).collect();
    let make = |prompt: &[u32], prefill: &Value| Request {
        prompt: prompt.to_vec(),
        choices: 1,
        ..request(1, &json!({ "prefill": prefill, "decode": { "method": "quest", "k": 24, "sink": 8, "window": 16 } }))
    };
    let shared = engine(200, true, EngineConfig::default());
    let lone = engine(200, false, EngineConfig::default());
    let run = |prompt: &[u32], prefill: &Value, cached: usize| {
        let (tokens, usage) = collect(shared.submit(make(prompt, prefill)).unwrap()).unwrap();
        assert_eq!(usage.cached_tokens, cached, "{} tokens by {prefill}", prompt.len());
        let (expected, usage) = collect(lone.submit(make(prompt, prefill)).unwrap()).unwrap();
        assert_eq!((tokens, usage.cached_tokens), (expected, 0), "{} tokens by {prefill}", prompt.len());
    };
    let dense = json!({ "method": "dense" });
    run(&prompt, &dense, 0);
    run(&prompt, &dense, 640);
    run(&prompt[..640], &dense, 576);
    run(&prompt[..100], &dense, 64);
    // Other ways to attend, or the same with other knobs, have keys of their own.
    run(&prompt, &window, 0);
    run(&prompt, &delta(64), 0);
    run(&prompt, &delta(16), 0);
    run(&prompt, &dense, 640);
    // The dense tail of a longer prompt is not that of a shorter one: 700 - 128 = 572, and 512 of whole blocks.
    run(&prompt, &delta(64), 512);
    run(&prompt[..512], &delta(64), 384);
    // Where a method looks at all of a prompt nothing is shared, unless the prompt is so short that it is dense.
    let sampled = json!({ "method": "sample_attention", "min_tokens": 0 });
    run(&prompt, &sampled, 0);
    run(&prompt, &sampled, 0);
    // Another first token is another prompt.
    let mut other = prompt.clone();
    other[0] += 1;
    run(&other, &dense, 0);
    // What was computed densely for a question attended otherwise is not shared; what comes before it is.
    let ask = |context: usize| {
        let mut request = make(&prompt, &dense);
        request.attention = spec(&json!({ "question": "decode", "decode": { "method": "oracle_top_k", "k": 24 } }));
        request.question_tokens = 700 - context;
        collect(shared.submit(request).unwrap()).unwrap().1.cached_tokens
    };
    assert_eq!((ask(600), ask(600), ask(128)), (576, 576, 128));
    // Nor what was asked under another salt.
    let salted = |salt: &str| {
        let request = Request { salt: salt.into(), ..make(&prompt, &dense) };
        collect(shared.submit(request).unwrap()).unwrap().1.cached_tokens
    };
    assert_eq!(["", "a", "b", "a", "b", ""].map(salted), [640, 0, 0, 640, 640, 640]);
    idle(&shared);
}

#[test]
fn what_others_hold_of_a_prompt_takes_no_room() {
    // Sixteen blocks of a prompt, two for each answer: both fit if fifteen are shared.
    let engine = start(unhurried(with_prefix(23)), EngineConfig::default());
    let make = |number: usize| Request {
        prompt: (0..1000u32).map(|i| (i * i + 3 * i) % 64).collect(),
        stop: StopRules { ignore_eos: true, max_tokens: Some(150), ..StopRules::default() },
        choices: 1,
        ..request(number, &json!({}))
    };
    let mut first = engine.submit(make(0)).unwrap();
    assert!(matches!(first.blocking_recv(), Some(Event::Prefilled)));
    let second = engine.submit(make(1)).unwrap();
    while engine.load().running < 2 {
        assert!(!matches!(first.try_recv(), Ok(Event::Done(_))), "the second waits for the first");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(collect(second).unwrap().1.cached_tokens, 960);
    drop(first);
    idle(&engine);
}

#[test]
fn what_is_shared_is_given_up_before_anyone_waits() {
    let engine = engine(12, true, EngineConfig::default());
    let prompts: Vec<Vec<u32>> = (0..6u32).map(|p| (0..300).map(|i| (i * i + p * 5 + i) % 64).collect()).collect();
    for prompt in prompts.iter().chain(&prompts) {
        let request = Request { prompt: prompt.clone(), choices: 1, ..request(3, &json!({})) };
        collect(engine.submit(request).unwrap()).unwrap();
    }
    assert_eq!(engine.load().counts.preemptions, 0);
    let last = Request { prompt: prompts[5].clone(), choices: 1, ..request(3, &json!({})) };
    assert_eq!(collect(engine.submit(last).unwrap()).unwrap().1.cached_tokens, 256);
    idle(&engine);
}

#[test]
fn of_prompts_that_begin_alike_and_come_together_one_computes_what_they_share() {
    let ways = [json!({}), json!({ "prefill": { "method": "streaming_llm", "sink": 4, "window": 50 } })];
    // Eight of 700 tokens, of which the first 640 are the same, four by each way; and one that begins otherwise.
    let make = |number: usize| Request {
        prompt: (0..700u32).map(|i| (i * i + if i < 640 { 3 } else { number as u32 } * i) % 64).collect(),
        choices: 1,
        ..request(number, &ways[number % 2])
    };
    let other = || Request { prompt: vec![9; 600], choices: 1, ..request(3, &ways[0]) };
    let lone = engine(200, false, EngineConfig::default());
    let expected: Vec<_> = (0..8).map(|number| collect(lone.submit(make(number)).unwrap()).unwrap().0).collect();
    // All are there before the first step is over.
    let (open, gate) = std::sync::mpsc::channel::<()>();
    let mut watched = with_prefix(200);
    watched.before = Box::new(move |_| _ = gate.recv());
    let seen = Arc::clone(&watched.seen);
    let busy = start(watched, EngineConfig { chunk_tokens: 256, ..EngineConfig::default() });
    let events: Vec<Events> = (0..8).map(|number| busy.submit(make(number)).unwrap()).collect();
    let last = busy.submit(other()).unwrap();
    drop(open);
    let mut cached = Vec::new();
    for (events, expected) in events.into_iter().zip(expected) {
        let (tokens, usage) = collect(events).unwrap();
        assert_eq!(tokens, expected);
        cached.push(usage.cached_tokens);
    }
    assert_eq!(cached, [0, 0, 640, 640, 640, 640, 640, 640]);
    assert_eq!(collect(last).unwrap().1.cached_tokens, 0);
    sound(&busy, &seen, 200);
}

#[test]
fn who_waits_for_a_prompt_goes_on_when_its_client_leaves() {
    let (open, gate) = std::sync::mpsc::sync_channel::<()>(0);
    let mut watched = with_prefix(200);
    watched.before = Box::new(move |_| _ = gate.recv());
    let seen = Arc::clone(&watched.seen);
    let busy = start(watched, EngineConfig { chunk_tokens: 128, ..EngineConfig::default() });
    let first = busy.submit(sharer(0, 4)).unwrap();
    let second = busy.submit(sharer(2, 4)).unwrap();
    // The first one's third step begins, and the second has not begun.
    (0..3).for_each(|_| open.send(()).unwrap());
    assert_eq!((busy.load().running, busy.load().waiting), (1, 1));
    drop((first, open));
    let (_, usage) = collect(second).unwrap();
    assert!((256..960).contains(&usage.cached_tokens), "{} tokens", usage.cached_tokens);
    sound(&busy, &seen, 200);
}

/// A prompt of 1,000 tokens that many have, and an answer by one of several methods.
fn sharer(number: usize, tokens: usize) -> Request {
    let decode = [json!({ "method": "dense" }), json!({ "method": "quest", "k": 24 })];
    Request {
        prompt: (0..1000u32).map(|i| (i * i + 5 * i) % 64).collect(),
        stop: StopRules { ignore_eos: true, max_tokens: Some(tokens), ..StopRules::default() },
        choices: 1,
        ..request(number, &json!({ "decode": decode[number % 2] }))
    }
}

fn with_prefix(blocks: u64) -> Watched {
    Watched::new(backend(blocks, CacheOptions { prefix: true, ..CacheOptions::default() }).unwrap())
}

/// Takes events up to the first text.
fn first_text(events: &mut Events) {
    while !matches!(events.blocking_recv().expect("an answer"), Event::Delta(_)) {}
}

#[test]
fn sharers_come_and_go_and_lose_their_places_together() {
    let quiet = engine(64, false, EngineConfig::default());
    let requests: Vec<Request> = (0..6).map(|number| sharer(number, 300)).collect();
    let alone: Vec<_> = requests.iter().map(|r| answer(quiet.submit(r.clone()).unwrap()).0).collect();
    // Fifteen blocks that all have, and fifteen for six own ones each.
    let watched = with_prefix(30);
    let seen = Arc::clone(&watched.seen);
    let busy = start(watched, EngineConfig::default());
    let mut events: Vec<Events> = requests.iter().map(|r| busy.submit(r.clone()).unwrap()).collect();
    first_text(&mut events[1]);
    drop(events.remove(1));
    let mut shared = 0;
    for (events, expected) in events.into_iter().zip([0, 2, 3, 4, 5].map(|i| &alone[i])) {
        let (tokens, usage) = collect(events).unwrap();
        assert_eq!(tokens, *expected);
        shared += usage.cached_tokens;
    }
    assert!(busy.load().counts.preemptions > 0 && shared >= 3 * 960, "{:?}, {shared} tokens", busy.load());
    sound(&busy, &seen, 30);
}

#[test]
fn what_is_held_is_not_given_up_and_what_is_not_is_computed_again() {
    let quiet = engine(64, false, EngineConfig::default());
    let alone = answer(quiet.submit(sharer(1, 20)).unwrap()).0;
    let watched = with_prefix(40);
    let seen = Arc::clone(&watched.seen);
    let busy = start(watched, EngineConfig::default());
    let other = |number: u32| {
        let prompt = (0..300).map(|i| (i * i + number * 7 + 1) % 64).collect();
        let stop = StopRules { ignore_eos: true, max_tokens: Some(2), ..StopRules::default() };
        collect(busy.submit(Request { prompt, stop, choices: 1, ..request(3, &json!({})) }).unwrap()).unwrap();
    };
    let mut holder = busy.submit(sharer(0, 1000)).unwrap();
    first_text(&mut holder);
    // Blocks of eight other prompts, of which four find room beside the holder's.
    (0..8).for_each(other);
    while let Ok(event) = holder.try_recv() {
        assert!(!matches!(event, Event::Done(_)), "the holder still runs");
    }
    let (tokens, usage) = collect(busy.submit(sharer(1, 20)).unwrap()).unwrap();
    assert_eq!((&tokens, usage.cached_tokens), (&alone, 960));
    drop(holder);
    idle(&busy);
    (8..20).for_each(other);
    let (tokens, usage) = collect(busy.submit(sharer(1, 20)).unwrap()).unwrap();
    assert_eq!((&tokens, usage.cached_tokens), (&alone, 0));
    sound(&busy, &seen, 40);
}

#[test]
fn what_a_failed_request_leaves_is_not_shared() {
    let prompt: Vec<u32> = (0..700u32).map(|i| (i * i + 3 * i) % 64).collect();
    let mut watched = Watched::new(backend(100, CacheOptions { prefix: true, ..CacheOptions::default() }).unwrap());
    let first = AtomicBool::new(true);
    watched.opened = Box::new(move |sequence, _| {
        if first.swap(false, Ordering::SeqCst) {
            sequence.decode_by_own("faulty", Arc::new(Faulty(705)));
        }
    });
    let engine = start(watched, EngineConfig::default());
    let request = Request { prompt, choices: 1, ..request(1, &json!({})) };
    collect(engine.submit(request.clone()).unwrap()).unwrap_err();
    let cached = || collect(engine.submit(request.clone()).unwrap()).unwrap().1.cached_tokens;
    assert_eq!((cached(), cached()), (0, 640));
}
