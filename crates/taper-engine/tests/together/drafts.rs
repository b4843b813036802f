//! Drafts that a sparse method makes and the request's own one checks: the answer is the one without.

use crate::{Answer, answer, collect, engine, idle, request};
use serde_json::{Value, json};
use taper_engine::{EngineConfig, Request, StopRules};

/// What answers go by, and what drafts.
fn methods() -> Vec<(Value, Value)> {
    let few = |name: &str| json!({ "method": name, "sink": 8, "window": 16, "k": 24 });
    let window = json!({ "method": "streaming_llm", "sink": 4, "window": 50 });
    let vattention = json!({ "method": "vattention", "sink": 8, "window": 16, "epsilon": 0.3, "delta": 0.3 });
    let santa = json!({ "method": "santa", "samples": 16 });
    let clusters = json!({ "method": "saap", "sink": 4, "window": 8, "probes": 2, "dense_layers": 1 });
    let dense = json!({ "method": "dense" });
    vec![
        (dense.clone(), few("quest")),
        (few("quest"), window.clone()),
        (vattention.clone(), few("hash_attention")),
        (santa.clone(), window),
        (clusters, dense.clone()),
        (dense, vattention),
        (few("double_sparsity"), santa),
    ]
}

/// Requests without drafts, or with some that choose so often or are looked up.
fn requests(by: Option<&str>) -> Vec<Request> {
    let with = |(i, (decode, draft)): (usize, (Value, Value))| {
        let tokens = [4, 1, 9, 15][i % 4];
        let speculate = by.map(|by| match by {
            "lookup" => json!({ "lookup": 1 + i % 3, "tokens": tokens }),
            "both" => json!({ "lookup": 2, "method": draft, "tokens": tokens }),
            choose => json!({ "method": draft, "tokens": tokens, "choose": choose }),
        });
        let stop = StopRules { ignore_eos: true, max_tokens: Some(250), ..StopRules::default() };
        let request = request(i, &json!({ "decode": decode, "speculate": speculate, "audit": 0.1 }));
        Request { stop, choices: 1 + i % 2, ..request }
    };
    methods().into_iter().enumerate().map(with).collect()
}

#[test]
fn an_answer_with_drafts_is_the_one_without() {
    let quiet = engine(64, false, EngineConfig::default());
    let plain: Vec<Answer> = requests(None).into_iter().map(|r| answer(quiet.submit(r).unwrap())).collect();
    for by in ["token", "round", "lookup", "both"] {
        let alone = requests(Some(by)).into_iter().map(|r| answer(quiet.submit(r).unwrap()));
        let mut found = 0;
        for ((drafted, usage), (expected, _)) in alone.zip(&plain) {
            assert_eq!(&drafted, expected, "{by}: {usage}");
            let speculation = &usage[0]["speculation"];
            let density = &speculation["draft"]["density"];
            assert_eq!(density.is_null(), by == "lookup", "{usage}");
            assert!(density.as_f64() <= Some(1.0), "{by}: {usage}");
            assert!(by == "lookup" || speculation["accepted"].as_u64() > Some(0), "{by}: {usage}");
            assert_eq!(speculation["lookup"].is_null(), by == "token" || by == "round", "{usage}");
            found += speculation["lookup"]["accepted"].as_u64().unwrap_or(0);
        }
        assert_eq!(found > 0, by == "lookup" || by == "both", "{found} of what was looked up was right");
    }
    // Drafts by the method that checks them are right; of those that read everything the draft's density says so.
    let same = json!({ "speculate": { "method": "dense", "tokens": 6 } });
    let (_, usage) = answer(quiet.submit(Request { choices: 1, ..request(3, &same) }).unwrap());
    assert_eq!(usage[0]["speculation"]["acceptance"], 1.0, "{usage}");
    assert_eq!(usage[0]["speculation"]["draft"]["density"], 1.0);
    // In small and in short of blocks, so that some lose their place among their drafts.
    let ways = [(1000, 48, "token"), (1000, 48, "round"), (1000, 48, "both"), (16, 512, "round"), (16, 512, "lookup")];
    for (blocks, chunk_tokens, by) in ways {
        let busy = engine(blocks, false, EngineConfig { chunk_tokens, ..EngineConfig::default() });
        let events: Vec<_> = requests(Some(by)).into_iter().map(|r| busy.submit(r).unwrap()).collect();
        for (events, (expected, _)) in events.into_iter().zip(&plain) {
            let (tokens, usage) = collect(events).unwrap();
            assert_eq!(&tokens, expected, "{:?}", usage.attention);
        }
        idle(&busy);
        assert_eq!(busy.load().counts.preemptions > 0, blocks == 16, "{:?}", busy.load());
    }
}

/// Drafts that were right beyond the token that ends an answer are none of it, nor of what is said of its attention.
#[test]
fn a_trace_ends_with_its_answer() {
    let engine = engine(64, false, EngineConfig::default());
    let ask = |speculate: Value, end: Option<u32>| {
        let stop = StopRules {
            tokens: end.into_iter().collect(),
            ignore_eos: true,
            max_tokens: Some(40),
            ..StopRules::default()
        };
        let request = request(3, &json!({ "speculate": speculate, "trace": true }));
        collect(engine.submit(Request { stop, choices: 1, logprobs: Some(0), ..request }).unwrap()).unwrap()
    };
    let (tokens, _) = ask(Value::Null, None);
    let first = |at: usize| tokens[..at].iter().all(|(_, token, _)| *token != tokens[at].1);
    let ends: Vec<u32> = (8..tokens.len()).filter(|&at| first(at)).map(|at| tokens[at].1).take(6).collect();
    assert!(ends.len() > 2, "{tokens:?}");
    for end in ends {
        let traced = |speculate: Value| {
            let (tokens, usage) = ask(speculate, Some(end));
            let usage = serde_json::to_value(&usage.attention).unwrap();
            let positions: Vec<Value> =
                usage[0]["trace"]["tokens"].as_array().unwrap().iter().map(|t| t["position"].clone()).collect();
            (tokens, positions)
        };
        let drafts = json!({ "method": "dense", "tokens": 9 });
        assert_eq!(traced(drafts), traced(Value::Null), "ended by {end}");
    }
}
