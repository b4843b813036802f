//! Which predicted keys, or pages of them, cost less than sampling around them.
//!
//! Of n keys whose squared shares of the attention mass sum to q a sample of n q / (q + noise) keeps a promise: the
//! usual size, n² times the variance over the squared error, with the correction for drawing without replacement; noise
//! is the sum of which half would be sampled. So the next key, of share s, is cheaper to read than to sample around as
//! long as n s² >= q + noise. Keys are taken from the heaviest on while that holds.

use crate::index::map_spans;
use crate::simd::{Isa, Simd, dispatch};
use std::ops::Range;

/// Shares are told apart by eighths of an octave, the last of which holds shares from 30 on, or NaN, and the first all
/// below 2^-27.
const BINS: usize = 256;
/// Bits of a float's mantissa below those that tell the eighth.
const SHIFT: u32 = 20;
/// What the bits above are in the first bin.
const FIRST: u32 = (127 + 5) * 8 - BINS as u32;
/// Counts of one bin that grow beside one another.
const APART: usize = 4;
/// Units to a squared share of 1, 2^54. Squares are counted in whole ones, which add up to the same in any order.
const UNITS: f64 = 18_014_398_509_481_984.0;

/// The bin of a share, which is not negative.
#[inline]
fn bin(share: f32) -> usize {
    ((share.to_bits() >> SHIFT).saturating_sub(FIRST) as usize).min(BINS - 1)
}

/// The square of a share in the middle of a bin, in units.
const fn square(bin: usize) -> u64 {
    let middle = 17 + 2 * (bin as u64 % 8);
    let octave = 2 * (bin as u32 / 8);
    if octave < 8 { (middle * middle) >> (8 - octave) } else { (middle * middle) << (octave - 8) }
}

/// Shares whose bins are found before they are counted.
const RUN: usize = 512;

/// The bins of as many shares.
#[inline(always)]
unsafe fn find_bins<V: Simd>(shares: &[f32], to: &mut [u8]) {
    for (to, &share) in to.iter_mut().zip(shares) {
        *to = bin(share) as u8;
    }
}

/// How many shares each bin has.
fn counted(shares: &[f32]) -> [u32; BINS] {
    let isa = Isa::best();
    let of_span = |span: Range<usize>| {
        let (mut counts, mut bins) = ([[0u32; BINS]; APART], [0u8; RUN]);
        for run in shares[span].chunks(RUN) {
            let bins = &mut bins[..run.len()];
            let to = &mut *bins;
            dispatch!(isa, find_bins::<_>(run: &[f32], to: &mut [u8]));
            // Shares that follow one another count apart: many are alike, and a count would wait for the last one.
            for bins in bins.chunks(APART) {
                bins.iter().zip(&mut counts).for_each(|(&bin, counts)| counts[usize::from(bin)] += 1);
            }
        }
        counts
    };
    let all = map_spans(0..shares.len(), of_span);
    std::array::from_fn(|bin| all.iter().flatten().map(|counts| counts[bin]).sum())
}

/// The least share that is read of `shares` `[n]`, pages of `page` keys each, at most `most` of them, told to an
/// eighth of an octave.
pub(super) fn least_paying(shares: &[f32], noise: f32, page: usize, most: usize) -> f32 {
    let counts = counted(shares);
    let noise = f64::from(of_pages(noise, page)) * UNITS;
    let squares = |bin: usize| u64::from(counts[bin]).wrapping_mul(square(bin));
    let mut sum = (0..BINS).fold(0u64, |sum, bin| sum.wrapping_add(squares(bin)));
    let mut left = shares.len();
    for bin in (0..BINS).rev().filter(|&bin| counts[bin] > 0) {
        let pays = square(bin) as f64 * left as f64 >= sum as f64 + noise;
        left -= counts[bin] as usize;
        if !pays || shares.len() - left > most {
            return from(bin + 1);
        }
        sum = sum.wrapping_sub(squares(bin));
    }
    0.0
}

/// `noise` in squared shares of pages of so many keys, a power of two: a key of a page holds its part of it.
pub(crate) fn of_pages(noise: f32, page: usize) -> f32 {
    noise * page as f32
}

