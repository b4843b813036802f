//! Lists key by key: the token at each place of a list, in the order of decode attention (ranges, blocks, single tokens, the
//! sample), and the scores there. A list of everything is in the order of its tokens.

use super::batch::{Batch, Dims, Lists, WORDS};
use super::error::Result;
use super::ffi::{self, TaperScoreParams, TaperWalkParams, TaperWeighParams};
use super::op::Op;
use super::readback::Readback;
use super::sample::Sampled;
use crate::kv::BLOCK_TOKENS;
use bytemuck::Zeroable;
use candle_core::{DType, Tensor};

/// A step that sampled beside lists, and the keys of its samples `[lists, most]`, u32.
pub(super) type Beside<'a> = (&'a Sampled, &'a Tensor);

/// What lists name, place by place; one list a KV head.
#[derive(Debug)]
pub(super) struct Walked {
    /// Tokens `[lists, places]`, u32; what lies beyond a list's keys is unwritten. `places` is a multiple of 64.
    pub ids: Tensor,
    /// Keys of each list.
    pub counts: Readback,
    /// The first key of each list's sample `[lists]`, u32; the list's end where it has none.
    firsts: Tensor,
    pub heads: usize,
}

impl Walked {
    /// Walks lists that name no more than `most` keys each. They are those that `beside` was given, if there is that.
    ///
    /// # Errors
    /// A device error.
    pub fn new(op: &Op, lists: &Lists, beside: Option<Beside>, most: usize) -> Result<Self> {
        let (count, places) = (lists.rows * lists.heads, most.next_multiple_of(BLOCK_TOKENS));
        let ids = op.empty((count, places), DType::U32)?;
        let (counts, firsts) = (Readback::new(op, count)?, op.empty(count, DType::U32)?);
        let mut p = TaperWalkParams {
            work: op.at("lists", &lists.work, DType::U32, [count, WORDS])?,
            block_ids: op.pool("lists", lists.block_ids.as_deref())?,
            token_ids: op.pool("lists", lists.token_ids.as_deref())?,
            ids: op.at("ids", &ids, DType::U32, [count, places])?,
            counts: op.at("counts", &counts.tensor(count)?, DType::U32, [count])?,
            firsts: op.at("firsts", &firsts, DType::U32, [count])?,
            lists: op.int("lists", count)?,
            capacity: op.int("max_len", places)?,
            token_shift: lists.token_shift as i32,
            ..TaperWalkParams::zeroed()
        };
        if let Some((of, keys)) = beside {
            let stride = keys.dim(1)?;
            p.states = op.at("state", &of.state()?, DType::U32, [count])?;
            p.sampled = op.at("counts", &of.counts()?, DType::U32, [count])?;
            p.draws = op.at("draws", keys, DType::U32, [count, stride])?;
            p.draw_stride = op.int("draws", stride)?;
        }
        // SAFETY: every address was checked against the shapes given beside it.
        unsafe { op.launch(ffi::taper_walk, &p) }?;
        Ok(Self { ids, counts, firsts, heads: lists.heads })
    }

    /// Keys of each list `[lists]`, u32.
    pub fn count(&self) -> Result<Tensor> {
        self.counts.tensor(self.ids.dim(0)?)
    }
}

