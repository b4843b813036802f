//! Hierarchical probing: chunks of keys ranked by a few keys that a search by halves looks at.

use super::selection::{HeadReads, Lists, rows_of};
use super::tile::{Columns, Dims, Operands, unpack_keys};
use super::{Mask, Reads, Rows};
use crate::gemm::{Gemm, gemm};
use crate::kv::{BLOCK_TOKENS, KvElement, with_kv_element};
use crate::parallel::{self, SharedMut};
use crate::simd::{Isa, Simd, dispatch};
use candle_core::{Result, bail};
use std::ops::Range;

/// Chunks are ranked by their probes, and the best are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stage {
    /// Tokens of a chunk: a power of two, 2 to 4096, below that of the stage before.
    pub chunk: usize,
    /// Tokens that are kept.
    pub keep: usize,
}

/// What is read besides the chunks, and how those are found.
#[derive(Debug, Clone, PartialEq)]
pub struct Hierarchy {
    /// Tokens at the start of the sequence that are always read, rounded up to whole blocks of 64.
    pub sink: usize,
    /// Tokens before a query's block that are always read, rounded up to whole blocks.
    pub window: usize,
    /// Neighbouring queries, by absolute position, whose mean looks for keys.
    pub average: usize,
    /// One after the other, over what the one before kept.
    pub stages: Vec<Stage>,
    /// With fewer tokens to choose from, every stage keeps proportionally less; 0 for never.
    pub full_at: usize,
}

/// For each KV head, what the rows of each run read: sinks, window, and the tokens between that the stages keep. A chunk's
/// score is the largest product of a mean query of the run, over the query heads of the KV head, with a key that was
/// looked at; of equals the first is kept. What a run reads depends on its own rows and their positions alone. Returns
/// how many products it took, too.
///
/// # Errors
/// As [`prefill`](super::prefill); a run without rows, stages that cannot be.
///
/// # Source
/// HiP Attention (Lee et al. 2024, arXiv:2406.09827 and arXiv:2502.08910): mask selection by representative keys.
pub fn probe(rows: &Rows, runs: &[Range<usize>], hierarchy: &Hierarchy) -> Result<(Vec<HeadReads>, u64)> {
    #[cfg(feature = "cuda")]
    if rows.q.device().is_cuda() {
        rows.dims()?;
        return Ok(crate::cuda::probe(rows, runs, &members(rows, runs, hierarchy)?, hierarchy)?);
    }
    probe_with(Isa::best(), rows, runs, hierarchy)
}

/// The rows of each run.
fn members(rows: &Rows, runs: &[Range<usize>], hierarchy: &Hierarchy) -> Result<Vec<Range<usize>>> {
    let possible = |stage: &Stage| stage.chunk.is_power_of_two() && (2..=4096).contains(&stage.chunk);
    let falling = hierarchy.stages.windows(2).all(|pair| pair[1].chunk < pair[0].chunk);
    if hierarchy.average == 0 || !hierarchy.stages.iter().all(possible) || !falling {
        bail!("probe: {hierarchy:?}; chunks are falling powers of two between 2 and 4096");
    }
    let members: Vec<Range<usize>> = runs.iter().map(|run| rows_of(rows.positions, run)).collect();
    match members.iter().position(Range::is_empty) {
        Some(at) => bail!("probe: the run {:?} without rows", runs[at]),
        None => Ok(members),
    }
}

/// How many of the rows at these positions each mean query is of, one after the other.
pub(crate) fn neighbours(positions: &[u32], average: usize) -> impl Iterator<Item = usize> {
    positions.chunk_by(move |a, b| *a as usize / average == *b as usize / average).map(<[u32]>::len)
}

/// What a run reads whatever its queries say, and what it may choose from.
pub(crate) struct Reach {
    /// Blocks at the start that are read.
    pub sinks: usize,
    /// Tokens to choose from: whole blocks.
    pub searched: Range<usize>,
    /// The block of the run's last row; all from the end of the search on are read.
    pub last: usize,
    /// Tokens that each stage keeps.
    pub keep: Vec<usize>,
}

