//! Scores of what stands for keys, and lists chosen by them: what [`crate::decode::scores`], [`crate::decode::top_k`] and
//! [`crate::decode::top_p`] do, on a CUDA device and without the host.

use super::batch::{Batch, Dims, Draft, Lists, WORDS};
use super::decode::Plan;
use super::error::Result;
use super::ffi::{
    self, TaperGroupSelectParams, TaperLseParams, TaperPagesParams, TaperPickParams, TaperScoreParams,
    TaperSelectParams, TaperSharesParams,
};
use super::layer::addresses;
use super::op::{self, Op};
use super::readback::Readback;
use super::sample::Scratch;
use crate::CUDA_HEAD_DIMS;
use crate::decode::Over;
use crate::index::labels::ON_DEVICE;
use crate::kv::BLOCK_TOKENS;
use crate::lent::Lent;
use bytemuck::Zeroable;
use candle_core::{DType, Tensor};
use std::ops::Range;

/// What is scored in place of keys.
#[derive(Clone, Copy)]
pub enum View<'a> {
    /// Keys, or some channels of them, or means of pages `[blocks, kv_heads, entries of a block, width]`; width 16, 32, 64
    /// or 128 is that of the queries.
    Rows(&'a Tensor),
    /// Channel-wise bounds of pages `[blocks, kv_heads, pages of a block, 2 width]`, minima, then maxima: the largest score
    /// that they allow.
    Pages(&'a Tensor),
}

/// Scaled scores of every entry of each row and query head, and their log-sum-exp.
#[derive(Debug)]
pub struct Scores {
    /// `[R, q_heads, entries]`, f32; what lies beyond a row's entries is unwritten.
    pub(super) scores: Lent,
    /// Of every 64 of them the largest, and the sum of exp(score - largest) `[R, q_heads, entries / 64]`, f32; beyond a row's
    /// entries unwritten.
    pub(super) tiles: (Tensor, Tensor),
    /// `[R, q_heads]`, f32.
    pub(super) lse: Tensor,
    /// Tokens of an entry.
    pub(super) page: usize,
}

impl Scores {
    /// Natural logarithm of each head's sum of exponentials `[R, q_heads]`, f32.
    pub fn lse(&self) -> &Tensor {
        &self.lse
    }

    pub(super) fn of(&self) -> (&Tensor, Option<&Tensor>, usize) {
        (&self.scores, Some(&self.lse), self.page)
    }

    /// Scaled scores `[R, q_heads, entries]`, f32; what lies beyond a row's entries is not defined.
    pub fn values(&self) -> &Tensor {
        &self.scores
    }
}

/// Where a view lies.
struct ViewAt {
    upper: *const u16,
    /// Null where there is none.
    lower: *const u16,
    dtype: DType,
    width: usize,
    /// Elements from one entry to the next.
    pitch: usize,
    per_block: usize,
}

impl ViewAt {
    fn new(op: &Op, view: View, widths: &[usize], (blocks, kv_heads): (usize, usize)) -> Result<Self> {
        let (view, pages) = match view {
            View::Rows(view) => (view, false),
            View::Pages(view) => (view, true),
        };
        let (_, _, per_block, pitch) = view.dims4()?;
        let width = if pages { pitch / 2 } else { pitch };
        let widths = if pages { &CUDA_HEAD_DIMS[..] } else { widths };
        op.check(widths.contains(&width), "view", format_args!("{width} wide"), format_args!("{widths:?}"))?;
        let fits = per_block > 0 && BLOCK_TOKENS.is_multiple_of(per_block);
        op.check(fits, "view", format_args!("{per_block} entries a block"), "a divisor of 64")?;
        let (dtype, shape) = (view.dtype(), [blocks, kv_heads, per_block, pitch]);
        let first = op.at::<u16>("view", view, dtype, shape)?.cast_const();
        // Of minima and maxima beside each other the upper bounds come second.
        let (upper, lower) = match pages {
            true => (first.wrapping_add(width), first),
            false => (first, std::ptr::null()),
        };
        Ok(Self { upper, lower, dtype, width, pitch, per_block })
    }
}

/// Scores every entry of a view that rows see. `q` are the batch's queries, or their channels where the view has fewer
/// `[R, q_heads, width]`; scores are multiplied by `scale`.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn scores(batch: &Batch, q: &Tensor, view: View, scale: f32) -> Result<Scores> {
    let op = Op::new("scores", "q", q)?;
    let Dims { rows, q_heads, kv_heads, blocks, tables, stride, .. } = batch.dims(&op)?;
    let at = ViewAt::new(&op, view, &ON_DEVICE, (blocks, kv_heads))?;
    let ViewAt { dtype, width, per_block, .. } = at;
    let page = BLOCK_TOKENS / per_block;
    let of = Passed::new(&op, (rows, q_heads), batch.max_len, page)?;
    let (entries, tiles) = (of.entries, of.entries / 64);
    let p = TaperScoreParams {
        q: op.at("q", q, dtype, [rows, q_heads, width])?,
        view: at.upper.cast(),
        lower: at.lower.cast(),
        pitch: op.int("view", at.pitch)?,
        block_table: op.at("tables", batch.tables, DType::U32, [tables, stride])?,
        lens: op.at("lens", batch.lens, DType::U32, [rows])?,
        out: op.at("out", &of.scores, DType::F32, [rows, q_heads, entries])?,
        tile_max: op.at("tiles", &of.top, DType::F32, [rows, q_heads, tiles])?,
        tile_sum: op.at("tiles", &of.sum, DType::F32, [rows, q_heads, tiles])?,
        rows: op.int("q", rows)?,
        q_heads: op.int("q", q_heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        width: op.int("view", width)?,
        dtype: op.dtype("view", dtype)?,
        table_stride: op.int("tables", stride)?,
        per_block: op.int("view", per_block)?,
        max_entries: op.int("max_len", batch.max_len.div_ceil(page))?,
        stride: op.int("max_len", entries)?,
        tile_stride: op.int("max_len", tiles)?,
        scale,
        ..TaperScoreParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_score, &p) }?;
    of.summed(&op, batch)
}

