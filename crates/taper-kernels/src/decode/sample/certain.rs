//! A sample whose promise holds whatever was not drawn: the unread keys' weights are bounded by their pages, so that one
//! heavy key that nobody predicted cannot hide.
//!
//! Source: empirical Bernstein bounds in the manner of Maurer and Pontil 2009, for vectors by Pinelis 1994,
//! over the page bounds of Quest; sampling without replacement errs no more than with it (Hoeffding 1963, section 6).
//!
//! With c a guess at the output from a few keys drawn first and read exactly, X the error of the sampled sum of e (v − c)
//! and Y that of e, the output's error is at most (‖X‖ + ‖o − c‖ |Y|) / (D − |Y|), where o and D are the estimates. Both
//! errors are bounded from what was drawn since and from the largest that the pages allow.

use super::{Budget, Draws, Head, Running, Sampler, Work, check, head_by_head};
use crate::decode::attend::attend_head;
use crate::decode::rows::Partial;
use crate::decode::{Decode, HeadSelection, Keys, Scores, Selection, View};
use crate::index::bounds::PageBounds;
use crate::kv::KvElement;
use crate::philox::Stream;
use candle_core::{Result, Tensor};

/// A promise that holds without a central limit theorem.
#[derive(Debug, Clone, Copy)]
pub struct Certainty {
    /// Largest relative error of the output.
    pub epsilon: f64,
    /// Largest probability of a larger one.
    pub delta: f64,
    /// Size of the first sample, at least 2.
    pub pilot_tokens: usize,
    /// Share of the visible keys from which reading all of them is the better bargain.
    pub dense_share: f64,
}

/// Looks at the sample; it doubles from one to the next, and each takes its share of delta.
pub(crate) const LOOKS: usize = 8;
/// Keys drawn first, to guess the output.
pub(crate) const GUESS_KEYS: usize = 32;
/// Bounds that have to hold together at each look: X, its spread, Y, its spread.
const BOUNDS: f64 = 4.0;

impl Certainty {
    /// The size of the first sample that is looked at.
    pub(crate) fn pilot(&self) -> usize {
        self.pilot_tokens.max(2)
    }

    /// Logarithm of the probability that each bound of each look may fail with, less its sign; bounds have two sides.
    pub(crate) fn log_bounds(&self) -> f64 {
        (2.0 * BOUNDS * LOOKS as f64 / self.delta).ln()
    }
}

/// Adds to a selection, per row and KV head, the pages that could weigh most and a sample of the rest, as large as it takes
/// to be sure of the promise; a head for which that is too much reads everything.
///
/// `bounds` is an index of [`crate::index::bounds`], `norms` one of [`crate::index::norms`] over pages of one size.
/// Otherwise as [`super::sample`], also in that a device keeps the budgets until they are asked for.
///
/// # Errors
/// Shapes that differ; a selection that has a sample already.
pub fn sample_certain(
    batch: &Decode,
    selection: &Selection,
    scores: Option<&Scores>,
    streams: &[Stream],
    (bounds, norms): (&Tensor, &Tensor),
    how: &Certainty,
) -> Result<(Selection, Vec<Budget>)> {
    #[cfg(feature = "cuda")]
    if batch.q.device().is_cuda() {
        return Ok(crate::cuda::step::sample_certain(batch, selection, streams, (bounds, norms), how)?);
    }
    let fixed = check(batch, selection, streams)?;
    let wanted: Vec<bool> = fixed.iter().map(|head| matches!(head, HeadSelection::Keys(_))).collect();
    let pages = PageBounds::new(batch, bounds, norms, &wanted)?;
    let (selection, budgets) = head_by_head(batch, fixed, scores, streams, &Certain { pages, how })?;
    Ok((selection.into(), budgets))
}

/// A promise and the bounds that it rests on.
struct Certain<'a> {
    pages: PageBounds,
    how: &'a Certainty,
}

