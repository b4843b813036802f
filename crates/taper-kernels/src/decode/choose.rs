//! Choosing keys by what they should matter.

use super::paying::least_paying;
use super::{DecodeRow, HeadScores, HeadSelection, Keys, Scores, Selection, sink_window};
#[cfg(feature = "cuda")]
use crate::cuda::step::{self, Scored};
use crate::index::map_spans;
use crate::logits;
use crate::parallel;
use crate::simd::{Isa, Simd, dispatch};
use candle_core::Result;
use std::cmp::{Ordering, Reverse};
use std::ops::Range;

/// What tokens, or pages of them, should matter to each row and KV head; larger is more, none is negative.
#[derive(Debug)]
pub struct Importance(Held);

/// How shares of the attention mass of a group's query heads become one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Over {
    /// All count, as where keys are to hold much of the mass of them all.
    #[default]
    Sum,
    /// The largest counts, as where each head is to be told well.
    Max,
}

#[derive(Debug)]
enum Held {
    Host(HostImportance),
    /// What is known, and how it is to become one over the group.
    #[cfg(feature = "cuda")]
    Device(Scored, Over),
}

#[derive(Debug)]
struct HostImportance {
    /// Tokens of a page; pages start at multiples of it.
    page: usize,
    /// `[R, kv_heads]`, by page from that of the first visible token on; none where it was not wanted.
    heads: Vec<Option<Vec<f32>>>,
}

impl Importance {
    /// Of every page that a row sees, `[R, kv_heads]`.
    pub(crate) fn new(page: usize, heads: Vec<Option<Vec<f32>>>) -> Self {
        Self(Held::Host(HostImportance { page, heads }))
    }

    /// By shares of the mass on a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_scored(scored: Scored, over: Over) -> Self {
        Self(Held::Device(scored, over))
    }

    /// The share of the attention mass that each page, or key, holds by its scores, over the group.
    pub(crate) fn of_scores<'a>(
        page: usize,
        heads: usize,
        of: impl Fn(usize) -> Option<&'a HeadScores> + Sync,
        over: Over,
    ) -> Self {
        Self::new(page, parallel::map(heads, |i| of(i).map(|scores| scores.importance(over))))
    }

    /// That of a row and KV head, where it was wanted.
    #[cfg(test)]
    pub(crate) fn of(&self, head: usize) -> Option<&[f32]> {
        self.host().expect("on the CPU").heads[head].as_deref()
    }

    fn host(&self) -> Result<&HostImportance> {
        match &self.0 {
            Held::Host(importance) => Ok(importance),
            #[cfg(feature = "cuda")]
            Held::Device(..) => candle_core::bail!("importance: on a CUDA device; expected that of host memory"),
        }
    }

    /// Tokens, or pages of them, that were looked at in each of so many rows, over all KV heads.
    pub fn entries(&self, rows: usize) -> Vec<usize> {
        match &self.0 {
            Held::Host(importance) => {
                let entries = importance.heads.iter().map(|head| head.as_ref().map_or(0, Vec::len));
                per_row(entries.collect(), rows)
            }
            #[cfg(feature = "cuda")]
            Held::Device(scored, _) => per_row(scored.entries(), rows),
        }
    }
}

/// The sums over each of so many rows of what is known of its heads.
pub(crate) fn per_row(heads: Vec<usize>, rows: usize) -> Vec<usize> {
    let of_row = heads.len() / rows.max(1);
    heads.chunks(of_row.max(1)).map(|heads| heads.iter().sum()).collect()
}

/// The share of the attention mass that each key holds, over the group.
pub fn importance(scores: &Scores, over: Over) -> Importance {
    #[cfg(feature = "cuda")]
    if let Some(scored) = scores.on_device() {
        return Importance::of_scored(scored.clone(), over);
    }
    Importance::of_scores(1, scores.heads(), |i| scores.of(i), over)
}

/// The sinks, the window, and of the rest the `k` `[R, kv_heads]` keys that matter most; by whole pages, as many as hold
/// `k` keys.
///
/// Ties go to the earlier key. A head whose choice would be everything, or of whose keys nothing is known, is dense.
///
/// # Errors
/// A device error.
pub fn top_k(
    rows: &[DecodeRow],
    importance: &Importance,
    sink: usize,
    window: usize,
    k: &[usize],
) -> Result<Selection> {
    top_paying(rows, importance, (sink, window), k, None)
}

