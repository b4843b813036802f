//! Rows of logits in host memory: what choosing a token looks at, by vectors.

use crate::simd::{Isa, Simd, dispatch, exp};
use std::cmp::Ordering;

/// Elements that [`sums`] and [`maxima`] take together.
pub const BLOCK: usize = 64;

#[cfg(not(test))]
fn isa() -> Isa {
    Isa::best()
}

#[cfg(test)]
use tests::isa;

/// The first of the largest elements, and its place; none where there is NaN or plus infinity, or nothing finite.
pub fn peak(row: &[f32]) -> Option<(usize, f32)> {
    let (mut largest, mut sound) = (f32::NEG_INFINITY, true);
    let (largest_of, sound_of) = (&mut largest, &mut sound);
    dispatch!(isa(), look::<_>(row: &[f32], largest_of: &mut f32, sound_of: &mut bool));
    if !sound || largest == f32::NEG_INFINITY {
        return None;
    }
    // The blocks are passed over by vectors; the first that has it is looked through.
    let place = row.chunks(BLOCK).position(|block| block.iter().fold(false, |any, x| any | (*x == largest)))?;
    let within = row[place * BLOCK..].iter().position(|x| *x == largest)?;
    Some((place * BLOCK + within, largest))
}

/// The largest element, and whether there is neither NaN nor plus infinity.
#[inline(always)]
unsafe fn look<V: Simd>(row: &[f32], largest: &mut f32, sound: &mut bool) {
    let whole = row.len() - row.len() % V::LANES;
    unsafe {
        let (mut max, mut bad) = (V::splat(f32::NEG_INFINITY), 0);
        let limit = V::splat(f32::INFINITY);
        for at in (0..whole).step_by(V::LANES) {
            let x = V::load(row.as_ptr().add(at));
            bad |= x.not_below(limit);
            max = max.max(x);
        }
        let rest = &row[whole..];
        *sound = bad == 0 && rest.iter().all(|x| *x < f32::INFINITY);
        *largest = rest.iter().copied().fold(max.max_lane(), f32::max);
    }
}

/// exp((x − max) / temperature) of each element, with a relative error below 1e-6 for each unit of the exponent; 0 where that
/// is below −87.
pub fn weights(row: &[f32], max: f32, temperature: f32) -> Vec<f32> {
    let mut out = vec![0.0; row.len()];
    let (to, scale) = (&mut out[..], scale(temperature));
    dispatch!(isa(), exp_all::<_>(row: &[f32], max: f32, scale: f32, to: &mut [f32]));
    out
}

/// The [sum of each block](sums) of [`weights`], which are not stored.
pub fn mass(row: &[f32], max: f32, temperature: f32) -> Vec<f32> {
    let mut out = vec![0.0; row.len().div_ceil(BLOCK)];
    let (to, scale) = (&mut out[..], scale(temperature));
    dispatch!(isa(), exp_blocks::<_>(row: &[f32], max: f32, scale: f32, to: &mut [f32]));
    out
}

fn scale(temperature: f32) -> f32 {
    temperature.recip().min(f32::MAX)
}

#[inline(always)]
unsafe fn exp_all<V: Simd>(row: &[f32], max: f32, scale: f32, out: &mut [f32]) {
    let whole = row.len() - row.len() % V::LANES;
    unsafe {
        let (top, scale) = (V::splat(max), V::splat(scale));
        for at in (0..whole).step_by(V::LANES) {
            exp(V::load(row.as_ptr().add(at)).sub(top).mul(scale)).store(out.as_mut_ptr().add(at));
        }
    }
    row[whole..].iter().zip(&mut out[whole..]).for_each(|(x, out)| *out = ((x - max) * scale).exp());
}

#[inline(always)]
unsafe fn exp_blocks<V: Simd>(row: &[f32], max: f32, scale: f32, out: &mut [f32]) {
    let mut weights = [0.0; BLOCK];
    for (block, out) in row.chunks(BLOCK).zip(out) {
        unsafe {
            exp_all::<V>(block, max, scale, &mut weights);
            *out = sum::<V>(&weights[..block.len()]);
        }
    }
}

