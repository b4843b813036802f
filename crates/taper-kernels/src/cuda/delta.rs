//! Delta Attention's epilogue: [`crate::correct::correct`] on a CUDA device.

use super::error::Result;
use super::ffi::{TaperDeltaParams, taper_delta};
use super::op::Op;
use crate::correct::{Anchors, Correction};
use candle_core::{DType, Tensor};

/// Rows of a prompt to correct in place.
struct Delta<'a> {
    /// Sparse rows `[T, q_heads, head_dim]`, f32, which become the corrected ones.
    rows: &'a Tensor,
    /// Absolute position of row 0.
    position: usize,
    /// Sparse rows of the anchors `[A, q_heads, head_dim]`, f32.
    base: &'a Tensor,
    /// Dense rows of the anchors, then those of the rows from `tail` on `[A + D, q_heads, head_dim]`, f32.
    dense: &'a Tensor,
    /// Which multiple of gamma the arrays' first anchor is.
    first_anchor: usize,
    /// Absolute position from which rows are dense.
    tail: usize,
    /// From one anchor to the next; anchors stand at its multiples.
    gamma: usize,
    /// What the difference at an anchor does.
    correction: Correction,
}

/// Corrects rows in place by the difference at the anchor before each.
///
/// # Errors
/// Shapes or dtypes that differ, rows without an anchor, fewer dense rows than the tail has.
fn delta(of: &Delta) -> Result<()> {
    let op = Op::new("delta", "rows", of.rows)?;
    let (tokens, q_heads, head_dim) = of.rows.dims3()?;
    let (anchors, dense) = (of.base.dim(0)?, of.dense.dim(0)?);
    let end = of.position + tokens;
    op.check(of.gamma > 0, "gamma", of.gamma, "at least 1")?;
    op.head_dim("rows", head_dim)?;
    let sparse_end = end.min(of.tail);
    if of.position < sparse_end {
        // Without propagation rows before the first anchor need none.
        let first = match of.correction {
            Correction::Propagate => of.position / of.gamma,
            Correction::Replace => of.position.div_ceil(of.gamma),
        };
        let last = (sparse_end - 1) / of.gamma;
        let held = of.first_anchor..of.first_anchor + anchors;
        let fits = first > last || held.contains(&first) && held.contains(&last);
        op.check(fits, "base", format_args!("anchors {held:?}"), format_args!("{first} to {last}"))?;
    }
    let tail = end.saturating_sub(of.tail.max(of.position));
    let needed = anchors + if tail > 0 { end - of.tail } else { 0 };
    op.check(dense >= needed, "dense", dense, format_args!("{needed} rows"))?;
    if tokens == 0 {
        return Ok(());
    }
    let p = TaperDeltaParams {
        out: op.at("rows", of.rows, DType::F32, [tokens, q_heads, head_dim])?,
        anchor_base: op.at("base", of.base, DType::F32, [anchors, q_heads, head_dim])?,
        anchor_dense: op.at("dense", of.dense, DType::F32, [dense, q_heads, head_dim])?,
        position: of.position as i64,
        tail_begin: of.tail as i64,
        anchor_first: of.first_anchor as i64,
        anchors: anchors as i64,
        tokens: op.int("rows", tokens)?,
        q_heads: op.int("rows", q_heads)?,
        head_dim: op.int("rows", head_dim)?,
        gamma: op.int("gamma", of.gamma)?,
        propagate: (of.correction == Correction::Propagate).into(),
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(taper_delta, &p) }
}

/// [`crate::correct::correct`], whose shapes the caller has checked, in place of the rows given.
pub(crate) fn correct(
    (rows, sparse): (&Tensor, usize),
    dense: &Tensor,
    anchors: Anchors,
    carry: Option<&Tensor>,
    correction: Correction,
) -> candle_core::Result<(Tensor, Option<Tensor>)> {
    let op = Op::new("correct", "rows", rows)?;
    let (count, heads, d) = rows.dims3()?;
    let starts: Vec<u32> = anchors.below(sparse).map(|row| row as u32).collect();
    // Positions such that anchors stand at multiples of gamma. The one before the rows is in the arrays where it is carried.
    let (gamma, position) = match (starts.is_empty(), anchors.first) {
        (true, _) => (count + 2, 1),
        (false, 0) => (anchors.gamma, 0),
        (false, first) => (anchors.gamma, anchors.gamma.saturating_sub(first)),
    };
    op.check(position > 0 || anchors.first == 0, "anchors", format_args!("{anchors:?}"), "the first below gamma")?;
    let mut base = Vec::new();
    let mut exact = Vec::new();
    if let Some(carry) = carry.filter(|_| position > 0) {
        base.push(carry.zeros_like()?.reshape((1, heads, d))?);
        exact.push(carry.reshape((1, heads, d))?);
    }
    let first_anchor = usize::from(position > 0 && base.is_empty());
    let mut last = carry.cloned();
    if !starts.is_empty() {
        let own = rows.index_select(&op.kept(&starts, [starts.len()])?, 0)?;
        let of = |t: &Tensor| t.narrow(0, starts.len() - 1, 1)?.reshape((heads, d));
        last = Some((of(dense)? - of(&own)?)?);
        base.push(own);
    }
    if dense.dim(0)? > 0 {
        exact.push(dense.clone());
    }
    let one = |mut all: Vec<Tensor>| if all.len() == 1 { Ok(all.swap_remove(0)) } else { Tensor::cat(&all, 0) };
    let tail = position + sparse;
    if base.is_empty() {
        // Nothing to add, no anchor: only the tail is another.
        base.push(op.zeros((1, heads, d), DType::F32)?);
        exact.insert(0, op.zeros((1, heads, d), DType::F32)?);
    }
    let (base, dense) = (&one(base)?, &one(exact)?);
    delta(&Delta { rows, position, base, dense, first_anchor, tail, gamma, correction })?;
    Ok((rows.clone(), last))
}
