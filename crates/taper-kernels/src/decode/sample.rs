//! Estimating what was not chosen from a uniform sample whose size is as small as a promise allows.

mod certain;
mod foresee;
mod moments;

pub(crate) use certain::Page;
pub use certain::{Certainty, sample_certain};
#[cfg(feature = "cuda")]
pub(crate) use certain::{GUESS_KEYS, LOOKS};
pub use foresee::{Foreseen, foresee};

use super::attend::{attend_head, score_keys};
use super::rows::Partial;
use super::scores::HeadScores;
use super::{Decode, HeadSelection, Keys, Sample, Scores, Selection, View, with_view};
use crate::budget::{Promise, Verdict};
use crate::kv::{BLOCK_TOKENS, KvElement};
use crate::parallel::{self, SharedMut};
use crate::philox::{Permutation, Stream};
use crate::simd::{Isa, dispatch, prefetch};
use candle_core::{Result, bail};
use moments::{Head, Running, Sums, sum_up};
use std::borrow::Cow;
use std::ops::Range;

/// How a sample starts and when it gives up.
#[derive(Debug, Clone)]
pub struct Sampling {
    /// What the sampled output promises.
    pub promise: Promise,
    /// A looser promise: a head that even this sends dense is not worth a look at its keys (see [`foresee`]).
    pub hopeless: Promise,
    /// Least size of the pilot sample, at least 2.
    pub pilot_tokens: usize,
    /// Size of the pilot as a share of the keys that it stands for.
    pub pilot_share: f64,
    /// Share of the visible keys from which reading all of them is the better bargain.
    pub dense_share: f64,
}

impl Sampling {
    /// The pilot's size, and how many sampled keys are too many, for `n` visible keys of which `fixed` are chosen.
    pub(crate) fn bounds(&self, n: usize, fixed: usize) -> (usize, f64) {
        let pilot = (self.pilot_share * n.saturating_sub(fixed) as f64).ceil() as usize;
        (pilot.max(self.pilot_tokens).max(2), self.dense_share.min(1.0) * n as f64 - fixed as f64)
    }

    /// The budget of heads that are not sampled, whatever their keys: since what was not chosen is no more than the first look
    /// takes, or since a sample of that size is too large already.
    pub(crate) fn whole(&self, n: usize, fixed: usize) -> Option<Budget> {
        let (residual, (pilot, limit)) = (n.saturating_sub(fixed), self.bounds(n, fixed));
        let dense = residual > pilot;
        (!dense || pilot as f64 >= limit).then_some(Budget { residual, sampled: residual, pilot: 0, dense })
    }

    /// What sampling costs, as [`top_paying`](super::top_paying) takes it.
    ///
    /// With o the output, d the distance of the values from it and z the quantile of the error's norm, n keys whose
    /// squared shares of the attention mass sum to q need a sample of n q (z d / (epsilon ‖o‖))², less what drawing
    /// without replacement saves. z d / ‖o‖ is taken to be the same for all heads; the factor was found on real ones
    /// (`bench/promise-history.md`).
    pub fn noise(&self) -> f32 {
        (0.18 * self.promise.epsilon).powi(2) as f32
    }
}

/// What sampling came to for one row and query head.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Budget {
    /// Keys that were not chosen; all where none was asked for.
    pub residual: usize,
    /// Sampled keys that the head reads; the residual if all are read.
    pub sampled: usize,
    /// Sampled keys that were looked at first; 0 where none were.
    pub pilot: usize,
    /// Whether the head reads everything because no sample worth while keeps the promise. Where there is too little to
    /// sample from, everything is read and this is false.
    pub dense: bool,
}

impl Budget {
    /// Whether the head's keys were chosen to keep a promise: not where no more is left than a first look takes, so that all is
    /// read anyway. A first look may find no key.
    pub fn promised(&self) -> bool {
        self.dense || self.pilot > 0 || self.sampled < self.residual
    }
}

