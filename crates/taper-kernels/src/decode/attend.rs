//! Weighted attention over a [`Selection`].

use super::rows::{Gathered, Partial, add_values, dots};
use super::scores::HeadScores;
use super::{Decode, HeadSelection, Keys, Sample, Scores, Selection, UNIT_TOKENS, Values, View, rows_from, with_view};
use crate::kv::{BLOCK_TOKENS, KvElement};
use crate::parallel::{self, SharedMut};
use crate::simd::{Isa, Simd, dispatch, prefetch};
use crate::softmax::softmax_line;
use candle_core::{Result, Tensor, bail};
use std::ops::Range;

/// Attends to what was selected; returns `[R, q_heads, head_dim]`, f32.
///
/// A key's weight is exp(score + log weight). Partial results of one row and head merge in token order, so a row's
/// result does not depend on the batch. A key that `scores` of the same batch hold is not read again, nor a row and head
/// whose output is known of making its sample.
///
/// # Errors
/// Shapes that differ, or a token outside the visible range.
pub fn attend(batch: &Decode, selection: &Selection, scores: Option<&Scores>) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if batch.q.device().is_cuda() {
        return Ok(crate::cuda::step::attend(batch, selection)?);
    }
    attend_with(Isa::best(), batch, selection, scores)
}

/// Outputs of rows that were attended apart, one behind the other along the first dimension.
///
/// # Errors
/// No part, or parts of different shapes.
pub fn stacked(mut parts: Vec<Tensor>) -> Result<Tensor> {
    if parts.len() == 1 {
        return Ok(parts.swap_remove(0));
    }
    #[cfg(feature = "cuda")]
    if parts.first().is_some_and(|part| part.device().is_cuda()) {
        return Ok(crate::cuda::step::stacked(&parts)?);
    }
    Tensor::cat(&parts, 0)
}

pub(super) fn attend_with(isa: Isa, batch: &Decode, selection: &Selection, scores: Option<&Scores>) -> Result<Tensor> {
    let (rows, q_heads, kv_heads, head_dim) = batch.dims()?;
    let selection = selection.heads()?;
    check(batch, selection, kv_heads, q_heads / kv_heads)?;
    let mut out = vec![0f32; rows * q_heads * head_dim];
    with_view!(batch, view: T => {
        let units = units(view.rows, selection, kv_heads);
        let mut partials = vec![0f32; units.len() * view.group * Partial::width(head_dim)];
        {
            let shared = SharedMut::new(&mut partials);
            let size = view.group * Partial::width(head_dim);
            parallel::for_each(units.len(), || vec![0f32; view.group * BLOCK_TOKENS], |weights, i| {
                // SAFETY: each unit has its own part.
                let (unit, partial) = (&units[i], unsafe { shared.slice(i * size, size) });
                let scores = scores.and_then(|s| s.of(unit.row * kv_heads + unit.head));
                let head = &selection[unit.row * kv_heads + unit.head];
                run_unit::<T>(isa, view, unit, head, scores, weights, partial);
            });
        }
        merge(&units, &partials, view, &mut out);
    });
    let size = q_heads / kv_heads * head_dim;
    for (to, head) in out.chunks_exact_mut(size).zip(selection) {
        known(head).iter().for_each(|known| to.copy_from_slice(known));
    }
    Tensor::from_vec(out, (rows, q_heads, head_dim), batch.q.device())
}

pub(crate) fn check(batch: &Decode, selection: &[HeadSelection], kv_heads: usize, group: usize) -> Result<()> {
    let output = group * batch.dims()?.3;
    if selection.len() != batch.rows.len() * kv_heads {
        bail!("decode: a selection of {} for {} rows of {kv_heads} heads", selection.len(), batch.rows.len());
    }
    for (i, head) in selection.iter().enumerate() {
        let visible = &batch.rows[i / kv_heads].visible;
        let keys = match head {
            HeadSelection::Dense => continue,
            HeadSelection::Keys(keys) => keys,
            HeadSelection::Values(Values { ids, weights }) => {
                let inside = ids.iter().all(|&id| visible.contains(&(id as usize)));
                if ids.is_empty() || weights.len() != group * ids.len() || !inside {
                    bail!("decode: selection {i} has no values, reads beyond tokens {visible:?} or has other weights");
                }
                continue;
            }
        };
        let sampled = keys.sample.iter().flat_map(|s| &s.ids);
        let inside = keys.ranges.iter().all(|r| r.start >= visible.start && r.end <= visible.end)
            && keys.ids.iter().chain(sampled).all(|&id| visible.contains(&(id as usize)));
        let consistent = keys.sample.as_ref().is_none_or(|s| {
            let known = s.output.is_empty() || s.output.len() == output;
            s.counts.len() == group
                && s.log_weights.len() == group
                && s.counts.iter().all(|&c| c <= s.ids.len())
                && known
        });
        if keys.is_empty() || !inside || !consistent {
            bail!("decode: selection {i} is empty, reads beyond tokens {visible:?} or has a malformed sample");
        }
    }
    Ok(())
}

