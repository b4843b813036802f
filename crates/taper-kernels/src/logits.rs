//! Rows of logits in host memory: what choosing a token looks at, by vectors.

use crate::simd::{Isa, Simd, dispatch, exp};
use std::cmp::Ordering;

/// Elements that [`sums`] and [`maxima`] take together.
pub const BLOCK: usize = 64;

/// The first of the largest elements, and its place; none where there is NaN or plus infinity, or nothing finite.
pub fn peak(row: &[f32]) -> Option<(usize, f32)> {
    let (mut largest, mut sound) = (f32::NEG_INFINITY, true);
    let (largest_of, sound_of) = (&mut largest, &mut sound);
    dispatch!(Isa::best(), look::<_>(row: &[f32], largest_of: &mut f32, sound_of: &mut bool));
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
    let (to, scale) = (&mut out[..], temperature.recip().min(f32::MAX));
    dispatch!(Isa::best(), exp_all::<_>(row: &[f32], max: f32, scale: f32, to: &mut [f32]));
    out
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
    dispatch!(Isa::best(), fold_blocks::<_>(row: &[f32], largest: bool, to: &mut [f32]));
    out
}

#[inline(always)]
unsafe fn fold_blocks<V: Simd>(row: &[f32], largest: bool, out: &mut [f32]) {
    for (block, out) in row.chunks(BLOCK).zip(out) {
        if block.len() < BLOCK {
            let folded = block.iter().copied().reduce(|a, b| if largest { a.max(b) } else { a + b });
            *out = folded.unwrap_or_default();
            continue;
        }
        unsafe {
            let mut all = V::load(block.as_ptr());
            for at in (V::LANES..BLOCK).step_by(V::LANES) {
                let x = V::load(block.as_ptr().add(at));
                all = if largest { all.max(x) } else { all.add(x) };
            }
            *out = if largest { all.max_lane() } else { all.sum() };
        }
    }
}

/// The elements that are at least `least`, in order, each with its place.
pub fn at_least(row: &[f32], least: f32) -> Vec<(u32, f32)> {
    let mut out = Vec::new();
    let to = &mut out;
    dispatch!(Isa::best(), gather::<_>(row: &[f32], least: f32, to: &mut Vec<(u32, f32)>));
    out
}

#[inline(always)]
unsafe fn gather<V: Simd>(row: &[f32], least: f32, out: &mut Vec<(u32, f32)>) {
    let whole = row.len() - row.len() % V::LANES;
    let limit = unsafe { V::splat(least) };
    for at in (0..whole).step_by(V::LANES) {
        let mut lanes = unsafe { V::load(row.as_ptr().add(at)).not_below(limit) };
        while lanes != 0 {
            let place = at + lanes.trailing_zeros() as usize;
            out.push((place as u32, row[place]));
            lanes &= lanes - 1;
        }
    }
    out.extend((whole..row.len()).filter(|&at| row[at] >= least).map(|at| (at as u32, row[at])));
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
    let mut out = at_least(row, least);
    if k < out.len() {
        out.select_nth_unstable_by(k - 1, by_size);
        out.truncate(k);
    }
    out.sort_unstable_by(by_size);
    out
}

/// The fewest of the largest elements whose sum reaches `goal`, in order, each with its place: of equal ones the first. All,
/// if they do not reach it. None is negative, infinite or NaN; sums are good to 1e-6 of their size.
pub fn fewest(row: &[f32], goal: f64) -> Vec<(u32, f32)> {
    let sum_from = |least: f32| {
        let mut sum = 0.0;
        let to = &mut sum;
        dispatch!(Isa::best(), sum_at_least::<_>(row: &[f32], least: f32, to: &mut f64));
        sum
    };
    // Elements below this one together do not hold what may be missing: so much is above them.
    let all = sum_from(0.0);
    let spare = ((all - goal) / row.len() as f64).max(0.0) as f32;
    // Between which of 64 steps of a power of two does the sum pass the goal? Numbers of one sign are ordered as their bits.
    const STEP: u32 = 17;
    let step = |x: f32| x.to_bits() >> STEP;
    let number = |step: u32| f32::from_bits(step << STEP);
    let (mut low, mut high) = (step(spare), step(peak(row).map_or(0.0, |(_, max)| max)) + 1);
    while high - low > 1 {
        let middle = low.midpoint(high);
        if sum_from(number(middle)) >= goal { low = middle } else { high = middle }
    }
    let (least, most) = (number(low), number(high));
    let mut kept = at_least(row, least);
    let mut last: Vec<(u32, f32)> = kept.iter().copied().filter(|(_, x)| *x < most).collect();
    let mut sum = sum_from(most);
    last.sort_unstable_by(by_size);
    let reaches = |(_, x): &(u32, f32)| {
        sum += f64::from(*x);
        sum >= goal
    };
    if let Some(end) = last.iter().position(reaches) {
        kept.retain(|element| by_size(element, &last[end]).is_le());
    }
    kept
}

