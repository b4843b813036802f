//! What rows of a prefill read, where it is not one rule for all of them.

use super::Mask;
use super::stripes::Stripes;
#[cfg(feature = "cuda")]
use crate::cuda::DeviceReads;
use crate::kv::BLOCK_TOKENS;
use candle_core::{Result, bail};
use std::borrow::Cow;
use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// Lists of ascending ids, one after the other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lists {
    ends: Vec<usize>,
    ids: Vec<u32>,
}

impl Lists {
    /// Appends a list; its ids must ascend.
    pub fn push(&mut self, ids: impl IntoIterator<Item = u32>) {
        self.ids.extend(ids);
        self.ends.push(self.ids.len());
    }

    /// How many lists there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no list.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// List `i`, which there must be.
    pub fn get(&self, i: usize) -> &[u32] {
        &self.ids[if i == 0 { 0 } else { self.ends[i - 1] }..self.ends[i]]
    }
}

impl<I: IntoIterator<Item = u32>> FromIterator<I> for Lists {
    fn from_iter<L: IntoIterator<Item = I>>(lists: L) -> Self {
        let mut all = Self::default();
        lists.into_iter().for_each(|list| all.push(list));
        all
    }
}

/// Key blocks of each run of rows, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Blocks {
    /// Lists.
    Listed(Lists),
    /// What stripes read, of which no list is kept.
    Striped {
        /// The stripes; their single tokens are not looked at.
        stripes: Stripes,
        /// The runs.
        runs: Vec<StripedRun>,
    },
    /// What a device chose and keeps, of single tokens too. A run's rows read all keys from its first block on, of the size of
    /// what was chosen.
    #[cfg(feature = "cuda")]
    Device {
        /// That of all lists of heads.
        reads: Arc<DeviceReads>,
        /// Which of them.
        list: usize,
        /// Keys that each run's rows read before its first block.
        before: Vec<u32>,
    },
}

/// Where a run of rows stands among stripes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StripedRun {
    /// The block of the stripes that its rows stand in.
    pub own: u32,
    /// Keys before that one that they read, single tokens in no block included.
    pub keys: u32,
}

impl From<Lists> for Blocks {
    fn from(lists: Lists) -> Self {
        Self::Listed(lists)
    }
}

impl Blocks {
    /// How many runs there are.
    fn len(&self) -> usize {
        match self {
            Self::Listed(lists) => lists.len(),
            Self::Striped { runs, .. } => runs.len(),
            #[cfg(feature = "cuda")]
            Self::Device { before, .. } => before.len(),
        }
    }

    /// The blocks of run `i`, which there must be; none of what a device keeps.
    pub fn get(&self, i: usize) -> Cow<'_, [u32]> {
        match self {
            Self::Listed(lists) => lists.get(i).into(),
            Self::Striped { stripes, runs } => stripes.blocks_of(runs[i].own).collect(),
            #[cfg(feature = "cuda")]
            Self::Device { .. } => Cow::default(),
        }
    }

    /// First token of run `i`'s first block of the blocks' own size, and how many keys before it are read, where that is known;
    /// from there on all are.
    fn split(&self, i: usize, run: &Range<usize>) -> Option<(usize, usize)> {
        let first = |block: usize| run.start / block * block;
        match self {
            Self::Listed(_) => None,
            Self::Striped { stripes, runs } => Some((first(stripes.block_tokens), runs[i].keys as usize)),
            #[cfg(feature = "cuda")]
            Self::Device { reads, before, .. } => Some((first(reads.block_tokens()), before[i] as usize)),
        }
    }

    fn ascends(&self) -> bool {
        let ascends = |ids: &[u32]| ids.is_sorted_by(|a, b| a < b);
        match self {
            Self::Listed(lists) => (0..lists.len()).all(|i| ascends(lists.get(i))),
            Self::Striped { stripes, .. } => ascends(&stripes.blocks) && ascends(&stripes.distances),
            #[cfg(feature = "cuda")]
            Self::Device { .. } => true,
        }
    }
}

/// What one list of heads reads: the keys that the mask gives a row and that stand in a listed block or are listed
/// themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadReads {
    /// The outermost bound.
    pub mask: Mask,
    /// Blocks of 64 tokens for each run of rows `[runs]`; absent, all of them.
    pub blocks: Option<Blocks>,
    /// Single tokens for each run `[runs]`, or one list for all runs `[1]`, or none `[0]`; those in a listed block count
    /// once.
    pub tokens: Lists,
}

