//! Values drawn in place of all that a selection reads: [`crate::decode::sample_values`] and
//! [`crate::decode::bernoulli_queries`], by the draws of the CPU and without the host.

use super::sample::Outcome;
use super::{Chosen, Seeds, Step, choosable};
use crate::cuda::batch::Lists;
use crate::cuda::error::Result;
use crate::cuda::layer::cast;
use crate::cuda::op::Op;
use crate::cuda::readback::Readback;
use crate::cuda::sample::{Scratch, sampled_keys};
use crate::cuda::score::{Scores, View, scores};
use crate::cuda::values::{distinct, features, spread_listed, spread_values, values, values_fit};
use crate::cuda::walk::{ScoredBy, Walked, list_scores};
use crate::decode::{self, By, Decode, HeadSelection, Selection, Spread};
use crate::philox::Stream;
use candle_core::{DType, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// What is known of values besides, most of it by the device alone.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// How many each KV head's query heads read between them.
    read: Readback,
    /// What attending gave, where drawing and reading were one launch.
    pub(super) out: Option<Tensor>,
    /// The sample that keeps a promise from which they were drawn.
    sampled: Option<Arc<Outcome>>,
    /// Keys of each list, more than how many were scored to draw from them, and which lists were if so.
    scored: Option<(Readback, usize, Vec<bool>)>,
}

impl Source {
    pub fn sampled(&self) -> Option<&Outcome> {
        self.sampled.as_deref()
    }

    /// Itself without what attending gave.
    pub(super) fn told(&self) -> Self {
        Self { out: None, sampled: self.sampled.as_deref().map(Outcome::told), ..self.clone() }
    }

    /// Values that each row and KV head reads. Waits for the device.
    pub fn read(&self) -> Result<impl Iterator<Item = usize>> {
        Ok(self.read.read()?.into_iter().map(|count| count as usize))
    }

    /// Keys of each of so many lists that were scored to draw from them. Waits for the device.
    pub fn scored(&self, lists: usize) -> Result<Vec<usize>> {
        let Some((counts, samples, new)) = &self.scored else { return Ok(vec![0; lists]) };
        let drawn = |(count, new): (u32, &bool)| match count as usize {
            count if *new && count > *samples => count,
            _ => 0,
        };
        Ok(counts.read()?.into_iter().zip(new).map(drawn).collect())
    }
}

/// [`crate::decode::sample_values`], whose numbers the caller has checked.
pub(crate) fn sample_values(
    batch: &Decode,
    selection: &Selection,
    by: By,
    streams: &[Stream],
    draws: (usize, Spread),
) -> Result<Selection> {
    let op = Op::new("sample_values", "q", batch.q)?;
    let (rows, _, kv_heads, _) = batch.dims()?;
    if !choosable(batch.rows) {
        return Ok(selection.clone());
    }
    let host;
    let parts = match selection.on_device() {
        Some(parts) => parts,
        None => {
            host = [Chosen::Host(selection.heads()?.to_vec())];
            &host[..]
        }
    };
    let one = 0..rows;
    let spans = if parts.len() == 1 { vec![one] } else { Chosen::spans(parts, rows) };
    let chosen = spans.last().map_or(0, |span| span.end);
    op.check(chosen == rows, "selection", format_args!("of {chosen} rows"), format_args!("one of {rows}"))?;
    // What only the device can count is counted for all, or the caller counts.
    let waits = parts.iter().any(Chosen::counts_wait);
    let draw = |(part, span): (&Chosen, Range<usize>)| {
        let heads = span.start * kv_heads..span.end * kv_heads;
        // Scores are of the whole batch: for a part of it keys are scored anew.
        let known = |head| span.len() == rows && matches!(by, By::Scores(known) if known.has(head));
        let new = waits.then(|| heads.map(|head| !known(head)).collect());
        let streams = &streams[span.clone()];
        if span.len() == rows {
            return drawn(&op, batch, part, by, streams, draws, new);
        }
        let own = |q: &Tensor| q.narrow(0, span.start, span.len());
        let (q, other) = (own(batch.q)?, if let By::Queries(q) = by { Some(own(q)?) } else { None });
        let batch = Decode { q: &q, kv: batch.kv, rows: &batch.rows[span.clone()] };
        drawn(&op, &batch, part, other.as_ref().map_or(By::Keys, By::Queries), streams, draws, new)
    };
    let made = parts.iter().zip(spans).map(draw).collect::<Result<Vec<_>>>()?;
    if made.iter().all(Option::is_none) {
        return Ok(selection.clone());
    }
    let kept = |(made, part): (Option<Chosen>, &Chosen)| Selection::from(made.unwrap_or_else(|| part.clone()));
    Ok(Selection::join(made.into_iter().zip(parts).map(kept)))
}

