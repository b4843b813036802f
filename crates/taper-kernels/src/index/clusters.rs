//! Which cluster every key belongs to: the one whose centroid has the largest dot product with it.
//!
//! Source: SAAP (Mazaré et al. 2025, arXiv:2502.08213), section 4; with queries that choose by the centroids themselves
//! it is an inverted file over k-means.

use super::{Extend, Lookup, Part, dims, for_each_part, map_spans};
use crate::decode::{Decode, HeadSelection, Keys, Selection, sink_window};
use crate::gemm::{Gemm, gemm};
use crate::kv::{BLOCK_TOKENS, KvElement, with_kv_element};
use crate::lent::Lent;
use crate::mlp::{PerHead, for_kv_heads};
use crate::parallel;
use crate::rotary::{self, Rotation, Rotations};
use crate::simd::{Isa, Simd, dispatch, exp_line};
use candle_core::{CpuStorage, Result, Storage, Tensor, bail};
use std::ops::Range;

/// Clusters of a head that are ranked on a device, at most.
pub const MOST_ON_DEVICE: usize = 4096;

/// The centroids of one KV head.
#[derive(Debug, Clone)]
pub struct Centroids {
    clusters: usize,
    d: usize,
    /// `[d, padded]`: transposed for the product, zero beyond the clusters.
    pub(crate) transposed: Vec<f32>,
}

impl Centroids {
    /// From rows `[clusters, d]`.
    ///
    /// # Errors
    /// No cluster, more than 65,536, or rows that are not whole.
    pub fn new(rows: &[f32], d: usize) -> Result<Self> {
        let clusters = rows.len() / d.max(1);
        if clusters == 0 || clusters > 1 << 16 || rows.len() != clusters * d {
            bail!("centroids: {} numbers for rows of {d}; expected 1 to 65536 rows", rows.len());
        }
        let padded = clusters.next_multiple_of(32);
        let mut transposed = vec![0.0; d * padded];
        for (c, row) in rows.chunks_exact(d).enumerate() {
            row.iter().enumerate().for_each(|(i, &x)| transposed[i * padded + c] = x);
        }
        Ok(Self { clusters, d, transposed })
    }

    /// How many there are.
    pub fn clusters(&self) -> usize {
        self.clusters
    }

    /// Width of a centroid.
    pub fn dim(&self) -> usize {
        self.d
    }

    /// Dot products `[rows, clusters]` of rows `x` `[rows, d]`.
    pub fn scores(&self, x: &[f32]) -> Vec<f32> {
        let (rows, padded) = (x.len() / self.d, self.transposed.len() / self.d);
        let mut out = vec![0f32; rows * padded];
        let product = &Gemm {
            a: x.as_ptr(),
            lda: self.d,
            b: self.transposed.as_ptr(),
            ldb: padded,
            c: out.as_mut_ptr(),
            ldc: padded,
            m: rows,
            n: padded,
            k: self.d,
        };
        let isa = Isa::best();
        dispatch!(isa, multiply::<_>(product: &Gemm));
        out.chunks_exact(padded).flat_map(|line| line[..self.clusters].iter().copied()).collect()
    }

    /// The cluster of each of rows `x` `[rows, d]`: that of the largest dot product, the first of equals.
    pub fn assign(&self, x: &[f32]) -> Vec<u16> {
        let first_largest = |line: &[f32]| {
            let best = |best: (usize, f32), (i, &x): (usize, &f32)| if x > best.1 { (i, x) } else { best };
            line.iter().enumerate().fold((0, f32::NEG_INFINITY), best).0 as u16
        };
        self.scores(x).chunks_exact(self.clusters).map(first_largest).collect()
    }
}

#[inline(always)]
unsafe fn multiply<V: Simd>(product: &Gemm) {
    unsafe { gemm::<V, false>(product) };
}

