//! The score pass over every visible key, and choosing the largest.

use super::attend::score_keys;
use super::{Decode, DecodeRow, HeadSelection, Keys, Selection, UNIT_TOKENS, View, sink_window, with_view};
use crate::kv::{BLOCK_TOKENS, KvElement};
use crate::parallel::{self, SharedMut};
use crate::simd::{Isa, Simd, dispatch, exp};
use candle_core::{Result, bail};

/// Scores of every visible key `[R, kv_heads]`, where they were wanted.
#[derive(Debug)]
pub struct Scores(pub(super) Vec<Option<HeadScores>>);

impl Scores {
    /// Keys scored, over all rows and KV heads.
    pub fn keys(&self) -> usize {
        self.0.iter().flatten().map(|head| head.scores.len() / head.group).sum()
    }

    pub(super) fn of(&self, head: usize) -> Option<&HeadScores> {
        self.0[head].as_ref()
    }
}

/// Scores of one row and KV head.
#[derive(Debug)]
pub(super) struct HeadScores {
    /// First visible token.
    start: usize,
    /// Scaled dot products `[group, visible]`.
    scores: Vec<f32>,
    /// exp(score − largest score of its unit of tokens) `[group, visible]`.
    weights: Vec<f32>,
    /// Largest score and sum of the weights of each unit `[units, group]`.
    units: Vec<(f32, f32)>,
    group: usize,
}

impl HeadScores {
    /// The scores of query head `g` of the group, by visible token.
    fn of(&self, g: usize) -> &[f32] {
        let n = self.scores.len() / self.group;
        &self.scores[g * n..(g + 1) * n]
    }

    /// Largest score of query head `g` and sum of exp(score − largest).
    pub fn mass(&self, g: usize) -> (f32, f32) {
        let units = || self.units.iter().skip(g).step_by(self.group);
        let max = units().fold(f32::NEG_INFINITY, |max, unit| max_of(max, unit.0));
        (max, units().map(|unit| unit.1 * (unit.0 - max).exp()).sum())
    }

    /// Copies at most a block of tokens' scores into lines of 64, one a query head.
    pub fn copy(&self, ids: &[u32], lines: &mut [f32]) {
        let first = ids[0] as usize - self.start;
        // Ascending and as long as its span: consecutive.
        let consecutive = ids[ids.len() - 1].checked_sub(ids[0]) == Some(ids.len() as u32 - 1) && ids.is_sorted();
        for (g, line) in lines.chunks_exact_mut(BLOCK_TOKENS).enumerate() {
            let all = self.of(g);
            if consecutive {
                line[..ids.len()].copy_from_slice(&all[first..first + ids.len()]);
            } else {
                line.iter_mut().zip(ids).for_each(|(score, &id)| *score = all[id as usize - self.start]);
            }
        }
    }
}

/// Scores every visible key of the rows and KV heads that are `wanted` `[R, kv_heads]`: reads all keys and no values.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn scores(batch: &Decode, wanted: &[bool]) -> Result<Scores> {
    let (rows, q_heads, kv_heads, _) = batch.dims()?;
    if wanted.len() != rows * kv_heads {
        bail!("scores: {} heads wanted of {rows} rows of {kv_heads}", wanted.len());
    }
    let group = q_heads / kv_heads;
    let heads = || batch.rows.iter().flat_map(|row| std::iter::repeat_n(&row.visible, kv_heads)).zip(wanted);
    let mut all: Vec<Option<HeadScores>> = heads()
        .map(|(visible, wanted)| {
            wanted.then(|| HeadScores {
                start: visible.start,
                scores: vec![0.0; group * visible.len()],
                weights: vec![0.0; group * visible.len()],
                units: vec![(0.0, 0.0); visible.len().div_ceil(UNIT_TOKENS) * group],
                group,
            })
        })
        .collect();
    let mut units = Vec::new();
    for (i, (visible, _)) in heads().enumerate().filter(|(_, (_, wanted))| **wanted) {
        units.extend((0..visible.len().div_ceil(UNIT_TOKENS)).map(|unit| (i, unit)));
    }
    let isa = Isa::best();
    with_view!(batch, view: T => {
        let shared: Vec<_> = all.iter_mut().map(|head| head.as_mut().map(SharedScores::new)).collect();
        parallel::for_each(units.len(), || (), |(), i| {
            let (i, unit) = units[i];
            let Some(out) = &shared[i] else { return };
            let (row, head) = (i / kv_heads, i % kv_heads);
            dispatch!(isa, score_unit::<_, T: KvElement>(
                view: &View<T>, row: usize, head: usize, unit: usize, out: &SharedScores
            ));
        });
    });
    Ok(Scores(all))
}

