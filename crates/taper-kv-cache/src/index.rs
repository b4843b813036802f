//! What methods keep of every key beside it: one tensor a layer, cut into the same blocks as the cache, so that it is
//! shared, copied and freed with them. An index is a function of the cached keys alone and is filled in when a step
//! first asks for it.

use crate::pool::KvError;
use crate::table::BlockTable;
use candle_core::{DType, Device, Tensor};
use std::cmp::Reverse;
use std::ops::Range;
use taper_kernels::index::Part;
use taper_kernels::kv::{self, BLOCK_TOKENS};

/// What an index stores for each block and KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexShape {
    /// Rows of a block: 64 for one a token, fewer where tokens share one.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// f32, f16, bf16, u32 or i16.
    pub dtype: DType,
}

/// One index over the whole pool.
#[derive(Debug)]
pub(crate) struct Index {
    pub shape: IndexShape,
    pub layers: Vec<IndexLayer>,
    /// When it was last asked for.
    pub used: u64,
}

/// One layer of an index.
#[derive(Debug, Default)]
pub(crate) struct IndexLayer {
    /// `[blocks, kv_heads, rows, width]`; none until it is asked for.
    pub tensor: Option<Tensor>,
    /// Tokens of each block that are taken in.
    filled: Vec<u8>,
}

impl Index {
    pub fn new(shape: IndexShape, layers: usize) -> Self {
        Self { shape, layers: (0..layers).map(|_| IndexLayer::default()).collect(), used: 0 }
    }

    /// Bytes of the layers that are there.
    pub fn bytes(&self) -> usize {
        let tensors = self.layers.iter().filter_map(|layer| layer.tensor.as_ref());
        tensors.map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum()
    }

    /// Lets all but the first `tokens` tokens of a block go.
    pub fn keep(&mut self, block: u32, tokens: usize) {
        for layer in &mut self.layers {
            if let Some(filled) = layer.filled.get_mut(block as usize).filter(|filled| **filled as usize > tokens) {
                // Rows that sum up several tokens cannot be undone: such a block is taken in anew.
                *filled = if self.shape.rows == BLOCK_TOKENS { tokens as u8 } else { 0 };
            }
        }
    }

    pub fn copy(&mut self, from: u32, to: u32) -> Result<(), KvError> {
        for layer in &mut self.layers {
            if let Some(tensor) = &layer.tensor {
                kv::copy_block(tensor, from, to)?;
                layer.filled[to as usize] = layer.filled[from as usize];
            }
        }
        Ok(())
    }
}

impl IndexLayer {
    pub fn make(
        &mut self,
        shape: IndexShape,
        (blocks, kv_heads): (usize, usize),
        device: &Device,
    ) -> Result<(), KvError> {
        if self.tensor.is_none() {
            self.tensor = Some(kv::zeros((blocks, kv_heads, shape.rows, shape.width), shape.dtype, device)?);
            self.filled = vec![0; blocks];
        }
        Ok(())
    }

    /// What the first so many tokens of each table have that is not taken in, once where tables share it.
    pub fn missing(&self, tables: &[(&BlockTable, usize)]) -> Vec<Part> {
        let mut parts = Vec::new();
        for &(table, tokens) in tables {
            let part = |(i, &block): (usize, &u32)| {
                let rows = usize::from(self.filled[block as usize])..BLOCK_TOKENS.min(tokens - i * BLOCK_TOKENS);
                (!Range::is_empty(&rows)).then_some(Part { block, rows, start: i * BLOCK_TOKENS })
            };
            parts.extend(table.blocks()[..tokens.div_ceil(BLOCK_TOKENS)].iter().enumerate().filter_map(part));
        }
        if tables.len() > 1 {
            // Of a block that two tables want to different ends the larger part, which holds the other.
            parts.sort_by_key(|part| (part.block, Reverse(part.rows.end)));
            parts.dedup_by_key(|part| part.block);
        }
        parts
    }

    /// How many of the first so many tokens of a table come from the first one on that is not taken in.
    pub fn lacks(&self, (table, tokens): (&BlockTable, usize)) -> usize {
        let filled = |block: &u32| self.filled.get(*block as usize).map_or(0, |filled| usize::from(*filled));
        let whole = table.blocks().iter().take_while(|block| filled(block) == BLOCK_TOKENS).count();
        let started = table.blocks().get(whole).map_or(0, filled);
        tokens.saturating_sub(whole * BLOCK_TOKENS + started)
    }

    pub fn taken(&mut self, parts: &[Part]) {
        for part in parts {
            self.filled[part.block as usize] = part.rows.end as u8;
        }
    }
}
