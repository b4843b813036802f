//! What prefill methods choose on the device: stripes by the heaviest sums, blocks by their means, and attention by both.

use crate::cache::{Caches, GRID, LIMIT, Numbers, below, device, furthest, relative};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use taper_kernels::kv::BLOCK_TOKENS;
use taper_kernels::prefill::stripes::{Counts, Stripes, by_count};
use taper_kernels::prefill::{Blocks, HeadReads, Mask, Reads, Rows, Selection, Sums, pooled, prefill, query_blocks};

/// Attention of rows of sequence 0 by what was chosen on either side.
pub fn compare(caches: &Caches, q: &Tensor, positions: &[u32], (cpu, cuda): (Reads, Reads), what: &str) {
    let (table, window) = (&caches.tables[0][..], None);
    let rows = Rows { q, kv: caches.on_cpu(), table, positions, window };
    let (out, lse) = prefill(&rows, cpu).unwrap();
    let q = q.to_device(&device()).unwrap();
    let (out_cuda, lse_cuda) = prefill(&Rows { q: &q, kv: caches.on_cuda(), ..rows }, cuda).unwrap();
    below(relative(&out_cuda, &out), LIMIT, what);
    below(furthest(&lse_cuda, &lse), LIMIT, what);
}

/// Blocks of each run that a head reads, wherever they are.
fn blocks_of(reads: &HeadReads) -> Vec<Vec<u32>> {
    match reads.blocks.as_ref().unwrap() {
        Blocks::Device { lists, list, before } => {
            let lists = lists.blocks.read_back().unwrap();
            (0..before.len()).map(|run| lists[*list].get(run).to_vec()).collect()
        }
        Blocks::Listed(lists) => (0..lists.len()).map(|run| lists.get(run).to_vec()).collect(),
        Blocks::Striped { .. } => panic!("stripes"),
    }
}

#[test]
fn the_best_blocks_by_means_are_those_of_the_cpu() {
    let mut numbers = Numbers(71);
    for (dtype, d, kv_heads, group) in GRID {
        // The first run has 16 rows and the last 32: with whole numbers all means and products are exact.
        let (start, n, q_heads) = (48usize, 1_504usize, kv_heads * group);
        let caches = Caches::new(&mut numbers, &[n, 100], kv_heads, d, dtype, 0.0).whole_keys(&mut numbers);
        let positions: Vec<u32> = (start as u32..n as u32).collect();
        let q = numbers.whole(&[positions.len(), q_heads, d]);
        let runs = query_blocks(start..n, BLOCK_TOKENS);
        for window in [None, Some(500)] {
            for heads in
                [vec![(q_heads - 1, 5)], (0..q_heads).rev().map(|head| (head, [1, 2, 7, 100][head % 4])).collect()]
            {
                let (table, what) =
                    (&caches.tables[0][..], format!("{dtype:?} {d} {kv_heads}x{group} within {window:?}"));
                let rows = Rows { q: &q, kv: caches.on_cpu(), table, positions: &positions, window };
                let (cpu, products) = pooled(&rows, &runs, &heads).unwrap();
                let on = q.to_device(&device()).unwrap();
                let rows = Rows { q: &on, kv: caches.on_cuda(), ..rows };
                let (cuda, cuda_products) = pooled(&rows, &runs, &heads).unwrap();
                assert_eq!(products, cuda_products, "{what}");
                for ((cpu, cuda), head) in cpu.iter().zip(&cuda).zip(&heads) {
                    assert_eq!(blocks_of(cpu), blocks_of(cuda), "{what}, {head:?}");
                }
                let counts = |reads| Selection::new(runs.clone(), reads).unwrap().counts(&positions, window);
                assert_eq!(counts(cpu), counts(cuda), "{what}");
            }
        }
    }
}

