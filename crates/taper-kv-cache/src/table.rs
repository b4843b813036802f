//! Which block holds which tokens of a sequence.

use taper_kernels::kv::BLOCK_TOKENS;

/// The blocks of one sequence, in token order: token `t` lies in block `t / 64`, row `t % 64`.
///
/// A table owns a reference to each of its blocks; give them back with [`KvPool::release`](crate::KvPool::release).
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    pub(crate) blocks: Vec<u32>,
}

impl BlockTable {
    /// The pool's block numbers.
    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// Tokens that fit without another block.
    pub fn capacity(&self) -> usize {
        self.blocks.len() * BLOCK_TOKENS
    }

    /// The pool slot (`block * 64 + row`) of a token.
    ///
    /// # Panics
    /// If the token lies beyond the capacity.
    pub fn slot(&self, token: usize) -> u32 {
        self.blocks[token / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (token % BLOCK_TOKENS) as u32
    }
}
