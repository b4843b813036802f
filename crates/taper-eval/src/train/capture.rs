//! Runs a model densely over sequences and keeps queries and keys of some layers.
//!
//! What is kept of a sequence and layer, in f32 after the rotary embedding: the key of every token, and the queries of a
//! seeded sample of its rows. The cache that attention reads meanwhile is f32, on a CUDA
//! device f16.

use super::error::TrainError;
use super::head::Far;
use candle_core::{DType, Result, Tensor, bail};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;
use taper_attention::{AttentionBatch, AttentionShape, AttentionSpec, LayerAttention, Sequence, Span};
use taper_kernels::rotary::Rotation;
use taper_kv_cache::{BLOCK_TOKENS, KvPool, KvShape};
use taper_model::Model;

/// Prompt tokens of one forward pass.
const CHUNK_TOKENS: usize = 512;

/// One layer of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct Captured {
    /// Tokens of the sequence.
    pub tokens: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Keys `[kv_heads][tokens, head_dim]`, after the rotary embedding; empty where none were wanted.
    pub k: Vec<Vec<f32>>,
    /// Positions of the queries, ascending.
    pub rows: Vec<u32>,
    /// Queries `[q_heads][rows, head_dim]`, after the rotary embedding.
    pub q: Vec<Vec<f32>>,
    /// The rotary embedding of the sequence: the angle per position of each pair of dimensions, and a factor.
    pub rotary: (Vec<f32>, f32),
}

impl Captured {
    /// Takes the rotary embedding off vectors `[positions, head_dim]`.
    pub fn unrotate(&self, x: &mut [f32], positions: impl Iterator<Item = usize>) {
        for (x, position) in x.chunks_exact_mut(self.head_dim).zip(positions) {
            Rotation::new(position, &self.rotary.0, self.rotary.1).undo(x);
        }
    }
}

/// What is wanted of a sequence.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wanted {
    /// Whether keys are kept.
    pub keys: bool,
    /// Positions whose queries are kept, ascending.
    pub rows: Vec<u32>,
}

impl Wanted {
    /// Keys, and queries of at most `queries` rows that have far keys, drawn at random.
    pub fn sample(tokens: usize, far: &Far, queries: usize, seed: u64) -> Self {
        let first = (0..tokens).find(|&position| !far.range(position).is_empty()).unwrap_or(tokens);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let there = tokens - first;
        let mut rows = rand::seq::index::sample(&mut rng, there, queries.min(there)).into_vec();
        rows.sort_unstable();
        Self { keys: true, rows: rows.into_iter().map(|row| (first + row) as u32).collect() }
    }

    /// Bytes that a layer of it takes.
    pub fn bytes(&self, tokens: usize, shape: &AttentionShape) -> u64 {
        let keys = if self.keys { tokens * shape.kv_heads } else { 0 };
        ((keys + self.rows.len() * shape.q_heads) * shape.head_dim * size_of::<f32>()) as u64
    }
}

/// Runs sequences through a model.
pub(crate) struct Capture<'a> {
    model: &'a Model,
    pool: KvPool,
    spec: Arc<AttentionSpec>,
}

/// Sees one layer's queries `[T, q_heads, head_dim]` and keys `[T, kv_heads, head_dim]` of a chunk: (layer, position of
/// the first token, queries, keys).
pub(crate) type See<'a> = &'a mut dyn FnMut(usize, usize, &[f32], &[f32]);

impl<'a> Capture<'a> {
    /// For sequences of at most `length` tokens.
    ///
    /// # Errors
    /// No memory for the cache.
    pub fn new(model: &'a Model, length: usize) -> std::result::Result<Self, TrainError> {
        let AttentionShape { layers, kv_heads, head_dim, .. } = model.attention_shape();
        let shape = KvShape { layers, kv_heads, head_dim };
        // The CUDA operations know no f32 cache.
        let dtype = if model.device().is_cpu() { DType::F32 } else { DType::F16 };
        let pool = KvPool::new(shape, dtype, length.div_ceil(BLOCK_TOKENS), model.device())
            .map_err(|e| TrainError::option("length", e.to_string()))?;
        Ok(Self { model, pool, spec: Arc::default() })
    }

    /// Runs a sequence through the first layers, to the last one of `layers`, ascending, and shows those to `see`.
    ///
    /// # Errors
    /// [`TrainError::Stopped`], or what a step says.
    pub fn run(
        &mut self,
        tokens: &[u32],
        layers: &[usize],
        see: See,
        stopped: &dyn Fn() -> bool,
    ) -> std::result::Result<(), TrainError> {
        let mut sequence = self.pass(tokens, layers, (see, false), stopped)?;
        self.pool.release(sequence.table_mut());
        Ok(())
    }

