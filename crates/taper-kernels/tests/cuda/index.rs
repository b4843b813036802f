//! Indices beside the cache.

use crate::cache::{
    Caches, GRID, LIMIT, Numbers, Queries, below, by_key, device, elements, every_group, furthest, relative,
    relative_of, u32s,
};
use candle_core::{DType, Device, Tensor};
use taper_kernels::cuda::index::{
    Choice, Classified, Metadata, Span, Tokens, agreement, assign, attend_classified, choose, codes, extend, invert,
    linear,
};
use taper_kernels::cuda::{Plan, Scratch};
use taper_kernels::decode::HeadSelection;
use taper_kernels::index::{Part, bounds, clusters, labels};
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

#[test]
fn clusters_and_lists_of_them_are_those_of_the_cpu() {
    let mut numbers = Numbers(53);
    let on = device();
    for (dtype, d, kv_heads, group) in every_group() {
        let caches = Caches::new(&mut numbers, &LENS, kv_heads, d, dtype, 0.0);
        let queries = Queries::new(&mut numbers, &caches, group);
        let (positions, tables_of, tokens) = places(&caches);
        let (blocks, count) = (caches.cuda.0.dim(0).unwrap(), 64);
        let keys = numbers.tensor(&[tokens.len(), kv_heads, d], dtype);
        let centroids = numbers.tensor(&[kv_heads, count, d], dtype);
        let index = Tensor::zeros((blocks, kv_heads, BLOCK_TOKENS), DType::I16, &on).unwrap();
        let tables = caches.device_tables();
        let at = Tokens { positions: &positions, tables_of: &tables_of, tables: &tables };
        let there = |t: &Tensor| t.to_device(&on).unwrap().to_dtype(dtype).unwrap();
        assign(&there(&keys), &there(&centroids), &at, &index).unwrap();
        let got = index.to_device(&Device::Cpu).unwrap();
        let ids = got.flatten_all().unwrap().to_vec1::<i16>().unwrap();
        let rows: Vec<Vec<Vec<f32>>> = keys.to_vec3().unwrap();
        for head in 0..kv_heads {
            let own = centroids.get(head).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let centroids = clusters::Centroids::new(&own, d).unwrap();
            let flat: Vec<f32> = rows.iter().flat_map(|row| row[head].clone()).collect();
            let scores = centroids.scores(&flat);
            for ((line, best), &(s, p)) in scores.chunks_exact(count).zip(centroids.assign(&flat)).zip(&tokens) {
                let slot =
                    (caches.tables[s][p / BLOCK_TOKENS] as usize * kv_heads + head) * BLOCK_TOKENS + p % BLOCK_TOKENS;
                let id = ids[slot] as u16;
                // Products that differ by rounding alone may change places.
                assert!(id == best || line[best as usize] - line[id as usize] < 1e-3, "{id} for {best}");
            }
        }

        // The lists, by the device's own clusters; the CPU's index has a fourth dimension.
        let on_cpu = got.reshape((blocks, kv_heads, BLOCK_TOKENS, 1)).unwrap();
        let long = [1usize, 2];
        let (sink, window, take) = (1u32, 20, 9);
        let spans: Vec<Span> =
            long.iter().map(|&s| Span { table: s as u32, tokens: (sink, (LENS[s] - window) as u32) }).collect();
        let inverted = invert(&index, &tables, &spans, count).unwrap();
        let logits = numbers.tensor(&[2, kv_heads * group, count], DType::F32);
        let (q, lens) = (queries.cuda.narrow(0, 1, 2).unwrap(), u32s(long.map(|s| LENS[s] as u32).to_vec()));
        let (kv, own) = (caches.on_cuda(), tables.index_select(&u32s(vec![1, 2]), 0).unwrap());
        let batch = taper_kernels::cuda::Batch { q: &q, kv, tables: &own, lens: &lens, max_len: LENS[2] };
        let of = Choice {
            logits: &logits.to_device(&on).unwrap(),
            take,
            sink: sink as usize,
            indexed: &u32s(spans.iter().map(|s| s.tokens.1).collect()),
            capacity: 700,
        };
        let read = choose(&batch, &of, &inverted).unwrap().read_back().unwrap();

        // The launch that chooses and attends, by the same lists; classified by random layers.
        let random = |numbers: &mut Numbers, shape: &[usize]| there(&(numbers.tensor(shape, dtype) * 0.2).unwrap());
        let plain = random(&mut numbers, &[2, kv_heads * group, d]);
        let layer = |numbers: &mut Numbers, outputs: usize, inputs: usize| {
            let bias = numbers.tensor(&[kv_heads, outputs], DType::F32).to_device(&on).unwrap();
            (random(numbers, &[kv_heads, outputs, inputs]), bias)
        };
        let (hidden, last) = (layer(&mut numbers, 128, d), layer(&mut numbers, count, 128));
        let classified = Classified {
            plain: &plain,
            hidden: (&hidden.0, &hidden.1),
            logits: (&last.0, &last.1),
            take,
            sink: sink as usize,
            indexed: of.indexed,
        };
        let scratch = Scratch::new(&q, 2, kv_heads * group, kv_heads).unwrap();
        let found = linear(&linear(&plain, &hidden.0, &hidden.1, true).unwrap(), &last.0, &last.1, false).unwrap();
        let lists = choose(&batch, &Choice { logits: &found, ..of }, &inverted).unwrap();
        let (want, want_lse) = Plan::new(lists, &batch).unwrap().attend(&batch, None, DType::F32).unwrap();
        for _ in 0..3 {
            let (out, lse) = attend_classified(&batch, &classified, &inverted, &scratch).unwrap();
            below(relative(&out, &want), LIMIT, "clusters chosen by the attention");
            below(furthest(&lse, &want_lse), LIMIT, "clusters chosen by the attention, lse");
        }
        let logits = logits.to_device(&candle_core::Device::Cpu).unwrap();
        let all_rows = caches.rows();
        let cpu_q = queries.cpu.narrow(0, 1, 2).unwrap();
        let decode = taper_kernels::decode::Decode { q: &cpu_q, kv: caches.on_cpu(), rows: &all_rows[1..] };
        let probes = clusters::Probes::Clusters(take, usize::MAX);
        let cpu = clusters::select(&decode, &on_cpu, &logits, (sink as usize, window), probes).unwrap();
        for (i, (head, read)) in cpu.heads().unwrap().iter().zip(&read).enumerate() {
            let HeadSelection::Keys(keys) = head else { panic!("dense") };
            let ranges = keys.ranges.iter().flat_map(|r| r.start as u32..r.end as u32);
            let mut expected: Vec<u32> = ranges.chain(keys.ids.iter().copied()).collect();
            expected.sort_unstable();
            assert_eq!(read, &expected, "{dtype:?} list {i}");
        }
    }
}

