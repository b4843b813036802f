//! Delta Attention's epilogue: dense anchor rows correct the sparse rows that follow them.

use crate::parallel::{self, SharedMut};
use candle_core::{Result, Tensor, bail};

/// What the difference at an anchor row does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Correction {
    /// It is added to every row up to the next anchor.
    Propagate,
    /// It replaces the anchor row alone.
    Replace,
}

/// Corrects sparse rows `[S, heads, d]` by dense rows `[A + D, heads, d]`, the first A of which are those of the rows
/// 0, gamma, 2 gamma, … below S; appends the other D. All f32; returns `[S + D, heads, d]`.
///
/// # Errors
/// Shapes that differ, or fewer dense rows than anchors.
///
/// # Source
/// Delta Attention, Algorithm 1; `Replace` is its Equation 5.
pub fn correct(sparse: &Tensor, dense: &Tensor, gamma: usize, correction: Correction) -> Result<Tensor> {
    let (rows, heads, d) = sparse.dims3()?;
    let (dense_rows, dense_heads, dense_d) = dense.dims3()?;
    let anchors = rows.div_ceil(gamma.max(1));
    if gamma == 0 || (dense_heads, dense_d) != (heads, d) || dense_rows < anchors {
        bail!("correct: sparse {:?}, dense {:?}, gamma {gamma}", sparse.shape(), dense.shape());
    }
    let width = heads * d;
    let mut out = sparse.flatten_all()?.to_vec1::<f32>()?;
    let dense = dense.flatten_all()?.to_vec1::<f32>()?;
    let shared = SharedMut::new(&mut out);
    parallel::for_each(
        anchors,
        || (),
        |(), anchor| {
            let first = anchor * gamma;
            let rows = gamma.min(rows - first);
            // SAFETY: each anchor has its own rows.
            let (own, following) = unsafe { shared.slice(first * width, rows * width) }.split_at_mut(width);
            let dense = &dense[anchor * width..][..width];
            if correction == Correction::Propagate {
                for row in following.chunks_exact_mut(width) {
                    for ((x, own), dense) in row.iter_mut().zip(&*own).zip(dense) {
                        *x += dense - own;
                    }
                }
            }
            own.copy_from_slice(dense);
        },
    );
    out.extend_from_slice(&dense[anchors * width..]);
    Tensor::from_vec(out, (rows + dense_rows - anchors, heads, d), sparse.device())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn anchors_become_dense_and_the_difference_moves_on() {
        let rows = |x: &[f32]| Tensor::from_slice(x, (x.len(), 1, 1), &Device::Cpu).unwrap();
        let values = |t: Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (sparse, dense) = (rows(&[1., 2., 3., 4., 5.]), rows(&[11., 24., 55., 70., 80.]));
        let delta = correct(&sparse, &dense, 2, Correction::Propagate).unwrap();
        assert_eq!(values(delta), [11., 12., 24., 25., 55., 70., 80.]);
        let replaced = correct(&sparse, &dense, 2, Correction::Replace).unwrap();
        assert_eq!(values(replaced), [11., 2., 24., 4., 55., 70., 80.]);
        assert!(correct(&sparse, &rows(&[1., 2.]), 2, Correction::Replace).is_err());
        assert!(correct(&sparse, &dense, 0, Correction::Replace).is_err());
    }
}
