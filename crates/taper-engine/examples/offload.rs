//! What decode methods read from the file of a KV cache that hardly lies in memory: a prompt goes in, the file takes all
//! that it may hold out of memory, and the tokens after it bring back what they read, which then stays.
//!
//!     cargo run --release --example offload -- [MODEL [PROMPT [TOKENS]]]

use serde_json::json;
use std::sync::Arc;
use std::time::Instant;
use taper_attention::{Artifacts, AttentionSpec};
use taper_engine::{Backend, CacheOptions, Input, ModelBackend, Offload};
use taper_model::{LoadOptions, Progress, default_cache, resolve};

type Failed = Box<dyn std::error::Error>;

/// Bytes that this process has had read from storage.
fn read_bytes() -> Result<u64, Failed> {
    let text = std::fs::read_to_string("/proc/self/io")?;
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    Ok(line.ok_or("/proc/self/io has no read_bytes")?.parse()?)
}

fn main() -> Result<(), Failed> {
    let mut arguments = std::env::args().skip(1);
    let model = resolve(&arguments.next().unwrap_or("default".into()), &default_cache(), Progress::Shown)?;
    let prompt: usize = arguments.next().map_or(Ok(7200), |n| n.parse())?;
    let tokens: usize = arguments.next().map_or(Ok(8), |n| n.parse())?;
    // Where temporary files lie in memory, nothing would be read from storage.
    let folder = std::env::current_dir()?;
    let cache = CacheOptions {
        bytes: Some(8 << 20),
        offload: Some(Offload::File { bytes: 2 << 30, folder }),
        prefix: true,
        ..CacheOptions::default()
    };
    let mut backend = ModelBackend::load(&model, &LoadOptions::default(), cache, &candle_core::Device::Cpu)?;
    let vocab = backend.limits().vocab;
    let prompt: Vec<u32> = (0..prompt).map(|i| (i * 7919 % vocab) as u32).collect();
    println!("| decode | read for {tokens} tokens | seconds a token |\n| --- | --- | --- |");
    for decode in [
        json!({ "method": "dense" }),
        json!({ "method": "streaming_llm" }),
        json!({ "method": "quest", "k": 128 }),
        json!({ "method": "vattention", "epsilon": 0.1, "delta": 0.1, "top": { "method": "quest" } }),
        json!({ "method": "santa", "samples": 128 }),
    ] {
        let spec = json!({ "prefill": { "method": "streaming_llm" }, "decode": decode });
        let spec = Arc::new(AttentionSpec::from_json(&spec, "attention", &Artifacts::default())?);
        let mut sequence = backend.open(&spec, 0, &prompt, 0)?;
        while backend.cached(&sequence) < prompt.len() {
            let at = backend.cached(&sequence);
            let end = at + backend.chunk(&sequence, 512);
            backend.forward(vec![Input::whole(&mut sequence, &prompt[at..end], None)])?;
        }
        // The first token builds the indices, which stay in memory.
        backend.forward(vec![Input::whole(&mut sequence, &[1], None)])?;
        backend.page_out()?;
        let (before, started) = (read_bytes()?, Instant::now());
        for _ in 0..tokens {
            backend.forward(vec![Input::whole(&mut sequence, &[1], None)])?;
        }
        let read = (read_bytes()? - before) as f64 / 1e6;
        println!("| `{decode}` | {read:.0} MB | {:.3} |", started.elapsed().as_secs_f64() / tokens as f64);
        backend.close(sequence);
    }
    Ok(())
}
