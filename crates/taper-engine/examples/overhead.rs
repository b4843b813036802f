//! What the engine itself takes of a step, alone and with the draws, which its backend does: a model that computes
//! nothing gives 32 answers at once over a vocabulary of 49,152 tokens.
//!
//!     cargo run --release --example overhead --features stub [SEQUENCES [VOCABULARY]]

use rayon::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use taper_attention::{AttentionSpec, AttentionUsage, Sequence};
use taper_engine::stub::StubText;
use taper_engine::{
    Backend, BackendError, Engine, EngineConfig, Event, Input, Limits, ModelInfo, Request, Row, SamplingParams,
    StopRules, Wanted,
};
use taper_kernels::token;

/// As in the server.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

struct Nothing {
    /// Of each answer its own, as after a product.
    logits: Vec<Vec<f32>>,
    /// Whether tokens are drawn from them, or are there already.
    draws: bool,
    steps: Arc<AtomicU64>,
}

impl Backend for Nothing {
    /// Tokens cached, and the report.
    type Sequence = (usize, Sequence);

    fn limits(&self) -> Limits {
        Limits {
            context_tokens: 1 << 20,
            cache_tokens: 1 << 24,
            offloaded_tokens: 0,
            cache_bytes: 0,
            vocab: self.logits[0].len(),
        }
    }

    fn open(
        &mut self,
        attention: &Arc<AttentionSpec>,
        seed: u64,
        prompt: &[u32],
        _: usize,
    ) -> Result<Self::Sequence, BackendError> {
        Ok((0, Sequence::new(Arc::clone(attention), seed, prompt.len())))
    }

    fn cached(&self, sequence: &Self::Sequence) -> usize {
        sequence.0
    }

    fn free_blocks(&self) -> usize {
        1 << 18
    }

    fn retract(&mut self, _: &mut Self::Sequence) {
        unreachable!("there is room for all")
    }

    fn rejoin(&mut self, _: Vec<&mut Self::Sequence>, _: Self::Sequence) -> Result<(), BackendError> {
        unreachable!("there is room for all")
    }

    fn fork(&mut self, _: &Self::Sequence, _: u64) -> Result<Self::Sequence, BackendError> {
        unreachable!("one choice each")
    }

    fn chunk(&self, _: &Self::Sequence, max: usize) -> usize {
        max
    }

    fn forward(&mut self, inputs: Vec<Input<'_, Self::Sequence>>) -> Result<Vec<Vec<Row>>, BackendError> {
        self.steps.fetch_add(1, Ordering::Relaxed);
        let grow = |input: Input<'_, Self::Sequence>| {
            input.sequence.0 += input.tokens.len();
            input.wants
        };
        let wants: Vec<Vec<Wanted>> = inputs.into_iter().map(grow).collect();
        let row = |(logits, wants): (&Vec<f32>, &Wanted)| match wants {
            Wanted::Logits | Wanted::Hidden | Wanted::Score { .. } => Row::Logits(logits.clone()),
            Wanted::Token(draw) if self.draws => Row::Token(token::pick(logits, draw)),
            Wanted::Token(_) => Row::Token(Some(7)),
        };
        let rows = |(i, wants): (usize, &Vec<Wanted>)| {
            wants.iter().map(|wants| row((&self.logits[i % self.logits.len()], wants))).collect()
        };
        Ok(wants.par_iter().enumerate().map(rows).collect())
    }

    fn truncate(&mut self, _: &mut Self::Sequence, _: usize) -> Result<(), BackendError> {
        unreachable!("nothing is drafted")
    }

    fn usage(&self, sequence: &Self::Sequence) -> AttentionUsage {
        sequence.1.usage()
    }

    fn close(&mut self, _: Self::Sequence) {}
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse().expect("a number"));
    let (sequences, vocab) = (arguments.next().unwrap_or(32usize), arguments.next().unwrap_or(49_152));
    for (name, temperature, top_p, tail) in [
        ("tokens that are there", 0.0, 1.0, f32::NAN),
        ("greedy", 0.0, 1.0, 1.2),
        ("temperature 1", 1.0, 1.0, 1.2),
        ("temperature 1, top_p 0.9", 1.0, 0.9, 1.2),
        ("the same of a steeper tail", 1.0, 0.9, 2.0),
        ("the same of even logits", 1.0, 0.9, 0.0),
    ] {
        let steps = Arc::new(AtomicU64::new(0));
        // A long tail: the most probable of all tokens has a share of a fifth, and 0.9 of the mass takes 2,200 of 49,152; a
        // steeper one: 0.9 takes 6.
        let logits: Vec<f32> = (0..vocab).map(|i| -tail * (1.0 + (i * 7919 % vocab) as f32).ln()).collect();
        let backend = Nothing { logits: vec![logits; sequences], draws: !tail.is_nan(), steps: Arc::clone(&steps) };
        let model = ModelInfo { id: "nothing".into(), created: 0 };
        let engine = Engine::start(backend, Arc::new(StubText), model, EngineConfig::default()).expect("a thread");
        let request = |seed| Request {
            id: "overhead".into(),
            prompt: vec![1; 16],
            continues: true,
            sampling: SamplingParams { temperature, top_p, seed, ..SamplingParams::default() },
            stop: StopRules { ignore_eos: true, max_tokens: Some(300), ..StopRules::default() },
            ..Request::default()
        };
        let started = Instant::now();
        let events: Vec<_> = (0..sequences as u64).map(|seed| engine.submit(request(seed)).expect("taken")).collect();
        for mut events in events {
            while !matches!(events.blocking_recv(), None | Some(Event::Done(_) | Event::Failed(_))) {}
        }
        let steps = steps.load(Ordering::Relaxed);
        let own = started.elapsed().as_secs_f64() / steps as f64 * 1e6;
        println!("{sequences} answers, {vocab} tokens, {name}: {own:.0} µs a step over {steps} steps");
    }
}
