//! The next token of each row of logits, chosen where the logits are: a CUDA device. In host memory whoever has them chooses.

use candle_core::{Result, Tensor, bail};

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
    if !logits.device().is_cuda() || vocab > 1 << 18 {
        return Ok(None);
    }
    #[cfg(feature = "cuda")]
    return Ok(Some(crate::cuda::tokens(logits, draws)?));
    #[cfg(not(feature = "cuda"))]
    bail!("tokens on a CUDA device without the feature")
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
