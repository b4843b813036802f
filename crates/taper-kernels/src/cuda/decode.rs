//! Attention of single query rows over lists, and over selections in host memory.

use super::batch::{Batch, Dims, Lists, Upload, WORDS};
use super::error::Result;
use super::ffi::{TaperDecodeParams, TaperMergeParams, taper_decode, taper_decode_plan, taper_merge};
use super::op::Op;
use super::together;
use crate::decode::{Decode, HeadSelection, check};
use crate::kv::BLOCK_TOKENS;
use bytemuck::Zeroable;
use candle_core::{DType, Tensor};
use std::cell::RefCell;
use std::collections::VecDeque;

/// Units that a row is cut into at most, and words of one.
const UNITS_PER_ROW: usize = 264;
const UNIT_WORDS: usize = 20;

/// Lists that the attention cuts into units itself, at most.
const OWN_LISTS: usize = 512;

/// Lists to be cut into units of work: by the attention itself, or by a launch of its own, once for all layers that share them.
/// Either way a list is cut by its own length.
#[derive(Debug, Clone)]
pub struct Plan {
    lists: Lists,
    cut: Option<Cut>,
    capacity: usize,
}

/// The units, and the first one of each list.
#[derive(Debug, Clone)]
struct Cut {
    units: Tensor,
    list_units: Tensor,
}

/// Units of lists at most.
fn unit_capacity(rows: usize, heads: usize) -> usize {
    rows * heads * (UNITS_PER_ROW / heads.max(1)).max(1)
}

impl Batch<'_> {
    /// The interface's view of a batch over lists.
    pub(super) fn params(&self, op: &Op, dims: &Dims, lists: &Lists) -> Result<TaperDecodeParams> {
        let Dims { rows, q_heads, kv_heads, head_dim, blocks, tables, stride, dtype } = *dims;
        let heads = lists.heads;
        let fits = lists.rows == rows && heads.is_multiple_of(kv_heads) && q_heads.is_multiple_of(heads.max(1));
        op.check(
            fits && heads > 0,
            "lists",
            format_args!("{} rows of {heads}", lists.rows),
            format_args!("{rows} rows of a multiple of {kv_heads} that divides {q_heads}"),
        )?;
        let pool = [blocks, kv_heads, BLOCK_TOKENS, head_dim];
        let tokens = lists.token_ids.as_ref().map_or(0, |ids| ids.elem_count());
        let sampled = lists.heads_sampled.as_ref();
        let per_head = [rows, q_heads];
        Ok(TaperDecodeParams {
            q: op.at("q", self.q, dtype, [rows, q_heads, head_dim])?,
            k: op.at("kv.k", self.kv.k, dtype, pool)?,
            v: op.at("kv.v", self.kv.v, dtype, pool)?,
            block_table: op.at("tables", self.tables, DType::U32, [tables, stride])?,
            lists: op.at("lists", &lists.work, DType::U32, [rows * heads, WORDS])?,
            block_ids: op.pool("lists", lists.block_ids.as_deref())?,
            token_ids: op.pool("lists", lists.token_ids.as_deref())?,
            token_ln_weight: op.maybe("lists", lists.token_ln_weights.as_ref(), DType::F32, [tokens])?,
            head_counts: op.maybe("lists", sampled.map(|s| &s.0), DType::U32, per_head)?,
            head_ln_weight: op.maybe("lists", sampled.map(|s| &s.1), DType::F32, per_head)?,
            blocks: blocks as i64,
            rows: op.int("q", rows)?,
            q_heads: op.int("q", q_heads)?,
            kv_heads: op.int("kv", kv_heads)?,
            list_heads: op.int("lists", heads)?,
            head_dim: op.int("kv", head_dim)?,
            dtype: op.dtype("kv", dtype)?,
            table_stride: op.int("tables", stride)?,
            scale: 1.0 / (head_dim as f32).sqrt(),
            gather: lists.token_ids.is_some().into(),
            token_shift: lists.token_shift as i32,
            ..TaperDecodeParams::zeroed()
        })
    }
}

/// Plans that a thread keeps.
const PLANS: usize = 8;

thread_local! {
    /// Plans for lists that are equal in all layers of a step.
    static KEPT: RefCell<VecDeque<Plan>> = RefCell::default();
}

