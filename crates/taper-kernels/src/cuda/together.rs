//! Dense attention of rows of one sequence that follow one another, as a step that checks drafts has them: each key is read
//! once for the heads of several rows.

use super::batch::{Lists, Upload};
use super::decode::Plan;
use super::error::Result;
use super::layer::cast;
use super::op::Op;
use crate::decode::{Decode, DecodeRow, HeadSelection};
use candle_core::Tensor;

/// Heads of rows that share a list at most.
const HEADS: usize = 32;

/// `[R, q_heads, head_dim]`, f32; none where rows are of several sequences, do not follow one another or read less than they
/// see.
pub(super) fn attend(op: &Op, batch: &Decode, selection: &[HeadSelection]) -> Result<Option<Tensor>> {
    let (rows, q_heads, kv_heads, _) = batch.dims()?;
    let group = q_heads / kv_heads;
    let follows = |two: &[DecodeRow]| {
        std::ptr::eq(two[0].table, two[1].table)
            && (two[0].visible.start, two[0].visible.end + 1) == (two[1].visible.start, two[1].visible.end)
    };
    let dense = batch.rows.iter().all(|row| row.visible.start == 0)
        && selection.iter().all(|head| *head == HeadSelection::Dense);
    if rows < 2 || 2 * group > HEADS || !dense || !batch.rows.windows(2).all(follows) {
        return Ok(None);
    }
    let q = cast(op, batch.q, batch.kv.k.dtype())?;
    let mut outs = Vec::new();
    for rows in batch.rows.chunks(HEADS / group) {
        let q = q.narrow(0, outs.len() * (HEADS / group), rows.len())?;
        // The list is the last row's; those before see a token less each.
        let last = &rows[rows.len() - 1..];
        let upload = Upload::new(op, &Decode { q: &q.narrow(0, 0, 1)?, kv: batch.kv, rows: last })?;
        let lists = Lists::upload(op, last, &vec![HeadSelection::Dense; kv_heads], group)?;
        let on_device = upload.batch(batch.kv);
        outs.push(Plan::kept(lists, &on_device)?.attend_rows(&on_device, &q)?);
    }
    Ok(Some(if outs.len() == 1 { outs.swap_remove(0) } else { op.stacked(&outs)? }))
}
