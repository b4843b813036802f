//! Values that stand for all of a head's, drawn from scores or beside them, and queries of which only some features are left:
//! all by the draws of the CPU.

use super::batch::{Batch, Dims, Lists, WORDS, tokens_of};
use super::error::Result;
use super::ffi::{self, TaperDistinctParams, TaperFeaturesParams, TaperSpreadParams, TaperValuesParams};
use super::op::{Op, team};
use super::readback::Readback;
use super::sample::{Scratch, Streams};
use super::score::Scores;
use super::walk::{ListScores, Walked};
use crate::decode::{Spread, Targets};
use crate::kv::BLOCK_TOKENS;
use crate::lent::Lent;
use bytemuck::Zeroable;
use candle_core::{DType, Tensor};

/// Token lists of each query head, for [`Plan::attend_given`](super::Plan::attend_given): the values that
/// [`crate::decode::sample_values`] draws from a dense selection, by scores of all tokens. A row that sees no more than
/// `samples` tokens keeps them all, by their probabilities.
///
/// # Errors
/// Shapes or dtypes that differ, scores of pages.
///
/// # Source
/// As [`crate::decode::sample_values`].
pub fn spread_values(
    batch: &Batch,
    scores: &Scores,
    streams: Streams,
    samples: usize,
    spread: Spread,
) -> Result<Lists> {
    let op = Op::new("spread_values", "q", batch.q)?;
    op.check(scores.page == 1, "scores", format_args!("of pages of {}", scores.page), "of tokens")?;
    spread_over(&op, batch, (&scores.scores, &scores.tiles), None, streams, (samples, spread))
}

/// The same of keys that lists name, in their order: a list of no more than `samples` keys keeps them all.
///
/// # Errors
/// Shapes or dtypes that differ.
pub(super) fn spread_listed(
    op: &Op,
    batch: &Batch,
    scores: &ListScores,
    streams: Streams,
    (samples, spread): (usize, Spread),
) -> Result<Lists> {
    spread_over(op, batch, (&scores.scores, &scores.tiles), Some(&scores.of), streams, (samples, spread))
}

fn spread_over(
    op: &Op,
    batch: &Batch,
    (scores, (top, sum)): (&Tensor, &(Tensor, Tensor)),
    listed: Option<&Walked>,
    streams: Streams,
    (samples, spread): (usize, Spread),
) -> Result<Lists> {
    let Dims { rows, q_heads, .. } = batch.dims(op)?;
    let (rule, tile) = match spread {
        Spread::Whole(Targets::Systematic) => (ffi::TAPER_SYSTEMATIC, BLOCK_TOKENS),
        Spread::Whole(Targets::Stratified) => (ffi::TAPER_STRATIFIED, BLOCK_TOKENS),
        Spread::Whole(Targets::Independent) => (ffi::TAPER_INDEPENDENT, BLOCK_TOKENS),
        Spread::LargestRemainder(tile) => (ffi::TAPER_LARGEST_REMAINDER, tile),
        Spread::EachTile(tile) => (ffi::TAPER_PER_TILE, tile),
    };
    op.check(tile > 0, "spread", "tiles of 0 tokens", "at least 1")?;
    op.check(samples > 0, "samples", samples, "at least 1")?;
    let (entries, tiles) = (scores.dim(2)?, top.dim(2)?);
    // Of everything there are no more than the longest row's tokens, of lists no more than there is room for.
    let longest = if listed.is_some() { entries } else { batch.max_len };
    let (lists, most) = (rows * q_heads, longest.div_ceil(tile));
    let capacity = samples.max(if matches!(spread, Spread::EachTile(_)) { most } else { 0 });
    let work = op.empty((lists, WORDS), DType::U32)?;
    let ids = op.empty((lists, capacity), DType::U32)?;
    let ln_weights = op.empty((lists, capacity), DType::F32)?;
    // SAFETY: a function of a number.
    let room = lists * unsafe { ffi::taper_spread_room(most as i64) } as usize;
    let (tokens, counts) = (listed.map(|of| &of.ids), listed.map(Walked::count).transpose()?);
    let heads = listed.map_or(0, |of| of.heads);
    let p = TaperSpreadParams {
        scores: op.at("scores", scores, DType::F32, [rows, q_heads, entries])?,
        tile_max: op.at("scores", top, DType::F32, [rows, q_heads, tiles])?,
        tile_sum: op.at("scores", sum, DType::F32, [rows, q_heads, tiles])?,
        tokens: op.maybe("lists", tokens, DType::U32, [rows * heads, entries])?,
        counts: op.maybe("lists", counts.as_ref(), DType::U32, [rows * heads])?,
        lens: op.at("lens", batch.lens, DType::U32, [rows])?,
        seeds: op.at("seeds", streams.seeds, DType::I64, [rows])?,
        positions: op.at("positions", streams.positions, DType::U32, [rows])?,
        work: op.at("work", &work, DType::U32, [lists, WORDS])?,
        ids: op.at("ids", &ids, DType::U32, [lists, capacity])?,
        ln_weights: op.at("ln_weights", &ln_weights, DType::F32, [lists, capacity])?,
        room: if room > 0 { op.room::<u8>("spread-tiles", room, DType::I64)?.cast() } else { std::ptr::null_mut() },
        rows: op.int("q", rows)?,
        q_heads: op.int("q", q_heads)?,
        stride: op.int("scores", entries)?,
        tile_stride: op.int("scores", tiles)?,
        capacity: op.int("samples", capacity)?,
        samples: op.int("samples", samples)?,
        spread: rule,
        layer: streams.layer as i32,
        tile_tokens: op.int("spread", tile)?,
        most_tiles: op.int("max_len", most)?,
        list_heads: op.int("lists", heads)?,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_spread, &p) }?;
    let ids = Some(ids.flatten_all()?);
    let token_ln_weights = Some(ln_weights.flatten_all()?);
    Ok(Lists { token_ids: ids.map(Lent::from), token_ln_weights, ..Lists::over(work, rows, q_heads) })
}

