//! What rows go through before they are compared with something learned.

use crate::cache::{Numbers, below, device, relative};
use crate::step::{perceptron, short_perceptron};
use candle_core::{DType, Device, Tensor};
use taper_kernels::cuda::gather;
use taper_kernels::index::clusters::{self, Centroids};
use taper_kernels::index::{Part, codes};
use taper_kernels::kv::BLOCK_TOKENS;
use taper_kernels::mlp::{self, Activation, Mlp, PerHead};
use taper_kernels::rotary::Rotation;

fn rows(numbers: &mut Numbers, dims: (usize, usize, usize)) -> Tensor {
    let all: Vec<f32> = (0..dims.0 * dims.1 * dims.2).map(|_| numbers.normal()).collect();
    Tensor::from_vec(all, dims, &Device::Cpu).unwrap()
}

fn bits(t: &Tensor) -> Vec<u32> {
    t.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

#[test]
fn layers_centroids_and_turns_are_those_of_the_cpu_whatever_the_widths_and_rows() {
    let mut numbers = Numbers(91);
    for (d, widths, kv_heads, group, activation) in [
        (64, vec![64, 100, 33], 3, 3, Activation::Relu),
        (128, vec![128, 512, 1000], 2, 4, Activation::Relu),
        (128, vec![128, 37, 128, 32], 1, 8, Activation::Silu),
        (64, vec![64, 1], 2, 1, Activation::Silu),
        (64, vec![64, 1100, 7], 1, 16, Activation::Relu),
    ] {
        let q_heads = kv_heads * group;
        let mut maps = |count: usize| -> PerHead<Mlp> {
            (0..count).map(|_| short_perceptron(&mut numbers, &widths, activation)).collect()
        };
        let (by_kv_head, by_head) = (maps(kv_heads), maps(q_heads));
        let count = widths[widths.len() - 1];
        let centroids: PerHead<Centroids> = (0..kv_heads)
            .map(|_| Centroids::new(&(0..count * d).map(|_| numbers.normal()).collect::<Vec<_>>(), d).unwrap())
            .collect();
        let frequencies: Vec<f32> = (0..d / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / d as f32)).collect();
        for (n, dtype) in
            [1, 2, 5, 16, 65, 130].into_iter().zip([DType::F32, DType::BF16, DType::F16].into_iter().cycle())
        {
            let x = rows(&mut numbers, (n, q_heads, d)).to_dtype(dtype).unwrap();
            let (x, on_device) = (x.to_dtype(DType::F32).unwrap(), x.to_device(&device()).unwrap());
            let turns: Vec<Rotation> = (0..n).map(|i| Rotation::new(977 * i, &frequencies, 1.5)).collect();
            let of = |x: &Tensor| {
                [
                    mlp::per_head(&by_kv_head, x, Some(&turns)).unwrap(),
                    mlp::per_head(&by_head, x, None).unwrap(),
                    clusters::products(&centroids, x, Some(&turns)).unwrap(),
                    clusters::products(&centroids, x, None).unwrap(),
                ]
            };
            for (i, (cpu, cuda)) in of(&x).iter().zip(&of(&on_device)).enumerate() {
                assert_eq!(cpu.dims(), cuda.dims());
                below(relative(cuda, cpu), 1e-5, &format!("{widths:?}, {n} rows, result {i}"));
            }
        }
    }
}

#[test]
fn a_row_is_the_same_bits_alone_and_among_others() {
    let mut numbers = Numbers(92);
    let (q_heads, kv_heads, d) = (12, 4, 128);
    // The second layer is wide enough for the way that many rows go.
    let maps: PerHead<Mlp> =
        (0..kv_heads).map(|_| perceptron(&mut numbers, &[d, 300, 2200, 77], Activation::Silu)).collect();
    let all = rows(&mut numbers, (21, q_heads, d)).to_device(&device()).unwrap();
    let turns: Vec<Rotation> = (0..21).map(|i| Rotation::new(31 * i, &[0.1; 64], 1.0)).collect();
    let together = mlp::per_head(&maps, &all, Some(&turns)).unwrap();
    // More and fewer than are gone through at a time.
    for (first, count) in [(0, 1), (20, 1), (3, 2), (7, 6), (1, 20)] {
        let alone = all.narrow(0, first, count).unwrap().copy().unwrap();
        let alone = mlp::per_head(&maps, &alone, Some(&turns[first..first + count])).unwrap();
        assert_eq!(bits(&alone), bits(&together.narrow(0, first, count).unwrap()), "{count} rows from {first} on");
    }
}

