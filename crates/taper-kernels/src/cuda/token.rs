//! The choice of tokens: see [`crate::token`].

use super::error::Result;
use super::ffi::{TaperTokenParams, TaperTokenRow, taper_tokens};
use super::op::Op;
use crate::token::Draw;
use candle_core::{DType, Tensor};

/// Tokens of rows of logits, by draws that the caller has checked.
///
/// # Errors
/// Another shape or dtype.
pub(crate) fn tokens(logits: &Tensor, draws: &[Draw]) -> Result<Tensor> {
    let op = Op::new("tokens", "logits", logits)?;
    let (rows, vocab) = logits.dims2()?;
    let how = match draws.iter().all(|draw| draw.temperature == 0.0) {
        true => None,
        false => Some(op.upload(&draws.iter().flat_map(words).collect::<Vec<u32>>(), [rows, WORDS])?),
    };
    let out = op.empty(rows, DType::U32)?;
    let p = TaperTokenParams {
        logits: op.at("logits", logits, DType::F32, [rows, vocab])?,
        how: op.maybe::<TaperTokenRow>("draws", how.as_ref(), DType::U32, [rows, WORDS])?,
        tokens: op.at("tokens", &out, DType::U32, [rows])?,
        rows: op.int("logits", rows)?,
        vocab: op.int("logits", vocab)?,
    };
    // SAFETY: every address was checked against the shapes given beside it, and draws are within their ranges.
    unsafe { op.launch(taper_tokens, &p) }?;
    Ok(out)
}

/// Words of the interface's structure.
const WORDS: usize = size_of::<TaperTokenRow>() / 4;

fn words(draw: &Draw) -> [u32; WORDS] {
    let Draw { temperature, top_k, top_p, min_p, uniform } = *draw;
    let uniform = uniform.to_bits();
    // What keeps more than there can be keeps all.
    let top_k = i32::try_from(top_k).unwrap_or(0) as u32;
    [temperature.to_bits(), top_p.to_bits(), min_p.to_bits(), top_k, uniform as u32, (uniform >> 32) as u32]
}
