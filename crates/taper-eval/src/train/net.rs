//! What the small networks have in common: seeded weights, standardised inputs, a learning rate that falls, and folding
//! of what training needs and running does not into the weights.

use candle_core::{D, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// A linear layer as artefacts store it: weight `[outputs, inputs]` and bias `[outputs]`.
pub(super) type Linear = (Vec<f32>, Vec<f32>);

/// How many steps, how many queries each, how fast.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Schedule {
    pub iterations: usize,
    pub batch: usize,
    /// At the start; falls to nothing along a cosine.
    pub learning_rate: f64,
}

/// How a network is trained.
pub(super) struct Course<'a> {
    /// Width of the hidden layers.
    pub hidden: usize,
    pub schedule: Schedule,
    /// What computes.
    pub device: &'a Device,
    pub rng: &'a mut ChaCha8Rng,
    /// Called after every iteration; false ends training early.
    pub step: &'a mut dyn FnMut() -> bool,
}

/// AdamW without decay over the schedule, which is Adam.
pub(super) struct Descent {
    adam: AdamW,
    schedule: Schedule,
    step: usize,
}

impl Descent {
    pub fn new(vars: Vec<Var>, schedule: Schedule) -> Result<Self> {
        let params = ParamsAdamW { lr: schedule.learning_rate, weight_decay: 0.0, ..ParamsAdamW::default() };
        Ok(Self { adam: AdamW::new(vars, params)?, schedule, step: 0 })
    }

    /// One step down the gradient of `loss`.
    pub fn step(&mut self, loss: &Tensor) -> Result<()> {
        let share = self.step as f64 / self.schedule.iterations as f64;
        self.adam.set_learning_rate(self.schedule.learning_rate * 0.5 * (1.0 + (std::f64::consts::PI * share).cos()));
        self.step += 1;
        self.adam.backward_step(loss)
    }
}

/// A variable drawn evenly from ±`bound`. candle's own draws cannot be seeded on the CPU.
pub(super) fn uniform(course: &mut Course, shape: &[usize], bound: f64) -> Result<Var> {
    let draw = |_| course.rng.random_range(-bound..=bound) as f32;
    let values: Vec<f32> = (0..shape.iter().product()).map(draw).collect();
    Var::from_tensor(&Tensor::from_vec(values, shape, course.device)?)
}

/// A variable of equal values.
pub(super) fn constant(value: f32, shape: &[usize], device: &Device) -> Result<Var> {
    Var::from_tensor(&Tensor::full(value, shape, device)?)
}

/// Mean and standard deviation of each column.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Columns {
    pub mean: Vec<f32>,
    pub deviation: Vec<f32>,
}

impl Columns {
    /// Of rows `x` `[n, d]`; a column that does not vary counts as deviating by 1.
    pub fn of(x: &[f32], d: usize) -> Self {
        let n = (x.len() / d).max(1) as f64;
        let (mut sum, mut squares) = (vec![0f64; d], vec![0f64; d]);
        for row in x.chunks_exact(d) {
            for (i, &x) in row.iter().enumerate() {
                sum[i] += f64::from(x);
                squares[i] += f64::from(x).powi(2);
            }
        }
        let deviation = |(sum, squares): (&f64, &f64)| {
            let variance = squares / n - (sum / n).powi(2);
            if variance > 1e-12 { variance.sqrt() as f32 } else { 1.0 }
        };
        Self {
            deviation: sum.iter().zip(&squares).map(deviation).collect(),
            mean: sum.iter().map(|sum| (sum / n) as f32).collect(),
        }
    }

    /// Turns rows into what deviates from the mean, in deviations.
    pub fn standardise(&self, x: &mut [f32]) {
        for row in x.chunks_exact_mut(self.mean.len()) {
            row.iter_mut().zip(&self.mean).zip(&self.deviation).for_each(|((x, m), s)| *x = (*x - m) / s);
        }
    }

    /// The layer that does to rows what `linear` does to standardised ones.
    pub fn fold_into(&self, linear: &mut Linear) {
        let (weight, bias) = linear;
        for (row, bias) in weight.chunks_exact_mut(self.mean.len()).zip(bias) {
            for ((w, m), s) in row.iter_mut().zip(&self.mean).zip(&self.deviation) {
                *w /= s;
                *bias -= *w * m;
            }
        }
    }
}

