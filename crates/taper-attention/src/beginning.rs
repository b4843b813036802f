//! What a prompt begins with, as far as other prompts may take it over.

use crate::spec::AttentionSpec;
use std::sync::Arc;
use taper_kernels::kv::BLOCK_TOKENS;
use taper_kv_cache::{KvPool, PrefixKey};

/// What stands for the blocks that prompts of one way to attend share, whether they are cached or not.
#[derive(Debug, Clone, Default)]
pub struct Beginning {
    spec: Arc<AttentionSpec>,
    /// Tokens before the question.
    context: usize,
    /// The first blocks that may be taken over, and after them those that others may take over alone: a prompt's last token
    /// is never taken over, since its logits are wanted.
    pub(crate) keys: Vec<PrefixKey>,
    most: usize,
}

impl Beginning {
    /// Of the prompt `tokens`, of which all from `context` on are the question. `heeds_length` says whether the length of a
    /// prompt changes its keys.
    pub(crate) fn new(spec: &Arc<AttentionSpec>, tokens: &[u32], context: usize, heeds_length: bool) -> Self {
        let chosen = &spec.prefill;
        let length = if heeds_length { tokens.len() } else { 0 };
        let seed = format!("{} {} {length}", chosen.name, chosen.json);
        let most = tokens.len().saturating_sub(1) / BLOCK_TOKENS;
        let keys = PrefixKey::chain(seed.as_bytes(), &tokens[..context]);
        let mut beginning = Self { spec: Arc::clone(spec), context, keys, most };
        beginning.keys.truncate(beginning.reusable(beginning.keys.len()));
        beginning
    }

    /// Of so many first blocks, how many the prefill method can do with.
    fn reusable(&self, blocks: usize) -> usize {
        self.spec.prefill.method.reuse(self.context, blocks * BLOCK_TOKENS) / BLOCK_TOKENS
    }

    /// Blocks that may be taken over now.
    pub(crate) fn taken(&self, pool: &KvPool) -> usize {
        self.reusable(pool.remembered(&self.keys[..self.keys.len().min(self.most)]))
    }

    /// Those of them that some sequence holds, so that they take none of the free ones.
    pub fn shared_blocks(&self, pool: &KvPool) -> usize {
        pool.held(&self.keys[..self.taken(pool)])
    }

    /// Whether more may be taken over once `other`, of which `cached` tokens are in, is as far as they are the same.
    pub fn gains(&self, pool: &KvPool, other: &Self, cached: usize) -> bool {
        let same = self.keys.iter().zip(&other.keys).take_while(|(a, b)| a == b).count().min(self.most);
        same * BLOCK_TOKENS > cached && self.reusable(same) > self.taken(pool)
    }
}