impl Hierarchy {
    /// That of a run, of a model with a window or without.
    pub(crate) fn reach(&self, run: &Range<usize>, window: Option<usize>) -> Reach {
        let whole = |tokens: usize| tokens.next_multiple_of(BLOCK_TOKENS);
        let near = (run.start / BLOCK_TOKENS * BLOCK_TOKENS).saturating_sub(whole(self.window));
        // Beyond the model's own window there is nothing to look for.
        let seen = Mask::Causal.keys(run.start, window)[1].start / BLOCK_TOKENS * BLOCK_TOKENS;
        let far = whole(self.sink).max(seen).min(near);
        let share = ((near - far) as f64 / self.full_at.max(1) as f64).min(1.0);
        let keep = |stage: &Stage| match self.full_at {
            0 => stage.keep,
            _ => (stage.keep as f64 * share).ceil() as usize,
        };
        Reach {
            sinks: whole(self.sink).min(near) / BLOCK_TOKENS,
            searched: far..near,
            last: (run.end - 1) / BLOCK_TOKENS,
            keep: self.stages.iter().map(keep).collect(),
        }
    }
}

/// What a run reads.
#[derive(Debug, Clone, Default, PartialEq)]
struct Found {
    blocks: Vec<u32>,
    tokens: Vec<u32>,
    /// Products of a mean query and a key.
    products: u64,
}

fn probe_with(isa: Isa, rows: &Rows, runs: &[Range<usize>], hierarchy: &Hierarchy) -> Result<(Vec<HeadReads>, u64)> {
    let dims = rows.dims()?;
    let members = members(rows, runs, hierarchy)?;
    let mut found = vec![Found::default(); runs.len() * dims.kv_heads];
    rows.with_storage(|q, k, v| {
        with_kv_element!(rows.kv.k.dtype(), T => {
            let reads = Reads::Mask(Mask::Causal);
            let storage = (T::slice(k).expect("dtype matched"), T::slice(v).expect("dtype matched"));
            let with = &Operands { rows, reads: &reads, dims: &dims, q, k: storage.0, v: storage.1 };
            let shared = SharedMut::new(&mut found);
            // Later runs have more to look at: longest first keeps the threads level.
            parallel::for_each(runs.len() * dims.kv_heads, Scratch::default, |s, unit| {
                let (run, kv_head) = (runs.len() - 1 - unit / dims.kv_heads, unit % dims.kv_heads);
                mean_queries(with, members[run].clone(), kv_head, hierarchy.average, s);
                let search = &Search { with, kv_head, run: &runs[run], hierarchy };
                dispatch!(isa, search_run::<_, T: KvElement>(search: &Search<T>, s: &mut Scratch));
                // SAFETY: a unit has its own run and head.
                unsafe { shared.slice(kv_head * runs.len() + run, 1)[0] = std::mem::take(&mut s.found) };
            });
        });
        Ok(())
    })?;
    let of_head = |found: &[Found]| HeadReads {
        mask: Mask::Causal,
        blocks: Some(found.iter().map(|f| f.blocks.iter().copied()).collect::<Lists>().into()),
        tokens: found.iter().map(|f| f.tokens.iter().copied()).collect::<Lists>(),
    };
    let products = found.iter().map(|found| found.products).sum();
    Ok((found.chunks(runs.len().max(1)).map(of_head).collect(), products))
}

/// Buffers of one thread.
#[derive(Default)]
struct Scratch {
    /// Mean queries `[lines, padded]`.
    q: Vec<f32>,
    lines: usize,
    keys: Vec<f32>,
    scores: Vec<f32>,
    /// Keys to look at, and their scores.
    probes: Vec<u32>,
    values: Vec<f32>,
    products: u64,
    found: Found,
}

/// A chunk on its way to its representative.
struct Chunk {
    tokens: Range<usize>,
    /// What is left of the search by halves.
    left: Range<usize>,
    score: f32,
}

struct Search<'a, T> {
    with: &'a Operands<'a, &'a [T]>,
    kv_head: usize,
    run: &'a Range<usize>,
    hierarchy: &'a Hierarchy,
}

