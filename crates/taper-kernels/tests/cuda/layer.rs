//! Writing to the cache, rotation, normalisation, activation.

use crate::cache::{Caches, GRID, LIMIT, Numbers, below, device, elements, furthest, relative, relative_of};
use candle_core::{DType, Device, Tensor};
use taper_kernels::cuda::{
    AfterAttention, Inputs, after_attention, after_attention_at_once, angles, norm_f32, product, product_add,
    product_gated, product_into, silu_mul,
};
use taper_kernels::kv::{self, BLOCK_TOKENS};

/// Bits of a pool: NaN equals itself.
fn bits(t: &Tensor) -> Vec<u64> {
    elements(t).into_iter().map(|x| if x.is_nan() { f64::NAN } else { x }.to_bits()).collect()
}

#[test]
fn pools_hold_the_same_bits_as_on_the_cpu() {
    let mut numbers = Numbers(1);
    for (dtype, d, kv_heads, _) in GRID {
        let caches = Caches::new(&mut numbers, &[1, 200, 64], kv_heads, d, dtype, 0.0);
        kv::copy_block(&caches.cpu.0, caches.tables[1][0], caches.tables[1][2]).unwrap();
        kv::copy_block(&caches.cuda.0, caches.tables[1][0], caches.tables[1][2]).unwrap();
        assert_eq!(bits(&caches.cpu.0), bits(&caches.cuda.0), "{dtype:?} {d}");
        assert_eq!(bits(&caches.cpu.1), bits(&caches.cuda.1), "{dtype:?} {d}");
        // Rows that are not of the pool's dtype, and slots beyond it, are errors as on the CPU.
        let rows = Tensor::zeros((1, kv_heads, d), DType::U32, &device()).unwrap();
        assert!(kv::append(&caches.cuda.0, &rows, &[0]).unwrap_err().to_string().contains("kv-append: rows"));
        let rows = Tensor::zeros((1, kv_heads, d), DType::F32, &device()).unwrap();
        assert!(kv::append(&caches.cuda.0, &rows, &[u32::MAX]).is_err());
    }
}

#[test]
fn normalisation_and_activation_agree_with_f64() {
    let mut numbers = Numbers(3);
    let device = device();
    for dtype in [DType::BF16, DType::F16] {
        for (rows, width) in [(1, 64), (3, 2048), (200, 4096), (2, 14336)] {
            let on = |t: &Tensor| t.to_dtype(dtype).unwrap().to_device(&device).unwrap();
            let (x, weight) = (numbers.tensor(&[rows, width], DType::F32), numbers.tensor(&[width], DType::F32));
            let (on_x, on_weight) = (x.to_device(&device).unwrap(), weight.to_device(&device).unwrap());
            let out = norm_f32(&on_x, &on_weight, 1e-5, dtype).unwrap();
            assert_eq!(out.dtype(), dtype);
            let (given, scale) = (elements(&x), elements(&weight));
            let normal = given.chunks_exact(width).flat_map(|line| {
                let mean = line.iter().map(|x| x * x).sum::<f64>() / width as f64;
                line.iter().zip(&scale).map(move |(x, w)| x / (mean + 1e-5).sqrt() * w)
            });
            let what = format!("{dtype:?} {rows} x {width}");
            below(relative_of(&elements(&out), &normal.collect::<Vec<_>>()), LIMIT, &what);

            let both = numbers.tensor(&[rows, 2 * width], dtype);
            let expected: Vec<f64> = elements(&both)
                .chunks_exact(2 * width)
                .flat_map(|line| {
                    (0..width).map(|i| line[i] / (1.0 + (-line[i]).exp()) * line[width + i]).collect::<Vec<_>>()
                })
                .collect();
            below(relative_of(&elements(&silu_mul(&on(&both)).unwrap()), &expected), LIMIT, &what);
        }
    }
    let odd = Tensor::zeros((2, 12), DType::BF16, &device).unwrap();
    assert!(silu_mul(&odd).unwrap_err().to_string().starts_with("silu_mul: gate_up"));
    assert!(silu_mul(&odd.to_device(&Device::Cpu).unwrap()).is_err());
}