/// Where a budget asks for more than twice the sample, it grows to this share of that, at most so many times itself, and at least
/// twice.
pub(crate) const GROWTH: (f32, f32) = (0.5, 8.0);
/// How many times itself a sample grows to that is too noisy to tell.
const NOISY_GROWTH: usize = 4;
/// Looks at samples too noisy to tell, after which the head goes dense.
const NOISY_LOOKS: usize = 5;
/// A first look may err upwards: while a sample is below a quarter of the limit, a budget sends the head dense only if it
/// is so many times the limit.
const BENEFIT_OF_DOUBT: f64 = 2.0;
/// Points of a permutation among which the keys are whose products with one another a judge takes.
const FEW_POINTS: u32 = 128;
/// Sampled keys that one thread works on at a time, whole blocks: fewer are not worth another thread.
const CHUNK_KEYS: usize = 256;

/// Points of the permutation of `visible` keys among which a sample of `wanted` of the `residual` that are left is
/// expected: so the sample is told by the points alone, and where they are read by several, none needs to know how many
/// the others found.
fn points_for(wanted: usize, visible: usize, residual: usize) -> u32 {
    (wanted as u64 * visible as u64).div_ceil(residual.max(1) as u64).min(visible as u64) as u32
}

/// What a sample of `drawn` keys grows to at once where its budget asks for so many.
fn grown(drawn: usize, asked: f64) -> usize {
    let some = (GROWTH.0 * asked as f32).min(GROWTH.1 * drawn as f32);
    (asked as usize).min((2 * drawn).max(some as usize))
}

/// Adds to a selection, per row and KV head, a sample of the keys it leaves out: without replacement, of the least size
/// for which every head of the group keeps the promise, or everything.
///
/// Heads that were `foreseen` to read everything do. `streams` `[R]` key the draws; their `head` is set here. Budgets are
/// `[R, q_heads]`; none, on a device, where it is the [selection](Selection::budgets) that tells. A key that `scores` of
/// the same batch hold is not read again.
///
/// # Errors
/// Shapes that differ; a selection that has a sample already.
///
/// # Source
/// vAttention, Algorithm 1, with budgets as [`crate::budget`] says.
pub fn sample(
    batch: &Decode,
    selection: &Selection,
    foreseen: &Foreseen,
    scores: Option<&Scores>,
    streams: &[Stream],
    sampling: &Sampling,
) -> Result<(Selection, Vec<Budget>)> {
    #[cfg(feature = "cuda")]
    if batch.q.device().is_cuda() {
        return Ok(crate::cuda::step::sample(batch, selection, streams, sampling)?);
    }
    let fixed = check(batch, selection, streams)?;
    if !foreseen.fits(fixed.len()) {
        bail!("sample: heads foreseen for another batch than one of {}", fixed.len());
    }
    let (heads, kv_heads) = (fixed.len(), fixed.len() / batch.rows.len().max(1));
    let given_up: Vec<usize> = (0..heads).filter(|&i| foreseen.is_hopeless(i)).collect();
    let mut fixed = Cow::Borrowed(fixed);
    if !given_up.is_empty() {
        let all = fixed.to_mut();
        given_up.iter().for_each(|&i| all[i] = HeadSelection::Dense);
    }
    let (selection, mut budgets) = head_by_head(batch, &fixed, scores, streams, sampling)?;
    let group = budgets.len() / heads.max(1);
    for i in given_up {
        let n = batch.rows[i / kv_heads].visible.len();
        budgets[i * group..][..group].fill(Budget { residual: n, sampled: n, pilot: 0, dense: true });
    }
    Ok((selection.into(), budgets))
}

/// How the keys of one row and KV head are sampled.
trait Sampler: Sync {
    /// What the `place`-th row and KV head reads, with a sample; `budgets` are those of its query heads.
    fn sample<T: KvElement>(
        &self,
        place: usize,
        work: &mut Work<T>,
        fixed: &HeadSelection,
        stream: &Stream,
        budgets: &mut [Budget],
    ) -> HeadSelection;
}

