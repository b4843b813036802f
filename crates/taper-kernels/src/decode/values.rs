//! Averaging a few drawn values in place of all: attention whose probabilities are exact and whose values are sampled.
//!
//! Source: S²ANTA, section 3 (`Independent`, `Stratified`, `Systematic`) and the two kernels of its authors' code; the
//! default draws over the whole head with one offset, which is exactly unbiased.

use super::attend::score_keys;
use super::scores::{HeadScores, scores};
use super::{Decode, HeadSelection, Keys, Scores, Selection, Values, View, with_view};
use crate::kv::{BLOCK_TOKENS, KvElement};
use crate::parallel;
use crate::philox::Stream;
use crate::simd::{Isa, dispatch, exp_line};
use candle_core::{Result, Tensor, bail};

/// Where the targets of `samples` draws lie in [0, 1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Targets {
    /// Anywhere: with replacement.
    Independent,
    /// One anywhere in each of as many equal parts.
    Stratified,
    /// At the same place in each of as many equal parts.
    Systematic,
}

/// How draws are shared out along the keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// Over all keys at once: unbiased.
    Whole(Targets),
    /// Each tile of so many keys gets draws in proportion to its mass, by largest remainder, placed systematically: biased
    /// where a tile's share is far from a whole number.
    LargestRemainder(usize),
    /// Each tile of so many keys gets as many draws, placed systematically, and is weighted by its mass: unbiased.
    EachTile(usize),
}

