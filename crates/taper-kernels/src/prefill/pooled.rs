//! Blocks of keys ranked by means: of the queries of a query block, of the keys of a block.

use super::selection::{HeadReads, Lists, rows_of};
use super::tile::{Dims, Operands, base_of};
use super::{Mask, Reads, Rows};
use crate::kv::{BLOCK_TOKENS, KvElement, with_kv_element};
use crate::parallel::{self, SharedMut};
use crate::simd::{Isa, Simd, dispatch, dot};
use candle_core::{CpuStorage, Result, bail};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// For each query head asked for `(head, keep)`, the blocks that the rows of each run read: their own and the best
/// `keep - 1` of those before it by mean query · mean key; of equals the first. A run lies within one block of 64
/// positions; its mean is that of its rows, and a block's that of its keys up to the last row. Returns what each of these
/// heads reads, and how many products of means it took. On a device lists stay there,
/// unless rows have a window.
///
/// # Errors
/// As [`prefill`](super::prefill); a head that is not there, a run without rows or over several blocks.
///
/// # Source
/// MInference, Algorithm 3 (block-sparse), with a row's own block always kept.
pub fn pooled(rows: &Rows, runs: &[Range<usize>], heads: &[(usize, usize)]) -> Result<(Vec<HeadReads>, u64)> {
    let dims = rows.dims()?;
    let members = members(rows, &dims, runs, heads)?;
    #[cfg(feature = "cuda")]
    if rows.q.device().is_cuda() {
        return Ok(crate::cuda::pooled(rows, runs, &members, heads)?);
    }
    let (lists, products) = pooled_with(Isa::best(), rows, &dims, (runs, &members), heads)?;
    Ok((lists.into_iter().map(HeadReads::blocks).collect(), products))
}

/// The rows of each run.
fn members(rows: &Rows, dims: &Dims, runs: &[Range<usize>], heads: &[(usize, usize)]) -> Result<Vec<Range<usize>>> {
    if let Some((head, _)) = heads.iter().find(|(head, _)| *head >= dims.q_heads) {
        bail!("pooled: head {head} of {}", dims.q_heads);
    }
    let members: Vec<Range<usize>> = runs.iter().map(|run| rows_of(rows.positions, run)).collect();
    for (run, members) in runs.iter().zip(&members) {
        if members.is_empty() || run.start / BLOCK_TOKENS != (run.end - 1) / BLOCK_TOKENS {
            bail!("pooled: the run {run:?} of {} rows; expected rows of one block", members.len());
        }
    }
    Ok(members)
}

fn pooled_with(
    isa: Isa,
    rows: &Rows,
    dims: &Dims,
    (runs, members): (&[Range<usize>], &[Range<usize>]),
    heads: &[(usize, usize)],
) -> Result<(Vec<Lists>, u64)> {
    let blocks = rows.tokens().div_ceil(BLOCK_TOKENS);
    let d = dims.head_dim;
    let products = AtomicU64::new(0);
    let mut chosen: Vec<Vec<u32>> = vec![Vec::new(); heads.len() * runs.len()];
    rows.with_storage(|q, k, v| {
        let mut keys = vec![0f32; dims.kv_heads * blocks * d];
        with_kv_element!(rows.kv.k.dtype(), T => {
            let reads = Reads::Mask(Mask::Causal);
            means_of_keys::<T>(&Operands::new(rows, &reads, dims, (q, k, v)), blocks, &mut keys);
        });
        let shared = SharedMut::new(&mut chosen);
        parallel::for_each(
            heads.len() * runs.len(),
            || (Vec::new(), Vec::new()),
            |(mean, scores), unit| {
                let (at, run) = (unit / runs.len(), unit % runs.len());
                let (head, keep) = heads[at];
                mean_of_queries(dims, q, members[run].clone(), head, mean);
                let own = runs[run].start / BLOCK_TOKENS;
                let lowest = Mask::Causal.keys(runs[run].start, rows.window)[1].start / BLOCK_TOKENS;
                let earlier = lowest.min(own)..own;
                let keys = &keys[head / dims.group * blocks * d..][earlier.start * d..earlier.end * d];
                scores.clear();
                scores.resize(earlier.len(), 0.0);
                // Where all are kept there is nothing to rank.
                if keep <= earlier.len() {
                    let (mean, scores) = (mean.as_slice(), scores.as_mut_slice());
                    products.fetch_add(scores.len() as u64, Ordering::Relaxed);
                    dispatch!(isa, rank::<_>(mean: &[f32], keys: &[f32], scores: &mut [f32]));
                }
                let mut order: Vec<u32> = earlier.clone().map(|block| block as u32).collect();
                order.sort_by(|&a, &b| {
                    let score = |block: u32| scores[block as usize - earlier.start];
                    score(b).total_cmp(&score(a))
                });
                order.truncate(keep.saturating_sub(1));
                order.push(own as u32);
                order.sort_unstable();
                // SAFETY: a unit has its own list.
                unsafe { shared.slice(unit, 1)[0] = order };
            },
        );
        Ok(())
    })?;
    let lists = chosen.chunks(runs.len().max(1)).map(|lists| lists.iter().map(|list| list.iter().copied()).collect());
    Ok((lists.collect(), products.into_inner()))
}