    /// The same, and keeps the sequence, with those layers in the cache, for [`pool`](Self::pool) to release.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn hold(
        &mut self,
        tokens: &[u32],
        layers: &[usize],
        see: See,
        stopped: &dyn Fn() -> bool,
    ) -> std::result::Result<Sequence, TrainError> {
        self.pass(tokens, layers, (see, true), stopped)
    }

    /// The cache.
    pub fn pool(&mut self) -> &mut KvPool {
        &mut self.pool
    }

    /// `cache_last`: whether the last layer is to be cached as those before it are.
    fn pass(
        &mut self,
        tokens: &[u32],
        layers: &[usize],
        (see, cache_last): (See, bool),
        stopped: &dyn Fn() -> bool,
    ) -> std::result::Result<Sequence, TrainError> {
        let mut sequence = Sequence::new(self.spec.clone(), 0, tokens.len());
        for chunk in tokens.chunks(CHUNK_TOKENS) {
            let done = if stopped() {
                Err(TrainError::Stopped)
            } else {
                self.step(&mut sequence, chunk, layers, (&mut *see, cache_last))
            };
            if let Err(error) = done {
                self.pool.release(sequence.table_mut());
                return Err(error);
            }
        }
        Ok(sequence)
    }

    fn step(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        layers: &[usize],
        (see, cache_last): (See, bool),
    ) -> std::result::Result<(), TrainError> {
        let failed = TrainError::compute(layers.last().copied().unwrap_or(0));
        let start = sequence.len();
        let span = Span { sequence, tokens: tokens.len() };
        let shape = self.model.attention_shape();
        let batch = AttentionBatch::new(shape, self.model.rotary(), &mut self.pool, vec![span])
            .map_err(|e| failed(candle_core::Error::wrap(e)))?;
        let positions = batch.positions();
        let mut tap = Tap { inner: batch, layers, start, see, cache_last, seen_all: false };
        let ended = self.model.forward(tokens, &positions, &mut tap);
        // Layers after the last one wanted are not computed: the tap ended the pass.
        if !tap.seen_all {
            ended.map_err(failed)?;
        }
        tap.inner.finish().map_err(TrainError::compute(layers.last().copied().unwrap_or(0)))
    }

    /// Captures layers of a sequence, ascending `[layers]`.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn keep(
        &mut self,
        tokens: &[u32],
        layers: &[usize],
        wanted: &Wanted,
        stopped: &dyn Fn() -> bool,
    ) -> std::result::Result<Vec<Captured>, TrainError> {
        let shape = self.model.attention_shape();
        let mut kept = vec![blank(self.model, tokens.len(), wanted); layers.len()];
        let mut see = |layer: usize, start: usize, q: &[f32], k: &[f32]| {
            let place = layers.iter().position(|&wanted| wanted == layer).expect("only wanted layers are shown");
            kept[place].add(&shape, wanted.keys, start, q, k);
        };
        self.run(tokens, layers, &mut see, stopped)?;
        Ok(kept)
    }
}

fn blank(model: &Model, tokens: usize, wanted: &Wanted) -> Captured {
    let shape = model.attention_shape();
    let rotary = model.rotary();
    let length = if rotary.heeds_length() { tokens } else { 0 };
    let room = |rows: usize| Vec::with_capacity(rows * shape.head_dim);
    Captured {
        tokens,
        head_dim: shape.head_dim,
        k: (0..shape.kv_heads).map(|_| room(if wanted.keys { tokens } else { 0 })).collect(),
        rows: wanted.rows.clone(),
        q: (0..shape.q_heads).map(|_| room(wanted.rows.len())).collect(),
        rotary: (rotary.frequencies(length), rotary.factor()),
    }
}

impl Captured {
    /// Takes in a chunk that begins at `start`.
    fn add(&mut self, shape: &AttentionShape, keys: bool, start: usize, q: &[f32], k: &[f32]) {
        let d = self.head_dim;
        let tokens = k.len() / (shape.kv_heads * d);
        if keys {
            for token in k.chunks_exact(shape.kv_heads * d) {
                self.k.iter_mut().zip(token.chunks_exact(d)).for_each(|(to, k)| to.extend_from_slice(k));
            }
        }
        let of = |position: usize| self.rows.partition_point(|&row| (row as usize) < position);
        for row in &self.rows[of(start)..of(start + tokens)] {
            let token = &q[(*row as usize - start) * shape.q_heads * d..][..shape.q_heads * d];
            self.q.iter_mut().zip(token.chunks_exact(d)).for_each(|(to, q)| to.extend_from_slice(q));
        }
    }
}

/// Dense attention that shows what it is given.
struct Tap<'a, 'b> {
    inner: AttentionBatch<'a>,
    layers: &'b [usize],
    start: usize,
    see: See<'b>,
    /// Whether the last layer wanted is cached as well.
    cache_last: bool,
    /// Whether the last layer wanted has been seen.
    seen_all: bool,
}

impl LayerAttention for Tap<'_, '_> {
    fn length(&self, token: usize) -> u32 {
        self.inner.length(token)
    }

    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        if self.layers.contains(&layer) {
            let flat = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
            (self.see)(layer, self.start, &flat(q)?, &flat(k)?);
        }
        if self.layers.last().is_none_or(|&last| layer >= last) {
            if self.cache_last {
                self.inner.attend(layer, q, k, v)?;
            }
            self.seen_all = true;
            bail!("no layer after {layer} is wanted");
        }
        self.inner.attend(layer, q, k, v)
    }
}