/// Forgets kept plans: lists of the same tensors are about to be others.
pub(super) fn forget_plans() {
    KEPT.with_borrow_mut(VecDeque::clear);
}

impl Plan {
    /// As [`Plan::shared`], for lists that nothing writes to: lists of the same tensors are not cut again.
    pub(super) fn kept(lists: Lists, batch: &Batch) -> Result<Self> {
        let ids =
            |lists: &Lists| (lists.work.id(), lists.token_ids.as_ref().map(|ids| ids.id()), lists.rows, lists.heads);
        let found = KEPT.with_borrow(|kept| kept.iter().find(|plan| ids(&plan.lists) == ids(&lists)).cloned());
        if let Some(plan) = found {
            // Weights may be others: they are no part of the cut.
            return Ok(Self { lists, ..plan });
        }
        let plan = Self::shared(lists, batch)?;
        KEPT.with_borrow_mut(|kept| {
            kept.push_front(plan.clone());
            kept.truncate(PLANS);
        });
        Ok(plan)
    }

    /// Lists of one layer, for batches of the shape given.
    ///
    /// # Errors
    /// Shapes or dtypes that differ.
    pub fn new(lists: Lists, batch: &Batch) -> Result<Self> {
        if lists.rows * lists.heads > OWN_LISTS {
            return Self::shared(lists, batch);
        }
        let capacity = unit_capacity(lists.rows, lists.heads);
        Ok(Self { lists, cut: None, capacity })
    }

    /// Lists of several layers, which are cut here.
    ///
    /// # Errors
    /// Shapes or dtypes that differ.
    pub fn shared(lists: Lists, batch: &Batch) -> Result<Self> {
        let op = Op::new("decode-plan", "q", batch.q)?;
        let dims = batch.dims(&op)?;
        let capacity = unit_capacity(lists.rows, lists.heads);
        let units = op.empty((capacity, UNIT_WORDS), DType::U32)?;
        let list_units = op.empty(lists.rows * lists.heads + 1, DType::U32)?;
        let plan = Self { lists, cut: Some(Cut { units, list_units }), capacity };
        let p = plan.params(&op, &dims, batch)?;
        // SAFETY: every address was checked against the shapes given beside it.
        unsafe { op.launch(taper_decode_plan, &p) }?;
        Ok(plan)
    }

    fn params(&self, op: &Op, dims: &Dims, batch: &Batch) -> Result<TaperDecodeParams> {
        let (units, firsts) = (self.cut.as_ref().map(|cut| &cut.units), self.cut.as_ref().map(|cut| &cut.list_units));
        let lists = self.lists.rows * self.lists.heads;
        Ok(TaperDecodeParams {
            units: op.maybe("units", units, DType::U32, [self.capacity, UNIT_WORDS])?,
            list_units: op.maybe("list_units", firsts, DType::U32, [lists + 1])?,
            unit_capacity: op.int("lists", self.capacity)?,
            ..batch.params(op, dims, &self.lists)?
        })
    }

    pub(super) fn into_lists(self) -> Lists {
        self.lists
    }

    /// Attends: outputs `[R, q_heads, head_dim]` of the dtype asked for, f32 or the cache's, and the natural logarithm of
    /// each head's sum of exponentials `[R, q_heads]`, f32; a head that reads nothing gives 0 and -inf.
    ///
    /// `base` is one more partial result, output and logarithm in f32, over keys that the lists do not name.
    ///
    /// # Errors
    /// Shapes or dtypes that differ from these or from the plan's.
    pub fn attend(&self, batch: &Batch, base: Option<(&Tensor, &Tensor)>, out: DType) -> Result<(Tensor, Tensor)> {
        self.attend_scaled(batch, batch.q, base, out, None)
    }

    /// As [`Plan::attend`], by the lists' log weights alone: a mean of values with given weights, and the logarithm of
    /// their sum.
    ///
    /// # Errors
    /// Shapes or dtypes that differ.
    pub fn attend_given(&self, batch: &Batch, out: DType) -> Result<(Tensor, Tensor)> {
        self.attend_scaled(batch, batch.q, None, out, Some(0.0))
    }

