//! Double Sparsity: the channels of each KV head whose products count most.
//!
//! Source: Double Sparsity (Yang et al. 2024, arXiv:2408.07092), section 3: channels are ranked by the mean of |q·k| over
//! tokens, each token's query with its own key, after the rotary embedding, as in the authors' code. Ours: one list for
//! a KV head, from the sum over its query heads.

use super::head::{Far, Head, softmax};
use super::recall::{Recall, Tally, rank};
use candle_core::Result;
use taper_attention::AttentionShape;

/// Sums of |q_j·k_j| of one layer `[kv_heads, head_dim]`.
#[derive(Debug, Clone, Default)]
pub(super) struct Channels(Vec<f64>);

impl Channels {
    /// Takes in tokens: `q` `[T, q_heads, head_dim]`, `k` `[T, kv_heads, head_dim]`.
    pub fn add(&mut self, shape: &AttentionShape, q: &[f32], k: &[f32]) {
        let (d, group) = (shape.head_dim, shape.group());
        self.0.resize(shape.kv_heads * d, 0.0);
        for (q, k) in q.chunks_exact(shape.q_heads * d).zip(k.chunks_exact(shape.kv_heads * d)) {
            for (head, q) in q.chunks_exact(d).enumerate() {
                let at = head / group * d;
                let sums = &mut self.0[at..at + d];
                sums.iter_mut().zip(q).zip(&k[at..at + d]).for_each(|((sum, q), k)| *sum += f64::from((q * k).abs()));
            }
        }
    }

    /// The first `count` channels of each KV head `[kv_heads][count]`, ascending.
    pub fn best(&self, shape: &AttentionShape, count: usize) -> Vec<Vec<u32>> {
        let best = |sums: &[f64]| {
            let mut order: Vec<u32> = (0..sums.len() as u32).collect();
            order.sort_by(|&a, &b| sums[b as usize].total_cmp(&sums[a as usize]));
            order.truncate(count);
            order.sort_unstable();
            order
        };
        self.0.chunks_exact(shape.head_dim).map(best).collect()
    }
}

/// Recall of far attention mass by the keys that score highest over the channels, and by those that score highest.
///
/// # Errors
/// candle's.
pub(super) fn recalls(heads: &[(Head, &[u32])], far: &Far) -> Result<Vec<Recall>> {
    let (mut own, mut oracle) = (Tally::default(), Tally::default());
    for (head, channels) in heads {
        let (d, width) = (head.head_dim(), channels.len());
        let pick = |x: Vec<f32>| -> Vec<f32> {
            x.chunks_exact(d).flat_map(|x| channels.iter().map(|&c| x[c as usize])).collect()
        };
        let labels = pick(head.keys(true));
        let queries: Vec<Vec<f32>> = (0..head.group).map(|g| pick(head.queries(g, true))).collect();
        let scale = 1.0 / (d as f32).sqrt();
        let importance = |index: usize, range: &std::ops::Range<usize>| {
            let mut sum = vec![0f32; range.len()];
            for queries in &queries {
                let q = &queries[index * width..(index + 1) * width];
                let labels = labels[range.start * width..range.end * width].chunks_exact(width);
                let mut line: Vec<f32> =
                    labels.map(|k| k.iter().zip(q).map(|(k, q)| k * q).sum::<f32>() * scale).collect();
                softmax(&mut line);
                sum.iter_mut().zip(line).for_each(|(sum, x)| *sum += x);
            }
            sum
        };
        for (a, b) in head.map(far, |row| rank(row, |row| importance(row.index, &row.far)))? {
            own.add(&a);
            oracle.add(&b);
        }
    }
    Ok(vec![own.named("channels"), oracle.named("oracle keys")])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_whose_products_are_large_come_first() {
        let shape = AttentionShape { layers: 1, q_heads: 4, kv_heads: 2, head_dim: 4, window: None };
        let mut channels = Channels::default();
        // Head 0: channel 3 of the first query head, 1 of the second; head 1: channels 0 and 2, whatever their sign.
        let q = [[0., 0., 0., 9.], [1., 8., 0., 0.], [-7., 0., 1., 0.], [0., 0., -6., 0.]].concat();
        let k = [[1., 1., 1., 1.], [1., 2., 1., 2.]].concat();
        channels.add(&shape, &q, &k);
        channels.add(&shape, &q, &k);
        assert_eq!(channels.best(&shape, 2), [[1, 3], [0, 2]]);
        // The sum over the group decides, not each head's own order.
        assert_eq!(channels.best(&shape, 1), [[3], [0]]);
        assert_eq!(channels.best(&shape, 4)[0], [0, 1, 2, 3]);
    }
}
