//! One panel with AVX2.

use super::{BLOCK, Bits, ROWS, Rounded, Tile};
use core::arch::x86_64::*;

/// # Safety
/// AVX2 exists.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn round(x: &[f32], to: Rounded) {
    super::round(x, to);
}

/// # Safety
/// AVX2, FMA and F16C exist.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn tile(bits: Bits, tile: &Tile, out: &mut [[f32; ROWS]]) {
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
unsafe fn four<const T: usize>(tile: &Tile, out: &mut [[f32; ROWS]]) {
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
            for (t, acc) in acc.iter_mut().enumerate() {
                let at = (tile.token + t) * tile.x.blocks + block;
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
            _mm256_storeu_ps(out.as_mut_ptr(), acc);
        }
    }
}

#[inline(always)]
unsafe fn eight<const T: usize>(tile: &Tile, out: &mut [[f32; ROWS]]) {
    unsafe {
        let mut acc = [_mm256_setzero_ps(); T];
        let ones = _mm256_set1_epi16(1);
        for block in 0..tile.blocks {
            let w = tile.weights.as_ptr().add(block * Bits::Eight.block());
            let d = halves(w);
            let w = w.add(Bits::Eight.scales());
            let mut dots = [_mm256_setzero_si256(); T];
            for j in 0..8 {
                let q = _mm256_loadu_si256(w.add(j * BLOCK).cast());
                let size = _mm256_sign_epi8(q, q);
                for (t, dots) in dots.iter_mut().enumerate() {
                    let at = (tile.token + t) * tile.x.blocks + block;
                    let x = four_of(tile.x.q.as_ptr().add(at * BLOCK + 4 * j));
                    // |w| x sign(w): two products of at most 128 · 127, no overflow.
                    let pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, q));
                    *dots = _mm256_add_epi32(*dots, _mm256_madd_epi16(pairs, ones));
                }
            }
            for (t, (acc, dots)) in acc.iter_mut().zip(dots).enumerate() {
                let at = (tile.token + t) * tile.x.blocks + block;
                let scale = _mm256_mul_ps(d, _mm256_set1_ps(*tile.x.scale.get_unchecked(at)));
                *acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, *acc);
            }
        }
        for (out, acc) in out.iter_mut().zip(acc) {
            _mm256_storeu_ps(out.as_mut_ptr(), acc);
        }
    }
}
