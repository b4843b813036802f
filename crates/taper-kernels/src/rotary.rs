//! Taking the rotary embedding off queries and keys again, for methods that look at them as they were before it.

use candle_core::{Result, Tensor, bail};

/// The turn of one position: cosines and sines of its angles, `[head_dim / 2]`.
#[derive(Debug, Clone)]
pub struct Rotation(pub(crate) Vec<(f32, f32)>);

/// The turn of each position of a sequence.
pub type Rotations<'a> = dyn Fn(usize) -> Rotation + Sync + 'a;

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
}