/// Samples for every row and KV head of what was checked.
fn head_by_head(
    batch: &Decode,
    selection: &[HeadSelection],
    scores: Option<&Scores>,
    streams: &[Stream],
    sampler: &impl Sampler,
) -> Result<(Vec<HeadSelection>, Vec<Budget>)> {
    let (rows, q_heads, kv_heads, _) = batch.dims()?;
    let group = q_heads / kv_heads;
    let mut out = selection.to_vec();
    let mut budgets = vec![Budget::default(); rows * q_heads];
    let isa = Isa::best();
    with_view!(batch, view: T => {
        let (heads, budgets) = (SharedMut::new(&mut out), SharedMut::new(&mut budgets));
        parallel::for_each(rows * kv_heads, || (), |(), i| {
            let (row, head) = (i / kv_heads, i % kv_heads);
            // SAFETY: one selection and one group of budgets each.
            let (to, budgets) = unsafe { (&mut heads.slice(i, 1)[0], budgets.slice(i * group, group)) };
            let stream = Stream { head: head as u32, ..streams[row] };
            let mut work = Work::new(isa, view, row, head, scores.and_then(|s| s.of(i)));
            *to = sampler.sample(i, &mut work, to, &stream, budgets);
        });
    });
    Ok((out, budgets))
}

/// What each row and KV head reads already, without a sample.
pub(crate) fn check<'a>(batch: &Decode, selection: &'a Selection, streams: &[Stream]) -> Result<&'a [HeadSelection]> {
    let (rows, _, kv_heads, _) = batch.dims()?;
    let heads = selection.heads()?;
    if heads.len() != rows * kv_heads || streams.len() != rows || heads.iter().any(is_sampled) {
        bail!("sample: a selection of {} heads for {rows} rows of {kv_heads}, or one with a sample", heads.len());
    }
    Ok(heads)
}

fn is_sampled(head: &HeadSelection) -> bool {
    match head {
        HeadSelection::Dense => false,
        HeadSelection::Keys(keys) => keys.sample.is_some(),
        HeadSelection::Values(_) => true,
    }
}

/// Adds to a selection, per row and KV head, a sample of `sizes` `[R, kv_heads]` of the keys it leaves out, without
/// replacement; a head that would read everything does.
///
/// # Errors
/// As [`sample`].
pub fn sample_some(batch: &Decode, selection: &Selection, sizes: &[usize], streams: &[Stream]) -> Result<Selection> {
    let (rows, q_heads, kv_heads, _) = batch.dims()?;
    let heads = check(batch, selection, streams)?;
    if sizes.len() != rows * kv_heads {
        bail!("sample: {} sizes for {rows} rows of {kv_heads} heads", sizes.len());
    }
    #[cfg(feature = "cuda")]
    if batch.q.device().is_cuda() {
        return Ok(crate::cuda::step::sample_some(batch, heads, sizes, streams)?);
    }
    let group = q_heads / kv_heads;
    let draw = |i: usize| {
        let HeadSelection::Keys(keys) = &heads[i] else { return HeadSelection::Dense };
        let (visible, size) = (&batch.rows[i / kv_heads].visible, sizes[i]);
        let residual = visible.len() - keys.fixed();
        if size >= residual {
            return HeadSelection::Dense;
        }
        let stream = Stream { head: (i % kv_heads) as u32, ..streams[i / kv_heads] };
        let ids: Vec<u32> = Draws::new(keys, visible, &stream).take(size).collect();
        let log_weight = (residual as f32 / size.max(1) as f32).ln();
        let (counts, log_weights) = (vec![size; group], vec![log_weight; group]);
        let sample = (size > 0).then_some(Sample { ids, counts, log_weights, output: Vec::new() });
        HeadSelection::Keys(Keys { sample, ..keys.clone() })
    };
    Ok(parallel::map(heads.len(), draw).into())
}