impl Sampler for Certain<'_> {
    fn sample<T: KvElement>(
        &self,
        place: usize,
        work: &mut Work<T>,
        fixed: &HeadSelection,
        stream: &Stream,
        budgets: &mut [Budget],
    ) -> HeadSelection {
        let HeadSelection::Keys(keys) = fixed else { return HeadSelection::Dense };
        let (pages, how) = (self.pages.of(place), self.how);
        let view: &View<T> = work.view;
        let visible = view.rows[work.row].visible.clone();
        let limit = how.dense_share.min(1.0) * visible.len() as f64;
        let residual = visible.len() - keys.fixed();
        budgets.fill(Budget { residual, sampled: residual, ..Budget::default() });
        if residual <= how.pilot_tokens + GUESS_KEYS {
            return HeadSelection::Dense;
        }
        let pilot = how.pilot();
        budgets.fill(Budget { residual, sampled: residual, pilot, dense: true });
        let (keys, guesses) = guess(work, keys, &mut Draws::new(keys, &visible, stream), visible.len());
        let Some((keys, reach)) = promote(&keys, pages, &guesses, how, limit) else { return HeadSelection::Dense };
        // The same order of drawing: what was drawn and what was promoted is passed over.
        let mut draws = Draws::new(&keys, &visible, stream);
        let residual = visible.len() - keys.fixed();
        let fixed = HeadSelection::Keys(keys.clone());
        let partial = attend_head::<T>(work.isa, view, work.row, work.head, &fixed, work.scores);
        let mut wanted = pilot;
        for _ in 0..LOOKS {
            wanted = wanted.min(residual);
            if (wanted + keys.fixed()) as f64 >= limit {
                break;
            }
            work.draw(&mut draws, wanted);
            work.score_new();
            work.add_up(&partial);
            let sure = (0..view.group).all(|g| {
                let part = &partial[g * Partial::width(view.head_dim)..];
                Head::new(work, g, part, residual).is_sure(&guesses[g].output, &reach[g], how)
            });
            if sure {
                budgets.fill(Budget { residual, sampled: wanted, pilot, dense: false });
                return work.beside(keys, &partial, residual);
            }
            wanted *= 2;
        }
        HeadSelection::Dense
    }
}

/// The pages of one row and KV head: first token, and for each query head the largest score, and the largest norm.
pub(crate) struct Page {
    pub start: usize,
    pub end: usize,
    /// `[group]`.
    pub scores: Vec<f32>,
    pub norm: f32,
}

/// What a few keys suggest of one query head.
struct Guess {
    /// Largest score of the keys looked at.
    max: f64,
    /// Sum of exp(score − max) over all keys.
    sum: f64,
    output: Vec<f32>,
    norm: f64,
}

/// Draws a few keys, guesses each query head's output from them, and takes them to those read exactly: what is drawn later
/// is a sample of the others, whatever these were.
fn guess<T: KvElement>(work: &mut Work<T>, keys: &Keys, draws: &mut Draws, visible: usize) -> (Keys, Vec<Guess>) {
    let view: &View<T> = work.view;
    let fixed = HeadSelection::Keys(keys.clone());
    let partial = attend_head::<T>(work.isa, view, work.row, work.head, &fixed, work.scores);
    work.draw(draws, GUESS_KEYS);
    work.score_new();
    work.add_up(&partial);
    let width = Partial::width(view.head_dim);
    let guess = |g: usize| {
        let part = &partial[g * width..];
        let head = Head::new(work, g, part, visible - keys.fixed());
        let norm = head.output.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let sum = head.known_sum + head.residual / head.running.keys as f64 * head.running.sums.e;
        Guess { max: head.running.max.into(), sum, output: head.output, norm }
    };
    let guesses = (0..view.group).map(guess).collect();
    let mut keys = keys.clone();
    keys.ids.append(&mut work.ids);
    keys.ids.sort_unstable();
    work.sampled.iter_mut().for_each(Vec::clear);
    work.running.fill_with(Running::default);
    (keys, guesses)
}

/// The most that an unread key can weigh for a query head: in score, and in the norm of its value.
struct Reach {
    score: f64,
    norm: f64,
}

