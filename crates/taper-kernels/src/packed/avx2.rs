//! One panel with AVX2.

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
        match (bits, out.len()) {
            (Bits::Four, 4) => four::<4>(tile, out),
            (Bits::Four, 3) => four::<3>(tile, out),
            (Bits::Four, 2) => four::<2>(tile, out),
            (Bits::Four, _) => four::<1>(tile, out),
            (Bits::Eight, 4) => eight::<4>(tile, out),
            (Bits::Eight, 3) => eight::<3>(tile, out),
            (Bits::Eight, 2) => eight::<2>(tile, out),
            (Bits::Eight, _) => eight::<1>(tile, out),
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

#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "adapters are not inlined here")]
unsafe fn four<const T: usize>(tile: &Tile, out: &mut [MaybeUninit<[f32; ROWS]>]) {
    unsafe {
        let mut acc = [_mm256_setzero_ps(); T];
        let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
        for block in 0..tile.blocks {
            let w = tile.weights.as_ptr().add(block * Bits::Four.block());
            let (d, m) = (halves(w), halves(w.add(2 * ROWS)));
            let w = w.add(Bits::Four.scales());
            let mut q = [_mm256_setzero_si256(); 8];
            for j in 0..4 {
                let pair = _mm256_loadu_si256(w.add(j * BLOCK).cast());
                q[j] = _mm256_and_si256(pair, low);
                q[j + 4] = _mm256_and_si256(_mm256_srli_epi16::<4>(pair), low);
            }
            let first = tile.x.at(tile.token, block);
            for (t, acc) in acc.iter_mut().enumerate() {
                let at = first + t;
                let x = tile.x.q.as_ptr().add(at * BLOCK);
                // Sixteen products of at most 15 · 127 in each 16-bit lane: 30,480, no overflow.
                let mut dots = _mm256_maddubs_epi16(q[0], four_of(x));
                // By number: adapters of iterators are not always built into a function of this instruction set.
                for j in 1..8 {
                    dots = _mm256_add_epi16(dots, _mm256_maddubs_epi16(q[j], four_of(x.add(4 * j))));
                }
                let dots = _mm256_cvtepi32_ps(_mm256_madd_epi16(dots, ones));
                let scale = _mm256_mul_ps(d, _mm256_set1_ps(*tile.x.scale.get_unchecked(at)));
                *acc = _mm256_fmadd_ps(dots, scale, *acc);
                *acc = _mm256_fmadd_ps(m, _mm256_set1_ps(*tile.x.sum.get_unchecked(at)), *acc);
            }
        }
        for (out, acc) in out.iter_mut().zip(acc) {
            _mm256_storeu_ps(out.as_mut_ptr().cast(), acc);
        }
    }
}

#[inline(always)]
unsafe fn eight<const T: usize>(tile: &Tile, out: &mut [MaybeUninit<[f32; ROWS]>]) {
    unsafe {
        let mut acc = [_mm256_setzero_ps(); T];
        let ones = _mm256_set1_epi16(1);
        for block in 0..tile.blocks {
            let w = tile.weights.as_ptr().add(block * Bits::Eight.block());
            let d = halves(w);
            let w = w.add(Bits::Eight.scales());
            let (first, mut dots) = (tile.x.at(tile.token, block), [_mm256_setzero_si256(); T]);
            for j in 0..8 {
                let q = _mm256_loadu_si256(w.add(j * BLOCK).cast());
                let size = _mm256_sign_epi8(q, q);
                for (t, dots) in dots.iter_mut().enumerate() {
                    let at = first + t;
                    let x = four_of(tile.x.q.as_ptr().add(at * BLOCK + 4 * j));
                    // |w| x sign(w): two products of at most 128 · 127, no overflow.
                    let pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, q));
                    *dots = _mm256_add_epi32(*dots, _mm256_madd_epi16(pairs, ones));
                }
            }
            for (t, (acc, dots)) in acc.iter_mut().zip(dots).enumerate() {
                let at = first + t;
                let scale = _mm256_mul_ps(d, _mm256_set1_ps(*tile.x.scale.get_unchecked(at)));
                *acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, *acc);
            }
        }
        for (out, acc) in out.iter_mut().zip(acc) {
            _mm256_storeu_ps(out.as_mut_ptr().cast(), acc);
        }
    }
}
