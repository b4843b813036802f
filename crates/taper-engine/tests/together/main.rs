//! Many requests at once on a real model, if a small one: each gets the tokens that it gets alone, whatever runs beside
//! it, whether or not it loses its place in the cache on the way, and whoever else had its beginning before.

mod ahead;
mod drafts;
mod faults;
mod histories;
mod learnt;
mod offload;
mod prefix;
mod scores;
mod slices;
mod tokens;

use candle_core::Device;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use taper_attention::AttentionSpec;
use taper_engine::stub::StubText;
use taper_engine::watched::{self, Seen};
use taper_engine::{
    Backend, CacheDType, CacheOptions, Engine, EngineConfig, Event, Events, ModelBackend, ModelInfo, Request,
    RequestError, SamplingParams, StopRules, TokenRecord, Usage,
};
use taper_model::{LoadOptions, ModelFiles, ResolvedModel};

const CONTEXT: usize = 4096;
/// One block: 2 layers, 2 KV heads, 64 rows of 16, keys and values, f32.
const BLOCK_BYTES: u64 = 2 * 2 * 64 * 16 * 2 * 4;

/// The golden model with a longer context.
fn backend(blocks: u64, cache: CacheOptions) -> Result<ModelBackend, taper_engine::LoadError> {
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
    let cache = CacheOptions { bytes: Some(blocks * BLOCK_BYTES), dtype: Some(CacheDType::F32), ..cache };
    ModelBackend::load(&model, &LoadOptions::default(), cache, &Device::Cpu)
}

fn start(backend: impl Backend, config: EngineConfig) -> Engine {
    Engine::start(backend, Arc::new(StubText), ModelInfo { id: "tiny".into(), created: 0 }, config).unwrap()
}

fn engine(blocks: u64, prefix: bool, config: EngineConfig) -> Engine {
    start(backend(blocks, CacheOptions { prefix, ..CacheOptions::default() }).unwrap(), config)
}

/// The real backend, looked at.
type Watched = watched::Watched<ModelBackend>;

/// Prompt and answer of a length of their own, drawn by the number.
fn request(number: usize, attention: &Value) -> Request {
    let length = 20 + number * 37 % 300;
    Request {
        id: number.to_string(),
        prompt: (0..length).map(|i| ((i * i + 7 * i + number * 13) % 64) as u32).collect(),
        continues: true,
        attention: spec(attention),
        sampling: SamplingParams { temperature: 1.0, seed: number as u64, ..SamplingParams::default() },
        stop: StopRules { ignore_eos: true, max_tokens: Some(10 + number % 60), ..StopRules::default() },
        choices: 1 + number % 7 / 5,
        // Without them tokens are drawn where the logits are.
        logprobs: (!number.is_multiple_of(3)).then_some(0),
        ..Request::default()
    }
}

fn spec(attention: &Value) -> Arc<AttentionSpec> {
    Arc::new(AttentionSpec::from_json(attention, "attention", &learnt::ARTIFACTS).unwrap())
}

/// Every method, in pairs; with sizes that leave something out of short prompts.
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
    let clusters = |name: &str| json!({ "method": name, "sink": 4, "window": 8, "probes": 2, "dense_layers": 1 });
    let over = |top: Value, tail: &str| {
        let mut promise =
            json!({ "method": "vattention", "sink": 8, "window": 16, "epsilon": 0.3, "delta": 0.3, "top_k": 16 });
        (promise["top"], promise["tail"]) = (top, json!(tail));
        promise
    };
    let decode = [
        json!({ "method": "dense" }),
        window(),
        few("oracle_top_k"),
        json!({ "method": "random_sample", "sink": 8, "window": 16, "rate": 0.2 }),
        few("quest"),
        json!({ "method": "oracle_top_p", "p": 0.7 }),
        json!({ "method": "santa", "samples": 16 }),
        json!({ "method": "vattention", "sink": 8, "window": 16, "epsilon": 0.3, "delta": 0.3 }),
        few("double_sparsity"),
        few("quantized_keys"),
        over(json!({ "method": "oracle" }), "clt"),
        few("hash_attention"),
        clusters("kmeans"),
        clusters("saap"),
        over(json!({ "method": "quest" }), "clt"),
        over(json!({ "method": "saap" }), "clt"),
        over(json!({ "method": "hash_attention" }), "clt"),
        over(json!({ "method": "oracle" }), "hard"),
        json!({ "method": "santa", "samples": 16, "within": few("quest") }),
    ];
    (0..prefill.len() * decode.len())
        .map(|i| json!({ "prefill": prefill[i % prefill.len()], "decode": decode[i % decode.len()], "audit": 0.1 }))
        .collect()
}

/// A choice, its token, and the bits of the token's log probability; where none was wanted, a character in the token's place.
type Token = (usize, u32, u32);

/// Tokens by choice, and usage.
fn collect(mut events: Events) -> Result<(Vec<Token>, Usage), RequestError> {
    let mut tokens = Vec::new();
    loop {
        match events.blocking_recv().expect("a last event") {
            Event::Prefilled | Event::Prompt(_) | Event::Embedding(_) => {}
            Event::Delta(delta) => {
                let token = |t: &TokenRecord| (delta.choice, t.chosen.token, t.chosen.logprob.to_bits());
                tokens.extend(delta.tokens.iter().map(token));
                if delta.tokens.is_empty() {
                    tokens.extend(delta.text.chars().map(|c| (delta.choice, u32::from(c), 0)));
                }
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

/// With steps that leave a test the time to act while a request runs.
fn unhurried(mut watched: Watched) -> Watched {
    watched.before = Box::new(|_| std::thread::sleep(Duration::from_millis(1)));
    watched
}

/// All at once, each against what it gets alone.
fn together(busy: &Engine, requests: &[Request], alone: &[Answer]) {
    let events = busy.submit_all(requests.to_vec()).unwrap();
    for ((events, expected), request) in events.into_iter().zip(alone).zip(requests) {
        let (tokens, usage) = collect(events).unwrap();
        let pair = Value::from((*request.attention).clone());
        assert_eq!(tokens, expected.0, "{pair}");
        assert_eq!(serde_json::to_value(&usage.attention).unwrap(), expected.1, "{pair}");
        assert_eq!(usage.cached_tokens, 0, "what is its own does not come from another prompt: {pair}");
    }
    idle(busy);
}

/// The same once nothing runs, and every block is free again.
fn sound(engine: &Engine, seen: &Seen, blocks: usize) {
    idle(engine);
    assert!(seen.checks.load(Ordering::SeqCst) > 0, "the idle engine was not found sound");
    assert_eq!(seen.free.load(Ordering::SeqCst), blocks);
}