/// Takes in rows of the keys `[blocks, kv_heads, 64, head_dim]`; the index is `[blocks, kv_heads, 64, 1]`, i16, the bits of
/// a u16. `unrotate` gives the rotary embedding that is taken off a key first, by position.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn extend(
    index: &Tensor,
    k: &Tensor,
    parts: &[Part],
    centroids: &PerHead<Centroids>,
    unrotate: Option<&Rotations>,
) -> Result<()> {
    let dims = dims(index, k, parts)?;
    let (kv_heads, d, _) = dims;
    if index.dims()[2..] != [BLOCK_TOKENS, 1] || centroids.len() != kv_heads || centroids.iter().any(|c| c.d != d) {
        bail!("clusters: index {:?}, centroids of {} heads for keys {:?}", index.shape(), centroids.len(), k.shape());
    }
    #[cfg(feature = "cuda")]
    if k.device().is_cuda() {
        return Ok(crate::cuda::step::extend_clusters(index, k, parts, centroids, unrotate)?);
    }
    index.inplace_op2(
        k,
        &Extend(|index: &mut _, keys: &_| {
            let CpuStorage::I16(index) = index else { bail!("clusters: an index of another dtype than i16") };
            with_kv_element!(k.dtype(), T => {
                let keys = T::slice(keys).expect("dtype matched");
                for_each_part(dims, keys, index, parts, |part, head, keys, rows| {
                    let new = part.rows.start * d..part.rows.end * d;
                    let mut keys: Vec<f32> = keys[new].iter().map(|x| x.to_f32()).collect();
                    if let Some(of) = unrotate {
                        part.rows.clone().zip(keys.chunks_exact_mut(d)).for_each(|(row, key)| of.at(part.start + row).undo(key));
                    }
                    let clusters = centroids[head].assign(&keys);
                    rows[part.rows.clone()].iter_mut().zip(clusters).for_each(|(to, c)| *to = c as i16);
                });
            });
            Ok(())
        }),
    )
}

/// Scaled products of every query of `q` `[R, q_heads, d]` with the centroids of its KV head: `[R, q_heads, clusters]`; with `turns`
/// `[R]` of the queries as they were before the rotary embedding.
///
/// # Errors
/// Shapes that differ.
pub fn products(centroids: &PerHead<Centroids>, q: &Tensor, turns: Option<&[Rotation]>) -> Result<Lent> {
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        rotary::fit(q, turns)?;
        return Ok(crate::cuda::step::products(centroids, q, turns)?);
    }
    let scaled = |centroids: &Centroids, q: &[f32]| {
        let scale = 1.0 / (centroids.d as f32).sqrt();
        centroids.scores(q).into_iter().map(|x| x * scale).collect()
    };
    Ok(for_kv_heads(&rotary::undo(q, turns)?, centroids, Centroids::dim, Centroids::clusters, scaled)?.into())
}

/// How many of the clusters are read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Probes<'a> {
    /// So many, less where they would hold more than so many keys in all.
    Clusters(usize, usize),
    /// The fewest that hold at least so many keys `[R, kv_heads]`. All there are: everything is read.
    Keys(&'a [usize]),
}

/// The sinks, the window, and of the rest the keys of the clusters that come first by the softmax of `logits`
/// `[R, q_heads, clusters]`, summed over the group; ties go to the earlier cluster.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn select(
    batch: &Decode,
    index: &Tensor,
    logits: &Tensor,
    (sink, window): (usize, usize),
    probes: Probes,
) -> Result<Selection> {
    let (rows, q_heads, kv_heads, _) = batch.dims()?;
    let (logit_rows, logit_heads, clusters) = logits.dims3()?;
    let fits = (logit_rows, logit_heads) == (rows, q_heads) && clusters > 0;
    if !fits || matches!(probes, Probes::Keys(k) if k.len() != rows * kv_heads) {
        bail!("clusters: logits {:?} for {rows} rows of {q_heads} heads", logits.shape());
    }
    #[cfg(feature = "cuda")]
    if batch.q.device().is_cuda() {
        return Ok(crate::cuda::step::probe(batch, index, logits, (sink, window), probes)?.into());
    }
    let logits = logits.flatten_all()?.to_vec1::<f32>()?;
    let group = clusters * (q_heads / kv_heads);
    let preference: Vec<Vec<f32>> = logits.chunks_exact(group).map(|group| shares(group, clusters)).collect();
    let (storage, _) = index.storage_and_layout();
    let Storage::Cpu(CpuStorage::I16(data)) = &*storage else {
        bail!("clusters: index {:?}; expected i16", index.dtype())
    };
    let lookup = &Lookup::new(data, index, kv_heads)?;
    let head = |i: usize| {
        let (row, head) = (&batch.rows[i / kv_heads], i % kv_heads);
        let ranges = sink_window(&row.visible, sink, window)?;
        let between = ranges[0].end..ranges[1].start;
        if matches!(probes, Probes::Keys(k) if k[i] >= between.len()) {
            return None;
        }
        let keys = ClusteredKeys { lookup, table: row.table, head, between: between.clone() };
        let most = if let Probes::Clusters(most, _) = probes { most.min(clusters) } else { clusters };
        let order = ranked(&preference[i]);
        let parts = keys.of(&order[..most], clusters);
        let held = held(&parts, most);
        let count = match probes {
            Probes::Clusters(_, limit) => held.iter().filter(|held| **held <= limit).count(),
            Probes::Keys(k) => usize::from(k[i] > 0) + held.iter().filter(|held| **held < k[i]).count(),
        };
        let ids = first(&parts, count);
        (ids.len() < between.len()).then(|| HeadSelection::Keys(Keys { ranges: ranges.to_vec(), ids, sample: None }))
    };
    Ok(parallel::map(rows * kv_heads, |i| head(i).unwrap_or(HeadSelection::Dense)).into())
}

