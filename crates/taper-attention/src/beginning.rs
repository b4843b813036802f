//! What a prompt begins with, as far as other prompts may take it over.

use crate::spec::{AttentionSpec, Question};
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
    /// prompt changes its keys. No prompt of another `salt` has equal keys.
    pub(crate) fn new(
        spec: &Arc<AttentionSpec>,
        tokens: &[u32],
        context: usize,
        heeds_length: bool,
        salt: &str,
    ) -> Self {
        let chosen = &spec.prefill;
        let length = if heeds_length { tokens.len() } else { 0 };
        // The salt comes last: what is before it ends where it says itself.
        let seed = format!("{} {} {length} {salt}", chosen.name, chosen.json);
        // Nor is a token whose query chooses for the first of a question.
        let by_decode = spec.question == Question::Decode && spec.decode.method.ahead();
        let most = (if by_decode { context } else { tokens.len() }).saturating_sub(1) / BLOCK_TOKENS;
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

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};
    use serde_json::json;
    use taper_kv_cache::{BlockTable, KvShape};

    /// Of 1,000 tokens, those of which others have 500.
    #[test]
    fn what_is_gained_goes_with_the_method_the_question_and_the_end() {
        let spec = |prefill: &str| {
            let value = json!({ "prefill": { "method": prefill }, "question": "dense" });
            Arc::new(AttentionSpec::from_json(&value, "attention", &crate::Artifacts::default()).unwrap())
        };
        let prompt: Vec<u32> = (0..1000).collect();
        let like: Vec<u32> = (0..500).chain(5000..5500).collect();
        let new = |prefill: &str, tokens: &[u32], context| Beginning::new(&spec(prefill), tokens, context, false, "");
        let shape = KvShape { layers: 1, kv_heads: 1, head_dim: 4 };
        let mut pool = KvPool::new(shape, DType::F32, 20, &Device::Cpu).unwrap();
        let gains = |pool: &KvPool, own: &Beginning, cached| own.gains(pool, &new("dense", &prompt, 1000), cached);
        // Seven whole blocks are the same.
        let own = new("dense", &like, 1000);
        assert_eq!([0, 447, 448, 1000].map(|cached| gains(&pool, &own, cached)), [true, true, false, false]);
        // None of another salt.
        let salted = Beginning::new(&spec("dense"), &prompt, 1000, false, "salt");
        assert!(!gains(&pool, &salted, 0) && salted.gains(&pool, &salted.clone(), 0));
        // The whole prompt: its last token is its own to compute, 960 of 1,000 or 896 of 960 may be had.
        assert!(gains(&pool, &new("dense", &prompt, 1000), 959) && !gains(&pool, &new("dense", &prompt, 1000), 960));
        assert!(
            gains(&pool, &new("dense", &prompt[..960], 960), 895)
                && !gains(&pool, &new("dense", &prompt[..960], 960), 896)
        );
        // A question is not shared, nor what another method made, nor where a method looks at all.
        assert!(gains(&pool, &new("dense", &prompt, 200), 191) && !gains(&pool, &new("dense", &prompt, 200), 192));
        assert!(!gains(&pool, &new("delta", &prompt, 1000), 0));
        let whole = new("minference", &prompt, 1000);
        assert!(!whole.gains(&pool, &whole, 0));
        // Delta takes over whole strides before its tail.
        let delta = new("delta", &prompt, 1000);
        assert!(delta.gains(&pool, &new("delta", &prompt, 1000), 0));
        // What the pool has already is no gain.
        let mut table = BlockTable::default();
        pool.grow(&mut table, 448).unwrap();
        pool.remember(&table, &own.keys[..7], 0);
        assert!(!gains(&pool, &own, 0));
        assert_eq!((own.taken(&pool), own.shared_blocks(&pool)), (7, 7));
        pool.release(&mut table);
        assert_eq!((own.taken(&pool), own.shared_blocks(&pool)), (7, 0));
    }
}
