//! Many requests at once on a real model, if a small one: each gets the tokens that it gets alone, whatever runs beside
//! it, whether or not it loses its place in the cache on the way, and whoever else had its beginning before.

use candle_core::Device;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use taper_attention::{Artifacts, AttentionSpec};
use taper_engine::stub::StubText;
use taper_engine::{
    CacheDType, CacheOptions, Engine, EngineConfig, Event, Events, ModelBackend, ModelInfo, Request, RequestError,
    SamplingParams, StopRules, TokenRecord, Usage,
};
use taper_model::{LoadOptions, ModelFiles, ResolvedModel};

const CONTEXT: usize = 2048;
/// One block: 2 layers, 2 KV heads, 64 rows of 16, keys and values, f32.
const BLOCK_BYTES: u64 = 2 * 2 * 64 * 16 * 2 * 4;

fn engine(blocks: u64, prefix: bool, config: EngineConfig) -> Engine {
    // The golden model with a longer context.
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../taper-model/tests/golden/llama3");
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(&golden).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let mut hyper: Value = serde_json::from_slice(&fs::read(golden.join("config.json")).unwrap()).unwrap();
    hyper["max_position_embeddings"] = json!(CONTEXT);
    fs::write(folder.path().join("config.json"), hyper.to_string()).unwrap();
    let model = ResolvedModel { name: "tiny".into(), files: ModelFiles::Folder(folder.path().into()) };
    let cache = CacheOptions { bytes: Some(blocks * BLOCK_BYTES), dtype: CacheDType::F32, prefix };
    let backend = ModelBackend::load(&model, &LoadOptions::default(), cache, &Device::Cpu).unwrap();
    Engine::start(backend, Arc::new(StubText), ModelInfo { id: "tiny".into(), created: 0 }, config).unwrap()
}

/// Prompt and answer of a length of their own, drawn by the number.
fn request(number: usize, attention: &Value) -> Request {
    let length = 20 + number * 37 % 300;
    Request {
        id: number.to_string(),
        prompt: (0..length).map(|i| ((i * i + 7 * i + number * 13) % 64) as u32).collect(),
        continues: true,
        attention: spec(attention),
        question_tokens: 0,
        sampling: SamplingParams { temperature: 1.0, seed: number as u64, ..SamplingParams::default() },
        stop: StopRules { ignore_eos: true, max_tokens: Some(10 + number % 60), ..StopRules::default() },
        choices: 1 + number % 7 / 5,
        logprobs: Some(0),
        deadline: None,
    }
}

fn spec(attention: &Value) -> Arc<AttentionSpec> {
    Arc::new(AttentionSpec::from_json(attention, "attention", &Artifacts::default()).unwrap())
}

/// Every method that needs no artefact, in pairs; with sizes that leave something out of short prompts.
fn pairs() -> Vec<Value> {
    let window = || json!({ "method": "streaming_llm", "sink": 4, "window": 50 });
    let prefill = [
        json!({ "method": "dense" }),
        window(),
        json!({ "method": "delta", "gamma": 16, "base": window() }),
        json!({ "method": "sample_attention", "min_tokens": 0, "alpha_c": 0.7, "alpha_s": 0.7 }),
        json!({ "method": "bigbird", "global": 64, "window": 64, "random": 1 }),
        json!({ "method": "hip" }),
        json!({ "method": "minference" }),
    ];
    let few = |name: &str| json!({ "method": name, "sink": 8, "window": 16, "k": 24 });
    let decode = [
        json!({ "method": "dense" }),
        window(),
        few("oracle_top_k"),
        json!({ "method": "random_sample", "sink": 8, "window": 16, "rate": 0.2 }),
        few("quest"),
        json!({ "method": "oracle_top_p", "p": 0.7 }),
        json!({ "method": "santa", "samples": 16 }),
        json!({ "method": "vattention", "sink": 8, "window": 16, "epsilon": 0.3, "delta": 0.3 }),
    ];
    (0..prefill.len() * decode.len())
        .map(|i| json!({ "prefill": prefill[i % prefill.len()], "decode": decode[i % decode.len()], "audit": 0.1 }))
        .collect()
}

/// A choice, its token, and the bits of the token's log probability.
type Token = (usize, u32, u32);

/// Tokens by choice, and usage.
fn collect(mut events: Events) -> Result<(Vec<Token>, Usage), RequestError> {
    let mut tokens = Vec::new();
    loop {
        match events.blocking_recv().expect("a last event") {
            Event::Prefilled => {}
            Event::Delta(delta) => {
                let token = |t: &TokenRecord| (delta.choice, t.chosen.token, t.chosen.logprob.to_bits());
                tokens.extend(delta.tokens.iter().map(token));
            }
            Event::Done(usage) => {
                tokens.sort_by_key(|(choice, ..)| *choice);
                return Ok((tokens, usage));
            }
            Event::Failed(error) => return Err(error),
        }
    }
}