/// The sum of each [`BLOCK`] of elements, the last one's rest included.
pub fn sums(row: &[f32]) -> Vec<f32> {
    by_block(row, false)
}

/// The largest of each [`BLOCK`] of elements without NaN, the last one's rest included.
pub fn maxima(row: &[f32]) -> Vec<f32> {
    by_block(row, true)
}

fn by_block(row: &[f32], largest: bool) -> Vec<f32> {
    let mut out = vec![0.0; row.len().div_ceil(BLOCK)];
    let to = &mut out[..];
    dispatch!(isa(), fold_blocks::<_>(row: &[f32], largest: bool, to: &mut [f32]));
    out
}

#[inline(always)]
unsafe fn fold_blocks<V: Simd>(row: &[f32], largest: bool, out: &mut [f32]) {
    for (block, out) in row.chunks(BLOCK).zip(out) {
        *out = unsafe { if largest { max::<V>(block) } else { sum::<V>(block) } };
    }
}

#[inline(always)]
unsafe fn sum<V: Simd>(block: &[f32]) -> f32 {
    let mut vectors = block.chunks_exact(V::LANES);
    unsafe {
        let all = vectors.by_ref().fold(V::splat(0.0), |all, x| all.add(V::load(x.as_ptr())));
        all.sum() + vectors.remainder().iter().sum::<f32>()
    }
}

#[inline(always)]
unsafe fn max<V: Simd>(block: &[f32]) -> f32 {
    let mut vectors = block.chunks_exact(V::LANES);
    unsafe {
        let all = vectors.by_ref().fold(V::splat(f32::NEG_INFINITY), |all, x| all.max(V::load(x.as_ptr())));
        vectors.remainder().iter().copied().fold(all.max_lane(), f32::max)
    }
}

/// Some of a row's elements, in order, each with its place.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Kept {
    /// Where they stand in the row.
    pub places: Vec<u32>,
    /// What they are.
    pub values: Vec<f32>,
}

impl Kept {
    fn push(&mut self, place: usize, value: f32) {
        self.places.push(place as u32);
        self.values.push(value);
    }

    /// Keeps some of them.
    pub fn retain(&mut self, mut stays: impl FnMut(f32) -> bool) {
        let mut end = 0;
        for at in 0..self.values.len() {
            (self.places[end], self.values[end]) = (self.places[at], self.values[at]);
            end += usize::from(stays(self.values[at]));
        }
        self.places.truncate(end);
        self.values.truncate(end);
    }

    fn pairs(&self) -> impl Iterator<Item = (u32, f32)> {
        self.places.iter().copied().zip(self.values.iter().copied())
    }
}

impl FromIterator<(u32, f32)> for Kept {
    fn from_iter<I: IntoIterator<Item = (u32, f32)>>(pairs: I) -> Self {
        let (places, values) = pairs.into_iter().unzip();
        Self { places, values }
    }
}

/// The elements that are at least `least`.
pub fn at_least(row: &[f32], least: f32) -> Kept {
    let mut out = Kept::default();
    let to = &mut out;
    dispatch!(isa(), gather::<_>(row: &[f32], least: f32, to: &mut Kept));
    out
}

#[inline(always)]
unsafe fn gather<V: Simd>(row: &[f32], least: f32, out: &mut Kept) {
    let whole = row.len() - row.len() % V::LANES;
    let limit = unsafe { V::splat(least) };
    for at in (0..whole).step_by(V::LANES) {
        let mut lanes = unsafe { V::load(row.as_ptr().add(at)).not_below(limit) };
        while lanes != 0 {
            let place = at + lanes.trailing_zeros() as usize;
            out.push(place, row[place]);
            lanes &= lanes - 1;
        }
    }
    (whole..row.len()).filter(|&at| row[at] >= least).for_each(|at| out.push(at, row[at]));
}

/// The `k` largest elements with their places, largest first and equal ones by place; all, if there are fewer. None is NaN.
pub fn largest(row: &[f32], k: usize) -> Vec<(u32, f32)> {
    if k == 0 {
        return Vec::new();
    }
    // So many blocks have an element of at least this one.
    let mut tops = maxima(row);
    let least = match k <= tops.len() {
        true => *tops.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1,
        false => f32::NEG_INFINITY,
    };
    let mut out: Vec<_> = at_least(row, least).pairs().collect();
    if k < out.len() {
        out.select_nth_unstable_by(k - 1, by_size);
        out.truncate(k);
    }
    out.sort_unstable_by(by_size);
    out
}

