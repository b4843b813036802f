//! Products with float weights that keep their type: f32, f16 or bf16 in panels of sixteen outputs, activations and sums
//! f32.
//!
//! Every product of a token and an output is one chain of multiply-adds along the inputs, whatever else is computed beside
//! it, so that it depends neither on the batch nor on the number of threads.

use crate::kv::KvElement;
use crate::memory::Large;
use crate::parallel::{self, SharedMut};
use crate::simd::{Isa, Simd, dispatch};
use candle_core::{CpuStorage, Result, Storage, Tensor, bail};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Outputs of a panel.
const PANEL: usize = 16;
/// Bytes of the panels of a work unit at most.
const UNIT_BYTES: usize = 64 << 10;
/// Tokens of a work unit: their activations stay in the second-level cache.
const UNIT_TOKENS: usize = 48;
/// Tokens of a register tile.
const TILE_TOKENS: usize = 6;

/// A packed weight matrix `[out, in]`.
#[derive(Debug, Clone)]
pub struct Panels {
    outputs: usize,
    inputs: usize,
    /// `[panels, inputs, 16]`; outputs beyond the last are 0.
    data: Data,
}

#[derive(Debug, Clone)]
enum Data {
    F32(Large<f32>),
    F16(Large<half::f16>),
    BF16(Large<half::bf16>),
}

impl Panels {
    /// Packs a weight `[out, in]`, f32, f16 or bf16, of the CPU.
    ///
    /// # Errors
    /// Another shape, type or device.
    pub fn new(weight: &Tensor) -> Result<Self> {
        let (outputs, inputs) = weight.dims2()?;
        let weight = weight.contiguous()?;
        let (storage, layout) = weight.storage_and_layout();
        let (Storage::Cpu(storage), Some((from, to))) = (&*storage, layout.contiguous_offsets()) else {
            bail!("linear: a weight {:?} that is not on the CPU", weight.shape())
        };
        let data = match storage {
            CpuStorage::F32(weight) => Data::F32(pack(&weight[from..to], outputs, inputs)),
            CpuStorage::F16(weight) => Data::F16(pack(&weight[from..to], outputs, inputs)),
            CpuStorage::BF16(weight) => Data::BF16(pack(&weight[from..to], outputs, inputs)),
            _ => bail!("linear: a weight of {:?}; expected f32, f16 or bf16", weight.dtype()),
        };
        Ok(Self { outputs, inputs, data })
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
        match &self.data {
            Data::F32(data) => self.multiply_by(isa, data, x, onto),
            Data::F16(data) => self.multiply_by(isa, data, x, onto),
            Data::BF16(data) => self.multiply_by(isa, data, x, onto),
        }
    }

    fn multiply_by<T: KvElement>(&self, isa: Isa, data: &[T], x: &[f32], onto: Option<&[f32]>) -> Vec<f32> {
        let (outputs, inputs) = (self.outputs, self.inputs);
        let (tokens, panels) = (x.len() / inputs.max(1), outputs.div_ceil(PANEL));
        let fits = onto.is_none_or(|onto| onto.len() == tokens * outputs);
        assert!(x.len() == tokens * inputs && fits, "activations of another width");
        let most = (UNIT_BYTES / (inputs * PANEL * size_of::<T>()).max(1)).next_power_of_two().clamp(2, 8);
        // Several panels at once where there are: see `tiles`.
        let step = most.min(4);
        let write = |[out]: [_; 1]| {
            // Neighbouring units share a stretch of weights, not of tokens: the weights are the larger.
            parallel::for_each_block((panels, step, most), (tokens, UNIT_TOKENS), |panels, tokens| {
                let unit = &Unit { data, x, onto, out, outputs, inputs, panels };
                dispatch!(isa, products::<_, T: KvElement>(unit: &Unit<T>, tokens: Range<usize>));
            });
        };
        // SAFETY: every output of every token belongs to one unit, which writes it.
        let [out] = unsafe { parallel::written([tokens * outputs], write) };
        out
    }
}

