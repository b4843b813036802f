//! What query rows read: the answer of every decode method.

use super::{Budget, Decode, DecodeRow};
#[cfg(feature = "cuda")]
use crate::cuda::step::Chosen;
use crate::prefill::Mask;
use candle_core::{Result, bail};
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

    /// Those of them that a later row sees, and all tokens since the first `seen`.
    fn extended(&self, visible: &Range<usize>, seen: usize) -> Self {
        let first = visible.start;
        let left = self.ranges.iter().map(|range| range.start.max(first)..range.end);
        let mut ranges: Vec<_> = left.filter(|range| !range.is_empty()).collect();
        let since = seen.max(first)..visible.end;
        match ranges.last_mut() {
            Some(last) if last.end == since.start => last.end = since.end,
            _ => ranges.push(since),
        }
        let ids = self.ids.iter().copied().filter(|&id| id as usize >= first).collect();
        Self { ranges, ids, sample: self.sample.as_ref().and_then(|sample| sample.left(first)) }
    }
}

impl Sample {
    /// What of it is not before a token, if anything: for other queries, whose output is not known.
    fn left(&self, first: usize) -> Option<Self> {
        let left = |ids: &[u32]| -> Vec<u32> { ids.iter().copied().filter(|&id| id as usize >= first).collect() };
        let ids = left(&self.ids);
        let counts = self.counts.iter().map(|&count| left(&self.ids[..count]).len()).collect();
        let log_weights = self.log_weights.clone();
        (!ids.is_empty()).then(|| Self { ids, counts, log_weights, output: Vec::new() })
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
        match chosen {
            Chosen::Host(heads) => Self(Held::Host(heads)),
            chosen => Self(Held::Device(vec![chosen])),
        }
    }
}

impl Selection {
    /// Every visible key of every row.
    pub fn dense(rows: usize, kv_heads: usize) -> Self {
        vec![HeadSelection::Dense; rows * kv_heads].into()
    }

