//! One panel with AVX2, whose vectors have half of its rows.

use super::{BLOCK, Bits, ROWS, Tile};
use core::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Rounds a block: what a step is worth, and the sum of the steps.
///
/// # Safety
/// AVX2 exists.
#[target_feature(enable = "avx2")]
pub unsafe fn round(x: &[f32; BLOCK], q: &mut [i8; BLOCK]) -> (f32, i32) {
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
        let (step, inverse) = super::step(_mm_cvtss_f32(most), finite);
        let inverse = _mm256_set1_ps(inverse);
        let (a, b) = (_mm256_cvtps_epi32(_mm256_mul_ps(a, inverse)), _mm256_cvtps_epi32(_mm256_mul_ps(b, inverse)));
        let (c, d) = (_mm256_cvtps_epi32(_mm256_mul_ps(c, inverse)), _mm256_cvtps_epi32(_mm256_mul_ps(d, inverse)));
        // Packing goes by halves: of eight groups of four, two by two from each half of the four vectors.
        let pairs = (_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        let bytes = _mm256_packs_epi16(pairs.0, pairs.1);
        let bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256(q.as_mut_ptr().cast(), bytes);
        let total = _mm256_madd_epi16(_mm256_add_epi16(pairs.0, pairs.1), _mm256_set1_epi16(1));
        let total = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256::<1>(total));
        let total = _mm_add_epi32(total, _mm_shuffle_epi32::<0b01_00_11_10>(total));
        let total = _mm_add_epi32(total, _mm_shuffle_epi32::<0b00_00_00_01>(total));
        (step, _mm_cvtsi128_si32(total))
    }
}

/// # Safety
/// AVX2, FMA and F16C exist.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn tile(bits: Bits, tile: &Tile, out: &mut [MaybeUninit<[f32; ROWS]>]) {
    unsafe {
        for half in 0..HALVES {
            match (bits, out.len()) {
                (Bits::Four, 4) => four::<4, 1>(tile, half, out),
                (Bits::Four, 3) => four::<3, 1>(tile, half, out),
                (Bits::Four, 2) => four::<2, 1>(tile, half, out),
                // A token alone waits for memory: its weights are read once, in one stream.
                (Bits::Four, _) => return four::<1, HALVES>(tile, half, out),
                (Bits::Eight, 4) => eight::<4, 1>(tile, half, out),
                (Bits::Eight, 3) => eight::<3, 1>(tile, half, out),
                (Bits::Eight, 2) => eight::<2, 1>(tile, half, out),
                (Bits::Eight, _) => return eight::<1, HALVES>(tile, half, out),
            }
        }
    }
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

/// `H` halves from `first` on.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "adapters are not inlined here")]
unsafe fn four<const T: usize, const H: usize>(tile: &Tile, first: usize, out: &mut [MaybeUninit<[f32; ROWS]>]) {
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); H]; T];
        let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
        for block in 0..tile.blocks {
            let w = tile.weights.as_ptr().add(block * Bits::Four.block());
            let from = tile.x.at(tile.token, block);
            for h in 0..H {
                let row = (first + h) * LANES;
                let (d, m) = (halves(w.add(2 * row)), halves(w.add(2 * (ROWS + row))));
                let w = w.add(Bits::Four.scales() + 4 * row);
                let mut q = [_mm256_setzero_si256(); 8];
                for j in 0..4 {
                    let pair = _mm256_loadu_si256(w.add(4 * j * ROWS).cast());
                    q[j] = _mm256_and_si256(pair, low);
                    q[j + 4] = _mm256_and_si256(_mm256_srli_epi16::<4>(pair), low);
                }
                for t in 0..T {
                    let at = from + t;
                    let x = tile.x.q.as_ptr().add(at * BLOCK);
                    // Sixteen products of at most 15 · 127 in each 16-bit lane: 30,480, no overflow.
                    let mut dots = _mm256_maddubs_epi16(q[0], four_of(x));
                    // By number: adapters of iterators are not always built into a function of this instruction set.
                    for j in 1..8 {
                        dots = _mm256_add_epi16(dots, _mm256_maddubs_epi16(q[j], four_of(x.add(4 * j))));
                    }
                    let dots = _mm256_cvtepi32_ps(_mm256_madd_epi16(dots, ones));
                    let scale = _mm256_mul_ps(d, _mm256_set1_ps(*tile.x.scale.get_unchecked(at)));
                    acc[t][h] = _mm256_fmadd_ps(dots, scale, acc[t][h]);
                    acc[t][h] = _mm256_fmadd_ps(m, _mm256_set1_ps(*tile.x.sum.get_unchecked(at)), acc[t][h]);
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
            let w = tile.weights.as_ptr().add(block * Bits::Eight.block());
            let from = tile.x.at(tile.token, block);
            for h in 0..H {
                let row = (first + h) * LANES;
                let (d, mut dots) = (halves(w.add(2 * row)), [_mm256_setzero_si256(); T]);
                let w = w.add(Bits::Eight.scales() + 4 * row);
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
