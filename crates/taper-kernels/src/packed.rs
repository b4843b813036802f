//! Products with 4- and 8-bit weights that stay as they are: rows interleaved by sixteen, activations rounded to 8 bits
//! in blocks of 32, integer dot products.
//!
//! The numbers are those of the GGUF types: a Q4 weight is `d q + m` (Q4_0 has `m = -8 d`), a Q8 weight `d q`. The
//! rounding of activations costs a relative error of about 0.5 % of a product's norm, as in llama.cpp.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use crate::memory::Large;
use crate::parallel::{self, SharedMut};
use crate::simd::Isa;
use candle_core::quantized::GgmlDType;
use half::f16;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Weights and activations of a block, along the input.
const BLOCK: usize = 32;
/// Rows of a panel.
const ROWS: usize = 16;

/// Bits of a packed weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bits {
    Four,
    Eight,
}

/// A packed weight matrix `[out, in]`.
#[derive(Debug, Clone)]
pub struct Packed {
    bits: Bits,
    outputs: usize,
    inputs: usize,
    /// Per panel of 16 rows and block: Q4 `d[16] m[16]` (f16) and 256 bytes of nibbles; Q8 `d[16]` and 512 bytes. What a thread
    /// reads for one token is one stream, which the processor fetches ahead: of two it does so half as fast.
    data: Large<u8>,
}

impl Bits {
    /// Bytes of the scales of one panel and block.
    const fn scales(self) -> usize {
        match self {
            Self::Four => 4 * ROWS,
            Self::Eight => 2 * ROWS,
        }
    }

    /// Bytes of one panel and block.
    const fn block(self) -> usize {
        match self {
            Self::Four => self.scales() + ROWS * BLOCK / 2,
            Self::Eight => self.scales() + ROWS * BLOCK,
        }
    }
}

impl Packed {
    /// Packs GGUF rows of type Q4_0, Q4_1 or Q8_0; `None` for another type or a length that does not fit.
    pub fn from_gguf(dtype: GgmlDType, data: &[u8], outputs: usize, inputs: usize) -> Option<Self> {
        // (bits, bytes of scales before the weights, whether there is an offset)
        let (bits, head, offset) = match dtype {
            GgmlDType::Q4_0 => (Bits::Four, 2, false),
            GgmlDType::Q4_1 => (Bits::Four, 4, true),
            GgmlDType::Q8_0 => (Bits::Eight, 2, false),
            _ => return None,
        };
        let weights = if bits == Bits::Four { BLOCK / 2 } else { BLOCK };
        let (blocks, size) = (inputs / BLOCK, head + weights);
        if !inputs.is_multiple_of(BLOCK) || data.len() != outputs * blocks * size {
            return None;
        }
        let panels = outputs.div_ceil(ROWS);
        let data = Large::new(panels * blocks * bits.block(), |packed| {
            for (row, source) in data.chunks_exact(blocks * size).enumerate() {
                for (block, source) in source.chunks_exact(size).enumerate() {
                    let to = &mut packed[((row / ROWS) * blocks + block) * bits.block()..][..bits.block()];
                    pack_block(bits, row % ROWS, source, head, offset, to);
                }
            }
        });
        Some(Self { bits, outputs, inputs, data })
    }

    /// (outputs, inputs).
    pub fn dims(&self) -> (usize, usize) {
        (self.outputs, self.inputs)
    }

    /// `x` `[T, inputs]` → `[T, outputs]`, on top of `onto` `[T, outputs]` if there is any.
    pub fn multiply(&self, x: &[f32], onto: Option<&[f32]>) -> Vec<f32> {
        self.multiply_with(Isa::best(), x, onto)
    }

