//! What a sample says of one query head: sums that grow with it, and the moments that a budget is made of.

use super::{CHUNK_KEYS, Work};
use crate::budget::Moments;
use crate::kv::KvElement;
use crate::parallel;
use crate::simd::{Simd, dispatch, dot};

/// Sampled keys whose products with one another are taken.
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

/// Sums over the sampled keys, with e = exp(score − max): e, e², e v, e² v, e²‖v‖².
#[derive(Debug, Clone, Default)]
pub(super) struct Sums {
    pub e: f64,
    pub e2: f64,
    pub ev: Vec<f32>,
    pub e2v: Vec<f32>,
    pub e2v2: f64,
}

impl Sums {
    pub fn new(d: usize) -> Self {
        Self { ev: vec![0.0; d], e2v: vec![0.0; d], ..Self::default() }
    }

    pub fn add(&mut self, more: &Self) {
        self.e += more.e;
        self.e2 += more.e2;
        self.e2v2 += more.e2v2;
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
        Moments {
            residual: self.residual,
            drawn: b,
            denominator,
            numerator_norm2: o2 * denominator * denominator,
            output_norm2: o2,
            variance_d: (s.e2 - s.e * s.e / b) / (b - 1.0),
            trace_n: (s.e2v2 - dot(&s.ev, &s.ev) / b) / (b - 1.0),
            heaviest: f64::from((2.0 * (self.running.heaviest - self.running.max)).exp()) / s.e2.max(f64::MIN_POSITIVE),
            trace_r: (s.e2v2 - 2.0 * dot(&self.output, &s.e2v) + o2 * s.e2 - centred / b) / (b - 1.0),
        }
    }

    /// Trace of the squared sample covariance of e (v − o). Its diagonal part, which heavy tails raise, takes every
    /// key; the products of different keys are estimated from the first few.
    pub fn covariance_trace2(&self) -> f64 {
        let (keys, few) = (self.running.keys, self.running.keys.min(COVARIANCE_KEYS));
        let sums = &self.running.sums;
        let mean = |(ev, o): (&f32, &f32)| ((f64::from(*ev) - f64::from(*o) * sums.e) / keys as f64) as f32;
        let mean: Vec<f32> = sums.ev.iter().zip(&self.output).map(mean).collect();
        let chunks = keys.div_ceil(CHUNK_KEYS);
        let products = parallel::map(chunks, |chunk| {
            let (start, mut weights, mut products) = (chunk * CHUNK_KEYS, Vec::new(), (0.0, 0.0));
            self.work.weights(self.g, start..keys.min(start + CHUNK_KEYS), &mut weights);
            let (few, to) = (few * usize::from(chunk == 0), &mut products);
            let (head, mean, weights) = (self, mean.as_slice(), weights.as_slice());
            dispatch!(self.work.isa, squared_dots::<_, T: KvElement>(
                head: &Head<T>, mean: &[f32], start: usize, weights: &[f32], few: usize, to: &mut (f64, f64)
            ));
            products
        });
        let (own, mixed) = (products.iter().map(|p| p.0).sum::<f64>(), products[0].1);
        let (keys, few) = (keys as f64, few as f64);
        (own + mixed * (keys * (keys - 1.0)) / (few * (few - 1.0))) / (keys - 1.0).powi(2)
    }
}

/// Adds keys from the `first` sampled one on, of the given weights.
#[inline(always)]
pub(super) unsafe fn sum_up<V: Simd, T: KvElement>(work: &Work<T>, first: usize, weights: &[f32], sums: &mut Sums) {
    let d = sums.ev.len();
    let whole = d - d % V::LANES;
    for (i, &e) in weights.iter().enumerate() {
        let value = work.value(first + i);
        let mut v2 = 0f32;
        unsafe {
            let (once, twice, mut norm) = (V::splat(e), V::splat(e * e), V::splat(0.0));
            for c in (0..whole).step_by(V::LANES) {
                let v = T::load::<V>(value.as_ptr().add(c));
                let (ev, e2v) = (sums.ev.as_mut_ptr().add(c), sums.e2v.as_mut_ptr().add(c));
                norm = v.mul_add(v, norm);
                once.mul_add(v, V::load(ev)).store(ev);
                twice.mul_add(v, V::load(e2v)).store(e2v);
            }
            v2 += norm.sum();
        }
        for (c, v) in value.iter().enumerate().skip(whole) {
            let v = v.to_f32();
            v2 += v * v;
            sums.ev[c] += e * v;
            sums.e2v[c] += e * e * v;
        }
        let e = f64::from(e);
        sums.e += e;
        sums.e2 += e * e;
        sums.e2v2 += e * e * f64::from(v2);
    }
}

/// Of the sampled keys from `start` on, of the given weights, the rows e (v − o) less their mean: adds up the squared dot
/// products of every row with itself, and of every ordered pair of different rows among the first `few`.
#[inline(always)]
unsafe fn squared_dots<V: Simd, T: KvElement>(
    head: &Head<T>,
    mean: &[f32],
    start: usize,
    weights: &[f32],
    few: usize,
    (own, mixed): &mut (f64, f64),
) {
    let d = mean.len();
    let whole = d - d % V::LANES;
    // The first few, and a place for one more.
    let mut rows = vec![0f32; (few + 1) * d];
    for (i, &e) in weights.iter().enumerate() {
        let (before, row) = rows.split_at_mut(i.min(few) * d);
        let (row, value) = (&mut row[..d], head.work.value(start + i));
        unsafe {
            let weight = V::splat(e);
            for c in (0..whole).step_by(V::LANES) {
                let v = T::load::<V>(value.as_ptr().add(c)).sub(V::load(head.output.as_ptr().add(c)));
                weight.mul(v).sub(V::load(mean.as_ptr().add(c))).store(row.as_mut_ptr().add(c));
            }
        }
        for c in whole..d {
            row[c] = e * (value[c].to_f32() - head.output[c]) - mean[c];
        }
        let squared = |other: &[f32]| f64::from(unsafe { dot::<V>(row, other) }).powi(2);
        *own += squared(row);
        if i < few {
            *mixed += before.chunks_exact(d).map(|other| 2.0 * squared(other)).sum::<f64>();
        }
    }
}
