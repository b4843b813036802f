//! Root mean square normalisation of activations in host memory.

use crate::floats::with_floats;
use crate::parallel;
use crate::simd::{Isa, Simd, dispatch, dot};
use candle_core::{Result, Tensor, bail};
use std::mem::MaybeUninit;

/// Each row of `x` `[T, n]` over the root of its mean square, `eps` added under the root, times `weight` `[n]`; f32.
///
/// # Errors
/// Shapes that differ; what is not contiguous f32 on the CPU.
///
/// # Source
/// Zhang and Sennrich 2019, arXiv:1910.07467.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    if weight.dims() != [width] {
        bail!("rms_norm: activations {:?} with a weight {:?}", x.shape(), weight.shape());
    }
    let isa = Isa::best();
    let [out] = with_floats("rms_norm", [x, weight], |[x, weights]| {
        let write = |row: usize, [to]: [&mut [MaybeUninit<f32>]; 1]| {
            let x = &x[row * width..][..width];
            dispatch!(isa, normed::<_>(x: &[f32], weights: &[f32], eps: f32, to: &mut [MaybeUninit<f32>]));
        };
        // SAFETY: a row is written from end to end.
        unsafe { parallel::rows(rows, [width], write) }
    })?;
    Tensor::from_vec(out, (rows, width), x.device())
}

/// One row; all of one length.
///
/// # Safety
/// `V`'s instruction set exists.
#[inline(always)]
unsafe fn normed<V: Simd>(x: &[f32], weights: &[f32], eps: f32, to: &mut [MaybeUninit<f32>]) {
    let (n, whole) = (x.len(), x.len() - x.len() % V::LANES);
    let (weights, to) = (&weights[..n], &mut to[..n]);
    // SAFETY: whole vectors of what is there.
    unsafe {
        let scale = 1.0 / (dot::<V>(x, x) / n as f32 + eps).sqrt();
        for c in (0..whole).step_by(V::LANES) {
            let scaled = V::load(x.as_ptr().add(c)).mul(V::splat(scale));
            scaled.mul(V::load(weights.as_ptr().add(c))).store(to.as_mut_ptr().add(c).cast());
        }
        for c in whole..n {
            to[c].write(x[c] * scale * weights[c]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Numbers, relative_error};
    use candle_core::{DType, Device};

    #[test]
    fn rows_are_those_of_the_formula() {
        let mut numbers = Numbers(9);
        for (rows, width) in [(1, 1), (3, 7), (2, 64), (700, 50)] {
            let (x, weight) = (numbers.tensor(&[rows, width]), numbers.tensor(&[width]));
            let out = rms_norm(&x, &weight, 1e-5).unwrap().to_vec2::<f32>().unwrap();
            let weight = weight.to_vec1::<f32>().unwrap();
            for (x, out) in x.to_vec2::<f32>().unwrap().iter().zip(out) {
                let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
                let of = |(x, w): (&f32, &f32)| f64::from(*x) * f64::from(*w) / (mean + 1e-5).sqrt();
                let exact: Vec<f64> = x.iter().zip(&weight).map(of).collect();
                assert!(relative_error(&out, &exact) < 1e-6, "{rows} {width}");
            }
        }
    }

    #[test]
    fn a_row_of_zeros_stays_and_nan_stays_in_its_row() {
        let x = Tensor::new(&[[0f32, 0.0], [f32::NAN, 1.0], [3.0, 4.0]], &Device::Cpu).unwrap();
        let out = rms_norm(&x, &Tensor::ones(2, DType::F32, &Device::Cpu).unwrap(), 1e-6).unwrap();
        let out = out.to_vec2::<f32>().unwrap();
        assert_eq!(out[0], [0.0, 0.0]);
        assert!(out[1].iter().all(|x| x.is_nan()) && out[2].iter().all(|x| x.is_finite()));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let [x, narrow] = [4, 3].map(|width| Tensor::zeros((2, width), DType::F32, &Device::Cpu).unwrap());
        let weight = Tensor::ones(4, DType::F32, &Device::Cpu).unwrap();
        assert!(rms_norm(&narrow, &weight, 0.0).is_err());
        assert!(rms_norm(&x.t().unwrap().contiguous().unwrap().t().unwrap(), &weight, 0.0).is_err());
        assert!(rms_norm(&x, &weight.to_dtype(DType::F16).unwrap(), 0.0).is_err());
    }
}
