//! What query rows read: the answer of every decode method.

use super::{Budget, DecodeRow};
#[cfg(feature = "cuda")]
use crate::cuda::step::Chosen;
use crate::prefill::Mask;
use candle_core::Result;
#[cfg(feature = "cuda")]
use candle_core::bail;
use std::ops::Range;

/// The keys that each row and KV head reads: `[R, kv_heads]`, in host memory or where the batch is.
#[derive(Debug, Clone)]
pub struct Selection(Held);

#[derive(Debug, Clone)]
enum Held {
    Host(Vec<HeadSelection>),
    /// Of some rows each, in their order.
    #[cfg(feature = "cuda")]
    Device(Vec<Chosen>),
}

/// The keys that one row and KV head reads.
#[derive(Debug, Clone, PartialEq)]
pub enum HeadSelection {
    /// Every visible key.
    Dense,
    /// Some keys.
    Keys(Keys),
    /// A mean of some values, whatever their keys.
    Values(Values),
}

/// Values with given weights.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Values {
    /// Tokens, each once.
    pub ids: Vec<u32>,
    /// Each query head's weights `[group, ids]`; a head's add up to 1, or are scaled to.
    pub weights: Vec<f32>,
}

/// Chosen keys: ranges and ids with weight 1, and a sample that stands for what was not chosen.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Keys {
    /// Disjoint ranges of tokens, ascending.
    pub ranges: Vec<Range<usize>>,
    /// Tokens outside the ranges, ascending.
    pub ids: Vec<u32>,
    /// Sampled tokens, outside ranges and ids.
    pub sample: Option<Sample>,
}

/// A sample shared by a group of query heads, of which each reads a prefix.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Tokens in drawing order.
    pub ids: Vec<u32>,
    /// How many of them each query head reads `[group]`.
    pub counts: Vec<usize>,
    /// Natural log of each query head's importance weight `[group]`.
    pub log_weights: Vec<f32>,
    /// Each query head's output over keys and sample `[group, head_dim]`, where it is known of making the sample; else
    /// empty.
    pub output: Vec<f32>,
}

impl Keys {
    /// Keys read, the longest prefix of the sample included.
    pub fn len(&self) -> usize {
        self.fixed() + self.sample.as_ref().map_or(0, |s| s.counts.iter().copied().max().unwrap_or(0))
    }

    /// Whether nothing is read.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Keys with weight 1.
    pub fn fixed(&self) -> usize {
        self.ranges.iter().map(Range::len).sum::<usize>() + self.ids.len()
    }
}

impl From<Vec<HeadSelection>> for Selection {
    fn from(heads: Vec<HeadSelection>) -> Self {
        Self(Held::Host(heads))
    }
}

#[cfg(feature = "cuda")]
impl From<Chosen> for Selection {
    fn from(chosen: Chosen) -> Self {
        Self(Held::Device(vec![chosen]))
    }
}

impl Selection {
    /// Every visible key of every row.
    pub fn dense(rows: usize, kv_heads: usize) -> Self {
        vec![HeadSelection::Dense; rows * kv_heads].into()
    }

    /// The first `sink` and last `window` visible keys of each row; a row that has no more is dense.
    pub fn sink_window(rows: &[DecodeRow], kv_heads: usize, sink: usize, window: usize) -> Self {
        let head = |row: &DecodeRow| match sink_window(&row.visible, sink, window) {
            None => HeadSelection::Dense,
            Some(ranges) => HeadSelection::Keys(Keys { ranges: ranges.to_vec(), ..Keys::default() }),
        };
        rows.iter().flat_map(|row| vec![head(row); kv_heads]).collect::<Vec<_>>().into()
    }

    /// The selections of rows that were made apart, as one.
    pub fn join(parts: impl IntoIterator<Item = Self>) -> Self {
        let join = |all: Held, part: Self| match (all, part.0) {
            (Held::Host(mut all), Held::Host(heads)) => {
                all.extend(heads);
                Held::Host(all)
            }
            #[cfg(feature = "cuda")]
            (all, part) => Held::Device([all, part].into_iter().flat_map(Held::into_chosen).collect()),
        };
        Self(parts.into_iter().fold(Held::Host(Vec::new()), join))
    }