/// Means of keys `[kv_heads, blocks, head_dim]`; the last block's are of the tokens that there are.
fn means_of_keys<T: KvElement>(with: &Operands<&CpuStorage>, blocks: usize, means: &mut [f32]) {
    let (dims, n) = (with.dims, with.rows.tokens());
    let k = T::slice(with.k).expect("the caller matched the dtype");
    let (d, shared) = (dims.head_dim, SharedMut::new(means));
    parallel::for_each(
        dims.kv_heads * blocks,
        || (),
        |(), unit| {
            let (kv_head, block) = (unit / blocks, unit % blocks);
            let tokens = BLOCK_TOKENS.min(n - block * BLOCK_TOKENS);
            // SAFETY: a unit has its own block and head.
            let mean = unsafe { shared.slice(unit * d, d) };
            for key in k[base_of(with, kv_head, block)..][..tokens * d].chunks_exact(d) {
                mean.iter_mut().zip(key).for_each(|(mean, key)| *mean += key.to_f32());
            }
            mean.iter_mut().for_each(|mean| *mean /= tokens as f32);
        },
    );
}

fn mean_of_queries(dims: &Dims, q: &[f32], rows: Range<usize>, head: usize, mean: &mut Vec<f32>) {
    mean.clear();
    mean.resize(dims.head_dim, 0.0);
    let count = rows.len() as f32;
    for row in rows {
        let q = &q[(row * dims.q_heads + head) * dims.head_dim..][..dims.head_dim];
        mean.iter_mut().zip(q).for_each(|(mean, q)| *mean += q);
    }
    mean.iter_mut().for_each(|mean| *mean /= count);
}

#[inline(always)]
unsafe fn rank<V: Simd>(mean: &[f32], keys: &[f32], scores: &mut [f32]) {
    for (key, score) in keys.chunks_exact(mean.len()).zip(scores) {
        *score = unsafe { dot::<V>(mean, key) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefill::query_blocks;
    use crate::testing::{Cache, Numbers};
    use candle_core::DType;

    #[test]
    fn the_best_blocks_are_those_of_plain_means() {
        for isa in Isa::available() {
            for (window, start) in [(None, 0), (Some(200), 0), (None, 130)] {
                let (n, d) = (457usize, 24);
                let mut numbers = Numbers(5);
                let cache = Cache::new(&mut numbers, n, 2, d, DType::F16);
                let positions: Vec<u32> = (start as u32..n as u32).collect();
                let q = numbers.tensor(&[positions.len(), 4, d]);
                let rows = Rows { q: &q, kv: cache.kv(), table: &cache.table, positions: &positions, window };
                let runs = query_blocks(start..n, BLOCK_TOKENS);
                let asked = [(3, 3), (0, 1), (1, 100), (2, 4)];
                let dims = rows.dims().unwrap();
                let members = members(&rows, &dims, &runs, &asked).unwrap();
                let (lists, products) = pooled_with(isa, &rows, &dims, (&runs, &members), &asked).unwrap();
                let q = q.to_vec3::<f32>().unwrap();
                let mean = |all: Vec<&Vec<f32>>| -> Vec<f64> {
                    let sum = |c: usize| all.iter().map(|x| f64::from(x[c])).sum::<f64>() / all.len() as f64;
                    (0..d).map(sum).collect()
                };
                let mut expected_products = 0;
                for ((head, keep), lists) in asked.into_iter().zip(lists) {
                    for (at, run) in runs.iter().enumerate() {
                        let query = mean(run.clone().map(|p| &q[p - start][head]).collect());
                        let own = run.start / 64;
                        let lowest = window.map_or(0, |w| (run.start + 1).saturating_sub(w)) / 64;
                        let score = |block: usize| -> f64 {
                            let keys = (block * 64..n.min(block * 64 + 64)).map(|k| &cache.keys[k][head / 2]).collect();
                            query.iter().zip(mean(keys)).map(|(a, b)| a * b).sum()
                        };
                        let mut earlier: Vec<usize> = (lowest..own).collect();
                        expected_products += if keep <= earlier.len() { earlier.len() as u64 } else { 0 };
                        earlier.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
                        let mut expected: Vec<u32> = earlier.iter().take(keep - 1).map(|&b| b as u32).collect();
                        expected.push(own as u32);
                        expected.sort_unstable();
                        assert_eq!(lists.get(at), expected, "{isa:?} head {head} rows {run:?}");
                    }
                }
                assert_eq!(products, expected_products);
                assert!(pooled(&rows, &runs, &[(4, 1)]).is_err());
                assert!(pooled(&rows, &query_blocks(0..65, 128), &[(0, 1)]).is_err());
            }
        }
    }
}
