//! What a sample says of one query head: sums that grow with it, and the moments that a budget is made of.

use super::Work;
use crate::budget::Moments;
use crate::decode::rows::{Gathered, Partial, add_values, dots};
use crate::kv::{BLOCK_TOKENS, KvElement};
use crate::simd::{Simd, dispatch, exp_line};
use std::ops::Range;

/// Sampled keys whose products with one another are taken, at most.
const COVARIANCE_KEYS: usize = 40;

/// What is added up of one query head's sampled keys.
#[derive(Debug, Clone, Default)]
pub(super) struct Running {
    /// Keys so far.
    pub keys: usize,
    /// What scores are measured against: at least the largest of known and sampled keys.
    pub max: f32,
    /// Largest score of the sampled keys.
    pub heaviest: f32,
    pub sums: Sums,
}

/// Sums over the sampled keys, with e = exp(score − max): e, e², e v, e² v, e²‖v‖²; and the largest e²‖v‖².
#[derive(Debug, Clone, Default)]
pub(super) struct Sums {
    pub e: f64,
    pub e2: f64,
    pub ev: Vec<f32>,
    pub e2v: Vec<f32>,
    pub e2v2: f64,
    pub most_v: f64,
}

impl Sums {
    pub fn new(d: usize) -> Self {
        Self { ev: vec![0.0; d], e2v: vec![0.0; d], ..Self::default() }
    }

    pub fn add(&mut self, more: &Self) {
        self.e += more.e;
        self.e2 += more.e2;
        self.e2v2 += more.e2v2;
        self.most_v = self.most_v.max(more.most_v);
        self.ev.iter_mut().zip(&more.ev).for_each(|(x, more)| *x += more);
        self.e2v.iter_mut().zip(&more.e2v).for_each(|(x, more)| *x += more);
    }
}

impl Running {
    /// Measures scores against `max` from now on, if it is larger.
    pub fn rise(&mut self, max: f32, d: usize) {
        if self.keys == 0 {
            self.sums = Sums::new(d);
            self.max = max;
        }
        if max <= self.max {
            return;
        }
        let (once, s) = ((self.max - max).exp(), &mut self.sums);
        let twice = once * once;
        s.e *= f64::from(once);
        s.e2 *= f64::from(twice);
        s.e2v2 *= f64::from(twice);
        s.most_v *= f64::from(twice);
        s.ev.iter_mut().for_each(|x| *x *= once);
        s.e2v.iter_mut().for_each(|x| *x *= twice);
        self.max = max;
    }
}

/// One query head's sample against what is known exactly.
pub(super) struct Head<'a, 'b, T> {
    work: &'b Work<'a, T>,
    /// Of the query heads of the group.
    g: usize,
    pub residual: f64,
    pub running: &'b Running,
    /// Sum of the weights of the known keys.
    pub known_sum: f64,
    /// The estimated output.
    pub output: Vec<f32>,
}

impl<'a, 'b, T: KvElement> Head<'a, 'b, T> {
    /// `known`: largest score, sum and weighted values of the known keys.
    pub fn new(work: &'b Work<'a, T>, g: usize, known: &[f32], residual: usize) -> Self {
        let running = &work.running[g];
        let sums = &running.sums;
        let rescale = f64::from((known[0] - running.max).exp());
        let known_sum = f64::from(known[1]) * rescale;
        let scale = residual as f64 / running.keys as f64;
        let total = known_sum + scale * sums.e;
        let output =
            |(known, ev): (&f32, &f32)| ((f64::from(*known) * rescale + scale * f64::from(*ev)) / total) as f32;
        let output = known[2..2 + work.view.head_dim].iter().zip(&sums.ev).map(output).collect();
        Self { work, g, residual: residual as f64, running, known_sum, output }
    }