#[test]
fn a_perceptrons_layer_agrees_with_f64() {
    let mut numbers = Numbers(54);
    let on = device();
    for (dtype, _, kv_heads, group) in every_group() {
        for (inputs, outputs) in [(64, 64), (128, 1024), (512, 64)] {
            let x = numbers.tensor(&[3, kv_heads * group, inputs], dtype);
            let weight = numbers.tensor(&[kv_heads, outputs, inputs], dtype);
            let bias = numbers.tensor(&[kv_heads, outputs], DType::F32);
            let there = |t: &Tensor| t.to_device(&on).unwrap().to_dtype(dtype).unwrap();
            let bias_there = bias.to_device(&on).unwrap();
            let (x64, w64, b64) = (elements(&x), elements(&weight), elements(&bias));
            let of = |i: usize| -> f64 {
                let (line, o) = (i / outputs, i % outputs);
                let head = line % (kv_heads * group) / group;
                let row = &w64[(head * outputs + o) * inputs..][..inputs];
                x64[line * inputs..][..inputs].iter().zip(row).map(|(a, b)| a * b).sum::<f64>()
                    + b64[head * outputs + o]
            };
            let expected: Vec<f64> = (0..3 * kv_heads * group * outputs).map(of).collect();
            for relu in [false, true] {
                let expected: Vec<f64> = expected.iter().map(|&y| if relu { y.max(0.0) } else { y }).collect();
                let out = linear(&there(&x), &there(&weight), &bias_there, relu).unwrap();
                below(relative_of(&elements(&out), &expected), if relu { LIMIT } else { 1e-5 }, "linear");
            }
        }
    }
}
