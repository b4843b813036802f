//! The rotary embedding of queries and keys, and taking it off again for methods that look at them as they were before it.

use crate::floats::with_floats;
use crate::parallel;
use crate::simd::{Isa, Simd, dispatch};
use candle_core::{Result, Tensor, bail};
use std::mem::MaybeUninit;

/// The turn of one position: cosines and sines of its angles, `[head_dim / 2]`.
#[derive(Debug, Clone)]
pub struct Rotation(pub(crate) Vec<(f32, f32)>);

/// The turn of each position of a sequence.
pub struct Rotations<'a> {
    turn: Box<dyn Fn(usize) -> Rotation + Sync + 'a>,
    /// Those of whole blocks that are on a device already.
    #[cfg(feature = "cuda")]
    pub(crate) kept: crate::cuda::step::KeptTurns,
}

impl<'a> Rotations<'a> {
    /// By what gives that of one position.
    pub fn new(turn: impl Fn(usize) -> Rotation + Sync + 'a) -> Self {
        Self {
            turn: Box::new(turn),
            #[cfg(feature = "cuda")]
            kept: Default::default(),
        }
    }

    /// That of a position.
    pub fn at(&self, position: usize) -> Rotation {
        (self.turn)(position)
    }
}

impl Rotation {
    /// That of a position, from the angle per position of each pair of dimensions `[head_dim / 2]`; `factor` is what the
    /// embedding multiplies cosines and sines by.
    pub fn new(position: usize, frequencies: &[f32], factor: f32) -> Self {
        let turn = |frequency: &f32| {
            let (sin, cos) = (position as f32 * frequency).sin_cos();
            (cos / factor, sin / factor)
        };
        Self(frequencies.iter().map(turn).collect())
    }

    /// Turns `x` `[head_dim]` back; dimension `i` is paired with `i + head_dim / 2`.
    pub fn undo(&self, x: &mut [f32]) {
        let (first, second) = x.split_at_mut(self.0.len());
        for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(&self.0) {
            (*a, *b) = (*a * cos + *b * sin, *b * cos - *a * sin);
        }
    }
}

/// Fails unless there is a turn for each of the queries `[R, heads, head_dim]`, if there are any.
pub(crate) fn fit(x: &Tensor, turns: Option<&[Rotation]>) -> Result<()> {
    let (rows, _, d) = x.dims3()?;
    match turns {
        Some(turns) if turns.len() != rows || turns.iter().any(|turn| 2 * turn.0.len() != d) => {
            bail!("rotary: {} turns for rows of shape {:?}", turns.len(), x.shape())
        }
        _ => Ok(()),
    }
}

/// Queries `[R, heads, head_dim]`, f32, in host memory as they were before the rotary embedding, whose turn of each row is given
/// `[R]`.
pub(crate) fn undo(x: &Tensor, turns: Option<&[Rotation]>) -> Result<Tensor> {
    fit(x, turns)?;
    let (Some(turns), (rows, heads, d)) = (turns, x.dims3()?) else { return Ok(x.clone()) };
    let mut data = x.flatten_all()?.to_vec1::<f32>()?;
    for (row, turn) in data.chunks_exact_mut(heads * d).zip(turns) {
        row.chunks_exact_mut(d).for_each(|x| turn.undo(x));
    }
    Tensor::from_vec(data, (rows, heads, d), x.device())
}

/// Queries `[T, q_heads, head_dim]`, keys and values `[T, kv_heads, head_dim]` of joint projections `qkv`
/// `[T, (q_heads + 2 kv_heads) head_dim]`, f32 on the CPU; queries and keys turned by each token's cosines and sines
/// `[T, head_dim / 2]`.
///
/// # Errors
/// Shapes that differ; what is not contiguous f32 on the CPU.
///
/// # Source
/// RoPE: Su et al. 2021, arXiv:2104.09864; dimension `i` is paired with `i + head_dim / 2`.
pub fn split(
    qkv: &Tensor,
    (q_heads, kv_heads): (usize, usize),
    (cos, sin): (&Tensor, &Tensor),
) -> Result<(Tensor, Tensor, Tensor)> {
    let ((tokens, width), (turns, half)) = (qkv.dims2()?, cos.dims2()?);
    let d = 2 * half;
    if half == 0 || (turns, sin.dims()) != (tokens, cos.dims()) || width != (q_heads + 2 * kv_heads) * d {
        bail!(
            "rotary: joint projections {:?} of {q_heads} and {kv_heads} heads, turns {:?} and {:?}",
            qkv.shape(),
            cos.shape(),
            sin.shape()
        );
    }
    let (isa, heads) = (Isa::best(), [q_heads, kv_heads, kv_heads]);
    let [q, k, v] = with_floats("rotary", [qkv, cos, sin], |[x, cos, sin]| {
        let write = |token: usize, [q, k, v]: [&mut [MaybeUninit<f32>]; 3]| {
            let (cos, sin) = (&cos[token * half..][..half], &sin[token * half..][..half]);
            let mut x = &x[token * width..][..width];
            for to in [q, k] {
                let from = x.split_off(..to.len()).expect("a part of the row");
                dispatch!(isa, turn::<_>(from: &[f32], cos: &[f32], sin: &[f32], to: &mut [MaybeUninit<f32>]));
            }
            v.iter_mut().zip(x).for_each(|(to, from)| _ = to.write(*from));
        };
        // SAFETY: every head of a token is written.
        unsafe { parallel::rows(tokens, heads.map(|heads| heads * d), write) }
    })?;
    let tensor = |data, heads| Tensor::from_vec(data, (tokens, heads, d), qkv.device());
    Ok((tensor(q, q_heads)?, tensor(k, kv_heads)?, tensor(v, kv_heads)?))
}