/// A group's output, where it is known of making the head's sample.
fn known(head: &HeadSelection) -> Option<&[f32]> {
    let HeadSelection::Keys(Keys { sample: Some(sample), .. }) = head else { return None };
    Some(sample.output.as_slice()).filter(|output| !output.is_empty())
}

/// Tokens `span` of the list of one row and head.
struct Unit {
    row: usize,
    head: usize,
    span: Range<usize>,
}

/// Cuts every list that is to be read into units, in order of row, head and token.
fn units(rows: &[super::DecodeRow], heads: &[HeadSelection], kv_heads: usize) -> Vec<Unit> {
    let mut units = Vec::new();
    for (i, head) in heads.iter().enumerate() {
        let (row, head_index) = (i / kv_heads, i % kv_heads);
        let len = if known(head).is_some() { 0 } else { head.len(&rows[row].visible) };
        // Short lists are cut finer, so that there are units for more threads.
        let each = if len < SHORT_TOKENS { SHARED_TOKENS } else { UNIT_TOKENS };
        let cut = |start| Unit { row, head: head_index, span: start..(start + each).min(len) };
        units.extend((0..len).step_by(each).map(cut));
    }
    units
}

/// The tokens of a list from `start` on, at most a block of them, and whether they belong to the sample.
fn chunk(visible: &Range<usize>, head: &HeadSelection, mut start: usize, end: usize, ids: &mut [u32]) -> (usize, bool) {
    if start == end {
        return (0, false);
    }
    let limit = ids.len().min(end - start);
    let mut fill = |from: usize, count: usize| {
        let count = count.min(limit);
        for (i, id) in ids[..count].iter_mut().enumerate() {
            *id = (from + i) as u32;
        }
        (count, false)
    };
    let keys = match head {
        HeadSelection::Dense => return fill(visible.start + start, visible.len() - start),
        HeadSelection::Keys(keys) => keys,
        HeadSelection::Values(values) => {
            let count = limit.min(values.ids.len() - start);
            ids[..count].copy_from_slice(&values.ids[start..start + count]);
            return (count, false);
        }
    };
    for range in &keys.ranges {
        if start < range.len() {
            return fill(range.start + start, range.len() - start);
        }
        start -= range.len();
    }
    let (list, sampled) = if start < keys.ids.len() {
        (&keys.ids[start..], false)
    } else {
        (&keys.sample.as_ref().expect("start lies within the list").ids[start - keys.ids.len()..], true)
    };
    let count = limit.min(list.len());
    ids[..count].copy_from_slice(&list[..count]);
    (count, sampled)
}

