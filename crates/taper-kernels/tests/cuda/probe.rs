//! The search by halves: over whole numbers, of which both sides compute every score exactly, all choices are equal.

use crate::cache::{Caches, GRID, Numbers, device};
use candle_core::{DType, Device, Tensor};
use taper_kernels::kv::{self, BLOCK_TOKENS};
use taper_kernels::prefill::{HeadReads, Hierarchy, Rows, Selection, Stage, probe, query_blocks};

/// `[rows, heads, head_dim]` of whole numbers between -most and most, times `unit`.
fn whole(numbers: &mut Numbers, shape: [usize; 3], most: usize, unit: f32) -> Tensor {
    let mut one = || (numbers.below(2 * most + 1) as f32 - most as f32) * unit;
    Tensor::from_vec((0..shape.iter().product()).map(|_| one()).collect::<Vec<f32>>(), &shape[..], &Device::Cpu)
        .unwrap()
}

/// One sequence beside another one, of keys that are whole numbers; with `spoilt`, some are no numbers or infinite.
fn sequence(
    numbers: &mut Numbers,
    (dtype, d, kv_heads): (DType, usize, usize),
    n: usize,
    most: usize,
    spoilt: bool,
) -> Caches {
    let caches = Caches::new(numbers, &[70, n], kv_heads, d, dtype, 0.0);
    let keys = whole(numbers, [n, kv_heads, d], most, 1.0);
    let keys = if spoilt {
        let mut keys = keys.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (i, x) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().cycle().take(n / 5).enumerate() {
            let key = numbers.below(n * kv_heads) * d;
            keys[key + i % d] = x;
        }
        Tensor::from_vec(keys, (n, kv_heads, d), &Device::Cpu).unwrap()
    } else {
        keys
    };
    let table = &caches.tables[1];
    let slot = |t: usize| table[t / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (t % BLOCK_TOKENS) as u32;
    let slots: Vec<u32> = (0..n).map(slot).collect();
    kv::append(&caches.cpu.0, &keys, &slots).unwrap();
    kv::append(&caches.cuda.0, &keys.to_device(&device()).unwrap(), &slots).unwrap();
    caches
}

/// Both sides of one call: what each run reads, how many keys each row does, and products.
fn compare(caches: &Caches, q: &Tensor, positions: &[u32], (block_q, window): (usize, Option<usize>), h: &Hierarchy) {
    let table = &caches.tables[1][..];
    // Runs as blocks of queries have them, of rows that may not stand side by side.
    let (first, last) = (positions[0] as usize, positions[positions.len() - 1] as usize);
    let some = |run: &std::ops::Range<usize>| positions.iter().any(|&p| run.contains(&(p as usize)));
    let runs: Vec<_> = query_blocks(first..last + 1, block_q).into_iter().filter(some).collect();
    let (want, products) = probe(&Rows { q, kv: caches.on_cpu(), table, positions, window }, &runs, h).unwrap();
    let counts = |heads: &[HeadReads]| Selection::new(runs.clone(), heads.to_vec()).unwrap().counts(positions, window);
    for q in [q.clone(), q.to_dtype(caches.dtype).unwrap()] {
        let q = q.to_device(&device()).unwrap();
        let (got, looked) = probe(&Rows { q: &q, kv: caches.on_cuda(), table, positions, window }, &runs, h).unwrap();
        let what = format!(
            "{:?} {:?} {} heads, runs of {block_q}, {first} to {last} within {window:?}, {h:?}",
            caches.dtype,
            q.shape(),
            caches.kv_heads
        );
        assert_eq!(counts(&got), counts(&want), "{what}");
        let got = on_host(&got);
        for (head, (got, want)) in got.iter().zip(&want).enumerate() {
            let lists = |reads: &HeadReads, run| {
                (reads.blocks.as_ref().unwrap().get(run).to_vec(), reads.tokens.get(run).to_vec())
            };
            for (at, run) in runs.iter().enumerate() {
                assert_eq!(lists(got, at), lists(want, at), "head {head}, run {run:?}: {what}");
            }
        }
        assert_eq!((got, looked), (want.clone(), products), "{what}");
    }
}

/// Lists that lie on the device.
fn on_host(heads: &[HeadReads]) -> Vec<HeadReads> {
    heads.to_vec()
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
    for (dtype, d, kv_heads, group) in GRID.into_iter().chain([(DType::BF16, 64, 1, 16)]) {
        let n = 1_100;
        for (at, hierarchy) in hierarchies().iter().enumerate() {
            // Few numbers make many equal scores, none but zeros nothing but those.
            let caches = sequence(&mut numbers, (dtype, d, kv_heads), n, [7, 1, 0][at % 3], at % 4 == 3);
            // Sums of rows are multiples of three: means of one to four of them are exact.
            let q = whole(&mut numbers, [n, kv_heads * group, d], 5, 3.0);
            let all: Vec<u32> = (0..n as u32).collect();
            compare(&caches, &q, &all, (64, None), hierarchy);
            compare(&caches, &q, &all, (64, Some(500)), hierarchy);
            let rows = |from: usize, to: usize| q.narrow(0, from, to - from).unwrap();
            compare(&caches, &rows(701, 1_003), &all[701..1_003], (128, None), hierarchy);
            compare(&caches, &rows(513, n), &all[513..], (512, None), hierarchy);
        }
    }
}

#[test]
fn rows_apart_and_no_numbers_among_queries_agree() {
    let mut numbers = Numbers(42);
    for (dtype, d, kv_heads, group) in GRID {
        let n = 1_100;
        let caches = sequence(&mut numbers, (dtype, d, kv_heads), n, 3, true);
        let positions: Vec<u32> = (40..n as u32).filter(|p| p % 3 != 1 && !(300..450).contains(p)).collect();
        let q = whole(&mut numbers, [positions.len(), kv_heads * group, d], 5, 3.0);
        let mut q = q.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for _ in 0..positions.len() {
            let at = numbers.below(q.len());
            q[at] = f32::NAN;
        }
        // All queries of one run.
        q[..kv_heads * group * d * 16].fill(f32::NAN);
        let q = Tensor::from_vec(q, (positions.len(), kv_heads * group, d), &Device::Cpu).unwrap();
        for hierarchy in &hierarchies() {
            compare(&caches, &q, &positions, (64, None), hierarchy);
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
        let caches = sequence(&mut numbers, (dtype, d, kv_heads), n, 4, false);
        for of in [&[(256, 4096), (32, 1024), (8, 256)][..], &[(2, 1000)], &[(4, 3000), (2, 1000)]] {
            let hierarchy = Hierarchy { sink: 100, window: 300, average, stages: stages(of), full_at: 8_000 };
            // Means of a power of two times three rows are exact.
            let positions: Vec<u32> = (7_984..n as u32 - 8).collect();
            let q = whole(&mut numbers, [positions.len(), kv_heads * group, d], if average > 16 { 1 } else { 5 }, 3.0);
            compare(&caches, &q, &positions, (512, None), &hierarchy);
            compare(&caches, &q, &positions, (64, Some(6_000)), &hierarchy);
        }
    }
}

#[test]
fn searches_that_cannot_be_are_errors() {
    let mut numbers = Numbers(44);
    let caches = sequence(&mut numbers, (DType::BF16, 64, 1), 64, 1, false);
    let q = whole(&mut numbers, [64, 1, 64], 1, 1.0).to_device(&device()).unwrap();
    let positions: Vec<u32> = (0..64).collect();
    let table = &caches.tables[1][..];
    let rows = Rows { q: &q, kv: caches.on_cuda(), table, positions: &positions, window: None };
    let hierarchy =
        |of: &[(usize, usize)]| Hierarchy { sink: 0, window: 0, average: 4, stages: stages(of), full_at: 0 };
    assert!(probe(&rows, &query_blocks(0..64, 64), &hierarchy(&[(8, 8), (16, 8)])).is_err());
    assert!(probe(&rows, &query_blocks(64..128, 64), &hierarchy(&[(8, 8)])).is_err());
    let (heads, products) = probe(&rows, &[], &hierarchy(&[(8, 8)])).unwrap();
    assert!(heads.is_empty() && products == 0);
}