/// The fewest of the largest elements whose sum reaches a share of all: of equal ones the first. All, if they do not reach
/// it. None is below 0 or over 1; sums are good to 1e-6 of their size.
pub fn fewest(row: &[f32], share: f64) -> Kept {
    // The goal lies between the sums of the elements that are at least one of eight limits, and the next.
    let passed = |sums: [f64; 8], goal: f64| sums.iter().rposition(|sum| *sum >= goal).unwrap_or(0);
    let limits = [0.0, 4e-6, 6e-5, 5e-4, 2e-3, 8e-3, 0.06, 0.5];
    let sums = sums_from(row, limits);
    let goal = share * sums[0];
    let first = passed(sums, goal);
    let mut kept = at_least(row, limits[first]);
    // Down to a single number: those of one sign are ordered as their bits.
    let mut low = limits[first].to_bits();
    let mut high = limits.get(first + 1).map_or(1f32.to_bits() + 1, |next| next.to_bits());
    // The sum of those that are at least `high`.
    let mut above = sums.get(first + 1).copied().unwrap_or(0.0);
    while high - low > 1 {
        let between: [u32; 8] = std::array::from_fn(|i| low + (u64::from(high - low) * i as u64 / 8) as u32);
        let sums = sums_from(&kept.values, between.map(f32::from_bits));
        let at = passed(sums, goal);
        low = between[at];
        if let (Some(next), Some(sum)) = (between.get(at + 1), sums.get(at + 1)) {
            (high, above) = (*next, *sum);
        }
    }
    // Of those that are equal to it, how many?
    let least = f32::from_bits(low);
    let mut equal = ((goal - above) / f64::from(least)).ceil();
    kept.retain(|value| {
        equal -= f64::from(u8::from(value == least));
        (value > least) | (value == least) & (equal >= 0.0)
    });
    kept
}

/// The sums of the elements that are at least as large as each of some limits, in f64 over parts in f32.
fn sums_from(row: &[f32], limits: [f32; 8]) -> [f64; 8] {
    let mut out = [0.0; 8];
    let to = &mut out;
    dispatch!(isa(), add_from::<_>(row: &[f32], limits: [f32; 8], to: &mut [f64; 8]));
    out
}

#[inline(always)]
unsafe fn add_from<V: Simd>(row: &[f32], limits: [f32; 8], out: &mut [f64; 8]) {
    // So many that the rounding of a part stays small.
    for part in row.chunks(1024) {
        let mut vectors = part.chunks_exact(V::LANES);
        unsafe {
            let mut of_lanes = [V::splat(0.0); 8];
            for x in vectors.by_ref() {
                let x = V::load(x.as_ptr());
                for i in 0..8 {
                    of_lanes[i] = of_lanes[i].add_from(x, V::splat(limits[i]));
                }
            }
            for i in 0..8 {
                let rest: f32 = vectors.remainder().iter().filter(|x| **x >= limits[i]).sum();
                out[i] += f64::from(of_lanes[i].sum() + rest);
            }
        }
    }
}

