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

/// Rows that are anchors: `first`, `first + gamma`, …
#[derive(Debug, Clone, Copy)]
pub struct Anchors {
    /// The first, at most `gamma`, less where an anchor came before.
    pub first: usize,
    /// From one to the next, at least 1.
    pub gamma: usize,
}

impl Anchors {
    /// Those below `rows`.
    pub fn below(&self, rows: usize) -> impl Iterator<Item = usize> + use<> {
        (self.first..rows).step_by(self.gamma)
    }
}

/// Corrects the first `sparse` of `rows` `[T, heads, d]` by dense rows `[A + T - sparse, heads, d]`, the first A of which are
/// those of the anchors among them; the other rows become the other dense ones. Rows before the first anchor take `carry`
/// `[heads, d]`, the difference at the anchor before them. All f32; returns `[T, heads, d]`, on a device in the place of
/// `rows`, and the difference at the last anchor, or `carry` if there is none.
///
/// # Errors
/// Shapes that differ, or rows to propagate to without a difference.
///
/// # Source
/// Delta Attention, Algorithm 1; `Replace` is its Equation 5.
pub fn correct(
    (all, rows): (&Tensor, usize),
    dense: &Tensor,
    anchors: Anchors,
    carry: Option<&Tensor>,
    correction: Correction,
) -> Result<(Tensor, Option<Tensor>)> {
    let (count, heads, d) = all.dims3()?;
    let (dense_rows, dense_heads, dense_d) = dense.dims3()?;
    let width = heads * d;
    let Anchors { first, gamma } = anchors;
    if gamma == 0 {
        bail!("correct: gamma 0");
    }
    let starts: Vec<usize> = anchors.below(rows).collect();
    let lead = first.min(rows);
    let leads = correction == Correction::Propagate && lead > 0;
    if (dense_heads, dense_d) != (heads, d)
        || rows > count
        || dense_rows != starts.len() + count - rows
        || (leads && carry.is_none_or(|c| c.elem_count() != width))
    {
        bail!(
            "correct: {rows} sparse of {:?}, dense {:?}, {anchors:?}, carry {}",
            all.shape(),
            dense.shape(),
            carry.is_some()
        );
    }
    #[cfg(feature = "cuda")]
    if all.device().is_cuda() {
        return crate::cuda::correct((all, rows), dense, anchors, carry, correction);
    }
    let carried = carry.map(|t| t.flatten_all()?.to_vec1::<f32>()).transpose()?;
    let mut out = all.narrow(0, 0, rows)?.flatten_all()?.to_vec1::<f32>()?;
    let dense = dense.flatten_all()?.to_vec1::<f32>()?;
    if let (true, Some(carried)) = (leads, &carried) {
        out[..lead * width].chunks_exact_mut(width).for_each(|row| add(row, carried));
    }
    let difference_at = |own: &[f32], dense: &[f32]| own.iter().zip(dense).map(|(own, dense)| dense - own).collect();
    let last: Option<Vec<f32>> =
        starts.last().map(|&row| difference_at(&out[row * width..][..width], &dense[(starts.len() - 1) * width..]));
    let shared = SharedMut::new(&mut out);
    parallel::for_each(
        starts.len(),
        || (),
        |(), anchor| {
            let first = starts[anchor];
            let rows = gamma.min(rows - first);
            // SAFETY: each anchor has its own rows.
            let (own, following) = unsafe { shared.slice(first * width, rows * width) }.split_at_mut(width);
            let dense = &dense[anchor * width..][..width];
            if correction == Correction::Propagate {
                let difference: Vec<f32> = difference_at(own, dense);
                following.chunks_exact_mut(width).for_each(|row| add(row, &difference));
            }
            own.copy_from_slice(dense);
        },
    );
    out.extend_from_slice(&dense[starts.len() * width..]);
    let out = Tensor::from_vec(out, (count, heads, d), all.device())?;
    let carry = match last {
        Some(last) => Some(Tensor::from_vec(last, (heads, d), all.device())?),
        None => carry.cloned(),
    };
    Ok((out, carry))
}

fn add(row: &mut [f32], difference: &[f32]) {
    row.iter_mut().zip(difference).for_each(|(x, d)| *x += d);
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn anchors_become_dense_and_the_difference_moves_on_also_from_what_came_before() {
        let rows = |x: &[f32]| Tensor::from_slice(x, (x.len(), 1, 1), &Device::Cpu).unwrap();
        let values = |t: Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        // What stands in the place of dense rows does not matter.
        let (all, dense) = (|n: usize| rows(&[1., 2., 3., 4., 5., 0., 9., 9.][..n]), rows(&[11., 24., 55., 70., 80.]));
        let at = |first| Anchors { first, gamma: 2 };
        let run = |first, carry: Option<f32>, correction| {
            let carry = carry.map(|c| Tensor::new(&[[c]], &Device::Cpu).unwrap());
            let count = 10 - at(first).below(5).count();
            let (out, carry) = correct((&all(count), 5), &dense, at(first), carry.as_ref(), correction).unwrap();
            (values(out), carry.map(|c| values(c)[0]))
        };
        assert_eq!(run(0, None, Correction::Propagate), (vec![11., 12., 24., 25., 55., 70., 80.], Some(50.)));
        assert_eq!(run(0, None, Correction::Replace).0, [11., 2., 24., 4., 55., 70., 80.]);
        // Anchors at rows 1 and 3; the row before takes the difference carried over.
        assert_eq!(run(1, Some(7.), Correction::Propagate), (vec![8., 11., 12., 24., 25., 55., 70., 80.], Some(20.)));
        assert_eq!(run(1, None, Correction::Replace).0, [1., 11., 3., 24., 5., 55., 70., 80.]);
        let none = Tensor::zeros((0, 1, 1), candle_core::DType::F32, &Device::Cpu).unwrap();
        let carry = Tensor::new(&[[7f32]], &Device::Cpu).unwrap();
        let (out, carry) = correct((&all(5), 5), &none, at(5), Some(&carry), Correction::Propagate).unwrap();
        assert_eq!((values(out), values(carry.unwrap())), (vec![8., 9., 10., 11., 12.], vec![7.]));
        assert!(correct((&all(5), 5), &rows(&[1., 2.]), at(0), None, Correction::Replace).is_err());
        assert!(correct((&all(8), 5), &dense, at(1), None, Correction::Propagate).is_err());
        assert!(correct((&all(7), 5), &dense, Anchors { first: 0, gamma: 0 }, None, Correction::Replace).is_err());
    }
}
