//! The score pass over every visible key, or over what stands for keys.

use super::attend::score_keys;
use super::choose::per_row;
use super::{Decode, Over, UNIT_TOKENS, View, with_view};
#[cfg(feature = "cuda")]
use crate::cuda::step::Scored;
use crate::index::{SPAN_TOKENS, map_spans};
use crate::kv::{BLOCK_TOKENS, KvElement};
use crate::parallel::{self, SharedMut};
use crate::simd::{Isa, Simd, dispatch, exp};
use candle_core::{Result, bail};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Scores of every visible key `[R, kv_heads]`, where they were wanted.
#[derive(Debug)]
pub struct Scores(Vec<Held>);

/// Those of some rows.
#[derive(Debug)]
enum Held {
    Host(Vec<Option<HeadScores>>),
    #[cfg(feature = "cuda")]
    Device(Scored),
}

impl Held {
    fn heads(&self) -> usize {
        match self {
            Self::Host(heads) => heads.len(),
            #[cfg(feature = "cuda")]
            Self::Device(scored) => scored.wanted().len(),
        }
    }
}

#[cfg(feature = "cuda")]
impl From<Scored> for Scores {
    fn from(scored: Scored) -> Self {
        Self(vec![Held::Device(scored)])
    }
}

impl Scores {
    /// Keys scored in each of so many rows, over all KV heads.
    pub fn keys(&self, rows: usize) -> Vec<usize> {
        let of_head = |head: &Option<HeadScores>| head.as_ref().map_or(0, HeadScores::len);
        let keys = |part: &Held| match part {
            Held::Host(heads) => heads.iter().map(of_head).collect::<Vec<_>>(),
            #[cfg(feature = "cuda")]
            Held::Device(scored) => scored.entries(),
        };
        per_row(self.0.iter().flat_map(keys).collect(), rows)
    }

    /// Whether those of a row and KV head are here.
    pub fn has(&self, head: usize) -> bool {
        match self.part(head) {
            (Held::Host(heads), at) => heads[at].is_some(),
            #[cfg(feature = "cuda")]
            (Held::Device(scored), at) => scored.wanted()[at],
        }
    }

    /// Of so many rows and KV heads, none of which was wanted.
    pub fn none(heads: usize) -> Self {
        Self(vec![Held::Host((0..heads).map(|_| None).collect())])
    }

    /// The scores of rows that were scored apart, as one.
    pub fn join(parts: impl IntoIterator<Item = Self>) -> Self {
        Self(parts.into_iter().flat_map(|part| part.0).collect())
    }

    /// Rows and KV heads, wanted or not.
    pub(super) fn heads(&self) -> usize {
        self.0.iter().map(Held::heads).sum()
    }

    /// Those of a row and KV head, if they are in host memory.
    pub(super) fn of(&self, head: usize) -> Option<&HeadScores> {
        match self.part(head) {
            (Held::Host(heads), at) => heads[at].as_ref(),
            #[cfg(feature = "cuda")]
            (Held::Device(_), _) => None,
        }
    }

    /// Which part a row and KV head belongs to, and its place there.
    fn part(&self, mut head: usize) -> (&Held, usize) {
        for part in &self.0 {
            if head < part.heads() {
                return (part, head);
            }
            head -= part.heads();
        }
        panic!("scores of fewer heads than are asked for");
    }

    /// All of them, where they are on a device and were scored together.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(&self) -> Option<&Scored> {
        match &self.0[..] {
            [Held::Device(scored)] => Some(scored),
            _ => None,
        }
    }
}

/// Scores of one row and KV head: of tokens, or of pages of them.
#[derive(Debug)]
pub(crate) struct HeadScores {
    /// First token, or page.
    start: usize,
    /// Scaled dot products `[group, tokens]`; empty where only shares were asked for.
    scores: Vec<f32>,
    /// exp(score − largest score of its unit of tokens) `[group, tokens]`.
    weights: Vec<f32>,
    /// Largest score and sum of the weights of each unit `[units, group]`.
    units: Vec<(f32, f32)>,
    group: usize,
}

impl HeadScores {
    /// Tokens, or pages of them.
    fn len(&self) -> usize {
        self.weights.len() / self.group
    }

    /// The scores of query head `g` of the group, by visible token; they were kept.
    pub fn of(&self, g: usize) -> &[f32] {
        let n = self.len();
        &self.scores[g * n..(g + 1) * n]
    }

    /// Largest score of query head `g` and sum of exp(score − largest).
    pub fn mass(&self, g: usize) -> (f32, f32) {
        let units = || self.units.iter().skip(g).step_by(self.group);
        let max = units().fold(f32::NEG_INFINITY, |max, unit| max_of(max, unit.0));
        (max, units().map(|unit| unit.1 * (unit.0 - max).exp()).sum())
    }

    /// Each token's share of the attention mass, over the group: all sums together come to the group's size.
    pub fn importance(&self, over: Over) -> Vec<f32> {
        self.importance_with(Isa::best(), over)
    }