/// Largest first, then by place.
fn by_size(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;

    thread_local! {
        static ISA: Cell<Option<Isa>> = const { Cell::new(None) };
    }

    /// The one that a test tries.
    pub fn isa() -> Isa {
        ISA.get().unwrap_or_else(Isa::best)
    }

    fn row() -> impl Strategy<Value = Vec<f32>> {
        // Few values, so that many are equal. Sums are taken over parts of 1,024.
        let lengths = prop_oneof![6 => 1usize..700, 1 => 2000usize..5000];
        lengths.prop_flat_map(|len| prop::collection::vec((-40i32..40).prop_map(|x| x as f32 / 4.0), len))
    }

    fn elements(row: &[f32], k: usize, least: f32) {
        let mut order: Vec<(u32, f32)> = (0u32..).zip(row.iter().copied()).collect();
        order.sort_by(by_size);
        let (place, max) = peak(row).unwrap();
        assert_eq!((place as u32, max), order[0]);
        assert_eq!(largest(row, k), &order[..k.min(row.len())]);
        let kept: Vec<(u32, f32)> = (0u32..).zip(row.iter().copied()).filter(|(_, x)| *x >= least).collect();
        assert_eq!(at_least(row, least).pairs().collect::<Vec<_>>(), kept);
        for ((block, sum), max) in row.chunks(BLOCK).zip(sums(row)).zip(maxima(row)) {
            assert!((block.iter().sum::<f32>() - sum).abs() < 1e-3);
            assert_eq!(block.iter().copied().fold(f32::MIN, f32::max), max);
        }
        let weights = weights(row, max, 0.7);
        assert_eq!(mass(row, max, 0.7), sums(&weights));
        for (x, weight) in row.iter().zip(weights) {
            let expected = (f64::from(x - max) / 0.7).exp();
            assert!((f64::from(weight) / expected - 1.0).abs() < 1e-5, "{weight} for {expected}");
        }
    }

    fn reach(weights: &[f32], share: f64) {
        let all: f64 = weights.iter().map(|x| f64::from(*x)).sum();
        let goal = share * all;
        let mut kept: Vec<_> = fewest(weights, share).pairs().collect();
        assert!(kept.is_sorted_by_key(|(place, _)| *place));
        let mut order: Vec<(u32, f32)> = (0u32..).zip(weights.iter().copied()).collect();
        order.sort_by(by_size);
        kept.sort_by(by_size);
        assert!(order.starts_with(&kept));
        let sum: f64 = kept.iter().map(|(_, x)| f64::from(*x)).sum();
        assert!(sum >= goal - 1e-6 * all || sum >= all * (1.0 - 1e-6), "{sum} of {goal}");
        let smallest = f64::from(kept.last().map_or(0.0, |(_, x)| *x));
        assert!(sum - smallest <= goal + 1e-6 * all, "{sum} without {smallest} reaches {goal}");
    }

    proptest! {
        #[test]
        fn everything_is_as_element_by_element(row in row(), k in 0usize..90, least in -11f32..11.0) {
            for isa in Isa::available() {
                ISA.set(Some(isa));
                elements(&row, k, least);
            }
        }

        #[test]
        fn the_fewest_that_reach_a_sum(row in row(), temperature in 0.05f32..4.0, share in 0f64..1.1) {
            for isa in Isa::available() {
                ISA.set(Some(isa));
                reach(&weights(&row, peak(&row).unwrap().1, temperature), share);
            }
        }

        #[test]
        fn what_is_not_finite_is_seen_wherever_it_is(mut row in row(), at: prop::sample::Index, nan: bool) {
            *at.get_mut(&mut row) = if nan { f32::NAN } else { f32::INFINITY };
            prop_assert_eq!(peak(&row), None);
        }
    }

    #[test]
    fn rows_as_long_as_a_vocabulary() {
        let long = |of: fn(usize) -> f32| (0..49_157).map(|i| of(i * 7919 % 49_157)).collect::<Vec<f32>>();
        let rows = [
            long(|i| -1.2 * (1.0 + i as f32).ln()),
            long(|i| i as f32 * 2e-5),
            long(|i| if i == 7 { 9.0 } else { 0.0 }),
        ];
        for (isa, row) in Isa::available().into_iter().flat_map(|isa| rows.iter().map(move |row| (isa, row))) {
            ISA.set(Some(isa));
            elements(row, 50, -5.0);
            for share in [0.01, 0.5, 0.9, 0.999] {
                reach(&weights(row, peak(row).unwrap().1, 1.0), share);
            }
        }
    }

    #[test]
    fn minus_infinity_is_nothing() {
        let nothing = [f32::NEG_INFINITY; 70];
        assert_eq!(peak(&nothing), None);
        assert_eq!(peak(&[]), None);
        assert_eq!(peak(&[f32::NEG_INFINITY, -3.0]), Some((1, -3.0)));
        assert_eq!(largest(&nothing, 2), [(0, f32::NEG_INFINITY), (1, f32::NEG_INFINITY)]);
        assert_eq!(weights(&nothing, 1.0, 1.0), [0.0; 70]);
    }
}
