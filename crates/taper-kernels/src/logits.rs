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
    for at in (0..whole).step_by(V::LANES) {
        unsafe { exp_from::<V>(V::load(row.as_ptr().add(at)), max, scale).store(out.as_mut_ptr().add(at)) };
    }
    if whole < row.len() {
        // As the others, so that where an element stands does not matter.
        let mut rest = [max; BLOCK];
        rest[..row.len() - whole].copy_from_slice(&row[whole..]);
        unsafe { exp_from::<V>(V::load(rest.as_ptr()), max, scale).store(rest.as_mut_ptr()) };
        out[whole..row.len()].copy_from_slice(&rest[..row.len() - whole]);
    }
}

#[inline(always)]
unsafe fn exp_from<V: Simd>(x: V, max: f32, scale: f32) -> V {
    unsafe { exp(x.sub(V::splat(max)).mul(V::splat(scale))) }
}

#[inline(always)]
unsafe fn exp_blocks<V: Simd>(row: &[f32], max: f32, scale: f32, out: &mut [f32]) {
    let mut fours = row.chunks_exact(4 * BLOCK);
    for (four, out) in fours.by_ref().zip(out.chunks_exact_mut(4)) {
        unsafe {
            let mut of_blocks = [V::splat(0.0); 4];
            for (i, sum) in of_blocks.iter_mut().enumerate() {
                for at in (i * BLOCK..(i + 1) * BLOCK).step_by(V::LANES) {
                    *sum = sum.add(exp_from::<V>(V::load(four.as_ptr().add(at)), max, scale));
                }
            }
            out.copy_from_slice(&V::sum4(of_blocks));
        }
    }
    let (rest, whole) = (fours.remainder(), row.len() / (4 * BLOCK) * 4);
    for (block, out) in rest.chunks(BLOCK).zip(&mut out[whole..]) {
        let mut weights = [0.0; BLOCK];
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

/// The sum of [sums](sums), or of [masses](mass), in f64.
pub fn total(sums: &[f32]) -> f64 {
    sums.iter().map(|sum| f64::from(*sum)).sum()
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

    /// Keeps the fewest of the largest whose sum reaches `goal`: of equal ones the first. All, if they do not reach it. None
    /// is below 0 or over 1; sums are good to 1e-6 of their size.
    pub fn heaviest(&mut self, goal: f64) {
        let (least, above) = threshold(self.values.clone(), goal);
        let mut all = at_least(&self.values, least);
        // Of those that are equal to it, how many?
        let equal = within(&all.values, least, least.next_up()).places;
        let wanted = ((goal - above) / f64::from(least)).ceil() as usize;
        if let Some(end) = equal.get(wanted).map(|at| *at as usize) {
            let larger = at_least(&all.values[end..], least.next_up());
            let rest = all.places.split_off(end);
            all.places.extend(larger.places.iter().map(|at| rest[*at as usize]));
            all.values.truncate(end);
            all.values.extend(larger.values);
        }
        all.places.iter_mut().for_each(|place| *place = self.places[*place as usize]);
        *self = all;
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

/// The elements that are at least `least`, but for plus infinity; of a row of at most 2²⁴.
pub fn at_least(row: &[f32], least: f32) -> Kept {
    within(row, least, f32::INFINITY)
}

/// The elements that are at least `least` and below `end`.
fn within(row: &[f32], least: f32, end: f32) -> Kept {
    // As much as most often is enough.
    let room = row.len().min(4096) + 8 * BLOCK;
    let mut out = Kept { places: Vec::with_capacity(room), values: Vec::with_capacity(room) };
    let to = &mut out;
    dispatch!(isa(), gather::<_>(row: &[f32], least: f32, end: f32, to: &mut Kept));
    out
}

#[inline(always)]
unsafe fn gather<V: Simd>(row: &[f32], least: f32, end: f32, out: &mut Kept) {
    assert!(row.len() <= 1 << 24, "{} elements have no places in f32", row.len());
    let first: [f32; BLOCK] = std::array::from_fn(|i| i as f32);
    let mut kept = 0;
    // SAFETY: there is room for a block more than what is kept.
    unsafe {
        let (from, to, step) = (V::splat(least), V::splat(end), V::splat(V::LANES as f32));
        // Places are numbers of f32 here, which has all below 2²⁴.
        let mut places = V::load(first.as_ptr());
        for block in row.chunks(BLOCK * 8) {
            out.values.reserve(BLOCK * 8);
            out.places.reserve(BLOCK * 8);
            let mut vectors = block.chunks_exact(V::LANES);
            for x in vectors.by_ref() {
                let x = V::load(x.as_ptr());
                let lanes = x.not_below(from) & !x.not_below(to);
                x.compress(lanes, out.values.as_mut_ptr().add(kept));
                places.compress(lanes, out.places.as_mut_ptr().cast::<f32>().add(kept));
                kept += lanes.count_ones() as usize;
                places = places.add(step);
            }
            out.values.set_len(kept);
            out.places.set_len(kept);
        }
    }
    for place in &mut out.places {
        // SAFETY: it is one of the numbers above. Where it might be any, no vectors would be used.
        *place = unsafe { f32::from_bits(*place).to_int_unchecked::<i32>() } as u32;
    }
    let whole = row.len() - row.len() % V::LANES;
    let rest = (whole..).zip(&row[whole..]).filter(|(_, x)| (least..end).contains(*x));
    rest.for_each(|(place, x)| out.push(place, *x));
}

/// The `k`-th largest element of a row of at least `k`, which are finite and not below 0.
pub(crate) fn kth(row: &[f32], k: usize) -> f32 {
    // Elements of one sign are ordered as their bits.
    let (smallest, largest) = extent(row);
    let (mut low, mut high) = (smallest.to_bits(), largest.to_bits());
    while low < high {
        let middle = high - (high - low) / 2;
        if count(row, f32::from_bits(middle)) >= k { low = middle } else { high = middle - 1 }
    }
    f32::from_bits(low)
}

/// How many elements are not below `least`: NaN is not.
pub(crate) fn count(row: &[f32], least: f32) -> usize {
    let mut out = 0;
    let to = &mut out;
    dispatch!(isa(), count_from::<_>(row: &[f32], least: f32, to: &mut usize));
    out
}

#[inline(always)]
unsafe fn count_from<V: Simd>(row: &[f32], least: f32, out: &mut usize) {
    let mut vectors = row.chunks_exact(V::LANES);
    for x in vectors.by_ref() {
        // SAFETY: a chunk is a vector.
        *out += unsafe { V::load(x.as_ptr()).not_below(V::splat(least)) }.count_ones() as usize;
    }
    *out += vectors.remainder().iter().filter(|x| x.partial_cmp(&&least) != Some(Ordering::Less)).count();
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

/// The [`weights`] of a row's fewest largest elements that hold a share of all, as [`Kept::heaviest`] has it; the row is one
/// that has a [`peak`].
pub fn fewest(row: &[f32], max: f32, temperature: f32, share: f64) -> Kept {
    let all = total(&mass(row, max, temperature));
    let goal = share * all;
    // Where to begin is seen from some of the blocks: those above may hold less than nearly all that is to be dropped.
    let every = (row.len() / 2048).max(1);
    let some: Vec<&[f32]> = row.chunks(BLOCK).step_by(every).collect();
    let some = weights(&some.concat(), max, temperature);
    let dropped = 0.9 * (all - goal) / every as f64;
    let (mut from, _) = threshold(some.clone(), total(&sums(&some)) - dropped);
    loop {
        let mut kept = at_least(row, max + temperature * from.ln());
        kept.values = weights(&kept.values, max, temperature);
        if total(&sums(&kept.values)) >= goal || from == 0.0 {
            kept.heaviest(goal);
            return kept;
        }
        from = if from > 1e-4 { from / 16.0 } else { 0.0 };
    }
}

/// The largest of the elements that, with all larger ones, sum to `goal`, or the smallest of all; and the sum of those larger.
/// None is below 0.
fn threshold(mut values: Vec<f32>, goal: f64) -> (f32, f64) {
    // Elements of one sign are ordered as their bits. Those larger than all that are left have this sum.
    let mut above = 0.0;
    loop {
        let (smallest, largest) = extent(&values);
        if smallest >= largest {
            return (largest, above);
        }
        let (low, high) = (smallest.to_bits(), largest.to_bits());
        let limits: [u32; 8] = std::array::from_fn(|i| low + (u64::from(high - low) * i as u64).div_ceil(8) as u32);
        let sums = sums_from(&values, limits.map(f32::from_bits)).map(|sum| above + sum);
        let at = sums.iter().rposition(|sum| *sum >= goal).unwrap_or(0);
        above = sums.get(at + 1).copied().unwrap_or(above);
        values = within(
            &values,
            f32::from_bits(limits[at]),
            limits.get(at + 1).map_or(f32::INFINITY, |x| f32::from_bits(*x)),
        )
        .values;
    }
}

/// The smallest and the largest element, none of which is below 0; zeros, if there is none.
fn extent(row: &[f32]) -> (f32, f32) {
    let mut out = (f32::INFINITY, 0.0);
    let to = &mut out;
    dispatch!(isa(), ends::<_>(row: &[f32], to: &mut (f32, f32)));
    (out.0.min(out.1), out.1)
}

#[inline(always)]
unsafe fn ends<V: Simd>(row: &[f32], out: &mut (f32, f32)) {
    let mut vectors = row.chunks_exact(V::LANES);
    unsafe {
        let (zero, none) = (V::splat(0.0), V::splat(f32::NEG_INFINITY));
        let (mut largest, mut lowest) = (zero, none);
        for x in vectors.by_ref() {
            let x = V::load(x.as_ptr());
            (largest, lowest) = (largest.max(x), lowest.max(zero.sub(x)));
        }
        let rest = vectors.remainder().iter();
        *out = rest.fold((0.0 - lowest.max_lane(), largest.max_lane()), |(low, high), x| (low.min(*x), high.max(*x)));
    }
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
        let sizes: Vec<f32> = row.iter().map(|x| x.abs()).collect();
        let mut sorted = sizes.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let k = k.clamp(1, row.len());
        assert_eq!(kth(&sizes, k), sorted[k - 1]);
        assert_eq!(count(&sizes, sorted[k - 1]), sizes.iter().filter(|x| **x >= sorted[k - 1]).count());
        let weights = weights(row, max, 0.7);
        for (mass, sum) in mass(row, max, 0.7).into_iter().zip(sums(&weights)) {
            assert!((mass - sum).abs() <= 1e-6 * sum, "{mass} for {sum}");
        }
        for (x, weight) in row.iter().zip(weights) {
            let expected = (f64::from(x - max) / 0.7).exp();
            assert!((f64::from(weight) / expected - 1.0).abs() < 1e-5, "{weight} for {expected}");
        }
    }

    fn reach(row: &[f32], temperature: f32, share: f64) {
        let max = peak(row).unwrap().1;
        let every: Kept = (0u32..).zip(weights(row, max, temperature)).collect();
        let all: f64 = every.values.iter().map(|x| f64::from(*x)).sum();
        let goal = share * all;
        let mut order: Vec<_> = every.pairs().collect();
        order.sort_by(by_size);
        let mut heaviest = every;
        heaviest.heaviest(goal);
        for kept in [heaviest, fewest(row, max, temperature, share)] {
            let mut kept: Vec<_> = kept.pairs().collect();
            assert!(kept.is_sorted_by_key(|(place, _)| *place));
            kept.sort_by(by_size);
            assert!(order.starts_with(&kept));
            let sum: f64 = kept.iter().map(|(_, x)| f64::from(*x)).sum();
            assert!(sum >= goal - 1e-6 * all || sum >= all * (1.0 - 1e-6), "{sum} of {goal}");
            let smallest = f64::from(kept.last().map_or(0.0, |(_, x)| *x));
            assert!(sum - smallest <= goal + 1e-6 * all, "{sum} without {smallest} reaches {goal}");
        }
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
                reach(&row, temperature, share);
            }
        }

        #[test]
        fn what_is_not_finite_is_seen_wherever_it_is(mut row in row(), at: prop::sample::Index, nan: bool) {
            *at.get_mut(&mut row) = if nan { f32::NAN } else { f32::INFINITY };
            prop_assert_eq!(peak(&row), None);
            prop_assert_eq!(count(&row, f32::INFINITY), 1);
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
                reach(row, 1.0, share);
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
