//! How long a step of a model takes: one more token of sequences whose cache is full already, beside the least time that
//! its bytes could take.
//!
//! The cache is filled with random rows instead of by a prompt, and sequences begin where their context ends, so that long
//! contexts cost no prefill. A step is what the engine makes of it, from token ids to the logits in host memory; or to the
//! likeliest tokens, found on the device, where the next step is begun by them before they are read, as the engine does too.

use crate::error::EvalError;
use crate::method::{Method, Phase};
use crate::table::{Style, draw};
use candle_core::{D, DType, Result, Tensor};
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;
use taper_attention::{Artifacts, AttentionBatch, AttentionSpec, Held, Sequence, Span};
use taper_kernels::parallel;
use taper_kernels::token::{Chosen, Draw, choose};
use taper_kv_cache::{BLOCK_TOKENS, KvPool, KvShape};
use taper_model::Model;

/// What is timed.
#[derive(Debug, Clone)]
pub struct StepPlan {
    /// Tokens of each sequence's context.
    pub contexts: Vec<usize>,
    /// Sequences of a step.
    pub batch: usize,
    /// Decode methods. Dense attention is timed as well, first.
    pub decodes: Vec<Method>,
    /// Prefill methods, whose prompt of each context is timed once.
    pub prefills: Vec<Method>,
    /// Most prompt tokens of a step.
    pub chunk_tokens: usize,
    /// Steps timed.
    pub tokens: usize,
    /// Tokens that a step takes of each sequence, which then lets them go, as one that checks drafts does if none is right; with
    /// one the sequences grow.
    pub rows: usize,
    /// Whether a step ends with the likeliest tokens instead of the logits.
    pub greedy: bool,
    /// Type of the model's weights.
    pub weights: DType,
    /// Type of cached keys and values.
    pub cache: DType,
    /// Bytes that the device's memory moves in a second.
    pub bandwidth: f64,
    /// The share of the cache that lies in the host's memory, beside a CUDA device.
    pub offloaded: f64,
    /// Bytes of the host's memory that the device reads in a second.
    pub bus: f64,
    /// What methods learned offline.
    pub artifacts: Artifacts,
}

/// What one method took.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRow {
    /// Prompts or steps.
    pub phase: Phase,
    /// Tokens of the context.
    pub context: usize,
    /// The method's label.
    pub method: String,
    /// Keys read over keys there.
    pub density: f64,
    /// Seconds of a step, or seconds until a prompt's first logits.
    pub seconds: f64,
    /// Tokens that came through all layers in that time: the prompt's, or those of all sequences of a step.
    pub tokens: usize,
    /// Of them, the median seconds until all work of the step was given to the device.
    pub queued: Option<f64>,
    /// Bytes of weights, and of the keys and values that were read, over the bandwidth of where they lie.
    pub floor: Option<f64>,
}

/// Steps before those that are timed: indices are built, buffers are made, clocks wake up.
const WARM_UP: usize = 4;
/// Tokens whose random rows are made at a time.
const FILL_TOKENS: usize = 4096;

/// Times everything.
///
/// # Errors
/// A method, a device error, a device without the memory.
pub fn steps(model: &Model, plan: &StepPlan) -> std::result::Result<Vec<StepRow>, EvalError> {
    let method = |phase, value| Method::read(phase, &value, &plan.artifacts);
    let dense = |phase| method(phase, json!({ "method": "dense" }));
    let mut decodes = plan.decodes.clone();
    decodes.retain(|m| m.spec["method"] != "dense");
    decodes.insert(0, dense(Phase::Decode)?);
    let mut rows = Vec::new();
    for &context in &plan.contexts {
        let failed = |e: candle_core::Error| EvalError::Device { length: context, reason: e.to_string() };
        let mut bench = Bench::new(model, plan, context).map_err(failed)?;
        for prefill in &plan.prefills {
            let spec = Method::pair(prefill, &decodes[0], &json!({}), &plan.artifacts)?;
            rows.push(bench.prompt(prefill, &spec).map_err(failed)?);
        }
        for decode in &decodes {
            let spec = Method::pair(&dense(Phase::Prefill)?, decode, &json!({}), &plan.artifacts)?;
            rows.push(bench.decode(decode, &spec).map_err(failed)?);
        }
    }
    Ok(rows)
}

/// A step that is underway: its tokens, and what its choices will have come to.
type Begun = (Chosen, Vec<Held>);

/// A model and a cache of random rows.
struct Bench<'a> {
    model: &'a Model,
    plan: &'a StepPlan,
    pool: KvPool,
    context: usize,
}

