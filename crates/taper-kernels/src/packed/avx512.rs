//! Two panels at once by the products of bytes that AVX-512 has (VNNI): four products are added to a lane at a time.

use super::{BLOCK, Bits, ROWS, Tile};
use core::arch::x86_64::*;
use std::mem::MaybeUninit;

/// `out` is `[2, tokens]`; 1, 2, 4 or 8 tokens.
///
/// # Safety
/// The instructions exist, F16C and FMA as well; the weights are of two panels.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
pub unsafe fn tile(bits: Bits, tile: &Tile, out: &mut [MaybeUninit<[f32; ROWS]>]) {
    unsafe {
        match (bits, out.len() / 2) {
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

/// The same 32 bytes of two panels that lie `apart`.
#[inline(always)]
unsafe fn both(p: *const u8, apart: usize) -> __m512i {
    unsafe {
        let first = _mm512_castsi256_si512(_mm256_loadu_si256(p.cast()));
        _mm512_inserti64x4::<1>(first, _mm256_loadu_si256(p.add(apart).cast()))
    }
}

/// The same 8 halves of two panels that lie `apart`.
#[inline(always)]
unsafe fn halves(p: *const u8, apart: usize) -> __m512 {
    unsafe {
        let first = _mm256_castsi128_si256(_mm_loadu_si128(p.cast()));
        _mm512_cvtph_ps(_mm256_inserti128_si256::<1>(first, _mm_loadu_si128(p.add(apart).cast())))
    }
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
    for t in 0..T {
        unsafe {
            _mm256_storeu_ps(out[t].as_mut_ptr().cast(), _mm512_castps512_ps256(acc[t]));
            let high =
                _mm512_castpd_ps(_mm512_shuffle_f64x2::<0b1110>(_mm512_castps_pd(acc[t]), _mm512_castps_pd(acc[t])));
            _mm256_storeu_ps(out[T + t].as_mut_ptr().cast(), _mm512_castps512_ps256(high));
        }
    }
}

#[inline(always)]
unsafe fn four<const T: usize>(tile: &Tile, out: &mut [MaybeUninit<[f32; ROWS]>]) {
    unsafe {
        let (apart, low) = (tile.blocks * Bits::Four.block(), _mm512_set1_epi8(15));
        let mut acc = [_mm512_setzero_ps(); T];
        for block in 0..tile.blocks {
            let w = tile.weights.as_ptr().add(block * Bits::Four.block());
            let (d, m) = (halves(w, apart), halves(w.add(2 * ROWS), apart));
            let w = w.add(Bits::Four.scales());
            let mut q = [_mm512_setzero_si512(); 8];
            for j in 0..4 {
                let pair = both(w.add(j * BLOCK), apart);
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
        let (apart, sign) = (tile.blocks * Bits::Eight.block(), _mm512_set1_epi8(-128));
        let mut acc = [_mm512_setzero_ps(); T];
        for block in 0..tile.blocks {
            let w = tile.weights.as_ptr().add(block * Bits::Eight.block());
            let d = halves(w, apart);
            let w = w.add(Bits::Eight.scales());
            // The first factor has no sign: 128 are added to it, and taken off again by where the sums start.
            let mut q = [_mm512_setzero_si512(); 8];
            for j in 0..8 {
                q[j] = _mm512_xor_si512(both(w.add(j * BLOCK), apart), sign);
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