    fn multiply_with(&self, isa: Isa, x: &[f32], onto: Option<&[f32]>) -> Vec<f32> {
        let tokens = x.len() / self.inputs;
        let fits = onto.is_none_or(|onto| onto.len() == tokens * self.outputs);
        assert!(x.len() == tokens * self.inputs && fits, "activations of another width");
        let activations = Activations::round(isa, x, self.inputs);
        let (panels, by) = (self.outputs.div_ceil(ROWS), (isa, isa.adds_byte_products()));
        let write = |[out]: [_; 1]| {
            // Neighbouring units share a stretch of weights, not of tokens: the weights are the larger.
            parallel::for_each_block((panels, 1, UNIT_PANELS), (tokens, UNIT_TOKENS), |panels, tokens| {
                for panel in panels {
                    // SAFETY: each panel and token belongs to one unit.
                    unsafe { self.strip(by, &activations, panel, tokens.clone(), (onto, out)) };
                }
            });
        };
        // SAFETY: which writes their products.
        let [out] = unsafe { parallel::written([tokens * self.outputs], write) };
        out
    }

    /// The products of a panel with some tokens, by an instruction set of which is said whether it adds products of bytes.
    ///
    /// # Safety
    /// It does; nobody else holds their part of `out` meanwhile.
    unsafe fn strip(
        &self,
        (isa, wide): (Isa, bool),
        x: &Activations,
        panel: usize,
        tokens: Range<usize>,
        (onto, out): (Option<&[f32]>, SharedMut<MaybeUninit<f32>>),
    ) {
        let rows = ROWS.min(self.outputs - panel * ROWS);
        let mut token = tokens.start;
        while token < tokens.end {
            let left = tokens.end - token;
            // Where tiles are large they come in powers of two, so that few sizes are compiled; none leaves its group.
            let count = if wide { TOGETHER.min(1 << left.ilog2()) } else { left.min(TILE_TOKENS) };
            let mut tile = [const { MaybeUninit::<[f32; ROWS]>::uninit() }; TOGETHER];
            let tile = &mut tile[..count];
            // SAFETY: the caller's.
            unsafe { self.tile((isa, wide), x, panel, token, tile) };
            // SAFETY: the kernel has written all of them.
            let tile = unsafe { std::slice::from_raw_parts(tile.as_ptr().cast::<[f32; ROWS]>(), tile.len()) };
            for (token, values) in (token..).zip(tile) {
                let at = token * self.outputs + panel * ROWS;
                let mut values = *values;
                if let Some(onto) = onto {
                    values.iter_mut().zip(&onto[at..at + rows]).for_each(|(value, onto)| *value += onto);
                }
                // SAFETY: as the caller says.
                let to = unsafe { out.slice(at, rows) };
                match to.first_chunk_mut::<ROWS>() {
                    Some(whole) => *whole = values.map(MaybeUninit::new),
                    None => to.iter_mut().zip(values).for_each(|(to, value)| _ = to.write(value)),
                }
            }
            token += count;
        }
    }

    /// The same with consecutive tokens of one tile.
    ///
    /// # Safety
    /// The instruction set adds products of bytes if that is said.
    unsafe fn tile(
        &self,
        (isa, wide): (Isa, bool),
        x: &Activations,
        panel: usize,
        token: usize,
        out: &mut [MaybeUninit<[f32; ROWS]>],
    ) {
        let blocks = self.inputs / BLOCK;
        let size = blocks * self.bits.block();
        let tile = Tile { weights: &self.data[panel * size..(panel + 1) * size], x, token, blocks };
        #[cfg(target_arch = "x86_64")]
        if wide {
            // SAFETY: the caller's.
            return unsafe { avx512::tile(self.bits, &tile, out) };
        }
        #[cfg(target_arch = "x86_64")]
        if isa != Isa::Portable {
            // SAFETY: the other instruction sets include AVX2, FMA and F16C.
            return unsafe { avx2::tile(self.bits, &tile, out) };
        }
        let _ = (isa, wide);
        match self.bits {
            Bits::Four => tile.portable(Bits::Four, out),
            Bits::Eight => tile.portable(Bits::Eight, out),
        }
    }
}

