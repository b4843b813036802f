//! Samples beside what was chosen: [`crate::decode::sample`] and [`crate::decode::sample_certain`], which attend as they
//! sample, and [`crate::decode::sample_some`], all by the draws of the CPU.

use super::choose::room_for;
use super::{Chosen, Seeds, Step, choosable};
use crate::cuda::batch::{Draft, Lists};
use crate::cuda::certain::certain;
use crate::cuda::error::Result;
use crate::cuda::op::Op;
use crate::cuda::sample::{NUMBERS, Sampled, Scratch, draw, sampled};
use crate::decode::{self, Budget, Certainty, Decode, HeadSelection, Sampling, Selection};
use crate::philox::Stream;
use candle_core::Tensor;
use std::sync::{Arc, OnceLock};

/// States of a sampled list, as the interface names them.
const SAMPLED: u32 = crate::cuda::ffi::TAPER_SAMPLED as u32;
const DENSE: u32 = crate::cuda::ffi::TAPER_DENSE as u32;

/// What sampling came to, which the host reads when it must.
#[derive(Debug)]
pub(crate) struct Outcome {
    of: Sampled,
    /// What it was beside.
    lists: Lists,
    first: First,
    /// State, residual, sampled keys and those of the first look of each list, once they have been read.
    read: OnceLock<Vec<[usize; NUMBERS]>>,
}

/// What decided the size of the first sample that was looked at.
#[derive(Debug, Clone)]
enum First {
    /// A share of what it stands for, within bounds; the device tells what it came to.
    Share(Box<Sampling>),
    /// It is given.
    Size(usize),
}

impl First {
    /// Whether a list that is not sampled has something to sample from, and no room for it.
    fn too_large(&self, n: usize, fixed: usize) -> bool {
        matches!(self, Self::Share(how) if how.whole(n, fixed).is_some_and(|whole| whole.dense))
    }
}

impl Outcome {
    fn new(of: Sampled, lists: Lists, first: First) -> Arc<Self> {
        Arc::new(Self { of, lists, first, read: OnceLock::new() })
    }

    /// Itself without what was read beside the sample.
    pub fn told(&self) -> Arc<Self> {
        Self::new(self.of.clone(), self.lists.words(), self.first.clone())
    }

    /// Waits for the device, the first time.
    fn numbers(&self) -> Result<&[[usize; NUMBERS]]> {
        if let Some(lists) = self.read.get() {
            return Ok(lists);
        }
        let all = self.of.numbers.read()?;
        let each = all.len() / NUMBERS;
        let of = |i: usize| std::array::from_fn(|row| all[row * each + i] as usize);
        let lists = (0..self.of.lists).map(of).collect();
        Ok(self.read.get_or_init(|| lists))
    }

    pub fn of(&self) -> &Sampled {
        &self.of
    }

    /// What was read exactly, where a sample was read.
    pub fn beside(&self) -> &Lists {
        &self.lists
    }

    /// What attending gave `[R, q_heads, head_dim]`.
    pub fn out(&self) -> &Tensor {
        &self.of.out
    }

    /// Keys that each list reads.
    pub fn counts(&self, step: &Step) -> Result<Vec<usize>> {
        let count = |(i, &[state, residual, sampled, _]): (usize, &[usize; NUMBERS])| match state as u32 {
            SAMPLED => step.visible(i) - residual + sampled,
            _ => step.visible(i),
        };
        Ok(self.numbers()?.iter().enumerate().map(count).collect())
    }

    /// The budget of each query head `[R, q_heads]`.
    pub fn budgets(&self, step: &Step) -> Result<Vec<Budget>> {
        let group = step.q_heads / step.kv_heads;
        let budget = |(i, &[state, residual, sampled, first]): (usize, &[usize; NUMBERS])| {
            let (n, fixed) = (step.visible(i), step.visible(i) - residual);
            let pilot = match self.first {
                First::Share(_) => first,
                First::Size(pilot) => pilot,
            };
            match state as u32 {
                SAMPLED => Budget { residual, sampled, pilot, dense: false },
                DENSE => Budget { residual, sampled: residual, pilot, dense: true },
                _ => Budget { residual, sampled: residual, pilot: 0, dense: self.first.too_large(n, fixed) },
            }
        };
        let lists = self.numbers()?.iter().enumerate().map(budget);
        Ok(lists.flat_map(|budget| std::iter::repeat_n(budget, group)).collect())
    }
}

/// The lists that a sample is drawn beside; none where there is nothing to draw from.
fn beside(op: &Op, batch: &Decode, selection: &Selection, streams: &[Stream]) -> Result<Option<(Arc<Step>, Lists)>> {
    let (rows, q_heads, kv_heads, _) = batch.dims()?;
    op.check(streams.len() == rows, "streams", streams.len(), format_args!("{rows}, one a row"))?;
    let group = q_heads / kv_heads;
    let (step, lists) = match selection.on_device() {
        Some([Chosen::Keys(step, lists, _)]) => (step.clone(), lists.clone()),
        Some(_) => return Err(op.error("selection", "sampled already, or of rows chosen apart", "one of keys")),
        None => {
            let heads = decode::sample_check(batch, selection, streams)?;
            let dense = heads.iter().all(|head| matches!(head, HeadSelection::Dense));
            if dense || !choosable(batch.rows) {
                return Ok(None);
            }
            decode::check(batch, heads, kv_heads, group)?;
            (Step::new(op, batch)?, Lists::upload(op, batch.rows, heads, group)?)
        }
    };
    let fits = step.fits(batch.rows) && lists.heads_sampled.is_none();
    op.check(fits, "selection", "of other rows, or with a sample", "one of these rows without a sample")?;
    Ok(Some((step, lists)))
}

