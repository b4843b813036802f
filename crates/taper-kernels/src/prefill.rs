//! Attention of many query rows of one sequence over its paged keys and values.
//!
//! Rows stand at any ascending absolute positions, so the same operation serves a prompt's chunk, Delta's anchors,
//! sampled rows and a dense tail. What they read is a [`Mask`] that holds for all of them, or a [`Selection`] with lists
//! of its own for each run of rows and each head. Scores exist for one tile of rows and one block of keys at a time.
//!
//! Selections come from operations too: [`sums`] adds up the probabilities of a few rows by key and by diagonal, and
//! [`stripes`] turns the sums into lists; [`pooled`] ranks blocks by their means; [`probe`] searches a hierarchy of
//! chunks. Methods only compose these.

mod pooled;
mod probe;
mod selection;
pub mod stripes;
mod sums;
mod tile;

pub use pooled::pooled;
pub use probe::{Hierarchy, Stage, probe};
#[cfg(feature = "cuda")]
pub(crate) use probe::{Reach, neighbours};
pub use selection::{Blocks, HeadReads, Lists, Selection, StripedRun, query_blocks};
#[cfg(feature = "cuda")]
pub(crate) use selection::{outside, rows_of};
pub use sums::{Sums, sums};

use crate::floats::with_floats;
use crate::kv::{BLOCK_TOKENS, PagedKv, with_kv_element};
use crate::parallel::SharedMut;
use crate::simd::Isa;
use candle_core::{CpuStorage, Result, Storage, Tensor, bail};
use std::ops::Range;
use tile::{Dims, Operands};

/// Which of the keys at or before its position a query row reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// All of them.
    Causal,
    /// The first `sink` and the last `window`, the row's own included.
    SinkWindow {
        /// Tokens at the start of the sequence.
        sink: usize,
        /// Tokens up to the row's own, at least 1.
        window: usize,
    },
}

impl Mask {
    /// The keys that a row at `position` reads: two disjoint ranges, ascending, the second never empty.
    ///
    /// `model_window` is the model's own sliding window: no row sees beyond it.
    pub fn keys(&self, position: usize, model_window: Option<usize>) -> [Range<usize>; 2] {
        let end = position + 1;
        let lowest = end.saturating_sub(model_window.unwrap_or(end));
        match *self {
            Mask::Causal => [lowest..lowest, lowest..end],
            Mask::SinkWindow { sink, window } => {
                let start = end.saturating_sub(window.max(1)).max(lowest);
                let sinks = lowest..sink.clamp(lowest, start);
                [sinks, start..end]
            }
        }
    }

    /// How many keys a row at `position` reads.
    pub fn count(&self, position: usize, model_window: Option<usize>) -> usize {
        self.keys(position, model_window).into_iter().map(|keys| keys.len()).sum()
    }
}

/// Query rows of one sequence, and what there is for them to read.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// Queries `[T, q_heads, head_dim]`, f32; on a device as wide as the cache.
    pub q: &'a Tensor,
    /// The layer's cache.
    pub kv: PagedKv<'a>,
    /// The sequence's blocks in token order.
    pub table: &'a [u32],
    /// Absolute position of each row `[T]`, strictly ascending; their keys and values are in the cache.
    pub positions: &'a [u32],
    /// The model's own sliding window.
    pub window: Option<usize>,
}

/// What rows read of it.
#[derive(Debug, Clone, Copy)]
pub enum Reads<'a> {
    /// The same rule for every row and head.
    Mask(Mask),
    /// Lists.
    Selection(&'a Selection),
}

impl From<Mask> for Reads<'_> {
    fn from(mask: Mask) -> Self {
        Self::Mask(mask)
    }
}

impl<'a> From<&'a Selection> for Reads<'a> {
    fn from(selection: &'a Selection) -> Self {
        Self::Selection(selection)
    }
}