/// As [`top_k`], and of those keys, or pages, the ones that are cheaper to read than to sample around, by importance
/// that is a share of the attention mass, told apart to an eighth of an octave; all where there is no `noise`.
///
/// `noise` says what sampling costs: with shares whose squares sum to it half of the keys would be sampled.
///
/// # Errors
/// A device error.
pub fn top_paying(
    rows: &[DecodeRow],
    importance: &Importance,
    (sink, window): (usize, usize),
    k: &[usize],
    noise: Option<f32>,
) -> Result<Selection> {
    #[cfg(feature = "cuda")]
    if let Held::Device(scored, over) = &importance.0 {
        return Ok(step::top_paying(rows, (scored, *over), (sink, window), (k, noise))?);
    }
    let importance = importance.host()?;
    Ok(choose(rows, importance, (sink, window), |i, between, _, rest| {
        let k = (k[i] < between.len()).then(|| k[i].div_ceil(importance.page).min(rest.len()))?;
        Some(match noise {
            Some(noise) => not_below(rest, least_paying(rest, noise, importance.page, k), k),
            None => largest(rest, k),
        })
    }))
}

/// The sinks, the window, and of the rest the fewest keys with which the whole choice holds the share `p` of the
/// attention mass, summed over the group of `group` query heads, as its importance has to be.
///
/// Ties and heads of which nothing is known: as [`top_k`].
///
/// # Errors
/// A device error.
pub fn top_p(
    rows: &[DecodeRow],
    importance: &Importance,
    sink: usize,
    window: usize,
    p: f32,
    group: usize,
) -> Result<Selection> {
    #[cfg(feature = "cuda")]
    if let Held::Device(scored, _) = &importance.0 {
        return Ok(step::top_p(rows, scored, (sink, window), p)?);
    }
    let importance = importance.host()?;
    Ok(choose(rows, importance, (sink, window), |_, _, all, rest| {
        // What the rest may lack: exact at p = 1, where it is nothing.
        let spare = f64::from(1.0 - p) * group as f64;
        if spare <= 0.0 || all.iter().any(|x| x.is_nan()) {
            return None;
        }
        let mut order: Vec<u32> = (0..rest.len() as u32).collect();
        order.sort_unstable_by(|&a, &b| rest[b as usize].total_cmp(&rest[a as usize]).then(a.cmp(&b)));
        let mut left: f64 = rest.iter().map(|&x| f64::from(x)).sum();
        let mut count = 0;
        while left > spare && count < order.len() {
            left -= f64::from(rest[order[count] as usize]);
            count += 1;
        }
        let mut ids = order[..count].to_vec();
        ids.sort_unstable();
        Some(ids)
    }))
}

/// Asks `pick(head, between, all, rest)` which pages of the rest to read, ascending; none for everything. `rest` is the
/// part of `all` that holds keys `between` sinks and window.
fn choose(
    rows: &[DecodeRow],
    importance: &HostImportance,
    (sink, window): (usize, usize),
    pick: impl Fn(usize, &Range<usize>, &[f32], &[f32]) -> Option<Vec<u32>> + Sync,
) -> Selection {
    let kv_heads = importance.heads.len() / rows.len().max(1);
    let head = |i: usize| {
        let (visible, page) = (&rows[i / kv_heads].visible, importance.page);
        let (all, ranges) = (importance.heads[i].as_ref()?, sink_window(visible, sink, window)?);
        let between = ranges[0].end..ranges[1].start;
        let first = between.start / page;
        let local = first - visible.start / page..(between.end - 1) / page + 1 - visible.start / page;
        let picked = pick(i, &between, all, &all[local])?;
        let ids: Vec<u32> = if page == 1 {
            picked.into_iter().map(|at| between.start as u32 + at).collect()
        } else {
            let tokens = |at: u32| {
                let start = (first + at as usize) * page;
                (start.max(between.start)..(start + page).min(between.end)).map(|token| token as u32)
            };
            picked.into_iter().flat_map(tokens).collect()
        };
        let all_of_it = ids.len() == between.len();
        (!all_of_it).then(|| HeadSelection::Keys(Keys { ranges: ranges.to_vec(), ids, sample: None }))
    };
    parallel::map(importance.heads.len(), |i| head(i).unwrap_or(HeadSelection::Dense)).into()
}

/// Every so many values one is looked at to guess the threshold.
const GUESS_STEP: usize = 64;
/// Values whose comparisons make a word.
const WORD: usize = 64;