/// What the probabilities that values are drawn by come from.
#[derive(Debug, Clone, Copy)]
pub enum By<'a> {
    /// The batch's queries, and keys.
    Keys,
    /// Scores of the same batch; a key that they do not hold is read.
    Scores(&'a Scores),
    /// Other queries `[R, q_heads, head_dim]`, f32, and keys.
    Queries(&'a Tensor),
}

/// Draw numbers of a head's targets, and of its tiles.
const TARGET_DRAWS: u32 = 0x5332_0000;
const TILE_DRAWS: u32 = 0x5333_0000;

/// Replaces what each row and KV head reads by a few of its values, drawn in proportion to the probabilities, for every
/// query head on its own. A head that has no more than `samples` keys keeps its selection.
///
/// `streams` `[R]` key the draws; `head` becomes the query head. Keys are drawn in the order of the selection: ranges, single
/// tokens, the sample. On a device a selection of all tokens is in their order, however it names them.
///
/// # Errors
/// Shapes that differ; a selection of values.
pub fn sample_values(
    batch: &Decode,
    selection: &Selection,
    by: By,
    streams: &[Stream],
    samples: usize,
    spread: Spread,
) -> Result<Selection> {
    let (rows, q_heads, kv_heads, _) = batch.dims()?;
    let other = if let By::Queries(q) = by { q } else { batch.q };
    if streams.len() != rows || other.dims() != batch.q.dims() || samples == 0 {
        bail!("sample_values: {samples} values by {} streams and {:?} for {rows} rows", streams.len(), other.shape());
    }
    #[cfg(feature = "cuda")]
    if batch.q.device().is_cuda() {
        return Ok(crate::cuda::step::sample_values(batch, selection, by, streams, (samples, spread))?);
    }
    let heads = selection.heads()?;
    let values = |h: &HeadSelection| matches!(h, HeadSelection::Values(_));
    if heads.len() != rows * kv_heads || heads.iter().any(values) {
        bail!("sample_values: {} heads, or some of values, for {rows} rows of {kv_heads}", heads.len());
    }
    let batch = &Decode { q: other, ..*batch };
    let own;
    let known = match by {
        By::Scores(scores) => scores,
        // Keys that are all read are scored by all threads together.
        By::Keys | By::Queries(_) => {
            let all = |(i, head): (usize, &HeadSelection)| {
                matches!(head, HeadSelection::Dense) && batch.rows[i / kv_heads].visible.len() > samples
            };
            own = scores(batch, &heads.iter().enumerate().map(all).collect::<Vec<_>>())?;
            &own
        }
    };
    let group = q_heads / kv_heads;
    let isa = Isa::best();
    with_view!(batch, view: T => {
        let drawn = parallel::map(rows * kv_heads, |i| {
            let (row, head) = (i / kv_heads, i % kv_heads);
            let tokens = tokens(&view.rows[row].visible, &heads[i]);
            if tokens.len() <= samples {
                return heads[i].clone();
            }
            let lines = lines::<T>(isa, view, (row, head), &heads[i], &tokens, known.of(i));
            let mut weights = vec![0f32; group * tokens.len()];
            let drawn = lines.chunks_exact(tokens.len()).zip(weights.chunks_exact_mut(tokens.len())).enumerate();
            let mut finite = drawn.map(|(g, (line, weights))| {
                let stream = Stream { head: (head * group + g) as u32, ..streams[row] };
                draw(line, &stream, samples, spread, weights)
            });
            // A head without finite probabilities is left as it was, for its error to show.
            match finite.all(|finite| finite) {
                true => HeadSelection::Values(drawn_only(&tokens, &weights, group)),
                false => heads[i].clone(),
            }
        });
        Ok(drawn.into())
    })
}

/// The tokens of a selection in its order, its sample last.
fn tokens(visible: &std::ops::Range<usize>, head: &HeadSelection) -> Vec<u32> {
    let mut all = head.tokens(visible);
    if let HeadSelection::Keys(Keys { sample: Some(sample), .. }) = head {
        all.extend(&sample.ids);
    }
    all
}

/// exp(score + log weight − largest) of the tokens, a line a query head.
fn lines<T: KvElement>(
    isa: Isa,
    view: &View<T>,
    (row, head): (usize, usize),
    selection: &HeadSelection,
    tokens: &[u32],
    scores: Option<&HeadScores>,
) -> Vec<f32> {
    let n = tokens.len();
    let mut lines = vec![0f32; view.group * n];
    match scores {
        Some(scores) => {
            let mut block = vec![0f32; view.group * BLOCK_TOKENS];
            for (ids, at) in tokens.chunks(BLOCK_TOKENS).zip((0..).step_by(BLOCK_TOKENS)) {
                scores.copy(ids, &mut block);
                for (line, block) in lines.chunks_exact_mut(n).zip(block.chunks_exact(BLOCK_TOKENS)) {
                    line[at..at + ids.len()].copy_from_slice(&block[..ids.len()]);
                }
            }
        }
        None => {
            for (ids, at) in tokens.chunks(BLOCK_TOKENS).zip((0..).step_by(BLOCK_TOKENS)) {
                let (of, ids, out) = ((row, head), (ids, &[][..]), lines[at..].as_mut_ptr());
                dispatch!(isa, score_keys::<_, T: KvElement>(
                    view: &View<T>, of: (usize, usize), ids: (&[u32], &[u32]), out: *mut f32, n: usize
                ));
            }
        }
    }
    for (g, line) in lines.chunks_exact_mut(n).enumerate() {
        if let HeadSelection::Keys(keys @ Keys { sample: Some(sample), .. }) = selection {
            let (read, unread) = line[keys.fixed()..].split_at_mut(sample.counts[g]);
            read.iter_mut().for_each(|s| *s += sample.log_weights[g]);
            unread.fill(f32::NEG_INFINITY);
        }
        let max = line.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        dispatch!(isa, exp_line::<_>(line: &mut [f32], max: f32));
    }
    lines
}

/// Sets each key's weight in the mean of the values drawn; false if the masses are not finite.
fn draw(masses: &[f32], stream: &Stream, samples: usize, spread: Spread, weights: &mut [f32]) -> bool {
    let total: f64 = masses.iter().map(|&m| f64::from(m)).sum();
    if !total.is_finite() || total <= 0.0 {
        return false;
    }
    let one = 1.0 / samples as f32;
    match spread {
        Spread::Whole(targets) => {
            let uniform = |k: usize| f64::from(stream.uniform(TARGET_DRAWS + k as u32));
            let place = |k: usize| match targets {
                Targets::Independent => uniform(k),
                Targets::Stratified => (k as f64 + uniform(k)) / samples as f64,
                Targets::Systematic => (k as f64 + uniform(0)) / samples as f64,
            };
            let mut places: Vec<f64> = (0..samples).map(place).collect();
            places.sort_unstable_by(f64::total_cmp);
            hit(masses, total, places.into_iter(), one, weights);
        }
        Spread::LargestRemainder(tile) => {
            let tiles: Vec<f64> = masses.chunks(tile).map(|t| t.iter().map(|&m| f64::from(m)).sum()).collect();
            let counts = largest_remainder(&tiles, total, samples);
            draw_tiles(masses, stream, tile, &tiles, |t| (counts[t], one), weights);
        }
        Spread::EachTile(tile) => {
            let tiles: Vec<f64> = masses.chunks(tile).map(|t| t.iter().map(|&m| f64::from(m)).sum()).collect();
            let count = (samples / tiles.len()).max(1);
            let share = |t: usize| (tiles[t] / total / count as f64) as f32;
            draw_tiles(masses, stream, tile, &tiles, |t| (count, share(t)), weights);
        }
    }
    true
}

/// Draws in every tile systematically with an offset of its own: so many, each of such a weight.
fn draw_tiles(
    masses: &[f32],
    stream: &Stream,
    tile: usize,
    tiles: &[f64],
    of: impl Fn(usize) -> (usize, f32),
    weights: &mut [f32],
) {
    for (t, (masses, weights)) in masses.chunks(tile).zip(weights.chunks_mut(tile)).enumerate() {
        let (count, weight) = of(t);
        if count > 0 && tiles[t] > 0.0 {
            let offset = f64::from(stream.uniform(TILE_DRAWS + t as u32));
            hit(masses, tiles[t], (0..count).map(|k| (k as f64 + offset) / count as f64), weight, weights);
        }
    }
}

/// Adds `weight` to the key that each target, ascending in [0, 1), falls on: the first whose running mass exceeds it.
fn hit(masses: &[f32], total: f64, targets: impl Iterator<Item = f64>, weight: f32, weights: &mut [f32]) {
    let mut targets = targets.map(|t| t * total).peekable();
    let (mut running, mut last) = (0.0, 0);
    for (i, &mass) in masses.iter().enumerate() {
        if mass > 0.0 {
            running += f64::from(mass);
            last = i;
            while targets.next_if(|&t| t < running).is_some() {
                weights[i] += weight;
            }
        }
    }
    // What rounding would lose goes to the last key that has any mass.
    targets.for_each(|_| weights[last] += weight);
}

/// Shares `samples` out in proportion to the masses, whole numbers that add up; ties go to the earlier.
fn largest_remainder(masses: &[f64], total: f64, samples: usize) -> Vec<usize> {
    let shares: Vec<f64> = masses.iter().map(|m| m / total * samples as f64).collect();
    let mut counts: Vec<usize> = shares.iter().map(|s| s.floor() as usize).collect();
    let mut order: Vec<usize> = (0..masses.len()).collect();
    order.sort_by(|&a, &b| shares[b].fract().total_cmp(&shares[a].fract()));
    let left = samples.saturating_sub(counts.iter().sum());
    order.into_iter().take(left).for_each(|t| counts[t] += 1);
    counts
}

/// The tokens that some head of the group drew, with the weights of all.
fn drawn_only(tokens: &[u32], weights: &[f32], group: usize) -> Values {
    let n = tokens.len();
    let drawn: Vec<usize> = (0..n).filter(|&i| (0..group).any(|g| weights[g * n + i] > 0.0)).collect();
    Values {
        ids: drawn.iter().map(|&i| tokens[i]).collect(),
        weights: (0..group).flat_map(|g| drawn.iter().map(move |&i| weights[g * n + i])).collect(),
    }
}

/// Draw numbers of a query's features.
const FEATURE_DRAWS: u32 = 0x4245_0000;

/// Queries `[R, q_heads, head_dim]` of which only some features are left, so that a product with keys reads only those:
/// unbiased for the query, and so for its scores. `draws` at most 64.
///
/// Each head draws its features `draws` times in proportion to their size, as signs. With `shared`, a KV head's group
/// keeps one set, drawn by the group's mean size, and each feature kept is divided by its chance.
///
/// # Errors
/// Shapes that differ.
///
/// # Source
/// S²ANTA, the section on Bernoulli sampling of the query.
pub fn bernoulli_queries(batch: &Decode, streams: &[Stream], draws: usize, shared: bool) -> Result<Tensor> {
    let (rows, q_heads, kv_heads, d) = batch.dims()?;
    if streams.len() != rows || draws == 0 || draws > 64 {
        bail!("bernoulli_queries: {} streams for {rows} rows, {draws} draws of at most 64", streams.len());
    }
    #[cfg(feature = "cuda")]
    if batch.q.device().is_cuda() {
        return Ok(crate::cuda::step::bernoulli_queries(batch, streams, draws, shared)?);
    }
    let group = if shared { q_heads / kv_heads } else { 1 };
    let mut q = batch.q.flatten_all()?.to_vec1::<f32>()?;
    for (i, heads) in q.chunks_exact_mut(group * d).enumerate() {
        let stream = Stream { head: (i * group % q_heads) as u32, ..streams[i * group / q_heads] };
        let size: Vec<f32> =
            (0..d).map(|c| heads.iter().skip(c).step_by(d).map(|x| x.abs()).sum::<f32>() / group as f32).collect();
        let most = size.iter().copied().fold(0.0, f32::max);
        // A query that is no number is left as it was, for its error to show; so is one of zeros.
        if most <= 0.0 || size.iter().any(|size| !size.is_finite()) {
            continue;
        }
        for (c, size) in size.iter().enumerate() {
            let chance = size / most;
            let hits = (0..draws).filter(|b| stream.uniform(FEATURE_DRAWS + (b * d + c) as u32) < chance).count();
            for x in heads.iter_mut().skip(c).step_by(d) {
                *x = if !shared {
                    x.signum() * most * hits as f32 / draws as f32
                } else if hits > 0 {
                    *x / (1.0 - (1.0 - chance).powi(draws as i32))
                } else {
                    0.0
                };
            }
        }
    }
    Tensor::from_vec(q, (rows, q_heads, d), batch.q.device())
}

#[cfg(test)]
mod tests;
