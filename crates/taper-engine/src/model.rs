//! The real model behind the engine's seams: weights and KV pool here, tokenizer and chat template in `text`.

mod device;
mod lookahead;
mod room;
mod text;

use crate::backend::{Backend, BackendError, CheckedDrafts, Input, Limits, Row, Underway, Wanted, lacks_memory};
use crate::sampler::logprobs;
use candle_core::{DType, Device, Tensor};
pub use device::{DeviceChoice, runs_on_cuda};
use lookahead::{Lookahead, go_on};
use rayon::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;
use taper_attention::{
    AttentionBatch, AttentionSpec, AttentionUsage, Beginning, Chunk, ModelKey, Sequence, Span, leaders,
};
use taper_kernels::floats::with_floats;
use taper_kernels::parallel;
use taper_kernels::token::{self, Chosen, Draw};
use taper_kv_cache::{BLOCK_TOKENS, KvError, KvPool, KvShape};
use taper_model::{
    ChatTemplate, LoadOptions, Model, ModelConfig, ModelError, ResolvedModel, Tokenizer, free_memory, size,
};
pub use text::ModelText;

/// How the KV cache stores keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheDType {
    /// Half precision: half the memory of f32.
    F16,
    /// Single precision.
    F32,
    /// bfloat16.
    BF16,
}

/// The KV cache's size and type.
#[derive(Debug, Clone, Default)]
pub struct CacheOptions {
    /// Bytes in memory; `None`: a quarter of the free memory, for at most sixteen contexts; on a device what is free beside the
    /// weights, less what else requests take there, for at most sixty-four.
    pub bytes: Option<u64>,
    /// What lies elsewhere beyond them.
    pub offload: Option<Offload>,
    /// Type of keys and values; `None`: on a device bf16 beside weights of that type, else f16.
    pub dtype: Option<CacheDType>,
    /// Whether prompts that begin alike share what they begin with.
    pub prefix: bool,
}

/// A part of the KV cache that does not lie where the rest does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Offload {
    /// In a file, beside a cache in memory.
    File {
        /// Its bytes.
        bytes: u64,
        /// The folder that the file is made in.
        folder: PathBuf,
    },
    /// In pinned host memory, beside a cache on a CUDA device.
    Host {
        /// Its bytes.
        bytes: u64,
    },
}

/// Least tokens of a prompt's chunk on a device, where few rows take as long as many: what is more than a step's work goes
/// through the layers in slices.
const DEVICE_CHUNK: usize = 2048;
/// The same in host memory behind [`HOST_LONG`] tokens: few rows read that many keys for themselves alone.
const HOST_CHUNK: usize = 64;
/// Tokens before a chunk from which on that holds.
const HOST_LONG: usize = 2048;
/// Most rows of a prompt that go through a layer at a time; those of a larger chunk do in slices.
const PROMPT_ROWS: usize = 4 * DEVICE_CHUNK;

/// Most rows whose logits are there at a time where a prompt's tokens are scored.
const SCORED_ROWS: usize = 64;

/// Why a model could not be made ready.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The checkpoint.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// What should compute.
    #[error("{0}")]
    Device(String),
    /// The KV cache.
    #[error("the KV cache: {0}")]
    Cache(String),
}

/// A model with its KV pool.
pub struct ModelBackend {
    model: Model,
    pool: KvPool,
    /// Whether prompts share their beginnings.
    prefix: bool,
    /// Whether the next step is begun before it is asked for, where it can be.
    runs_ahead: bool,
    ahead: Option<Lookahead>,
    /// Rows that were asked for after they were begun.
    followed: usize,
    /// What a test has the ends of the next steps begun ahead come to.
    #[cfg(test)]
    ends: std::vec::IntoIter<Result<(), BackendError>>,
}

/// Loads a model onto a device: what computes, and what reads and writes its text.
///
/// # Errors
/// [`LoadError`] naming the file and field, or a cache that cannot be had.
pub fn load(
    model: &ResolvedModel,
    options: &LoadOptions,
    cache: CacheOptions,
    device: &Device,
) -> Result<(ModelBackend, ModelText), LoadError> {
    let (tokenizer, template) = (Tokenizer::load(model)?, ChatTemplate::load(model, options.chat_template.as_deref())?);
    let backend = ModelBackend::load(model, options, cache, device)?;
    let text = ModelText::new(tokenizer, template, backend.limits().context_tokens);
    Ok((backend, text))
}