#[test]
fn heaviest_columns_and_diagonals_are_those_of_the_cpu() {
    let mut numbers = Numbers(72);
    for n in [40, 700, 20_000] {
        let heads = 6;
        // Few different values, so that there are ties.
        let mut masses = || {
            let mass: Vec<f32> = (0..heads * n).map(|_| numbers.below(300) as f32 / 64.0).collect();
            Tensor::from_vec(mass, (heads, n), &Device::Cpu).unwrap()
        };
        let (columns, diagonals) = (masses(), masses());
        let lse = Tensor::zeros((1, heads), DType::F32, &Device::Cpu).unwrap();
        let cpu = Sums { columns, diagonals, lse };
        let there = |t: &Tensor| t.to_device(&device()).unwrap();
        let cuda = Sums { columns: there(&cpu.columns), diagonals: there(&cpu.diagonals), lse: there(&cpu.lse) };
        let of = |columns, slashes| Counts { columns, slashes, forced_columns: 30, forced_slashes: 100 };
        let wanted = [(5, of(1, 1)), (0, of(1000, 6000)), (3, of(50, 130)), (4, of(30_000, 30_000))];
        assert_eq!(by_count(&cuda, &wanted).unwrap(), by_count(&cpu, &wanted).unwrap(), "{n}");
        assert!(by_count(&cuda, &[(6, of(1, 1))]).is_err());
    }
}

/// Stripes with distances that come alone and single tokens, some of which lie in blocks that are read.
fn stripes(numbers: &mut Numbers, n: usize, runs: &[Range<usize>], tokens: bool) -> HeadReads {
    let blocks = n.div_ceil(BLOCK_TOKENS);
    Stripes {
        blocks: numbers.some(blocks, 5),
        tokens: if tokens { numbers.some(n, 9) } else { Vec::new() },
        distances: numbers.some(blocks, 4),
        block_tokens: BLOCK_TOKENS,
    }
    .reads(runs)
}

#[test]
fn heads_of_every_kind_beside_each_other_agree_with_the_cpu() {
    let mut numbers = Numbers(73);
    for (at, (dtype, d, kv_heads, group)) in GRID.into_iter().enumerate() {
        let (start, n, q_heads) = (37usize, 1_500usize, kv_heads * group);
        let caches = Caches::new(&mut numbers, &[n, 70], kv_heads, d, dtype, 0.0);
        let all: Vec<u32> = (start as u32..n as u32).collect();
        let queries = numbers.tensor(&[all.len(), q_heads, d], dtype);
        let runs = query_blocks(start..n, BLOCK_TOKENS);
        // Lists for each KV head, whose query heads are worked on in pairs where they can be, and for each query head.
        for lists in [kv_heads, q_heads] {
            let rows = Rows {
                q: &queries.to_device(&device()).unwrap(),
                kv: caches.on_cuda(),
                table: &caches.tables[0],
                positions: &all,
                window: None,
            };
            let (pools, _) =
                pooled(&rows, &runs, &(0..lists).map(|list| (list, 3 + list)).collect::<Vec<_>>()).unwrap();
            let masks = [Mask::SinkWindow { sink: 70, window: 300 }, Mask::SinkWindow { sink: 3, window: 64 }];
            let (mut on_cpu, mut on_cuda) = (Vec::new(), Vec::new());
            for (list, pool) in pools.into_iter().enumerate() {
                let reads = match (list + at) % 6 {
                    0 => masks[list % 2].into(),
                    1 => stripes(&mut numbers, n, &runs, true),
                    2 => stripes(&mut numbers, n, &runs, false),
                    3 => Mask::Causal.into(),
                    4 => HeadReads::blocks(runs.iter().map(|_| numbers.some(n / BLOCK_TOKENS, 3)).collect()),
                    _ => {
                        on_cpu.push(HeadReads::blocks(blocks_of(&pool).into_iter().collect()));
                        on_cuda.push(pool);
                        continue;
                    }
                };
                on_cpu.push(reads.clone());
                on_cuda.push(reads);
            }
            let of = |reads| Selection::new(runs.clone(), reads).unwrap();
            let (cpu, cuda) = (of(on_cpu), of(on_cuda));
            assert_eq!(cpu.counts(&all, None), cuda.counts(&all, None));
            for positions in [&all[..], &all[27..411], &all[1000..1005]] {
                let q = queries.narrow(0, positions[0] as usize - start, positions.len()).unwrap();
                let what = format!("{dtype:?} {d} {kv_heads}x{group}, {lists} lists, rows {positions:?}");
                compare(&caches, &q, positions, ((&cpu).into(), (&cuda).into()), &what);
            }
        }
    }
}
