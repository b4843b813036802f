//! One captured sequence as a prompt: what choices of keys keep of the attention of some of its query blocks.

use super::capture::{Captured, Wanted};
use super::head::{Far, Head};
use super::kept::Tally;
use candle_core::{Device, Result, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::Range;
use taper_kernels::kv::{BLOCK_TOKENS, PagedKv};
use taper_kernels::prefill::{Mask, Rows, Selection};

/// Query blocks of 64 rows that are measured: at most `queries` rows of a prompt, evenly apart from a random start.
pub(super) fn measured(tokens: usize, queries: usize, seed: u64) -> Vec<Range<usize>> {
    let blocks = tokens.div_ceil(BLOCK_TOKENS);
    let wanted = (queries / BLOCK_TOKENS).clamp(1, blocks);
    let start: f64 = ChaCha8Rng::seed_from_u64(seed).random();
    let at = |i: usize| ((i as f64 + start) * blocks as f64 / wanted as f64) as usize;
    (0..wanted).map(|i| at(i) * BLOCK_TOKENS..((at(i) + 1) * BLOCK_TOKENS).min(tokens)).collect()
}

/// All keys, and the queries of some rows.
pub(super) fn wanted(rows: impl IntoIterator<Item = Range<usize>>) -> Wanted {
    let mut rows: Vec<u32> = rows.into_iter().flatten().map(|row| row as u32).collect();
    rows.sort_unstable();
    rows.dedup();
    Wanted { keys: true, rows }
}

/// A sequence.
pub(super) struct Prompt<'a> {
    captured: &'a Captured,
    /// Keys as a cache has them `[blocks, kv_heads, 64, head_dim]`.
    keys: Tensor,
    table: Vec<u32>,
    /// The model's own sliding window.
    window: Option<usize>,
    /// The query blocks that are measured, ascending.
    pub measured: Vec<Range<usize>>,
}

/// Some of the rows.
pub(super) struct Queries {
    q: Tensor,
    positions: Vec<u32>,
}

impl<'a> Prompt<'a> {
    /// # Errors
    /// candle's.
    pub fn new(captured: &'a Captured, window: Option<usize>, measured: Vec<Range<usize>>) -> Result<Self> {
        let (tokens, heads, d) = (captured.tokens, captured.k.len(), captured.head_dim);
        let blocks = tokens.div_ceil(BLOCK_TOKENS);
        let mut keys = vec![0f32; blocks * heads * BLOCK_TOKENS * d];
        for (head, from) in captured.k.iter().enumerate() {
            for (block, from) in from.chunks(BLOCK_TOKENS * d).enumerate() {
                keys[(block * heads + head) * BLOCK_TOKENS * d..][..from.len()].copy_from_slice(from);
            }
        }
        let keys = Tensor::from_vec(keys, (blocks, heads, BLOCK_TOKENS, d), &Device::Cpu)?;
        Ok(Self { captured, keys, table: (0..blocks as u32).collect(), window, measured })
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.captured.tokens
    }

    /// The model's own sliding window.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// Query heads, KV heads.
    pub fn heads(&self) -> (usize, usize) {
        (self.captured.q.len(), self.captured.k.len())
    }

    /// Rows whose queries were captured, among those of some ranges.
    ///
    /// # Errors
    /// candle's.
    pub fn queries(&self, ranges: &[Range<usize>]) -> Result<Queries> {
        let (heads, d) = (self.captured.q.len(), self.captured.head_dim);
        let within = |row: &u32| ranges.iter().any(|range| range.contains(&(*row as usize)));
        let places: Vec<usize> = (0..self.captured.rows.len()).filter(|&i| within(&self.captured.rows[i])).collect();
        let q: Vec<f32> = places
            .iter()
            .flat_map(|&i| self.captured.q.iter().flat_map(move |q| &q[i * d..(i + 1) * d]).copied())
            .collect();
        Ok(Queries {
            q: Tensor::from_vec(q, (places.len(), heads, d), &Device::Cpu)?,
            positions: places.iter().map(|&i| self.captured.rows[i]).collect(),
        })
    }

    /// Rows as the operations take them. Values are of no interest: the keys stand for them.
    pub fn rows<'b>(&'b self, queries: &'b Queries) -> Rows<'b> {
        let kv = PagedKv { k: &self.keys, v: &self.keys };
        Rows { q: &queries.q, kv, table: &self.table, positions: &queries.positions, window: self.window }
    }

    /// Positions of the rows measured.
    pub fn positions(&self) -> Vec<u32> {
        let measured = |row: &&u32| self.measured.iter().any(|range| range.contains(&(**row as usize)));
        self.captured.rows.iter().filter(measured).copied().collect()
    }

    /// What each selection keeps `[selections][q_heads]`, of the rows measured that it has a run for.
    ///
    /// # Errors
    /// candle's.
    pub fn kept(&self, selections: &[Selection]) -> Result<Vec<Vec<Tally>>> {
        let (q_heads, kv_heads) = self.heads();
        let group = q_heads / kv_heads;
        let positions = self.positions();
        let there = |position: u32| Mask::Causal.count(position as usize, self.window) as u64;
        let counts: Vec<Vec<usize>> = selections.iter().map(|s| s.counts(&positions, self.window)).collect();
        let mut tallies = vec![vec![Tally::default(); q_heads]; selections.len()];
        // Everything that a row sees.
        let all = Far { sink: 0, window: 0, visible: self.window };
        for kv_head in 0..kv_heads {
            let shares = Head::new(self.captured, kv_head).map(&all, |row| {
                let position = row.far.end - 1;
                if positions.binary_search(&(position as u32)).is_err() {
                    return (position, Vec::new());
                }
                let mut shares = Vec::with_capacity(group * selections.len());
                for g in 0..group {
                    let mut sums = vec![0f64; position + 2];
                    for (key, mass) in row.far.clone().zip(row.far_mass(g)) {
                        sums[key + 1] = sums[key] + f64::from(mass);
                    }
                    let each = |s: &Selection| if s.heads().len() == q_heads { kv_head * group + g } else { kv_head };
                    shares.extend(selections.iter().map(|s| s.held(each(s), position, self.window, &sums)));
                }
                (position, shares)
            })?;
            for (position, shares) in shares {
                let Ok(place) = positions.binary_search(&(position as u32)) else { continue };
                for (at, share) in shares.into_iter().enumerate() {
                    let (g, at) = (at / selections.len(), at % selections.len());
                    let Some(share) = share else { continue };
                    let lists = selections[at].heads().len();
                    let list = if lists == q_heads { kv_head * group + g } else { kv_head };
                    let read = counts[at][place * lists + list] as u64;
                    tallies[at][kv_head * group + g].see(share, read, there(position as u32));
                }
            }
        }
        Ok(tallies)
    }
}