/// One unit: chunk after chunk of scores (or given weights), softmax weights, values.
fn run_unit<T: KvElement>(
    isa: Isa,
    view: &View<T>,
    unit: &Unit,
    head: &HeadSelection,
    scores: Option<&HeadScores>,
    weights: &mut [f32],
    partial: &mut [f32],
) {
    let row = &view.rows[unit.row];
    let width = Partial::width(view.head_dim);
    for part in partial.chunks_exact_mut(width) {
        part.fill(0.0);
        part[0] = f32::NEG_INFINITY;
    }
    let (mut buffers, mut lies) = ([[0u32; BLOCK_TOKENS]; 2], [[0usize; BLOCK_TOKENS]; 2]);
    let mut at = unit.span.start;
    let (mut count, mut sampled) = chunk(&row.visible, head, at, unit.span.end, &mut buffers[0]);
    let scored = scores.is_some() || matches!(head, HeadSelection::Values(_));
    view.places((unit.row, unit.head), &buffers[0][..count], &mut lies[0]);
    for &place in &lies[0][..count] {
        prefetch(first_read(view, scored).wrapping_add(place), view.head_dim);
    }
    while count > 0 {
        let ([ids, next], [places, next_places]) = (&mut buffers, &mut lies);
        let after = chunk(&row.visible, head, at + count, unit.span.end, next);
        view.places((unit.row, unit.head), &next[..after.0], next_places);
        let (ids, places, next) = (&ids[..count], &places[..count], &next_places[..after.0]);
        let given = match head {
            HeadSelection::Keys(Keys { sample, ranges, ids }) if sampled => {
                let first = at - ranges.iter().map(Range::len).sum::<usize>() - ids.len();
                sample.as_ref().map_or(Given::Nothing, |s| Given::Sample(s, first))
            }
            HeadSelection::Values(values) => Given::Weights(values, at),
            _ => Given::Nothing,
        };
        let q = view.queries(unit.row, unit.head);
        let tokens = &mut Tokens { view, q, ids, places, next, given, weights, partial };
        dispatch!(isa, attend_tokens::<_, T: KvElement>(tokens: &mut Tokens<T>, scores: Option<&HeadScores>));
        at += count;
        (count, sampled) = after;
        buffers.swap(0, 1);
        lies.swap(0, 1);
    }
}

/// At most a block of tokens of one row and head, with the buffers of the thread that works on them.
struct Tokens<'a, T> {
    view: &'a View<'a, T>,
    /// The queries `[group, head_dim]`.
    q: &'a [f32],
    ids: &'a [u32],
    /// Where their rows lie among keys and values, and where those of the tokens that come next.
    places: &'a [usize],
    next: &'a [usize],
    /// What is known of the tokens.
    given: Given<'a>,
    /// Weights `[group, 64]`, 0 beyond the tokens.
    weights: &'a mut [f32],
    /// Partials `[group, 2 + head_dim]`.
    partial: &'a mut [f32],
}

