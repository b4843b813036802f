//! One KV head of one sequence with the query heads that share it: scores, far keys, attention mass.

use super::capture::Captured;
use candle_core::{Device, Result, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// Which keys are far from a query: neither sinks nor within the window, which are read whatever they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Far {
    /// Tokens at the start.
    pub sink: usize,
    /// Most recent tokens, the query's own included.
    pub window: usize,
    /// The model's own sliding window.
    pub visible: Option<usize>,
}

impl Far {
    /// The far keys of the query at a position.
    pub fn range(&self, position: usize) -> Range<usize> {
        let seen = position + 1 - self.visible.unwrap_or(position + 1).min(position + 1);
        let (start, end) = (self.sink.max(seen), (position + 1).saturating_sub(self.window));
        start..end.max(start)
    }
}

/// One KV head of one sequence.
pub(super) struct Head<'a> {
    captured: &'a Captured,
    kv_head: usize,
    /// Query heads that share it.
    pub group: usize,
}

/// The scores of a position's queries.
pub(super) struct Row<'a> {
    /// Place among the rows that were captured.
    pub index: usize,
    /// The far keys.
    pub far: Range<usize>,
    /// Scaled scores of each query head of the group, of all keys up to the row's own.
    scores: Vec<&'a [f32]>,
}

/// Rows whose scores are computed together.
const ROWS: usize = 64;

impl<'a> Head<'a> {
    pub fn new(captured: &'a Captured, kv_head: usize) -> Self {
        Self { captured, kv_head, group: captured.q.len() / captured.k.len() }
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.captured.head_dim
    }

    /// Rows whose queries there are.
    pub fn rows(&self) -> usize {
        self.captured.rows.len()
    }

    /// The keys `[tokens, head_dim]`, after the rotary embedding or before it.
    pub fn keys(&self, rotated: bool) -> Vec<f32> {
        let mut keys = self.captured.k[self.kv_head].clone();
        if !rotated {
            self.captured.unrotate(&mut keys, 0..);
        }
        keys
    }

    /// The queries `[rows, head_dim]` of one head of the group, after the rotary embedding or before it.
    pub fn queries(&self, of_group: usize, rotated: bool) -> Vec<f32> {
        let mut queries = self.captured.q[self.kv_head * self.group + of_group].clone();
        if !rotated {
            self.captured.unrotate(&mut queries, self.captured.rows.iter().map(|&p| p as usize));
        }
        queries
    }

    /// Looks at every row, in parallel, and returns what was made of them in their order.
    ///
    /// # Errors
    /// candle's.
    pub fn map<T: Send>(&self, far: &Far, look: impl Fn(&Row) -> T + Sync) -> Result<Vec<T>> {
        let (d, rows) = (self.head_dim(), &self.captured.rows);
        let keys = Tensor::from_slice(&self.captured.k[self.kv_head], (self.captured.tokens, d), &Device::Cpu)?;
        let scale = 1.0 / (d as f64).sqrt();
        let mut all = Vec::with_capacity(rows.len());
        for first in (0..rows.len()).step_by(ROWS) {
            let count = ROWS.min(rows.len() - first);
            // Keys beyond the block's last row are of no use to it.
            let width = rows[first + count - 1] as usize + 1;
            let part = |g: usize| &self.captured.q[self.kv_head * self.group + g][first * d..(first + count) * d];
            let queries: Vec<f32> = (0..self.group).flat_map(part).map(|x| (f64::from(*x) * scale) as f32).collect();
            let queries = Tensor::from_vec(queries, (self.group * count, d), &Device::Cpu)?;
            let scores = queries.matmul(&keys.narrow(0, 0, width)?.t()?)?.flatten_all()?.to_vec1::<f32>()?;
            let row = |i: usize| {
                let position = rows[first + i] as usize;
                let scores = (0..self.group).map(|g| &scores[(g * count + i) * width..][..=position]).collect();
                look(&Row { index: first + i, far: far.range(position), scores })
            };
            all.par_extend((0..count).into_par_iter().map(row));
        }
        Ok(all)
    }
}

impl Row<'_> {
    /// Query heads.
    pub fn heads(&self) -> usize {
        self.scores.len()
    }

    /// A head's scores of the far keys.
    pub fn far_scores(&self, head: usize) -> &[f32] {
        &self.scores[head][self.far.clone()]
    }

    /// Whether a head looks far: its best key is a far one. Sinks do not count, since they score high for every query.
    pub fn looks_far(&self, head: usize) -> bool {
        let best = |scores: &[f32]| scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        !self.far.is_empty() && best(self.far_scores(head)) >= best(&self.scores[head][self.far.end..])
    }

    /// A head's attention over the far keys alone.
    pub fn far_mass(&self, head: usize) -> Vec<f32> {
        let mut mass = self.far_scores(head).to_vec();
        softmax(&mut mass);
        mass
    }
}

/// Softmax of a line, in place.
pub(super) fn softmax(line: &mut [f32]) {
    let max = line.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    line.iter_mut().for_each(|x| *x = (*x - max).exp());
    let sum: f32 = line.iter().sum();
    line.iter_mut().for_each(|x| *x /= sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_keys_are_between_sinks_and_window() {
        let far = Far { sink: 2, window: 3, visible: None };
        assert_eq!((far.range(1), far.range(4), far.range(5), far.range(9)), (2..2, 2..2, 2..3, 2..7));
        let sliding = Far { visible: Some(6), ..far };
        assert_eq!((sliding.range(5), sliding.range(9)), (2..3, 4..7));
    }

    #[test]
    fn rows_see_their_own_past() {
        // Two query heads, keys 0, 1, 2, … in the first dimension.
        let k = (0..200).flat_map(|i| [i as f32, 0.0, 0.0, 0.0]).collect();
        let rows: Vec<u32> = (100..200).collect();
        let line = |x: f32| rows.iter().flat_map(|_| [x, 0.0, 0.0, 0.0]).collect();
        let captured = Captured {
            tokens: 200,
            head_dim: 4,
            k: vec![k],
            q: vec![line(2.0), line(-2.0)],
            rows: rows.clone(),
            rotary: (vec![0.0; 2], 1.0),
        };
        let head = Head::new(&captured, 0);
        let far = Far { sink: 1, window: 10, visible: None };
        let seen = head
            .map(&far, |row| {
                let (scores, last) = (row.far_scores(0), row.far.len() - 1);
                assert_eq!((scores[0], scores[last], row.heads()), (1.0, (row.far.end - 1) as f32, 2));
                assert!((row.far_mass(1)[0] - (1.0 - (-1.0f32).exp())).abs() < 1e-4);
                (row.index, row.far.end, row.looks_far(0), row.looks_far(1))
            })
            .unwrap();
        let expected: Vec<_> = (0..100).map(|i| (i, 91 + i, false, true)).collect();
        assert_eq!(seen, expected);
    }
}