fn pack<T: KvElement + bytemuck::Zeroable>(weight: &[T], outputs: usize, inputs: usize) -> Large<T> {
    let panels = outputs.div_ceil(PANEL);
    Large::new(panels * inputs * PANEL, |data| {
        let to = SharedMut::new(data);
        parallel::for_each(
            panels,
            || (),
            |(), panel| {
                // SAFETY: each panel belongs to one unit.
                let to = unsafe { to.slice(panel * inputs * PANEL, inputs * PANEL) };
                let rows = PANEL.min(outputs - panel * PANEL);
                for (lane, row) in weight[panel * PANEL * inputs..][..rows * inputs].chunks_exact(inputs).enumerate() {
                    row.iter().zip(to[lane..].iter_mut().step_by(PANEL)).for_each(|(w, to)| *to = *w);
                }
            },
        );
    })
}

/// Some panels against some tokens.
struct Unit<'a, T> {
    data: &'a [T],
    x: &'a [f32],
    onto: Option<&'a [f32]>,
    out: SharedMut<MaybeUninit<f32>>,
    outputs: usize,
    inputs: usize,
    panels: Range<usize>,
}

/// The products of a unit with tokens.
///
/// # Safety
/// `V`'s instruction set exists, panels and tokens lie within the matrices, and nobody else writes their products.
#[inline(always)]
unsafe fn products<V: Simd, T: KvElement>(unit: &Unit<T>, tokens: Range<usize>) {
    let rest = tokens.end - tokens.len() % TILE_TOKENS;
    unsafe {
        tiles::<V, T, TILE_TOKENS, 2>(unit, tokens.start..rest);
        let rest = rest..tokens.end;
        // With fewer tokens more outputs at once: one chain of multiply-adds is slow, several are not.
        match rest.len() {
            0 => {}
            1 => tiles::<V, T, 1, 4>(unit, rest),
            2 => tiles::<V, T, 2, 4>(unit, rest),
            3 => tiles::<V, T, 3, 2>(unit, rest),
            4 => tiles::<V, T, 4, 2>(unit, rest),
            _ => tiles::<V, T, 5, 2>(unit, rest),
        }
    }
}