impl Sampler for Sampling {
    fn sample<T: KvElement>(
        &self,
        _: usize,
        work: &mut Work<T>,
        fixed: &HeadSelection,
        stream: &Stream,
        budgets: &mut [Budget],
    ) -> HeadSelection {
        let view: &View<T> = work.view;
        let visible = view.rows[work.row].visible.clone();
        let n = visible.len();
        let HeadSelection::Keys(keys) = fixed else { return HeadSelection::Dense };
        let residual = n - keys.fixed();
        let (pilot, limit) = self.bounds(n, keys.fixed());
        if let Some(whole) = self.whole(n, keys.fixed()) {
            budgets.fill(whole);
            return HeadSelection::Dense;
        }
        let known = attend_head::<T>(work.isa, view, work.row, work.head, fixed, work.scores);
        let mut draws = Draws::new(keys, &visible, stream);
        let (mut wanted, mut drawn, mut points, mut first, mut noisy) = (pilot, 0, 0, None, 0);
        let sampled = loop {
            // Those that are missing: a sample that has fewer keys than expected of its points catches up.
            points += points_for(wanted - drawn, n, residual);
            let everything = Budget { residual, sampled: residual, pilot: first.unwrap_or(pilot), dense: true };
            if wanted >= residual || wanted as f64 >= limit || points as usize >= n {
                budgets.fill(everything);
                return HeadSelection::Dense;
            }
            work.walk(&mut draws, points);
            drawn = work.ids.len();
            first.get_or_insert(drawn);
            let doubt = if ((4 * drawn) as f64) < limit { BENEFIT_OF_DOUBT } else { 1.0 };
            // What a sample says of its own size is checked by what the larger sample says, until it is enough: the
            // pilot alone misses the rare heavy keys that its own spread depends on.
            wanted = match work.judge(&known, residual, self, doubt * limit) {
                Verdict::Sample(b) if b <= drawn as f64 => break drawn,
                Verdict::Sample(b) => grown(drawn, b),
                Verdict::Noisy if noisy < NOISY_LOOKS - 1 => {
                    noisy += 1;
                    NOISY_GROWTH * drawn.max(2)
                }
                Verdict::Noisy | Verdict::Dense => residual,
            };
        };
        let pilot = first.unwrap_or_default();
        // The group reads what its neediest head needs: the others may as well use it.
        budgets.fill(Budget { residual, sampled, pilot, dense: false });
        work.beside(keys.clone(), &known, residual)
    }
}

/// One row and KV head at work.
struct Work<'a, T> {
    isa: Isa,
    view: &'a View<'a, T>,
    row: usize,
    head: usize,
    scores: Option<&'a HeadScores>,
    ids: Vec<u32>,
    /// How many of them are among the first [`FEW_POINTS`] of a permutation that was walked.
    few: usize,
    /// Scores of the sampled keys `[group][keys]`.
    sampled: Vec<Vec<f32>>,
    /// What the looks so far have added up `[group]`.
    running: Vec<Running>,
}

impl<'a, T: KvElement> Work<'a, T> {
    fn new(isa: Isa, view: &'a View<'a, T>, row: usize, head: usize, scores: Option<&'a HeadScores>) -> Self {
        let running = vec![Running::default(); view.group];
        let (ids, sampled) = (Vec::new(), vec![Vec::new(); view.group]);
        Self { isa, view, row, head, scores, ids, few: 0, sampled, running }
    }

    /// Draws on until `wanted` keys are drawn.
    fn draw(&mut self, draws: &mut Draws, wanted: usize) {
        let more = wanted.saturating_sub(self.ids.len());
        draws.take(more).for_each(|id| self.take(id));
    }

    /// Draws what there is among the first `points` of the permutation.
    fn walk(&mut self, draws: &mut Draws, points: u32) {
        for end in [points.min(FEW_POINTS), points] {
            draws.walk(end).iter().for_each(|&id| self.take(id));
            if draws.walked <= FEW_POINTS {
                self.few = self.ids.len();
            }
        }
    }

