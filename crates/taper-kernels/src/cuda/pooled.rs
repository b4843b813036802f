//! Blocks of keys ranked by means: [`crate::prefill::pooled`] on a CUDA device, where the lists stay.

use super::error::Result;
use super::ffi::{TaperMeansParams, TaperOwnParams, taper_means, taper_own};
use super::op::Op;
use super::prefill::{KeyLists, RunLists};
use super::score::largest;
use crate::kv::BLOCK_TOKENS;
use crate::prefill::{HeadReads, Lists, Mask, Rows};
use candle_core::{DType, Tensor};
use std::ops::Range;

/// Products of means that are kept at a time.
const PRODUCTS: usize = 1 << 24;

/// As the CPU's, whose checks the caller has made; `members` are each run's rows. Queries in f32 are rounded to the cache's
/// dtype, means are f32.
pub(crate) fn pooled(
    rows: &Rows,
    runs: &[Range<usize>],
    members: &[Range<usize>],
    heads: &[(usize, usize)],
) -> Result<(Vec<HeadReads>, u64)> {
    if runs.is_empty() || heads.is_empty() {
        let none = HeadReads::blocks(Lists::default());
        return Ok((vec![none; heads.len()], 0));
    }
    let op = Op::new("pooled", "q", rows.q)?;
    let (_, q_heads, head_dim) = rows.q.dims3()?;
    let (_, kv_heads, _) = rows.kv.dims()?;
    let (blocks, dtype) = (rows.tokens().div_ceil(BLOCK_TOKENS), rows.kv.k.dtype());
    let group = q_heads / kv_heads;
    let q = rows.q.to_dtype(dtype)?.contiguous()?;
    let q = means(&op, &q, None, members.iter().cloned(), (q_heads, head_dim))?;
    let table = op.kept(&rows.table[..blocks], [blocks])?;
    let tokens = |block: usize| block * BLOCK_TOKENS..rows.tokens().min((block + 1) * BLOCK_TOKENS);
    let k = means(&op, rows.kv.k, Some(&table), (0..blocks).map(tokens), (kv_heads, head_dim))?;
    let pick = |of: &mut dyn Iterator<Item = usize>| op.kept(&of.map(|x| x as u32).collect::<Vec<_>>(), [heads.len()]);
    let q = q.index_select(&pick(&mut heads.iter().map(|&(head, _)| head))?, 0)?;
    let k = k.index_select(&pick(&mut heads.iter().map(|&(head, _)| head / group))?, 0)?.t()?;

    // Of each run the blocks that it may choose, and its own.
    let own = |run: &Range<usize>| run.start / BLOCK_TOKENS;
    let earlier = |run: &Range<usize>| {
        let lowest = Mask::Causal.keys(run.start, rows.window)[1].start / BLOCK_TOKENS;
        lowest.min(own(run))..own(run)
    };
    let kept = |run: &Range<usize>, keep: usize| earlier(run).len().min(keep.saturating_sub(1));
    let most = |keep: usize| runs.iter().map(|run| kept(run, keep)).max().unwrap_or(0);
    let capacity = heads.iter().map(|&(_, keep)| most(keep)).max().unwrap_or(0) + 1;
    let room = heads.len() * runs.len() * capacity;
    op.check(u32::try_from(room).is_ok(), "keep", format_args!("{room} ids in all lists"), "fewer than 2³²")?;
    let each = (PRODUCTS / (heads.len() * blocks)).clamp(1, runs.len());
    let (mut ids, mut counts, mut begins) = (Vec::new(), Vec::new(), vec![0u32; heads.len() * runs.len()]);
    for (at, part) in runs.chunks(each).enumerate() {
        let products = q.narrow(1, at * each, part.len())?.contiguous()?.matmul(&k)?;
        let lists = heads.len() * part.len();
        let of = |number: &dyn Fn(&Range<usize>, usize) -> usize| -> Vec<u32> {
            heads.iter().flat_map(|&(_, keep)| part.iter().map(move |run| number(run, keep) as u32)).collect()
        };
        let begin = of(&|run, _| earlier(run).start);
        let (end, k) = (of(&|run, _| own(run)), of(&|run, keep| kept(run, keep)));
        let (chosen, count) = largest(&op, &products.reshape((lists, blocks))?, [&begin, &end, &k], capacity)?;
        let own = op.upload(&part.iter().map(|run| own(run) as u32).collect::<Vec<_>>(), [part.len()])?;
        let p = TaperOwnParams {
            ids: op.at("ids", &chosen, DType::U32, [lists, capacity])?,
            counts: op.at("counts", &count, DType::U32, [lists])?,
            own: op.at("own", &own, DType::U32, [part.len()])?,
            lists: op.int("runs", lists)?,
            run_count: op.int("runs", part.len())?,
            capacity: op.int("keep", capacity)?,
        };
        // SAFETY: every address was checked against the shapes given beside it.
        unsafe { op.launch(taper_own, &p) }?;
        let before = at * each * heads.len() * capacity;
        for (list, begin) in (0..lists).map(|list| (list, before + list * capacity)) {
            begins[list / part.len() * runs.len() + at * each + list % part.len()] = begin as u32;
        }
        ids.push(chosen.flatten_all()?);
        counts.push(count.reshape((heads.len(), part.len()))?);
    }
    let blocks = KeyLists {
        heads: heads.len(),
        begins: op.upload(&begins, [heads.len(), runs.len()])?,
        counts: Tensor::cat(&counts, 1)?.contiguous()?,
        ids: Tensor::cat(&ids, 0)?,
    };
    let before = heads
        .iter()
        .map(|&(_, keep)| runs.iter().map(|run| (kept(run, keep) * BLOCK_TOKENS) as u32).collect::<Vec<_>>());
    let products: usize = heads
        .iter()
        .flat_map(|&(_, keep)| runs.iter().map(earlier).map(|e| e.len()).filter(move |&earlier| keep <= earlier))
        .sum();
    Ok((RunLists { blocks, columns: None }.into_reads(before.collect(), rows.window)?, products as u64))
}

/// Means `[heads, runs, head_dim]`, f32, of runs of rows of `x` `[rows, heads, head_dim]`, or of a sequence's tokens in
/// the cache.
fn means(
    op: &Op,
    x: &Tensor,
    table: Option<&Tensor>,
    runs: impl Iterator<Item = Range<usize>>,
    (heads, head_dim): (usize, usize),
) -> Result<Tensor> {
    op.head_dim("q", head_dim)?;
    let words: Vec<u32> = runs.flat_map(|run| [run.start as u32, run.len() as u32]).collect();
    let count = words.len() / 2;
    let words = op.kept(&words, [count, 2])?;
    let out = op.empty((heads, count, head_dim), DType::F32)?;
    let p = TaperMeansParams {
        x: op.at("x", x, x.dtype(), x.dims())?,
        block_table: op.maybe("table", table, DType::U32, table.map_or(&[][..], Tensor::dims))?,
        runs: op.at("runs", &words, DType::U32, [count, 2])?,
        out: op.at("out", &out, DType::F32, [heads, count, head_dim])?,
        run_count: op.int("runs", count)?,
        heads: op.int("q", heads)?,
        head_dim: op.int("q", head_dim)?,
        dtype: op.dtype("x", x.dtype())?,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(taper_means, &p) }?;
    Ok(out)
}
