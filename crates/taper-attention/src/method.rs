//! The two seams that a method implements. A method decides what is read; the operations of taper-kernels read it.

use candle_core::{Result, Tensor};
use taper_kernels::decode::{Budget, Decode, DecodeRow, Scores, Selection};
use taper_kernels::kv::PagedKv;
use taper_kernels::philox::Stream;
use taper_kernels::prefill::{self, Mask, Prefill};

/// How a prompt's rows attend.
pub trait PrefillMethod: std::fmt::Debug + Send + Sync {
    /// Attends for a chunk of a prompt in one layer. `carry` is what the method kept from the chunk before.
    ///
    /// # Errors
    /// A device error.
    fn attend(&self, layer: &PrefillLayer, carry: &mut Carry) -> Result<PrefillOutput>;
}

/// What a prefill method keeps of one layer from one chunk of a prompt to the next, so that the cuts do not show.
#[derive(Debug, Clone, Default)]
pub struct Carry {
    /// The method's own.
    pub rows: Option<Tensor>,
    base: Option<Box<Carry>>,
}

impl Carry {
    /// That of the method underneath.
    pub fn base(&mut self) -> &mut Carry {
        self.base.get_or_insert_default()
    }
}

/// A chunk of one sequence's prompt in one layer; its keys and values are in the cache.
#[derive(Clone)]
pub struct PrefillLayer<'a> {
    /// Queries `[T, q_heads, head_dim]`, f32, after rotary embedding.
    pub q: Tensor,
    /// The layer's cache.
    pub kv: PagedKv<'a>,
    /// The sequence's blocks.
    pub table: &'a [u32],
    /// Absolute position of the first row; the rows are consecutive.
    pub start: usize,
    /// Tokens of the whole prompt.
    pub prompt: usize,
    /// The model's own sliding window.
    pub window: Option<usize>,
}

/// What a prefill method gives back.
pub struct PrefillOutput {
    /// `[T, q_heads, head_dim]`, f32.
    pub out: Tensor,
    /// Keys that each row read `[T]`, per KV head.
    pub keys: Vec<u64>,
}

impl PrefillLayer<'_> {
    /// Rows of the chunk.
    pub fn rows(&self) -> usize {
        self.q.dims()[0]
    }

    /// Attends for all rows under a mask.
    ///
    /// # Errors
    /// A device error.
    pub fn attend(&self, mask: Mask) -> Result<PrefillOutput> {
        let positions: Vec<u32> = (self.start..self.start + self.rows()).map(|p| p as u32).collect();
        self.attend_rows(&self.q, &positions, mask)
    }

    /// Attends for queries `[R, q_heads, head_dim]` at the positions given, ascending.
    ///
    /// # Errors
    /// A device error.
    pub fn attend_rows(&self, q: &Tensor, positions: &[u32], mask: Mask) -> Result<PrefillOutput> {
        let args = Prefill { q, kv: self.kv, table: self.table, positions, window: self.window, mask };
        let keys = positions.iter().map(|&p| mask.count(p as usize, self.window) as u64).collect();
        Ok(PrefillOutput { out: prefill::prefill(&args)?, keys })
    }

    /// The first `rows` rows.
    ///
    /// # Errors
    /// A device error.
    pub fn first(&self, rows: usize) -> Result<Self> {
        Ok(Self { q: self.q.narrow(0, 0, rows)?, ..self.clone() })
    }
}

/// What generated tokens read.
pub trait DecodeMethod: std::fmt::Debug + Send + Sync {
    /// Chooses the keys of every row and KV head.
    ///
    /// # Errors
    /// A device error.
    fn select(&self, step: &DecodeStep) -> Result<Choice>;

    /// The relative error that the method promises to keep, if it promises one.
    fn epsilon(&self) -> Option<f64> {
        None
    }
}

/// Query rows of one layer that share a method.
pub struct DecodeStep<'a> {
    /// The rows; their keys and values are in the cache.
    pub batch: Decode<'a>,
    /// KV heads of the layer.
    pub kv_heads: usize,
    /// Keys of the rows' random draws `[R]`; `head` is left to the operation.
    pub streams: &'a [Stream],
}

impl DecodeStep<'_> {
    /// What holds of a row, for each of its KV heads `[R, kv_heads]`.
    pub fn per_head<T: Clone>(&self, of: impl Fn(&DecodeRow) -> T) -> Vec<T> {
        self.batch.rows.iter().flat_map(|row| std::iter::repeat_n(of(row), self.kv_heads)).collect()
    }
}

/// What a decode method chose.
pub struct Choice {
    /// The keys that are read.
    pub selection: Selection,
    /// The scores of keys, where choosing took them.
    pub scores: Option<Scores>,
    /// Budgets `[R, q_heads]` of a method that samples.
    pub budgets: Option<Vec<Budget>>,
}

impl From<Selection> for Choice {
    fn from(selection: Selection) -> Self {
        Self { selection, scores: None, budgets: None }
    }
}

/// Predicts which keys hold the most attention mass.
pub trait Predictor: std::fmt::Debug + Send + Sync {
    /// The sinks, the window, and of the rest the `k` `[R, kv_heads]` keys that should matter most. A head whose `k` is
    /// all there is reads everything, and nothing is spent on it.
    ///
    /// # Errors
    /// A device error.
    fn select(&self, step: &DecodeStep, sink: usize, window: usize, k: &[usize]) -> Result<Choice>;
}