/// Heads of one token, turned by its `cos` and `sin` `[head_dim / 2]`.
///
/// # Safety
/// `V`'s instruction set exists.
#[inline(always)]
unsafe fn turn<V: Simd>(from: &[f32], cos: &[f32], sin: &[f32], to: &mut [MaybeUninit<f32>]) {
    let half = cos.len();
    let (whole, sin) = (half - half % V::LANES, &sin[..half]);
    for (from, to) in from.chunks_exact(2 * half).zip(to.chunks_exact_mut(2 * half)) {
        for i in (0..whole).step_by(V::LANES) {
            // SAFETY: whole vectors of either half.
            unsafe {
                let (a, b) = (V::load(from.as_ptr().add(i)), V::load(from.as_ptr().add(half + i)));
                let (cos, sin) = (V::load(cos.as_ptr().add(i)), V::load(sin.as_ptr().add(i)));
                a.mul(cos).sub(b.mul(sin)).store(to.as_mut_ptr().add(i).cast());
                b.mul(cos).add(a.mul(sin)).store(to.as_mut_ptr().add(half + i).cast());
            }
        }
        for i in whole..half {
            let (a, b) = (from[i], from[half + i]);
            to[i].write(a * cos[i] - b * sin[i]);
            to[half + i].write(b * cos[i] + a * sin[i]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_turned_comes_back() {
        let (frequencies, factor) = ([1.0f32, 0.1, 0.01], 1.25f32);
        let x = [1.0f32, -2.0, 3.0, 0.5, 4.0, -1.0];
        let mut turned = x;
        for i in 0..3 {
            let (sin, cos) = (77.0 * frequencies[i]).sin_cos();
            turned[i] = factor * (x[i] * cos - x[i + 3] * sin);
            turned[i + 3] = factor * (x[i + 3] * cos + x[i] * sin);
        }
        let rows = Tensor::new(&[[turned, turned], [x, x]], &candle_core::Device::Cpu).unwrap();
        let turns = [Rotation::new(77, &frequencies, factor), Rotation::new(0, &frequencies, 1.0)];
        let rows = undo(&rows, Some(&turns)).unwrap().to_vec3::<f32>().unwrap();
        for row in rows.iter().flatten() {
            assert!(row.iter().zip(x).all(|(a, b)| (a - b).abs() < 1e-5), "{row:?}");
        }
        let other = Tensor::zeros((2, 1, 4), candle_core::DType::F32, &candle_core::Device::Cpu).unwrap();
        let wrong = |x: &Tensor| undo(x, Some(&turns)).is_err();
        assert!(wrong(&other) && wrong(&other.narrow(0, 0, 1).unwrap()));
    }

    #[test]
    fn joint_projections_come_apart_turned() {
        let mut numbers = crate::testing::Numbers(11);
        for (tokens, q_heads, kv_heads, d) in [(1, 3, 1, 6), (40, 4, 2, 64), (17, 1, 1, 40)] {
            let qkv = numbers.tensor(&[tokens, (q_heads + 2 * kv_heads) * d]);
            let frequencies: Vec<f32> = (0..d / 2).map(|i| 0.7f32.powi(i as i32)).collect();
            let turns: Vec<_> = (0..tokens).map(|t| Rotation::new(3 * t, &frequencies, 1.0)).collect();
            let table = |of: fn(&(f32, f32)) -> f32| {
                let all: Vec<f32> = turns.iter().flat_map(|turn| turn.0.iter().map(of)).collect();
                Tensor::from_vec(all, (tokens, d / 2), qkv.device()).unwrap()
            };
            let (cos, sin) = (table(|turn| turn.0), table(|turn| turn.1));
            let (q, k, v) = split(&qkv, (q_heads, kv_heads), (&cos, &sin)).unwrap();
            let mut start = 0;
            for (part, turned) in [(q, true), (k, true), (v, false)] {
                let heads = part.dim(1).unwrap();
                let expected = qkv.narrow(1, start, heads * d).unwrap().flatten_all().unwrap();
                let part = if turned { undo(&part, Some(&turns)).unwrap() } else { part };
                let error = (part.flatten_all().unwrap() - expected).unwrap().abs().unwrap().max_all().unwrap();
                assert!(error.to_scalar::<f32>().unwrap() < 1e-5, "{tokens} {heads} {d}");
                start += heads * d;
            }
            assert!(split(&qkv, (q_heads + 1, kv_heads), (&cos, &sin)).is_err());
            assert!(split(&qkv, (q_heads, kv_heads), (&cos, &sin.narrow(0, 0, tokens - 1).unwrap())).is_err());
        }
    }
}