/// Panels of a work unit at most.
const UNIT_PANELS: usize = 4;
/// Tokens of a work unit: their activations stay in the first-level cache.
const UNIT_TOKENS: usize = 64;
/// Tokens of a register tile at most.
const TILE_TOKENS: usize = 4;
/// The same of vectors as wide as a panel, and tokens of a group of activations.
const TOGETHER: usize = 8;

/// Puts one row's block in its place: weight `k` of row `r` at byte `4 r + k % 4` of vector `k / 4`; of two 4-bit
/// vectors `j` and `j + 4`, one takes the low half of the bytes and the other the high.
fn pack_block(bits: Bits, row: usize, source: &[u8], head: usize, offset: bool, to: &mut [u8]) {
    let d = f16::from_le_bytes([source[0], source[1]]);
    to[2 * row..2 * row + 2].copy_from_slice(&d.to_le_bytes());
    let (weights, at) = (&source[head..], bits.scales());
    if bits == Bits::Eight {
        for (k, &w) in weights.iter().enumerate() {
            to[at + (k / 4) * 4 * ROWS + 4 * row + k % 4] = w;
        }
        return;
    }
    let m = if offset { f16::from_le_bytes([source[2], source[3]]) } else { f16::from_f32(-8.0 * d.to_f32()) };
    to[2 * (ROWS + row)..2 * (ROWS + row) + 2].copy_from_slice(&m.to_le_bytes());
    // GGUF keeps weight k in the low half of byte k and weight k + 16 in the high half: vectors j and j + 4 likewise.
    for (k, &pair) in weights.iter().enumerate() {
        to[at + (k / 4) * 4 * ROWS + 4 * row + k % 4] = pair;
    }
}

/// Activations `[T, inputs]` rounded to 8 bits in blocks of 32. A group of tokens lies side by side, `[T / group, blocks, group]`,
/// so that those of a tile are at fixed distances; the last group is filled up with zeros.
struct Activations {
    blocks: usize,
    /// Tokens of a group: eight, or fewer where there are no more, whose activations then lie in as few lines.
    group: usize,
    /// 32 a block.
    q: Vec<i8>,
    /// What a step is worth.
    scale: Vec<f32>,
    /// The sum of the rounded activations in steps.
    total: Vec<i32>,
    /// The same in units.
    sum: Vec<f32>,
}

impl Activations {
    fn round(isa: Isa, x: &[f32], inputs: usize) -> Self {
        let (tokens, blocks) = (x.len() / inputs, inputs / BLOCK);
        let together = TOGETHER.min(tokens.next_power_of_two());
        let (size, groups) = (blocks * together, tokens.div_ceil(together));
        let mut q = vec![0i8; groups * size * BLOCK];
        let (mut scale, mut sum) = (vec![0f32; groups * size], vec![0f32; groups * size]);
        let mut total = vec![0i32; groups * size];
        let (q_out, scale_out) = (SharedMut::new(&mut q), SharedMut::new(&mut scale));
        let (total_out, sum_out) = (SharedMut::new(&mut total), SharedMut::new(&mut sum));
        #[cfg(target_arch = "x86_64")]
        let round = if isa == Isa::Portable { round } else { avx2::round };
        let _ = isa;
        parallel::for_each(
            groups,
            || (),
            |(), group| {
                // SAFETY: each group has its own part.
                let (q, scale, total, sum) = unsafe {
                    (
                        q_out.slice(group * size * BLOCK, size * BLOCK),
                        scale_out.slice(group * size, size),
                        total_out.slice(group * size, size),
                        sum_out.slice(group * size, size),
                    )
                };
                let (q, _) = q.as_chunks_mut::<BLOCK>();
                let tokens = x[group * together * inputs..].chunks_exact(inputs).take(together);
                for (t, x) in tokens.enumerate() {
                    for (block, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
                        let at = block * together + t;
                        // SAFETY: the other instruction sets include AVX2.
                        (scale[at], total[at]) = unsafe { round(x, &mut q[at]) };
                        sum[at] = total[at] as f32 * scale[at];
                    }
                }
            },
        );
        Self { blocks, group: together, q, scale, total, sum }
    }

