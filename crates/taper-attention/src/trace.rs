//! What attention did head by head and token by token, kept for a request that wants it shown (`attention.trace`).

use crate::layer::AttentionShape;
use crate::method::KeyCounts;
use serde::Serialize;
use std::ops::Range;
use std::sync::Arc;
use taper_kernels::decode::{HeadSelection, Keys};

/// Most rows that are kept one by one.
const ROWS: usize = 1024;

/// Most runs of keys that are kept of all rows together.
const RUNS: usize = 1 << 17;

/// One phase of a sequence. A clone shares the rows that are whole.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trace {
    kv_heads: usize,
    /// Rows before this position are only summed.
    first: usize,
    /// (query, key) pairs read and there `[layers, kv_heads]`.
    pairs: Vec<(u64, u64)>,
    /// Rows of the decode method by position, ascending.
    rows: Vec<Arc<Row>>,
    runs: usize,
}

/// One token that the decode method attended for.
#[derive(Debug, Clone, Default)]
struct Row {
    position: usize,
    read: u64,
    there: u64,
    /// (layer, KV head) pairs.
    heads: u64,
    error: f64,
    errors: u64,
    reads: Reads,
}

/// Which keys a row reads.
#[derive(Debug, Clone)]
enum Reads {
    /// By how many (layer, KV head) pairs each key is read, less by how many the one before it, while the row's step lasts.
    Steps(Vec<i32>),
    /// The same in runs: first key, keys, pairs.
    Runs(Vec<(u32, u32, u32)>),
    /// Not known, or too many runs.
    Unknown,
}

impl Default for Reads {
    fn default() -> Self {
        Self::Steps(Vec::new())
    }
}

impl Trace {
    /// Of nothing yet. The last row of the prompt makes the answer's first token; those before it are not kept one by one.
    pub fn new(prompt: usize) -> Self {
        Self { first: prompt.saturating_sub(1), ..Self::default() }
    }

    /// Takes in what the rows at these positions of a prompt read in one layer.
    pub fn add_prompt(&mut self, shape: &AttentionShape, layer: usize, keys: &KeyCounts, there: u64) {
        let group = shape.group();
        for (head, read) in keys.by_head(shape.kv_heads, group).into_iter().enumerate() {
            self.add(layer, shape.kv_heads, head, (read, there * group as u64));
        }
    }

    /// Takes in what rows that see so many keys read in one layer, `heads` `[rows, kv_heads]` where that is known; `counts`
    /// `[rows, kv_heads]`.
    pub fn add_rows(
        &mut self,
        layer: usize,
        heads: Option<&[HeadSelection]>,
        counts: &[usize],
        visible: &[Range<usize>],
    ) {
        let kv_heads = counts.len() / visible.len().max(1);
        for (i, &count) in counts.iter().enumerate() {
            let visible = &visible[i / kv_heads];
            self.add(layer, kv_heads, i % kv_heads, (count as u64, visible.len() as u64));
            if let Some(row) = self.row(visible.end - 1) {
                row.read += count as u64;
                row.there += visible.len() as u64;
                row.heads += 1;
                match heads {
                    Some(heads) => row.reads.add(&heads[i], visible),
                    None if count == visible.len() => row.reads.add(&HeadSelection::Dense, visible),
                    None => row.reads = Reads::Unknown,
                }
            }
        }
    }

    /// Takes in audited errors of the row at a position.
    pub fn add_errors(&mut self, position: usize, errors: &[f32]) {
        if let Some(row) = self.row(position) {
            row.error += errors.iter().map(|&error| f64::from(error)).sum::<f64>();
            row.errors += errors.len() as u64;
        }
    }

    /// The step is over: its rows are whole.
    pub fn settle(&mut self) {
        let whole = |row: &Arc<Row>| matches!(row.reads, Reads::Runs(_) | Reads::Unknown);
        let first = self.rows.iter().rposition(whole).map_or(0, |last| last + 1);
        for row in &mut self.rows[first..] {
            let row = Arc::make_mut(row);
            row.reads.settle(RUNS - self.runs);
            self.runs += row.reads.runs();
        }
    }

    /// Forgets the rows from a position on.
    pub fn truncate(&mut self, tokens: usize) {
        let gone = self.rows.split_off(self.rows.partition_point(|row| row.position < tokens));
        self.runs -= gone.iter().map(|row| row.reads.runs()).sum::<usize>();
    }

    fn add(&mut self, layer: usize, kv_heads: usize, head: usize, (read, there): (u64, u64)) {
        self.kv_heads = kv_heads;
        let place = layer * kv_heads + head;
        if self.pairs.len() <= place {
            self.pairs.resize(place + 1, (0, 0));
        }
        self.pairs[place].0 += read;
        self.pairs[place].1 += there;
    }