/// Queries `[R, q_heads, head_dim]`, f32, of which only some features are left; the heads of a `group` keep one set, without
/// one each keeps its own. `streams` are of the rows.
///
/// # Errors
/// Shapes that differ, head_dim not a multiple of 32 up to 1,024, more than 64 draws.
///
/// # Source
/// As [`crate::decode::bernoulli_queries`], whose draws these are.
pub(super) fn features(q: &Tensor, streams: Streams, draws: usize, group: Option<usize>) -> Result<Tensor> {
    let op = Op::new("features", "q", q)?;
    let (rows, q_heads, head_dim) = q.dims3()?;
    let out = op.empty((rows, q_heads, head_dim), DType::F32)?;
    let p = TaperFeaturesParams {
        q: op.at("q", q, DType::F32, [rows, q_heads, head_dim])?,
        seeds: op.at("seeds", streams.seeds, DType::I64, [rows])?,
        positions: op.at("positions", streams.positions, DType::U32, [rows])?,
        out: op.at("out", &out, DType::F32, [rows, q_heads, head_dim])?,
        rows: op.int("q", rows)?,
        q_heads: op.int("q", q_heads)?,
        group: op.int("group", group.unwrap_or(0))?,
        head_dim: op.int("q", head_dim)?,
        draws: op.int("draws", draws)?,
        layer: streams.layer as i32,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_features, &p) }?;
    Ok(out)
}

/// Bytes of masses that a thread block of [`values`] keeps at most.
const MOST_MASSES: usize = 80 * 1024;

/// Whether rows are short enough for [`values`]: of 16 query heads a KV head 1.3 million tokens are.
pub fn values_fit(batch: &Batch) -> bool {
    let (q_heads, kv_heads) = (batch.q.dims()[1], batch.kv.k.dims()[1]);
    let tiles = batch.max_len.div_ceil(BLOCK_TOKENS).div_ceil(team(kv_heads));
    q_heads / kv_heads * tiles * size_of::<f32>() <= MOST_MASSES
}

/// Attention over values that were drawn.
#[derive(Debug, Clone)]
pub struct Values {
    /// `[R, q_heads, head_dim]`, f32; no numbers where a head's probabilities are none.
    pub out: Tensor,
    /// The exact log-sum-exp `[R, q_heads]`, f32.
    pub lse: Tensor,
    /// The token of each draw `[R, q_heads, samples]`, u32.
    pub ids: Tensor,
}

impl Values {
    /// A list of its draws for each query head, of rows that see so many tokens.
    pub(super) fn lists(&self, op: &Op, lens: &[usize]) -> Result<Lists> {
        let (rows, q_heads, samples) = self.ids.dims3()?;
        let work: Vec<[u32; WORDS]> =
            (0..rows * q_heads).map(|i| tokens_of(i * samples, samples, lens[i / q_heads])).collect();
        let work = op.kept(work.as_flattened(), [work.len(), WORDS])?;
        Ok(Lists { token_ids: Some(self.ids.flatten_all()?.into()), ..Lists::over(work, rows, q_heads) })
    }
}