/// What a score pass writes, behind which the log-sum-exp is taken.
pub(super) struct Passed {
    /// `[R, q_heads, entries]`, f32, and how many entries: a multiple of 64.
    pub scores: Lent,
    pub entries: usize,
    /// `[R, q_heads, entries / 64]`, f32.
    pub top: Tensor,
    pub sum: Tensor,
    page: usize,
}

impl Passed {
    /// Room for pages of so many tokens of rows that see up to `max_len`.
    pub fn new(op: &Op, (rows, q_heads): (usize, usize), max_len: usize, page: usize) -> Result<Self> {
        let entries = max_len.div_ceil(page).next_multiple_of(64);
        let tiles = entries / 64;
        let scores = op.lent((rows, q_heads, entries), DType::F32)?;
        let (top, sum) = (op.empty((rows, q_heads, tiles), DType::F32)?, op.empty((rows, q_heads, tiles), DType::F32)?);
        Ok(Self { scores, entries, top, sum, page })
    }

    /// The launch that is to follow the pass, with what that has written.
    pub fn summed(self, op: &Op, batch: &Batch) -> Result<Scores> {
        let (rows, q_heads, tiles) = self.top.dims3()?;
        let lse = op.empty((rows, q_heads), DType::F32)?;
        let p = TaperLseParams {
            tile_max: op.at("tiles", &self.top, DType::F32, [rows, q_heads, tiles])?,
            tile_sum: op.at("tiles", &self.sum, DType::F32, [rows, q_heads, tiles])?,
            lens: op.at("lens", batch.lens, DType::U32, [rows])?,
            lse: op.at("lse", &lse, DType::F32, [rows, q_heads])?,
            rows: op.int("q", rows)?,
            q_heads: op.int("q", q_heads)?,
            tile_stride: op.int("max_len", tiles)?,
            page: op.int("view", self.page)?,
        };
        // SAFETY: every address was checked against the shapes given beside it.
        unsafe { op.launch(ffi::taper_lse, &p) }?;
        Ok(Scores { scores: self.scores, tiles: (self.top, self.sum), lse, page: self.page })
    }
}

/// The sinks and the window of each row, as [`Lists`]; candidates lie between them.
#[derive(Debug)]
pub(super) struct Between {
    pub lists: Lists,
    /// First candidate entry, and one past the last, of each list `[lists]`, u32.
    pub begins: Tensor,
    pub ends: Tensor,
}

