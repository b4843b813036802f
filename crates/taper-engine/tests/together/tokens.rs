//! A request's tokens and its usage are its own.

use crate::{Answer, answer, collect, engine, idle, pairs, request, together};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use taper_attention::catalogue;
use taper_engine::{EngineConfig, Request, RequestError, StopRules};

#[test]
fn every_method_is_tried() {
    for phase in ["prefill", "decode"] {
        let tried: BTreeSet<String> =
            pairs().iter().map(|pair| pair[phase]["method"].as_str().unwrap().into()).collect();
        let known = catalogue().into_iter().filter(|method| method.phase == phase).map(|method| method.name.to_owned());
        assert_eq!(tried, known.collect());
    }
}

#[test]
fn a_request_gets_the_same_tokens_alone_and_among_others() {
    let requests: Vec<Request> = pairs().iter().enumerate().map(|(i, pair)| request(i, pair)).collect();
    let quiet = engine(64, false, EngineConfig::default());
    let alone: Vec<Answer> = requests.iter().map(|r| answer(quiet.submit(r.clone()).unwrap())).collect();
    assert_eq!(quiet.load().counts.preemptions, 0);

    for chunk_tokens in [512, 48] {
        let busy = engine(1000, false, EngineConfig { chunk_tokens, ..EngineConfig::default() });
        together(&busy, &requests, &alone);
        assert_eq!(busy.load().counts.preemptions, 0);
    }
}

#[test]
fn answers_by_one_method_are_read_together_and_do_not_show_it() {
    // Of very different lengths, of which the shortest read everything and score nothing; in turns by two methods.
    let pairs = pairs();
    for two in pairs[..18].chunks(2) {
        let requests: Vec<Request> = (0..8).map(|i| Request { choices: 1, ..request(i * 5, &two[i % 2]) }).collect();
        let quiet = engine(64, false, EngineConfig::default());
        let alone: Vec<Answer> = requests.iter().map(|r| answer(quiet.submit(r.clone()).unwrap())).collect();
        together(&engine(1000, false, EngineConfig::default()), &requests, &alone);
    }
}

#[test]
fn a_request_that_loses_its_place_in_the_cache_gets_the_same_tokens() {
    let long = |(i, pair): (usize, &Value)| Request {
        stop: StopRules { ignore_eos: true, max_tokens: Some(200), ..StopRules::default() },
        choices: 1 + usize::from(i == 2),
        ..request(i, pair)
    };
    // Every fifth pair goes through all methods of both phases.
    let pairs: Vec<Value> = pairs().into_iter().step_by(5).collect();
    let requests: Vec<Request> = pairs.iter().enumerate().map(long).collect();
    let quiet = engine(64, false, EngineConfig::default());
    let alone: Vec<Answer> = requests.iter().map(|r| answer(quiet.submit(r.clone()).unwrap())).collect();
    assert_eq!(quiet.load().counts.preemptions, 0);
    for prefix in [false, true] {
        let busy = engine(18, prefix, EngineConfig { chunk_tokens: 100, ..EngineConfig::default() });
        together(&busy, &requests, &alone);
        assert!(busy.load().counts.preemptions > 1, "{:?}", busy.load());
    }
}

#[test]
fn a_prompt_that_loses_its_place_on_its_way_in_is_counted_once() {
    let window = json!({ "method": "streaming_llm", "sink": 4, "window": 50 });
    let prefill =
        [json!({ "method": "dense" }), json!({ "method": "delta", "gamma": 16, "base": window.clone() }), window];
    // Six answers that grow from two blocks to eight, and beside them a prompt of thirty that takes 475 steps.
    let with = |tokens: usize, length: usize| {
        move |request: Request| Request {
            prompt: (0..length).map(|i| ((i * i + 7 * i + length) % 64) as u32).collect(),
            stop: StopRules { ignore_eos: true, max_tokens: Some(tokens), ..StopRules::default() },
            choices: 1,
            ..request
        }
    };
    for prefill in prefill {
        let pair = json!({ "prefill": prefill, "decode": { "method": "quest", "k": 24 }, "audit": 0.1 });
        let mut requests: Vec<Request> =
            (0..6).map(|i| with(400, 95 + i)(request(i, &json!({ "audit": 0.1 })))).collect();
        requests.push(with(9, 1900)(request(6, &pair)));
        let quiet = engine(64, false, EngineConfig::default());
        let alone: Vec<Answer> = requests.iter().map(|r| answer(quiet.submit(r.clone()).unwrap())).collect();
        for prefix in [false, true] {
            // The prompt is never in before an answer wants a block that it has.
            let busy = engine(50, prefix, EngineConfig { stretch: 1.0, ..EngineConfig::default() });
            together(&busy, &requests, &alone);
            assert_eq!(busy.load().counts.preemptions, 1, "{pair}");
        }
    }
}

#[test]
fn a_late_request_ends_and_the_others_go_on() {
    let engine = engine(200, false, EngineConfig::default());
    let late = |after| Request {
        stop: StopRules { ignore_eos: true, max_tokens: Some(1500), ..StopRules::default() },
        deadline: Some(Instant::now() + Duration::from_millis(after)),
        ..request(1, &json!({}))
    };
    let (first, second) = (engine.submit(late(30)).unwrap(), engine.submit(late(0)).unwrap());
    let other = engine.submit(request(2, &json!({}))).unwrap();
    assert_eq!(collect(first).unwrap_err(), RequestError::Deadline);
    assert_eq!(collect(second).unwrap_err(), RequestError::Deadline);
    assert!(collect(other).is_ok());
    idle(&engine);
}
