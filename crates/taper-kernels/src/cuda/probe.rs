//! A search by halves through chunks of keys: [`crate::prefill::probe`] on a CUDA device.

use super::error::Result;
use super::ffi::{TaperSearchParams, taper_search};
use super::op::Op;
use super::prefill::{KeyLists, RunLists, places};
use crate::kv::BLOCK_TOKENS;
use crate::prefill::{HeadReads, Hierarchy, Reach, Rows, neighbours};
use candle_core::{DType, Tensor};
use std::ops::Range;

/// Words of a run of the interface, and the stages that it has room for: falling powers of two have no more.
const RUN_WORDS: usize = 20;
const STAGES: usize = 12;
/// Mean queries of a tile.
const TILE_LINES: usize = 8;
/// Thread blocks at most, each of which searches for one run after the other, and words that they share for what they know of
/// chunks.
const SLOTS: usize = 264;
const SCRATCH: usize = 64 << 20;

/// As the CPU's, whose checks the caller has made; queries in f32, and mean queries, are rounded to the cache's dtype. It waits
/// for how many keys were found; in a model with a window of its own for which.
pub(crate) fn probe(
    rows: &Rows,
    runs: &[Range<usize>],
    members: &[Range<usize>],
    hierarchy: &Hierarchy,
) -> Result<(Vec<HeadReads>, u64)> {
    let op = Op::new("probe", "q", rows.q)?;
    let (count, q_heads, head_dim) = rows.q.dims3()?;
    let (blocks, kv_heads, _) = rows.kv.dims()?;
    op.head_dim("q", head_dim)?;
    if runs.is_empty() {
        return Ok((Vec::new(), 0));
    }
    let (group, dtype) = (q_heads / kv_heads, rows.kv.k.dtype());
    let plan = Plan::new(rows, runs, members, hierarchy, group);
    let q = rows.q.to_dtype(dtype)?.contiguous()?;
    let needed = rows.positions[count - 1] as usize / BLOCK_TOKENS + 1;
    let table = op.kept(&rows.table[..needed], [1, needed])?;
    let (lists, n) = ([kv_heads, runs.len()], kv_heads * runs.len());
    // Each of the three begins on 16 bytes.
    let told = op.empty((3, n.next_multiple_of(4)), DType::U32)?;
    let part = |i: usize| told.get(i)?.narrow(0, 0, n)?.reshape(&lists[..]);
    let of = |room: &[usize], counts: Tensor| -> Result<KeyLists> {
        let (begins, total) = places(&op, kv_heads, room.iter().copied())?;
        Ok(KeyLists { heads: kv_heads, begins: op.kept(&begins, lists)?, counts, ids: op.empty(total, DType::U32)? })
    };
    let (read, single) = (of(&plan.block_room, part(0)?)?, of(&plan.column_room, part(1)?)?);
    let looked = part(2)?;
    let means = op.kept(&plan.means, [plan.means.len() / 2, 2])?;
    let words = op.kept(&plan.words, [runs.len(), RUN_WORDS])?;
    let lines = op.empty((kv_heads, plan.tiles * TILE_LINES, head_dim), dtype)?;
    let each = plan.chunk_room + 2 * plan.kept_room;
    let slots = (SCRATCH / each.max(1)).clamp(1, SLOTS.min(n));
    let scratch = op.empty(slots * each, DType::U32)?;
    let mut chunk = [0; STAGES];
    chunk.iter_mut().zip(&hierarchy.stages).for_each(|(to, stage)| *to = stage.chunk as u32);
    let p = TaperSearchParams {
        q: op.at("q", &q, dtype, [count, q_heads, head_dim])?,
        k: op.at("kv.k", rows.kv.k, dtype, [blocks, kv_heads, BLOCK_TOKENS, head_dim])?,
        block_table: op.at("table", &table, DType::U32, [1, needed])?,
        means: op.at("positions", &means, DType::U32, means.dims())?,
        runs: op.at::<u32>("runs", &words, DType::U32, [runs.len(), RUN_WORDS])?.cast(),
        lines: op.at("lines", &lines, dtype, lines.dims())?,
        scratch: op.at("scratch", &scratch, DType::U32, scratch.dims())?,
        block_begin: op.at("blocks", &read.begins, DType::U32, lists)?,
        blocks: op.at("blocks", &read.ids, DType::U32, read.ids.dims())?,
        column_begin: op.at("columns", &single.begins, DType::U32, lists)?,
        columns: op.at("columns", &single.ids, DType::U32, single.ids.dims())?,
        block_counts: op.at("blocks", &read.counts, DType::U32, lists)?,
        column_counts: op.at("columns", &single.counts, DType::U32, lists)?,
        looked: op.at("looked", &looked, DType::U32, lists)?,
        run_count: op.int("runs", runs.len())?,
        q_heads: op.int("q", q_heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        head_dim: op.int("kv", head_dim)?,
        dtype: op.dtype("kv", dtype)?,
        tiles: op.int("runs", plan.tiles)?,
        slots: op.int("runs", slots)?,
        chunk_room: op.int("stages", plan.chunk_room)?,
        kept_room: op.int("stages", plan.kept_room)?,
        stages: op.int("stages", hierarchy.stages.len())?,
        chunk,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(taper_search, &p) }?;
    let told_words = op.read("told", &told)?;
    let told = |i: usize| &told_words[i * n.next_multiple_of(4)..][..n];
    let products = told(2).iter().enumerate().map(|(i, &looked)| u64::from(looked) * plan.lines[i % runs.len()]).sum();
    let columns = plan.column_room.iter().any(|&room| room > 0).then_some(single);
    let before = |head: usize| {
        let lists = head * runs.len()..(head + 1) * runs.len();
        let counts = told(0)[lists.clone()].iter().zip(&told(1)[lists]).zip(runs);
        let before = counts.map(|((&blocks, &columns), run)| {
            // Of its blocks all from the run's first on are its own.
            let own = (run.end - 1) / BLOCK_TOKENS + 1 - run.start / BLOCK_TOKENS;
            (blocks - own as u32) * BLOCK_TOKENS as u32 + columns
        });
        before.collect()
    };
    let before = (0..kv_heads).map(before).collect();
    Ok((RunLists { blocks: read, columns }.into_reads(before, rows.window)?, products))
}

/// What the host knows of a search.
struct Plan {
    /// Runs as the interface has them, one after the other.
    words: Vec<u32>,
    /// First row and rows of each mean.
    means: Vec<u32>,
    /// Mean queries of each run, over the query heads of a KV head, and tiles of them in all.
    lines: Vec<u64>,
    tiles: usize,
    /// Most chunks of a stage, and most that one keeps.
    chunk_room: usize,
    kept_room: usize,
    /// Most blocks and single tokens that each run reads.
    block_room: Vec<usize>,
    column_room: Vec<usize>,
}

impl Plan {
    fn new(rows: &Rows, runs: &[Range<usize>], members: &[Range<usize>], hierarchy: &Hierarchy, group: usize) -> Self {
        let (mut words, mut means, mut lines) = (Vec::with_capacity(runs.len() * RUN_WORDS), Vec::new(), Vec::new());
        let (mut tiles, mut chunk_room, mut kept_room) = (0, 0, 0);
        let (mut block_room, mut column_room) = (Vec::new(), Vec::new());
        for (run, members) in runs.iter().zip(members) {
            let (first_mean, mut row) = (means.len() / 2, members.start);
            for rows in neighbours(&rows.positions[members.clone()], hierarchy.average) {
                means.extend([row as u32, rows as u32]);
                row += rows;
            }
            let count = means.len() / 2 - first_mean;
            let Reach { sinks, searched, last, keep } = hierarchy.reach(run, rows.window);
            words.extend([first_mean, count, tiles, sinks, searched.start, searched.end, last, 0].map(|x| x as u32));
            let keeps = keep.iter().map(|&keep| u32::try_from(keep).unwrap_or(u32::MAX));
            words.extend(keeps.chain(std::iter::repeat(0)).take(STAGES));
            lines.push((count * group) as u64);
            tiles += (count * group).div_ceil(TILE_LINES);
            // What a stage leaves depends on whether it keeps a last, shorter chunk, and so whether the next one has anything
            // to leave out: these are the most there can be.
            let (mut most, mut single) = (searched.len(), false);
            for (stage, keep) in hierarchy.stages.iter().zip(keep) {
                if keep < most {
                    chunk_room = chunk_room.max(most.div_ceil(stage.chunk));
                    kept_room = kept_room.max((keep / stage.chunk).max(1));
                    most = most.min(keep.max(stage.chunk));
                    single |= stage.chunk < BLOCK_TOKENS;
                }
            }
            block_room.push(sinks + most / BLOCK_TOKENS + last + 1 - searched.end / BLOCK_TOKENS);
            column_room.push(if single { most } else { 0 });
        }
        Self { words, means, lines, tiles, chunk_room, kept_room, block_room, column_room }
    }
}