impl Between {
    /// Of each list `[R * heads]` the two ranges that its candidates lie between, token by token, or none for a list that
    /// reads all of its `lens` `[R]` tokens.
    pub fn of(op: &Op, lens: &[usize], fixed: &[Option<[Range<usize>; 2]>], page: usize) -> Result<Self> {
        let heads = fixed.len() / lens.len().max(1);
        let (mut made, mut begins, mut ends) = (Draft::default(), Vec::new(), Vec::new());
        for (i, fixed) in fixed.iter().enumerate() {
            made.begin(lens[i / heads] as u32);
            match fixed {
                None => made.whole(lens[i / heads] as u32),
                Some(ranges) => ranges.iter().for_each(|r| made.range(r.start as u32, r.end as u32)),
            }
            let between = fixed.as_ref().map_or(0..0, |ranges| ranges[0].end..ranges[1].start);
            begins.push((between.start / page) as u32);
            ends.push(between.end.div_ceil(page) as u32);
        }
        Ok(Self {
            lists: made.finish(op, lens.len(), heads)?,
            begins: op.kept(&begins, [begins.len()])?,
            ends: op.kept(&ends, [ends.len()])?,
        })
    }
}

/// The sinks, the window, and of the tokens between them the fewest with which the whole choice holds the share `p` of the
/// attention mass, summed over the group; ties go to the earlier. A list that would be longer than `capacity` reads
/// everything.
///
/// # Errors
/// Shapes that differ; scores of pages.
pub(super) fn top_p(batch: &Batch, scores: &Scores, between: Between, p: f32, capacity: usize) -> Result<Lists> {
    let op = Op::new("top_p", "q", batch.q)?;
    let Dims { rows, q_heads, kv_heads, .. } = batch.dims(&op)?;
    op.check(scores.page == 1, "scores", format_args!("of pages of {}", scores.page), "of tokens")?;
    // What sinks and window hold already, from attention over them alone.
    let Between { lists, begins, ends } = between;
    let plan = Plan::new(lists, batch)?;
    let held = plan.attend(batch, None, DType::F32)?.1;
    let shares = op.empty(rows * kv_heads, DType::F32)?;
    let of = TaperSharesParams {
        held: op.at("held", &held, DType::F32, [rows, q_heads])?,
        lse: op.at("scores", &scores.lse, DType::F32, [rows, q_heads])?,
        shares: op.at("shares", &shares, DType::F32, [rows * kv_heads])?,
        rows: op.int("q", rows)?,
        q_heads: op.int("q", q_heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        p,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_shares, &of) }?;
    let how = How { capacity, mass: ffi::TAPER_BY_SCORE, shares: Some(&shares), ..How::default() };
    select(&op, batch, scores.of(), Between { lists: plan.into_lists(), begins, ends }, &how)
}

/// Of each list of `scores` `[lists, entries]`, f32, the `ks` `[lists]` largest within `[begins, ends)` `[lists]`, ties to the
/// earlier: ids `[lists, capacity]`, ascending, and how many `[lists]`, u32.
pub(super) fn largest(
    op: &Op,
    scores: &Tensor,
    [begins, ends, ks]: [&[u32]; 3],
    capacity: usize,
) -> Result<(Tensor, Tensor)> {
    let (lists, entries) = scores.dims2()?;
    let fits = ends.iter().all(|&end| end as usize <= entries) && ks.iter().all(|&k| k as usize <= capacity);
    op.check(fits, "ks", format_args!("up to {:?}", ks.iter().max()), format_args!("{capacity} of {entries}"))?;
    let (ids, counts) = (op.empty((lists, capacity), DType::U32)?, op.empty(lists, DType::U32)?);
    let [begins, ends, ks] = [op.upload(begins, [lists])?, op.upload(ends, [lists])?, op.upload(ks, [lists])?];
    let p = TaperSelectParams {
        scores: op.at("scores", scores, DType::F32, [lists, entries])?,
        begins: op.at("begins", &begins, DType::U32, [lists])?,
        ends: op.at("ends", &ends, DType::U32, [lists])?,
        ks: op.at("ks", &ks, DType::U32, [lists])?,
        ids: op.at("ids", &ids, DType::U32, [lists, capacity])?,
        counts: op.at("counts", &counts, DType::U32, [lists])?,
        lists: op.int("scores", lists)?,
        stride: op.int("scores", entries)?,
        capacity: op.int("capacity", capacity)?,
        entries: op.int("scores", entries)?,
        ..TaperSelectParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_select, &p) }?;
    Ok((ids, counts))
}

