//! One panel with AVX2, whose vectors have half of its rows.

use super::activations::step;
use super::form::Form;
use super::{BLOCK, ROWS, Tile};
use core::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Rounds a block: what a step is worth, and the sums of the steps of both halves.
///
/// # Safety
/// AVX2 exists.
#[target_feature(enable = "avx2")]
pub unsafe fn round(x: &[f32; BLOCK], q: &mut [i8; BLOCK]) -> (f32, [i32; 2]) {
    unsafe {
        // Written out: adapters of arrays and iterators are not always built into a function of this instruction set.
        let at = |i: usize| _mm256_loadu_ps(x.as_ptr().add(8 * i));
        let (a, b, c, d) = (at(0), at(1), at(2), at(3));
        let sign = _mm256_set1_ps(-0.0);
        let (sa, sb) = (_mm256_andnot_ps(sign, a), _mm256_andnot_ps(sign, b));
        let (sc, sd) = (_mm256_andnot_ps(sign, c), _mm256_andnot_ps(sign, d));
        let most = _mm256_max_ps(_mm256_max_ps(sa, sb), _mm256_max_ps(sc, sd));
        // What is not finite comes through a product with 0 as NaN, whatever it met in a maximum.
        let zero = _mm256_setzero_ps();
        let bad = _mm256_add_ps(
            _mm256_add_ps(_mm256_mul_ps(a, zero), _mm256_mul_ps(b, zero)),
            _mm256_add_ps(_mm256_mul_ps(c, zero), _mm256_mul_ps(d, zero)),
        );
        let finite = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(bad, bad)) == 0;
        let most = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps::<1>(most));
        let most = _mm_max_ps(most, _mm_movehl_ps(most, most));
        let most = _mm_max_ss(most, _mm_movehdup_ps(most));
        let (step, inverse) = step(_mm_cvtss_f32(most), finite);
        let inverse = _mm256_set1_ps(inverse);
        let (a, b) = (_mm256_cvtps_epi32(_mm256_mul_ps(a, inverse)), _mm256_cvtps_epi32(_mm256_mul_ps(b, inverse)));
        let (c, d) = (_mm256_cvtps_epi32(_mm256_mul_ps(c, inverse)), _mm256_cvtps_epi32(_mm256_mul_ps(d, inverse)));
        // Packing goes by halves: of eight groups of four, two by two from each half of the four vectors.
        let pairs = (_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        let bytes = _mm256_packs_epi16(pairs.0, pairs.1);
        let bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256(q.as_mut_ptr().cast(), bytes);
        let ones = _mm256_set1_epi16(1);
        let totals = _mm256_hadd_epi32(_mm256_madd_epi16(pairs.0, ones), _mm256_madd_epi16(pairs.1, ones));
        let totals = _mm_add_epi32(_mm256_castsi256_si128(totals), _mm256_extracti128_si256::<1>(totals));
        // Two of the first half's, two of the second's.
        let totals = _mm_hadd_epi32(totals, totals);
        (step, [_mm_cvtsi128_si32(totals), _mm_extract_epi32::<1>(totals)])
    }
}

/// # Safety
/// AVX2, FMA and F16C exist.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn tile(form: Form, tile: &Tile, out: &mut [MaybeUninit<[f32; ROWS]>]) {
    /// A kernel for as many tokens, both halves of the panel.
    macro_rules! for_tokens {
        ($kernel:ident $(, $n:literal)*) => {
            for half in 0..HALVES {
                match out.len() {
                    4 => $kernel::<4, 1 $(, $n)*>(tile, half, out),
                    3 => $kernel::<3, 1 $(, $n)*>(tile, half, out),
                    2 => $kernel::<2, 1 $(, $n)*>(tile, half, out),
                    // A token alone waits for memory: its weights are read once, in one stream.
                    _ => return $kernel::<1, HALVES $(, $n)*>(tile, half, out),
                }
            }
        };
    }
    unsafe { super::by_form!(form, for_tokens) }
}

#[inline(always)]
unsafe fn halves(p: *const u8) -> __m256 {
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
}

/// Four consecutive activations in every lane.
#[inline(always)]
unsafe fn four_of(x: *const i8) -> __m256i {
    unsafe { _mm256_set1_epi32(x.cast::<i32>().read_unaligned()) }
}

/// Rows of a vector, and how many vectors they are.
const LANES: usize = 8;
const HALVES: usize = ROWS / LANES;

/// What a row each has of a byte, of which it is said whether it has a sign.
#[inline(always)]
unsafe fn bytes(p: *const u8, signed: bool) -> __m256 {
    unsafe {
        let bytes = _mm_loadl_epi64(p.cast());
        _mm256_cvtepi32_ps(if signed { _mm256_cvtepi8_epi32(bytes) } else { _mm256_cvtepu8_epi32(bytes) })
    }
}

super::unpack_by!(
    __m256i,
    _mm256_loadu_si256,
    _mm256_set1_epi8,
    _mm256_setzero_si256,
    _mm256_and_si256,
    _mm256_or_si256,
    _mm256_srli_epi16,
    _mm256_sll_epi16,
    _mm256_srl_epi16
);