/// What scores of listed keys come from.
pub(super) enum ScoredBy<'a> {
    /// Scores of all tokens `[R, q_heads, entries]`, f32.
    Known(&'a Tensor),
    /// Queries of the cache's dtype `[R, q_heads, head_dim]`, and where those are not the batch's, of how few keys the
    /// batch's score a list.
    Queries(&'a Tensor, Option<usize>),
}

/// Scaled scores in the order of lists, and log weights of samples, which [`spread`](super::spread) draws by.
#[derive(Debug)]
pub(super) struct ListScores {
    pub of: Walked,
    /// `[R, q_heads, places]`, f32; what lies beyond a list's keys is unwritten.
    pub scores: Tensor,
    /// Of every 64 of them the largest, and the sum of exp(score - largest) `[R, q_heads, places / 64]`, f32; likewise.
    pub tiles: (Tensor, Tensor),
}

/// Scores what was walked of `lists`. Reads each key once for its group, unless scores are known.
///
/// # Errors
/// Shapes or dtypes that differ.
pub(super) fn list_scores(
    op: &Op,
    batch: &Batch,
    lists: &Lists,
    of: Walked,
    beside: Option<Beside>,
    by: &ScoredBy,
) -> Result<ListScores> {
    let Dims { rows, q_heads, kv_heads, head_dim, blocks, tables, stride, dtype } = batch.dims(op)?;
    let (count, places) = (rows * kv_heads, of.ids.dim(1)?);
    lists.fits(op, rows, kv_heads)?;
    let scores = op.empty((rows, q_heads, places), DType::F32)?;
    let counts = of.count()?;
    let ids_at = op.at("ids", &of.ids, DType::U32, [count, places])?;
    let counts_at = op.at("counts", &counts, DType::U32, [count])?;
    let scores_at = op.at("out", &scores, DType::F32, [rows, q_heads, places])?;
    if let ScoredBy::Queries(q, few) = by {
        let whole = few.map(|_| batch.q);
        let p = TaperScoreParams {
            q: op.at("q", q, dtype, [rows, q_heads, head_dim])?,
            view: op.at("kv.k", batch.kv.k, dtype, [blocks, kv_heads, BLOCK_TOKENS, head_dim])?,
            block_table: op.at("tables", batch.tables, DType::U32, [tables, stride])?,
            lens: op.at("lens", batch.lens, DType::U32, [rows])?,
            out: scores_at,
            rows: op.int("q", rows)?,
            q_heads: op.int("q", q_heads)?,
            kv_heads: op.int("kv", kv_heads)?,
            width: op.int("kv", head_dim)?,
            dtype: op.dtype("kv", dtype)?,
            table_stride: op.int("tables", stride)?,
            per_block: BLOCK_TOKENS as i32,
            max_entries: op.int("max_len", places)?,
            stride: op.int("max_len", places)?,
            scale: 1.0 / (head_dim as f32).sqrt(),
            ids: ids_at,
            counts: counts_at,
            q_few: op.maybe("q", whole, dtype, [rows, q_heads, head_dim])?,
            few: op.int("samples", few.unwrap_or(0))?,
            ..TaperScoreParams::zeroed()
        };
        // SAFETY: every address was checked against the shapes given beside it.
        unsafe { op.launch(ffi::taper_score, &p) }?;
    }
    let known = match by {
        ScoredBy::Known(known) => Some(*known),
        ScoredBy::Queries(..) => None,
    };
    let entries = known.map_or(Ok(0), |known| known.dim(2))?;
    let tiles = places / BLOCK_TOKENS;
    let (top, sum) = (op.empty((rows, q_heads, tiles), DType::F32)?, op.empty((rows, q_heads, tiles), DType::F32)?);
    let residual = beside.map(|(of, _)| of.residual()).transpose()?;
    let sampled = lists.heads_sampled.as_ref();
    let per_head = [rows, q_heads];
    let p = TaperWeighParams {
        known: op.maybe("scores", known, DType::F32, [rows, q_heads, entries])?,
        ids: ids_at,
        counts: counts_at,
        firsts: op.at("firsts", &of.firsts, DType::U32, [count])?,
        head_counts: op.maybe("lists", sampled.map(|s| &s.0), DType::U32, per_head)?,
        head_ln_weight: op.maybe("lists", sampled.map(|s| &s.1), DType::F32, per_head)?,
        residual: op.maybe("residual", residual.as_ref(), DType::U32, [count])?,
        scores: scores_at,
        tile_max: op.at("tiles", &top, DType::F32, [rows, q_heads, tiles])?,
        tile_sum: op.at("tiles", &sum, DType::F32, [rows, q_heads, tiles])?,
        rows: op.int("q", rows)?,
        q_heads: op.int("q", q_heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        stride: op.int("max_len", places)?,
        known_stride: op.int("scores", entries)?,
    };
    // SAFETY: likewise.
    unsafe { op.launch(ffi::taper_weigh, &p) }?;
    Ok(ListScores { of, scores, tiles: (top, sum) })
}
