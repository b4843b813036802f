//! Products with weights of 4, 5, 6 and 8 bits that stay as they are: rows interleaved by sixteen, activations rounded to 8 bits
//! in blocks of 32, integer dot products.
//!
//! Weights are those of the GGUF types, exactly but for Q4_0's and Q5_0's offsets, which are rounded to f16 where 8 or 16 times a scale
//! are not one. The rounding of activations costs a relative error of about 0.5 % of a product's norm, as in llama.cpp.

/// Makes `unpack`, a block's weights of fewer than eight bits of as many rows as a vector has, from the instructions of a width.
#[cfg(target_arch = "x86_64")]
macro_rules! unpack_by {
    ($vector:ty, $load:ident, $set:ident, $zero:ident, $and:ident, $or:ident, $srli:ident, $sll:ident, $srl:ident) => {
        #[inline(always)]
        unsafe fn unpack<const BITS: usize>(w: *const u8) -> [$vector; 8] {
            unsafe {
                let vector = |j: usize| $load(w.add(4 * j * ROWS).cast());
                let low = $set(15);
                let mut q = [$zero(); 8];
                for j in 0..4 {
                    let pair = vector(j);
                    q[j] = $and(pair, low);
                    q[j + 4] = $and($srli::<4>(pair), low);
                }
                let high = BITS - 4;
                let beyond = $set(((1 << high) - 1) << 4);
                for j in 0..8 * high.min(1) {
                    let (bits, bit) = (vector(4 + high * j / 8), high * j % 8);
                    // The count is known when the loop is unrolled.
                    let bits = if bit < 4 {
                        $sll(bits, _mm_cvtsi32_si128(4 - bit as i32))
                    } else {
                        $srl(bits, _mm_cvtsi32_si128(bit as i32 - 4))
                    };
                    q[j] = $or(q[j], $and(bits, beyond));
                }
                q
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
use unpack_by;

/// Runs a width's kernel of a form, for which `$run` takes its name and, of fewer than eight bits, bits and blocks.
#[cfg(target_arch = "x86_64")]
macro_rules! by_form {
    ($form:expr, $run:ident) => {
        match $form {
            Form::FOUR => $run!(few, 4, 1),
            Form::FIVE => $run!(few, 5, 1),
            Form::FOUR_K => $run!(few, 4, 8),
            Form::FIVE_K => $run!(few, 5, 8),
            Form::SIX_K => $run!(few, 6, 8),
            _ => $run!(eight),
        }
    };
}
#[cfg(target_arch = "x86_64")]
use by_form;

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod form;

use crate::memory::Large;
use crate::parallel::{self, SharedMut};
use crate::simd::Isa;
use activations::Activations;
use candle_core::quantized::GgmlDType;
use form::Form;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Bytes that a block of a GGUF type takes of a row's panels; `None` for a type that is not packed on this machine.
pub fn block_bytes(dtype: GgmlDType) -> Option<usize> {
    // Without vectors that the panels are made for candle's products may have some of their own.
    let vectors = Isa::best() != Isa::Portable || matches!(dtype, GgmlDType::Q4_0 | GgmlDType::Q4_1 | GgmlDType::Q8_0);
    Form::of(dtype).filter(|_| vectors).map(|form| form.size() / ROWS)
}

/// Weights and activations of a block, along the input.
const BLOCK: usize = 32;
/// Rows of a panel.
const ROWS: usize = 16;

/// A packed weight matrix `[out, in]`.
#[derive(Debug, Clone)]
pub struct Packed {
    form: Form,
    outputs: usize,
    inputs: usize,
    /// Panels of 16 rows, of which the form says how each lies. What a thread reads for one token is one stream, which the processor
    /// fetches ahead: of two it does so half as fast.
    data: Large<u8>,
}

impl Packed {
    /// Packs GGUF rows of 4, 5, 6 or 8 bits; `None` for another type or a length that does not fit.
    pub fn from_gguf(dtype: GgmlDType, data: &[u8], outputs: usize, inputs: usize) -> Option<Self> {
        let form = Form::of(dtype)?;
        let (stretches, source) = (inputs / (form.blocks * BLOCK), dtype.type_size());
        if !inputs.is_multiple_of(form.blocks * BLOCK) || data.len() != outputs * stretches * source {
            return None;
        }
        let (panels, panel) = (outputs.div_ceil(ROWS), stretches * form.size());
        let data = Large::new(panels * panel, |packed| {
            let packed = SharedMut::new(packed);
            let pack = |i: usize| {
                // SAFETY: each panel is one unit's.
                let packed = unsafe { packed.slice(i * panel, panel) };
                let rows = data[i * ROWS * stretches * source..].chunks_exact(stretches * source).take(ROWS);
                for (row, sources) in rows.enumerate() {
                    for (source, to) in sources.chunks_exact(source).zip(packed.chunks_exact_mut(form.size())) {
                        form.pack(dtype, row, source, to);
                    }
                }
            };
            parallel::for_each(panels, || (), |(), i| pack(i));
        });
        Some(Self { form, outputs, inputs, data })
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
        let size = blocks / self.form.blocks * self.form.size();
        let tile = Tile { weights: &self.data[panel * size..(panel + 1) * size], x, token, blocks };
        #[cfg(target_arch = "x86_64")]
        if wide {
            // SAFETY: the caller's.
            return unsafe { avx512::tile(self.form, &tile, out) };
        }
        #[cfg(target_arch = "x86_64")]
        if isa != Isa::Portable {
            // SAFETY: the other instruction sets include AVX2, FMA and F16C.
            return unsafe { avx2::tile(self.form, &tile, out) };
        }
        let _ = (isa, wide);
        tile.portable(self.form, out);
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

/// One panel against consecutive tokens.
struct Tile<'a> {
    weights: &'a [u8],
    x: &'a Activations,
    token: usize,
    blocks: usize,
}

impl Tile<'_> {
    fn portable(&self, form: Form, out: &mut [MaybeUninit<[f32; ROWS]>]) {
        let mut out: Vec<_> = out.iter_mut().map(|out| out.write([0.0; ROWS])).collect();
        for block in 0..self.blocks {
            let stretch = &self.weights[block / form.blocks * form.size()..][..form.size()];
            let (scales, weights) = form.unpack(stretch, block % form.blocks);
            for (t, out) in out.iter_mut().enumerate() {
                let at = self.x.at(self.token + t, block);
                let (scale, sum) = (self.x.scale[at], self.x.sum[at]);
                let mut dots = [[0i32; ROWS]; 2];
                let (x, _) = self.x.q[at * BLOCK..][..BLOCK].as_chunks::<4>();
                for ((j, weights), x) in weights.iter().enumerate().zip(x) {
                    for (dot, w) in dots[j / 4].iter_mut().zip(weights.as_chunks::<4>().0) {
                        *dot += w.iter().zip(x).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum::<i32>();
                    }
                }
                for ((out, [first, second]), row) in out.iter_mut().zip(scales).zip(0..) {
                    let [a, b] = dots.map(|dots| dots[row]);
                    *out += match form.by_halves() {
                        true => first * scale * a as f32 + second * scale * b as f32,
                        false => first * scale * (a + b) as f32 + second * sum,
                    };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