/// What decides how many entries a list takes.
#[derive(Default)]
pub(super) struct How<'a> {
    capacity: usize,
    k: i32,
    ks: Option<&'a Tensor>,
    mass: i32,
    shares: Option<&'a Tensor>,
    /// By count: what sampling costs, in squared shares; above 0 only what is cheaper to take is.
    noise: f32,
    over: Over,
}

impl<'a> How<'a> {
    /// Over the group so, and where there is `noise`, in squared shares of entries, only what is cheaper to take than to sample
    /// around.
    pub fn paying(self, noise: Option<f32>, over: Over) -> Self {
        Self { noise: noise.unwrap_or_default(), over, ..self }
    }

    /// At most `k` of so many entries; of each list as many as `ks` `[lists]`, u32, says, which are no more.
    pub fn by_count(op: &Op, k: usize, ks: &'a Tensor, entries: usize) -> Result<Self> {
        let capacity = k.clamp(1, entries);
        Ok(Self { capacity, k: op.int("k", k)?, ks: Some(ks), mass: ffi::TAPER_BY_COUNT, ..Self::default() })
    }
}

/// How a group's shares become one.
pub(super) fn reduce(over: Over) -> i32 {
    match over {
        Over::Sum => ffi::TAPER_SUM_OF_GROUP,
        Over::Max => ffi::TAPER_MAX_OF_GROUP,
    }
}

/// Chooses by scores and their log-sum-exp, with which a group's shares become one, or by what is a group's already.
pub(super) fn select(
    op: &Op,
    batch: &Batch,
    (scores, lse, page): (&Tensor, Option<&Tensor>, usize),
    between: Between,
    how: &How,
) -> Result<Lists> {
    let Dims { rows, q_heads, kv_heads, .. } = batch.dims(op)?;
    let heads = if lse.is_some() { q_heads } else { kv_heads };
    let Between { lists, begins, ends } = between;
    let (count, entries) = (rows * kv_heads, scores.dim(2)?);
    lists.fits(op, rows, kv_heads)?;
    let (told, work) = Lists::told(op, count)?;
    let chosen = op.empty(count, DType::U32)?;
    let ids = op.lent((count, how.capacity), DType::U32)?;
    let base = TaperSelectParams {
        scores: op.at("scores", scores, DType::F32, [rows, heads, entries])?,
        begins: op.at("between", &begins, DType::U32, [count])?,
        ends: op.at("between", &ends, DType::U32, [count])?,
        ids: op.at("ids", &ids, DType::U32, [count, how.capacity])?,
        ks: op.maybe("k", how.ks, DType::U32, [count])?,
        counts: op.at("counts", &chosen, DType::U32, [count])?,
        given: op.at("between", &lists.work, DType::U32, [count, WORDS])?,
        // Of pages the lists are told by the launch behind.
        work: op.maybe("between", (page == 1).then_some(&work), DType::U32, [count, WORDS])?,
        lists: op.int("scores", count)?,
        stride: op.int("scores", entries)?,
        capacity: op.int("capacity", how.capacity)?,
        entries: op.int("scores", entries)?,
        k: how.k,
        noise: how.noise,
    };
    let p = TaperGroupSelectParams {
        base,
        lse: op.maybe("scores", lse, DType::F32, [rows, heads])?,
        shares: op.maybe("shares", how.shares, DType::F32, [count])?,
        group: op.int("q", heads / kv_heads)?,
        reduce: reduce(how.over),
        mass: how.mass,
        ..TaperGroupSelectParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_select_group, &p) }?;
    let token_ids = match page {
        1 => ids.reshape(count * how.capacity)?,
        _ => pages(op, [&lists.work, &work], &ids, &chosen, page)?,
    };
    Ok(Lists { work, told, token_ids: Some(token_ids), ..lists })
}