/// What is known of some tokens.
#[derive(Clone, Copy)]
enum Given<'a> {
    Nothing,
    /// The sample that they are part of, and the place of the first in it.
    Sample(&'a Sample, usize),
    /// Their weights, and the place of the first among them.
    Weights(&'a Values, usize),
}

/// What is read first of tokens: keys, or values of those that were scored before.
#[inline(always)]
fn first_read<T: KvElement>(view: &View<T>, scored: bool) -> *const T {
    if scored { view.v.as_ptr() } else { view.k.as_ptr() }
}

/// Scores the tokens, unless they were scored before; folds them into the running maximum and sum; adds their values.
#[inline(always)]
unsafe fn attend_tokens<V: Simd, T: KvElement>(tokens: &mut Tokens<T>, scores: Option<&HeadScores>) {
    let Tokens { view, q, ids, places, next, given, weights, partial } = tokens;
    let d = view.head_dim;
    let scored = scores.is_some() || matches!(given, Given::Weights(..));
    let mut pointers = [[std::ptr::null(); BLOCK_TOKENS]; 3];
    let [keys, values, next_rows] = &mut pointers;
    // What memory brings while the values are added up: the rows that are read first of the tokens that come next.
    let rows = rows_from(view.v.as_ptr(), places, values);
    let values = Gathered { rows, ahead: rows_from(first_read(view, scored), next, next_rows) };
    let width = Partial::width(d);
    if let Given::Weights(given, first) = *given {
        for (g, line) in weights.chunks_exact_mut(BLOCK_TOKENS).enumerate() {
            line[..ids.len()].copy_from_slice(&given.weights[g * given.ids.len() + first..][..ids.len()]);
            let part = &mut partial[g * width..][..2];
            part[0] = 0.0;
            part[1] += line[..ids.len()].iter().sum::<f32>();
        }
        return unsafe { add_values::<V, T>(weights, values, d, partial) };
    }
    match scores {
        Some(scores) => scores.copy(ids, weights),
        None => {
            // And while keys are scored their values.
            let keys = Gathered { rows: rows_from(view.k.as_ptr(), places, keys), ahead: values.rows };
            unsafe { dots::<V, T>(q, d, keys, view.scale(), weights.as_mut_ptr(), BLOCK_TOKENS) };
        }
    }
    for (g, line) in weights.chunks_exact_mut(BLOCK_TOKENS).enumerate() {
        let mut read = ids.len();
        if let Given::Sample(sample, first) = *given {
            read = sample.counts[g].saturating_sub(first).min(read);
            line[..read].iter_mut().for_each(|s| *s += sample.log_weights[g]);
        }
        line[read..].fill(f32::NEG_INFINITY);
        let (head, values) = partial[g * width..][..width].split_at_mut(2);
        let [max, sum] = head else { unreachable!("split at 2") };
        unsafe { softmax_line::<V>(line, max, sum, values) };
    }
    unsafe { add_values::<V, T>(weights, values, d, partial) };
}

/// Scores at most a block of tokens of one (row, KV head) for every query of the group, into lines `stride` apart; `next`
/// are at most a block of tokens that are scored after them.
///
/// # Safety
/// Every line of `out` covers the tokens; `V`'s instruction set exists.
#[inline(always)]
pub(super) unsafe fn score_keys<V: Simd, T: KvElement>(
    view: &View<T>,
    of: (usize, usize),
    (ids, next): (&[u32], &[u32]),
    out: *mut f32,
    stride: usize,
) {
    let (first, mut pointers) = (view.k.as_ptr(), [[std::ptr::null(); BLOCK_TOKENS]; 2]);
    let [keys, ahead] = &mut pointers;
    let keys = Gathered { rows: view.rows(first, of, ids, keys), ahead: view.rows(first, of, next, ahead) };
    unsafe { dots::<V, T>(view.queries(of.0, of.1), view.head_dim, keys, view.scale(), out, stride) };
}

/// Tokens of one head that a thread works on at a time beside others at the same head: fewer are not worth another thread.
const SHARED_TOKENS: usize = 256;
/// Lists below it are cut into units of as many.
const SHORT_TOKENS: usize = 4096;

/// The partial `[group, 2 + head_dim]` of one row and head over a selection, not normalised.
pub(super) fn attend_head<T: KvElement>(
    isa: Isa,
    view: &View<T>,
    row: usize,
    head: usize,
    selection: &HeadSelection,
    scores: Option<&HeadScores>,
) -> Vec<f32> {
    let len = selection.len(&view.rows[row].visible);
    let width = Partial::width(view.head_dim);
    let parts = parallel::map(len.div_ceil(SHARED_TOKENS).max(1), |i| {
        let (mut weights, mut part) = (vec![0f32; view.group * BLOCK_TOKENS], vec![0f32; view.group * width]);
        let unit = Unit { row, head, span: i * SHARED_TOKENS..((i + 1) * SHARED_TOKENS).min(len) };
        run_unit::<T>(isa, view, &unit, selection, scores, &mut weights, &mut part);
        part
    });
    let mut partial = vec![0f32; view.group * width];
    for (g, to) in partial.chunks_exact_mut(width).enumerate() {
        let (head, values) = to.split_at_mut(2);
        let (max, sum) = add_parts(parts.iter().map(|part| &part[g * width..][..width]), values);
        head.copy_from_slice(&[max, sum]);
    }
    partial
}

/// Adds the weighted values of one query head's partials, in token order, to `values`, which are zeros; returns the
/// largest score and the sum of the weights.
fn add_parts<'a>(parts: impl Iterator<Item = &'a [f32]> + Clone, values: &mut [f32]) -> (f32, f32) {
    let max = parts.clone().map(|p| p[0]).fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b });
    let mut sum = 0.0;
    for part in parts.filter(|p| p[1] != 0.0) {
        let scale = (part[0] - max).exp();
        sum += part[1] * scale;
        values.iter_mut().zip(&part[2..]).for_each(|(to, v)| *to += v * scale);
    }
    (max, sum)
}

/// Merges the partials of each row and head in token order and normalises.
fn merge<T: KvElement>(units: &[Unit], partials: &[f32], view: &View<T>, out: &mut [f32]) {
    let (d, width) = (view.head_dim, Partial::width(view.head_dim));
    let size = view.group * width;
    let same = |a: &Unit, b: &Unit| (a.row, a.head) == (b.row, b.head);
    let mut at = 0;
    for units in units.chunk_by(same) {
        let partials = &partials[at * size..(at + units.len()) * size];
        at += units.len();
        for g in 0..view.group {
            let head = units[0].row * view.q_heads + units[0].head * view.group + g;
            let out = &mut out[head * d..][..d];
            let (_, sum) = add_parts(partials.chunks_exact(size).map(|p| &p[g * width..][..width]), out);
            out.iter_mut().for_each(|o| *o /= sum);
        }
    }
}