#[test]
fn products_agree_with_f64_and_a_row_does_not_depend_on_the_others() {
    let mut numbers = Numbers(4);
    let device = device();
    for dtype in [DType::BF16, DType::F16] {
        // Few rows and many; widths of less than a warp's pieces, of a small model and of a large one's feed-forward layer.
        // The first two take the 48 KB of shared memory that nobody has to ask for, beside what the kernel declares.
        for (rows, inputs, outputs) in [
            (3, 8192, 64),
            (2, 12288, 64),
            (1, 64, 16),
            (1, 14336, 64),
            (2, 576, 960),
            (2, 4096, 320),
            (3, 576, 3072),
            (33, 576, 1536),
            (1100, 4104, 16),
            (5, 9000, 32),
        ] {
            let what = format!("{dtype:?} {rows} x {inputs} -> {outputs}");
            let on = |t: &Tensor| t.to_device(&device).unwrap();
            let (x, weight) = (numbers.tensor(&[rows, inputs], dtype), numbers.tensor(&[outputs, inputs], dtype));
            let (x, weight) = (x, weight.affine(1.0 / (inputs as f64).sqrt(), 0.0).unwrap().to_dtype(dtype).unwrap());
            let scale = numbers.tensor(&[inputs], DType::F32);
            let (on_x, on_weight, on_scale) = (on(&x), on(&weight), on(&scale));
            let (given, scale) = (elements(&weight), elements(&scale));
            let times = |x: &[f64]| -> Vec<f64> {
                let dot = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
                x.chunks_exact(inputs).flat_map(|x| given.chunks_exact(inputs).map(move |w| dot(x, w))).collect()
            };
            let plain = times(&elements(&x));
            let normal: Vec<f64> = elements(&x)
                .chunks_exact(inputs)
                .flat_map(|line| {
                    let mean = line.iter().map(|x| x * x).sum::<f64>() / inputs as f64;
                    line.iter().zip(&scale).map(move |(x, w)| x / (mean + 1e-5).sqrt() * w)
                })
                .collect();
            let normal = times(&normal);
            // Activations in f32 and in the weight's type.
            let same = on_x.to_dtype(dtype).unwrap();
            let (alone, normed) = (Inputs { x: &same, norm: None }, Inputs { x: &on_x, norm: Some((&on_scale, 1e-5)) });

            let out = product(alone, &on_weight, DType::F32).unwrap();
            below(relative_of(&elements(&out), &plain), LIMIT, &what);
            let rounded = product(normed, &on_weight, dtype).unwrap();
            assert_eq!(rounded.dtype(), dtype);
            below(relative_of(&elements(&rounded), &normal), LIMIT, &what);
            // Rounded on the way.
            let unrounded = product(Inputs { x: &on_x, norm: None }, &on_weight, DType::F32).unwrap();
            assert_eq!(bits(&unrounded), bits(&out), "{what}");
            if rows <= 2 {
                let last = on_x.narrow(0, rows - 1, 1).unwrap();
                let last = product(Inputs { x: &last, norm: None }, &on_weight, DType::F32).unwrap();
                assert_eq!(bits(&last), bits(&out.narrow(0, rows - 1, 1).unwrap()), "{what}");
            }

            let before = numbers.tensor(&[rows, outputs], DType::F32);
            let sum = on(&before);
            product_add(normed, &on_weight, &sum).unwrap();
            let both: Vec<f64> = elements(&before).iter().zip(&normal).map(|(a, b)| a + b).collect();
            below(relative_of(&elements(&sum), &both), LIMIT, &what);

            let gated: Vec<f64> = plain
                .chunks_exact(outputs)
                .flat_map(|line| {
                    let (gate, up) = line.split_at(outputs / 2);
                    gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                })
                .collect();
            below(relative_of(&elements(&product_gated(alone, &on_weight).unwrap()), &gated), LIMIT, &what);
        }
    }
    let odd = Tensor::zeros((2, 12), DType::BF16, &device).unwrap();
    let error = product(Inputs { x: &odd, norm: None }, &odd, DType::F32).unwrap_err();
    assert!(error.to_string().contains("weight is [2, 12]"), "{error}");
}

