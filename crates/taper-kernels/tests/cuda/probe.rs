//! The search by halves: over whole numbers, of which both sides compute every score exactly, all choices are equal.

use crate::cache::{Caches, GRID, Numbers, device, every_group};
use crate::lists;
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use taper_kernels::cuda::DeviceReads;
use taper_kernels::prefill::{Blocks, HeadReads, Hierarchy, Rows, Selection, Stage, probe, query_blocks};

/// A sequence of `n` tokens beside a short one, of keys that are whole numbers.
fn sequence(numbers: &mut Numbers, (dtype, d, kv_heads): (DType, usize, usize), n: usize) -> Caches {
    Caches::new(numbers, &[n, 70], kv_heads, d, dtype, 0.0).whole_keys(numbers)
}

/// Queries that are multiples of three: means of one to four of them are exact, and of a few more numbers of them.
fn queries(numbers: &mut Numbers, shape: [usize; 3]) -> Tensor {
    (numbers.whole(&shape) * 3.0).unwrap()
}

/// Values of a tensor, some of which are put in place of others.
fn with(x: &Tensor, mut change: impl FnMut(&mut [f32])) -> Tensor {
    let mut values = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    change(&mut values);
    Tensor::from_vec(values, x.dims(), &Device::Cpu).unwrap()
}

/// The blocks and the single tokens of each run, wherever they are.
fn lists_of(reads: &HeadReads, runs: usize) -> Vec<(Vec<u32>, Vec<u32>)> {
    if let Some(Blocks::Device { reads, list, .. }) = &reads.blocks {
        let DeviceReads::Lists(lists) = &**reads else { panic!("stripes") };
        let blocks = lists.blocks.read_back().unwrap();
        let columns = lists.columns.as_ref().map(|columns| columns.read_back().unwrap());
        let single = |run| columns.as_ref().map_or(&[][..], |columns| columns[*list].get(run)).to_vec();
        return (0..runs).map(|run| (blocks[*list].get(run).to_vec(), single(run))).collect();
    }
    let single = |run| if reads.tokens.is_empty() { &[][..] } else { reads.tokens.get(run) }.to_vec();
    (0..runs).map(|run| (reads.blocks.as_ref().unwrap().get(run).to_vec(), single(run))).collect()
}

/// Runs as blocks of queries have them, of rows that may not stand side by side.
fn runs_of(positions: &[u32], block_q: usize) -> Vec<Range<usize>> {
    let (first, last) = (positions[0] as usize, positions[positions.len() - 1] as usize);
    let some = |run: &Range<usize>| positions.iter().any(|&p| run.contains(&(p as usize)));
    query_blocks(first..last + 1, block_q).into_iter().filter(some).collect()
}

/// Both sides of one call: what each run reads, how many keys each row does, and products.
fn compare(caches: &Caches, q: &Tensor, positions: &[u32], (block_q, window): (usize, Option<usize>), h: &Hierarchy) {
    let (table, runs) = (&caches.tables[0][..], runs_of(positions, block_q));
    let (want, products) = probe(&Rows { q, kv: caches.on_cpu(), table, positions, window }, &runs, h).unwrap();
    let counts = |heads: &[HeadReads]| Selection::new(runs.clone(), heads.to_vec()).unwrap().counts(positions, window);
    // Queries are f32 or of the cache's dtype.
    for q in [q.clone(), q.to_dtype(caches.dtype).unwrap()] {
        let q = q.to_device(&device()).unwrap();
        let (got, looked) = probe(&Rows { q: &q, kv: caches.on_cuda(), table, positions, window }, &runs, h).unwrap();
        let what =
            format!("{:?} {:?} of {}, {runs:?} within {window:?}, {h:?}", caches.dtype, q.shape(), caches.kv_heads);
        assert_eq!(got.len(), want.len(), "{what}");
        for (head, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(lists_of(got, runs.len()), lists_of(want, runs.len()), "head {head}: {what}");
        }
        assert_eq!(counts(&got), counts(&want), "{what}");
        assert_eq!(looked, products, "{what}");
    }
}