/// Indices of the `k` largest values, ascending; ties go to the lower index. `k <= values.len()`; values are not
/// negative, and NaN counts as largest.
fn largest(values: &[f32], k: usize) -> Vec<u32> {
    if k == 0 {
        return Vec::new();
    }
    // The bits of non-negative floats order as the floats do, with NaN above all.
    let mut guess: Vec<u32> = values.iter().step_by(GUESS_STEP).map(|v| v.to_bits()).collect();
    let rank = k / GUESS_STEP + k / GUESS_STEP / 4 + 8;
    let floor = if rank < guess.len() { *guess.select_nth_unstable_by(rank, |a, b| b.cmp(a)).1 } else { 0 };
    let mut candidates = not_below(values, f32::from_bits(floor), k);
    if candidates.len() < k && floor > 0 {
        candidates = not_below(values, 0.0, k);
    }
    if candidates.len() <= k {
        return candidates;
    }
    let found: Vec<f32> = candidates.iter().map(|&i| values[i as usize]).collect();
    if logits::count(&found, f32::INFINITY) > 0 {
        candidates.sort_by_key(|&i| Reverse(values[i as usize].to_bits()));
        candidates.truncate(k);
        candidates.sort_unstable();
        return candidates;
    }
    // Those that equal the k-th largest are taken from the lowest index on, as far as they are needed.
    let least = logits::kth(&found, k);
    let equal = k - logits::count(&found, least.next_up());
    let end = (0..found.len()).filter(|&at| found[at] == least).nth(equal).unwrap_or(found.len());
    let (mut chosen, mut count) = (vec![0; found.len() + 1], 0);
    for (at, least) in [(0..end, least), (end..found.len(), least.next_up())] {
        for (&i, &value) in candidates[at.clone()].iter().zip(&found[at]) {
            // Without a branch that nobody can foresee.
            chosen[count] = i;
            count += usize::from(value >= least);
        }
    }
    chosen.truncate(count);
    chosen
}

/// Indices of the values that are not below `least`, ascending; about `expected` of them.
fn not_below(values: &[f32], least: f32, expected: usize) -> Vec<u32> {
    let isa = Isa::best();
    let parts = map_spans(0..values.len(), |span| {
        let mut found = Vec::with_capacity(2 * expected.min(span.len()));
        let (values, first, to) = (&values[span.clone()], span.start as u32, &mut found);
        dispatch!(isa, find::<_>(values: &[f32], least: f32, first: u32, to: &mut Vec<u32>));
        found
    });
    parts.concat()
}

/// Appends the indices, counted from `first`, of the values that are not below `least`.
#[inline(always)]
unsafe fn find<V: Simd>(values: &[f32], least: f32, first: u32, to: &mut Vec<u32>) {
    let (words, rest) = values.as_chunks::<WORD>();
    for (word, at) in words.iter().zip((first..).step_by(WORD)) {
        let mut bits = 0u64;
        for lane in (0..WORD).step_by(V::LANES) {
            bits |= u64::from(unsafe { V::load(word.as_ptr().add(lane)).not_below(V::splat(least)) }) << lane;
        }
        while bits != 0 {
            to.push(at + bits.trailing_zeros());
            bits &= bits - 1;
        }
    }
    let at = first + (values.len() - rest.len()) as u32;
    let not_below = |value: &f32| value.partial_cmp(&least) != Some(Ordering::Less);
    to.extend((at..).zip(rest).filter(|(_, value)| not_below(value)).map(|(i, _)| i));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_largest_are_those_of_a_stable_sort(values in prop::collection::vec(0u8..200, 1..2000), k in 0usize..2000) {
            let values: Vec<f32> = values.into_iter().map(f32::from).collect();
            let k = k.min(values.len());
            let mut order: Vec<u32> = (0..values.len() as u32).collect();
            order.sort_by(|&a, &b| values[b as usize].total_cmp(&values[a as usize]));
            let mut expected = order[..k].to_vec();
            expected.sort_unstable();
            prop_assert_eq!(largest(&values, k), expected);
        }

        #[test]
        fn nan_counts_as_largest(at in 0usize..700, other in 0usize..700, k in 2usize..100) {
            let mut values: Vec<f32> = (0..700).map(|i| (i * 37 % 101) as f32).collect();
            (values[at], values[other]) = (f32::NAN, f32::NAN);
            let found = largest(&values, k);
            prop_assert!(found.len() == k && found.contains(&(at as u32)) && found.contains(&(other as u32)));
        }
    }
}
