//! Whole weights times codes of two bits, whose sums are exact: the same by every instruction set.
//!
//! Vectors go through loops, not through closures, which are not always compiled for the instruction set.

use crate::kv::BLOCK_TOKENS;
use crate::simd::Isa;

/// Queries whose sums are made side by side, so that a code is taken out of its word once for them all.
pub(super) const TOGETHER: usize = 4;

/// Sums of weights `[queries, 4 words]`, four signed bytes each, times the codes of words `[words, 64]`: of each token, for as many
/// queries as there are `dots`, [`TOGETHER`] at most.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "there is one way"))]
pub(super) fn dots(isa: Isa, words: &[u32], weights: &[u32], dots: &mut [[i32; BLOCK_TOKENS]]) {
    #[cfg(target_arch = "x86_64")]
    if isa != Isa::Portable {
        let bytes = isa.adds_byte_products();
        // SAFETY: the instructions exist; whoever has AVX-512 has AVX2.
        return unsafe {
            match (bytes, dots.len()) {
                (true, 1) => avx512::<1>(words, weights, dots),
                (true, 2) => avx512::<2>(words, weights, dots),
                (true, 3) => avx512::<3>(words, weights, dots),
                (true, _) => avx512::<TOGETHER>(words, weights, dots),
                (false, 1) => avx2::<1>(words, weights, dots),
                (false, 2) => avx2::<2>(words, weights, dots),
                (false, 3) => avx2::<3>(words, weights, dots),
                (false, _) => avx2::<TOGETHER>(words, weights, dots),
            }
        };
    }
    portable(words, weights, dots);
}

fn portable(words: &[u32], weights: &[u32], dots: &mut [[i32; BLOCK_TOKENS]]) {
    for (weights, dots) in weights.chunks_exact(4 * (words.len() / BLOCK_TOKENS)).zip(dots) {
        dots.fill(0);
        let fours = words.chunks_exact(BLOCK_TOKENS).flat_map(|line| (0..4).map(move |four| (line, 2 * four)));
        for ((line, shift), weights) in fours.zip(weights) {
            for (weight, shift) in
                weights.to_le_bytes().map(|w| i32::from(w as i8)).into_iter().zip((shift..).step_by(8))
            {
                dots.iter_mut().zip(line).for_each(|(dot, word)| *dot += weight * (word >> shift & 3) as i32);
            }
        }
    }
}

/// Of `N` queries the four weights for each word of a token.
#[cfg(target_arch = "x86_64")]
fn by_word<const N: usize>(weights: &[u32], each: usize) -> [&[[u32; 4]]; N] {
    std::array::from_fn(|g| &weights.as_chunks().0[g * each..][..each])
}

/// For `N` queries, two products a lane of 16 bits at a time.
///
/// # Safety
/// AVX2 exists.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2<const N: usize>(words: &[u32], weights: &[u32], dots: &mut [[i32; BLOCK_TOKENS]]) {
    use core::arch::x86_64::*;
    const LANES: usize = 8;
    /// Vectors of tokens at a time: with their sums for `TOGETHER` queries they stay in registers.
    const VECTORS: usize = 2;
    let (mask, ones) = (_mm256_set1_epi8(3), _mm256_set1_epi16(1));
    let weights: [&[[u32; 4]]; N] = by_word(weights, words.len() / BLOCK_TOKENS);
    for first in (0..BLOCK_TOKENS).step_by(VECTORS * LANES) {
        let mut acc = [[_mm256_setzero_si256(); VECTORS]; N];
        for (w, line) in words.chunks_exact(BLOCK_TOKENS).enumerate() {
            let mut codes = [mask; VECTORS];
            let mut words = codes;
            for (word, line) in words.iter_mut().zip(line[first..].chunks_exact(LANES)) {
                // SAFETY: a chunk is as long as a vector.
                *word = unsafe { _mm256_loadu_si256(line.as_ptr().cast()) };
            }
            for four in 0..4 {
                for (codes, word) in codes.iter_mut().zip(&mut words) {
                    *codes = _mm256_and_si256(*word, mask);
                    *word = _mm256_srli_epi32::<2>(*word);
                }
                for (acc, weights) in acc.iter_mut().zip(weights) {
                    let weights = _mm256_set1_epi32(weights[w][four] as i32);
                    for (acc, codes) in acc.iter_mut().zip(codes) {
                        *acc = _mm256_add_epi16(*acc, _mm256_maddubs_epi16(codes, weights));
                    }
                }
            }
        }
        for (acc, dots) in acc.iter().zip(dots.iter_mut()) {
            for (acc, to) in acc.iter().zip(dots[first..].chunks_exact_mut(LANES)) {
                // SAFETY: a chunk is as long as a vector.
                unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm256_madd_epi16(*acc, ones)) };
            }
        }
    }
}