fn stages(of: &[(usize, usize)]) -> Vec<Stage> {
    of.iter().map(|&(chunk, keep)| Stage { chunk, keep }).collect()
}

/// Ways to search some 1,000 tokens.
fn hierarchies() -> Vec<Hierarchy> {
    let small =
        Hierarchy { sink: 60, window: 100, average: 4, stages: stages(&[(64, 400), (16, 160), (4, 50)]), full_at: 0 };
    let bare = |of: &[(usize, usize)]| Hierarchy { sink: 0, window: 0, stages: stages(of), ..small.clone() };
    vec![
        Hierarchy { full_at: 2000, average: 1, ..small.clone() },
        Hierarchy { full_at: 700, average: 2, ..small.clone() },
        // The last chunk is shorter, and whether it is kept decides whether there is another stage.
        bare(&[(256, 300)]),
        bare(&[(256, 512), (64, 400), (8, 380)]),
        bare(&[(512, 512), (32, 448), (16, 300)]),
        // Nothing to choose, from nothing, or all but one chunk; and less than a chunk is kept.
        bare(&[(8, 1100)]),
        bare(&[]),
        bare(&[(64, 960)]),
        bare(&[(4096, 1), (128, 1), (16, 1)]),
        bare(&[(2, 31)]),
        bare(&[(4096, 4096), (2, 300)]),
        bare(&[4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2].map(|chunk| (chunk, chunk / 2 + 100))),
        Hierarchy { sink: 2000, ..small.clone() },
        small,
    ]
}

#[test]
fn searches_find_what_the_cpus_do() {
    let mut numbers = Numbers(41);
    for (at, (dtype, d, kv_heads, group)) in every_group().enumerate() {
        // Groups of other sizes take a few of the ways each.
        let (first, step) = if at < GRID.len() || group == 16 { (0, 1) } else { (at % 4, 4) };
        let n = 1_100;
        let caches = sequence(&mut numbers, (dtype, d, kv_heads), n);
        let q = queries(&mut numbers, [n, kv_heads * group, d]);
        let all: Vec<u32> = (0..n as u32).collect();
        let rows = |from: usize, to: usize| q.narrow(0, from, to - from).unwrap();
        for hierarchy in hierarchies().iter().skip(first).step_by(step) {
            compare(&caches, &q, &all, (64, None), hierarchy);
            compare(&caches, &q, &all, (64, Some(500)), hierarchy);
            compare(&caches, &rows(701, 1_003), &all[701..1_003], (128, None), hierarchy);
            compare(&caches, &rows(513, n), &all[513..], (512, None), hierarchy);
        }
    }
}

#[test]
fn equal_scores_rows_apart_and_no_numbers_agree() {
    let mut numbers = Numbers(42);
    for (dtype, d, kv_heads, group) in GRID {
        let n = 1_100;
        let caches = sequence(&mut numbers, (dtype, d, kv_heads), n);
        let keys = numbers.whole(&[n, kv_heads, d]);
        let spoilt = with(&keys, |keys| {
            for (i, x) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().cycle().take(n / 5).enumerate() {
                keys[numbers.below(n * kv_heads) * d + i % d] = x;
            }
        });
        // All but one key in forty are zeros, whose scores are equal.
        let alike =
            with(&keys, |keys| keys.chunks_mut(d).filter(|_| numbers.below(40) > 0).for_each(|key| key.fill(0.0)));
        let positions: Vec<u32> = (40..n as u32).filter(|p| p % 3 != 1 && !(300..450).contains(p)).collect();
        let q = queries(&mut numbers, [positions.len(), kv_heads * group, d]);
        let lost = with(&q, |q| {
            (0..positions.len()).for_each(|_| q[numbers.below(q.len())] = f32::NAN);
            // All queries of the first run.
            q[..kv_heads * group * d * 16].fill(f32::NAN);
        });
        for hierarchy in &hierarchies() {
            for keys in [&spoilt, &alike] {
                caches.set_keys(0, keys);
                compare(&caches, &q, &positions, (64, None), hierarchy);
                compare(&caches, &lost, &positions, (64, None), hierarchy);
            }
        }
    }
}