/// The products of weights, four of every row in each of the vectors `range`, with 32 activations.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "adapters are not inlined here")]
unsafe fn dots<const BITS: usize>(q: &[__m256i; 8], range: Range<usize>, x: *const i8) -> __m256i {
    // Products that are added in 16 bits: sixteen of at most 15 · 127, eight of 31 · 127 or four of 63 · 127, no overflow.
    let together = 8 >> (BITS - 4);
    unsafe {
        let mut dots = _mm256_setzero_si256();
        // By number: adapters of iterators are not always built into a function of this instruction set.
        for first in 0..range.len() / together {
            let first = range.start + first * together;
            let mut pairs = _mm256_maddubs_epi16(q[first], four_of(x.add(4 * first)));
            for j in first + 1..first + together {
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(q[j], four_of(x.add(4 * j))));
            }
            dots = _mm256_add_epi32(dots, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
        dots
    }
}

/// Of fewer than eight bits, in stretches of `BLOCKS`: `H` halves from `first` on.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "adapters are not inlined here")]
unsafe fn few<const T: usize, const H: usize, const BITS: usize, const BLOCKS: usize>(
    tile: &Tile,
    first: usize,
    out: &mut [MaybeUninit<[f32; ROWS]>],
) {
    let form = const { Form { bits: BITS, blocks: BLOCKS } };
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); H]; T];
        for stretch in 0..tile.blocks / BLOCKS {
            let w = tile.weights.as_ptr().add(stretch * form.size());
            for block in 0..BLOCKS {
                let from = tile.x.at(tile.token, stretch * BLOCKS + block);
                for h in 0..H {
                    let row = (first + h) * LANES;
                    let second = if form.by_halves() { row } else { ROWS + row };
                    let (mut a, mut b) = (halves(w.add(2 * row)), halves(w.add(2 * second)));
                    if BLOCKS > 1 {
                        let scales = w.add(form.scales_at(block) + row);
                        a = _mm256_mul_ps(a, bytes(scales, form.by_halves()));
                        b = _mm256_mul_ps(b, bytes(scales.add(ROWS), form.by_halves()));
                    }
                    let q = unpack::<BITS>(w.add(form.weights_at(block) + 4 * row));
                    for t in 0..T {
                        let at = from + t;
                        let x = tile.x.q.as_ptr().add(at * BLOCK);
                        let scale = _mm256_set1_ps(*tile.x.scale.get_unchecked(at));
                        if form.by_halves() {
                            for half in 0..2 {
                                // 32 are taken off each weight.
                                let total = tile.x.halves.get_unchecked(at)[half];
                                let dots = dots::<BITS>(&q, 4 * half..4 * half + 4, x);
                                let dots = _mm256_add_epi32(dots, _mm256_set1_epi32(-32 * total));
                                let scale = _mm256_mul_ps(if half == 0 { a } else { b }, scale);
                                acc[t][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, acc[t][h]);
                            }
                        } else {
                            let dots = _mm256_cvtepi32_ps(dots::<BITS>(&q, 0..8, x));
                            acc[t][h] = _mm256_fmadd_ps(dots, _mm256_mul_ps(a, scale), acc[t][h]);
                            let sum = _mm256_set1_ps(*tile.x.sum.get_unchecked(at));
                            acc[t][h] = _mm256_fmadd_ps(b, sum, acc[t][h]);
                        }
                    }
                }
            }
        }
        store(&acc, first, out);
    }
}

/// The same of 8 bits.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "adapters are not inlined here")]
unsafe fn eight<const T: usize, const H: usize>(tile: &Tile, first: usize, out: &mut [MaybeUninit<[f32; ROWS]>]) {
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); H]; T];
        let ones = _mm256_set1_epi16(1);
        for block in 0..tile.blocks {
            let w = tile.weights.as_ptr().add(block * Form::EIGHT.size());
            let from = tile.x.at(tile.token, block);
            for h in 0..H {
                let row = (first + h) * LANES;
                let (d, mut dots) = (halves(w.add(2 * row)), [_mm256_setzero_si256(); T]);
                let w = w.add(Form::EIGHT.weights_at(0) + 4 * row);
                for j in 0..8 {
                    let q = _mm256_loadu_si256(w.add(4 * j * ROWS).cast());
                    let size = _mm256_sign_epi8(q, q);
                    for t in 0..T {
                        let x = four_of(tile.x.q.as_ptr().add((from + t) * BLOCK + 4 * j));
                        // |w| x sign(w): two products of at most 128 · 127, no overflow.
                        let pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, q));
                        dots[t] = _mm256_add_epi32(dots[t], _mm256_madd_epi16(pairs, ones));
                    }
                }
                for t in 0..T {
                    let scale = _mm256_mul_ps(d, _mm256_set1_ps(*tile.x.scale.get_unchecked(from + t)));
                    acc[t][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[t]), scale, acc[t][h]);
                }
            }
        }
        store(&acc, first, out);
    }
}

#[inline(always)]
unsafe fn store<const T: usize, const H: usize>(
    acc: &[[__m256; H]; T],
    first: usize,
    out: &mut [MaybeUninit<[f32; ROWS]>],
) {
    for (out, acc) in out.iter_mut().zip(acc) {
        for (h, acc) in acc.iter().enumerate() {
            unsafe { _mm256_storeu_ps(out.as_mut_ptr().cast::<f32>().add((first + h) * LANES), *acc) };
        }
    }
}