/// For `N` queries, four products added to a lane at a time: a whole block's sums stay in registers.
///
/// # Safety
/// AVX-512 with its products of bytes exists.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn avx512<const N: usize>(words: &[u32], weights: &[u32], dots: &mut [[i32; BLOCK_TOKENS]]) {
    use core::arch::x86_64::*;
    const LANES: usize = 16;
    const VECTORS: usize = BLOCK_TOKENS / LANES;
    let mask = _mm512_set1_epi8(3);
    let weights: [&[[u32; 4]]; N] = by_word(weights, words.len() / BLOCK_TOKENS);
    let mut acc = [[_mm512_setzero_si512(); VECTORS]; N];
    for (w, line) in words.chunks_exact(BLOCK_TOKENS).enumerate() {
        let mut codes = [mask; VECTORS];
        let mut words = codes;
        for (word, line) in words.iter_mut().zip(line.chunks_exact(LANES)) {
            // SAFETY: a chunk is as long as a vector.
            *word = unsafe { _mm512_loadu_si512(line.as_ptr().cast()) };
        }
        for four in 0..4 {
            for (codes, word) in codes.iter_mut().zip(&mut words) {
                *codes = _mm512_and_si512(*word, mask);
                *word = _mm512_srli_epi32::<2>(*word);
            }
            for (acc, weights) in acc.iter_mut().zip(weights) {
                let weights = _mm512_set1_epi32(weights[w][four] as i32);
                for (acc, codes) in acc.iter_mut().zip(codes) {
                    *acc = _mm512_dpbusd_epi32(*acc, codes, weights);
                }
            }
        }
    }
    for (acc, dots) in acc.iter().zip(dots) {
        for (acc, to) in acc.iter().zip(dots.chunks_exact_mut(LANES)) {
            // SAFETY: a chunk is as long as a vector.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), *acc) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sums_are_the_same_by_every_instruction_set(
            queries in 1..=TOGETHER, each in 1usize..=16, seed in any::<u64>(),
        ) {
            let mut next = seed;
            let mut word = || {
                next = next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (next >> 32) as u32
            };
            let words: Vec<u32> = (0..each * BLOCK_TOKENS).map(|_| word()).collect();
            // As large as they may be: half of the products of a word's channels stay below 2^15.
            let most = (i16::MAX as usize / (6 * 4 * each)).min(127) as i32;
            let weight = |word: u32| word.to_le_bytes().map(|b| (i32::from(b as i8) * most / 128) as i8 as u8);
            let weights: Vec<u32> = (0..4 * each * queries).map(|_| u32::from_le_bytes(weight(word()))).collect();
            let mut exact = vec![[7; BLOCK_TOKENS]; queries];
            portable(&words, &weights, &mut exact);
            for isa in Isa::available() {
                let mut found = vec![[9; BLOCK_TOKENS]; queries];
                dots(isa, &words, &weights, &mut found);
                prop_assert_eq!(&found, &exact, "{:?}", isa);
            }
        }
    }
}