/// Means of `average` neighbouring rows, for each query head of the KV head.
fn mean_queries<S>(with: &Operands<S>, members: Range<usize>, kv_head: usize, average: usize, s: &mut Scratch) {
    let Dims { head_dim: d, padded, group, q_heads, .. } = *with.dims;
    s.q.clear();
    let mut first = members.start;
    s.lines = 0;
    for rows in neighbours(&with.rows.positions[members], average) {
        for head in kv_head * group..(kv_head + 1) * group {
            let line = s.lines * padded;
            s.q.resize(line + padded, 0.0);
            let mean = &mut s.q[line..line + d];
            for row in first..first + rows {
                let q = &with.q[(row * q_heads + head) * d..][..d];
                mean.iter_mut().zip(q).for_each(|(mean, q)| *mean += q);
            }
            mean.iter_mut().for_each(|mean| *mean /= rows as f32);
            s.lines += 1;
        }
        first += rows;
    }
}

#[inline(always)]
unsafe fn search_run<V: Simd, T: KvElement>(search: &Search<T>, s: &mut Scratch) {
    let Search { with, run, hierarchy, .. } = *search;
    let Reach { sinks, searched, last, keep } = hierarchy.reach(run, with.rows.window);
    let near = searched.end;
    s.products = 0;
    let mut tokens = searched.len();
    let mut kept = if tokens > 0 { vec![searched] } else { Vec::new() };
    for (stage, keep) in hierarchy.stages.iter().zip(keep) {
        if keep >= tokens {
            continue;
        }
        let split = |range: &Range<usize>| {
            let (start, end) = (range.start, range.end);
            (start..end).step_by(stage.chunk).map(move |at| at..(at + stage.chunk).min(end)).collect::<Vec<_>>()
        };
        let of = |tokens: Range<usize>| Chunk { left: tokens.clone(), tokens, score: f32::NEG_INFINITY };
        let mut chunks: Vec<Chunk> = kept.iter().flat_map(split).map(of).collect();
        unsafe { rank::<V, T>(search, s, &mut chunks) };
        // Stable: of equals the first.
        chunks.sort_by(|a, b| b.score.total_cmp(&a.score));
        chunks.truncate((keep / stage.chunk).max(1));
        kept = chunks.into_iter().map(|chunk| chunk.tokens).collect();
        kept.sort_by_key(|range| range.start);
        tokens = kept.iter().map(Range::len).sum();
    }
    let found = &mut s.found;
    *found = Found { products: s.products, ..Found::default() };
    found.blocks.extend(0..sinks as u32);
    for range in joined(kept) {
        // Blocks that are kept whole are read as such.
        let blocks = range.start.div_ceil(BLOCK_TOKENS)..range.end / BLOCK_TOKENS;
        if blocks.is_empty() {
            found.tokens.extend(range.start as u32..range.end as u32);
            continue;
        }
        found.tokens.extend(range.start as u32..(blocks.start * BLOCK_TOKENS) as u32);
        found.blocks.extend(blocks.start.max(sinks) as u32..blocks.end as u32);
        found.tokens.extend((blocks.end * BLOCK_TOKENS) as u32..range.end as u32);
    }
    found.blocks.extend((near / BLOCK_TOKENS).max(sinks) as u32..last as u32 + 1);
}

/// Ascending ranges with neighbours made one.
fn joined(ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}

/// Scores the chunks: each is halved until one key is left, by way of the half whose middle key scores higher.
#[inline(always)]
unsafe fn rank<V: Simd, T: KvElement>(search: &Search<T>, s: &mut Scratch, chunks: &mut [Chunk]) {
    loop {
        s.probes.clear();
        for chunk in chunks.iter().filter(|chunk| chunk.left.len() > 1) {
            let (low, high) = halves(&chunk.left);
            s.probes.extend([low, high].map(|half| middle(&half)));
        }
        if s.probes.is_empty() {
            return;
        }
        unsafe { look::<V, T>(search, s) };
        let mut values = s.values.as_chunks::<2>().0.iter();
        for chunk in chunks.iter_mut().filter(|chunk| chunk.left.len() > 1) {
            let Some(&[a, b]) = values.next() else { return };
            let (low, high) = halves(&chunk.left);
            let best = if b > a { b } else { a };
            chunk.left = if b > a { high } else { low };
            chunk.score = if best > chunk.score { best } else { chunk.score };
        }
    }
}

