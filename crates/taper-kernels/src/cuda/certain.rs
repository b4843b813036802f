//! A sample whose promise rests on bounds of pages, and the attention that it comes to: a row of launches, none of which
//! the host waits for.

use super::batch::{Batch, Dims, Lists, WORDS};
use super::decode::Plan;
use super::error::Result;
use super::ffi::{self, TaperCertainParams};
use super::op::Op;
use super::readback::Readback;
use super::sample::{NUMBERS, Sampled, Streams, draw, draw_each};
use super::score::{Scores, View, scores};
use crate::decode::{Certainty, GUESS_KEYS, LOOKS};
use crate::kv::BLOCK_TOKENS;
use bytemuck::Zeroable;
use candle_core::{DType, Tensor};

/// Attends to what lists name exactly, to the pages that could weigh most, and to a sample of the rest for which bounds of the
/// pages keep the promise for every head of the group; where that would be too much, to everything. Lists name blocks,
/// tokens or pages, and no sample. Returns the lists that samples are beside, too.
///
/// `bounds` `[blocks, kv_heads, pages of a block, 2 head_dim]` of the cache's dtype, minima, then maxima; `norms` `[blocks,
/// kv_heads, pages of a block, 1]`, f32.
///
/// # Errors
/// Shapes or dtypes that differ, rows of more than 1.8 million tokens.
///
/// # Source
/// As [`crate::decode::sample_certain`], whose draws these are.
pub(super) fn certain(
    batch: &Batch,
    lists: &Lists,
    streams: Streams,
    (bounds, norms): (&Tensor, &Tensor),
    how: &Certainty,
) -> Result<(Sampled, Lists)> {
    let op = Op::new("certain", "q", batch.q)?;
    let promoted = promote(&op, batch, lists, streams, (bounds, norms), how)?;
    look(&op, batch, promoted, streams, how)
}

/// What is read whatever is sampled.
struct Promoted {
    /// Of that launch, and for the next.
    p: TaperCertainParams,
    exact: Lists,
    /// The most draws of each list that are looked at `[R * kv_heads]`, u32.
    wants: Tensor,
    numbers: Readback,
    /// What `p` names besides.
    _held: (Scores, [Tensor; 6]),
}

