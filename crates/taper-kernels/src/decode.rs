//! Attention of single query rows over chosen keys: the operation behind every decode method.
//!
//! A method chooses per KV head (one choice for the whole group of query heads that share it); [`attend`] reads only
//! what was chosen.

mod attend;
mod choose;
mod paying;
mod rows;
pub(crate) mod sample;
mod scores;
mod selection;
mod values;

#[cfg(feature = "cuda")]
pub(crate) use attend::check;
pub use attend::{attend, stacked};
pub use choose::{Importance, Over, importance, top_k, top_p, top_paying};
#[cfg(feature = "cuda")]
pub(crate) use paying::of_pages;
pub(crate) use sample::Page;
pub use sample::{Budget, Certainty, Foreseen, Sampling, foresee, sample, sample_certain, sample_some};
#[cfg(feature = "cuda")]
pub(crate) use sample::{GUESS_KEYS, LOOKS, check as sample_check};
pub(crate) use scores::{HeadScores, Kept, pass};
pub use scores::{Scores, scores};
pub(crate) use selection::sink_window;
pub use selection::{HeadSelection, Keys, Sample, Selection, Values};
#[cfg(feature = "cuda")]
pub(crate) use selection::{counts, tokens};
pub use values::{By, Spread, Targets, bernoulli_queries, sample_values};

use crate::kv::{BLOCK_TOKENS, KvElement, PagedKv};
use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, bail};
use std::ops::Range;

/// Query rows of a batch, each of any sequence.
#[derive(Clone, Copy)]
pub struct Decode<'a> {
    /// Queries `[R, q_heads, head_dim]`, f32; on a device as wide as the cache.
    pub q: &'a Tensor,
    /// The layer's cache.
    pub kv: PagedKv<'a>,
    /// The rows' sequences `[R]`.
    pub rows: &'a [DecodeRow<'a>],
}

/// What one query row may see.
#[derive(Debug, Clone)]
pub struct DecodeRow<'a> {
    /// The sequence's blocks in token order.
    pub table: &'a [u32],
    /// Visible tokens; the last is the query's own. Not empty.
    pub visible: Range<usize>,
}

/// Tokens of a work unit. A list is cut into units by its length alone, so that results do not depend on the machine.
const UNIT_TOKENS: usize = 512;

/// The CPU's view of a batch.
pub(crate) struct View<'a, T> {
    q: &'a [f32],
    k: &'a [T],
    v: &'a [T],
    rows: &'a [DecodeRow<'a>],
    q_heads: usize,
    kv_heads: usize,
    group: usize,
    head_dim: usize,
}

impl<'a, T: KvElement> View<'a, T> {
    /// Where a token's key and value row lies.
    #[inline(always)]
    fn offset(&self, row: usize, head: usize, token: usize) -> usize {
        let block = self.rows[row].table[token / BLOCK_TOKENS] as usize;
        ((block * self.kv_heads + head) * BLOCK_TOKENS + token % BLOCK_TOKENS) * self.head_dim
    }

    /// Where the rows of some tokens, at most a block, lie among the keys, and among the values.
    #[inline(always)]
    fn places(&self, (row, head): (usize, usize), tokens: &[u32], to: &mut [usize; BLOCK_TOKENS]) {
        let mut last = 0;
        for (to, &token) in to.iter_mut().zip(tokens) {
            *to = self.offset(row, head, token as usize);
            last = last.max(*to);
        }
        assert!(last + self.head_dim <= self.k.len().min(self.v.len()), "a block within the cache");
    }

    /// The rows of some tokens, at most a block, of keys or values that begin with `first`: `head_dim` elements each.
    #[inline(always)]
    fn rows<'b>(
        &self,
        first: *const T,
        of: (usize, usize),
        tokens: &[u32],
        to: &'b mut [*const T; BLOCK_TOKENS],
    ) -> &'b [*const T] {
        let mut places = [0; BLOCK_TOKENS];
        self.places(of, tokens, &mut places);
        rows_from(first, &places[..tokens.len()], to)
    }

    /// The queries `[group, head_dim]` of one row and KV head.
    fn queries(&self, row: usize, head: usize) -> &'a [f32] {
        let at = (row * self.q_heads + head * self.group) * self.head_dim;
        &self.q[at..at + self.group * self.head_dim]
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// The rows that lie at such places from the first on, at most a block.
#[inline(always)]
fn rows_from<'a, T>(first: *const T, places: &[usize], to: &'a mut [*const T; BLOCK_TOKENS]) -> &'a [*const T] {
    to.iter_mut().zip(places).for_each(|(to, &place)| *to = first.wrapping_add(place));
    &to[..places.len()]
}

impl<'a> Decode<'a> {
    /// (rows, q_heads, kv_heads, head_dim), all checked against each other and the cache.
    pub(crate) fn dims(&self) -> Result<(usize, usize, usize, usize)> {
        let (rows, q_heads, head_dim) = self.q.dims3()?;
        let (blocks, kv_heads, kv_dim) = self.kv.dims()?;
        if head_dim != kv_dim || kv_heads == 0 || !q_heads.is_multiple_of(kv_heads) || rows != self.rows.len() {
            bail!("decode: q {:?}, {} rows, cache of {kv_heads} heads of {kv_dim}", self.q.shape(), self.rows.len());
        }
        for row in self.rows {
            let needed = row.visible.end.div_ceil(BLOCK_TOKENS);
            if row.visible.is_empty() || needed > row.table.len() {
                bail!("decode: tokens {:?} with a table of {} blocks", row.visible, row.table.len());
            }
            if let Some(block) = row.table[..needed].iter().find(|&&b| b as usize >= blocks) {
                bail!("decode: block {block} in a pool of {blocks}");
            }
        }
        Ok((rows, q_heads, kv_heads, head_dim))
    }

    /// The CPU's view, from storages that the caller holds.
    fn view<T: KvElement>(&'a self, q: (&'a Storage, &Layout), k: &'a Storage, v: &'a Storage) -> Result<View<'a, T>> {
        let (_, q_heads, kv_heads, head_dim) = self.dims()?;
        let (Storage::Cpu(CpuStorage::F32(data)), Some((from, to))) = (q.0, q.1.contiguous_offsets()) else {
            bail!("decode: q must be contiguous f32 on the CPU")
        };
        let (Storage::Cpu(k), Storage::Cpu(v)) = (k, v) else { bail!("decode: only the CPU is built in") };
        let (Some(k), Some(v)) = (T::slice(k), T::slice(v)) else { bail!("decode: cache of another dtype") };
        let group = q_heads / kv_heads;
        Ok(View { q: &data[from..to], k, v, rows: self.rows, q_heads, kv_heads, group, head_dim })
    }
}

/// Runs an expression with `$view` bound to the CPU's view of a batch in the cache's dtype.
macro_rules! with_view {
    ($batch:expr, $view:ident : $T:ident => $body:expr) => {{
        let (q, layout) = $batch.q.storage_and_layout();
        let (k, _) = $batch.kv.k.storage_and_layout();
        let (v, _) = $batch.kv.v.storage_and_layout();
        $crate::kv::with_kv_element!($batch.kv.k.dtype(), $T => {
            let $view = &$batch.view::<$T>((&q, layout), &k, &v)?;
            $body
        })
    }};
}
pub(crate) use with_view;

#[cfg(test)]
mod tests;