    pub fn moments(&self) -> Moments {
        let s = &self.running.sums;
        let b = self.running.keys as f64;
        let scale = self.residual / b;
        let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
        let denominator = self.known_sum + scale * s.e;
        let o2 = dot(&self.output, &self.output);
        let centred: f64 =
            s.ev.iter().zip(&self.output).map(|(a, o)| (f64::from(*a) - f64::from(*o) * s.e).powi(2)).sum();
        let heaviest = f64::from((2.0 * (self.running.heaviest - self.running.max)).exp());
        let share = |most: f64, of: f64| most / of.max(f64::MIN_POSITIVE);
        Moments {
            residual: self.residual,
            drawn: b,
            denominator,
            numerator_norm2: o2 * denominator * denominator,
            output_norm2: o2,
            variance_d: (s.e2 - s.e * s.e / b) / (b - 1.0),
            trace_n: (s.e2v2 - dot(&s.ev, &s.ev) / b) / (b - 1.0),
            heaviest: share(heaviest, s.e2).max(share(s.most_v, s.e2v2)),
            trace_r: (s.e2v2 - 2.0 * dot(&self.output, &s.e2v) + o2 * s.e2 - centred / b) / (b - 1.0),
        }
    }

    /// How alike the directions of e (v − o) are, an estimate of Tr(S²) / Tr(S)² of its covariance S: of the first few
    /// sampled keys the squared products of different ones over the products of their squared norms. 1 where all lie on a
    /// line; 1 / head_dim, the least that a covariance has, where no direction stands out.
    pub fn alignment(&self) -> f64 {
        let (keys, few) = (self.running.keys, self.work.few.min(COVARIANCE_KEYS));
        let sums = &self.running.sums;
        let mean = |(ev, o): (&f32, &f32)| ((f64::from(*ev) - f64::from(*o) * sums.e) / keys as f64) as f32;
        let mean: Vec<f32> = sums.ev.iter().zip(&self.output).map(mean).collect();
        let (head, mean, mut sums) = (self, mean.as_slice(), (0.0, 0.0));
        let to = &mut sums;
        dispatch!(self.work.isa, add_pairs::<_, T: KvElement>(
            head: &Head<T>, mean: &[f32], few: usize, to: &mut (f64, f64)
        ));
        let (squared, of_norms) = sums;
        let least = 1.0 / mean.len() as f64;
        if of_norms > 0.0 { (squared / of_norms).clamp(least, 1.0) } else { 1.0 }
    }
}

/// Adds up some of the sampled keys for every query head of the group.
#[inline(always)]
pub(super) unsafe fn sum_up<V: Simd, T: KvElement>(work: &Work<T>, keys: Range<usize>, sums: &mut [Sums]) {
    let (d, group) = (work.view.head_dim, work.view.group);
    let width = Partial::width(d);
    // Weights e and e² `[group, 64]`, and what they add up to `[group, 2 + d]`.
    let (mut once, mut twice) = (vec![0f32; group * BLOCK_TOKENS], vec![0f32; group * BLOCK_TOKENS]);
    let (mut ev, mut e2v) = (vec![0f32; group * width], vec![0f32; group * width]);
    for start in keys.clone().step_by(BLOCK_TOKENS) {
        let (mut values, mut norms) = ([std::ptr::null(); BLOCK_TOKENS], [0f32; BLOCK_TOKENS]);
        let values = work.values(start..keys.end.min(start + BLOCK_TOKENS), &mut values);
        unsafe { squares::<V, T>(values, d, &mut norms) };
        let gathered = Gathered { rows: values, ahead: &[] };
        let lines = once.chunks_exact_mut(BLOCK_TOKENS).zip(twice.chunks_exact_mut(BLOCK_TOKENS));
        for (g, ((once, twice), sums)) in lines.zip(&mut *sums).enumerate() {
            let (once, twice) = (&mut once[..values.len()], &mut twice[..values.len()]);
            once.copy_from_slice(&work.sampled[g][start..start + values.len()]);
            unsafe { exp_line::<V>(once, work.running[g].max) };
            twice.iter_mut().zip(&*once).for_each(|(twice, e)| *twice = e * e);
            let total =
                |line: &[f32], by: &[f32]| line.iter().zip(by).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
            sums.e += once.iter().map(|e| f64::from(*e)).sum::<f64>();
            sums.e2 += total(once, once);
            sums.e2v2 += total(twice, &norms);
            let most = twice.iter().zip(&norms).map(|(e2, norm)| e2 * norm).fold(0.0, f32::max);
            sums.most_v = sums.most_v.max(f64::from(most));
        }
        unsafe {
            add_values::<V, T>(&once, gathered, d, &mut ev);
            add_values::<V, T>(&twice, gathered, d, &mut e2v);
        }
    }
    for (sums, (ev, e2v)) in sums.iter_mut().zip(ev.chunks_exact(width).zip(e2v.chunks_exact(width))) {
        sums.ev.copy_from_slice(&ev[2..]);
        sums.e2v.copy_from_slice(&e2v[2..]);
    }
}