#[test]
fn what_stands_between_two_attentions_is_what_its_products_give_one_by_one() {
    let mut numbers = Numbers(6);
    let device = device();
    for dtype in [DType::BF16, DType::F16] {
        // Less than a warp's pieces, a small model, a large one's feed-forward layer, a residual stream that a thread block
        // reads twice, and what has no launch for all four.
        for (rows, heads, hidden, inner, qkv) in [
            (1, 64, 64, 40, 16),
            (1, 576, 576, 1536, 960),
            (2, 576, 576, 1536, 960),
            (1, 512, 2048, 5632, 768),
            (1, 512, 512, 14336, 768),
            (1, 64, 9000, 48, 24),
            (1, 256, 64, 16400, 8),
        ] {
            let fits = rows == 1 && inner <= 16384;
            let what = format!("{dtype:?} {rows} x {heads}, {hidden}, {inner}, {qkv}");
            let mut weight = |outputs: usize, inputs: usize| {
                let x = numbers.tensor(&[outputs, inputs], DType::F32).affine(1.0 / (inputs as f64).sqrt(), 0.0);
                x.unwrap().to_dtype(dtype).unwrap().to_device(&device).unwrap()
            };
            let (output, gate_up, down) = (weight(hidden, heads), weight(2 * inner, hidden), weight(hidden, inner));
            let joint = weight(qkv, hidden);
            let mut f32s = |shape: &[usize]| numbers.tensor(shape, DType::F32).to_device(&device).unwrap();
            let (first, second, start) = (f32s(&[hidden]), f32s(&[hidden]), f32s(&[rows, hidden]));
            let attended = f32s(&[rows, heads]);
            for attended in [attended.clone(), attended.to_dtype(dtype).unwrap()] {
                let x = start.copy().unwrap();
                product_add(Inputs { x: &attended, norm: None }, &output, &x).unwrap();
                let gated = product_gated(Inputs { x: &x, norm: Some((&first, 1e-5)) }, &gate_up).unwrap();
                product_add(Inputs { x: &gated, norm: None }, &down, &x).unwrap();
                let qkv_out = Tensor::zeros((rows, qkv), dtype, &device).unwrap();
                product_into(Inputs { x: &x, norm: Some((&second, 1e-5)) }, &joint, &qkv_out).unwrap();
                let of = AfterAttention {
                    output: &output,
                    norm: (&first, 1e-5),
                    gate_up: &gate_up,
                    down: &down,
                    next: None,
                };
                assert!(fits || after_attention_at_once(&attended, &start, &of).is_err(), "{what}");
                // Over and over: a launch leaves its counters as it found them.
                for round in 0..20 {
                    let (y, out) = (start.copy().unwrap(), Tensor::zeros((rows, qkv), dtype, &device).unwrap());
                    let next = (round % 3 > 0).then_some(((&second, 1e-5), &joint, &out));
                    let of = AfterAttention { next, ..of };
                    if fits && round % 2 == 0 {
                        after_attention_at_once(&attended, &y, &of).unwrap();
                    } else {
                        after_attention(&attended, &y, &of).unwrap();
                    }
                    assert_eq!(bits(&y), bits(&x), "{what}, round {round}");
                    if next.is_some() {
                        assert_eq!(bits(&out), bits(&qkv_out), "{what}, round {round}");
                    }
                }
            }
        }
    }
}