/// Batch normalisation by known statistics, folded into the layer before it.
pub(super) fn fold_norm(linear: &mut Linear, statistics: &Columns, gain: &[f32], shift: &[f32]) {
    let inputs = linear.0.len() / linear.1.len();
    for (o, bias) in linear.1.iter_mut().enumerate() {
        let factor = gain[o] / statistics.deviation[o];
        linear.0[o * inputs..(o + 1) * inputs].iter_mut().for_each(|w| *w *= factor);
        *bias = (*bias - statistics.mean[o]) * factor + shift[o];
    }
}

/// Batch normalisation of rows `x` `[n, d]` by their own statistics.
pub(super) fn batch_norm(x: &Tensor, gain: &Tensor, shift: &Tensor) -> Result<Tensor> {
    let centred = x.broadcast_sub(&x.mean_keepdim(0)?)?;
    let variance = centred.sqr()?.mean_keepdim(0)?;
    centred.broadcast_div(&(variance + EPSILON)?.sqrt()?)?.broadcast_mul(gain)?.broadcast_add(shift)
}

/// Added to a variance before its root is taken.
const EPSILON: f64 = 1e-5;

/// The rows `[n, d]` of a tensor as numbers.
pub(super) fn numbers(x: &Tensor) -> Result<Vec<f32>> {
    x.flatten_all()?.to_vec1()
}

/// ln(1 + exp(x)), for any x.
pub(super) fn softplus(x: &Tensor) -> Result<Tensor> {
    x.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?
}

/// The product of `x` `[maps, n, inputs]` with each map's weight `[maps, outputs, inputs]`, and its bias
/// `[maps, 1, outputs]` added.
pub(super) fn linear(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    x.matmul(&weight.transpose(D::Minus1, D::Minus2)?)?.broadcast_add(bias)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use taper_kernels::mlp::{Activation, Mlp};

    fn draw(rng: &mut ChaCha8Rng, n: usize) -> Vec<f32> {
        (0..n).map(|_| rng.random_range(-2.0..3.0f32)).collect()
    }

    #[test]
    fn folding_changes_nothing() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let (n, d, hidden) = (50, 6, 9);
        let mut x = draw(&mut rng, n * d);
        x.chunks_exact_mut(d).for_each(|row| row[3] = 0.7);
        let (mut first, second) =
            ((draw(&mut rng, hidden * d), draw(&mut rng, hidden)), (draw(&mut rng, 4 * hidden), draw(&mut rng, 4)));
        let (gain, shift) = (draw(&mut rng, hidden), draw(&mut rng, hidden));

        // As in training: standardised inputs, normalised by the statistics of all rows.
        let tensor = |x: &[f32], shape: (usize, usize)| Tensor::from_slice(x, shape, &Device::Cpu).unwrap();
        let columns = Columns::of(&x, d);
        let mut inputs = x.clone();
        columns.standardise(&mut inputs);
        let h = tensor(&inputs, (n, d)).matmul(&tensor(&first.0, (hidden, d)).t().unwrap()).unwrap();
        let h = h.broadcast_add(&tensor(&first.1, (1, hidden))).unwrap();
        let normed = batch_norm(&h, &tensor(&gain, (1, hidden)), &tensor(&shift, (1, hidden))).unwrap();
        let out = normed.relu().unwrap().matmul(&tensor(&second.0, (4, hidden)).t().unwrap()).unwrap();
        let out = numbers(&out.broadcast_add(&tensor(&second.1, (1, 4))).unwrap()).unwrap();

        fold_norm(&mut first, &Columns::of(&numbers(&h).unwrap(), hidden), &gain, &shift);
        columns.fold_into(&mut first);
        let folded = Mlp::new(vec![first, second], Activation::Relu).unwrap().forward(&x);
        for (a, b) in folded.iter().zip(&out) {
            assert!((a - b).abs() < 2e-3 * (1.0 + b.abs()), "{a} {b}");
        }
    }

    #[test]
    fn columns_that_do_not_vary_are_let_be() {
        let columns = Columns::of(&[1.0, 5.0, 3.0, 5.0], 2);
        assert_eq!((columns.mean.clone(), columns.deviation.clone()), (vec![2.0, 5.0], vec![1.0, 1.0]));
        let mut x = [4.0, 5.0];
        columns.standardise(&mut x);
        assert_eq!(x, [2.0, 0.0]);
    }

    #[test]
    fn softplus_of_large_numbers_is_finite() {
        let x = Tensor::new(&[-200.0f32, 0.0, 200.0], &Device::Cpu).unwrap();
        let y = softplus(&x).unwrap().to_vec1::<f32>().unwrap();
        assert!(y[0] == 0.0 && (y[1] - 2f32.ln()).abs() < 1e-6 && y[2] == 200.0, "{y:?}");
    }
}
