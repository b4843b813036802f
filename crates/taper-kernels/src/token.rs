//! The next token of each row of logits, chosen where the logits are: on a CUDA device for all rows at once, in host memory
//! row by row.

use crate::logits::{self, Kept};
use candle_core::{Result, Tensor, bail};
use std::ops::Range;

/// How a row's token is drawn: weights are exp((logit − largest) / temperature), those that no filter drops stand side by side
/// in the order of tokens, and the draw says where among them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// What logits are divided by; 0: the likeliest token, the first of equal ones.
    pub temperature: f32,
    /// Keep so many of the heaviest, the first of equal ones; 0: all.
    pub top_k: usize,
    /// Keep the fewest heaviest that hold this share of what `top_k` and `min_p` keep; 1: all.
    pub top_p: f32,
    /// Keep those of at least this weight; the likeliest has 1.
    pub min_p: f32,
    /// The draw, in [0, 1).
    pub uniform: f64,
}

impl Draw {
    /// The likeliest token.
    pub const LIKELIEST: Self = Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, uniform: 0.0 };

    fn sound(&self) -> bool {
        let shares = [self.top_p, self.min_p].into_iter().all(|x| (0.0..=1.0).contains(&x));
        shares && self.temperature >= 0.0 && self.temperature.is_finite() && (0.0..1.0).contains(&self.uniform)
    }
}

/// Most tokens of a vocabulary that a device chooses from.
pub const MOST_VOCAB: usize = 1 << 18;

/// The token of each row of `logits` `[R, vocab]`, f32, in one launch: `[R]`, u32, `u32::MAX` for a row with NaN or plus
/// infinity or nothing finite. Weights are added up as whole numbers of 2⁻⁴⁴, so that nothing depends on an order. None where
/// there is no such operation: it takes a CUDA device and a vocabulary of at most 262,144 tokens.
///
/// # Errors
/// Another shape or dtype, draws that are not one a row, or one whose numbers make no sense.
pub fn choose(logits: &Tensor, draws: &[Draw]) -> Result<Option<Tensor>> {
    let (rows, vocab) = logits.dims2()?;
    if draws.len() != rows {
        bail!("tokens: {} draws for {rows} rows", draws.len());
    }
    if let Some(draw) = draws.iter().find(|draw| !draw.sound()) {
        bail!("tokens: {draw:?}; expected a temperature, shares from 0 to 1, a draw below 1");
    }
    if !logits.device().is_cuda() || vocab > MOST_VOCAB {
        return Ok(None);
    }
    #[cfg(feature = "cuda")]
    return Ok(Some(crate::cuda::tokens(logits, draws)?));
    #[cfg(not(feature = "cuda"))]
    bail!("tokens on a CUDA device without the feature")
}

/// Tokens of rows of logits, chosen where the logits are, and on their way to host memory; with them what choices of keys
/// before have come to.
#[derive(Debug)]
pub struct Chosen {
    tokens: Tensor,
    #[cfg(feature = "cuda")]
    coming: Option<crate::cuda::Coming>,
}

impl Chosen {
    /// As [`choose`] chooses them, or [`pick`] in host memory.
    ///
    /// # Errors
    /// As of [`choose`]; a device without such an operation.
    pub fn new(logits: &Tensor, draws: &[Draw]) -> Result<Self> {
        let tokens = match choose(logits, draws)? {
            Some(tokens) => tokens,
            None if logits.device().is_cpu() => {
                let rows = logits.to_vec2::<f32>()?;
                let tokens: Vec<u32> =
                    rows.iter().zip(draws).map(|(row, draw)| pick(row, draw).unwrap_or(u32::MAX)).collect();
                Tensor::new(tokens, logits.device())?
            }
            None => bail!("tokens: no operation chooses from logits {:?} on their device", logits.shape()),
        };
        #[cfg(feature = "cuda")]
        let coming = match tokens.device().is_cuda() {
            true => {
                crate::cuda::send_readback()?;
                Some(crate::cuda::Coming::new(&tokens)?)
            }
            false => None,
        };
        Ok(Self {
            #[cfg(feature = "cuda")]
            coming,
            tokens,
        })
    }