    /// The place of a token's block.
    fn at(&self, token: usize, block: usize) -> usize {
        (token / self.group * self.blocks + block) * self.group + token % self.group
    }
}

/// Rounds a block: what a step is worth, and the sum of the steps.
unsafe fn round(x: &[f32; BLOCK], q: &mut [i8; BLOCK]) -> (f32, i32) {
    let largest = x.iter().fold(0f32, |a, x| a.max(x.abs()));
    let (step, inverse) = step(largest, x.iter().all(|x| x.is_finite()));
    for (q, x) in q.iter_mut().zip(x) {
        *q = (x * inverse).round_ties_even() as i8;
    }
    (step, q.iter().map(|q| i32::from(*q)).sum())
}

/// What a step of a block is worth, and steps in a unit. A block with NaN or infinity makes its products NaN, as floats would.
#[inline(always)]
fn step(largest: f32, finite: bool) -> (f32, f32) {
    let step = if finite { largest / 127.0 } else { f32::NAN };
    (step, if step > 0.0 { 1.0 / step } else { 0.0 })
}

/// One panel against consecutive tokens.
struct Tile<'a> {
    weights: &'a [u8],
    x: &'a Activations,
    token: usize,
    blocks: usize,
}

impl Tile<'_> {
    fn portable(&self, bits: Bits, out: &mut [MaybeUninit<[f32; ROWS]>]) {
        let half = |at: &[u8], i: usize| f16::from_le_bytes([at[2 * i], at[2 * i + 1]]).to_f32();
        for (t, out) in out.iter_mut().enumerate() {
            let (token, out) = (self.token + t, out.write([0.0; ROWS]));
            for block in 0..self.blocks {
                let w = &self.weights[block * bits.block()..][..bits.block()];
                let at = self.x.at(token, block);
                let x = &self.x.q[at * BLOCK..][..BLOCK];
                let (scale, sum) = (self.x.scale[at], self.x.sum[at]);
                for (row, out) in out.iter_mut().enumerate() {
                    let byte = |k: usize| w[bits.scales() + (k / 4) * 4 * ROWS + 4 * row + k % 4];
                    let weight = |k: usize| match bits {
                        Bits::Eight => i32::from(byte(k) as i8),
                        Bits::Four if k < BLOCK / 2 => i32::from(byte(k) & 15),
                        Bits::Four => i32::from(byte(k - BLOCK / 2) >> 4),
                    };
                    let dot: i32 = (0..BLOCK).map(|k| weight(k) * i32::from(x[k])).sum();
                    *out += half(w, row) * scale * dot as f32;
                    if bits == Bits::Four {
                        *out += half(w, ROWS + row) * sum;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Numbers;
    use candle_core::quantized::QTensor;

    fn weights(numbers: &mut Numbers, dtype: GgmlDType, outputs: usize, inputs: usize) -> (Packed, Vec<Vec<f32>>) {
        let tensor = QTensor::quantize(&numbers.tensor(&[outputs, inputs]), dtype).unwrap();
        let exact = tensor.dequantize(&candle_core::Device::Cpu).unwrap().to_vec2().unwrap();
        (Packed::from_gguf(dtype, &tensor.data().unwrap(), outputs, inputs).unwrap(), exact)
    }

    #[test]
    fn products_agree_with_the_dequantised_weights_on_every_instruction_set() {
        let mut numbers = Numbers(3);
        for dtype in [GgmlDType::Q4_0, GgmlDType::Q4_1, GgmlDType::Q8_0] {
            for (outputs, inputs, tokens) in [(8, 32, 1), (13, 64, 3), (192, 576, 7), (70, 96, 130)] {
                let (packed, exact) = weights(&mut numbers, dtype, outputs, inputs);
                let x = numbers.tensor(&[tokens, inputs]).to_vec2::<f32>().unwrap();
                let mut last: Option<Vec<f32>> = None;
                for isa in Isa::available() {
                    let out = packed.multiply_with(isa, &x.concat(), None);
                    for (x, out) in x.iter().zip(out.chunks_exact(outputs)) {
                        let exact: Vec<f64> = (exact.iter())
                            .map(|w| w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum())
                            .collect();
                        let error = crate::testing::relative_error(out, &exact);
                        assert!(error < 0.02, "{isa:?} {dtype:?} {outputs}x{inputs}: {error}");
                    }
                    if let Some(last) = &last {
                        let last: Vec<f64> = last.iter().map(|x| f64::from(*x)).collect();
                        let error = crate::testing::relative_error(&out, &last);
                        assert!(error < 1e-6, "{isa:?} {dtype:?}: {error} from the portable kernel");
                    }
                    last = Some(out);
                }
            }
        }
    }

    #[test]
    fn a_tokens_bits_depend_neither_on_the_batch_nor_on_the_width_of_vectors() {
        let mut numbers = Numbers(6);
        for dtype in [GgmlDType::Q4_0, GgmlDType::Q4_1, GgmlDType::Q8_0] {
            // Four panels and a part of one.
            let (packed, _) = weights(&mut numbers, dtype, 70, 96);
            let x = numbers.tensor(&[93, 96]).to_vec2::<f32>().unwrap();
            let mut vectors: Vec<Vec<f32>> = Vec::new();
            for isa in Isa::available() {
                let all = packed.multiply_with(isa, &x.concat(), None);
                for (x, together) in x.iter().zip(all.chunks_exact(70)) {
                    assert_eq!(packed.multiply_with(isa, x, None), together, "{isa:?} {dtype:?}");
                }
                // Groups of each size, and blocks for more threads.
                for some in (1..=17).map(|count| 3..3 + count) {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(some.len()).build().unwrap();
                    let out = pool.install(|| packed.multiply_with(isa, &x[some.clone()].concat(), None));
                    assert_eq!(out, all[some.start * 70..some.end * 70], "{isa:?} {dtype:?} {some:?}");
                }
                let onto: Vec<f32> = (0..all.len()).map(|i| i as f32).collect();
                let sums: Vec<f32> = onto.iter().zip(&all).map(|(onto, product)| onto + product).collect();
                assert_eq!(packed.multiply_with(isa, &x.concat(), Some(&onto)), sums, "{isa:?} {dtype:?}");
                vectors.extend((isa != Isa::Portable).then_some(all));
            }
            assert!(vectors.windows(2).all(|two| two[0] == two[1]), "{dtype:?}");
        }
    }

    #[test]
    fn activations_that_fit_8_bits_give_the_exact_product() {
        let mut numbers = Numbers(4);
        let (packed, exact) = weights(&mut numbers, GgmlDType::Q4_1, 24, 64);
        let x: Vec<f32> = (0..64).map(|i| if i % 32 == 0 { 127.0 } else { ((i * 37) % 255) as f32 - 127.0 }).collect();
        let out = packed.multiply(&x, None);
        let exact: Vec<f64> =
            exact.iter().map(|w| w.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum()).collect();
        assert!(crate::testing::relative_error(&out, &exact) < 1e-6);
    }

    #[test]
    fn nan_activations_give_nan_and_zeros_give_zero() {
        let (packed, _) = weights(&mut Numbers(5), GgmlDType::Q4_1, 8, 64);
        let mut x = vec![0f32; 64];
        assert_eq!(packed.multiply(&x, None), [0.0; 8]);
        for bad in [f32::NAN, f32::INFINITY] {
            x[40] = bad;
            let out = packed.multiply(&x, None);
            assert!(out.iter().all(|o| o.is_nan()), "{out:?}");
        }
    }

    #[test]
    fn other_types_and_lengths_are_refused() {
        assert!(Packed::from_gguf(GgmlDType::Q4K, &[0; 144], 1, 256).is_none());
        assert!(Packed::from_gguf(GgmlDType::Q4_0, &[0; 17], 1, 32).is_none());
        assert!(Packed::from_gguf(GgmlDType::Q4_0, &[0; 18], 1, 33).is_none());
    }
}
