//! Rows of logits in host memory: what choosing a token looks at, by vectors.

use crate::simd::{Isa, Simd, dispatch, exp_line};

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

/// exp((x − max) / temperature) of each element, with a relative error below 1e-6 where the exponent is above −87; 0 below.
pub fn weights(row: &[f32], max: f32, temperature: f32) -> Vec<f32> {
    // In this order nothing overflows, and the largest weighs 1.
    let mut out: Vec<f32> = row.iter().map(|x| (x - max) / temperature).collect();
    let line = &mut out[..];
    dispatch!(Isa::best(), exp_all::<_>(line: &mut [f32]));
    out
}

#[inline(always)]
unsafe fn exp_all<V: Simd>(line: &mut [f32]) {
    unsafe { exp_line::<V>(line, 0.0) };
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
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if k < out.len() {
        out.select_nth_unstable_by(k - 1, order);
        out.truncate(k);
    }
    out.sort_unstable_by(order);
    out
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
            order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
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
                prop_assert!((f64::from(weight) / expected - 1.0).abs() < 3e-6, "{weight} for {expected}");
            }
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
