//! SampleAttention's thresholds: for each length of prompts the cheapest that keep a share of the attention.
//!
//! Source: SampleAttention, section on tuning and Table 6, where (alpha_c, alpha_s, chunks) are searched on samples of
//! each length for the accuracy wanted. Ours: what is held is the mean share of the attention mass that the rows of
//! query blocks all over the prompt keep (its CRA), not a task's score; the cost is the density.

use super::kept::Tally;
use super::prompt::Prompt;
use candle_core::Result;
use std::ops::Range;
use taper_kernels::kv::BLOCK_TOKENS;
use taper_kernels::prefill::stripes::{Shares, by_share};
use taper_kernels::prefill::{Selection, query_blocks, sums};

/// Rows that a chunk samples, and tokens of a block: the method's default.
const BLOCK: usize = BLOCK_TOKENS;

/// No band is tuned for shorter prompts, unless the sequences are.
const SHORTEST: usize = 1024;

/// Most bands.
const BANDS: usize = 4;

/// Shares that are tried, of columns and of diagonals.
const ALPHAS: [f64; 9] = [0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98];

/// Numbers of chunks that are tried.
const CHUNKS: [usize; 2] = [1, 2];

/// Thresholds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Thresholds {
    pub alpha_c: f64,
    pub alpha_s: f64,
    pub chunks: usize,
}

/// Those that read everything.
const DENSE: Thresholds = Thresholds { alpha_c: 1.0, alpha_s: 1.0, chunks: 1 };

/// All that are tried.
pub(super) fn candidates() -> Vec<Thresholds> {
    let mut all = Vec::new();
    for chunks in CHUNKS {
        for alpha_c in ALPHAS {
            all.extend(ALPHAS.map(|alpha_s| Thresholds { alpha_c, alpha_s, chunks }));
        }
    }
    all.push(DENSE);
    all
}

/// The lengths that thresholds are tuned for, ascending: the sequences' own, and halves of it.
pub(super) fn lengths(longest: usize) -> Vec<usize> {
    let halves = (0..BANDS).map(|i| longest >> i);
    let mut lengths: Vec<usize> = halves.filter(|&n| n == longest || n >= SHORTEST).collect();
    lengths.reverse();
    lengths
}

/// Rows of the chunks of a prompt.
fn chunks(tokens: usize, chunks: usize) -> impl Iterator<Item = Range<usize>> {
    let end = move |i: usize| (i as u128 * tokens as u128 / chunks as u128) as usize;
    (0..chunks).map(move |i| end(i)..end(i + 1)).filter(|rows| !rows.is_empty())
}

/// The rows that choose, at all lengths and of all candidates.
pub(super) fn choosers(tokens: usize) -> impl Iterator<Item = Range<usize>> {
    let of = move |length| CHUNKS.into_iter().flat_map(move |n| chunks(length, n)).map(sampled);
    lengths(tokens).into_iter().flat_map(of)
}

/// The rows of a chunk that choose for it.
fn sampled(chunk: Range<usize>) -> Range<usize> {
    chunk.end - BLOCK.min(chunk.len())..chunk.end
}

/// What each candidate keeps of the first `length` tokens of a sequence, all heads together `[candidates]`.
///
/// # Errors
/// candle's.
pub(super) fn measure(prompt: &Prompt, length: usize) -> Result<Vec<Tally>> {
    let kv_heads = prompt.heads().1;
    let mut selections = Vec::new();
    for count in CHUNKS {
        let parts: Vec<Range<usize>> = chunks(length, count).collect();
        let sums = parts.iter().map(|rows| sums(&prompt.rows(&prompt.queries(&[sampled(rows.clone())])?)));
        let sums = sums.collect::<Result<Vec<_>>>()?;
        for thresholds in candidates().iter().filter(|t| t.chunks == count) {
            let shares = Shares { columns: thresholds.alpha_c, slashes: thresholds.alpha_s, block_tokens: BLOCK };
            for (rows, sums) in parts.iter().zip(&sums) {
                let runs = query_blocks(rows.clone(), BLOCK);
                let heads = by_share(sums, kv_heads, &shares, &runs, prompt.window())?;
                selections.push((*thresholds, Selection::new(runs, heads)?));
            }
        }
    }
    let (thresholds, selections): (Vec<_>, Vec<_>) = selections.into_iter().unzip();
    let kept = prompt.kept(&selections)?;
    let of = |wanted: &Thresholds| {
        let mut sum = Tally::default();
        let own = thresholds.iter().zip(&kept).filter(|(thresholds, _)| *thresholds == wanted);
        own.flat_map(|(_, heads)| heads).for_each(|tally| sum.add(tally));
        sum
    };
    Ok(candidates().iter().map(of).collect())
}

/// The candidate of least density among those that keep `cra` on average; of equals the one that keeps most. Dense
/// attention keeps everything, so there is one.
pub(super) fn best(tallies: &[Tally], cra: f64) -> usize {
    let enough = (0..tallies.len()).filter(|&i| tallies[i].mean() >= cra);
    let order = |a: &usize, b: &usize| {
        let (a, b) = (&tallies[*a], &tallies[*b]);
        a.density().total_cmp(&b.density()).then(b.mean().total_cmp(&a.mean()))
    };
    enough.min_by(order).unwrap_or(tallies.len() - 1)
}