    pub(super) fn importance_with(&self, isa: Isa, over: Over) -> Vec<f32> {
        let n = self.len();
        // What turns the weights of each unit into shares `[units, group]`.
        let masses: Vec<(f32, f32)> = (0..self.group).map(|g| self.mass(g)).collect();
        let share = |(i, unit): (usize, &(f32, f32))| {
            let (max, sum) = masses[i % self.group];
            (unit.0 - max).exp() / sum
        };
        let shares: Vec<f32> = self.units.iter().enumerate().map(share).collect();
        let mut importance = Vec::with_capacity(n);
        let to = SharedMut::new(importance.spare_capacity_mut());
        map_spans(0..n, |span| {
            for first in span.clone().step_by(UNIT_TOKENS) {
                let len = UNIT_TOKENS.min(span.end - first);
                let shares = &shares[first / UNIT_TOKENS * self.group..][..self.group];
                // SAFETY: each span has its own tokens, whole units; every query head's weights of them lie `n` apart.
                let (weights, to) = (self.weights[first..].as_ptr(), to.pointer(first).cast::<f32>());
                dispatch!(isa, add_shares::<_>(
                    weights: *const f32, n: usize, shares: &[f32], over: Over, len: usize, to: *mut f32
                ));
            }
        });
        // SAFETY: there is room for as many, and the spans have written every one.
        unsafe { importance.set_len(n) };
        importance
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
    #[cfg(feature = "cuda")]
    if batch.q.device().is_cuda() {
        let nothing = || Scores::none(wanted.len());
        return Ok(crate::cuda::step::scores(batch, wanted)?.map_or_else(nothing, Scores::from));
    }
    let spans: Vec<_> = batch.rows.iter().flat_map(|row| std::iter::repeat_n(row.visible.clone(), kv_heads)).collect();
    let isa = Isa::best();
    with_view!(batch, view: T => {
        let score = |i: usize, tokens: Range<usize>, out: *mut f32, stride: usize| {
            let (row, head) = (i / kv_heads, i % kv_heads);
            dispatch!(isa, score_run::<_, T: KvElement>(
                view: &View<T>, row: usize, head: usize, tokens: Range<usize>, out: *mut f32, stride: usize
            ));
        };
        // SAFETY: a run is scored block by block, all of it.
        Ok(Scores(vec![Held::Host(unsafe { pass(isa, &spans, wanted, (q_heads / kv_heads, Kept::Scores), score) })]))
    })
}

const _: () = assert!(SPAN_TOKENS.is_multiple_of(UNIT_TOKENS), "spans are whole units");

/// What a [`pass`] leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kept {
    /// Scores, and shares of the mass.
    Scores,
    /// Shares alone.
    Shares,
}

/// Units of tokens that one thread scores at a time at most: enough that what comes after the first was asked for ahead.
const RUN_UNITS: usize = 4;
/// Runs that are left for each thread at least, before one has more than a unit.
const RUNS_A_THREAD: usize = 4;

/// Scores a span of tokens, or pages, of each row and KV head that is `wanted`.
///
/// `score(i, tokens, out, stride)` writes the scores of head `i` for a run of tokens, one line a query head of the group.
///
/// # Safety
/// `score` writes every one of them.
pub(crate) unsafe fn pass(
    isa: Isa,
    spans: &[Range<usize>],
    wanted: &[bool],
    (group, kept): (usize, Kept),
    score: impl Fn(usize, Range<usize>, *mut f32, usize) + Sync,
) -> Vec<Option<HeadScores>> {
    // Without room for the scores that nobody asks for, and none of it cleared first.
    let of_kept = |n: usize| if kept == Kept::Scores { n } else { 0 };
    let empty = |(span, &wanted): (&Range<usize>, &bool)| {
        let n = group * span.len();
        wanted.then(|| HeadScores {
            start: span.start,
            scores: Vec::with_capacity(of_kept(n)),
            weights: Vec::with_capacity(n),
            units: vec![(0.0, 0.0); span.len().div_ceil(UNIT_TOKENS) * group],
            group,
        })
    };
    let mut all: Vec<Option<HeadScores>> = spans.iter().zip(wanted).map(empty).collect();
    let units: usize = all.iter().flatten().map(|head| head.units.len() / group).sum();
    let each = (units / (RUNS_A_THREAD * rayon::current_num_threads())).clamp(1, RUN_UNITS);
    let (mut runs, run) = (Vec::new(), each * UNIT_TOKENS);
    for (i, span) in spans.iter().enumerate().filter(|(i, _)| wanted[*i]) {
        runs.extend((0..span.len()).step_by(run).map(|first| (i, first..(first + run).min(span.len()))));
    }
    let shared: Vec<_> = all.iter_mut().map(|head| head.as_mut().map(SharedScores::new)).collect();
    parallel::for_each(
        runs.len(),
        || (),
        |(), at| {
            let (i, run) = (runs[at].0, runs[at].1.clone());
            let (Some(out), span) = (&shared[i], &spans[i]) else { return };
            let to = if kept == Kept::Scores { &out.scores } else { &out.weights };
            // SAFETY of what follows: each run has its own tokens of every line.
            score(i, span.start + run.start..span.start + run.end, to.pointer(run.start).cast(), span.len());
            for first in run.clone().step_by(UNIT_TOKENS) {
                for g in 0..group {
                    let (at, len) = (g * span.len() + first, UNIT_TOKENS.min(run.end - first));
                    let (from, weights) = (to.pointer(at).cast::<f32>().cast_const(), out.weights.pointer(at).cast());
                    let mut mass = (0.0, 0.0);
                    let mass_of = &mut mass;
                    dispatch!(isa, weigh::<_>(from: *const f32, weights: *mut f32, len: usize, mass_of: &mut (f32, f32)));
                    // SAFETY: as above.
                    unsafe { out.units.slice(first / UNIT_TOKENS * group + g, 1)[0] = mass };
                }
            }
        },
    );
    drop(shared);
    for (head, span) in all.iter_mut().zip(spans) {
        if let Some(head) = head {
            let n = group * span.len();
            // SAFETY: there is room for as many, and the runs have written every one.
            unsafe {
                head.scores.set_len(of_kept(n));
                head.weights.set_len(n);
            }
        }
    }
    all
}

