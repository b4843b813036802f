//! BigBird, causally: the first blocks, a band of blocks, and a few random blocks for every block of queries.
//!
//! Rows of queries that see everything, which the paper has too, mean nothing for a causal model and are left out. The
//! random blocks depend on layer, KV head and place alone: equal tokens have equal keys whatever request they stand in.

use super::{Entry, read};
use crate::amount::Amount;
use crate::method::{PrefillChoice, PrefillLayer, PrefillMethod};
use crate::schema::schema_of;
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use taper_kernels::kv::BLOCK_TOKENS;
use taper_kernels::philox::{Permutation, Stream};
use taper_kernels::prefill::{HeadReads, Lists, Mask, Selection, query_blocks};

pub(super) static PREFILL: Entry<dyn PrefillMethod> = Entry {
    name: "bigbird",
    summary: "The first blocks, a band of blocks, and a few random blocks for every block of queries.",
    source: "Zaheer et al. 2020, arXiv:2007.14062, section 2; causal, so no query sees later keys and none is global; \
             shares of the prompt as in SampleAttention's comparison",
    schema: schema_of::<BigBird>,
    build: |value, path, _| read::<BigBird>(value, path).map(|(method, json)| (method as _, json)),
    artifacts: &[],
};

/// Which blocks of 64 keys a block of 64 queries reads.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct BigBird {
    /// Tokens at the start of the prompt, or a share of it below 1, rounded up to blocks.
    global: Amount,
    /// Tokens up to a row's own block, or a share of the prompt below 1, rounded up to blocks; its own is always read.
    window: Amount,
    /// Random blocks between these; all where there are no more.
    #[schemars(range(min = 0, max = 16_384))]
    random: usize,
}

impl Default for BigBird {
    fn default() -> Self {
        Self { global: Amount::Share(0.08), window: Amount::Share(0.08), random: 3 }
    }
}

impl PrefillMethod for BigBird {
    fn choose(&self, chunk: &PrefillLayer) -> Result<PrefillChoice> {
        let blocks_of = |amount: Amount| amount.of(chunk.prompt).div_ceil(BLOCK_TOKENS);
        let (global, window) = (blocks_of(self.global), blocks_of(self.window).max(1));
        let runs = query_blocks(chunk.start..chunk.start + chunk.rows(), BLOCK_TOKENS);
        let reads = |head: usize| {
            let lists = runs.iter().map(|run| {
                let own = run.start / BLOCK_TOKENS;
                let band = (own + 1).saturating_sub(window);
                // By the block's first row, wherever the chunk begins.
                let seen = Mask::Causal.keys(own * BLOCK_TOKENS, chunk.window)[1].start / BLOCK_TOKENS;
                let between = global.max(seen).min(band)..band;
                let place = Stream { seed: 0, layer: chunk.layer as u32, head: head as u32, position: own as u32 };
                let mut blocks: Vec<u32> = (0..global.min(band) as u32).chain(band as u32..=own as u32).collect();
                if !between.is_empty() {
                    let order = Permutation::new(between.len() as u32, &place);
                    let drawn = (0..order.domain()).map(|i| order.point(i)).take(self.random);
                    blocks.extend(drawn.map(|block| between.start as u32 + block));
                    blocks.sort_unstable();
                }
                blocks
            });
            HeadReads::blocks(lists.collect::<Lists>())
        };
        let heads = (0..chunk.kv_heads()).map(reads).collect();
        Ok(PrefillChoice { selection: Some(Selection::new(runs, heads)?), ..PrefillChoice::default() })
    }
}
