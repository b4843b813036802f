//! Taking the rotary embedding off queries and keys again, for methods that look at them as they were before it.

/// The turn of one position: cosines and sines of its angles, `[head_dim / 2]`.
#[derive(Debug, Clone)]
pub struct Rotation(Vec<(f32, f32)>);

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
        Rotation::new(77, &frequencies, factor).undo(&mut turned);
        for (a, b) in turned.iter().zip(x) {
            assert!((a - b).abs() < 1e-5, "{turned:?}");
        }
    }
}
