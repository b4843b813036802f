//! Log probabilities of a prompt's own tokens.

use crate::{backend, engine, idle, spec, start};
use serde_json::{Value, json};
use std::sync::Arc;
use taper_attention::AttentionSpec;
use taper_engine::{
    Backend, CacheOptions, Engine, EngineConfig, Event, Input, Request, Row, Scored, StopRules, Usage, Wanted,
};

fn prompt(tokens: u32) -> Vec<u32> {
    (0..tokens).map(|i| (i * i + 3 * i) % 64).collect()
}

fn request(tokens: u32, prefill: &Value) -> Request {
    Request {
        prompt: prompt(tokens),
        attention: spec(&json!({ "prefill": prefill })),
        prompt_logprobs: Some(2),
        stop: StopRules { ignore_eos: true, max_tokens: Some(3), ..StopRules::default() },
        ..Request::default()
    }
}

fn scored(engine: &Engine, request: Request) -> (Vec<Scored>, Usage) {
    let (mut events, mut told) = (engine.submit(request).unwrap(), None);
    loop {
        match events.blocking_recv().unwrap() {
            Event::Prompt(scored) => told = Some(scored),
            Event::Done(usage) => return (told.unwrap(), usage),
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
}

/// By one forward pass for each token, and a softmax in f64.
fn by_hand(tokens: &[u32]) -> Vec<(f64, u32)> {
    let mut backend = backend(20, CacheOptions::default()).unwrap();
    let mut sequence = backend.open(&Arc::new(AttentionSpec::default()), 0, tokens, 0).unwrap();
    let mut all = Vec::new();
    for pair in tokens.windows(2) {
        let input = Input::whole(&mut sequence, &pair[..1], Some(Wanted::Logits));
        let rows = backend.forward(vec![input]).unwrap().remove(0);
        let [Row::Logits(logits)] = &rows[..] else { panic!("{rows:?}") };
        let mass: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
        all.push((f64::from(logits[pair[1] as usize]) - mass.ln(), best as u32));
    }
    all
}

#[test]
fn they_are_those_of_the_logits_token_by_token() {
    let expected = by_hand(&prompt(300));
    // In one pass of more rows than are scored at once, and in chunks that end anywhere.
    for chunk_tokens in [512, 100, 7] {
        let engine = engine(40, true, EngineConfig { chunk_tokens, ..EngineConfig::default() });
        // With an answer behind them, and without.
        for most in [3, 0] {
            let mut request = request(300, &json!({ "method": "dense" }));
            request.stop.max_tokens = Some(most);
            let (told, usage) = scored(&engine, request);
            assert_eq!(usage.completion_tokens, most);
            assert_eq!((told.len(), usage.cached_tokens), (299, 0), "nothing is taken over from the first");
            for (place, ((chosen, top), (logprob, best))) in told.iter().zip(&expected).enumerate() {
                assert_eq!(chosen.token, prompt(300)[place + 1]);
                assert!((f64::from(chosen.logprob) - logprob).abs() < 1e-4, "{place}: {chosen:?} for {logprob}");
                assert_eq!((top.len(), top[0].token), (2, *best), "{place}");
            }
        }
        idle(&engine);
    }
}

#[test]
fn every_prefill_method_gives_as_many() {
    let window = json!({ "method": "streaming_llm", "sink": 4, "window": 50 });
    let engine = engine(40, true, EngineConfig { chunk_tokens: 64, ..EngineConfig::default() });
    let dense = scored(&engine, request(500, &json!({ "method": "dense" }))).0;
    for prefill in [
        window.clone(),
        json!({ "method": "delta", "gamma": 16, "base": window }),
        json!({ "method": "sample_attention", "min_tokens": 0, "alpha_c": 0.7, "alpha_s": 0.7 }),
        json!({ "method": "minference" }),
        json!({ "method": "bigbird", "global": 64, "window": 64, "random": 1 }),
    ] {
        let told = scored(&engine, request(500, &prefill)).0;
        assert_eq!(told.len(), 499, "{prefill}");
        // A window reaches all of the first tokens.
        assert!((told[0].0.logprob - dense[0].0.logprob).abs() < 1e-4, "{prefill}");
    }
}

#[test]
fn a_prompt_that_loses_its_place_is_scored_once() {
    let make = |tokens: u32, max_tokens| Request {
        stop: StopRules { ignore_eos: true, max_tokens: Some(max_tokens), ..StopRules::default() },
        ..request(tokens, &json!({ "method": "dense" }))
    };
    let alone = engine(40, false, EngineConfig::default());
    let expected = scored(&alone, make(440, 60)).0;
    // Two tokens of the prompt go in with each of the first answer; in the end both need more room than there is.
    let config = EngineConfig { chunk_tokens: 2, ..EngineConfig::default() };
    let small = start(backend(11, CacheOptions::default()).unwrap(), config);
    let events = small.submit_all(vec![make(60, 260), make(440, 60)]).unwrap();
    let told = events.into_iter().map(|mut events| {
        let mut told = Vec::new();
        while let Some(event) = events.blocking_recv() {
            match event {
                Event::Prompt(scored) => told.push(scored),
                Event::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
        told
    });
    let told: Vec<_> = told.collect();
    assert!(small.load().counts.preemptions > 0);
    assert!(told.iter().all(|told| told.len() == 1));
    // Rows add in another order where they go with others.
    let near = |a: &Scored, b: &Scored| (a.0.logprob - b.0.logprob).abs() < 1e-4;
    let told = &told[1][0];
    assert!(told.len() == expected.len() && told.iter().zip(&expected).all(|(a, b)| near(a, b)));
}
