//! What decode methods ask for, on a CUDA device: the operations of [`crate::decode`] and [`crate::index`] over the same
//! arguments, whose scores and choices stay on the device.
//!
//! Operations choose for rows that see their sequence from its first token on. Rows of a model with a window of its
//! own, once it has left the first token behind, read everything that they see: they count as not [`wanted`]. What a
//! choice came to is read back where the host must know it, for reports: [`Chosen::counts`], [`Chosen::budgets`] and
//! [`Chosen::scored`] wait for the device, which callers put off to the end of a step.

mod choose;
mod index;
mod project;
mod sample;
mod values;

pub(crate) use choose::{LayersChosen, Scored, choose_ahead, scores, top_p, top_paying};
pub(crate) use index::{
    bounds, bounds_ahead, equal_bits, extend_bounds, extend_clusters, extend_codes, extend_labels, extend_norms,
    extend_quantized, labels, probe, quantized,
};
pub(crate) use project::{KeptTurns, OnDevice, per_head, products};
pub(crate) use sample::{sample, sample_certain, sample_some};
pub(crate) use values::{bernoulli_queries, sample_values};

use super::batch::{Batch, Lists, Upload};
use super::decode::{Plan, attend_host};
use super::error::{Error, Result};
use super::layer::cast;
use super::op::Op;
use super::sample::Streams;
use crate::decode::{self, Budget, Decode, DecodeRow, HeadSelection, Selection};
use crate::kv::PagedKv;
use crate::philox::Stream;
use candle_core::{DType, Tensor, TensorId};
use sample::Outcome;
use std::ops::Range;
use std::sync::Arc;
use values::Source;

/// Whether rows are such as something can be chosen for.
fn choosable(rows: &[DecodeRow]) -> bool {
    rows.iter().all(|row| row.visible.start == 0)
}

/// Which heads something is chosen for, of those that it is wanted for.
fn wanted(rows: &[DecodeRow], wanted: &[bool]) -> Vec<bool> {
    let choosable = choosable(rows);
    wanted.iter().map(|wanted| *wanted && choosable).collect()
}

/// Query rows copied to the device, for the operations of one layer that follow one another.
#[derive(Debug)]
pub(crate) struct Step {
    upload: Upload,
    k: Tensor,
    v: Tensor,
    /// Of the queries that were copied.
    q: TensorId,
    /// Visible tokens `[R]`.
    lens: Vec<usize>,
    q_heads: usize,
    kv_heads: usize,
}

impl Step {
    fn new(op: &Op, batch: &Decode) -> Result<Arc<Self>> {
        let (_, q_heads, kv_heads, _) = batch.dims()?;
        Ok(Arc::new(Self {
            upload: Upload::new(op, batch)?,
            k: batch.kv.k.clone(),
            v: batch.kv.v.clone(),
            q: batch.q.id(),
            lens: batch.rows.iter().map(|row| row.visible.end).collect(),
            q_heads,
            kv_heads,
        }))
    }

    fn batch(&self) -> Batch<'_> {
        self.upload.batch(PagedKv { k: &self.k, v: &self.v })
    }

    /// Visible tokens of each row and KV head.
    fn visible(&self, head: usize) -> usize {
        self.lens[head / self.kv_heads]
    }

    /// Whether it is for rows that see as much.
    fn fits(&self, rows: &[DecodeRow]) -> bool {
        self.lens.iter().copied().eq(rows.iter().map(|row| row.visible.end))
    }
}

/// What some rows read, or their outputs where choosing and reading are one launch.
#[derive(Debug, Clone)]
pub(crate) enum Chosen {
    /// In host memory `[R, kv_heads]`.
    Host(Vec<HeadSelection>),
    /// Keys of each KV head, and how many where the host knows.
    Keys(Arc<Step>, Lists, Option<Vec<usize>>),
    /// Values of each query head, with given weights, or those that the launch that drew them has read.
    Values(Arc<Step>, Lists, Source),
    /// Keys and a sample, which the launch that sampled has read.
    Sampled(Arc<Step>, Arc<Outcome>),
}

impl Chosen {
    fn step(&self) -> Option<&Arc<Step>> {
        match self {
            Self::Host(_) => None,
            Self::Keys(step, ..) | Self::Values(step, ..) | Self::Sampled(step, ..) => Some(step),
        }
    }

    /// Each part's share of so many rows, which need not be said where the device has one of them.
    fn spans(parts: &[Self], rows: usize) -> Vec<Range<usize>> {
        let host = |part: &Self| if let Self::Host(heads) = part { heads.len() } else { 0 };
        let kv_heads = match parts.iter().find_map(Self::step) {
            Some(step) => step.kv_heads,
            None => (parts.iter().map(host).sum::<usize>() / rows.max(1)).max(1),
        };
        let mut end = 0;
        let mut span = |part: &Self| {
            let start = end;
            end += match part {
                Self::Host(heads) => heads.len() / kv_heads,
                Self::Keys(step, ..) | Self::Values(step, ..) | Self::Sampled(step, ..) => step.lens.len(),
            };
            start..end
        };
        parts.iter().map(&mut span).collect()
    }