/// The same, `R` tokens by `N` vectors of outputs at a time; `tokens` is a multiple of `R`.
#[inline(always)]
unsafe fn tiles<V: Simd, T: KvElement, const R: usize, const N: usize>(unit: &Unit<T>, tokens: Range<usize>) {
    let Unit { inputs, outputs, .. } = *unit;
    let in_panel = PANEL / V::LANES;
    let vectors = unit.panels.len() * in_panel;
    for first in (0..vectors).step_by(N) {
        // (panel, first output in it) of a vector; beyond the last one the last one again.
        let place = |v: usize| {
            let v = (first + v).min(vectors - 1);
            (unit.panels.start + v / in_panel, v % in_panel * V::LANES)
        };
        // Plain loops: closures handed to other functions are not compiled for the instruction set.
        let mut weights = [std::ptr::null::<T>(); N];
        for (v, weights) in weights.iter_mut().enumerate() {
            let (panel, lane) = place(v);
            *weights = unit.data[panel * inputs * PANEL + lane..].as_ptr();
        }
        for token in tokens.clone().step_by(R) {
            let x = unit.x[token * inputs..(token + R) * inputs].as_ptr();
            let mut sums = [[unsafe { V::splat(0.0) }; N]; R];
            for k in 0..inputs {
                // SAFETY: a panel has sixteen weights for each input, and R rows of activations begin at `x`.
                unsafe {
                    let mut now = [V::splat(0.0); N];
                    for (now, weights) in now.iter_mut().zip(&weights) {
                        *now = T::load::<V>(weights.add(k * PANEL));
                    }
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let x = V::splat(*x.add(r * inputs + k));
                        for (sum, weight) in sums.iter_mut().zip(&now) {
                            *sum = x.mul_add(*weight, *sum);
                        }
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (v, sum) in sums.iter().enumerate().take(vectors - first) {
                    let (panel, lane) = place(v);
                    let output = panel * PANEL + lane;
                    if output >= outputs {
                        continue;
                    }
                    let (at, count) = ((token + r) * outputs + output, V::LANES.min(outputs - output));
                    let to = unit.out.pointer(at).cast::<f32>();
                    // SAFETY: so many outputs are left; each token and panel belongs to one unit.
                    unsafe {
                        match unit.onto {
                            _ if count < V::LANES => {
                                let mut values = [0f32; PANEL];
                                sum.store(values.as_mut_ptr());
                                for (i, value) in values[..count].iter().enumerate() {
                                    to.add(i).write(unit.onto.map_or(0.0, |onto| onto[at + i]) + value);
                                }
                            }
                            Some(onto) => V::load(onto[at..].as_ptr()).add(*sum).store(to),
                            None => sum.store(to),
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Numbers, relative_error};
    use candle_core::{DType, Device};

    fn product(panels: &Panels, isa: Isa, x: &[f32]) -> Vec<f32> {
        panels.multiply_with(isa, x, None)
    }

    #[test]
    fn products_are_those_of_the_weights_on_every_instruction_set() {
        let mut numbers = Numbers(3);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (outputs, inputs, tokens) in
                [(1, 1, 1), (16, 8, 2), (13, 64, 3), (192, 576, 7), (70, 96, 130), (33, 5, 4), (300, 31, 53)]
            {
                let weight = numbers.tensor(&[outputs, inputs]).to_dtype(dtype).unwrap();
                let exact = weight.to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
                let x = numbers.tensor(&[tokens, inputs]).to_vec2::<f32>().unwrap();
                let panels = Panels::new(&weight).unwrap();
                for isa in Isa::available() {
                    let out = product(&panels, isa, &x.concat());
                    for (x, out) in x.iter().zip(out.chunks_exact(outputs)) {
                        let row = |w: &Vec<f32>| w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                        let exact: Vec<f64> = exact.iter().map(row).collect();
                        let error = relative_error(out, &exact);
                        assert!(error < 2e-6, "{isa:?} {dtype:?} {outputs}x{inputs}: {error}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_tokens_product_does_not_depend_on_the_others() {
        let mut numbers = Numbers(4);
        let weight = numbers.tensor(&[200, 77]).to_dtype(DType::BF16).unwrap();
        let panels = Panels::new(&weight).unwrap();
        let x = numbers.tensor(&[110, 77]).to_vec2::<f32>().unwrap();
        for isa in Isa::available() {
            let all = product(&panels, isa, &x.concat());
            for count in 1..15 {
                // By other threads in other blocks.
                let pool = rayon::ThreadPoolBuilder::new().num_threads(count).build().unwrap();
                for first in [0, 1, 50, 110 - count] {
                    let some = pool.install(|| product(&panels, isa, &x[first..first + count].concat()));
                    assert_eq!(some, all[first * 200..][..count * 200], "{isa:?}: {count} tokens from {first}");
                }
            }
        }
    }

    #[test]
    fn products_go_onto_what_is_there() {
        let mut numbers = Numbers(7);
        let panels = Panels::new(&numbers.tensor(&[45, 24])).unwrap();
        let [x, onto] = [24, 45].map(|width| numbers.tensor(&[9, width]).flatten_all().unwrap().to_vec1().unwrap());
        for isa in Isa::available() {
            let alone = product(&panels, isa, &x);
            let sums: Vec<f32> = onto.iter().zip(alone).map(|(onto, product)| onto + product).collect();
            assert_eq!(panels.multiply_with(isa, &x, Some(&onto)), sums, "{isa:?}");
        }
    }

    #[test]
    fn nan_and_infinity_stay_in_their_rows() {
        let panels = Panels::new(&Numbers(5).tensor(&[20, 9])).unwrap();
        for isa in Isa::available() {
            for bad in [f32::NAN, f32::INFINITY] {
                let mut x = vec![0.5f32; 27];
                x[12] = bad;
                let out = product(&panels, isa, &x);
                assert!(out[..20].iter().chain(&out[40..]).all(|o| o.is_finite()), "{isa:?}");
                assert!(out[20..40].iter().all(|o| !o.is_finite()), "{isa:?}");
            }
        }
    }

    #[test]
    fn views_are_packed_as_they_read_and_other_types_refused() {
        let weight = Numbers(6).tensor(&[6, 10]);
        let x = [1.0, -2.0, 3.0, 0.5, 0.25, 8.0];
        let turned = Panels::new(&weight.t().unwrap()).unwrap();
        let copied = Panels::new(&weight.t().unwrap().contiguous().unwrap()).unwrap();
        assert_eq!(product(&turned, Isa::best(), &x), product(&copied, Isa::best(), &x));
        assert!(Panels::new(&Tensor::zeros((2, 2), DType::U8, &Device::Cpu).unwrap()).is_err());
        assert!(Panels::new(&Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap()).is_err());
    }
}
