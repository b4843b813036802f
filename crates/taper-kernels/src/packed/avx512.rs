//! A panel by the products of bytes that AVX-512 has (VNNI): four products are added to a lane at a time.

use super::{BLOCK, Bits, ROWS, Tile};
use core::arch::x86_64::*;
use std::mem::MaybeUninit;

/// 1, 2, 4 or 8 tokens.
///
/// # Safety
/// The instructions exist, F16C and FMA as well.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
pub unsafe fn tile(bits: Bits, tile: &Tile, out: &mut [MaybeUninit<[f32; ROWS]>]) {
    unsafe {
        match (bits, out.len()) {
            (Bits::Four, 8) => four::<8>(tile, out),
            (Bits::Four, 4) => four::<4>(tile, out),
            (Bits::Four, 2) => four::<2>(tile, out),
            (Bits::Four, _) => four::<1>(tile, out),
            (Bits::Eight, 8) => eight::<8>(tile, out),
            (Bits::Eight, 4) => eight::<4>(tile, out),
            (Bits::Eight, 2) => eight::<2>(tile, out),
            (Bits::Eight, _) => eight::<1>(tile, out),
        }
    }
}

/// What a row each is worth.
#[inline(always)]
unsafe fn halves(p: *const u8) -> __m512 {
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
}

/// Adds the products of weights, `q[j]` four of every row, with the activations `x` of `T` tokens, 32 each.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "adapters are not inlined here")]
unsafe fn add<const T: usize>(dots: &mut [__m512i; T], q: &[__m512i; 8], x: *const i8) {
    unsafe {
        for j in 0..8 {
            for t in 0..T {
                let four = x.add(t * BLOCK + 4 * j).cast::<i32>().read_unaligned();
                dots[t] = _mm512_dpbusd_epi32(dots[t], q[j], _mm512_set1_epi32(four));
            }
        }
    }
}

#[inline(always)]
unsafe fn store<const T: usize>(acc: [__m512; T], out: &mut [MaybeUninit<[f32; ROWS]>]) {
    for (out, acc) in out.iter_mut().zip(acc) {
        unsafe { _mm512_storeu_ps(out.as_mut_ptr().cast(), acc) };
    }
}

#[inline(always)]
unsafe fn four<const T: usize>(tile: &Tile, out: &mut [MaybeUninit<[f32; ROWS]>]) {
    unsafe {
        let low = _mm512_set1_epi8(15);
        let mut acc = [_mm512_setzero_ps(); T];
        for block in 0..tile.blocks {
            let w = tile.weights.as_ptr().add(block * Bits::Four.block());
            let (d, m) = (halves(w), halves(w.add(2 * ROWS)));
            let w = w.add(Bits::Four.scales());
            let mut q = [_mm512_setzero_si512(); 8];
            for j in 0..4 {
                let pair = _mm512_loadu_si512(w.add(4 * j * ROWS).cast());
                q[j] = _mm512_and_si512(pair, low);
                q[j + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(pair), low);
            }
            let mut dots = [_mm512_setzero_si512(); T];
            let at = tile.x.at(tile.token, block);
            add(&mut dots, &q, tile.x.q.as_ptr().add(at * BLOCK));
            let (scale, sum) = (tile.x.scale.as_ptr().add(at), tile.x.sum.as_ptr().add(at));
            for t in 0..T {
                let scale = _mm512_mul_ps(d, _mm512_set1_ps(*scale.add(t)));
                acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[t]), scale, acc[t]);
                acc[t] = _mm512_fmadd_ps(m, _mm512_set1_ps(*sum.add(t)), acc[t]);
            }
        }
        store(acc, out);
    }
}

#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "adapters are not inlined here")]
unsafe fn eight<const T: usize>(tile: &Tile, out: &mut [MaybeUninit<[f32; ROWS]>]) {
    unsafe {
        let sign = _mm512_set1_epi8(-128);
        let mut acc = [_mm512_setzero_ps(); T];
        for block in 0..tile.blocks {
            let w = tile.weights.as_ptr().add(block * Bits::Eight.block());
            let d = halves(w);
            let w = w.add(Bits::Eight.scales());
            // The first factor has no sign: 128 are added to it, and taken off again by where the sums start.
            let mut q = [_mm512_setzero_si512(); 8];
            for j in 0..8 {
                q[j] = _mm512_xor_si512(_mm512_loadu_si512(w.add(4 * j * ROWS).cast()), sign);
            }
            let mut dots = [_mm512_setzero_si512(); T];
            let at = tile.x.at(tile.token, block);
            let (scale, total) = (tile.x.scale.as_ptr().add(at), tile.x.total.as_ptr().add(at));
            for t in 0..T {
                dots[t] = _mm512_slli_epi32::<7>(_mm512_set1_epi32(-*total.add(t)));
            }
            add(&mut dots, &q, tile.x.q.as_ptr().add(at * BLOCK));
            for t in 0..T {
                let scale = _mm512_mul_ps(d, _mm512_set1_ps(*scale.add(t)));
                acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[t]), scale, acc[t]);
            }
        }
        store(acc, out);
    }
}
