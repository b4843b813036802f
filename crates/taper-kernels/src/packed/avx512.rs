//! A panel by the products of bytes that AVX-512 has (VNNI): four products are added to a lane at a time.

use super::form::Form;
use super::{BLOCK, ROWS, Tile};
use core::arch::x86_64::*;
use std::mem::MaybeUninit;

/// 1, 2, 4 or 8 tokens.
///
/// # Safety
/// The instructions exist, F16C and FMA as well.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
pub unsafe fn tile(form: Form, tile: &Tile, out: &mut [MaybeUninit<[f32; ROWS]>]) {
    /// A kernel for as many tokens.
    macro_rules! for_tokens {
        ($kernel:ident $(, $n:literal)*) => {
            match out.len() {
                8 => $kernel::<8 $(, $n)*>(tile, out),
                4 => $kernel::<4 $(, $n)*>(tile, out),
                2 => $kernel::<2 $(, $n)*>(tile, out),
                _ => $kernel::<1 $(, $n)*>(tile, out),
            }
        };
    }
    unsafe { super::by_form!(form, for_tokens) }
}

/// What a row each is worth.
#[inline(always)]
unsafe fn halves(p: *const u8) -> __m512 {
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
}

/// What a row each has of a byte, of which it is said whether it has a sign.
#[inline(always)]
unsafe fn bytes(p: *const u8, signed: bool) -> __m512 {
    unsafe {
        let bytes = _mm_loadu_si128(p.cast());
        _mm512_cvtepi32_ps(if signed { _mm512_cvtepi8_epi32(bytes) } else { _mm512_cvtepu8_epi32(bytes) })
    }
}

/// Adds the products of weights, four of every row in each of the vectors `FROM..TO`, with the activations `x` of `T` tokens, 32 each.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "adapters are not inlined here")]
unsafe fn add<const T: usize, const FROM: usize, const TO: usize>(
    dots: &mut [__m512i; T],
    q: &[__m512i; 8],
    x: *const i8,
) {
    unsafe {
        for j in FROM..TO {
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

super::unpack_by!(
    __m512i,
    _mm512_loadu_si512,
    _mm512_set1_epi8,
    _mm512_setzero_si512,
    _mm512_and_si512,
    _mm512_or_si512,
    _mm512_srli_epi16,
    _mm512_sll_epi16,
    _mm512_srl_epi16
);

/// Of fewer than eight bits, in stretches of `BLOCKS`.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "adapters are not inlined here")]
unsafe fn few<const T: usize, const BITS: usize, const BLOCKS: usize>(
    tile: &Tile,
    out: &mut [MaybeUninit<[f32; ROWS]>],
) {
    let form = const { Form { bits: BITS, blocks: BLOCKS } };
    unsafe {
        let mut acc = [_mm512_setzero_ps(); T];
        for stretch in 0..tile.blocks / BLOCKS {
            let w = tile.weights.as_ptr().add(stretch * form.size());
            for block in 0..BLOCKS {
                let (mut a, mut b) = (halves(w), halves(w.add(if form.by_halves() { 0 } else { 2 * ROWS })));
                if BLOCKS > 1 {
                    let scales = w.add(form.scales_at(block));
                    a = _mm512_mul_ps(a, bytes(scales, form.by_halves()));
                    b = _mm512_mul_ps(b, bytes(scales.add(ROWS), form.by_halves()));
                }
                let q = unpack::<BITS>(w.add(form.weights_at(block)));
                let at = tile.x.at(tile.token, stretch * BLOCKS + block);
                let x = tile.x.q.as_ptr().add(at * BLOCK);
                let (scale, sum) = (tile.x.scale.as_ptr().add(at), tile.x.sum.as_ptr().add(at));
                if form.by_halves() {
                    for half in 0..2 {
                        let d = if half == 0 { a } else { b };
                        let mut dots = [_mm512_setzero_si512(); T];
                        for t in 0..T {
                            // 32 are taken off each weight.
                            let total = (*tile.x.halves.as_ptr().add(at + t))[half];
                            dots[t] = _mm512_set1_epi32(-32 * total);
                        }
                        if half == 0 {
                            add::<T, 0, 4>(&mut dots, &q, x);
                        } else {
                            add::<T, 4, 8>(&mut dots, &q, x);
                        }
                        for t in 0..T {
                            let scale = _mm512_mul_ps(d, _mm512_set1_ps(*scale.add(t)));
                            acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[t]), scale, acc[t]);
                        }
                    }
                } else {
                    let mut dots = [_mm512_setzero_si512(); T];
                    add::<T, 0, 8>(&mut dots, &q, x);
                    for t in 0..T {
                        let scale = _mm512_mul_ps(a, _mm512_set1_ps(*scale.add(t)));
                        acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[t]), scale, acc[t]);
                        acc[t] = _mm512_fmadd_ps(b, _mm512_set1_ps(*sum.add(t)), acc[t]);
                    }
                }
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
            let w = tile.weights.as_ptr().add(block * Form::EIGHT.size());
            let d = halves(w);
            let w = w.add(Form::EIGHT.weights_at(0));
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
            add::<T, 0, 8>(&mut dots, &q, tile.x.q.as_ptr().add(at * BLOCK));
            for t in 0..T {
                let scale = _mm512_mul_ps(d, _mm512_set1_ps(*scale.add(t)));
                acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[t]), scale, acc[t]);
            }
        }
        store(acc, out);
    }
}