#[test]
fn many_mean_queries_and_many_keys_agree() {
    let mut numbers = Numbers(43);
    let n = 9_000;
    // More lines than shared memory holds, in runs of 512 rows; and chunks that take a warp many turns.
    for (dtype, d, kv_heads, group, average) in [
        (DType::BF16, 128, 2, 4, 1),
        (DType::F16, 64, 1, 16, 16),
        (DType::BF16, 64, 2, 3, 1),
        (DType::F16, 128, 1, 1, 64),
    ] {
        let caches = sequence(&mut numbers, (dtype, d, kv_heads), n);
        // Where these begin and end, 16, 32 and 64 rows are averaged: exactly, in 11 bits.
        let positions: Vec<u32> = (7_984..8_992).collect();
        let q = queries(&mut numbers, [positions.len(), kv_heads * group, d]);
        for of in [&[(256, 4096), (32, 1024), (8, 256)][..], &[(2, 1000)], &[(4, 3000), (2, 1000)]] {
            let hierarchy = Hierarchy { sink: 100, window: 300, average, stages: stages(of), full_at: 8_000 };
            compare(&caches, &q, &positions, (512, None), &hierarchy);
            compare(&caches, &q, &positions, (64, Some(6_000)), &hierarchy);
        }
    }
}

#[test]
fn attention_by_a_search_agrees_with_the_cpu() {
    let mut numbers = Numbers(45);
    for (dtype, d, kv_heads, group) in GRID {
        let (start, n) = (70usize, 1_500usize);
        let caches = sequence(&mut numbers, (dtype, d, kv_heads), n);
        let positions: Vec<u32> = (start as u32..n as u32).collect();
        let q = queries(&mut numbers, [positions.len(), kv_heads * group, d]);
        let on_device = q.to_device(&device()).unwrap();
        let (table, window) = (&caches.tables[0][..], None);
        let cpu = Rows { q: &q, kv: caches.on_cpu(), table, positions: &positions, window };
        let cuda = Rows { q: &on_device, kv: caches.on_cuda(), ..cpu };
        for (at, hierarchy) in hierarchies().iter().enumerate() {
            let block_q = [64, 128, 512][at % 3];
            let runs = runs_of(&positions, block_q);
            let reads = |rows| Selection::new(runs.clone(), probe(rows, &runs, hierarchy).unwrap().0).unwrap();
            let (on_cpu, on_cuda) = (reads(&cpu), reads(&cuda));
            // All rows, and slices that begin and end within runs, before the last block that those read.
            for rows in [0..positions.len(), 0..1, 450..900, 900..1_037] {
                let of = q.narrow(0, rows.start, rows.len()).unwrap();
                let what = format!("{dtype:?} {d} {kv_heads}x{group}, {rows:?}, runs of {block_q}, {hierarchy:?}");
                lists::compare(&caches, &of, &positions[rows], ((&on_cpu).into(), (&on_cuda).into()), &what);
            }
        }
    }
}

#[test]
fn searches_that_cannot_be_are_errors() {
    let mut numbers = Numbers(44);
    let caches = sequence(&mut numbers, (DType::BF16, 64, 1), 64);
    let q = queries(&mut numbers, [64, 1, 64]).to_device(&device()).unwrap();
    let positions: Vec<u32> = (0..64).collect();
    let table = &caches.tables[0][..];
    let rows = Rows { q: &q, kv: caches.on_cuda(), table, positions: &positions, window: None };
    let hierarchy =
        |of: &[(usize, usize)]| Hierarchy { sink: 0, window: 0, average: 4, stages: stages(of), full_at: 0 };
    assert!(probe(&rows, &query_blocks(0..64, 64), &hierarchy(&[(8, 8), (16, 8)])).is_err());
    assert!(probe(&rows, &query_blocks(64..128, 64), &hierarchy(&[(8, 8)])).is_err());
    let (heads, products) = probe(&rows, &[], &hierarchy(&[(8, 8)])).unwrap();
    assert!(heads.is_empty() && products == 0);
}