/// The tokens of the pages chosen that lie between the lists' ranges, which the lists are made to name.
fn pages(op: &Op, [given, work]: [&Tensor; 2], chosen: &Tensor, counts: &Tensor, page: usize) -> Result<Lent> {
    let (count, capacity) = chosen.dims2()?;
    let ids = op.lent(count * capacity * page, DType::U32)?;
    let p = TaperPagesParams {
        pages: op.at("pages", chosen, DType::U32, [count, capacity])?,
        counts: op.at("counts", counts, DType::U32, [count])?,
        ids: op.at("ids", &ids, DType::U32, [count * capacity * page])?,
        given: op.at("between", given, DType::U32, [count, WORDS])?,
        work: op.at("between", work, DType::U32, [count, WORDS])?,
        lists: op.int("scores", count)?,
        capacity: op.int("capacity", capacity)?,
        page: op.int("page", page)?,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_pages, &p) }?;
    Ok(ids)
}

/// Most pages that [`pick_pages`] chooses among.
const PICK_MOST: usize = 32_768;

/// Bytes that a thread block has for its own pages' scores of a group.
const PICK_SCORES: usize = 220 * 1024;

/// Whether [`pick_pages`] chooses among so many pages of so many query and KV heads.
pub(super) fn picks(max_len: usize, page: usize, (q_heads, kv_heads): (usize, usize)) -> bool {
    let pages = max_len.div_ceil(page);
    let own = pages.div_ceil(16).div_ceil(op::team(kv_heads)) * 16;
    pages <= PICK_MOST && own * (q_heads / kv_heads) * size_of::<f32>() <= PICK_SCORES
}