impl<'a> Bench<'a> {
    fn new(model: &'a Model, plan: &'a StepPlan, context: usize) -> Result<Self> {
        let shape = model.attention_shape();
        let kv = KvShape { layers: shape.layers, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
        // One more is begun after the last step.
        let each = (context + (WARM_UP + plan.tokens + 1).max(plan.rows)).div_ceil(BLOCK_TOKENS);
        let blocks = plan.batch * each;
        let host = (blocks as f64 * plan.offloaded).round() as usize;
        let pool = match host {
            0 => KvPool::new(kv, plan.cache, blocks, model.device()),
            _ => KvPool::with_host(kv, plan.cache, (blocks - host.min(blocks), host), model.device()),
        };
        let pool = pool.map_err(candle_core::Error::wrap)?;
        let slots: Vec<u32> = (0..(blocks * BLOCK_TOKENS) as u32).collect();
        for slots in slots.chunks(FILL_TOKENS) {
            let rows = |mean| Tensor::randn(mean, 1f32, (slots.len(), shape.kv_heads, shape.head_dim), model.device());
            // Values have a mean, as those of models have: without one an output would be noise that no sample estimates.
            let (k, v) = (rows(0.0)?, rows(1.0)?);
            for layer in 0..shape.layers {
                pool.append(layer, &k, &v, slots).map_err(candle_core::Error::wrap)?;
            }
        }
        model.device().synchronize()?;
        Ok(Self { model, plan, pool, context })
    }

    /// One step of the tokens given of each sequence: seconds until all was queued, and until the logits were there.
    fn step(&mut self, sequences: &mut [Sequence], tokens: &[u32]) -> Result<(f64, f64)> {
        // As the engine does: a device has what it needs of this thread alone.
        match self.model.device().is_cpu() {
            true => parallel::awake(|| self.run(sequences, tokens)),
            false => self.run(sequences, tokens),
        }
    }

    fn run(&mut self, sequences: &mut [Sequence], tokens: &[u32]) -> Result<(f64, f64)> {
        let started = Instant::now();
        let shape = self.model.attention_shape();
        let (each, count) = (tokens.len() / sequences.len(), sequences.len());
        let prompt = sequences.iter().any(|sequence| sequence.len() < self.context);
        let spans = sequences.iter_mut().map(|sequence| Span { sequence, tokens: each }).collect();
        let mut batch =
            AttentionBatch::new(shape, self.model.rotary(), &mut self.pool, spans).map_err(candle_core::Error::wrap)?;
        let hidden = self.model.forward(tokens, &batch.positions(), &mut batch)?;
        // Of a prompt the last token's.
        let wanted = if prompt { 1 } else { each };
        let last: Vec<u32> = (1..=count).flat_map(|i| i * each - wanted..i * each).map(|row| row as u32).collect();
        let hidden = match each == wanted {
            true => hidden,
            false => hidden.index_select(&Tensor::from_slice(&last, last.len(), self.model.device())?, 0)?,
        };
        let logits = self.model.logits(&hidden)?;
        let best = match self.plan.greedy {
            true => Some(match choose(&logits, &vec![Draw::LIKELIEST; last.len()])? {
                Some(tokens) => tokens,
                None => logits.argmax(D::Minus1)?,
            }),
            false => None,
        };
        let queued = started.elapsed().as_secs_f64();
        let read = match best {
            Some(best) => best.to_vec1::<u32>()?.into_iter().map(|token| vec![token as f32]).collect(),
            None => logits.to_vec2::<f32>()?,
        };
        batch.finish()?;
        let seconds = started.elapsed().as_secs_f64();
        if let Some(bad) = read.iter().flatten().find(|x| !x.is_finite()) {
            candle_core::bail!("a logit is {bad}");
        }
        Ok((queued, seconds))
    }

    /// One step of a token of each sequence, on a device: begun by the step before, if that one did, and beginning the next.
    fn step_ahead(
        &mut self,
        sequences: &mut [Sequence],
        tokens: &[u32],
        begun: &mut Option<Begun>,
    ) -> Result<(f64, f64)> {
        let started = Instant::now();
        let (chosen, held) = match begun.take() {
            Some(begun) => begun,
            None => {
                let tokens = Tensor::from_slice(tokens, tokens.len(), self.model.device())?;
                match self.begin(sequences, &tokens)? {
                    Some(begun) => begun,
                    None => return self.run(sequences, &tokens.to_vec1()?),
                }
            }
        };
        sequences.iter_mut().zip(held).for_each(|(sequence, held)| sequence.follow(&mut self.pool, held));
        let next = chosen.tensor().clone();
        *begun = self.begin(sequences, &next)?;
        let queued = started.elapsed().as_secs_f64();
        if chosen.read()?.contains(&None) {
            candle_core::bail!("a row of logits has no likeliest token");
        }
        Sequence::settle(sequences).map_err(candle_core::Error::wrap)?;
        Ok((queued, started.elapsed().as_secs_f64()))
    }

    /// Queues a step by tokens that are where the model is; none where embeddings are not.
    fn begin(&mut self, sequences: &mut [Sequence], tokens: &Tensor) -> Result<Option<Begun>> {
        let count = sequences.len();
        for sequence in &mut *sequences {
            let end = sequence.len() + 1;
            self.pool.grow(sequence.table_mut(), end).map_err(candle_core::Error::wrap)?;
        }
        let spans = sequences.iter_mut().map(|sequence| Span { sequence, tokens: 1 }).collect();
        let shape = self.model.attention_shape();
        let mut batch =
            AttentionBatch::new(shape, self.model.rotary(), &mut self.pool, spans).map_err(candle_core::Error::wrap)?;
        batch.put_off();
        let Some(hidden) = self.model.forward_there(tokens, &batch.positions(), &mut batch)? else { return Ok(None) };
        let chosen = Chosen::new(&self.model.logits(&hidden)?, &vec![Draw::LIKELIEST; count])?;
        Ok(Some((chosen, batch.hold())))
    }

    fn token(&self, i: usize) -> u32 {
        (i * 7919 % self.model.config().vocab_size) as u32
    }

    fn prompt(&mut self, method: &Method, spec: &Arc<AttentionSpec>) -> Result<StepRow> {
        // A device's first chunks load kernels and make buffers, which a server has done before it takes requests.
        self.prefill(spec, self.context.min(2 * self.plan.chunk_tokens))?;
        let started = Instant::now();
        let density = self.prefill(spec, self.context)?;
        let seconds = started.elapsed().as_secs_f64();
        let (method, context) = (method.label.clone(), self.context);
        Ok(StepRow {
            phase: Phase::Prefill,
            context,
            method,
            density,
            seconds,
            tokens: context,
            queued: None,
            floor: None,
        })
    }

    /// Takes a prompt of so many tokens in and forgets it; the share of its keys that were read.
    fn prefill(&mut self, spec: &Arc<AttentionSpec>, prompt: usize) -> Result<f64> {
        let mut sequence = Sequence::new(Arc::clone(spec), 1, prompt);
        while sequence.len() < prompt {
            let count = sequence.chunk(self.plan.chunk_tokens);
            let tokens: Vec<u32> = (sequence.len()..sequence.len() + count).map(|i| self.token(i)).collect();
            self.step(std::slice::from_mut(&mut sequence), &tokens)?;
        }
        self.pool.release(sequence.table_mut());
        Ok(sequence.usage().prefill.density)
    }

    fn decode(&mut self, method: &Method, spec: &Arc<AttentionSpec>) -> Result<StepRow> {
        let batch = self.plan.batch;
        let mut sequences: Vec<Sequence> =
            (0..batch).map(|i| Sequence::new(Arc::clone(spec), i as u64, self.context)).collect();
        // The context is taken as cached without a forward pass: its rows are random ones.
        let shape = self.model.attention_shape();
        let spans = sequences.iter_mut().map(|sequence| Span { sequence, tokens: self.context }).collect();
        AttentionBatch::new(shape, self.model.rotary(), &mut self.pool, spans)
            .map_err(candle_core::Error::wrap)?
            .finish()?;
        let (mut queued, mut seconds, mut begun) = (Vec::new(), Vec::new(), None);
        let ahead = self.plan.greedy && self.plan.rows == 1 && !self.model.device().is_cpu();
        for i in 0..WARM_UP + self.plan.tokens {
            let count = batch * self.plan.rows;
            let tokens: Vec<u32> = (0..count).map(|row| self.token(i * count + row)).collect();
            let (host, all) = match ahead {
                true => self.step_ahead(&mut sequences, &tokens, &mut begun)?,
                false => self.step(&mut sequences, &tokens)?,
            };
            if self.plan.rows > 1 {
                let back = |sequence: &mut Sequence| sequence.truncate(&mut self.pool, self.context);
                sequences.iter_mut().try_for_each(back).map_err(candle_core::Error::wrap)?;
            }
            if i >= WARM_UP {
                queued.push(host);
                seconds.push(all);
            }
        }
        let density = sequences.iter().map(|s| s.usage().decode.density).sum::<f64>() / batch as f64;
        sequences.iter_mut().for_each(|sequence| self.pool.release(sequence.table_mut()));
        Ok(StepRow {
            phase: Phase::Decode,
            context: self.context,
            method: method.label.clone(),
            density,
            // A step that was begun ahead may be over when it is asked for, and the next one then waits for two: only all
            // of them together say what one takes.
            seconds: if ahead { mean(&seconds) } else { median(seconds) },
            tokens: batch * self.plan.rows,
            queued: Some(median(queued)),
            floor: Some(self.floor(density)),
        })
    }

    /// What the bytes take that a step must read: every weight once, and of every sequence the share of its keys and values
    /// that it reads, wherever they lie. A layer's weights are multiplied before or after it attends, so the two add up.
    fn floor(&self, density: f64) -> f64 {
        let weights = self.model.config().multiplied_weights() * self.plan.weights.size_in_bytes();
        let cached = self.pool.shape().block_bytes(self.plan.cache) / BLOCK_TOKENS;
        let shape = self.model.attention_shape();
        let visible = shape.window.map_or(self.context, |window| window.min(self.context));
        let read = density * (self.plan.batch * visible * cached) as f64;
        let moved = read * self.pool.offloaded_blocks() as f64 / self.pool.blocks() as f64;
        (weights as f64 + read - moved) / self.plan.bandwidth + moved / self.plan.bus
    }
}

fn mean(of: &[f64]) -> f64 {
    of.iter().sum::<f64>() / of.len().max(1) as f64
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of.get(of.len() / 2).copied().unwrap_or(0.0)
}

/// What all rows of a table have in common: the model, where it is, and what a step is.
pub fn step_caption(model: &Model, plan: &StepPlan) -> String {
    let device = if model.device().is_cpu() { "cpu" } else { "cuda" };
    let ends = if plan.greedy { "the likeliest tokens" } else { "logits" };
    format!(
        "{} on {device}, weights {}, cache {}, {:.1}% of it offloaded; a step has {} sequences of {} rows and ends with {ends}",
        model.config().name,
        plan.weights.as_str(),
        plan.cache.as_str(),
        100.0 * plan.offloaded,
        plan.batch,
        plan.rows,
    )
}

/// A row for each method and context: the time, tokens in a second, the host's share of it, the floor, and how far from it the
/// step is.
pub fn step_table(rows: &[StepRow], style: Style) -> String {
    let head =
        ["phase", "context", "method", "density", "time", "tokens/s", "queued after", "floor", "time over floor"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let ms = |seconds: f64| format!("{:.3} ms", 1e3 * seconds);
    for row in rows {
        lines.push(vec![
            row.phase.name().to_owned(),
            row.context.to_string(),
            row.method.clone(),
            format!("{:.4}", row.density),
            ms(row.seconds),
            format!("{:.1}", row.tokens as f64 / row.seconds),
            row.queued.map_or(String::new(), ms),
            row.floor.map_or(String::new(), ms),
            row.floor.map_or(String::new(), |floor| format!("{:.2}", row.seconds / floor)),
        ]);
    }
    draw(&lines, style)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use taper_model::ModelConfig;

    #[test]
    fn a_small_model_of_random_weights_is_timed_and_its_bytes_are_counted() {
        let config = ModelConfig { layers: 2, vocab_size: 300, ..ModelConfig::of_shape("smollm2-135m").unwrap() };
        let model = Model::random(&config, DType::F32, &Device::Cpu).unwrap();
        let artifacts = Artifacts::default();
        let method = |phase, value| Method::read(phase, &value, &artifacts).unwrap();
        let plan = StepPlan {
            contexts: vec![100, 200],
            batch: 2,
            decodes: vec![method(Phase::Decode, json!({ "method": "streaming_llm", "sink": 1, "window": 9 }))],
            prefills: vec![method(Phase::Prefill, json!({ "method": "dense" }))],
            chunk_tokens: 64,
            tokens: 1,
            rows: 1,
            greedy: false,
            weights: DType::F32,
            cache: DType::F16,
            bandwidth: 1e9,
            offloaded: 0.0,
            bus: 1e8,
            artifacts: artifacts.clone(),
        };
        let rows = steps(&model, &plan).unwrap();
        assert_eq!(rows.iter().map(|r| r.context).collect::<Vec<_>>(), [100, 100, 100, 200, 200, 200]);
        // Two layers of (960 + 576) · 576 + 3 · 576 · 1536, and the head, f32; 100 tokens of 2 · 2 · 3 · 64 halves.
        let weights = 4 * (2 * (1536 * 576 + 3 * 576 * 1536) + 300 * 576);
        assert_eq!(rows[1].floor, Some((weights + 2 * 100 * 1536) as f64 / 1e9));
        assert!(rows[2].density < 0.11 && rows[2].floor < rows[1].floor);
        assert_eq!(rows.iter().map(|r| r.tokens).collect::<Vec<_>>(), [100, 2, 2, 200, 2, 2]);
        let rows = [StepRow { seconds: 0.5, ..rows[1].clone() }];
        let table = step_table(&rows, Style::Markdown);
        assert!(table.contains("| time | tokens/s |") && table.contains("| 500.000 ms | 4.0 |"), "{table}");
        assert_eq!(
            step_caption(&model, &StepPlan { offloaded: 0.25, ..plan }),
            "smollm2-135m on cpu, weights f32, cache f16, 25.0% of it offloaded; a step has 2 sequences of 1 rows and ends with logits"
        );
    }
}