/// Adds the pages to read whatever is sampled: as many of the heaviest as make the whole cheapest. Gives what is left to
/// the unread for each query head; none if all that is too much.
fn promote(keys: &Keys, pages: &[Page], known: &[Guess], how: &Certainty, limit: f64) -> Option<(Keys, Vec<Reach>)> {
    let left: Vec<Vec<u32>> = pages.iter().map(|page| unread(keys, page)).collect();
    let weight = |page: &Page| {
        let of = |(score, k): (&f32, &Guess)| {
            (f64::from(*score) - k.max).exp() * (f64::from(page.norm) + k.norm)
                / (k.sum * k.norm.max(f64::MIN_POSITIVE))
        };
        page.scores.iter().zip(known).map(of).fold(0.0, f64::max)
    };
    let mut order: Vec<(f64, usize)> =
        pages.iter().enumerate().filter(|(i, _)| !left[*i].is_empty()).map(|(i, page)| (weight(page), i)).collect();
    order.sort_by(|a, b| b.0.total_cmp(&a.0));
    let confidence = 4.0 / 3.0 * how.log_bounds();
    let mut unread: usize = left.iter().map(Vec::len).sum();
    let (mut read, mut best) = (0usize, (f64::INFINITY, 0));
    for (rank, (weight, page)) in order.iter().enumerate() {
        let cost = read as f64 + unread as f64 * weight * confidence / how.epsilon;
        if cost < best.0 {
            best = (cost, rank);
        }
        read += left[*page].len();
        unread -= left[*page].len();
        if (read + keys.fixed()) as f64 >= limit {
            break;
        }
    }
    if best.0 + keys.fixed() as f64 >= limit {
        return None;
    }
    let (promoted, rest) = order.split_at(best.1);
    let mut ids = keys.ids.clone();
    promoted.iter().for_each(|(_, page)| ids.extend(&left[*page]));
    ids.sort_unstable();
    let most = |of: &dyn Fn(&Page) -> f32| rest.iter().map(|(_, i)| of(&pages[*i])).fold(f32::NEG_INFINITY, f32::max);
    let reach =
        (0..known.len()).map(|g| Reach { score: most(&|p| p.scores[g]).into(), norm: most(&|p| p.norm).into() });
    Some((Keys { ids, ..keys.clone() }, reach.collect()))
}

/// Tokens of a page that are not read yet.
fn unread(keys: &Keys, page: &Page) -> Vec<u32> {
    let from = keys.ids.partition_point(|&id| (id as usize) < page.start);
    let to = keys.ids.partition_point(|&id| (id as usize) < page.end);
    let read = &keys.ids[from..to];
    let free = |token: &usize| {
        !keys.ranges.iter().any(|range| range.contains(token)) && read.binary_search(&(*token as u32)).is_err()
    };
    (page.start..page.end).filter(free).map(|token| token as u32).collect()
}

impl<T: KvElement> Head<'_, '_, T> {
    /// Whether the sample is large enough for the promise; `centre` is a guess at the output from before it was drawn.
    fn is_sure(&self, centre: &[f32], reach: &Reach, how: &Certainty) -> bool {
        let (b, n) = (self.running.keys as f64, self.residual);
        let log = how.log_bounds();
        // Everything is relative to the largest score of keys read and drawn, as the head's sums are.
        let max = f64::from(self.running.max);
        let weight = (reach.score - max).exp();
        let centre: Vec<f64> = centre.iter().map(|x| f64::from(*x)).collect();
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let centre_norm = norm(&mut centre.iter().copied());
        // Means of e² and of e² ‖v − c‖² over the sample.
        let s = &self.running.sums;
        let cross: f64 = centre.iter().zip(&s.e2v).map(|(c, x)| c * f64::from(*x)).sum();
        let y2 = s.e2 / b;
        let x2 = ((s.e2v2 - 2.0 * cross + centre_norm * centre_norm * s.e2) / b).max(0.0);
        let error = |mean2: f64, most: f64| {
            let spread = mean2.sqrt() + most * (2.0 * log / b).sqrt();
            n * (spread * (2.0 * log / b).sqrt() + 4.0 / 3.0 * most * log / b)
        };
        let (x, y) = (error(x2, weight * (reach.norm + centre_norm)), error(y2, weight));
        let denominator = self.known_sum + n / b * s.e;
        let apart = norm(&mut self.output.iter().zip(&centre).map(|(o, c)| f64::from(*o) - c));
        let bound = (x + apart * y) / (denominator - y);
        let size = norm(&mut self.output.iter().map(|o| f64::from(*o)));
        y < denominator && bound <= how.epsilon / (1.0 + how.epsilon) * size
    }
}