    /// What each row and KV head reads `[R, kv_heads]`.
    ///
    /// # Errors
    /// A selection that is on a device.
    pub fn heads(&self) -> Result<&[HeadSelection]> {
        match &self.0 {
            Held::Host(heads) => Ok(heads),
            #[cfg(feature = "cuda")]
            Held::Device(_) => bail!("selection: on a CUDA device; expected one in host memory"),
        }
    }

    /// Those parts of it that are on a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(&self) -> Option<&[Chosen]> {
        match &self.0 {
            Held::Host(_) => None,
            Held::Device(parts) => Some(parts),
        }
    }

    /// Keys that each row and KV head reads `[R, kv_heads]`. On a device this may wait for the choice.
    ///
    /// # Errors
    /// A device error.
    pub fn counts(&self, rows: &[DecodeRow]) -> Result<Vec<usize>> {
        match &self.0 {
            Held::Host(heads) => Ok(counts(heads, rows)),
            #[cfg(feature = "cuda")]
            Held::Device(parts) => Ok(Chosen::counts(parts, rows)?),
        }
    }

    /// The budgets `[R, q_heads]` that only the device knows of a sample that keeps a promise; waits for them.
    ///
    /// # Errors
    /// A device error.
    pub fn budgets(&self) -> Result<Option<Vec<Budget>>> {
        match &self.0 {
            Held::Host(_) => Ok(None),
            #[cfg(feature = "cuda")]
            Held::Device(parts) => Ok(Chosen::budgets(parts)?),
        }
    }

    /// Whether [`counts`](Self::counts) may wait: for a choice whose size only the device knows.
    pub fn counts_wait(&self) -> bool {
        match &self.0 {
            Held::Host(_) => false,
            #[cfg(feature = "cuda")]
            Held::Device(parts) => parts.iter().any(Chosen::counts_wait),
        }
    }

    /// The tokens that each row and KV head reads `[R, kv_heads]`, ascending, but for samples; of values, those that any
    /// head of the group reads. Waits for the device: for tests and tools.
    ///
    /// # Errors
    /// A selection whose keys were read in the launch that chose them; a device error.
    pub fn tokens(&self, rows: &[DecodeRow]) -> Result<Vec<Vec<u32>>> {
        match &self.0 {
            Held::Host(heads) => Ok(tokens(heads, rows)),
            #[cfg(feature = "cuda")]
            Held::Device(parts) => Ok(Chosen::tokens(parts, rows)?),
        }
    }
}

/// The tokens that each row and KV head reads, ascending, but for samples.
pub(crate) fn tokens(heads: &[HeadSelection], rows: &[DecodeRow]) -> Vec<Vec<u32>> {
    let kv_heads = heads.len() / rows.len().max(1);
    let of = |(i, head): (usize, &HeadSelection)| {
        let mut all: Vec<u32> = match head {
            HeadSelection::Dense => rows[i / kv_heads].visible.clone().map(|t| t as u32).collect(),
            HeadSelection::Keys(keys) => {
                let ranges = keys.ranges.iter().flat_map(Clone::clone).map(|t| t as u32);
                ranges.chain(keys.ids.iter().copied()).collect()
            }
            HeadSelection::Values(values) => values.ids.clone(),
        };
        all.sort_unstable();
        all
    };
    heads.iter().enumerate().map(of).collect()
}

/// Keys that each row and KV head reads.
pub(crate) fn counts(heads: &[HeadSelection], rows: &[DecodeRow]) -> Vec<usize> {
    let kv_heads = heads.len() / rows.len().max(1);
    let count = |(i, head): (usize, &HeadSelection)| match head {
        HeadSelection::Dense => rows[i / kv_heads].visible.len(),
        HeadSelection::Keys(keys) => keys.len(),
        HeadSelection::Values(values) => values.ids.len(),
    };
    heads.iter().enumerate().map(count).collect()
}

#[cfg(feature = "cuda")]
impl Held {
    fn into_chosen(self) -> Vec<Chosen> {
        match self {
            Self::Host(heads) if heads.is_empty() => Vec::new(),
            Self::Host(heads) => vec![Chosen::Host(heads)],
            Self::Device(parts) => parts,
        }
    }
}

/// The sinks that are visible and the last `window` (at least 1) keys: disjoint, or `None` where that is everything.
pub(crate) fn sink_window(visible: &Range<usize>, sink: usize, window: usize) -> Option<[Range<usize>; 2]> {
    let ranges = Mask::SinkWindow { sink, window }.keys(visible.end - 1, Some(visible.len()));
    (ranges[0].end < ranges[1].start).then_some(ranges)
}
