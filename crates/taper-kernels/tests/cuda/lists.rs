//! What prefill methods choose on the device: stripes by the heaviest sums, blocks by their means, and attention by both.

use crate::cache::{Caches, LIMIT, Numbers, below, device, every_group, furthest, relative};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use taper_kernels::cuda::{DeviceReads, RunLists, Tile, Tiles};
use taper_kernels::kv::BLOCK_TOKENS;
use taper_kernels::prefill::stripes::{Counts, Shares, Stripes, by_count, by_share};
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
        Blocks::Device { reads, list, before } => {
            let DeviceReads::Lists(lists) = &**reads else { panic!("stripes") };
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
    for (dtype, d, kv_heads, group) in every_group() {
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

/// Sums of so many heads over `n` tokens, on either side: few different values, so that there are ties, and sums are exact.
fn random_sums(numbers: &mut Numbers, heads: usize, n: usize) -> (Sums, Sums) {
    let mut masses = || {
        let mass: Vec<f32> = (0..heads * n).map(|_| numbers.below(300) as f32 / 64.0).collect();
        Tensor::from_vec(mass, (heads, n), &Device::Cpu).unwrap()
    };
    let (columns, diagonals) = (masses(), masses());
    let cpu = Sums { columns, diagonals, lse: Tensor::zeros((1, heads), DType::F32, &Device::Cpu).unwrap() };
    let there = |t: &Tensor| t.to_device(&device()).unwrap();
    let cuda = Sums { columns: there(&cpu.columns), diagonals: there(&cpu.diagonals), lse: there(&cpu.lse) };
    (cpu, cuda)
}

/// A tile of each run, of at most 128 neighbouring rows, up to the last of the cached tokens.
pub fn tiles_of(runs: &[Range<usize>]) -> Tiles {
    let (start, end) = (runs[0].start, runs[runs.len() - 1].end);
    let tile = |run: &Range<usize>| Tile {
        row: (run.start - start) as u32,
        rows: run.len() as u32,
        table: 0,
        tokens: end as u32,
        positions: (run.start as u32, run.end as u32 - 1),
    };
    let positions: Vec<u32> = (start as u32..end as u32).collect();
    let like = Tensor::zeros(1, DType::F32, &device()).unwrap();
    Tiles::new(&like, &positions, &runs.iter().map(tile).collect::<Vec<_>>()).unwrap()
}

/// Blocks and single tokens in none of them that each run reads by a device's stripes.
fn stripes_of(reads: &HeadReads, runs: &[Range<usize>]) -> Vec<(Vec<u32>, Vec<u32>)> {
    let Some(Blocks::Device { reads, list, .. }) = &reads.blocks else { panic!("chosen by the host") };
    let DeviceReads::Stripes(stripes) = &**reads else { panic!("lists") };
    let tiles = tiles_of(runs);
    let RunLists { blocks, columns } = stripes.lists(&tiles, &[*list]).unwrap();
    let (blocks, columns) = (blocks.read_back().unwrap(), columns.map(|columns| columns.read_back().unwrap()));
    let of = |run: usize| {
        let singles = columns.as_ref().map(|columns| columns[0].get(run).to_vec());
        (blocks[0].get(run).to_vec(), singles.unwrap_or_default())
    };
    (0..runs.len()).map(of).collect()
}

/// The same of stripes in host memory, for the rows `of` runs.
fn host_stripes_of(reads: &HeadReads, of: &[(usize, Range<usize>)]) -> Vec<(Vec<u32>, Vec<u32>)> {
    let one = |(run, rows): &(usize, Range<usize>)| {
        let mut blocks = reads.blocks.as_ref().unwrap().get(*run).into_owned();
        blocks.retain(|&block| (block as usize * BLOCK_TOKENS) < rows.end);
        let tokens = if reads.tokens.is_empty() { &[] } else { reads.tokens.get(0) };
        let alone = |t: &&u32| (**t as usize) < rows.end && !blocks.contains(&(**t / BLOCK_TOKENS as u32));
        let singles = tokens.iter().filter(alone).copied().collect();
        (blocks, singles)
    };
    of.iter().map(one).collect()
}

/// What was chosen on either side is read by the same rows.
fn same_stripes(cpu: &[HeadReads], cuda: &[HeadReads], runs: &[Range<usize>], what: &str) {
    assert_eq!(cpu.len(), cuda.len(), "{what}");
    // What a tile holds, of runs that may be longer.
    let part = |(run, rows): (usize, &Range<usize>)| -> Vec<_> {
        query_blocks(rows.clone(), 2 * BLOCK_TOKENS).into_iter().map(|rows| (run, rows)).collect()
    };
    let parts: Vec<(usize, Range<usize>)> = runs.iter().enumerate().flat_map(part).collect();
    let rows: Vec<_> = parts.iter().map(|part| part.1.clone()).collect();
    for (list, (cpu, cuda)) in cpu.iter().zip(cuda).enumerate() {
        let (host, there) = (host_stripes_of(cpu, &parts), stripes_of(cuda, &rows));
        for ((host, there), rows) in host.iter().zip(&there).zip(&rows) {
            assert_eq!(host, there, "{what}: list {list}, rows {rows:?}");
        }
    }
    let positions: Vec<u32> = runs.iter().cloned().flatten().map(|row| row as u32).collect();
    let counts = |reads: &[HeadReads]| Selection::new(runs.to_vec(), reads.to_vec()).unwrap().counts(&positions, None);
    assert_eq!(counts(cpu), counts(cuda), "{what}");
}

#[test]
fn heaviest_columns_and_diagonals_are_those_of_the_cpu() {
    let mut numbers = Numbers(72);
    // Runs of the longest are more blocks from its start than a warp counts at a time.
    for (n, starts) in [(40, [0, 37]), (700, [0, 37]), (5_000, [0, 37]), (80_000, [79_000, 66_001])] {
        let (cpu, cuda) = random_sums(&mut numbers, 6, n);
        let of = |columns, slashes| Counts { columns, slashes };
        let wanted = [(5, of(1, 1)), (0, of(1000, 6000)), (3, of(50, 130)), (4, of(30_000, 30_000))];
        for (start, forced) in starts.into_iter().zip([of(30, 100), of(0, 0)]) {
            let runs = query_blocks(start..n, BLOCK_TOKENS);
            let by_count = |sums, wanted: &[_], window| by_count(sums, wanted, forced, &runs, window);
            let on_cpu = by_count(&cpu, &wanted, None).unwrap();
            same_stripes(&on_cpu, &by_count(&cuda, &wanted, None).unwrap(), &runs, &format!("{n} from {start}"));
            // The host knows what it is where rows lose some of it to the model's own window.
            assert_eq!(by_count(&cuda, &wanted, Some(n)).unwrap(), on_cpu);
            assert!(by_count(&cuda, &[(6, of(1, 1))], None).is_err());
            assert!(by_count(&cuda, &[], None).unwrap().is_empty());
        }
    }
}

#[test]
fn columns_and_diagonals_that_hold_a_share_are_those_of_the_cpu() {
    let mut numbers = Numbers(75);
    for n in [40, 700, 5_003, 20_000, 100_000] {
        let (cpu, cuda) = random_sums(&mut numbers, 6, n);
        let runs = query_blocks(n - n.min(9_999)..n, BLOCK_TOKENS);
        for kv_heads in [2, 6] {
            for (columns, slashes) in [(0.3721, 0.9013), (0.0, 0.2017), (0.7331, 0.0), (1.0, 0.5519), (0.111, 1.0)] {
                let what = format!("{n} tokens, {kv_heads} lists, {columns} and {slashes}");
                let shares = Shares { columns, slashes, block_tokens: BLOCK_TOKENS };
                let of = |sums: &Sums, window| by_share(sums, kv_heads, &shares, &runs, window).unwrap();
                let on_cpu = of(&cpu, None);
                same_stripes(&on_cpu, &of(&cuda, None), &runs, &what);
                assert_eq!(of(&cuda, Some(n)), on_cpu, "{what}");
            }
        }
        for each in [2, 3, 5, 32, 33, 64] {
            let shares = Shares { columns: 0.0832, slashes: 0.1217, block_tokens: each * BLOCK_TOKENS };
            for length in [shares.block_tokens, BLOCK_TOKENS] {
                let runs = query_blocks(n - n.min(9_999)..n, length);
                let of = |sums: &Sums, window| by_share(sums, 2, &shares, &runs, window).unwrap();
                let what = format!("{n} tokens in blocks of {each}, runs of {length}");
                let on_cpu = of(&cpu, None);
                same_stripes(&on_cpu, &of(&cuda, None), &runs, &what);
                assert_eq!(of(&cuda, Some(n)), on_cpu, "{what}");
            }
        }
        for kv_heads in [0, 4] {
            let shares = Shares { columns: 0.8, slashes: 0.6, block_tokens: BLOCK_TOKENS };
            assert!(by_share(&cuda, kv_heads, &shares, &runs, None).is_err());
        }
    }
}

/// Sums that are no numbers keep everything, of their own group of heads.
#[test]
fn sums_that_are_no_numbers_keep_everything_on_either_side() {
    let (mut numbers, n) = (Numbers(76), 3_000);
    let runs = query_blocks(0..n, BLOCK_TOKENS);
    let (cpu, _) = random_sums(&mut numbers, 6, n);
    for all in [false, true] {
        let none = |sums: &Tensor| {
            let mut mass = sums.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let some = if all { 3 * n..4 * n } else { 4 * n - 7..4 * n };
            mass[some].fill(f32::NAN);
            Tensor::from_vec(mass, (6, n), &Device::Cpu).unwrap()
        };
        let cpu = Sums { columns: none(&cpu.columns), diagonals: none(&cpu.diagonals), lse: cpu.lse.clone() };
        let there = |t: &Tensor| t.to_device(&device()).unwrap();
        let cuda = Sums { columns: there(&cpu.columns), diagonals: there(&cpu.diagonals), lse: there(&cpu.lse) };
        let shares = Shares { columns: 0.2345, slashes: 0.3456, block_tokens: BLOCK_TOKENS };
        let of = |sums: &Sums| by_share(sums, 3, &shares, &runs, None).unwrap();
        let on_cpu = of(&cpu);
        let counts = Selection::new(runs.clone(), on_cpu.clone()).unwrap().counts(&[n as u32 - 1], None);
        assert!(counts[1] == n && counts[0] < n && counts[2] < n, "{counts:?}");
        same_stripes(&on_cpu, &of(&cuda), &runs, &format!("all {all}"));
    }
}

/// Rows attend by what was chosen in larger blocks, wherever a prompt's rows begin.
#[test]
fn larger_blocks_are_attended_as_on_the_cpu() {
    let mut numbers = Numbers(77);
    for (dtype, d, kv_heads, group) in every_group() {
        let (n, q_heads) = (1_900usize, kv_heads * group);
        let caches = Caches::new(&mut numbers, &[n, 70], kv_heads, d, dtype, 0.0);
        let (cpu, cuda) = random_sums(&mut numbers, q_heads, n);
        for (each, start) in [(2, 0), (2, 1_037), (3, 700), (5, 63), (32, 1_090)] {
            let shares = Shares { columns: 0.1, slashes: 0.07, block_tokens: each * BLOCK_TOKENS };
            let runs = query_blocks(start..n, shares.block_tokens);
            let of = |sums: &Sums| {
                let reads = by_share(sums, kv_heads, &shares, &runs, None).unwrap();
                Selection::new(runs.clone(), reads).unwrap()
            };
            let (cpu, cuda) = (of(&cpu), of(&cuda));
            let all: Vec<u32> = (start as u32..n as u32).collect();
            let queries = numbers.tensor(&[all.len(), q_heads, d], dtype);
            for positions in [&all[..], &all[27..411], &all[500..505]] {
                let q = queries.narrow(0, positions[0] as usize - start, positions.len()).unwrap();
                let what = format!("{dtype:?} {d} {kv_heads}x{group}, blocks of {each}, rows from {start}");
                compare(&caches, &q, positions, ((&cpu).into(), (&cuda).into()), &what);
            }
        }
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
    for (at, (dtype, d, kv_heads, group)) in every_group().enumerate() {
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
            let (sums, sums_there) = random_sums(&mut numbers, lists, n);
            let counts: Vec<_> = (0..lists).map(|list| (list, Counts { columns: 9, slashes: 200 })).collect();
            let forced = Counts { columns: 3, slashes: 2 };
            let share = |block_tokens| Shares { columns: 0.1, slashes: 0.05, block_tokens };
            let chosen = |sums: &Sums| {
                [
                    by_count(sums, &counts, forced, &runs, None).unwrap(),
                    by_share(sums, lists, &share(BLOCK_TOKENS), &runs, None).unwrap(),
                    by_share(sums, lists, &share(3 * BLOCK_TOKENS), &runs, None).unwrap(),
                ]
            };
            let (chosen, chosen_there) = (chosen(&sums), chosen(&sums_there));
            let (mut on_cpu, mut on_cuda) = (Vec::new(), Vec::new());
            for (list, pool) in pools.into_iter().enumerate() {
                let reads = match (list + at) % 9 {
                    0 => masks[list % 2].into(),
                    1 => stripes(&mut numbers, n, &runs, true),
                    2 => stripes(&mut numbers, n, &runs, false),
                    3 => Mask::Causal.into(),
                    4 => HeadReads::blocks(runs.iter().map(|_| numbers.some(n / BLOCK_TOKENS, 3)).collect()),
                    of @ (5..=7) => {
                        on_cpu.push(chosen[of - 5][list].clone());
                        on_cuda.push(chosen_there[of - 5][list].clone());
                        continue;
                    }
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