/// Attends; returns `[T, q_heads, head_dim]` and the natural logarithm of each row's sum of exponentials `[T, q_heads]`,
/// both f32. Scores are scaled by 1/sqrt(head_dim) and accumulated in f32. A row that reads nothing gives 0 and -inf.
///
/// # Errors
/// Shapes or dtypes that differ from these, positions that do not ascend or lie beyond the table, a selection for other
/// heads or without a row's position.
///
/// # Source
/// Online softmax over tiles: Dao et al. 2022, arXiv:2205.14135.
pub fn prefill(rows: &Rows, reads: Reads) -> Result<(Tensor, Tensor)> {
    #[cfg(feature = "cuda")]
    if rows.q.device().is_cuda() {
        rows.dims()?;
        return Ok(crate::cuda::prefill(rows, reads)?);
    }
    prefill_with(Isa::best(), rows, reads)
}

fn prefill_with(isa: Isa, rows: &Rows, reads: Reads) -> Result<(Tensor, Tensor)> {
    let dims = rows.dims()?;
    let tiles = tile::tiles(rows.positions, &reads, &dims)?;
    let count = rows.positions.len();
    let (mut out, mut lse) = (vec![0f32; count * dims.q_heads * dims.head_dim], vec![0f32; count * dims.q_heads]);
    rows.with_storage(|q, k, v| {
        let into = (&SharedMut::new(&mut out), &SharedMut::new(&mut lse));
        with_kv_element!(rows.kv.k.dtype(), T => {
            tile::attend::<T>(isa, &Operands::new(rows, &reads, &dims, (q, k, v)), &tiles, into);
        });
        Ok(())
    })?;
    let device = rows.q.device();
    let out = Tensor::from_vec(out, (count, dims.q_heads, dims.head_dim), device)?;
    Ok((out, Tensor::from_vec(lse, (count, dims.q_heads), device)?))
}

impl Rows<'_> {
    /// Checks everything that can be told without reading.
    fn dims(&self) -> Result<Dims> {
        let (rows, q_heads, head_dim) = self.q.dims3()?;
        let (blocks, kv_heads, kv_dim) = self.kv.dims()?;
        if head_dim != kv_dim || kv_heads == 0 || q_heads % kv_heads != 0 || rows != self.positions.len() {
            bail!(
                "prefill: q {:?}, {} positions, cache of {kv_heads} heads of {kv_dim}",
                self.q.shape(),
                self.positions.len()
            );
        }
        if !self.positions.is_sorted_by(|a, b| a < b) {
            bail!("prefill: positions do not ascend");
        }
        let needed = self.positions.last().map_or(0, |&p| p as usize / BLOCK_TOKENS + 1);
        if needed > self.table.len() {
            bail!("prefill: position {:?} with a table of {} blocks", self.positions.last(), self.table.len());
        }
        if let Some(block) = self.table[..needed].iter().find(|&&b| b as usize >= blocks) {
            bail!("prefill: block {block} in a pool of {blocks}");
        }
        Ok(Dims { q_heads, kv_heads, group: q_heads / kv_heads, head_dim, padded: head_dim.next_multiple_of(32) })
    }

    /// Tokens up to the last row.
    pub(crate) fn tokens(&self) -> usize {
        self.positions.last().map_or(0, |&p| p as usize + 1)
    }

    /// The queries, and the storage of keys and values.
    fn with_storage<R>(&self, run: impl FnOnce(&[f32], &CpuStorage, &CpuStorage) -> Result<R>) -> Result<R> {
        let (k, _) = self.kv.k.storage_and_layout();
        let (v, _) = self.kv.v.storage_and_layout();
        let (Storage::Cpu(k), Storage::Cpu(v)) = (&*k, &*v) else { bail!("prefill: only the CPU is built in") };
        with_floats("prefill", [self.q], |[q]| run(q, k, v))?
    }
}

#[cfg(test)]
mod tests;
