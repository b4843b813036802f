use super::*;
use crate::testing::{Numbers, relative_error};
use candle_core::Device;
use candle_core::quantized::{QStorage, QTensor};
use half::f16;
use std::borrow::Cow;

const TYPES: [GgmlDType; 8] = [
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_0,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
];

fn weights(numbers: &mut Numbers, dtype: GgmlDType, outputs: usize, inputs: usize) -> (Packed, Vec<Vec<f32>>) {
    let tensor = QTensor::quantize(&numbers.tensor(&[outputs, inputs]), dtype).unwrap();
    let exact = tensor.dequantize(&Device::Cpu).unwrap().to_vec2().unwrap();
    (Packed::from_gguf(dtype, &tensor.data().unwrap(), outputs, inputs).unwrap(), exact)
}

/// The same of a file's bytes whatever they are, but for scales of a sound size.
fn any_weights(numbers: &mut Numbers, dtype: GgmlDType, outputs: usize, inputs: usize) -> (Packed, Vec<Vec<f32>>) {
    let halves: &[usize] = match dtype {
        GgmlDType::Q6K => &[208],
        GgmlDType::Q4_0 | GgmlDType::Q5_0 | GgmlDType::Q8_0 => &[0],
        _ => &[0, 2],
    };
    let len = outputs * inputs / dtype.block_size() * dtype.type_size();
    let mut words: Vec<u64> = (0..len.div_ceil(8)).map(|_| numbers.next()).collect();
    let bytes = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..len];
    for bytes in bytes.chunks_exact_mut(dtype.type_size()) {
        for &at in halves {
            bytes[at..at + 2].copy_from_slice(&f16::from_f32(0.01 * numbers.normal()).to_le_bytes());
        }
    }
    let storage = QStorage::from_data(Cow::Borrowed(&*bytes), &Device::Cpu, dtype).unwrap();
    let exact = QTensor::new(storage, (outputs, inputs)).unwrap().dequantize(&Device::Cpu).unwrap();
    (Packed::from_gguf(dtype, bytes, outputs, inputs).unwrap(), exact.to_vec2().unwrap())
}

/// `x` `[T, inputs]` with weights `[outputs, inputs]`, in f64.
fn exact_products(x: &[f32], weights: &[Vec<f32>]) -> Vec<f64> {
    let dot = |w: &[f32], x: &[f32]| w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
    x.chunks_exact(weights[0].len()).flat_map(|x| weights.iter().map(move |w| dot(w, x))).collect()
}

#[test]
fn weights_are_those_of_the_file_whatever_its_bytes() {
    for dtype in TYPES {
        let (outputs, inputs) = (19, 2 * dtype.block_size());
        let (packed, exact) = any_weights(&mut Numbers(7), dtype, outputs, inputs);
        let form = packed.form;
        for (row, exact) in exact.iter().enumerate() {
            let panel = &packed.data[row / ROWS * (packed.data.len() / 2)..];
            let largest = exact.iter().fold(0f32, |a, x| a.max(x.abs()));
            for (k, exact) in exact.iter().enumerate() {
                let (block, row) = (k / BLOCK, row % ROWS);
                let (scales, weights) = form.unpack(&panel[block / form.blocks * form.size()..], block % form.blocks);
                let ([first, second], q) = (scales[row], f32::from(weights[k % BLOCK / 4][4 * row + k % 4]));
                let weight = match form.by_halves() {
                    true => [first, second][k / (BLOCK / 2) % 2] * q,
                    false => first * q + second,
                };
                // The last bit of what is subtracted.
                assert!((weight - exact).abs() <= 2e-7 * largest, "{dtype:?} {row} {k}: {weight}, not {exact}");
            }
        }
    }
}

#[test]
fn products_agree_with_the_dequantised_weights_on_every_instruction_set() {
    let mut numbers = Numbers(3);
    for dtype in TYPES {
        for (outputs, blocks, tokens) in [(8, 1usize, 1), (13, 2, 2), (192, 18, 7), (33, 3, 64), (70, 2, 300)] {
            // About as many weights of either kind of block.
            let inputs = if dtype.block_size() > BLOCK { blocks.div_ceil(6) * 256 } else { blocks * BLOCK };
            let (packed, weights) = weights(&mut numbers, dtype, outputs, inputs);
            let x: Vec<f32> = (0..tokens * inputs).map(|_| numbers.normal()).collect();
            let exact = exact_products(&x, &weights);
            let mut last: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                let out = packed.multiply_with(isa, &x, None);
                for (out, exact) in out.chunks_exact(outputs).zip(exact.chunks_exact(outputs)) {
                    let error = relative_error(out, exact);
                    assert!(error < 0.02, "{isa:?} {dtype:?} {outputs}x{inputs}: {error}");
                }
                if let Some(last) = &last {
                    let last: Vec<f64> = last.iter().map(|x| f64::from(*x)).collect();
                    let error = relative_error(&out, &last);
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
    for dtype in TYPES {
        let inputs = if dtype.block_size() > BLOCK { 256 } else { 96 };
        // Four panels and a part of one.
        let (packed, _) = weights(&mut numbers, dtype, 70, inputs);
        let x = numbers.tensor(&[93, inputs]).to_vec2::<f32>().unwrap();
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
    for dtype in TYPES {
        let inputs = 2 * dtype.block_size();
        let (packed, weights) = any_weights(&mut numbers, dtype, 24, inputs);
        let varied = |i: usize| if i.is_multiple_of(32) { 127.0 } else { ((i * 37) % 255) as f32 - 127.0 };
        // Also as large as sums can become.
        for x in [(0..inputs).map(varied).collect(), vec![127.0; inputs], vec![-127.0; inputs]] {
            let exact = exact_products(&x, &weights);
            for isa in Isa::available() {
                let error = relative_error(&packed.multiply_with(isa, &x, None), &exact);
                assert!(error < 2e-6, "{isa:?} {dtype:?}: {error}");
            }
        }
    }
}

#[test]
fn nan_activations_give_nan_and_zeros_give_zero() {
    for dtype in TYPES {
        let (packed, _) = weights(&mut Numbers(5), dtype, 8, 256);
        let mut x = vec![0f32; 256];
        assert_eq!(packed.multiply(&x, None), [0.0; 8]);
        for bad in [f32::NAN, f32::INFINITY] {
            x[40] = bad;
            let out = packed.multiply(&x, None);
            assert!(out.iter().all(|o| o.is_nan()), "{dtype:?}: {out:?}");
        }
    }
}

#[test]
fn other_types_and_lengths_are_refused() {
    assert!(Packed::from_gguf(GgmlDType::Q3K, &[0; 110], 1, 256).is_none());
    assert!(Packed::from_gguf(GgmlDType::Q4_0, &[0; 17], 1, 32).is_none());
    assert!(Packed::from_gguf(GgmlDType::Q4_0, &[0; 18], 1, 33).is_none());
    assert!(Packed::from_gguf(GgmlDType::Q4K, &[0; 72], 1, 128).is_none());
    assert!(Packed::from_gguf(GgmlDType::Q6K, &[0; 144], 1, 256).is_none());
}