type Answer = (Vec<Token>, Value);

fn answer(events: Events) -> Answer {
    let (tokens, usage) = collect(events).unwrap();
    (tokens, serde_json::to_value(&usage.attention).unwrap())
}

fn idle(engine: &Engine) {
    let start = Instant::now();
    while engine.load().running + engine.load().waiting > 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "it never ends");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_request_gets_the_same_tokens_alone_and_among_others() {
    let requests: Vec<Request> = pairs().iter().enumerate().map(|(i, pair)| request(i, pair)).collect();
    let quiet = engine(64, false, EngineConfig::default());
    let alone: Vec<Answer> = requests.iter().map(|r| answer(quiet.submit(r.clone()).unwrap())).collect();
    assert_eq!(quiet.load().preemptions, 0);

    for chunk_tokens in [512, 48] {
        let busy = engine(1000, false, EngineConfig { chunk_tokens, ..EngineConfig::default() });
        together(&busy, &requests, &alone);
        assert_eq!(busy.load().preemptions, 0);
    }
}

/// All at once, each against what it gets alone.
fn together(busy: &Engine, requests: &[Request], alone: &[Answer]) {
    let events: Vec<Events> = requests.iter().map(|r| busy.submit(r.clone()).unwrap()).collect();
    for ((events, expected), request) in events.into_iter().zip(alone).zip(requests) {
        let (tokens, usage) = collect(events).unwrap();
        let pair = Value::from((*request.attention).clone());
        assert_eq!(tokens, expected.0, "{pair}");
        assert_eq!(serde_json::to_value(&usage.attention).unwrap(), expected.1, "{pair}");
        assert_eq!(usage.cached_tokens, 0, "what is its own does not come from another prompt: {pair}");
    }
    idle(busy);
}

#[test]
fn answers_by_one_method_are_read_together_and_do_not_show_it() {
    // Of very different lengths, of which the shortest read everything and score nothing; in turns by two methods.
    let pairs = pairs();
    for two in pairs[..8].chunks(2) {
        let requests: Vec<Request> =
            (0..8).map(|i| Request { choices: 1, ..request(i * 5, &two[i % 2]) }).collect();
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
    // Every third pair goes through all methods of both phases.
    let pairs: Vec<Value> = pairs().into_iter().step_by(3).collect();
    let requests: Vec<Request> = pairs.iter().enumerate().map(long).collect();
    let quiet = engine(64, false, EngineConfig::default());
    let alone: Vec<Answer> = requests.iter().map(|r| answer(quiet.submit(r.clone()).unwrap())).collect();
    assert_eq!(quiet.load().preemptions, 0);
    for prefix in [false, true] {
        let busy = engine(18, prefix, EngineConfig { chunk_tokens: 100, ..EngineConfig::default() });
        together(&busy, &requests, &alone);
        assert!(busy.load().preemptions > 1, "{:?}", busy.load());
    }
}

#[test]
fn a_prompt_that_loses_its_place_on_its_way_in_is_counted_once() {
    let window = json!({ "method": "streaming_llm", "sink": 4, "window": 50 });
    let prefill = [
        json!({ "method": "dense" }),
        json!({ "method": "delta", "gamma": 16, "base": window.clone() }),
        window,
    ];
    // Six answers that grow from two blocks to five, and beside them a prompt of thirty that takes 119 steps.
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
            (0..6).map(|i| with(200, 95 + i)(request(i, &json!({ "audit": 0.1 })))).collect();
        requests.push(with(9, 1900)(request(6, &pair)));
        let quiet = engine(64, false, EngineConfig::default());
        let alone: Vec<Answer> = requests.iter().map(|r| answer(quiet.submit(r.clone()).unwrap())).collect();
        for prefix in [false, true] {
            // The prompt is never in before an answer wants a block that it has.
            let busy = engine(50, prefix, EngineConfig { stretch: 1.0, ..EngineConfig::default() });
            together(&busy, &requests, &alone);
            assert_eq!(busy.load().preemptions, 1, "{pair}");
        }
    }
}

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
    idle(&shared);
}

#[test]
fn what_others_hold_of_a_prompt_takes_no_room() {
    // Sixteen blocks of a prompt, two for each answer: both fit if fifteen are shared.
    let engine = engine(23, true, EngineConfig::default());
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
    assert_eq!(engine.load().preemptions, 0);
    let last = Request { prompt: prompts[5].clone(), choices: 1, ..request(3, &json!({})) };
    assert_eq!(collect(engine.submit(last).unwrap()).unwrap().1.cached_tokens, 256);
    idle(&engine);
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