    /// The row of a position, unless it comes too early or there are too many.
    fn row(&mut self, position: usize) -> Option<&mut Row> {
        if position < self.first {
            return None;
        }
        let place = self.rows.partition_point(|row| row.position < position);
        if self.rows.get(place).is_none_or(|row| row.position != position) {
            if self.rows.len() >= ROWS {
                return None;
            }
            self.rows.insert(place, Arc::new(Row { position, ..Row::default() }));
        }
        Some(Arc::make_mut(&mut self.rows[place]))
    }

    fn density(&self) -> Option<Vec<Vec<f32>>> {
        if self.pairs.is_empty() {
            return None;
        }
        let share = |&(read, there): &(u64, u64)| read as f32 / there.max(1) as f32;
        Some(self.pairs.chunks(self.kv_heads).map(|heads| heads.iter().map(share).collect()).collect())
    }
}

impl Reads {
    fn add(&mut self, head: &HeadSelection, visible: &Range<usize>) {
        let Self::Steps(steps) = self else { return };
        if steps.is_empty() {
            steps.resize(visible.end + 1, 0);
        }
        let mut run = |start: usize, end: usize| {
            steps[start] += 1;
            steps[end] -= 1;
        };
        match head {
            HeadSelection::Dense => run(visible.start, visible.end),
            HeadSelection::Values(values) => values.ids.iter().for_each(|&id| run(id as usize, id as usize + 1)),
            HeadSelection::Keys(Keys { ranges, ids, sample }) => {
                ranges.iter().for_each(|range| run(range.start, range.end));
                // All heads of the group read what its neediest one does.
                let sample = sample.iter().flat_map(|s| &s.ids[..s.counts.iter().copied().max().unwrap_or(0)]);
                ids.iter().chain(sample).for_each(|&id| run(id as usize, id as usize + 1));
            }
        }
    }

    /// Runs kept.
    fn runs(&self) -> usize {
        match self {
            Self::Runs(runs) => runs.len(),
            Self::Steps(_) | Self::Unknown => 0,
        }
    }

    fn settle(&mut self, most: usize) {
        let Self::Steps(steps) = self else { return };
        let (mut runs, mut count): (Vec<(u32, u32, u32)>, i32) = (Vec::new(), 0);
        for (key, step) in steps.iter().enumerate() {
            count += step;
            match runs.last_mut() {
                Some((_, keys, last)) if *last == count as u32 => *keys += 1,
                _ => runs.push((key as u32, 1, count as u32)),
            }
        }
        runs.retain(|&(_, _, count)| count > 0);
        *self = if runs.len() <= most { Self::Runs(runs) } else { Self::Unknown };
    }
}

/// What attention did, head by head and token by token.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TraceUsage {
    /// Decoder layers.
    pub layers: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// The prompt; absent where none of its rows was computed.
    pub prefill: Option<HeadsUsage>,
    /// What the decode method attended for; absent where that is nothing.
    pub decode: Option<HeadsUsage>,
    /// The first 1,024 tokens that the decode method attended for, from the prompt's last one on. The one at position p
    /// made the token at p + 1; an answer's first token is made by the prompt's last.
    pub tokens: Vec<TokenUsage>,
}

/// One phase, head by head.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HeadsUsage {
    /// Share of (query, key) pairs read `[layers, kv_heads]`.
    pub density: Vec<Vec<f32>>,
}

/// One token that the decode method attended for.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenUsage {
    /// Its position in the sequence.
    pub position: usize,
    /// Keys read, on average over layers and KV heads.
    pub budget: f32,
    /// They as a share of those that there are.
    pub density: f32,
    /// Mean relative error over audited layers and query heads; absent where none was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<f32>,
    /// Which keys: runs of (first position, keys, by how many (layer, KV head) pairs each is read). Absent where only the
    /// device knows, and beyond 131,072 runs in one answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reads: Option<Vec<(u32, u32, u32)>>,
}

impl TraceUsage {
    pub(crate) fn new(prefill: &Trace, decode: &Trace) -> Self {
        let some = if prefill.pairs.is_empty() { decode } else { prefill };
        let heads = |trace: &Trace| trace.density().map(|density| HeadsUsage { density });
        let token = |row: &Arc<Row>| TokenUsage {
            position: row.position,
            budget: row.read as f32 / row.heads.max(1) as f32,
            density: row.read as f32 / row.there.max(1) as f32,
            error: (row.errors > 0).then(|| (row.error / row.errors as f64) as f32),
            reads: match &row.reads {
                Reads::Runs(runs) => Some(runs.clone()),
                Reads::Steps(_) | Reads::Unknown => None,
            },
        };
        Self {
            layers: some.pairs.len() / some.kv_heads.max(1),
            kv_heads: some.kv_heads,
            prefill: heads(prefill),
            decode: heads(decode),
            tokens: decode.rows.iter().map(token).collect(),
        }
    }
}