#[test]
fn joint_projections_are_rotated_and_stored_as_the_cpu_does_it_one_by_one() {
    let mut numbers = Numbers(5);
    let device = device();
    for (cache, d, kv_heads, group) in GRID {
        // Projections of the cache's type, and of the other.
        for from in [DType::BF16, DType::F16] {
            let (q_heads, tokens) = (kv_heads * group, 70);
            let caches = Caches::new(&mut numbers, &[tokens], kv_heads, d, cache, 0.0);
            let x = numbers.tensor(&[tokens, q_heads + 2 * kv_heads, d], from);
            let angle = |t: usize, i: usize| (3 * t) as f64 * 10000f64.powf(-2.0 * i as f64 / d as f64);
            let part = |of: fn(f64) -> f64, t: usize| (0..d / 2).map(move |i| of(angle(t, i)) as f32);
            let angles: Vec<f32> = (0..tokens).flat_map(|t| part(f64::cos, t).chain(part(f64::sin, t))).collect();
            let slots: Vec<u32> =
                (0..tokens).map(|t| caches.tables[0][t / BLOCK_TOKENS] * 64 + (t % BLOCK_TOKENS) as u32).collect();
            let joint = x.reshape((tokens, (q_heads + 2 * kv_heads) * d)).unwrap();
            let on = |t: &Tensor, dtype| t.to_dtype(dtype).unwrap().to_device(&device).unwrap();
            let angles = Tensor::from_vec(angles, (tokens, d), &Device::Cpu).unwrap();
            let q = kv::append_joint(caches.on_cuda(), &on(&joint, from), &on(&angles, DType::F32), &slots, None);
            let q = q.unwrap().expect("an operation for 16 bits on the device");
            assert_eq!(q.dtype(), cache);
            let turned = |heads: std::ops::Range<usize>| {
                let part = x.narrow(1, heads.start, heads.len()).unwrap().to_dtype(DType::F32).unwrap();
                let (cos, sin) = (angles.narrow(1, 0, d / 2).unwrap(), angles.narrow(1, d / 2, d / 2).unwrap());
                let (cos, sin) = (cos.unsqueeze(1).unwrap(), sin.unsqueeze(1).unwrap());
                let (a, b) = (part.narrow(2, 0, d / 2).unwrap(), part.narrow(2, d / 2, d / 2).unwrap());
                let times = |x: &Tensor, y: &Tensor| x.broadcast_mul(y).unwrap();
                let first = (times(&a, &cos) - times(&b, &sin)).unwrap();
                let second = (times(&b, &cos) + times(&a, &sin)).unwrap();
                Tensor::cat(&[first, second], 2).unwrap()
            };
            let what = format!("{from:?} -> {cache:?} {d} {kv_heads}x{group}");
            below(relative(&q, &turned(0..q_heads)), LIMIT, &what);
            kv::append(&caches.cpu.0, &turned(q_heads..q_heads + kv_heads), &slots).unwrap();
            let values = x.narrow(1, q_heads + kv_heads, kv_heads).unwrap().to_dtype(DType::F32).unwrap();
            kv::append(&caches.cpu.1, &values, &slots).unwrap();
            assert_eq!(bits(&caches.cpu.1), bits(&caches.cuda.1), "{what}");
            let known = |t: &Tensor| -> Vec<f64> { elements(t).into_iter().filter(|x| !x.is_nan()).collect() };
            below(relative_of(&known(&caches.cuda.0), &known(&caches.cpu.0)), LIMIT, &what);
            assert!(
                kv::append_joint(caches.on_cuda(), &on(&joint, from), &on(&angles, DType::F32), &slots[1..], None)
                    .is_err()
            );
        }
    }
}

#[test]
fn angles_are_those_of_the_host() {
    let frequencies: Vec<f32> = (0..64).map(|i| 500_000f32.powf(-(i as f32) / 64.0)).collect();
    let positions: Vec<u32> = (0..3000).map(|i| i * 351 % 1_048_576).chain([0, 1, 1_048_575]).collect();
    for factor in [1.0, 1.25] {
        let got = angles(&positions, &frequencies, factor, &device()).unwrap();
        let host = positions.iter().flat_map(|&position| {
            let turn = |frequency: &f32| f64::from(position as f32 * frequency).sin_cos();
            let (sin, cos): (Vec<f64>, Vec<f64>) = frequencies.iter().map(turn).unzip();
            cos.into_iter().chain(sin).map(move |x| (x * f64::from(factor)) as f32)
        });
        let host = Tensor::from_iter(host, &Device::Cpu).unwrap().reshape((positions.len(), 128)).unwrap();
        below(furthest(&got, &host), 1e-6, "angles");
        // However positions are grouped.
        let some = angles(&positions[77..80], &frequencies, factor, &device()).unwrap();
        assert_eq!(furthest(&some, &got.narrow(0, 77, 3).unwrap()), 0.0);
    }
    assert!(angles(&[], &frequencies, 1.0, &device()).is_err());
}
