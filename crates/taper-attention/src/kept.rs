//! How much of the attention mass a choice of keys keeps, as rows that were attended both ways say.

use candle_core::{Result, Tensor};

/// Shares of the dense probability that rows keep, from the logarithms of what is read and of all `[R, q_heads]`.
pub(crate) fn kept(read: &Tensor, all: &Tensor) -> Result<Vec<f32>> {
    let shares: Vec<f32> = (read - all)?.exp()?.flatten_all()?.to_vec1()?;
    // Rounding alone would make more than everything of it.
    Ok(shares.into_iter().map(|share| if share > 1.0 { 1.0 } else { share }).collect())
}