fn halves(range: &Range<usize>) -> (Range<usize>, Range<usize>) {
    let middle = range.start + range.len() / 2;
    (range.start..middle, middle..range.end)
}

fn middle(range: &Range<usize>) -> u32 {
    (range.start + range.len() / 2) as u32
}

/// The largest product of each probe's key with a mean query.
#[inline(always)]
unsafe fn look<V: Simd, T: KvElement>(search: &Search<T>, s: &mut Scratch) {
    let Dims { padded, head_dim, .. } = *search.with.dims;
    s.keys.resize(padded * BLOCK_TOKENS, 0.0);
    s.scores.resize(s.lines * BLOCK_TOKENS, 0.0);
    s.values.clear();
    let probes = std::mem::take(&mut s.probes);
    s.products += (probes.len() * s.lines) as u64;
    for probes in probes.chunks(BLOCK_TOKENS) {
        unsafe {
            unpack_keys::<V, T>(search.with, search.kv_head, &Columns::Tokens(probes), probes.len(), &mut s.keys);
            gemm::<V, false>(&Gemm {
                a: s.q.as_ptr(),
                lda: padded,
                b: s.keys.as_ptr(),
                ldb: BLOCK_TOKENS,
                c: s.scores.as_mut_ptr(),
                ldc: BLOCK_TOKENS,
                m: s.lines,
                n: BLOCK_TOKENS,
                k: head_dim,
            });
        }
        let at = s.values.len();
        s.values.resize(at + probes.len(), f32::NEG_INFINITY);
        for scores in s.scores.chunks_exact(BLOCK_TOKENS) {
            for (value, &score) in s.values[at..].iter_mut().zip(scores) {
                *value = if score > *value { score } else { *value };
            }
        }
    }
    s.probes = probes;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefill::{Selection, query_blocks};
    use crate::testing::{Cache, Numbers};
    use candle_core::DType;
    use std::cell::Cell;

    /// The same search, key by key in f64: the tokens that one run reads.
    fn plain(
        cache: &Cache,
        kv_head: usize,
        q: &[Vec<f64>],
        run: &Range<usize>,
        h: &Hierarchy,
        (window, looked): (Option<usize>, &Cell<u64>),
    ) -> Vec<usize> {
        let score = |key: usize| -> f64 {
            looked.set(looked.get() + q.len() as u64);
            let dot =
                |q: &Vec<f64>| q.iter().zip(&cache.keys[key][kv_head]).map(|(a, b)| a * f64::from(*b)).sum::<f64>();
            q.iter().map(dot).fold(f64::NEG_INFINITY, f64::max)
        };
        let near = (run.start / 64 * 64).saturating_sub(h.window.div_ceil(64) * 64);
        let sink = h.sink.div_ceil(64) * 64;
        let seen = window.map_or(0, |w| (run.start + 1).saturating_sub(w)) / 64 * 64;
        let mut kept: Vec<usize> = (sink.max(seen)..near).collect();
        let candidates = kept.len();
        for stage in &h.stages {
            let keep = match h.full_at {
                0 => stage.keep,
                full => (stage.keep as f64 * (candidates as f64 / full as f64).min(1.0)).ceil() as usize,
            };
            if keep >= kept.len() {
                continue;
            }
            let mut chunks: Vec<(f64, Vec<usize>)> = Vec::new();
            for run in kept.chunk_by(|a, b| a + 1 == *b) {
                for chunk in run.chunks(stage.chunk) {
                    let (mut left, mut best) = (chunk, f64::NEG_INFINITY);
                    while left.len() > 1 {
                        let (low, high) = left.split_at(left.len() / 2);
                        let (a, b) = (score(low[low.len() / 2]), score(high[high.len() / 2]));
                        left = if b > a { high } else { low };
                        best = best.max(a).max(b);
                    }
                    chunks.push((best, chunk.to_vec()));
                }
            }
            chunks.sort_by(|a, b| b.0.total_cmp(&a.0));
            chunks.truncate((keep / stage.chunk).max(1));
            kept = chunks.into_iter().flat_map(|chunk| chunk.1).collect();
            kept.sort_unstable();
        }
        let always = (0..run.end.div_ceil(64) * 64).filter(|&key| key < sink || key >= near);
        let mut all: Vec<usize> = always.chain(kept).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    #[test]
    fn a_run_reads_what_a_plain_search_finds() {
        let stages = vec![Stage { chunk: 64, keep: 400 }, Stage { chunk: 16, keep: 160 }, Stage { chunk: 4, keep: 50 }];
        let small = Hierarchy { sink: 60, window: 100, average: 4, stages, full_at: 0 };
        let scaled = Hierarchy { full_at: 2000, average: 1, ..small.clone() };
        let one = Hierarchy { sink: 0, window: 0, stages: vec![Stage { chunk: 256, keep: 300 }], ..small.clone() };
        let all = Hierarchy { stages: vec![Stage { chunk: 8, keep: 1100 }], ..small.clone() };
        for isa in Isa::available() {
            for (hierarchy, start, window) in [
                (&small, 0, None),
                (&scaled, 0, None),
                (&one, 0, None),
                (&all, 0, None),
                (&small, 700, None),
                (&small, 0, Some(500)),
            ] {
                let (n, d, group) = (1100usize, 16, 3);
                let mut numbers = Numbers(11);
                let cache = Cache::new(&mut numbers, n, 2, d, DType::F16);
                let positions: Vec<u32> = (start as u32..n as u32).collect();
                let q = numbers.tensor(&[positions.len(), 2 * group, d]);
                let rows = Rows { q: &q, kv: cache.kv(), table: &cache.table, positions: &positions, window };
                let runs = query_blocks(start..n, 64);
                let (heads, products) = probe_with(isa, &rows, &runs, hierarchy).unwrap();
                let looked = Cell::new(0);
                Selection::new(runs.clone(), heads.clone()).expect("ids ascend");
                let q = q.to_vec3::<f32>().unwrap();
                for (kv_head, reads) in heads.iter().enumerate() {
                    for (at, run) in runs.iter().enumerate() {
                        let neighbours: Vec<usize> = run.clone().collect();
                        let means: Vec<Vec<f64>> = neighbours
                            .chunk_by(|a, b| a / hierarchy.average == b / hierarchy.average)
                            .flat_map(|rows| (kv_head * group..(kv_head + 1) * group).map(move |head| (rows, head)))
                            .map(|(rows, head)| {
                                let sum = |c: usize| rows.iter().map(|p| f64::from(q[p - start][head][c])).sum::<f64>();
                                (0..d).map(|c| sum(c) / rows.len() as f64).collect()
                            })
                            .collect();
                        let (blocks, tokens) = reads.lists(at);
                        let mut read: Vec<usize> =
                            blocks.unwrap().iter().flat_map(|&b| b as usize * 64..b as usize * 64 + 64).collect();
                        read.extend(tokens.iter().map(|&t| t as usize));
                        read.sort_unstable();
                        assert_eq!(
                            read,
                            plain(&cache, kv_head, &means, run, hierarchy, (window, &looked)),
                            "{isa:?} {run:?} {hierarchy:?}"
                        );
                    }
                }
                assert_eq!(products, looked.get());
            }
        }
    }

    #[test]
    fn stages_that_cannot_be_are_errors() {
        let mut numbers = Numbers(2);
        let cache = Cache::new(&mut numbers, 64, 1, 16, DType::F32);
        let q = numbers.tensor(&[64, 1, 16]);
        let positions: Vec<u32> = (0..64).collect();
        let rows = Rows { q: &q, kv: cache.kv(), table: &cache.table, positions: &positions, window: None };
        for chunks in [&[1][..], &[48], &[8, 8], &[8, 16], &[8192]] {
            let stages = chunks.iter().map(|&chunk| Stage { chunk, keep: 64 }).collect();
            let hierarchy = Hierarchy { sink: 0, window: 0, average: 4, stages, full_at: 0 };
            assert!(probe(&rows, &query_blocks(0..64, 64), &hierarchy).is_err(), "{chunks:?}");
        }
        let hierarchy = Hierarchy { sink: 0, window: 0, average: 4, stages: Vec::new(), full_at: 0 };
        assert!(probe(&rows, &query_blocks(64..128, 64), &hierarchy).is_err());
    }
}