    /// Takes a key to the sample, and has its rows on their way.
    fn take(&mut self, id: u32) {
        let at = self.view.offset(self.row, self.head, id as usize);
        prefetch(&raw const self.view.v[at], self.view.head_dim);
        if self.scores.is_none() {
            prefetch(&raw const self.view.k[at], self.view.head_dim);
        }
        self.ids.push(id);
    }

    /// The budget of the group's neediest head from what is drawn so far.
    fn judge(&mut self, known: &[f32], residual: usize, how: &Sampling, limit: f64) -> Verdict {
        if self.ids.len() < 2 {
            return Verdict::Noisy;
        }
        self.score_new();
        self.add_up(known);
        // Of budgets beyond this a sample grows to as much.
        let enough = (GROWTH.1 / GROWTH.0) as f64 * self.ids.len() as f64;
        // Side by side: of the last row and head's judge the other threads have nothing else to do.
        let verdicts = parallel::map(self.view.group, |g| {
            let known = &known[g * Partial::width(self.view.head_dim)..];
            let head = Head::new(self, g, known, residual);
            how.promise.verdict(&head.moments(), (enough, limit), || head.alignment())
        });
        let mut most = 0f64;
        for verdict in verdicts {
            match verdict {
                Verdict::Sample(b) if b < limit => most = most.max(b),
                Verdict::Noisy => return Verdict::Noisy,
                Verdict::Sample(_) | Verdict::Dense => return Verdict::Dense,
            }
        }
        Verdict::Sample(most)
    }

    /// Scores the keys drawn since the last time.
    fn score_new(&mut self) {
        let Self { isa, view, row, head, scores, ids, sampled, .. } = self;
        let (isa, view, row, head, scores, first) = (*isa, *view, *row, *head, *scores, sampled[0].len());
        sampled.iter_mut().for_each(|scores| scores.resize(ids.len(), 0.0));
        let to: Vec<_> = sampled.iter_mut().map(|scores| SharedMut::new(scores)).collect();
        let lines = || vec![0f32; view.group * BLOCK_TOKENS];
        parallel::for_each((ids.len() - first).div_ceil(CHUNK_KEYS), lines, |lines, chunk| {
            let start = first + chunk * CHUNK_KEYS;
            let chunk = &ids[start..ids.len().min(start + CHUNK_KEYS)];
            let mut blocks = chunk.chunks(BLOCK_TOKENS).peekable();
            let mut at = start;
            while let Some(ids) = blocks.next() {
                match scores {
                    Some(scores) => scores.copy(ids, lines),
                    None => {
                        let (of, keys) = ((row, head), (ids, blocks.peek().copied().unwrap_or_default()));
                        let (out, stride) = (lines.as_mut_ptr(), BLOCK_TOKENS);
                        dispatch!(isa, score_keys::<_, T: KvElement>(
                            view: &View<T>, of: (usize, usize), keys: (&[u32], &[u32]), out: *mut f32, stride: usize
                        ));
                    }
                }
                for (to, line) in to.iter().zip(lines.chunks_exact(BLOCK_TOKENS)) {
                    // SAFETY: every block of keys has its own part.
                    unsafe { to.slice(at, ids.len()) }.copy_from_slice(&line[..ids.len()]);
                }
                at += ids.len();
            }
        });
    }

