//! Counter-based random numbers: the same draw for the same request, layer, head and position, whatever runs beside
//! it and on whatever device.
//!
//! Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox4x32-10).

use crate::simd::{Isa, Simd, dispatch};
use std::ops::Range;

/// Four random words for a 64-bit key and a 128-bit counter.
pub fn philox(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let [mut k0, mut k1] = key;
    let [mut a, mut b, mut c, mut d] = counter;
    for _ in 0..10 {
        let p = u64::from(a) * 0xD251_1F53;
        let q = u64::from(c) * 0xCD9E_8D57;
        (a, b, c, d) = ((q >> 32) as u32 ^ b ^ k0, q as u32, (p >> 32) as u32 ^ d ^ k1, p as u32);
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    [a, b, c, d]
}

/// Names one stream of draws: a request's seed, and where in it the draw is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// The request's seed.
    pub seed: u64,
    /// Decoder layer.
    pub layer: u32,
    /// KV head.
    pub head: u32,
    /// Absolute position of the query.
    pub position: u32,
}

impl Stream {
    /// Four words of the stream.
    pub fn words(&self, draw: u32) -> [u32; 4] {
        philox([self.seed as u32, (self.seed >> 32) as u32], [self.layer, self.head, self.position, draw])
    }

    /// A number in [0, 1) with 24 random bits.
    pub fn uniform(&self, draw: u32) -> f32 {
        (self.words(draw)[0] >> 8) as f32 / (1 << 24) as f32
    }
}

/// A random permutation of `0..n`, evaluated point by point: a Feistel network of six rounds over the next power of
/// two, keyed by Philox, and walked on from what lies at or beyond `n` until it lands below. Its first points, less
/// those that a filter leaves out, are a uniform sample without replacement, which grows without redrawing.
#[derive(Debug, Clone, Copy)]
pub struct Permutation {
    keys: [u32; 6],
    /// Of a point's bits the upper, which rounds of even number change, and the lower.
    bits: (u32, u32),
    n: u32,
}

/// Draw numbers that [`Permutation`] takes from its stream.
const PERMUTATION_DRAWS: [u32; 2] = [0x5045_0000, 0x5045_0001];

impl Permutation {
    /// The permutation of `0..n` of a stream; `n` is at least 1 and at most 2³⁰.
    pub fn new(n: u32, stream: &Stream) -> Self {
        let [a, b, c, d] = stream.words(PERMUTATION_DRAWS[0]);
        let [e, f, ..] = stream.words(PERMUTATION_DRAWS[1]);
        let bits = u32::BITS - (n - 1).leading_zeros();
        Self { keys: [a, b, c, d, e, f], bits: (bits / 2, bits.div_ceil(2)), n }
    }

    /// How many points there are: `n`.
    pub fn domain(&self) -> u32 {
        self.n
    }

    /// Where `i` in `0..n` goes.
    #[inline]
    pub fn point(&self, i: u32) -> u32 {
        let mut point = self.land(i);
        while point >= self.n {
            point = self.land(point);
        }
        point
    }

    /// Where a run of points goes, appended to `to` in their order.
    pub(crate) fn points(&self, run: Range<u32>, to: &mut Vec<u32>) {
        let first = to.len();
        to.extend(run);
        let (of, isa, all) = (self, Isa::best(), &mut to[first..]);
        dispatch!(isa, land_all::<_>(of: &Permutation, all: &mut [u32]));
        let beyond = |all: &[u32], i: &usize| all[*i] >= self.n;
        let mut on: Vec<usize> = (0..all.len()).filter(|i| beyond(all, i)).collect();
        while !on.is_empty() {
            let mut some: Vec<u32> = on.iter().map(|&i| all[i]).collect();
            let walked = some.as_mut_slice();
            dispatch!(isa, land_all::<_>(of: &Permutation, walked: &mut [u32]));
            on.iter().zip(some).for_each(|(&i, point)| all[i] = point);
            on.retain(|i| beyond(all, i));
        }
    }

    #[inline(always)]
    fn land(&self, i: u32) -> u32 {
        let (upper, lower) = self.bits;
        let (upper_mask, lower_mask) = ((1u32 << upper) - 1, (1u32 << lower) - 1);
        let (mut left, mut right) = (i >> lower, i & lower_mask);
        let mix = |x: u32| {
            let x = x.wrapping_mul(0x9E37_79B1);
            let x = (x ^ (x >> 15)).wrapping_mul(0x85EB_CA77);
            x ^ (x >> 13)
        };
        for [even, odd] in self.keys.as_chunks().0 {
            left ^= mix(right.wrapping_add(*even)) & upper_mask;
            right ^= mix(left.wrapping_add(*odd)) & lower_mask;
        }
        (left << lower) | right
    }
}

/// What the compiler makes vectors of, where they can multiply.
#[inline(always)]
unsafe fn land_all<V: Simd>(of: &Permutation, all: &mut [u32]) {
    all.iter_mut().for_each(|i| *i = of.land(*i));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_vectors() {
        assert_eq!(philox([0; 2], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 2], [u32::MAX; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0xa409_3822, 0x299f_31d0], [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    fn stream(position: u32) -> Stream {
        Stream { seed: 7, layer: 3, head: 1, position }
    }

    #[test]
    fn a_permutation_meets_every_point_once() {
        for n in [1, 2, 3, 5, 64, 65, 128, 129, 1000, 4097] {
            let p = Permutation::new(n, &stream(n));
            let mut points: Vec<u32> = (0..n).map(|i| p.point(i)).collect();
            let mut together = Vec::new();
            (0..n).step_by(100).for_each(|first| p.points(first..n.min(first + 100), &mut together));
            assert_eq!(together, points);
            points.sort_unstable();
            assert_eq!(points, (0..n).collect::<Vec<_>>());
        }
    }

    /// Every token should be among the first 30 of n with probability 30 / n, and every pair of neighbours with 30 / n
    /// · 29 / (n - 1). Chi-square over 20,000 permutations at 5 standard deviations: false alarm below 1e-5 over all.
    /// Of 1000 points nearly all of the power of two are there, with halves of five bits; of 300 little more than half,
    /// of nine.
    #[test]
    fn the_first_points_are_a_uniform_sample() {
        for n in [1000u32, 300] {
            let (b, runs) = (30usize, 20_000u32);
            let mut single = vec![0f64; n as usize];
            let mut pairs = 0f64;
            for run in 0..runs {
                let p = Permutation::new(n, &stream(run));
                let chosen: Vec<u32> = (0..b as u32).map(|i| p.point(i)).collect();
                let set: std::collections::HashSet<u32> = chosen.iter().copied().collect();
                chosen.iter().for_each(|&c| single[c as usize] += 1.0);
                pairs += chosen.iter().filter(|&&c| set.contains(&(c + 1))).count() as f64;
            }
            let (runs, b, all) = (f64::from(runs), b as f64, f64::from(n));
            // Draws without replacement spread less than those of Poisson's.
            let expected = runs * b / all;
            let chi2: f64 = single.iter().map(|x| (x - expected).powi(2) / (expected * (1.0 - b / all))).sum();
            let deviations = (chi2 - all) / (2.0 * all).sqrt();
            assert!(deviations.abs() < 5.0, "single tokens of {n}: {deviations} standard deviations");
            let expected = runs * b * (b - 1.0) / all;
            assert!((pairs - expected).abs() < 5.0 * expected.sqrt(), "pairs of {n}: {pairs}, expected {expected}");
        }
    }
}
