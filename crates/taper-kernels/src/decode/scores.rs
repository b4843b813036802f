//! The score pass over every visible key, and choosing the largest.

use super::attend::dots;
use super::{Decode, DecodeRow, HeadSelection, Keys, Selection, UNIT_TOKENS, View, sink_window, with_view};
use crate::kv::{BLOCK_TOKENS, KvElement};
use crate::parallel::{self, SharedMut};
use crate::simd::{Isa, Simd, dispatch, exp};
use candle_core::Result;

/// Softmax weights of every visible key `[R, kv_heads]`.
#[derive(Debug)]
pub struct Scores(pub(super) Vec<HeadScores>);

/// Weights of one row and KV head.
#[derive(Debug)]
pub(super) struct HeadScores {
    /// exp(score − max) `[group, visible]`.
    weights: Vec<f32>,
    /// Largest score `[group]`.
    pub max: Vec<f32>,
    /// Sum of the weights `[group]`.
    sum: Vec<f32>,
}

impl HeadScores {
    /// The weights of query head `g` of the group, by visible token.
    pub fn weights(&self, g: usize) -> &[f32] {
        let n = self.weights.len() / self.max.len();
        &self.weights[g * n..(g + 1) * n]
    }
}

/// Scores every visible key of every row: reads all keys and no values.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn scores(batch: &Decode) -> Result<Scores> {
    let (_, q_heads, kv_heads, _) = batch.dims()?;
    let group = q_heads / kv_heads;
    let heads = || batch.rows.iter().flat_map(|row| std::iter::repeat_n(row.visible.len(), kv_heads));
    let mut all: Vec<HeadScores> = heads()
        .map(|n| HeadScores {
            weights: vec![0.0; group * n],
            max: vec![f32::NEG_INFINITY; group],
            sum: vec![0.0; group],
        })
        .collect();
    let mut units = Vec::new();
    for (i, n) in heads().enumerate() {
        units.extend((0..n).step_by(UNIT_TOKENS).map(|start| (i, start, (start + UNIT_TOKENS).min(n))));
    }
    let isa = Isa::best();
    with_view!(batch, view: T => {
        let shared: Vec<_> = all.iter_mut().map(|h| SharedMut::new(&mut h.weights)).collect();
        parallel::for_each(units.len(), || (), |(), unit| {
            let (i, start, end) = units[unit];
            let (row, head) = (i / kv_heads, i % kv_heads);
            let n = view.rows[row].visible.len();
            for at in (start..end).step_by(BLOCK_TOKENS) {
                let count = BLOCK_TOKENS.min(end - at);
                let from = view.rows[row].visible.start + at;
                // Each unit has its own tokens of every line.
                let out = shared[i].pointer(at);
                dispatch!(isa, raw_scores::<_, T: KvElement>(
                    view: &View<T>, row: usize, head: usize, from: usize, count: usize, out: *mut f32, n: usize
                ));
            }
        });
    });
    let shared = SharedMut::new(&mut all);
    parallel::for_each(
        batch.rows.len() * kv_heads,
        || (),
        |(), i| {
            // SAFETY: one element each.
            let head = unsafe { &mut shared.slice(i, 1)[0] };
            dispatch!(isa, normalise::<_>(head: &mut HeadScores));
        },
    );
    Ok(Scores(all))
}

#[inline(always)]
unsafe fn raw_scores<V: Simd, T: KvElement>(
    view: &View<T>,
    row: usize,
    head: usize,
    from: usize,
    count: usize,
    out: *mut f32,
    stride: usize,
) {
    let mut keys = [std::ptr::null(); BLOCK_TOKENS];
    for (i, key) in keys[..count].iter_mut().enumerate() {
        *key = view.k[view.offset(&view.rows[row], head, from + i)..][..view.head_dim].as_ptr();
    }
    unsafe {
        dots::<V, T>(view.queries(row, head), view.head_dim, &keys[..count], view.scale(), out, stride);
    }
}

/// Raw scores to weights, in place.
#[inline(always)]
unsafe fn normalise<V: Simd>(head: &mut HeadScores) {
    let n = head.weights.len() / head.max.len();
    for (g, line) in head.weights.chunks_exact_mut(n).enumerate() {
        let max = line.iter().fold(f32::NEG_INFINITY, |a, &b| if a > b { a } else { b });
        let (vectors, rest) = line.split_at_mut(n - n % V::LANES);
        let mut sum = 0.0;
        unsafe {
            let mut total = V::splat(0.0);
            for chunk in vectors.chunks_exact_mut(V::LANES) {
                let weight = exp(V::load(chunk.as_ptr()).sub(V::splat(max)));
                total = total.add(weight);
                weight.store(chunk.as_mut_ptr());
            }
            sum += total.sum();
        }
        for score in rest {
            *score = (*score - max).exp();
            sum += *score;
        }
        (head.max[g], head.sum[g]) = (max, sum);
    }
}

/// The sinks, the window, and of the rest the `k` keys (given per row) with the largest weight summed over the group.
///
/// Ties go to the earlier key. A row whose choice would be everything is dense.
pub fn top_k(batch: &Decode, scores: &Scores, sink: usize, window: usize, k: &[usize]) -> Selection {
    let kv_heads = scores.0.len() / batch.rows.len().max(1);
    let mut heads = vec![HeadSelection::Dense; scores.0.len()];
    let shared = SharedMut::new(&mut heads);
    parallel::for_each(scores.0.len(), Vec::new, |importance, i| {
        let row = i / kv_heads;
        // SAFETY: one element each.
        unsafe { shared.slice(i, 1)[0] = top_k_of(&batch.rows[row], &scores.0[i], (sink, window, k[row]), importance) };
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
    for (g, sum) in scores.sum.iter().enumerate() {
        let share = 1.0 / sum;
        for (total, weight) in importance.iter_mut().zip(&scores.weights(g)[local.clone()]) {
            *total += weight * share;
        }
    }
    let ids = largest(importance, k).into_iter().map(|i| between.start as u32 + i).collect();
    HeadSelection::Keys(Keys { ranges: ranges.to_vec(), ids, sample: None })
}

/// Indices of the `k` largest values, ascending; ties go to the lower index. `k <= values.len()`; values are not
/// negative, and NaN counts as largest.
fn largest(values: &[f32], k: usize) -> Vec<u32> {
    if k == 0 {
        return Vec::new();
    }
    // The bits of non-negative floats order as the floats do, with NaN above all.
    let mut bits: Vec<u32> = values.iter().map(|v| v.to_bits()).collect();
    let (above, &mut threshold, _) = bits.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
    let mut ties = k - above.iter().filter(|&&b| b > threshold).count();
    let mut ids = Vec::with_capacity(k);
    for (i, value) in values.iter().enumerate() {
        let bits = value.to_bits();
        if bits > threshold || (bits == threshold && ties > 0) {
            ties -= usize::from(bits == threshold);
            ids.push(i as u32);
        }
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_largest_are_those_of_a_stable_sort(values in prop::collection::vec(0u8..9, 1..200), k in 0usize..200) {
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