impl From<candle_core::Error> for BackendError {
    fn from(error: candle_core::Error) -> Self {
        Self(error.to_string())
    }
}

impl From<KvError> for BackendError {
    fn from(error: KvError) -> Self {
        Self(error.to_string())
    }
}

/// The type of keys and values where nothing is said: on a device activations of another type would be rounded once more.
fn own_dtype(on_device: bool, activation: DType) -> DType {
    if on_device && activation == DType::BF16 { DType::BF16 } else { DType::F16 }
}

impl ModelBackend {
    /// Loads a model onto a device.
    ///
    /// # Errors
    /// As [`load`].
    pub fn load(
        model: &ResolvedModel,
        options: &LoadOptions,
        cache: CacheOptions,
        device: &Device,
    ) -> Result<Self, LoadError> {
        let asked = cache.dtype.map(|dtype| match dtype {
            CacheDType::F16 => DType::F16,
            CacheDType::F32 => DType::F32,
            CacheDType::BF16 => DType::BF16,
        });
        if device.is_cuda() {
            // Before weights are loaded, which takes minutes.
            runs_on_cuda(&ModelConfig::read(model)?.attention_shape(), asked.unwrap_or(DType::F16))?;
        }
        let model = Model::load(model, options, device)?;
        let dtype = asked.unwrap_or(own_dtype(device.is_cuda(), model.activation()));
        let shape = model.attention_shape();
        let shape = KvShape { layers: shape.layers, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
        let block = shape.block_bytes(dtype);
        let elsewhere = match &cache.offload {
            None => 0,
            Some(Offload::File { bytes, .. } | Offload::Host { bytes }) => room::fit(*bytes, block as u64)?,
        };
        let needs = room::Needs::new(model.config(), block, elsewhere);
        let memory = match free_memory(device) {
            Some(free) if device.is_cuda() => room::on_device(cache.bytes, &needs, free)?,
            free => room::on_host(cache.bytes, &needs, free)?,
        };
        let pool = match &cache.offload {
            None => KvPool::new(shape, dtype, memory, device),
            Some(Offload::File { folder, .. }) if device.is_cpu() => {
                KvPool::with_file(shape, dtype, (memory, elsewhere), folder)
            }
            Some(Offload::Host { bytes }) if device.is_cuda() => {
                // Pinned memory is taken at once, and a system that runs out of it ends processes.
                if let Some(free) = free_memory(&Device::Cpu).filter(|free| free < bytes) {
                    let (wanted, free) = (size(*bytes), size(free));
                    let message = format!("{wanted} of pinned host memory wanted (--kv-offload), {free} free");
                    return Err(LoadError::Cache(message));
                }
                KvPool::with_host(shape, dtype, (memory, elsewhere), device)
            }
            Some(Offload::File { .. }) => {
                return Err(LoadError::Cache("a part in a file goes with the device cpu alone".into()));
            }
            Some(Offload::Host { .. }) => {
                return Err(LoadError::Cache("a part in pinned host memory goes with a CUDA device alone".into()));
            }
        };
        let pool = pool.map_err(|e| {
            let wanted = size((memory * block) as u64);
            let free = free_memory(device).map_or("unknown".into(), size);
            LoadError::Cache(format!("{e} ({wanted} wanted, {free} free beside the weights; see --kv-memory)"))
        })?;
        Ok(Self::new(model, pool, cache.prefix))
    }

    /// In host memory whoever waits for a step does its work, and begins none ahead.
    fn new(model: Model, pool: KvPool, prefix: bool) -> Self {
        let runs_ahead = !model.device().is_cpu();
        Self {
            model,
            pool,
            prefix,
            runs_ahead,
            ahead: None,
            followed: 0,
            #[cfg(test)]
            ends: Vec::new().into_iter(),
        }
    }

    /// A sequence that goes on here from where another backend of the same model has brought it.
    ///
    /// # Errors
    /// No room in the cache, or a prompt that is not all there.
    pub fn adopt(&mut self, from: &Self, sequence: &Sequence, seed: u64) -> Result<Sequence, BackendError> {
        Ok(sequence.move_to(&from.pool, &mut self.pool, seed)?)
    }

    /// Has the file of the [offloaded](Offload) part take what it holds, and gives its memory back, as the system does for
    /// want of memory.
    ///
    /// # Errors
    /// The system's.
    pub fn page_out(&self) -> Result<(), BackendError> {
        Ok(self.pool.page_out()?)
    }

    /// Says whether the step after one is begun before it is asked for, where rows go on by the tokens that they draw. On a
    /// device it is; in host memory that saves nothing.
    #[cfg(any(test, feature = "stub"))]
    pub fn run_ahead(&mut self, yes: bool) {
        (self.runs_ahead, self.ahead) = (yes, None);
    }

    /// How many rows were asked for after they were begun.
    #[cfg(any(test, feature = "stub"))]
    pub fn followed(&self) -> usize {
        self.followed
    }

    /// What artefacts must have been made for.
    pub fn key(&self) -> ModelKey {
        self.model.config().key()
    }

    /// One forward pass, and chunks a part of their way after it; then the next step may be begun.
    fn step(&mut self, inputs: Vec<Input<'_, Sequence>>, begins: bool) -> Result<Vec<Vec<Row>>, BackendError> {
        // Answers by one method stand together.
        let leaders = leaders(inputs.iter().map(|input| (&*input.sequence, input.tokens.len())));
        let part = |(_, input): &(usize, Input<'_, Sequence>)| {
            let many = input.tokens.len() > PROMPT_ROWS && input.sequence.takes_slices();
            many || input.effort < input.tokens.len() || input.sequence.underway().0 > 0
        };
        let (mut inputs, mut chunks): (Vec<_>, Vec<_>) = {
            let (chunks, inputs) = inputs.into_iter().enumerate().partition(part);
            (inputs, chunks)
        };
        inputs.sort_by_key(|(place, _)| leaders[*place]);
        let mut out = vec![Vec::new(); leaders.len()];
        let mut tokens = Vec::new();
        // Rows of the batch after which something is wanted, and what, and the places of the inputs that want it.
        let (mut rows, mut wanted, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let mut spans = Vec::new();
        let chooses = self.model.config().vocab_size <= token::MOST_VOCAB;
        let goes_on = begins && chooses && self.runs_ahead && chunks.is_empty() && go_on(&inputs);
        let before =
            if goes_on { inputs.iter().map(|(_, input)| input.sequence.before()).collect() } else { Vec::new() };
        for (place, input) in &mut inputs {
            tokens.extend_from_slice(input.tokens);
            rows.extend(tokens.len() as u32 - input.wants.len() as u32..tokens.len() as u32);
            places.extend(input.wants.iter().map(|_| *place));
            wanted.extend_from_slice(&input.wants);
            spans.push(Span { sequence: &mut *input.sequence, tokens: input.tokens.len() });
        }
        let shape = self.model.attention_shape();
        let mut batch = AttentionBatch::new(shape, self.model.rotary(), &mut self.pool, spans)?;
        if goes_on {
            batch.put_off();
        }
        if !tokens.is_empty() {
            let hidden = self.model.forward(&tokens, &batch.positions(), &mut batch)?;
            if goes_on {
                let draws: Vec<Draw> = wanted.iter().filter_map(Wanted::draw).collect();
                let chosen = Chosen::new(&self.model.logits(&hidden)?, &draws)?;
                batch.advance();
                let at: Vec<usize> = (0..draws.len()).collect();
                let drawn = self.end_rows(&mut inputs, chosen, &at, true);
                let drawn = drawn.inspect_err(|_| self.undo(&mut inputs, before))?;
                places.into_iter().zip(drawn).for_each(|(place, row)| out[place].push(row));
                return Ok(out);
            }
            if !rows.is_empty() {
                let rows = Tensor::from_slice(&rows, rows.len(), self.model.device())?;
                let rows = finish(&self.model, &hidden.index_select(&rows, 0)?, &wanted)?;
                places.into_iter().zip(rows).for_each(|(place, row)| out[place].push(row));
            }
        }
        for (place, input) in &mut chunks {
            let mut chunk = Chunk::new(shape, batch.pool(), &mut *input.sequence, input.tokens.len())?;
            let last = self.model.advance(input.tokens, &mut chunk, input.effort, input.wants.len())?;
            chunk.pause();
            if let Some(last) = last.filter(|_| !input.wants.is_empty()) {
                out[*place] = finish(&self.model, &last, &input.wants)?;
            }
        }
        // A step is over when its work is done: what the next ones may take is told by the time that it takes.
        if !chunks.is_empty() || out.iter().all(Vec::is_empty) {
            self.model.device().synchronize()?;
        }
        // Last: a step that fails has not been.
        batch.finish()?;
        chunks.into_iter().for_each(|(_, input)| input.sequence.take_in(&mut self.pool));
        Ok(out)
    }
}

/// What is wanted of each row of the last layer's output `[R, hidden]`.
fn finish(model: &Model, hidden: &Tensor, wanted: &[Wanted]) -> candle_core::Result<Vec<Row>> {
    // A prompt has many tokens to score, and the logits of each are as many as the vocabulary has tokens.
    if wanted.len() > SCORED_ROWS && wanted.iter().any(|wants| matches!(wants, Wanted::Score { .. })) {
        let mut rows = Vec::with_capacity(wanted.len());
        for (part, wanted) in wanted.chunks(SCORED_ROWS).enumerate() {
            rows.extend(finish(model, &hidden.narrow(0, part * SCORED_ROWS, wanted.len())?, wanted)?);
        }
        return Ok(rows);
    }
    let (embedded, rest): (Vec<u32>, Vec<u32>) =
        (0..wanted.len() as u32).partition(|at| wanted[*at as usize] == Wanted::Hidden);
    if embedded.is_empty() {
        return drawn(&model.logits(hidden)?, wanted);
    }
    let rows = |places: &[u32]| hidden.index_select(&Tensor::new(places, hidden.device())?, 0);
    let embeddings = model.embeddings(&rows(&embedded)?)?.to_vec2()?;
    let mut all: Vec<(u32, Row)> = embedded.into_iter().zip(embeddings.into_iter().map(Row::Hidden)).collect();
    if !rest.is_empty() {
        let wants: Vec<Wanted> = rest.iter().map(|at| wanted[*at as usize]).collect();
        let others = drawn(&model.logits(&rows(&rest)?)?, &wants)?;
        all.extend(rest.into_iter().zip(others));
    }
    all.sort_by_key(|(at, _)| *at);
    Ok(all.into_iter().map(|(_, row)| row).collect())
}

/// What is wanted of each row of logits `[R, vocab]`, f32. Tokens are drawn where the logits are: on a device for all rows at
/// once, in host memory on all threads. Only logits that are wanted themselves are copied.
fn drawn(logits: &Tensor, wanted: &[Wanted]) -> candle_core::Result<Vec<Row>> {
    if logits.device().is_cpu() {
        let row = |(row, wants): (&[f32], &Wanted)| match wants {
            Wanted::Logits | Wanted::Hidden => Row::Logits(row.to_vec()),
            Wanted::Token(draw) => Row::Token(token::pick(row, draw)),
            &Wanted::Score { token, top } => Row::Score(logprobs(row, token, top)),
        };
        let (logits, vocab) = (logits.contiguous()?, logits.dims2()?.1);
        return with_floats("logits", [&logits], |[all]| all.par_chunks_exact(vocab).zip(wanted).map(row).collect());
    }
    let draws: Vec<Draw> = wanted.iter().map(|wants| wants.draw().unwrap_or(Draw::LIKELIEST)).collect();
    let drawn = if wanted.iter().any(|wants| wants.draw().is_some()) { token::choose(logits, &draws)? } else { None };
    let copied = |row: Vec<f32>, wants: &Wanted| match *wants {
        Wanted::Score { token, top } => Row::Score(logprobs(&row, token, top)),
        _ => Row::Logits(row),
    };
    let Some(drawn) = drawn else {
        return Ok(logits.to_vec2()?.into_par_iter().zip(wanted).map(|(row, wants)| copied(row, wants)).collect());
    };
    let drawn = drawn.to_vec1::<u32>()?;
    let row = |(at, wants): (usize, &Wanted)| match wants {
        Wanted::Token(_) => Ok(Row::Token(Some(drawn[at]).filter(|token| *token != u32::MAX))),
        wants => Ok(copied(logits.get(at)?.to_vec1()?, wants)),
    };
    wanted.iter().enumerate().map(row).collect()
}

impl Backend for ModelBackend {
    type Sequence = Sequence;

    fn limits(&self) -> Limits {
        let config = self.model.config();
        Limits {
            context_tokens: config.context_length,
            cache_tokens: self.pool.blocks() * BLOCK_TOKENS,
            offloaded_tokens: self.pool.offloaded_blocks() * BLOCK_TOKENS,
            cache_bytes: self.pool.bytes(),
            vocab: config.vocab_size,
        }
    }

    fn open(
        &mut self,
        attention: &Arc<AttentionSpec>,
        seed: u64,
        prompt: &[u32],
        question_tokens: usize,
    ) -> Result<Sequence, BackendError> {
        Ok(Sequence::new(Arc::clone(attention), seed, prompt.len()).with_question(question_tokens))
    }

    fn reuse(&mut self, sequence: &mut Sequence, beginning: &Beginning) {
        sequence.reuse(&mut self.pool, beginning);
    }

    fn cached(&self, sequence: &Sequence) -> usize {
        sequence.len()
    }

    fn free_blocks(&self) -> usize {
        self.pool.free_blocks()
    }

    fn offloaded_blocks(&self) -> usize {
        self.pool.offloaded_held()
    }

    fn beginning(
        &self,
        attention: &Arc<AttentionSpec>,
        prompt: &[u32],
        question_tokens: usize,
        salt: &str,
    ) -> Beginning {
        if !self.prefix {
            return Beginning::default();
        }
        let sequence = Sequence::new(Arc::clone(attention), 0, prompt.len()).with_question(question_tokens);
        sequence.beginning(prompt, self.model.rotary(), salt)
    }

    fn shared_blocks(&self, beginning: &Beginning) -> usize {
        beginning.shared_blocks(&self.pool)
    }

    fn gains(&self, beginning: &Beginning, other: &Beginning, cached: usize) -> bool {
        beginning.gains(&self.pool, other, cached)
    }

    fn retract(&mut self, sequence: &mut Sequence) {
        sequence.retract(&mut self.pool);
    }

    fn rejoin(&mut self, sequences: Vec<&mut Sequence>, prompt: Sequence) -> Result<(), BackendError> {
        Ok(Sequence::rejoin(sequences, &mut self.pool, prompt)?)
    }

    fn fork(&mut self, sequence: &Sequence, seed: u64) -> Result<Sequence, BackendError> {
        Ok(sequence.fork(&mut self.pool, seed)?)
    }

    fn chunk(&self, sequence: &Sequence, max: usize) -> usize {
        let least = match self.model.device().is_cpu() {
            _ if !sequence.takes_slices() => 0,
            true if sequence.len() < HOST_LONG => 0,
            true => HOST_CHUNK,
            false => DEVICE_CHUNK,
        };
        sequence.chunk(max.max(least))
    }

    fn underway(&self, sequence: &Sequence) -> Underway {
        let (tokens, done) = sequence.underway();
        Underway { tokens, done }
    }

    fn forward(&mut self, inputs: Vec<Input<'_, Sequence>>) -> Result<Vec<Vec<Row>>, BackendError> {
        let (ahead, host) = (self.ahead.take(), self.model.device().is_cpu());
        let step = || match ahead {
            Some(ahead) => self.follow(ahead, inputs),
            None => self.step(inputs, true),
        };
        // A device has what it needs of this thread alone (uploads and plans that are kept). In host memory the pool stays
        // awake from the first layer to the last.
        if host { parallel::awake(step) } else { step() }
    }

    fn draft(&self, sequence: &mut Sequence, drafts: bool) {
        sequence.draft(drafts);
    }

    fn drafted(&self, sequence: &mut Sequence, CheckedDrafts { made, right, looked_up }: CheckedDrafts) {
        sequence.drafted(made as u64, right as u64, looked_up);
    }

    fn truncate(&mut self, sequence: &mut Sequence, tokens: usize) -> Result<(), BackendError> {
        Ok(sequence.truncate(&mut self.pool, tokens)?)
    }

    fn usage(&self, sequence: &Sequence) -> AttentionUsage {
        sequence.usage()
    }

    fn close(&mut self, mut sequence: Sequence) {
        self.pool.release(sequence.table_mut());
    }

    fn discard(&mut self, sequence: Sequence) {
        // Also what it took over: a bad block of another's would fail whoever comes next.
        self.pool.forget(sequence.table(), 0);
        self.close(sequence);
    }

    fn warm_up(&mut self) -> Result<(), BackendError> {
        let (weights, cache) = (self.model.weight_bytes(), self.pool.bytes());
        self.try_out().map_err(|e| tried(e, weights, cache, free_memory(self.model.device())))
    }

    fn spare(&mut self) -> bool {
        self.pool.drop_idle_indices()
    }

    /// A device that met an illegal address or a broken memory cell answers nothing any more, whoever asks.
    fn check_alive(&mut self) -> Result<(), BackendError> {
        let device = self.model.device();
        // The first answer may be an error that was noted before, as when memory could not be given back.
        device
            .synchronize()
            .or_else(|_| device.synchronize())
            .map_err(|e| BackendError(format!("the device is lost: {e}")))
    }

    fn check_idle(&self) {
        self.pool.check_integrity([]);
    }
}

/// Why the first steps failed: where memory is what is missing, with what took it.
fn tried(error: BackendError, weights: u64, cache: u64, free: Option<u64>) -> BackendError {
    let BackendError(reason) = error;
    BackendError(match free.filter(|_| lacks_memory(&reason)) {
        None => format!("the first steps fail: {reason}"),
        Some(free) => format!(
            "the first steps fail for want of memory, with {} of weights, {} of KV cache and {} free: a smaller --kv-memory \
             or weights of fewer bytes (--dtype) leave them more ({reason})",
            size(weights),
            size(cache),
            size(free)
        ),
    })
}

impl ModelBackend {
    /// A device loads kernels, and takes the memory that steps work with, when they come for the first time: a prompt and some
    /// steps that nobody sees.
    fn try_out(&mut self) -> Result<(), BackendError> {
        let room = self.pool.free_blocks().saturating_sub(1) * BLOCK_TOKENS;
        let tokens = DEVICE_CHUNK.min(room).min(self.model.config().context_length / 2);
        if self.model.device().is_cpu() || tokens < 2 {
            return Ok(());
        }
        let (prompt, mut sequence) = (vec![0; tokens], Sequence::new(Arc::default(), 0, tokens));
        let likeliest = || vec![Wanted::Token(Draw::LIKELIEST)];
        let mut tried = Ok(Vec::new());
        // In small slices and in large ones, as beside answers; then the steps by which a graph is made.
        for effort in [1, 1, 1, 1, tokens - 1, tokens - 1, 1, 1, 1] {
            let tokens = if sequence.len() < tokens { &prompt[..] } else { &prompt[..1] };
            let input = Input { sequence: &mut sequence, tokens, effort, wants: likeliest(), next: None };
            tried = tried.and_then(|_| self.step(vec![input], false));
        }
        self.close(sequence);
        tried?;
        // Slices have whole blocks of rows, up to two chunks, and a prompt's last one what is left; a prompt alone has more.
        let blocks = (DEVICE_CHUNK..=2 * DEVICE_CHUNK).step_by(BLOCK_TOKENS);
        self.model.try_rows((8..DEVICE_CHUNK).step_by(8).chain(blocks).chain([PROMPT_ROWS]))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