/// The least share of a bin.
fn from(bin: usize) -> f32 {
    if bin == BINS { f32::INFINITY } else { f32::from_bits((bin as u32 + FIRST) << SHIFT) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn squares_are_those_of_the_middles_of_bins() {
        for bin in 0..BINS {
            let middle = f64::midpoint(f64::from(from(bin)), f64::from(from(bin + 1)));
            let (is, near) = (square(bin) as f64, middle * middle * UNITS);
            assert!(bin == BINS - 1 || (is - near).abs() <= 1.0, "{bin}: {is} for {near}");
        }
        assert_eq!((0..BINS).map(|i| bin(from(i))).collect::<Vec<_>>(), (0..BINS).collect::<Vec<_>>());
        assert_eq!([0.0, 1e-12, 31.9, 1e9, f32::INFINITY, f32::NAN].map(bin), [0, 0, 255, 255, 255, 255]);
    }

    #[test]
    fn bins_are_counted_over_several_spans() {
        let shares: Vec<f32> =
            (0..9_001u32).map(|i| 0.9f32.powi((i.wrapping_mul(2_654_435_761) >> 24) as i32)).collect();
        let mut expected = [0u32; BINS];
        shares.iter().for_each(|&share| expected[bin(share)] += 1);
        assert_eq!(counted(&shares), expected);
        assert!(expected.iter().filter(|&&count| count > 0).count() > 50);
    }

    #[test]
    fn nothing_is_worth_reading_of_what_is_spread_evenly() {
        let even = vec![1.0 / 4096.0; 4096];
        for noise in [1e-9, 1e-5, 1.0] {
            assert!(least_paying(&even, noise, 1, 4096) > even[0]);
        }
        // One key stands out, until noise drowns it.
        let mut peaked = even;
        peaked[77] = 0.1;
        let read = |noise| peaked.iter().filter(|&&share| share >= least_paying(&peaked, noise, 1, 4096)).count();
        assert_eq!([1e-4, 1.0, 35.0, 50.0].map(read), [1, 1, 1, 0]);
    }

    proptest! {
        // What is read and sampled is little more than with any other number of the heaviest.
        #[test]
        fn no_other_number_of_the_heaviest_is_much_cheaper(
            normal in prop::collection::vec(-3.0f64..3.0, 500..4000), spread in 0.2f64..2.5, sampled in 0.05f64..0.95, pages in 0u32..3,
        ) {
            let (n, page) = (normal.len(), 1usize << (2 * pages));
            let mut weights: Vec<f64> = normal.iter().map(|x| (spread * x).exp()).collect();
            weights.sort_by(|a, b| b.total_cmp(a));
            let sum: f64 = weights.iter().sum();
            let shares: Vec<f64> = weights.iter().map(|w| w / sum).collect();
            let squares: f64 = shares.iter().map(|s| s * s).sum();
            // So that this part of all keys would be sampled.
            let noise = squares * (1.0 - sampled) / sampled / page as f64;
            let least = least_paying(&shares.iter().map(|&s| s as f32).collect::<Vec<_>>(), noise as f32, page, n);
            let mut left = squares;
            let mut costs = Vec::new();
            for read in 0..=n {
                let rest = (n - read) as f64 * left / (left + page as f64 * noise);
                costs.push(read as f64 + rest);
                left = (left - shares.get(read).map_or(0.0, |s| s * s)).max(0.0);
            }
            let read = shares.iter().filter(|&&s| s as f32 >= least).count();
            let best = costs.iter().copied().fold(f64::INFINITY, f64::min);
            prop_assert!(costs[read] <= 1.1 * best + 4.0, "{read} read: {} for {best}", costs[read]);
        }

        #[test]
        fn no_more_are_read_than_asked_for(shares in prop::collection::vec(0.0f32..1.0, 1..300), most in 0usize..300) {
            let least = least_paying(&shares, 1e-6, 1, most);
            prop_assert!(shares.iter().filter(|&&s| s >= least).count() <= most);
        }
    }
}