/// The values of one part; none where all of it is read. `new`: which lists are scored for it, if the device shall count
/// their keys.
fn drawn(
    op: &Op,
    batch: &Decode,
    part: &Chosen,
    by: By,
    streams: &[Stream],
    (samples, spread): (usize, Spread),
    new: Option<Vec<bool>>,
) -> Result<Option<Chosen>> {
    let fits = part.step().is_none_or(|step| step.fits(batch.rows));
    op.check(fits, "selection", "of rows that see more or less", "one made for these rows")?;
    let counts = match part {
        Chosen::Host(heads) => Some(decode::counts(heads, batch.rows)),
        Chosen::Keys(_, _, counts) => counts.clone(),
        Chosen::Sampled(..) => None,
        Chosen::Values(..) => return Err(op.error("selection", "of values", "one of keys")),
    };
    if counts.as_ref().is_some_and(|counts| counts.iter().all(|&count| count <= samples)) {
        return Ok(None);
    }
    let known = match by {
        By::Scores(known) => known.on_device().and_then(|scored| scored.of_tokens(batch)),
        _ => None,
    };
    let step = match (part.step(), known) {
        (Some(step), _) if step.q == batch.q.id() => step.clone(),
        (_, Some((step, _))) => step.clone(),
        _ => Step::new(op, batch)?,
    };
    let known = known.map(|(_, scores)| scores);
    let own = step.batch();
    let other = match by {
        By::Queries(q) => Some(cast(op, q, batch.kv.k.dtype())?),
        _ => None,
    };
    let seeds = Seeds::new(op, streams)?;
    // A list of few keys is read as it is: by the batch's queries, whatever it would be drawn by.
    let few = counts.as_ref().is_some_and(|counts| counts.iter().any(|&count| count <= samples));
    let all = |heads: &[HeadSelection]| heads.iter().all(|head| matches!(head, HeadSelection::Dense));
    if let Chosen::Host(heads) = part
        && all(heads)
        && !(few && other.is_some())
        && new.is_none()
    {
        let (lists, out) = of_all(op, &step, (known, other.as_ref()), &seeds, (samples, spread), few)?;
        let read = distinct(op, &lists, step.kv_heads, own.max_len)?;
        return Ok(Some(Chosen::Values(step, lists, Source { read, out, sampled: None, scored: None })));
    }
    let uploaded;
    let (lists, outcome) = match part {
        Chosen::Sampled(_, outcome) => (outcome.beside(), Some(outcome)),
        Chosen::Keys(_, lists, _) => (lists, None),
        Chosen::Host(heads) => {
            let (_, q_heads, kv_heads, _) = batch.dims()?;
            decode::check(batch, heads, kv_heads, q_heads / kv_heads)?;
            let values = heads.iter().any(|head| matches!(head, HeadSelection::Values(_)));
            op.check(!values, "selection", "of values", "one of keys")?;
            uploaded = Lists::upload(op, batch.rows, heads, q_heads / kv_heads)?;
            (&uploaded, None)
        }
        Chosen::Values(..) => unreachable!("refused above"),
    };
    let most = counts.and_then(|counts| counts.into_iter().max()).unwrap_or(own.max_len);
    let keys = match outcome {
        Some(outcome) => Some(sampled_keys(lists, seeds.streams(), own.max_len, outcome.of())?),
        None => None,
    };
    let beside = outcome.zip(keys.as_ref()).map(|(outcome, keys)| (outcome.of(), keys));
    let walked = Walked::new(op, lists, beside, most)?;
    let from = match known {
        Some(scores) => ScoredBy::Known(scores.values()),
        None => ScoredBy::Queries(other.as_ref().unwrap_or(own.q), other.is_some().then_some(samples)),
    };
    let found = list_scores(op, &own, lists, walked, beside, &from)?;
    let values = spread_listed(op, &own, &found, seeds.streams(), (samples, spread))?;
    let read = distinct(op, &values, step.kv_heads, own.max_len)?;
    let scored = new.map(|new| (found.of.counts, samples, new));
    Ok(Some(Chosen::Values(step, values, Source { read, out: None, sampled: outcome.cloned(), scored })))
}

/// Values of lists that read all keys of their rows, and what attending gave, where drawing and reading are one launch: where
/// rows are drawn from by their own queries and see more than the draws.
fn of_all(
    op: &Op,
    step: &Step,
    (known, other): (Option<&Scores>, Option<&Tensor>),
    seeds: &Seeds,
    (samples, spread): (usize, Spread),
    few: bool,
) -> Result<(Lists, Option<Tensor>)> {
    let own = step.batch();
    if let (None, None, Spread::Whole(targets), false, true) = (known, other, spread, few, values_fit(&own)) {
        let scratch = Scratch::kept(own.q, step.lens.len(), step.q_heads, step.kv_heads)?;
        let drawn = values(&own, seeds.streams(), samples, targets, &scratch)?;
        return Ok((drawn.lists(op, &step.lens)?, Some(drawn.out)));
    }
    let found;
    let scores = match known {
        Some(scores) => scores,
        None => {
            let scale = 1.0 / (own.q.dim(2)? as f32).sqrt();
            found = scores(&own, other.unwrap_or(own.q), View::Rows(own.kv.k), scale)?;
            &found
        }
    };
    Ok((spread_values(&own, scores, seeds.streams(), samples, spread)?, None))
}

/// [`crate::decode::bernoulli_queries`], whose numbers the caller has checked.
pub(crate) fn bernoulli_queries(batch: &Decode, streams: &[Stream], draws: usize, shared: bool) -> Result<Tensor> {
    let op = Op::new("bernoulli_queries", "q", batch.q)?;
    let (_, q_heads, kv_heads, _) = batch.dims()?;
    let seeds = Seeds::new(&op, streams)?;
    let q = cast(&op, batch.q, DType::F32)?;
    features(&q, seeds.streams(), draws, shared.then_some(q_heads / kv_heads))
}
