//! The seam between the model and attention: the model hands over one layer's queries, keys and values for the whole
//! batch and gets the attention output back. It never learns which method ran.

use candle_core::{Result, Tensor};
use taper_kernels::decode::{DecodeRow, Selection};
use taper_kernels::kv::PagedKv;

/// What attention needs to know of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Decoder layers.
    pub layers: usize,
    /// Query heads of a layer.
    pub q_heads: usize,
    /// Key and value heads of a layer; divides `q_heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// The model's own sliding window in tokens, the query's token included (Mistral 7B v0.1: 4096).
    pub window: Option<usize>,
}

impl AttentionShape {
    /// Query heads that share one KV head.
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }
}

/// Attention over a flat batch of tokens, called once a layer in layer order.
pub trait LayerAttention {
    /// How long the sequence of the batch's token `token` is, for a rotary embedding that heeds it: the whole prompt for
    /// a token of it, however the prompt is cut, and up to the token itself after.
    fn length(&self, token: usize) -> u32;

    /// Stores the batch's keys and values and attends. Scores are scaled by 1/sqrt(head_dim).
    ///
    /// # Shapes (T tokens of the batch; f32, contiguous)
    /// - `q` `[T, q_heads, head_dim]`, after rotary embedding
    /// - `k`, `v` `[T, kv_heads, head_dim]`, `k` after rotary embedding
    /// - returns `[T, q_heads, head_dim]`
    ///
    /// # Errors
    /// A shape or dtype that differs from these, or a device error.
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor>;

    /// The same from joint projections before the rotary embedding, where cache and device have an operation that rotates
    /// and stores in one; none, and nothing is done, where they have not.
    ///
    /// # Shapes (T tokens of the batch; contiguous)
    /// - `qkv` `[T, (q_heads + 2 kv_heads) head_dim]`, queries first
    /// - `angles` `[T, head_dim]`, each token's cosines, then its sines; f32
    ///
    /// # Errors
    /// As [`attend`](Self::attend).
    fn attend_joint(&mut self, _layer: usize, _qkv: &Tensor, _angles: &Tensor) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// The whole step's attention, where it is so plain that it can be had without asking layer by layer: every token is a row
    /// that reads the same in every layer, and none is audited.
    fn plain_step(&self) -> Option<PlainStep<'_>> {
        None
    }

    /// What a step of any other rows repeats, where what its layers queue on a device may be what another step's did: it is to be
    /// gone through layer by layer still, by [`attend_joint`](Self::attend_joint).
    fn repeats(&self) -> Option<Repeats> {
        None
    }

    /// Takes a [`plain_step`](Self::plain_step) as attended in all layers, and stored.
    ///
    /// # Errors
    /// As [`attend`](Self::attend).
    fn attended(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A step of rows that read the same in every layer.
pub struct PlainStep<'a> {
    /// Each layer's cache.
    pub layers: Vec<PagedKv<'a>>,
    /// Where each token's keys and values go (`block * 64 + row`).
    pub slots: &'a [u32],
    /// What each token sees, itself included.
    pub rows: Vec<DecodeRow<'a>>,
    /// What it reads of it.
    pub selection: Selection,
}

/// What steps that queue the same have in common.
#[derive(Debug, Clone)]
pub struct Repeats {
    /// A number for the methods that choose, and for how many rows each.
    pub kind: u64,
    /// The first layer's keys.
    pub k: Tensor,
}

/// The model's rotary embedding, for methods that look at queries and keys as they were before it.
pub trait Rotary: Send + Sync {
    /// The angle per position of each pair of dimensions `[head_dim / 2]`, in a sequence of `length` tokens.
    fn frequencies(&self, length: usize) -> Vec<f32>;

    /// What cosines and sines are multiplied by.
    fn factor(&self) -> f32;

    /// Whether the frequencies depend on the length.
    fn heeds_length(&self) -> bool;
}