impl From<Mask> for HeadReads {
    fn from(mask: Mask) -> Self {
        Self { mask, blocks: None, tokens: Lists::default() }
    }
}

impl HeadReads {
    /// Blocks, causally, and nothing else.
    pub fn blocks(blocks: Lists) -> Self {
        Self { mask: Mask::Causal, blocks: Some(blocks.into()), tokens: Lists::default() }
    }

    /// The blocks and tokens that a run reads.
    pub(crate) fn lists(&self, run: usize) -> (Option<Cow<'_, [u32]>>, &[u32]) {
        (self.blocks.as_ref().map(|blocks| blocks.get(run)), self.tokens(run))
    }

    /// The tokens alone.
    pub(crate) fn tokens(&self, run: usize) -> &[u32] {
        match self.tokens.len() {
            0 => &[][..],
            1 => self.tokens.get(0),
            _ => self.tokens.get(run),
        }
    }
}

/// What the rows of a prefill read: runs of neighbouring rows, and lists of keys for each run and head.
///
/// With as many lists of heads as KV heads, each serves its whole group of query heads; with as many as query heads,
/// each serves one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    runs: Vec<Range<usize>>,
    heads: Vec<HeadReads>,
}

impl Selection {
    /// Reads of every run of absolute positions, and list of heads.
    ///
    /// # Errors
    /// Runs that do not ascend, a number of lists that is not that of the runs, ids that do not ascend.
    pub fn new(runs: Vec<Range<usize>>, heads: Vec<HeadReads>) -> Result<Self> {
        let apart = runs.windows(2).all(|pair| pair[0].end <= pair[1].start);
        if !apart || runs.iter().any(|run| run.start >= run.end) {
            bail!("selection: runs of rows do not ascend");
        }
        for reads in &heads {
            let (blocks, tokens) = (reads.blocks.as_ref(), &reads.tokens);
            if blocks.is_some_and(|b| b.len() != runs.len()) || (tokens.len() > 1 && tokens.len() != runs.len()) {
                bail!(
                    "selection: {:?} lists of blocks and {} of tokens for {} runs",
                    blocks.map(Blocks::len),
                    tokens.len(),
                    runs.len()
                );
            }
            let ascends = |lists: &Lists| (0..lists.len()).all(|i| lists.get(i).is_sorted_by(|a, b| a < b));
            if !blocks.is_none_or(Blocks::ascends) || !ascends(tokens) {
                bail!("selection: ids do not ascend");
            }
        }
        Ok(Self { runs, heads })
    }

    /// The runs of rows.
    pub fn runs(&self) -> &[Range<usize>] {
        &self.runs
    }

    /// What each list of heads reads.
    pub fn heads(&self) -> &[HeadReads] {
        &self.heads
    }

    /// Keys that each row reads `[T, lists of heads]`; 0 for a row without a run.
    pub fn counts(&self, positions: &[u32], window: Option<usize>) -> Vec<usize> {
        let mut counts = vec![0; positions.len() * self.heads.len()];
        for (run, rows) in self.runs.iter().enumerate() {
            let members = rows_of(positions, rows);
            for (head, reads) in self.heads.iter().enumerate().filter(|_| !members.is_empty()) {
                let counter = Counter::new(reads, run, rows.clone(), window);
                for row in members.clone() {
                    counts[row * self.heads.len() + head] = counter.count(positions[row] as usize, window);
                }
            }
        }
        counts
    }

    /// The share of a row's probability that one list of heads reads; `None` for a row without a run. `sums` are the sums
    /// of the probabilities before each key, and of all: `[position + 2]`. `None` too of what a device keeps.
    pub fn held(&self, list: usize, position: usize, window: Option<usize>, sums: &[f64]) -> Option<f64> {
        let run = self.runs.partition_point(|run| run.end <= position);
        self.runs.get(run).filter(|run| run.contains(&position))?;
        let reads = &self.heads[list];
        #[cfg(feature = "cuda")]
        if matches!(reads.blocks, Some(Blocks::Device { .. })) {
            return None;
        }
        let keys = reads.mask.keys(position, window);
        let within = |span: Range<usize>| -> f64 {
            let parts = keys.iter().map(|k| (k.start.max(span.start), k.end.min(span.end)));
            parts.filter(|(start, end)| start < end).map(|(start, end)| sums[end] - sums[start]).sum()
        };
        let (blocks, tokens) = reads.lists(run);
        let Some(blocks) = blocks else { return Some(within(0..position + 1)) };
        let mut singles = Vec::new();
        outside(&tokens[..tokens.partition_point(|&t| t as usize <= position)], &blocks, &mut singles);
        let in_blocks: f64 =
            blocks.iter().map(|&b| b as usize * BLOCK_TOKENS).map(|b| within(b..b + BLOCK_TOKENS)).sum();
        Some(in_blocks + singles.iter().map(|&t| within(t as usize..t as usize + 1)).sum::<f64>())
    }
}