    /// [`Selection::extended`], whose checks the caller has made.
    pub fn extended(parts: &[Self], batch: &Decode, seen: usize) -> Result<Option<Self>> {
        let [Self::Keys(step, lists, counts)] = parts else { return Ok(None) };
        if !choosable(batch.rows) {
            return Ok(None);
        }
        let op = Op::new("extended", "q", batch.q)?;
        op.check(
            step.lens == [seen],
            "selection",
            format_args!("of rows that saw {:?}", step.lens),
            format_args!("of one, {seen}"),
        )?;
        let since = batch.rows[0].visible.end - seen;
        let Some(lists) = lists.extended(&op, since)? else { return Ok(None) };
        let counts = counts.as_ref().map(|counts| counts.iter().map(|count| count + since).collect());
        Ok(Some(Self::Keys(Step::new(&op, batch)?, lists, counts)))
    }

    /// Whether only the device knows how many keys are read.
    pub fn counts_wait(&self) -> bool {
        matches!(self, Self::Keys(_, _, None) | Self::Values(..) | Self::Sampled(..))
    }

    /// Keys that each row and KV head reads `[R, kv_heads]`; of values, those that any head of the group reads. Waits for
    /// the device where the host does not know.
    pub fn counts(parts: &[Self], rows: &[DecodeRow]) -> Result<Vec<usize>> {
        let mut all = Vec::new();
        for (part, span) in parts.iter().zip(Self::spans(parts, rows.len())) {
            match part {
                Self::Host(heads) => all.extend(decode::counts(heads, &rows[span])),
                Self::Keys(_, _, Some(counts)) => all.extend(counts),
                Self::Sampled(step, outcome) => all.extend(outcome.counts(step)?),
                Self::Keys(_, lists, None) => all.extend(lists.counts()?),
                Self::Values(_, _, source) => all.extend(source.read()?),
            }
        }
        Ok(all)
    }

    /// Keys of each row and KV head that were scored to draw values from them, where the host could not count them. Waits for
    /// the device.
    pub fn scored(parts: &[Self]) -> Result<Vec<usize>> {
        let mut all = Vec::new();
        for part in parts {
            match part {
                Self::Host(heads) => all.resize(all.len() + heads.len(), 0),
                Self::Values(step, _, source) => all.extend(source.scored(step.lens.len() * step.kv_heads)?),
                Self::Keys(step, ..) | Self::Sampled(step, ..) => {
                    all.resize(all.len() + step.lens.len() * step.kv_heads, 0);
                }
            }
        }
        Ok(all)
    }

    /// The budgets `[R, q_heads]` of rows that sampled to keep a promise, empty ones of others; none where none did. Waits for
    /// the device.
    pub fn budgets(parts: &[Self]) -> Result<Option<Vec<Budget>>> {
        let sampled = |part: &Self| match part {
            Self::Sampled(step, outcome) => Some(outcome.budgets(step)),
            Self::Values(step, _, source) => source.sampled().map(|outcome| outcome.budgets(step)),
            Self::Host(_) | Self::Keys(..) => None,
        };
        let Some(q_heads) = parts.iter().find_map(Self::step).map(|step| step.q_heads) else { return Ok(None) };
        let (mut all, mut any) = (Vec::new(), false);
        for (part, span) in parts.iter().zip(Self::spans(parts, 0)) {
            if let Some(budgets) = sampled(part) {
                all.extend(budgets?);
                any = true;
            }
            all.resize(span.end * q_heads, Budget::default());
        }
        Ok(any.then_some(all))
    }

    /// Of itself what counts and budgets take, without the memory of its ids.
    pub fn told(&self) -> Self {
        match self {
            Self::Host(heads) => Self::Host(heads.clone()),
            Self::Keys(step, lists, counts) => Self::Keys(step.clone(), lists.words(), counts.clone()),
            Self::Values(step, lists, source) => Self::Values(step.clone(), lists.words(), source.told()),
            Self::Sampled(step, outcome) => Self::Sampled(step.clone(), outcome.told()),
        }
    }