/// The parts of [`HeadScores`] as the threads write them.
struct SharedScores {
    scores: SharedMut<MaybeUninit<f32>>,
    weights: SharedMut<MaybeUninit<f32>>,
    units: SharedMut<(f32, f32)>,
}

impl SharedScores {
    fn new(head: &mut HeadScores) -> Self {
        Self {
            scores: SharedMut::new(head.scores.spare_capacity_mut()),
            weights: SharedMut::new(head.weights.spare_capacity_mut()),
            units: SharedMut::new(&mut head.units),
        }
    }
}

/// The larger; NaN if the second is.
fn max_of(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
unsafe fn score_run<V: Simd, T: KvElement>(
    view: &View<T>,
    row: usize,
    head: usize,
    tokens: Range<usize>,
    out: *mut f32,
    stride: usize,
) {
    let mut ids = [0u32; 2 * BLOCK_TOKENS];
    for from in tokens.clone().step_by(BLOCK_TOKENS) {
        let (count, known) = (BLOCK_TOKENS.min(tokens.end - from), ids.len().min(tokens.end - from));
        ids.iter_mut().zip(from..).for_each(|(id, token)| *id = token as u32);
        let ids = ids[..known].split_at(count);
        unsafe { score_keys::<V, T>(view, (row, head), ids, out.add(from - tokens.start), stride) };
    }
}

/// Sets `len` weights to exp(score − largest score), which may be written where the scores lie, and `mass` to the
/// largest score and the sum of the weights.
///
/// # Safety
/// Both cover `len` elements, of which the scores are there; `V`'s instruction set exists.
#[inline(always)]
unsafe fn weigh<V: Simd>(scores: *const f32, weights: *mut f32, len: usize, mass: &mut (f32, f32)) {
    let whole = len - len % V::LANES;
    unsafe {
        let mut top = V::splat(f32::NEG_INFINITY);
        for at in (0..whole).step_by(V::LANES) {
            top = top.max(V::load(scores.add(at)));
        }
        let max = (whole..len).fold(top.max_lane(), |max, at| max_of(max, *scores.add(at)));
        let mut total = V::splat(0.0);
        for at in (0..whole).step_by(V::LANES) {
            let weight = exp(V::load(scores.add(at)).sub(V::splat(max)));
            total = total.add(weight);
            weight.store(weights.add(at));
        }
        let mut sum = total.sum();
        for at in whole..len {
            let weight = (*scores.add(at) - max).exp();
            weights.add(at).write(weight);
            sum += weight;
        }
        *mass = (max, sum);
    }
}

/// Writes what `len` tokens hold over the group, of which each query head's line of weights, `stride` apart, tells its
/// part of `shares`.
///
/// # Safety
/// Every line and `to` cover `len` elements; `V`'s instruction set exists.
#[inline(always)]
unsafe fn add_shares<V: Simd>(
    weights: *const f32,
    stride: usize,
    shares: &[f32],
    over: Over,
    len: usize,
    to: *mut f32,
) {
    let whole = len - len % V::LANES;
    for at in (0..whole).step_by(V::LANES) {
        let mut all = unsafe { V::splat(0.0) };
        for (g, &share) in shares.iter().enumerate() {
            unsafe {
                let part = V::load(weights.add(g * stride + at)).mul(V::splat(share));
                all = if over == Over::Sum { all.add(part) } else { part.max(all) };
            }
        }
        unsafe { all.store(to.add(at)) };
    }
    for at in whole..len {
        let part = |(g, share): (usize, &f32)| unsafe { *weights.add(g * stride + at) } * share;
        let parts = shares.iter().enumerate().map(part);
        let all = if over == Over::Sum { parts.fold(0.0, |all, part| all + part) } else { parts.fold(0.0, f32::max) };
        unsafe { to.add(at).write(all) };
    }
}