#[inline(always)]
unsafe fn sum_at_least<V: Simd>(row: &[f32], least: f32, sum: &mut f64) {
    // So many that the rounding of a part stays small.
    for part in row.chunks(1024) {
        let whole = part.len() - part.len() % V::LANES;
        let mut rest: f32 = part[whole..].iter().filter(|x| **x >= least).sum();
        unsafe {
            let (mut of_lanes, limit) = (V::splat(0.0), V::splat(least));
            for at in (0..whole).step_by(V::LANES) {
                let x = V::load(part.as_ptr().add(at));
                of_lanes = of_lanes.add(x.zero_below(x, limit));
            }
            rest += of_lanes.sum();
        }
        *sum += f64::from(rest);
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

    fn row() -> impl Strategy<Value = Vec<f32>> {
        // Few values, so that many are equal.
        prop::collection::vec((-40i32..40).prop_map(|x| x as f32 / 4.0), 1..700)
    }

    proptest! {
        #[test]
        fn everything_is_as_element_by_element(row in row(), k in 0usize..90, least in -11f32..11.0) {
            let mut order: Vec<(u32, f32)> = (0u32..).zip(row.iter().copied()).collect();
            order.sort_by(by_size);
            let (place, max) = peak(&row).unwrap();
            prop_assert_eq!((place as u32, max), order[0]);
            prop_assert_eq!(largest(&row, k), &order[..k.min(row.len())]);
            let kept: Vec<(u32, f32)> = (0u32..).zip(row.iter().copied()).filter(|(_, x)| *x >= least).collect();
            prop_assert_eq!(at_least(&row, least), kept);
            for ((block, sum), max) in row.chunks(BLOCK).zip(sums(&row)).zip(maxima(&row)) {
                prop_assert!((block.iter().sum::<f32>() - sum).abs() < 1e-3);
                prop_assert_eq!(block.iter().copied().fold(f32::MIN, f32::max), max);
            }
            for (x, weight) in row.iter().zip(weights(&row, max, 0.7)) {
                let expected = (f64::from(x - max) / 0.7).exp();
                prop_assert!((f64::from(weight) / expected - 1.0).abs() < 1e-5, "{weight} for {expected}");
            }
        }

        #[test]
        fn the_fewest_that_reach_a_sum(row in row(), temperature in 0.05f32..4.0, share in 0f64..1.1) {
            let weights = weights(&row, peak(&row).unwrap().1, temperature);
            let all: f64 = weights.iter().map(|x| f64::from(*x)).sum();
            let goal = share * all;
            let mut kept = fewest(&weights, goal);
            prop_assert!(kept.is_sorted_by_key(|(place, _)| *place));
            let mut order: Vec<(u32, f32)> = (0u32..).zip(weights.iter().copied()).collect();
            order.sort_by(by_size);
            kept.sort_by(by_size);
            prop_assert!(order.starts_with(&kept));
            let sum: f64 = kept.iter().map(|(_, x)| f64::from(*x)).sum();
            prop_assert!(sum >= goal - 1e-6 * all || sum >= all * (1.0 - 1e-6), "{sum} of {goal}");
            let smallest = f64::from(kept.last().map_or(0.0, |(_, x)| *x));
            prop_assert!(sum - smallest <= goal + 1e-6 * all, "{sum} without {smallest} reaches {goal}");
        }

        #[test]
        fn what_is_not_finite_is_seen_wherever_it_is(mut row in row(), at: prop::sample::Index, nan: bool) {
            *at.get_mut(&mut row) = if nan { f32::NAN } else { f32::INFINITY };
            prop_assert_eq!(peak(&row), None);
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