/// What reads everything, since there is nothing to draw from.
fn all(batch: &Decode) -> Result<(Selection, Vec<Budget>)> {
    let (rows, q_heads, kv_heads, _) = batch.dims()?;
    Ok((Selection::dense(rows, kv_heads), vec![Budget::default(); rows * q_heads]))
}

/// [`crate::decode::sample`]. Budgets are left to the selection, but where nothing is sampled.
pub(crate) fn sample(
    batch: &Decode,
    selection: &Selection,
    streams: &[Stream],
    how: &Sampling,
) -> Result<(Selection, Vec<Budget>)> {
    let op = Op::new("sample", "q", batch.q)?;
    let Some((step, lists)) = beside(&op, batch, selection, streams)? else { return all(batch) };
    let seeds = Seeds::new(&op, streams)?;
    let scratch = Scratch::kept(batch.q, step.lens.len(), step.q_heads, step.kv_heads)?;
    let of = sampled(&step.batch(), &lists, seeds.streams(), how, &scratch)?;
    Ok((Chosen::Sampled(step, Outcome::new(of, lists, First::Share(Box::new(how.clone())))).into(), Vec::new()))
}

/// [`crate::decode::sample_certain`]. Budgets are left to the selection, but where nothing is sampled.
pub(crate) fn sample_certain(
    batch: &Decode,
    selection: &Selection,
    streams: &[Stream],
    pages: (&Tensor, &Tensor),
    how: &Certainty,
) -> Result<(Selection, Vec<Budget>)> {
    let op = Op::new("sample_certain", "q", batch.q)?;
    let Some((step, lists)) = beside(&op, batch, selection, streams)? else { return all(batch) };
    let seeds = Seeds::new(&op, streams)?;
    let (of, exact) = certain(&step.batch(), &lists, seeds.streams(), pages, how)?;
    Ok((Chosen::Sampled(step, Outcome::new(of, exact, First::Size(how.pilot()))).into(), Vec::new()))
}

/// [`crate::decode::sample_some`] beside `fixed` `[R, kv_heads]`, which the caller has checked.
pub(crate) fn sample_some(
    batch: &Decode,
    fixed: &[HeadSelection],
    sizes: &[usize],
    streams: &[Stream],
) -> Result<Selection> {
    let op = Op::new("sample_some", "q", batch.q)?;
    let (rows, q_heads, kv_heads, _) = batch.dims()?;
    let group = q_heads / kv_heads;
    decode::check(batch, fixed, kv_heads, group)?;
    if !choosable(batch.rows) {
        return Ok(Selection::dense(rows, kv_heads));
    }
    let step = Step::new(&op, batch)?;
    let mut made = Draft::default();
    let (mut draws, mut counts, mut ln_weights) = (Vec::new(), Vec::new(), Vec::new());
    for (i, head) in fixed.iter().enumerate() {
        let visible = step.visible(i);
        made.begin(visible as u32);
        let residual = |keys: &decode::Keys| visible - keys.fixed();
        let (size, ln_weight) = match head {
            HeadSelection::Keys(keys) if sizes[i] < residual(keys) => {
                made.keys(keys);
                counts.push(keys.fixed() + sizes[i]);
                (sizes[i], (residual(keys) as f32 / sizes[i].max(1) as f32).ln())
            }
            _ => {
                made.whole(visible as u32);
                counts.push(visible);
                (0, 0.0)
            }
        };
        draws.push(size);
        ln_weights.extend(std::iter::repeat_n(ln_weight, group));
    }
    let most = room_for(draws.iter().copied().max().unwrap_or(0));
    made.samples(&draws, most);
    let mut lists = made.finish(&op, rows, kv_heads)?;
    if most > 0 {
        let seeds = Seeds::new(&op, streams)?;
        // A smaller sample is the beginning of a larger.
        let drawn = draw(&lists, seeds.streams(), step.batch().max_len, most)?.0.flatten_all()?;
        lists.token_ids = Some(match lists.token_ids.take() {
            Some(ids) => {
                op.apart()?;
                Tensor::cat(&[&*ids, &drawn], 0)?.into()
            }
            None => drawn.into(),
        });
        let each: Vec<u32> = draws.iter().flat_map(|&size| std::iter::repeat_n(size as u32, group)).collect();
        let shape = [rows, q_heads];
        lists.heads_sampled = Some((op.kept(&each, shape)?, op.kept(&ln_weights, shape)?));
    }
    Ok(Chosen::Keys(step, lists, Some(counts)).into())
}