/// Attends with exact probabilities over all visible keys and the mean of `samples` values drawn by them for each query
/// head, as the CPU's `Spread::Whole`.
///
/// # Errors
/// Shapes or dtypes that differ, rows too long for the masses that a thread block keeps: those of [`values_fit`] are not.
///
/// # Source
/// As [`crate::decode::sample_values`], whose targets these are; probabilities are kept in 16 bits.
pub fn values(batch: &Batch, streams: Streams, samples: usize, targets: Targets, scratch: &Scratch) -> Result<Values> {
    let op = Op::new("values", "q", batch.q)?;
    let Dims { rows, q_heads, kv_heads, head_dim, blocks, tables, stride, dtype } = batch.dims(&op)?;
    // A list is cut into as many runs as a whole team has thread blocks; how many a launch gives them, the kernel says.
    let (lists, group, runs) = (rows * kv_heads, q_heads / kv_heads, team(kv_heads));
    scratch.check(&op, lists, group)?;
    op.check(samples > 0, "samples", samples, "at least 1")?;
    let most = batch.max_len.div_ceil(BLOCK_TOKENS);
    let weights = op.lent((lists, most, group, BLOCK_TOKENS), DType::F16)?;
    let part_lse = op.lent((lists, runs, group), DType::F32)?;
    let parts = op.lent((lists, runs, group, head_dim), DType::F32)?;
    let out = op.empty((rows, q_heads, head_dim), DType::F32)?;
    let lse = op.empty((rows, q_heads), DType::F32)?;
    let ids = op.empty((rows, q_heads, samples), DType::U32)?;
    let pool = [blocks, kv_heads, BLOCK_TOKENS, head_dim];
    let p = TaperValuesParams {
        q: op.at("q", batch.q, dtype, [rows, q_heads, head_dim])?,
        k: op.at("kv.k", batch.kv.k, dtype, pool)?,
        v: op.at("kv.v", batch.kv.v, dtype, pool)?,
        block_table: op.at("tables", batch.tables, DType::U32, [tables, stride])?,
        lens: op.at("lens", batch.lens, DType::U32, [rows])?,
        seeds: op.at("seeds", streams.seeds, DType::I64, [rows])?,
        positions: op.at("positions", streams.positions, DType::U32, [rows])?,
        out: op.at("out", &out, DType::F32, [rows, q_heads, head_dim])?,
        lse: op.at("lse", &lse, DType::F32, [rows, q_heads])?,
        sync: op.at("scratch", &scratch.sync, DType::U32, [2 + lists, 32])?,
        weights: op.at("weights", &weights, DType::F16, [lists, most, group, BLOCK_TOKENS])?,
        part_lse: op.at("part_lse", &part_lse, DType::F32, [lists, runs, group])?,
        parts: op.at("parts", &parts, DType::F32, [lists, runs, group, head_dim])?,
        ids: op.at("ids", &ids, DType::U32, [rows, q_heads, samples])?,
        blocks: blocks as i64,
        rows: op.int("q", rows)?,
        q_heads: op.int("q", q_heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        head_dim: op.int("kv", head_dim)?,
        dtype: op.dtype("kv", dtype)?,
        table_stride: op.int("tables", stride)?,
        max_len: op.int("max_len", batch.max_len)?,
        samples: op.int("samples", samples)?,
        rule: match targets {
            Targets::Systematic => ffi::TAPER_SYSTEMATIC,
            Targets::Stratified => ffi::TAPER_STRATIFIED,
            Targets::Independent => ffi::TAPER_INDEPENDENT,
        },
        layer: streams.layer as i32,
        scale: 1.0 / (head_dim as f32).sqrt(),
        ..TaperValuesParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_values, &p) }?;
    Ok(Values { out, lse, ids })
}

/// How many tokens each KV head's query heads read between them `[R * kv_heads]`, by lists of tokens for each query head.
pub(super) fn distinct(op: &Op, lists: &Lists, kv_heads: usize, max_len: usize) -> Result<Readback> {
    let (count, pool) = (lists.rows * kv_heads, lists.token_ids.as_deref());
    let told = Readback::new(op, count)?;
    let p = TaperDistinctParams {
        work: op.at::<u32>("lists", &lists.work, DType::U32, [lists.rows * lists.heads, WORDS])?.cast(),
        token_ids: op.pool("lists", pool)?,
        token_ln_weight: op.maybe(
            "lists",
            lists.token_ln_weights.as_ref(),
            DType::F32,
            [pool.map_or(0, Tensor::elem_count)],
        )?,
        counts: op.at("counts", &told.tensor(count)?, DType::U32, [count])?,
        rows: op.int("lists", lists.rows)?,
        q_heads: op.int("lists", lists.heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        max_len: op.int("max_len", max_len)?,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_distinct, &p) }?;
    Ok(told)
}
