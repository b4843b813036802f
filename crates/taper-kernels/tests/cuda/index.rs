//! Indices beside the cache.

use crate::cache::{Caches, GRID, Numbers, Queries, by_key, device, elements, every_group, u32s};
use candle_core::{DType, Device, Tensor};
use taper_kernels::cuda::index::{Metadata, Span, Tokens, agreement, codes, extend};
use taper_kernels::index::{Part, bounds, labels};
use taper_kernels::kv::BLOCK_TOKENS;

const LENS: [usize; 3] = [1, 130, 700];

/// All of the cache as parts for the CPU's indices, and as spans for the device's.
fn everything(caches: &Caches) -> (Vec<Part>, Vec<Span>) {
    let parts = caches.tables.iter().zip(&caches.lens).flat_map(|(table, &n)| {
        table.iter().enumerate().map(move |(i, &block)| {
            let start = i * BLOCK_TOKENS;
            Part { block, rows: 0..BLOCK_TOKENS.min(n - start), start }
        })
    });
    let spans = caches.lens.iter().zip(0..).map(|(&n, table)| Span { table, tokens: (0, n as u32) });
    (parts.collect(), spans.collect())
}

#[test]
fn bounds_and_channels_are_those_of_the_cpu() {
    let mut numbers = Numbers(51);
    for (dtype, d, kv_heads, _) in GRID {
        let caches = Caches::new(&mut numbers, &LENS, kv_heads, d, dtype, 0.0);
        let (parts, spans) = everything(&caches);
        let blocks = caches.cpu.0.dim(0).unwrap();
        let (pages, wide) = bounds::shape(BLOCK_TOKENS, d);
        let zeros = |shape: &[usize], device: &Device| Tensor::zeros(shape, dtype, device).unwrap();
        let index = zeros(&[blocks, kv_heads, pages, wide], &Device::Cpu);
        bounds::extend(&index, &caches.cpu.0, &parts).unwrap();
        let width = 16;
        let channels: Vec<Vec<u32>> =
            (0..kv_heads).map(|h| (0..width).map(|i| (3 * i + h as u32) % d as u32).collect()).collect();
        let label = zeros(&[blocks, kv_heads, BLOCK_TOKENS, width as usize], &Device::Cpu);
        labels::extend(&label, &caches.cpu.0, &parts, &channels).unwrap();

        let on = device();
        let cuda_index = zeros(&[blocks, kv_heads, pages, wide], &on);
        let cuda_label = zeros(&[blocks, kv_heads, BLOCK_TOKENS, width as usize], &on);
        let which = Tensor::from_vec(channels.concat(), (kv_heads, width as usize), &on).unwrap();
        let to = Metadata { pages: Some(&cuda_index), labels: Some((&cuda_label, &which)), ..Metadata::default() };
        // In two steps, the second within a block.
        let tables = caches.device_tables();
        let cut = |s: &Span| (s.tokens.1 / 2).max(1);
        let first: Vec<Span> = spans.iter().map(|s| Span { tokens: (0, cut(s)), ..*s }).collect();
        extend(&caches.cuda.0, &tables, &first, 0, &to).unwrap();
        let second = spans.iter().filter(|s| cut(s) < s.tokens.1).map(|s| Span { tokens: (cut(s), s.tokens.1), ..*s });
        extend(&caches.cuda.0, &tables, &second.collect::<Vec<_>>(), 1, &to).unwrap();

        assert_eq!(elements(&cuda_index), elements(&index), "bounds {dtype:?} {d}");
        let (expected, got) = (elements(&by_key(&label)), elements(&cuda_label));
        for part in &parts {
            for head in 0..kv_heads {
                let at = (part.block as usize * kv_heads + head) * BLOCK_TOKENS * width as usize;
                let n = part.rows.len() * width as usize;
                assert_eq!(got[at..at + n], expected[at..at + n], "labels {dtype:?} {d}");
            }
        }
        let empty = [Span { table: 0, tokens: (3, 3) }];
        let error = extend(&caches.cuda.0, &tables, &empty, 3, &Metadata::default()).unwrap_err();
        assert!(error.to_string().starts_with("index-extend: spans"), "{error}");
    }
}

/// Where each token of all sequences stands, on the device.
fn places(caches: &Caches) -> (Tensor, Tensor, Vec<(usize, usize)>) {
    let tokens: Vec<(usize, usize)> =
        caches.lens.iter().enumerate().flat_map(|(s, &n)| (0..n).map(move |p| (s, p))).collect();
    let positions = u32s(tokens.iter().map(|t| t.1 as u32).collect());
    (positions, u32s(tokens.iter().map(|t| t.0 as u32).collect()), tokens)
}

#[test]
fn codes_are_the_signs_and_their_distances_are_counted() {
    let mut numbers = Numbers(52);
    for (dtype, d, kv_heads, group) in every_group() {
        let caches = Caches::new(&mut numbers, &LENS, kv_heads, d, dtype, 0.0);
        let queries = Queries::new(&mut numbers, &caches, group);
        let (positions, tables_of, tokens) = places(&caches);
        let x = numbers.tensor(&[tokens.len(), kv_heads, 32], dtype);
        let blocks = caches.cuda.0.dim(0).unwrap();
        let index = Tensor::zeros((blocks, kv_heads, BLOCK_TOKENS, 1), DType::U32, &device()).unwrap();
        let tables = caches.device_tables();
        let at = Tokens { positions: &positions, tables_of: &tables_of, tables: &tables };
        codes(&x.to_device(&device()).unwrap().to_dtype(dtype).unwrap(), &at, &index).unwrap();
        let of = |line: &[f32]| line.iter().enumerate().fold(0u32, |code, (i, &x)| code | u32::from(x >= 0.0) << i);
        let x: Vec<Vec<Vec<f32>>> = x.to_vec3().unwrap();
        let q: Vec<u32> = (0..LENS.len() * kv_heads * group).map(|_| numbers.next() as u32).collect();
        let on_device = Tensor::from_slice(&q, (LENS.len(), kv_heads * group, 1), &device()).unwrap();
        let batch = queries.batch(&caches);
        let found = agreement(&batch, &on_device, &index).unwrap();
        let equal: Vec<Vec<Vec<f32>>> = found.to_vec3().unwrap();
        for (x, &(row, position)) in x.iter().zip(&tokens) {
            for (head, line) in x.iter().enumerate() {
                let same = |g: usize| 32 - 2 * (of(line) ^ q[(row * kv_heads + head) * group + g]).count_ones() as i32;
                let expected: i32 = (0..group).map(same).sum();
                assert_eq!(equal[row][head][position], expected as f32, "{dtype:?} {kv_heads}x{group}");
            }
        }
    }
}
