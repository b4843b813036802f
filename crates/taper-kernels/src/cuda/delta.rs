//! Delta Attention's epilogue: [`crate::correct::correct`] on a CUDA device, and the pass in place.

use super::error::Result;
use super::ffi::{TaperDeltaParams, taper_delta};
use super::op::Op;
use crate::correct::{Anchors, Correction};
use bytemuck::Zeroable;
use candle_core::{DType, Tensor};

/// Rows of a prompt to correct in place.
#[derive(Clone, Copy)]
pub struct Delta<'a> {
    /// Sparse rows `[T, q_heads, head_dim]`, bf16 or f16, which become the corrected ones.
    pub rows: &'a Tensor,
    /// Absolute position of row 0.
    pub position: usize,
    /// Sparse rows of the anchors `[A, q_heads, head_dim]`, f32.
    pub base: &'a Tensor,
    /// Dense rows of the anchors, then those of the rows from `tail` on `[A + D, q_heads, head_dim]`, f32.
    pub dense: &'a Tensor,
    /// Which multiple of gamma the arrays' first anchor is.
    pub first_anchor: usize,
    /// Absolute position from which rows are dense.
    pub tail: usize,
    /// From one anchor to the next; anchors stand at its multiples.
    pub gamma: usize,
    /// What the difference at an anchor does.
    pub correction: Correction,
}

/// Corrects rows in place by the difference at the anchor before each.
///
/// # Errors
/// Shapes or dtypes that differ, rows without an anchor, fewer dense rows than the tail has.
pub fn delta(of: &Delta) -> Result<()> {
    let op = Op::new("delta", "rows", of.rows)?;
    let (tokens, q_heads, head_dim) = of.rows.dims3()?;
    let (anchors, dense) = (of.base.dim(0)?, of.dense.dim(0)?);
    let end = of.position + tokens;
    op.check(of.gamma > 0, "gamma", of.gamma, "at least 1")?;
    op.check(matches!(head_dim, 64 | 128), "rows", format!("head_dim {head_dim}"), "64 or 128")?;
    let sparse_end = end.min(of.tail);
    if of.position < sparse_end {
        let (first, last) = (of.position / of.gamma, (sparse_end - 1) / of.gamma);
        let held = of.first_anchor..of.first_anchor + anchors;
        let fits = held.contains(&first) && held.contains(&last);
        op.check(fits, "base", format!("anchors {held:?}"), format!("{first} to {last}"))?;
    }
    let tail = end.saturating_sub(of.tail.max(of.position));
    let needed = anchors + if tail > 0 { end - of.tail } else { 0 };
    op.check(dense >= needed, "dense", dense, format!("{needed} rows"))?;
    if tokens == 0 {
        return Ok(());
    }
    let dtype = of.rows.dtype();
    let p = TaperDeltaParams {
        out: op.at("rows", of.rows, dtype, [tokens, q_heads, head_dim])?,
        anchor_base: op.at("base", of.base, DType::F32, [anchors, q_heads, head_dim])?,
        anchor_dense: op.at("dense", of.dense, DType::F32, [dense, q_heads, head_dim])?,
        position: of.position as i64,
        tail_begin: of.tail as i64,
        anchor_first: of.first_anchor as i64,
        anchors: anchors as i64,
        tokens: op.int("rows", tokens)?,
        q_heads: op.int("rows", q_heads)?,
        head_dim: op.int("rows", head_dim)?,
        dtype: op.dtype("rows", dtype)?,
        gamma: op.int("gamma", of.gamma)?,
        propagate: (of.correction == Correction::Propagate).into(),
        overlap: 1,
        ..TaperDeltaParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    op.launched(unsafe { taper_delta(&p, op.stream()) })
}

/// [`crate::correct::correct`], whose shapes the caller has checked, by candle's own operations: all f32.
pub(crate) fn correct(
    sparse: &Tensor,
    dense: &Tensor,
    anchors: Anchors,
    carry: Option<&Tensor>,
    correction: Correction,
) -> candle_core::Result<(Tensor, Option<Tensor>)> {
    let (rows, heads, d) = sparse.dims3()?;
    let starts: Vec<u32> = anchors.below(rows).map(|row| row as u32).collect();
    let device = sparse.device();
    let tail = dense.narrow(0, starts.len(), dense.dim(0)? - starts.len())?;
    let exact = dense.narrow(0, 0, starts.len())?;
    let carry_row = carry.map(|c| c.reshape((1, heads, d))).transpose()?;
    // Differences by anchor, that of the anchor before the rows first; carried rows may precede the first anchor.
    let lead = anchors.first.min(rows);
    let leads = correction == Correction::Propagate && lead > 0;
    if starts.is_empty() {
        let out = match &carry_row {
            Some(carry) if leads => sparse.broadcast_add(carry)?,
            _ => sparse.clone(),
        };
        return Ok((Tensor::cat(&[&out, &tail], 0)?, carry.cloned()));
    }
    let at = Tensor::from_slice(&starts, starts.len(), device)?;
    let differences = (&exact - sparse.index_select(&at, 0)?)?;
    let last = differences.narrow(0, starts.len() - 1, 1)?.reshape((heads, d))?;
    let out = match correction {
        Correction::Replace => sparse.clone(),
        Correction::Propagate => {
            let all = match &carry_row {
                Some(carry) => Tensor::cat(&[carry, &differences], 0)?,
                None => differences,
            };
            let before = u32::from(carry_row.is_some());
            let of = |row: usize| match row.checked_sub(anchors.first) {
                None => 0,
                Some(past) => before + (past / anchors.gamma) as u32,
            };
            let of: Vec<u32> = (0..rows).map(of).collect();
            (sparse + all.index_select(&Tensor::from_vec(of, rows, device)?, 0)?)?
        }
    };
    // Anchors become the dense rows themselves.
    let mut place: Vec<u32> = (0..rows as u32).collect();
    starts.iter().zip(rows as u32..).for_each(|(&row, dense)| place[row as usize] = dense);
    let out = Tensor::cat(&[&out, &exact], 0)?.index_select(&Tensor::from_vec(place, rows, device)?, 0)?;
    Ok((Tensor::cat(&[&out, &tail], 0)?, Some(last)))
}