/// The softmax of each line of `clusters` logits, summed.
fn shares(lines: &[f32], clusters: usize) -> Vec<f32> {
    let (mut sum, mut line, isa) = (vec![0f32; clusters], vec![0f32; clusters], Isa::best());
    for logits in lines.chunks_exact(clusters) {
        line.copy_from_slice(logits);
        let (line, max) = (line.as_mut_slice(), logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        dispatch!(isa, exp_line::<_>(line: &mut [f32], max: f32));
        let total: f32 = line.iter().sum();
        sum.iter_mut().zip(line).for_each(|(sum, x)| *sum += *x / total);
    }
    sum
}

/// Keys between the sinks and the window of one row and KV head, by cluster.
struct ClusteredKeys<'a> {
    lookup: &'a Lookup<'a, i16>,
    table: &'a [u32],
    head: usize,
    between: Range<usize>,
}

impl ClusteredKeys<'_> {
    /// The clusters of some of the keys, block by block, with the first key of each.
    fn blocks(&self, keys: Range<usize>) -> impl Iterator<Item = (usize, &[i16])> {
        self.lookup.blocks(self.table, self.head, BLOCK_TOKENS, keys)
    }

    /// The keys of some of the clusters, of which there are `all`, by spans.
    fn of(&self, some: &[u16], all: usize) -> Vec<RankedKeys> {
        // Those of other clusters rank behind.
        let mut rank = vec![some.len() as u32; all];
        (0..).zip(some).for_each(|(place, &cluster)| rank[cluster as usize] = place);
        map_spans(self.between.clone(), |keys| {
            let mut found = RankedKeys::default();
            for (start, clusters) in self.blocks(keys) {
                // Without a branch that is mostly not taken, and sometimes is.
                let (mut ids, mut ranks, mut count) = ([0u32; BLOCK_TOKENS], [0u32; BLOCK_TOKENS], 0);
                for (id, &c) in (start as u32..).zip(clusters) {
                    let rank = rank[c as u16 as usize];
                    (ids[count % BLOCK_TOKENS], ranks[count % BLOCK_TOKENS]) = (id, rank);
                    count += usize::from(rank < some.len() as u32);
                }
                found.ids.extend_from_slice(&ids[..count]);
                found.ranks.extend_from_slice(&ranks[..count]);
            }
            found
        })
    }
}

/// Keys, ascending, and the places of their clusters among those that were looked for.
#[derive(Default)]
struct RankedKeys {
    ids: Vec<u32>,
    ranks: Vec<u32>,
}

/// The clusters by preference; ties go to the earlier one.
fn ranked(preference: &[f32]) -> Vec<u16> {
    let mut order: Vec<u16> = (0..preference.len()).map(|c| c as u16).collect();
    order.sort_by(|&a, &b| preference[b as usize].total_cmp(&preference[a as usize]));
    order
}

/// How many keys each of the `clusters` looked for and all before it hold.
fn held(keys: &[RankedKeys], clusters: usize) -> Vec<usize> {
    let mut held = vec![0usize; clusters];
    keys.iter().flat_map(|part| &part.ranks).for_each(|&rank| held[rank as usize] += 1);
    (1..clusters).for_each(|i| held[i] += held[i - 1]);
    held
}

/// The keys of the first `count` clusters, ascending.
fn first(keys: &[RankedKeys], count: usize) -> Vec<u32> {
    let mut ids = vec![0; keys.iter().map(|part| part.ids.len()).sum()];
    let mut read = 0;
    for (id, rank) in keys.iter().flat_map(|part| &part.ids).zip(keys.iter().flat_map(|part| &part.ranks)) {
        ids[read] = *id;
        read += usize::from((*rank as usize) < count);
    }
    ids.truncate(read);
    ids
}
