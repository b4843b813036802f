//! A feed-forward layer's gate over activations in host memory.

use crate::floats::with_floats;
use crate::mlp::silu_mul;
use crate::parallel;
use candle_core::{Result, Tensor, bail};

/// `silu(gate) · up` of each row of `x` `[T, 2 I]`, in which gate and up stand side by side: `[T, I]`; f32.
///
/// # Errors
/// An odd width; what is not contiguous f32 on the CPU.
///
/// # Source
/// Shazeer 2020, arXiv:2002.05202.
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    if !width.is_multiple_of(2) {
        bail!("swiglu: gate and up {width} wide together; expected two of one width");
    }
    let half = width / 2;
    let [out] = with_floats("swiglu", [x], |[x]| {
        // SAFETY: a row is written from end to end.
        unsafe {
            parallel::rows(rows, [half], |row, [to]| {
                let (gate, up) = x[row * width..][..width].split_at(half);
                silu_mul(gate, up, to);
            })
        }
    })?;
    Tensor::from_vec(out, (rows, half), x.device())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Numbers;

    #[test]
    fn equals_the_separate_operations() {
        let mut numbers = Numbers(5);
        // One row on one thread, and many rows over several.
        for (rows, half) in [(1, 31), (3, 31), (700, 31), (9, 1), (0, 4)] {
            let x = numbers.tensor(&[rows, 2 * half]);
            let [gate, up] = [0, half].map(|start| x.narrow(1, start, half).unwrap().contiguous().unwrap());
            let expected = (gate.silu().unwrap() * up).unwrap().to_vec2::<f32>().unwrap().concat();
            let out = swiglu(&x).unwrap().to_vec2::<f32>().unwrap().concat();
            assert!(out.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{rows} rows of {half}");
            assert_eq!(out.len(), expected.len());
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let x = Numbers(6).tensor(&[4, 6]);
        let refused = |x: &Tensor| swiglu(x).unwrap_err().to_string();
        assert!(refused(&x.narrow(1, 0, 3).unwrap().contiguous().unwrap()).contains("two of one width"));
        assert!(refused(&x.t().unwrap()).contains("contiguous f32"));
        assert!(refused(&x.to_dtype(candle_core::DType::F16).unwrap()).contains("F16"));
    }
}
