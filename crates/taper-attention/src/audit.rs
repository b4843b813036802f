//! The audit: a sample of tokens is attended densely as well, in every layer, and compared, head by head.
//!
//! What is audited goes layer by layer, without graphs, and so does all that goes with it in a step. So a token is
//! audited in all layers or in none: of steps a share is slow, and not nearly all of them in a deep model.

use crate::method::{DecodeStep, PrefillLayer};
use candle_core::{Result, Tensor};
use taper_kernels::decode::{Decode, Selection, attend};
use taper_kernels::philox::Stream;
use taper_kernels::prefill::Mask;

/// The draw that decides; no sampling method uses its number.
const DRAW: u32 = 0x4155_4449;

/// Whether the token at a position is audited at the rate given: decided by its sequence's seed alone, so that what is audited
/// does not depend on the batch.
pub fn wanted(seed: u64, position: usize, rate: f64) -> bool {
    let stream = Stream { seed, layer: 0, head: 0, position: position as u32 };
    rate > 0.0 && f64::from(stream.uniform(DRAW)) < rate
}

/// Relative errors of the rows given, every query head.
pub fn prefill(layer: &PrefillLayer, out: &Tensor, rows: &[usize]) -> Result<Vec<f32>> {
    let positions: Vec<u32> = rows.iter().map(|row| (layer.start + row) as u32).collect();
    let dense = layer.attend_rows(&select(&layer.q, rows)?, &positions, Mask::Causal)?.out;
    errors(&select(out, rows)?, &dense)
}

/// Relative errors of the rows given, every query head.
pub fn decode(step: &DecodeStep, out: &Tensor, rows: &[usize]) -> Result<Vec<f32>> {
    let q = select(step.batch.q, rows)?;
    let chosen: Vec<_> = rows.iter().map(|&row| step.batch.rows[row].clone()).collect();
    let batch = Decode { q: &q, rows: &chosen, ..step.batch };
    let dense = attend(&batch, &Selection::dense(rows.len(), step.kv_heads), None)?;
    errors(&select(out, rows)?, &dense)
}

fn select(t: &Tensor, rows: &[usize]) -> Result<Tensor> {
    let rows: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
    t.index_select(&Tensor::new(rows.as_slice(), t.device())?, 0)
}

/// ‖a − b‖ / ‖b‖ of every row and head of `[R, heads, d]`; 0 where both are 0.
pub fn errors(a: &Tensor, b: &Tensor) -> Result<Vec<f32>> {
    let (difference, norm) = (norms(&(a - b)?)?, norms(b)?);
    Ok(difference.into_iter().zip(norm).map(|(d, n)| if d == 0.0 { 0.0 } else { d / n }).collect())
}

fn norms(t: &Tensor) -> Result<Vec<f32>> {
    t.sqr()?.sum(2)?.sqrt()?.flatten_all()?.to_vec1()
}