/// The squared norm of each row.
#[inline(always)]
unsafe fn squares<V: Simd, T: KvElement>(rows: &[*const T], d: usize, norms: &mut [f32]) {
    let whole = d - d % V::LANES;
    for (norm, &row) in norms.iter_mut().zip(rows) {
        unsafe {
            let mut sum = V::splat(0.0);
            for c in (0..whole).step_by(V::LANES) {
                let x = T::load::<V>(row.add(c));
                sum = x.mul_add(x, sum);
            }
            *norm = sum.sum() + (whole..d).map(|c| (*row.add(c)).to_f32().powi(2)).sum::<f32>();
        }
    }
}

/// Of the first `few` sampled keys (at most a block) the rows e (v − o) less their mean: over all pairs of different rows
/// the sums of their squared dot products, and of the products of their squared norms.
#[inline(always)]
unsafe fn add_pairs<V: Simd, T: KvElement>(head: &Head<T>, mean: &[f32], few: usize, to: &mut (f64, f64)) {
    let d = mean.len();
    let mut values = [std::ptr::null(); BLOCK_TOKENS];
    let values = head.work.values(0..few, &mut values);
    let whole = d - d % V::LANES;
    let mut rows = vec![0f32; few * d];
    for ((row, &value), score) in rows.chunks_exact_mut(d).zip(values).zip(&head.work.sampled[head.g]) {
        let e = (score - head.running.max).exp();
        unsafe {
            for c in (0..whole).step_by(V::LANES) {
                let apart = T::load::<V>(value.add(c)).sub(V::load(head.output.as_ptr().add(c)));
                V::splat(e).mul(apart).sub(V::load(mean.as_ptr().add(c))).store(row.as_mut_ptr().add(c));
            }
            for c in whole..d {
                row[c] = e * ((*value.add(c)).to_f32() - head.output[c]) - mean[c];
            }
        }
    }
    let mut pointers = [std::ptr::null(); BLOCK_TOKENS];
    pointers.iter_mut().zip(rows.chunks_exact(d)).for_each(|(to, row)| *to = row.as_ptr());
    let mut products = vec![0f32; few * BLOCK_TOKENS];
    // By each row with those up to it, three rows at a time.
    for (i, some) in rows.chunks(3 * d).enumerate() {
        let gathered = Gathered { rows: &pointers[..few.min(3 * i + 3)], ahead: &[] };
        let line = products[3 * i * BLOCK_TOKENS..].as_mut_ptr();
        unsafe { dots::<V, f32>(some, d, gathered, 1.0, line, BLOCK_TOKENS) };
    }
    let mut norms = 0.0;
    for (i, line) in products.chunks_exact(BLOCK_TOKENS).enumerate() {
        let ((others, rest), norm) = (line[..i].as_chunks::<4>(), f64::from(line[i]));
        // Sums side by side, which need not wait for one another.
        let mut squares = [0f64; 4];
        for others in others.iter().map(<[f32; 4]>::as_slice).chain([rest]) {
            squares.iter_mut().zip(others).for_each(|(sum, &product)| *sum += f64::from(product).powi(2));
        }
        to.0 += squares.iter().sum::<f64>();
        to.1 += norm * norms;
        norms += norm;
    }
}
