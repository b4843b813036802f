//! Indices over the paged cache: what stands for keys when a method chooses among them.
//!
//! An index is one tensor a layer, `[blocks, kv_heads, rows, width]`, a function of the cached keys alone. Each module has
//! an `extend`, which takes in rows of the cache, and a way to look keys up.

pub mod bounds;
pub mod clusters;
pub mod codes;
pub mod labels;
pub mod norms;
pub mod quantized;

use crate::decode::Decode;
use crate::kv::{BLOCK_TOKENS, KvElement};
use crate::parallel::{self, SharedMut};
use crate::simd::prefetch;
use candle_core::{CpuStorage, InplaceOp2, Layout, Result, Tensor, bail};
use std::ops::Range;

/// Rows of one block of the cache that an index takes in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The block.
    pub block: u32,
    /// Its rows; those before were taken in earlier.
    pub rows: Range<usize>,
    /// Absolute position of its row 0.
    pub start: usize,
}

/// An in-place operation on an index that reads the layer's keys.
struct Extend<F>(F);

impl<F: Fn(&mut CpuStorage, &CpuStorage) -> Result<()>> InplaceOp2 for Extend<F> {
    fn name(&self) -> &'static str {
        "index-extend"
    }

    fn cpu_fwd(&self, index: &mut CpuStorage, _: &Layout, keys: &CpuStorage, _: &Layout) -> Result<()> {
        (self.0)(index, keys)
    }
}

/// Shape of the keys and the index, checked: (kv_heads, head_dim, elements of one block and head of the index).
fn dims(index: &Tensor, k: &Tensor, parts: &[Part]) -> Result<(usize, usize, usize)> {
    let (blocks, kv_heads, rows, head_dim) = k.dims4()?;
    let (index_blocks, index_heads, ..) = index.dims4()?;
    let inside = |p: &Part| (p.block as usize) < blocks && p.rows.end <= BLOCK_TOKENS && p.rows.start < p.rows.end;
    if rows != BLOCK_TOKENS || (index_blocks, index_heads) != (blocks, kv_heads) || !parts.iter().all(inside) {
        bail!("index {:?} over keys {:?}: {} parts, or one of them beyond", index.shape(), k.shape(), parts.len());
    }
    let mut seen: Vec<u32> = parts.iter().map(|part| part.block).collect();
    seen.sort_unstable();
    if let Some(pair) = seen.windows(2).find(|pair| pair[0] == pair[1]) {
        bail!("index {:?}: two parts are of block {}", index.shape(), pair[0]);
    }
    Ok((kv_heads, head_dim, index.elem_count() / (blocks * kv_heads).max(1)))
}

/// Runs `fill(part, head, keys, rows of the index)` for every part and KV head: `keys` `[64, head_dim]`.
fn for_each_part<T: KvElement, U: Send>(
    (kv_heads, head_dim, width): (usize, usize, usize),
    keys: &[T],
    index: &mut [U],
    parts: &[Part],
    fill: impl Fn(&Part, usize, &[T], &mut [U]) + Sync,
) {
    let shared = SharedMut::new(index);
    parallel::for_each(
        parts.len() * kv_heads,
        || (),
        |(), i| {
            let (part, head) = (&parts[i / kv_heads], i % kv_heads);
            let at = part.block as usize * kv_heads + head;
            let keys = &keys[at * BLOCK_TOKENS * head_dim..][..BLOCK_TOKENS * head_dim];
            // SAFETY: each block and head has its own rows, and no two parts are of one block (`dims`).
            fill(part, head, keys, unsafe { shared.slice(at * width, width) });
        },
    );
}

/// Where one block and head of an index lies for a row of a batch.
struct Lookup<'a, T> {
    data: &'a [T],
    kv_heads: usize,
    width: usize,
}

impl<'a, T> Lookup<'a, T> {
    fn new(data: &'a [T], index: &Tensor, kv_heads: usize) -> Result<Self> {
        let (blocks, heads, ..) = index.dims4()?;
        if heads != kv_heads {
            bail!("index {:?} for {kv_heads} heads", index.shape());
        }
        Ok(Self { data, kv_heads, width: data.len() / (blocks * heads).max(1) })
    }

    /// The rows `[rows, width]` that belong to a token's block.
    #[inline(always)]
    fn block(&self, table: &[u32], head: usize, token: usize) -> &'a [T] {
        let at = table[token / BLOCK_TOKENS] as usize * self.kv_heads + head;
        &self.data[at * self.width..(at + 1) * self.width]
    }
}

impl<'a, T> Lookup<'a, T> {
    /// The rows of some tokens, or pages of them of which a block holds `each`: block by block, with the first of each.
    fn blocks(
        &self,
        table: &'a [u32],
        head: usize,
        each: usize,
        entries: Range<usize>,
    ) -> impl Iterator<Item = (usize, &'a [T])> {
        let width = self.width / each;
        self.whole_blocks(table, head, each, entries).map(move |(of, rows)| {
            let block = of.start / each * each;
            (of.start, &rows[(of.start - block) * width..(of.end - block) * width])
        })
    }

    /// All rows of the blocks that hold some entries, `each` a block, with those of the entries that each block holds. Rows are
    /// asked for some blocks ahead.
    fn whole_blocks(
        &self,
        table: &'a [u32],
        head: usize,
        each: usize,
        entries: Range<usize>,
    ) -> impl Iterator<Item = (Range<usize>, &'a [T])> {
        let blocks = entries.start / each..entries.end.div_ceil(each);
        let ask = move |block: usize| {
            let later = self.block(table, head, block * BLOCK_TOKENS);
            prefetch(later.as_ptr(), later.len());
        };
        blocks.clone().take(AHEAD_BLOCKS).for_each(ask);
        blocks.clone().map(move |block| {
            if block + AHEAD_BLOCKS < blocks.end {
                ask(block + AHEAD_BLOCKS);
            }
            let of = entries.start.max(block * each)..entries.end.min((block + 1) * each);
            (of, self.block(table, head, block * BLOCK_TOKENS))
        })
    }
}

/// How many blocks ahead an index is asked for: its blocks are read faster than memory brings the next one.
const AHEAD_BLOCKS: usize = 4;

/// Tokens that one thread looks up at a time.
pub(crate) const SPAN_TOKENS: usize = 4096;

/// What `part` says of every span of some tokens, in their order, shared out among threads.
pub(crate) fn map_spans<T: Send>(tokens: Range<usize>, part: impl Fn(Range<usize>) -> T + Sync) -> Vec<T> {
    parallel::map(tokens.len().div_ceil(SPAN_TOKENS), |i| {
        let start = tokens.start + i * SPAN_TOKENS;
        part(start..tokens.end.min(start + SPAN_TOKENS))
    })
}

/// The queries `[R, q_heads, head_dim]` of a batch as they lie in memory.
fn queries(batch: &Decode) -> Result<Vec<f32>> {
    batch.q.flatten_all()?.to_vec1()
}

#[cfg(test)]
mod tests;
