//! Blocks of prompts that outlive their sequences, found again by the tokens in and before them.
//!
//! A key is a hash over everything that a block's keys and values come from: a seed that names how they were made, and
//! all tokens up to the block's end. Equal keys stand for equal blocks.

use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use taper_kernels::kv::BLOCK_TOKENS;

/// What stands for one whole block of a prompt and all that comes before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrefixKey([u8; 32]);

impl PrefixKey {
    /// The keys of a prompt's whole blocks. `seed` must differ wherever equal tokens give other keys or values.
    pub fn chain(seed: &[u8], tokens: &[u32]) -> Vec<Self> {
        let mut last: [u8; 32] = Sha256::digest(seed).into();
        let next = |block: &[u32]| {
            let mut hash = Sha256::new();
            hash.update(last);
            // All at once: a long prompt has a hundred thousand tokens, and a hash takes each call's bytes by itself.
            let mut bytes = [0; 4 * BLOCK_TOKENS];
            bytes.chunks_exact_mut(4).zip(block).for_each(|(to, token)| to.copy_from_slice(&token.to_le_bytes()));
            hash.update(bytes);
            last = hash.finalize().into();
            Self(last)
        };
        tokens.chunks_exact(BLOCK_TOKENS).map(next).collect()
    }
}

/// Which blocks are remembered, and which of them no table holds.
#[derive(Debug)]
pub(crate) struct Prefixes {
    blocks: HashMap<PrefixKey, u32>,
    /// Each block's key, if it is remembered.
    keys: Vec<Option<PrefixKey>>,
    /// When a remembered block that no table holds was let go; 0 for the others.
    since: Vec<u64>,
    /// Those blocks, the one to lose first in front: those at hand, then those that lie elsewhere.
    idle: [BTreeMap<u64, u32>; 2],
    /// The first block that lies elsewhere.
    elsewhere: u32,
    clock: u64,
}

impl Prefixes {
    /// Of so many blocks, of which all from `elsewhere` on do not lie at hand.
    pub fn new(blocks: usize, elsewhere: usize) -> Self {
        Self {
            blocks: HashMap::new(),
            keys: vec![None; blocks],
            since: vec![0; blocks],
            idle: Default::default(),
            elsewhere: elsewhere as u32,
            clock: 0,
        }
    }

    /// The block that a key stands for.
    pub fn find(&self, key: &PrefixKey) -> Option<u32> {
        self.blocks.get(key).copied()
    }

    /// Remembers a block that some table holds, unless another one is remembered for the key.
    pub fn remember(&mut self, key: PrefixKey, block: u32) {
        if self.keys[block as usize].is_none() && !self.blocks.contains_key(&key) {
            self.blocks.insert(key, block);
            self.keys[block as usize] = Some(key);
        }
    }

    /// Forgets a block that is about to hold something else. It must be held by a table.
    pub fn forget(&mut self, block: u32) {
        if let Some(key) = self.keys[block as usize].take() {
            self.blocks.remove(&key);
        }
    }

    /// A block that no table holds any more: whether it is kept.
    pub fn keep(&mut self, block: u32) -> bool {
        if self.keys[block as usize].is_none() {
            return false;
        }
        self.clock += 1;
        self.since[block as usize] = self.clock;
        let place = self.place(block);
        self.idle[place].insert(self.clock, block);
        true
    }

    /// Which of the idle ones a block is among.
    fn place(&self, block: u32) -> usize {
        usize::from(block >= self.elsewhere)
    }

    /// A table holds this block again.
    pub fn hold(&mut self, block: u32) {
        let since = std::mem::take(&mut self.since[block as usize]);
        let place = self.place(block);
        self.idle[place].remove(&since);
    }

    /// Gives up the block that was let go longest ago of those at hand, or of those elsewhere.
    pub fn evict(&mut self, elsewhere: bool) -> Option<u32> {
        let (_, block) = self.idle[usize::from(elsewhere)].pop_first()?;
        self.since[block as usize] = 0;
        self.forget(block);
        Some(block)
    }

    /// Remembered blocks that no table holds.
    pub fn idle(&self) -> usize {
        self.idle.iter().map(BTreeMap::len).sum()
    }

    /// They.
    pub fn idle_blocks(&self) -> impl Iterator<Item = u32> {
        self.idle.iter().flat_map(BTreeMap::values).copied()
    }
}