#[test]
fn a_key_is_taken_in_alike_alone_and_beside_a_prompt() {
    let mut numbers = Numbers(94);
    let (blocks, kv_heads, d) = (40, 2, 64);
    let k: Vec<f32> = (0..blocks * kv_heads * BLOCK_TOKENS * d).map(|_| numbers.normal()).collect();
    let k = Tensor::from_vec(k, (blocks, kv_heads, BLOCK_TOKENS, d), &Device::Cpu).unwrap();
    let k = k.to_dtype(DType::BF16).unwrap().to_device(&device()).unwrap();
    let maps: PerHead<Mlp> =
        (0..kv_heads).map(|_| perceptron(&mut numbers, &[d, 512, 512, codes::BITS], Activation::Silu)).collect();
    // So many that the nearest are close to one another.
    let centroids: PerHead<Centroids> = (0..kv_heads)
        .map(|_| Centroids::new(&(0..4096 * d).map(|_| numbers.normal()).collect::<Vec<_>>(), d).unwrap())
        .collect();
    let one = Part { block: 0, rows: 17..18, start: 0 };
    let prompt = (1..blocks).map(|block| Part { block: block as u32, rows: 0..BLOCK_TOKENS, start: 64 * block });
    let end = Part { block: 39, rows: 0..31, start: 64 * 39 };
    let beside: Vec<Part> = prompt.take(38).chain([end]).chain([one.clone()]).collect();
    let taken = |parts: &[Part]| {
        let shape = |dtype| taper_kernels::kv::zeros((blocks, kv_heads, BLOCK_TOKENS, 1), dtype, &device()).unwrap();
        let (bits, ids) = (shape(DType::U32), shape(DType::I16));
        codes::extend(&bits, &k, parts, &maps).unwrap();
        clusters::extend(&ids, &k, parts, &centroids, None).unwrap();
        let of = |t: &Tensor| t.narrow(0, 0, 1).unwrap().flatten_all().unwrap();
        (of(&bits).to_vec1::<u32>().unwrap(), of(&ids).to_vec1::<i16>().unwrap())
    };
    let (alone, among) = (taken(&[one]), taken(&beside));
    assert!(alone.0.iter().any(|&bits| bits != 0) && alone == among);
}

#[test]
fn what_does_not_fit_is_an_error() {
    let mut numbers = Numbers(93);
    let maps: PerHead<Mlp> = (0..3).map(|_| perceptron(&mut numbers, &[64, 8], Activation::Relu)).collect();
    let x = rows(&mut numbers, (2, 4, 64)).to_device(&device()).unwrap();
    let error = mlp::per_head(&maps, &x, None).unwrap_err().to_string();
    assert!(error.contains("per_head") && error.contains("3 perceptrons"), "{error}");
    let other: PerHead<Mlp> =
        [8, 9].into_iter().map(|width| perceptron(&mut numbers, &[64, width], Activation::Relu)).collect();
    let error = mlp::per_head(&other, &x.to_dtype(DType::BF16).unwrap(), None).unwrap_err().to_string();
    assert!(error.contains("perceptrons of one shape"), "{error}");
}

#[test]
fn rows_of_a_table_are_gathered_and_none_is_zeros() {
    let mut numbers = Numbers(94);
    for (dtype, count, width) in [(DType::BF16, 700, 96), (DType::F16, 65, 2), (DType::F32, 3, 576)] {
        let table = numbers.tensor(&[count, width], dtype).to_dtype(dtype).unwrap();
        let mut wanted = vec![count as u32 - 1, 0, u32::MAX, 0];
        wanted.extend((0..300).map(|i| i * 7 % count as u32));
        let there =
            gather(&table.to_device(&device()).unwrap(), &Tensor::new(&wanted[..], &device()).unwrap()).unwrap();
        assert_eq!((there.dims(), there.dtype()), (&[wanted.len(), width][..], DType::F32));
        let there = there.to_vec2::<f32>().unwrap();
        let table = table.to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
        for (&number, row) in wanted.iter().zip(there) {
            assert_eq!(row, table.get(number as usize).cloned().unwrap_or(vec![0.0; width]), "{dtype:?}, row {number}");
        }
    }
}