    /// Adds up the keys scored since the last time; `known` are the partials `[group, 2 + head_dim]` of those read
    /// exactly.
    fn add_up(&mut self, known: &[f32]) {
        let (d, group, first) = (self.view.head_dim, self.view.group, self.running[0].keys);
        let known = known.chunks_exact(Partial::width(d)).map(|known| known[0]);
        for ((running, scores), known) in self.running.iter_mut().zip(&self.sampled).zip(known) {
            let heaviest = scores[first..].iter().copied().fold(f32::NEG_INFINITY, f32::max);
            running.heaviest = if first == 0 { heaviest } else { running.heaviest.max(heaviest) };
            running.rise(heaviest.max(known), d);
            running.keys = scores.len();
        }
        let keys = self.sampled[0].len();
        let parts = parallel::map((keys - first).div_ceil(CHUNK_KEYS), |chunk| {
            let start = first + chunk * CHUNK_KEYS;
            let (work, keys, mut parts) = (&*self, start..keys.min(start + CHUNK_KEYS), vec![Sums::new(d); group]);
            let sums = parts.as_mut_slice();
            dispatch!(self.isa, sum_up::<_, T: KvElement>(work: &Work<T>, keys: Range<usize>, sums: &mut [Sums]));
            parts
        });
        for (i, part) in parts.iter().flatten().enumerate() {
            self.running[i % group].sums.add(part);
        }
    }

    /// The keys read exactly, of which `known` are the partials, and beside them all that was drawn as a sample of the
    /// `residual` others, the same for every query head of the group; with what they come to.
    fn beside(&mut self, keys: Keys, known: &[f32], residual: usize) -> HeadSelection {
        let known = known.chunks_exact(Partial::width(self.view.head_dim)).enumerate();
        let output = known.flat_map(|(g, known)| Head::new(self, g, known, residual).output).collect();
        let (ids, group) = (std::mem::take(&mut self.ids), self.view.group);
        let log_weight = (residual as f64 / ids.len() as f64).ln() as f32;
        let (counts, log_weights) = (vec![ids.len(); group], vec![log_weight; group]);
        HeadSelection::Keys(Keys { sample: Some(Sample { ids, counts, log_weights, output }), ..keys })
    }

    /// Where the values of some sampled keys, at most a block, lie.
    fn values<'b>(&self, keys: Range<usize>, to: &'b mut [*const T; BLOCK_TOKENS]) -> &'b [*const T] {
        self.view.rows(self.view.v.as_ptr(), (self.row, self.head), &self.ids[keys], to)
    }
}

/// Keys in drawing order: a permutation of the visible ones, less those chosen.
struct Draws {
    permutation: Permutation,
    start: u32,
    /// A bit for each visible key.
    chosen: Vec<u64>,
    /// Points of the permutation that were evaluated.
    walked: u32,
    /// Keys drawn from the last run of them, and how many the iterator gave out.
    drawn: Vec<u32>,
    next: usize,
}

impl Draws {
    /// Points that the iterator evaluates together.
    const RUN: u32 = 64;

    fn new(keys: &Keys, visible: &Range<usize>, stream: &Stream) -> Self {
        let mut chosen = vec![0u64; visible.len().div_ceil(64)];
        let ids = keys.ranges.iter().flat_map(Clone::clone).chain(keys.ids.iter().map(|&i| i as usize));
        for id in ids {
            let at = id - visible.start;
            chosen[at / 64] |= 1 << (at % 64);
        }
        let permutation = Permutation::new(visible.len() as u32, stream);
        Self { permutation, start: visible.start as u32, chosen, walked: 0, drawn: Vec::new(), next: 0 }
    }

    /// The keys drawn from the points that were not evaluated yet, up to `end`.
    fn walk(&mut self, end: u32) -> &[u32] {
        self.next = 0;
        self.drawn.clear();
        let end = end.min(self.permutation.domain()).max(self.walked);
        self.permutation.points(self.walked..end, &mut self.drawn);
        self.walked = end;
        self.drawn.retain(|&p| self.chosen[p as usize / 64] >> (p % 64) & 1 == 0);
        self.drawn.iter_mut().for_each(|p| *p += self.start);
        &self.drawn
    }
}

impl Iterator for Draws {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        while self.next == self.drawn.len() {
            if self.walked == self.permutation.domain() {
                return None;
            }
            self.walk(self.walked + Self::RUN);
        }
        self.next += 1;
        Some(self.drawn[self.next - 1])
    }
}

#[cfg(test)]
mod tests;