    /// The tokens that each row and KV head reads `[R, kv_heads]`, ascending, but for samples. Waits for the device.
    pub fn tokens(parts: &[Self], rows: &[DecodeRow]) -> Result<Vec<Vec<u32>>> {
        let mut all = Vec::new();
        for (part, span) in parts.iter().zip(Self::spans(parts, rows.len())) {
            match part {
                Self::Host(heads) => all.extend(decode::tokens(heads, &rows[span])),
                Self::Keys(_, lists, _) => all.extend(lists.read_back()?),
                Self::Values(step, lists, _) => all.extend(distinct(step, lists)?),
                Self::Sampled(_, outcome) => {
                    let op = Op::new("tokens", "selection", outcome.out())?;
                    return Err(op.error("selection", "read by the launch that sampled", "one that is yet to be read"));
                }
            }
        }
        Ok(all)
    }

    /// Attends for the part's own rows: `[R, q_heads, head_dim]`, f32.
    fn attend(&self, op: &Op, batch: &Decode) -> Result<Tensor> {
        let fits = self.step().is_none_or(|step| step.fits(batch.rows));
        op.check(fits, "selection", "of rows that see more or less", "one made for these rows")?;
        let (step, lists) = match self {
            Self::Host(heads) => return attend_host(batch, heads),
            Self::Sampled(_, outcome) => return Ok(outcome.out().clone()),
            Self::Values(_, _, Source { out: Some(out), .. }) => return Ok(out.clone()),
            Self::Keys(step, lists, _) | Self::Values(step, lists, _) => (step, lists),
        };
        // What was chosen by other queries, such as some that few features are left of, is read by these.
        let q = match batch.q.id() == step.q {
            true => None,
            false => Some(cast(op, batch.q, batch.kv.k.dtype())?),
        };
        let own = step.batch();
        let own = Batch { q: q.as_ref().unwrap_or(own.q), ..own };
        let plan = Plan::new(lists.clone(), &own)?;
        Ok(match self {
            Self::Values(..) => plan.attend_given(&own, DType::F32)?.0,
            _ => plan.attend(&own, None, DType::F32)?.0,
        })
    }
}

/// The tokens that any query head of each KV head's group reads, by lists of query heads.
fn distinct(step: &Step, lists: &Lists) -> Result<Vec<Vec<u32>>> {
    let distinct = |heads: &[Vec<u32>]| {
        let mut ids = heads.concat();
        ids.sort_unstable();
        ids.dedup();
        ids
    };
    Ok(lists.read_back()?.chunks(step.q_heads / step.kv_heads).map(distinct).collect())
}

/// [`crate::decode::attend`]: queries in f32 are rounded to the cache's dtype; returns `[R, q_heads, head_dim]`, f32.
pub(crate) fn attend(batch: &Decode, selection: &Selection) -> Result<Tensor> {
    let Some(parts) = selection.on_device() else { return attend_host(batch, selection.heads()?) };
    let op = Op::new("attend", "q", batch.q)?;
    let (rows, ..) = batch.dims()?;
    let spans = Chosen::spans(parts, rows);
    let chosen = spans.last().map_or(0, |span| span.end);
    op.check(chosen == rows, "selection", format_args!("of {chosen} rows"), format_args!("one of {rows}"))?;
    if let [part] = parts {
        return part.attend(&op, batch);
    }
    let one = |(part, span): (&Chosen, Range<usize>)| {
        let q = batch.q.narrow(0, span.start, span.len())?;
        part.attend(&op, &Decode { q: &q, kv: batch.kv, rows: &batch.rows[span] })
    };
    let outs = parts.iter().zip(spans).map(one).collect::<Result<Vec<_>>>()?;
    op.stacked(&outs)
}

/// [`crate::decode::stacked`].
pub(crate) fn stacked(parts: &[Tensor]) -> Result<Tensor> {
    let Some(first) = parts.first() else { return Err(Error::parameter("stacked", "parts", 0, "at least one")) };
    let op = Op::new("stacked", "parts", first)?;
    let parts = parts.iter().map(|part| cast(&op, part, first.dtype())).collect::<Result<Vec<_>>>()?;
    op.stacked(&parts)
}

/// The streams of some rows, on the device.
struct Seeds {
    seeds: Tensor,
    positions: Tensor,
    layer: u32,
}

impl Seeds {
    fn new(op: &Op, streams: &[Stream]) -> Result<Self> {
        let layer = streams.first().map_or(0, |stream| stream.layer);
        let together = streams.iter().all(|stream| stream.layer == layer);
        op.check(together, "streams", "of several layers", "streams of one layer")?;
        let seeds: Vec<i64> = streams.iter().map(|stream| stream.seed as i64).collect();
        let positions: Vec<u32> = streams.iter().map(|stream| stream.position).collect();
        let n = [streams.len()];
        Ok(Self { seeds: op.kept(&seeds, n)?, positions: op.kept(&positions, n)?, layer })
    }

    fn streams(&self) -> Streams<'_> {
        Streams { seeds: &self.seeds, positions: &self.positions, layer: self.layer }
    }
}