/// Counts the keys of one run's rows and one head.
enum Counter {
    /// What the mask says.
    All(Mask),
    /// So many, and all from a token on.
    From { whole: usize, start: usize },
    /// Most blocks are read whole by every row, or by none.
    Blocks {
        mask: Mask,
        whole: usize,
        /// Blocks that some rows read in part.
        edges: Vec<Range<usize>>,
        tokens: Vec<u32>,
    },
}

impl Counter {
    fn new(reads: &HeadReads, run: usize, rows: Range<usize>, window: Option<usize>) -> Self {
        let split = reads.blocks.as_ref().and_then(|blocks| blocks.split(run, &rows));
        if let (Mask::Causal, Some((start, whole)), None) = (reads.mask, split, window) {
            return Self::From { whole, start };
        }
        let (Some(blocks), tokens) = reads.lists(run) else { return Self::All(reads.mask) };
        let mut outside = Vec::new();
        self::outside(tokens, &blocks, &mut outside);
        let spans = blocks.iter().map(|&b| b as usize * BLOCK_TOKENS..(b as usize + 1) * BLOCK_TOKENS);
        // Without an inner mask, what the first row sees and the last one has not lost is seen by all.
        let lowest = rows.end.saturating_sub(window.unwrap_or(rows.end));
        let whole =
            |span: &Range<usize>| reads.mask == Mask::Causal && span.end <= rows.start + 1 && span.start >= lowest;
        let (inside, edges): (Vec<_>, Vec<_>) = spans.partition(whole);
        Self::Blocks { mask: reads.mask, whole: inside.len() * BLOCK_TOKENS, edges, tokens: outside }
    }

    fn count(&self, position: usize, window: Option<usize>) -> usize {
        match self {
            Self::All(mask) => mask.count(position, window),
            Self::From { whole, start } => whole + position + 1 - start,
            Self::Blocks { mask, whole, edges, tokens } => {
                let keys = mask.keys(position, window);
                let within = |span: &Range<usize>| -> usize {
                    keys.iter().map(|k| k.end.min(span.end).saturating_sub(k.start.max(span.start))).sum()
                };
                let upto = |limit: usize| tokens.partition_point(|&t| (t as usize) < limit);
                let tokens: usize = keys.iter().map(|k| upto(k.end) - upto(k.start)).sum();
                whole + edges.iter().map(within).sum::<usize>() + tokens
            }
        }
    }
}

/// Replaces `to` by the tokens that stand in none of the blocks. Both ascend.
pub(crate) fn outside(tokens: &[u32], blocks: &[u32], to: &mut Vec<u32>) {
    to.clear();
    let mut blocks = blocks.iter().copied().peekable();
    for &token in tokens {
        let block = token / BLOCK_TOKENS as u32;
        while blocks.next_if(|&b| b < block).is_some() {}
        if blocks.peek() != Some(&block) {
            to.push(token);
        }
    }
}

/// Which of the rows at these ascending positions are of a run.
pub(crate) fn rows_of(positions: &[u32], run: &Range<usize>) -> Range<usize> {
    let place = |position: usize| positions.partition_point(|&p| (p as usize) < position);
    place(run.start)..place(run.end)
}

/// Cuts rows at the absolute multiples of `step`.
pub fn query_blocks(rows: Range<usize>, step: usize) -> Vec<Range<usize>> {
    let mut runs = Vec::with_capacity(rows.len().div_ceil(step) + 1);
    let mut start = rows.start;
    while start < rows.end {
        let end = ((start / step + 1) * step).min(rows.end);
        runs.push(start..end);
        start = end;
    }
    runs
}