/// The parts of [`HeadScores`] as the threads write them.
struct SharedScores {
    scores: SharedMut<f32>,
    weights: SharedMut<f32>,
    units: SharedMut<(f32, f32)>,
}

impl SharedScores {
    fn new(head: &mut HeadScores) -> Self {
        Self {
            scores: SharedMut::new(&mut head.scores),
            weights: SharedMut::new(&mut head.weights),
            units: SharedMut::new(&mut head.units),
        }
    }
}

/// The larger; NaN if the second is.
fn max_of(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
unsafe fn score_unit<V: Simd, T: KvElement>(view: &View<T>, row: usize, head: usize, unit: usize, out: &SharedScores) {
    let visible = &view.rows[row].visible;
    let first = unit * UNIT_TOKENS;
    let len = UNIT_TOKENS.min(visible.len() - first);
    let mut ids = [0u32; BLOCK_TOKENS];
    for from in (first..first + len).step_by(BLOCK_TOKENS) {
        let count = BLOCK_TOKENS.min(first + len - from);
        ids.iter_mut().zip(visible.start + from..).for_each(|(id, token)| *id = token as u32);
        // Each unit has its own tokens of every line.
        let out = out.scores.pointer(from);
        unsafe { score_keys::<V, T>(view, row, head, &ids[..count], out, visible.len()) };
    }
    for g in 0..view.group {
        let at = g * visible.len() + first;
        // SAFETY: as above.
        unsafe {
            let mass = weigh::<V>(out.scores.slice(at, len), out.weights.slice(at, len));
            out.units.slice(unit * view.group + g, 1)[0] = mass;
        }
    }
}

/// Sets weights to exp(score − largest score); returns the largest score and the sum of the weights.
#[inline(always)]
unsafe fn weigh<V: Simd>(scores: &[f32], weights: &mut [f32]) -> (f32, f32) {
    let whole = scores.len() - scores.len() % V::LANES;
    unsafe {
        let mut top = V::splat(f32::NEG_INFINITY);
        for at in (0..whole).step_by(V::LANES) {
            top = top.max(V::load(scores.as_ptr().add(at)));
        }
        let max = scores[whole..].iter().fold(top.max_lane(), |max, &score| max_of(max, score));
        let mut total = V::splat(0.0);
        for at in (0..whole).step_by(V::LANES) {
            let weight = exp(V::load(scores.as_ptr().add(at)).sub(V::splat(max)));
            total = total.add(weight);
            weight.store(weights.as_mut_ptr().add(at));
        }
        let mut sum = total.sum();
        for (weight, score) in weights[whole..].iter_mut().zip(&scores[whole..]) {
            *weight = (score - max).exp();
            sum += *weight;
        }
        (max, sum)
    }
}

/// The sinks, the window, and of the rest the `k` `[R, kv_heads]` keys with the largest weight summed over the group.
///
/// Ties go to the earlier key. A head whose choice would be everything, or whose keys were not scored, is dense.
pub fn top_k(batch: &Decode, scores: &Scores, sink: usize, window: usize, k: &[usize]) -> Selection {
    let kv_heads = scores.0.len() / batch.rows.len().max(1);
    let mut heads = vec![HeadSelection::Dense; scores.0.len()];
    let shared = SharedMut::new(&mut heads);
    parallel::for_each(scores.0.len(), Vec::new, |importance, i| {
        let row = i / kv_heads;
        // SAFETY: one element each.
        let to = unsafe { &mut shared.slice(i, 1)[0] };
        if let Some(scores) = scores.of(i) {
            *to = top_k_of(&batch.rows[row], scores, (sink, window, k[i]), importance);
        }
    });
    Selection(heads)
}

fn top_k_of(
    row: &DecodeRow,
    scores: &HeadScores,
    (sink, window, k): (usize, usize, usize),
    importance: &mut Vec<f32>,
) -> HeadSelection {
    let Some(ranges) = sink_window(&row.visible, sink, window) else { return HeadSelection::Dense };
    let between = ranges[0].end..ranges[1].start;
    if k >= between.len() {
        return HeadSelection::Dense;
    }
    let local = between.start - row.visible.start..between.end - row.visible.start;
    importance.clear();
    importance.resize(local.len(), 0.0);
    let n = row.visible.len();
    for g in 0..scores.group {
        let (max, sum) = scores.mass(g);
        let weights = &scores.weights[g * n..(g + 1) * n];
        for (unit, masses) in scores.units.chunks_exact(scores.group).enumerate() {
            let tokens = (unit * UNIT_TOKENS).max(local.start)..((unit + 1) * UNIT_TOKENS).min(local.end);
            if tokens.is_empty() {
                continue;
            }
            let share = (masses[g].0 - max).exp() / sum;
            let to = &mut importance[tokens.start - local.start..tokens.end - local.start];
            to.iter_mut().zip(&weights[tokens]).for_each(|(total, weight)| *total += weight * share);
        }
    }
    let ids = largest(importance, k).into_iter().map(|i| between.start as u32 + i).collect();
    HeadSelection::Keys(Keys { ranges: ranges.to_vec(), ids, sample: None })
}

/// Every so many values one is looked at to guess the threshold.
const GUESS_STEP: usize = 16;
/// Values that are passed over together.
const SKIP_STEP: usize = 8;

/// Indices of the `k` largest values, ascending; ties go to the lower index. `k <= values.len()`; values are not
/// negative, and NaN counts as largest.
fn largest(values: &[f32], k: usize) -> Vec<u32> {
    if k == 0 {
        return Vec::new();
    }
    // The bits of non-negative floats order as the floats do, with NaN above all.
    let mut guess: Vec<u32> = values.iter().step_by(GUESS_STEP).map(|v| v.to_bits()).collect();
    let rank = k / GUESS_STEP + k / GUESS_STEP / 4 + 4;
    let floor = if rank < guess.len() { *guess.select_nth_unstable_by(rank, |a, b| b.cmp(a)).1 } else { 0 };
    let above = |floor: u32| {
        let mut found = Vec::with_capacity(2 * k);
        for (chunk, at) in values.chunks(SKIP_STEP).zip((0..).step_by(SKIP_STEP)) {
            // Most chunks hold none; the maximum takes a few instructions.
            if chunk.iter().fold(0, |max, v| max.max(v.to_bits())) >= floor {
                found.extend((at..).zip(chunk).map(|(i, v)| (v.to_bits(), i)).filter(|(bits, _)| *bits >= floor));
            }
        }
        found
    };
    let mut candidates = above(floor);
    if candidates.len() < k {
        candidates = above(0);
    }
    // Larger values first, then lower indices: an order without ties.
    candidates.select_nth_unstable_by(k - 1, |a, b| (b.0, a.1).cmp(&(a.0, b.1)));
    let mut ids: Vec<u32> = candidates[..k].iter().map(|&(_, i)| i).collect();
    ids.sort_unstable();
    ids
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_largest_are_those_of_a_stable_sort(values in prop::collection::vec(0u8..200, 1..900), k in 0usize..900) {
            let values: Vec<f32> = values.into_iter().map(f32::from).collect();
            let k = k.min(values.len());
            let mut order: Vec<u32> = (0..values.len() as u32).collect();
            order.sort_by(|&a, &b| values[b as usize].total_cmp(&values[a as usize]));
            let mut expected = order[..k].to_vec();
            expected.sort_unstable();
            prop_assert_eq!(largest(&values, k), expected);
        }
    }
}