    /// Whether it is known, in host memory, to be every visible key of every row.
    pub fn is_dense(&self) -> bool {
        self.heads().is_ok_and(|heads| heads.iter().all(|head| matches!(head, HeadSelection::Dense)))
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

    /// What the batch's row reads if it keeps to this choice, of an earlier row of its sequence that saw the tokens before
    /// `seen`: what it still sees of it, and all tokens since. A device is not waited for.
    ///
    /// None of a choice that holds for its own query alone: values with given weights; on a device also a sample, which was
    /// read as it was drawn, and any choice once a model's own window has left the first token behind.
    ///
    /// # Errors
    /// Not one row, or one that sees no more; a device error.
    pub fn extended(&self, batch: &Decode, seen: usize) -> Result<Option<Self>> {
        let [DecodeRow { visible, .. }] = batch.rows else {
            bail!("extended: {} rows; expected one", batch.rows.len())
        };
        if visible.end <= seen {
            bail!(
                "extended: a row that sees tokens {visible:?}; expected one that sees more than the {seen} of the choice"
            );
        }
        match &self.0 {
            Held::Host(heads) => Ok(extended(heads, visible, seen).map(Self::from)),
            #[cfg(feature = "cuda")]
            Held::Device(parts) => Ok(Chosen::extended(parts, batch, seen)?.map(Self::from)),
        }
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

    /// Keys that were scored to draw values from them, for each row and KV head `[R, kv_heads]`, where the choice that they were
    /// drawn from had [counts that wait](Self::counts_wait); waits for them. None in host memory.
    ///
    /// # Errors
    /// A device error.
    pub fn scored(&self) -> Result<Option<Vec<usize>>> {
        match &self.0 {
            Held::Host(_) => Ok(None),
            #[cfg(feature = "cuda")]
            Held::Device(parts) => Ok(Some(Chosen::scored(parts)?)),
        }
    }

    /// Of itself what [`counts`](Self::counts), [`scored`](Self::scored) and [`budgets`](Self::budgets) take, for whoever keeps
    /// it: a device's memory for ids is not held.
    #[must_use]
    pub fn told(&self) -> Self {
        match &self.0 {
            Held::Host(_) => self.clone(),
            #[cfg(feature = "cuda")]
            Held::Device(parts) => Self(Held::Device(parts.iter().map(Chosen::told).collect())),
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

/// What a later row reads that keeps to the choice of one that saw `seen` tokens; none of values weighed for its query.
fn extended(heads: &[HeadSelection], visible: &Range<usize>, seen: usize) -> Option<Vec<HeadSelection>> {
    let of = |head: &HeadSelection| match head {
        HeadSelection::Dense => Some(HeadSelection::Dense),
        HeadSelection::Keys(keys) => Some(HeadSelection::Keys(keys.extended(visible, seen))),
        HeadSelection::Values(_) => None,
    };
    heads.iter().map(of).collect()
}

impl HeadSelection {
    /// Tokens that it reads.
    pub(super) fn len(&self, visible: &Range<usize>) -> usize {
        match self {
            Self::Dense => visible.len(),
            Self::Keys(keys) => keys.len(),
            Self::Values(values) => values.ids.len(),
        }
    }

    /// Those tokens in its order, but for a sample.
    pub(super) fn tokens(&self, visible: &Range<usize>) -> Vec<u32> {
        match self {
            Self::Dense => visible.clone().map(|t| t as u32).collect(),
            Self::Keys(keys) => {
                let ranges = keys.ranges.iter().flat_map(Clone::clone).map(|t| t as u32);
                ranges.chain(keys.ids.iter().copied()).collect()
            }
            Self::Values(values) => values.ids.clone(),
        }
    }
}

/// The tokens that each row and KV head reads, ascending, but for samples.
pub(crate) fn tokens(heads: &[HeadSelection], rows: &[DecodeRow]) -> Vec<Vec<u32>> {
    let kv_heads = heads.len() / rows.len().max(1);
    let of = |(i, head): (usize, &HeadSelection)| {
        let mut all = head.tokens(&rows[i / kv_heads].visible);
        all.sort_unstable();
        all
    };
    heads.iter().enumerate().map(of).collect()
}

/// Keys that each row and KV head reads.
pub(crate) fn counts(heads: &[HeadSelection], rows: &[DecodeRow]) -> Vec<usize> {
    let kv_heads = heads.len() / rows.len().max(1);
    heads.iter().enumerate().map(|(i, head)| head.len(&rows[i / kv_heads].visible)).collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};
    use proptest::prelude::*;

    /// Which of so many tokens a choice has as what: a range's, a single one, a sampled one, none.
    fn keys(of: &[u8], counts: &[usize]) -> Keys {
        let mut keys = Keys::default();
        let mut sampled = Vec::new();
        for (token, of) in of.iter().enumerate() {
            match of {
                0 => match keys.ranges.last_mut() {
                    Some(last) if last.end == token => last.end = token + 1,
                    _ => keys.ranges.push(token..token + 1),
                },
                1 => keys.ids.push(token as u32),
                2 => sampled.insert(sampled.len() / 2, token as u32),
                _ => {}
            }
        }
        let counts = counts.iter().map(|&count| count.min(sampled.len())).collect();
        let log_weights = vec![1.5, 0.5];
        keys.sample = (!sampled.is_empty()).then(|| Sample { ids: sampled, counts, log_weights, output: vec![1.0; 8] });
        keys
    }

    proptest! {
        #[test]
        fn a_choice_that_is_kept_to_grows_by_what_comes_and_loses_what_goes(
            of in prop::collection::vec(0u8..5, 1..60),
            counts in prop::array::uniform2(0usize..20),
            more in 1usize..9,
            window in 1usize..80,
        ) {
            let (seen, end) = (of.len(), of.len() + more);
            let visible = end.saturating_sub(window)..end;
            let before = keys(&of, &counts);
            let choice: Selection = vec![HeadSelection::Dense, HeadSelection::Keys(before.clone())].into();
            let q = Tensor::zeros((1, 4, 2), candle_core::DType::F32, &Device::Cpu).unwrap();
            let row = DecodeRow { table: &[], visible: visible.clone() };
            let batch = Decode { q: &q, kv: crate::kv::PagedKv { k: &q, v: &q }, rows: std::slice::from_ref(&row) };
            let after = choice.extended(&batch, seen).unwrap().unwrap();
            let [HeadSelection::Dense, HeadSelection::Keys(after)] = after.heads().unwrap() else { panic!("{after:?}") };
            let left = |token: &u32| visible.contains(&(*token as usize));
            let listed = |keys: &Keys| {
                let head = HeadSelection::Keys(Keys { sample: None, ..keys.clone() });
                tokens(&[head], std::slice::from_ref(&row)).remove(0)
            };
            let expected: Vec<u32> = listed(&before).into_iter().chain(seen as u32..end as u32).filter(left).collect();
            prop_assert_eq!(listed(after), expected);
            prop_assert!(after.ranges.iter().all(|range| !range.is_empty()));
            prop_assert!(after.ranges.windows(2).all(|two| two[0].end <= two[1].start));
            let none = Sample { ids: vec![], counts: vec![0; 2], log_weights: vec![], output: vec![] };
            let (was, is) = (before.sample.as_ref().unwrap_or(&none), after.sample.as_ref().unwrap_or(&none));
            for g in 0..2 {
                let expected: Vec<u32> = was.ids[..was.counts[g]].iter().copied().filter(left).collect();
                prop_assert_eq!(&is.ids[..is.counts[g]], &expected[..]);
            }
            prop_assert!(is.output.is_empty() && after.sample.iter().all(|sample| sample.log_weights == was.log_weights));
        }
    }

    #[test]
    fn values_weighed_for_a_query_are_not_kept_to() {
        let values = HeadSelection::Values(Values { ids: vec![1, 2], weights: vec![0.5; 2] });
        let choice: Selection = vec![HeadSelection::Dense, values].into();
        let q = Tensor::zeros((1, 2, 2), candle_core::DType::F32, &Device::Cpu).unwrap();
        let kv = crate::kv::PagedKv { k: &q, v: &q };
        let extended = |rows: &[DecodeRow], seen| choice.extended(&Decode { q: &q, kv, rows }, seen);
        let rows = [9, 9].map(|end| DecodeRow { table: &[], visible: 0..end });
        assert!(extended(&rows[..1], 8).unwrap().is_none());
        // Nothing that has come since, and rows that are not one.
        assert!(extended(&rows[..1], 9).is_err() && extended(&rows, 8).is_err());
    }
}