fn promote(
    op: &Op,
    batch: &Batch,
    lists: &Lists,
    streams: Streams,
    (bounds, norms): (&Tensor, &Tensor),
    how: &Certainty,
) -> Result<Promoted> {
    let Dims { rows, q_heads, kv_heads, head_dim, blocks, tables, stride, dtype } = batch.dims(op)?;
    let (count, max_len) = (rows * kv_heads, batch.max_len);
    lists.fits(op, rows, kv_heads)?;
    let plain = lists.heads_sampled.is_none() && lists.token_ln_weights.is_none();
    op.check(plain, "lists", "lists with a sample or weights", "lists without")?;
    let per_block = bounds.dim(2)?;
    let scale = 1.0 / (head_dim as f32).sqrt();

    let (o, lse) = Plan::new(lists.clone(), batch)?.attend(batch, None, DType::F32)?;
    let guesses = draw(lists, streams, max_len, GUESS_KEYS)?.0;
    let pages = scores(batch, batch.q, View::Pages(bounds), scale)?;
    let score_stride = pages.values().dim(2)?;
    let most = (how.dense_share.min(1.0) * max_len as f64).ceil() as usize;
    let (capacity, words) = (most.max(1), max_len.div_ceil(32));
    let page_stride = max_len.div_ceil(BLOCK_TOKENS / per_block);
    let centre = op.empty((rows, q_heads, head_dim), DType::F32)?;
    let reach = op.empty((rows, q_heads, 2), DType::F32)?;
    let work = op.empty((count, WORDS), DType::U32)?;
    let ids = op.empty(count * capacity, DType::U32)?;
    let (wants, rest) = (op.empty(count, DType::U32)?, op.empty(count, DType::U32)?);
    // Each row begins on 16 bytes.
    let each = count.next_multiple_of(4);
    let numbers = Readback::new(op, NUMBERS * each)?;
    let number = |row: usize| -> Result<*mut u32> {
        let words = numbers.tensor((NUMBERS, each))?.get(row)?.narrow(0, 0, count)?;
        op.at("numbers", &words, DType::U32, [count])
    };
    let pool = [blocks, kv_heads, BLOCK_TOKENS, head_dim];
    let p = TaperCertainParams {
        q: op.at("q", batch.q, dtype, [rows, q_heads, head_dim])?,
        k: op.at("kv.k", batch.kv.k, dtype, pool)?,
        v: op.at("kv.v", batch.kv.v, dtype, pool)?,
        block_table: op.at("tables", batch.tables, DType::U32, [tables, stride])?,
        lists: op.at("lists", &lists.work, DType::U32, [count, WORDS])?,
        block_ids: op.pool("lists", lists.block_ids.as_deref())?,
        token_ids: op.pool("lists", lists.token_ids.as_deref())?,
        known_o: op.at("known", &o, DType::F32, [rows, q_heads, head_dim])?,
        known_lse: op.at("known", &lse, DType::F32, [rows, q_heads])?,
        draws: op.at("draws", &guesses, DType::U32, [count, GUESS_KEYS])?,
        page_scores: op.at("scores", pages.values(), DType::F32, [rows, q_heads, score_stride])?,
        page_norms: op.at("norms", norms, DType::F32, [blocks, kv_heads, per_block, 1])?,
        bitmaps: op.room("certain-bitmaps", count * words, DType::U32)?,
        pages: op.room("certain-pages", count * 2 * page_stride, DType::I64)?,
        centre: op.at("centre", &centre, DType::F32, [rows, q_heads, head_dim])?,
        reach: op.at("reach", &reach, DType::F32, [rows, q_heads, 2])?,
        work: op.at("work", &work, DType::U32, [count, WORDS])?,
        ids: op.at("ids", &ids, DType::U32, [count * capacity])?,
        wants: op.at("wants", &wants, DType::U32, [count])?,
        rest: op.at("rest", &rest, DType::U32, [count])?,
        state: number(0)?,
        residual: number(1)?,
        counts: number(2)?,
        epsilon: how.epsilon,
        dense_share: how.dense_share,
        log_bounds: how.log_bounds(),
        rows: op.int("q", rows)?,
        q_heads: op.int("q", q_heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        head_dim: op.int("kv", head_dim)?,
        dtype: op.dtype("kv", dtype)?,
        table_stride: op.int("tables", stride)?,
        per_block: op.int("bounds", per_block)?,
        score_stride: op.int("max_len", score_stride)?,
        page_stride: op.int("max_len", page_stride)?,
        words: op.int("max_len", words)?,
        capacity: op.int("max_len", capacity)?,
        draw_stride: op.int("guesses", GUESS_KEYS)?,
        pilot_tokens: op.int("pilot_tokens", how.pilot_tokens)?,
        looks: op.int("looks", LOOKS)?,
        token_shift: lists.token_shift as i32,
        scale,
        ..TaperCertainParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_certain_promote, &p) }?;
    let exact = Lists { token_ids: Some(ids.into()), ..Lists::over(work, rows, kv_heads) };
    Ok(Promoted { p, exact, wants, numbers, _held: (pages, [o, lse, guesses, centre, reach, rest]) })
}

/// A sample beside that, and everything for lists that came to that.
fn look(op: &Op, batch: &Batch, promoted: Promoted, streams: Streams, how: &Certainty) -> Result<(Sampled, Lists)> {
    let Promoted { mut p, exact, wants, numbers, _held } = promoted;
    let Dims { rows, q_heads, kv_heads, head_dim, .. } = batch.dims(op)?;
    let count = rows * kv_heads;
    let (o, lse) = Plan::new(exact.clone(), batch)?.attend(batch, None, DType::F32)?;
    let most = (p.capacity as usize).min(how.pilot().saturating_mul(1 << (LOOKS - 1)));
    let draws = draw_each(&exact, streams, batch.max_len, most, (Some(&wants), None))?.0;
    let sampled = (op.empty((rows, q_heads, head_dim), DType::F32)?, op.empty((rows, q_heads), DType::F32)?);
    let last = op.empty((count, WORDS), DType::U32)?;
    p.lists = p.work;
    p.work = op.at("work", &last, DType::U32, [count, WORDS])?;
    p.known_o = op.at("known", &o, DType::F32, [rows, q_heads, head_dim])?;
    p.known_lse = op.at("known", &lse, DType::F32, [rows, q_heads])?;
    p.draws = op.at("draws", &draws, DType::U32, [count, most])?;
    p.draw_stride = op.int("draws", most)?;
    p.out = op.at("out", &sampled.0, DType::F32, [rows, q_heads, head_dim])?;
    p.lse = op.at("lse", &sampled.1, DType::F32, [rows, q_heads])?;
    // SAFETY: likewise.
    unsafe { op.launch(ffi::taper_certain_look, &p) }?;

    let plan = Plan::new(Lists::over(last, rows, kv_heads), batch)?;
    let (out, lse) = plan.attend(batch, Some((&sampled.0, &sampled.1)), DType::F32)?;
    Ok((Sampled { out, lse, numbers, lists: count, most }, exact))
}