    /// They, `[R]`, u32, where the logits are.
    pub fn tensor(&self) -> &Tensor {
        &self.tokens
    }

    /// Waits for them; none for a row as [`choose`] says. What was queued after them is not waited for.
    ///
    /// # Errors
    /// The device's.
    pub fn read(self) -> Result<Vec<Option<u32>>> {
        #[cfg(feature = "cuda")]
        let tokens = match self.coming {
            Some(coming) => coming.wait()?,
            None => self.tokens.to_vec1()?,
        };
        #[cfg(not(feature = "cuda"))]
        let tokens = self.tokens.to_vec1()?;
        Ok(tokens.into_iter().map(|token| Some(token).filter(|token| *token != u32::MAX)).collect())
    }
}

/// The token of a row of logits in host memory, as [`choose`] finds it but for the rounding of sums; none from NaN or plus
/// infinity or nothing finite.
pub fn pick(row: &[f32], draw: &Draw) -> Option<u32> {
    let (best, max) = logits::peak(row)?;
    let weights = |at: Range<usize>| logits::weights(&row[at], max, draw.temperature);
    let picked = if draw.temperature == 0.0 {
        None
    } else if let Some(kept) = filter(row, max, draw) {
        let values = |at: Range<usize>| kept.values[at].to_vec();
        let at = place(kept.values.len(), &logits::sums(&kept.values), values, draw.uniform);
        at.map(|at| kept.places[at])
    } else {
        let sums = logits::mass(row, max, draw.temperature);
        place(row.len(), &sums, weights, draw.uniform).map(|at| at as u32)
    };
    // The likeliest, too, where rounding leaves a hair.
    Some(picked.unwrap_or(best as u32))
}

/// The weights that the filters leave, in the order of tokens; none where there is no filter.
fn filter(row: &[f32], max: f32, draw: &Draw) -> Option<Kept> {
    let &Draw { temperature, top_k, top_p, min_p, .. } = draw;
    let weights = || logits::weights(row, max, temperature);
    let mut kept: Kept = match ((1..row.len()).contains(&top_k), min_p > 0.0, top_p < 1.0) {
        (true, ..) => {
            let mut kept = logits::largest(&weights(), top_k);
            kept.retain(|&(_, weight)| weight >= min_p);
            kept.sort_unstable_by_key(|&(token, _)| token);
            kept.into_iter().collect()
        }
        (false, true, _) => logits::at_least(&weights(), min_p),
        (false, false, true) => return Some(logits::fewest(row, max, temperature, f64::from(top_p))),
        (false, false, false) => return None,
    };
    if top_p < 1.0 {
        kept.heaviest(f64::from(top_p) * logits::total(&logits::sums(&kept.values)));
    }
    Some(kept)
}

/// Where a share of their sum is reached among weights, of which the sums of blocks are known.
fn place(len: usize, sums: &[f32], weights: impl FnOnce(Range<usize>) -> Vec<f32>, share: f64) -> Option<usize> {
    let mut left = share * logits::total(sums);
    let mut reaches = |weight: f32| {
        let reaches = left < f64::from(weight);
        left -= if reaches { 0.0 } else { f64::from(weight) };
        reaches
    };
    let start = sums.iter().copied().position(&mut reaches)? * logits::BLOCK;
    let block = weights(start..len.min(start + logits::BLOCK));
    Some(start + block.into_iter().position(reaches)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn draws_that_make_no_sense_are_refused_and_host_memory_has_no_such_operation() {
        let logits = Tensor::zeros((2, 10), DType::F32, &Device::Cpu).unwrap();
        assert!(choose(&logits, &[Draw::LIKELIEST; 2]).unwrap().is_none());
        let error = |draws: &[Draw]| choose(&logits, draws).unwrap_err().to_string();
        assert!(error(&[Draw::LIKELIEST]).contains("1 draws for 2 rows"));
        for draw in [
            Draw { temperature: f32::NAN, ..Draw::LIKELIEST },
            Draw { temperature: 1.0, top_p: 1.5, ..Draw::LIKELIEST },
            Draw { temperature: 1.0, uniform: 1.0, ..Draw::LIKELIEST },
        ] {
            assert!(error(&[draw, Draw::LIKELIEST]).contains("expected a temperature"));
        }
    }
}