    /// Attends for rows of one sequence `q` `[R, q_heads, head_dim]`, of the cache's dtype, that follow one another, of which
    /// `batch` is the last as a batch of its own, which reads all that it sees: `[R, q_heads, head_dim]`, f32.
    pub(super) fn attend_rows(&self, batch: &Batch, q: &Tensor) -> Result<Tensor> {
        Ok(self.attend_scaled(batch, q, None, DType::F32, None)?.0)
    }

    /// With `scale` 0 the lists' log weights alone decide. `q` are the batch's queries, or those of [`Plan::attend_rows`].
    fn attend_scaled(
        &self,
        batch: &Batch,
        q: &Tensor,
        base: Option<(&Tensor, &Tensor)>,
        out_dtype: DType,
        scale: Option<f32>,
    ) -> Result<(Tensor, Tensor)> {
        let op = Op::new("decode", "q", batch.q)?;
        let dims = batch.dims(&op)?;
        let Dims { q_heads, head_dim, dtype, .. } = dims;
        let rows = q.dim(0)?;
        let fold = rows / dims.rows;
        let expected = format!("F32 or {dtype:?}");
        op.check(out_dtype == DType::F32 || out_dtype == dtype, "out", format_args!("{out_dtype:?}"), expected)?;
        let group = fold * q_heads / self.lists.heads;
        let out = op.empty((rows, q_heads, head_dim), out_dtype)?;
        let lse = op.empty((rows, q_heads), DType::F32)?;
        let mut p = self.params(&op, &dims, batch)?;
        // The merge behind has read it before another launch writes there.
        p.part_o = op.room("decode-parts", self.capacity * group * head_dim, DType::F32)?;
        p.part_lse = op.room("decode-lse", self.capacity * group, DType::F32)?;
        p.scale = scale.unwrap_or(p.scale);
        p.q = op.at("q", q, dtype, [rows, q_heads, head_dim])?;
        p.fold = op.int("q", fold)?;
        let m = TaperMergeParams {
            part_o: p.part_o,
            part_lse: p.part_lse,
            list_units: p.list_units,
            out: op.at("out", &out, out_dtype, [rows, q_heads, head_dim])?,
            lse: op.at("lse", &lse, DType::F32, [rows, q_heads])?,
            base_o: op.maybe("base", base.map(|b| b.0), DType::F32, [rows, q_heads, head_dim])?,
            base_lse: op.maybe("base", base.map(|b| b.1), DType::F32, [rows, q_heads])?,
            rows: op.int("q", rows)?,
            q_heads: p.q_heads,
            list_heads: p.list_heads,
            head_dim: p.head_dim,
            dtype: p.dtype,
            out_f32: (out_dtype == DType::F32).into(),
            fold: p.fold,
            lists: if self.cut.is_none() { p.lists } else { std::ptr::null() },
        };
        // SAFETY: every address was checked against the shapes given beside it.
        unsafe { op.launch(taper_decode, &p) }?;
        // SAFETY: likewise.
        unsafe { op.launch(taper_merge, &m) }?;
        Ok((out, lse))
    }
}

/// [`crate::decode::attend`] over a selection in host memory: queries in f32 are rounded to the cache's dtype; returns
/// `[R, q_heads, head_dim]`, f32.
pub(super) fn attend_host(batch: &Decode, selection: &[HeadSelection]) -> Result<Tensor> {
    let op = Op::new("attend", "q", batch.q)?;
    let (_, q_heads, kv_heads, _) = batch.dims()?;
    let group = q_heads / kv_heads;
    check(batch, selection, kv_heads, group)?;
    if let Some(out) = together::attend(&op, batch, selection)? {
        return Ok(out);
    }
    let upload = Upload::new(&op, batch)?;
    let on_device = upload.batch(batch.kv);
    let base = match Lists::upload_values(&op, batch.rows, selection, group)? {
        None => None,
        Some(values) => Some(Plan::new(values, &on_device)?.attend_given(&on_device, DType::F32)?),
    };
    let plan = Plan::kept(Lists::upload(&op, batch.rows, selection, group)?, &on_device)?;
    Ok(plan.attend(&on_device, base.as_ref().map(|b| (&b.0, &b.1)), DType::F32)?.0)
}