/// What pages are picked by, in one layer or in several at once.
#[derive(Clone, Copy)]
pub(super) enum Pages<'a> {
    /// By the batch's queries against these bounds.
    Own(&'a Tensor),
    /// The same by queries of tokens before, of which no more is asked than that lists are what they are beside others.
    Earlier(&'a Tensor),
    /// By the queries of each row `[layers, q_heads, head_dim]`, from the `first` layer on, against each layer's bounds.
    Layers { queries: &'a [Tensor], first: usize, bounds: &'a [Tensor] },
}

/// Thread blocks that share a list of pages which are chosen ahead: few, since there are lists for all layers; where one has no
/// room for the scores of a group, as many as have.
fn team_ahead(max_len: usize, page: usize, group: usize) -> usize {
    let tiles = max_len.div_ceil(page).div_ceil(16);
    tiles.div_ceil((PICK_SCORES / (16 * group * size_of::<f32>())).max(1)).max(1)
}

/// As [`select`] by the scores of pages, which are scored and chosen in one launch; see [`picks`]. `k` is the most, `ks` how
/// many of each list `[lists]`, u32, `noise` what sampling costs in squared shares of pages. Lists of each layer.
pub(super) fn pick_pages(
    op: &Op,
    batch: &Batch,
    pages: Pages,
    between: Between,
    (k, ks, noise): (usize, &Tensor, Option<f32>),
    (longest, over): (usize, Over),
) -> Result<Vec<Lists>> {
    let Dims { rows, q_heads, kv_heads, head_dim, blocks, tables, stride, dtype } = batch.dims(op)?;
    let bounds = match pages {
        Pages::Own(bounds) | Pages::Earlier(bounds) => std::slice::from_ref(bounds),
        Pages::Layers { bounds, .. } => bounds,
    };
    let of = |bounds: &Tensor| ViewAt::new(op, View::Pages(bounds), &CUDA_HEAD_DIMS, (blocks, kv_heads));
    let views = bounds.iter().map(of).collect::<Result<Vec<_>>>()?;
    let [at, ..] = &views[..] else { return Err(op.error("view", 0, "at least one")) };
    let same = views.iter().all(|of| of.width == head_dim && of.dtype == dtype && of.per_block == at.per_block);
    op.check(same, "view", at.width, format_args!("{head_dim} of {dtype:?}"))?;
    let Between { lists, begins, ends } = between;
    lists.fits(op, rows, kv_heads)?;
    let (page, layers) = (BLOCK_TOKENS / at.per_block, bounds.len());
    let (count, most) = (rows * kv_heads, batch.max_len.div_ceil(page));
    op.check(most <= PICK_MOST, "max_len", batch.max_len, format_args!("{PICK_MOST} pages of {page}"))?;
    // Of a layer, on 16 bytes.
    let capacity = k.clamp(1, most).next_multiple_of(4);
    let ids = match layers {
        1 => op.lent((count, capacity), DType::U32)?,
        // Each layer's are held apart from the others'.
        _ => op.empty((layers * count, capacity), DType::U32)?.into(),
    };
    let told = Readback::new(op, layers * count * WORDS)?;
    let work = told.tensor((layers * count, WORDS))?;
    let scratch = Scratch::kept(batch.q, layers * rows, q_heads, kv_heads)?;
    let (of_layers, of_rows, first) = match pages {
        Pages::Own(_) | Pages::Earlier(_) => (None, None, 0),
        Pages::Layers { queries, first, .. } => {
            op.check(queries.len() == rows, "queries", queries.len(), rows)?;
            let addresses = addresses(op, queries.iter().map(Some), (first + layers, q_heads, head_dim), dtype)?;
            let views: Vec<i64> = views.iter().map(|view| view.lower as i64).collect();
            (Some(op.kept(&views, [layers])?), Some(addresses), first)
        }
    };
    let p = TaperPickParams {
        q: op.at("q", batch.q, dtype, [rows, q_heads, head_dim])?,
        view: at.upper.cast(),
        lower: at.lower.cast(),
        layers: if of_layers.is_some() { op.int("view", layers)? } else { 0 },
        first: op.int("view", first)?,
        queries: op.maybe("queries", of_rows.as_ref(), DType::I64, [rows])?,
        views: op.maybe("view", of_layers.as_ref(), DType::I64, [layers])?,
        team_most: match pages {
            Pages::Own(_) => 0,
            _ => op.int("team", team_ahead(batch.max_len, page, q_heads / kv_heads))?,
        },
        block_table: op.at("tables", batch.tables, DType::U32, [tables, stride])?,
        lens: op.at("lens", batch.lens, DType::U32, [rows])?,
        begins: op.at("between", &begins, DType::U32, [count])?,
        ends: op.at("between", &ends, DType::U32, [count])?,
        ks: op.at("k", ks, DType::U32, [count])?,
        lists: op.at("between", &lists.work, DType::U32, [count, WORDS])?,
        keys: op.room("pick-keys", layers * count * most, DType::U32)?,
        ids: op.at("ids", &ids, DType::U32, [layers * count, capacity])?,
        work: op.at("work", &work, DType::U32, [layers * count, WORDS])?,
        sync: op.at("scratch", &scratch.sync, DType::U32, [2 + layers * count, 32])?,
        masses: op.at("scratch", &scratch.sums, DType::I64, scratch.sums.dims())?,
        rows: op.int("q", rows)?,
        q_heads: op.int("q", q_heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        width: op.int("kv", head_dim)?,
        dtype: op.dtype("kv", dtype)?,
        table_stride: op.int("tables", stride)?,
        per_block: op.int("view", at.per_block)?,
        pitch: op.int("view", at.pitch)?,
        stride: op.int("max_len", most)?,
        capacity: op.int("k", capacity)?,
        k: op.int("k", k)?,
        reduce: match over {
            Over::Sum => ffi::TAPER_SUM_OF_GROUP,
            Over::Max => ffi::TAPER_MAX_SHARE_OF_GROUP,
        },
        target: ffi::TAPER_TOKENS,
        scale: 1.0 / (head_dim as f32).sqrt(),
        // Pages of older tokens are scored while those of the newest are being made.
        fresh: op::fresh(longest),
        noise: noise.unwrap_or_default(),
        ..TaperPickParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_pick, &p) }?;
    let lists = Lists { token_shift: page.trailing_zeros(), ..lists };
    if layers == 1 {
        return Ok(vec![Lists { work, told: Some(told), token_ids: Some(ids), ..lists }]);
    }
    let of_layer = |layer: usize| {
        let part = |t: &Tensor| t.narrow(0, layer * count, count);
        let told = told.part(layer * count * WORDS, count * WORDS)?;
        Ok(Lists { work: part(&work)?, told: Some(told), token_ids: Some(part(&ids)?.into()), ..lists.clone() })
    };
    (0..layers).map(of_layer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the launch in kernels/select/pick.cu asks for.
    #[test]
    fn pages_are_picked_where_a_thread_blocks_scores_have_room() {
        assert!(picks(524_288, 16, (32, 8)) && picks(1_048_576, 64, (128, 8)));
        assert!(!picks(524_289, 16, (32, 8)), "more pages than 32,768");
        assert!(
            picks(450_000, 16, (256, 16)) && !picks(455_000, 16, (256, 16)),
            "16 pages of 16 heads on each of 8 blocks"
        );
        assert!(picks(16_384, 16, (9, 3)) && picks(64, 64, (1, 1)));
    }
}
