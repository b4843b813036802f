//! A look ahead: whether sampling can pay at all, before keys are scored and ranked for it.

use super::{Draws, Head, Sampling, Work};
use crate::budget::{Moments, Verdict};
use crate::decode::attend::attend_head;
use crate::decode::rows::Partial;
use crate::decode::{Decode, HeadSelection, Keys, Sample, View, sink_window, with_view};
use crate::kv::KvElement;
use crate::parallel;
use crate::philox::Stream;
use crate::simd::Isa;
use candle_core::{Result, bail};

/// Sinks and most recent keys that a look takes exactly, and keys that it samples from all others.
const EXACT: (usize, usize) = (4, 12);
const KEYS: usize = 32;
/// Sets the look's draws apart from the sample's: a decision must not lean on what it decides about.
const LAYER_BIT: u32 = 1 << 31;

/// Which rows and KV heads are given up before their keys are ranked; none by default.
#[derive(Debug, Clone, Default)]
pub struct Foreseen(Vec<bool>);

impl Foreseen {
    /// How many keys `[R, kv_heads]` a predictor is to choose: `k`, or everything for a head that was given up.
    pub fn keys(&self, mut k: Vec<usize>) -> Vec<usize> {
        k.iter_mut().zip(&self.0).filter(|(_, hopeless)| **hopeless).for_each(|(k, _)| *k = usize::MAX);
        k
    }

    /// Whether it is for so many rows and KV heads.
    pub(super) fn fits(&self, heads: usize) -> bool {
        self.0.is_empty() || self.0.len() == heads
    }

    /// Whether a row and KV head was given up.
    pub(super) fn is_hopeless(&self, head: usize) -> bool {
        self.0.get(head).is_some_and(|hopeless| *hopeless)
    }
}

/// Gives up the rows and KV heads that are beyond the promise `sampling.hopeless`: reading everything
/// at once is the better bargain. `k` `[R, kv_heads]` is how many keys a predictor would choose beside the sinks and the
/// window. The heaviest of a few sampled keys stand for all that would be chosen, which flatters the choice; going dense
/// breaks no promise, so a look may err.
///
/// # Errors
/// Shapes that differ.
pub fn foresee(
    batch: &Decode,
    (sink, window): (usize, usize),
    k: &[usize],
    streams: &[Stream],
    sampling: &Sampling,
) -> Result<Foreseen> {
    let (rows, _, kv_heads, _) = batch.dims()?;
    if k.len() != rows * kv_heads || streams.len() != rows {
        bail!("foresee: {} budgets and {} streams for {rows} rows of {kv_heads}", k.len(), streams.len());
    }
    // On a device the sample itself finds that out, after its pilot; a look ahead would be one more launch to wait for.
    if !batch.q.device().is_cpu() {
        return Ok(Foreseen::default());
    }
    let isa = Isa::best();
    with_view!(batch, view: T => {
        Ok(Foreseen(parallel::map(rows * kv_heads, |i| {
            let (row, head) = (i / kv_heads, i % kv_heads);
            let stream = Stream { layer: streams[row].layer | LAYER_BIT, head: head as u32, ..streams[row] };
            is_hopeless(&mut Work::new(isa, view, row, head, None), (sink, window, k[i]), &stream, sampling)
        })))
    })
}

fn is_hopeless<T: KvElement>(
    work: &mut Work<T>,
    (sink, window, k): (usize, usize, usize),
    stream: &Stream,
    sampling: &Sampling,
) -> bool {
    let view: &View<T> = work.view;
    let visible = &view.rows[work.row].visible;
    let Some(fixed) = sink_window(visible, sink, window) else { return false };
    let least = fixed.iter().map(|r| r.len()).sum();
    // Even beside no chosen key the first look is too large.
    if sampling.whole(visible.len(), least).is_some_and(|whole| whole.dense) {
        return true;
    }
    let chosen = least + k;
    let (_, limit) = sampling.bounds(visible.len(), chosen);
    let Some(ranges) = sink_window(visible, sink.min(EXACT.0), window.min(EXACT.1)) else { return false };
    let mut keys = Keys { ranges: ranges.to_vec(), ..Keys::default() };
    let between = visible.len() - keys.fixed();
    // Of the keys between, those chosen, and of the sampled ones their share.
    let k = chosen - keys.fixed();
    let heaviest = (KEYS * k).div_ceil(between);
    if k + KEYS >= between || heaviest + 8 > KEYS || limit <= 0.0 {
        return false;
    }
    work.draw(&mut Draws::new(&keys, visible, stream), KEYS);
    work.score_new();
    let chosen = work.split_heaviest(heaviest);
    let log_weight = (k as f32 / heaviest.max(1) as f32).ln();
    keys.sample = (heaviest > 0).then(|| Sample {
        ids: chosen,
        counts: vec![heaviest; view.group],
        log_weights: vec![log_weight; view.group],
        output: Vec::new(),
    });
    let known = attend_head::<T>(work.isa, view, work.row, work.head, &HeadSelection::Keys(keys), None);
    work.add_up(&known);
    (0..view.group).any(|g| {
        let known = &known[g * Partial::width(view.head_dim)..];
        let head = Head::new(work, g, known, between - k);
        // What keys unseen may add is left out: so few tell nothing of it.
        let moments = Moments { heaviest: 0.0, ..head.moments() };
        match sampling.hopeless.verdict(&moments, (limit, limit), || 0.0) {
            Verdict::Sample(b) => b >= limit,
            Verdict::Dense => true,
            Verdict::Noisy => false,
        }
    })
}

impl<T: KvElement> Work<'_, T> {
    /// Takes the `count` sampled keys of largest weight, summed over the group, out of the sample.
    fn split_heaviest(&mut self, count: usize) -> Vec<u32> {
        let max: Vec<f32> = self.sampled.iter().map(|s| s.iter().copied().fold(f32::NEG_INFINITY, f32::max)).collect();
        let weight = |i: usize| self.sampled.iter().zip(&max).map(|(s, max)| (s[i] - max).exp()).sum::<f32>();
        let weights: Vec<f32> = (0..self.ids.len()).map(weight).collect();
        let mut order: Vec<usize> = (0..self.ids.len()).collect();
        order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
        let taken = order[..count].iter().map(|&i| self.ids[i]).collect();
        let rest = &mut order[count..];
        rest.sort_unstable();
        self.ids = rest.iter().map(|&i| self.ids[i]).collect();
        for scores in &mut self.sampled {
            *scores = rest.iter().map(|&i| scores[i]).collect();
        }
        taken
    }
}
