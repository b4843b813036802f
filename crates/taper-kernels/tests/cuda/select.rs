//! Scores, and lists chosen by them on the device.

use crate::cache::{Caches, LIMIT, Numbers, Queries, below, elements, every_group, furthest};
use candle_core::{DType, Tensor};
use taper_kernels::cuda::{Between, Scores, View, pick_blocks, scores, top_k, top_p};
use taper_kernels::decode::{self, HeadSelection, Over};
use taper_kernels::kv::BLOCK_TOKENS;

const LENS: [usize; 4] = [3, 80, 700, 2500];

/// Tokens that a CPU selection reads, ascending.
fn tokens(head: &HeadSelection, n: usize) -> Vec<u32> {
    let HeadSelection::Keys(keys) = head else { return (0..n as u32).collect() };
    let ranges = keys.ranges.iter().flat_map(|r| r.start as u32..r.end as u32);
    let mut all: Vec<u32> = ranges.chain(keys.ids.iter().copied()).collect();
    all.sort_unstable();
    all
}

fn all_scores(caches: &Caches, queries: &Queries) -> Scores {
    let batch = queries.batch(caches);
    scores(&batch, batch.q, View::Rows(&caches.cuda.0), 1.0 / (caches.head_dim as f32).sqrt()).unwrap()
}

/// How many tokens two ascending lists do not share.
fn apart(a: &[u32], b: &[u32]) -> usize {
    let of = |a: &[u32], b: &[u32]| a.iter().filter(|x| b.binary_search(x).is_err()).count();
    of(a, b) + of(b, a)
}

#[test]
fn the_largest_shares_and_the_fewest_that_hold_one_are_those_of_the_cpu() {
    let mut numbers = Numbers(31);
    let mut swapped = (0, 0);
    for (dtype, d, kv_heads, group) in every_group() {
        let caches = Caches::new(&mut numbers, &LENS, kv_heads, d, dtype, 0.0);
        let queries = Queries::new(&mut numbers, &caches, group);
        let (rows, batch) = (caches.rows(), queries.batch(&caches));
        let lens = LENS.map(|n| n as u32);
        let wanted = vec![true; rows.len() * kv_heads];
        let on_cpu = decode::importance(&decode::scores(&queries.decode(&caches, &rows), &wanted).unwrap(), Over::Sum);
        let on_cuda = all_scores(&caches, &queries);
        let between = || Between::new(batch.q, kv_heads, &lens, 4, 30, 1).unwrap();
        for k in [1, 50, 1000] {
            let cpu = decode::top_k(&rows, &on_cpu, 4, 30, &vec![k; wanted.len()]).unwrap();
            let cuda = top_k(&batch, &on_cuda, between(), k).unwrap().read_back().unwrap();
            for (i, (head, read)) in cpu.heads().unwrap().iter().zip(&cuda).enumerate() {
                let expected = tokens(head, LENS[i / kv_heads]);
                assert_eq!(expected.len(), read.len(), "{k} of row {}", i / kv_heads);
                swapped.0 += apart(&expected, read);
                swapped.1 += read.len();
            }
        }
        for p in [0.3, 0.9, 1.0] {
            let cpu = decode::top_p(&rows, &on_cpu, 4, 30, p, group).unwrap();
            let cuda = top_p(&batch, &on_cuda, between(), p, 2500).unwrap().read_back().unwrap();
            for (i, (head, read)) in cpu.heads().unwrap().iter().zip(&cuda).enumerate() {
                let expected = tokens(head, LENS[i / kv_heads]);
                // Sums in another order: a token more or less where the share is all but reached.
                let more = apart(&expected, read);
                assert!(more <= 2 + expected.len() / 200, "{p} of row {}: {more} of {}", i / kv_heads, read.len());
            }
        }
    }
    // Shares that differ by rounding alone may change places.
    assert!(swapped.0 * 500 < swapped.1, "{} of {} tokens differ", swapped.0, swapped.1);
}

#[test]
fn scores_their_sums_and_pages_agree_with_f64() {
    let mut numbers = Numbers(32);
    for (dtype, d, kv_heads, group) in every_group() {
        let caches = Caches::new(&mut numbers, &LENS, kv_heads, d, dtype, 0.0);
        let queries = Queries::new(&mut numbers, &caches, group);
        let batch = queries.batch(&caches);
        let found = all_scores(&caches, &queries);
        let (values, lse): (Vec<Vec<Vec<f32>>>, _) = (found.values().to_vec3().unwrap(), found.lse());
        let q: Vec<Vec<Vec<f32>>> = queries.cpu.to_vec3().unwrap();
        let keys = elements(&caches.cpu.0);
        let mut expected = Vec::new();
        for (row, &n) in LENS.iter().enumerate() {
            for head in 0..kv_heads * group {
                let of = |token: usize| {
                    let block = caches.tables[row][token / BLOCK_TOKENS] as usize;
                    let at = ((block * kv_heads + head / group) * BLOCK_TOKENS + token % BLOCK_TOKENS) * d;
                    let dot: f64 = q[row][head].iter().zip(&keys[at..]).map(|(a, b)| f64::from(*a) * b).sum();
                    dot / (d as f64).sqrt()
                };
                let line: Vec<f64> = (0..n).map(of).collect();
                let got = values[row][head][..n].iter().map(|&x| f64::from(x));
                let worst = line.iter().zip(got).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                below(worst, 1e-3, "scores");
                expected.push(line.iter().map(|s| s.exp()).sum::<f64>().ln() as f32);
            }
        }
        let expected = Tensor::from_vec(expected, lse.dims(), &candle_core::Device::Cpu).unwrap();
        below(furthest(lse, &expected), 1e-3, "log-sum-exp");

        // Bounds of blocks: the choice in one launch takes the best by the best head, as one in two launches does.
        let blocks = caches.cuda.0.dim(0).unwrap();
        let shape = [blocks, kv_heads, 1, d];
        let high = numbers.tensor(&shape, dtype);
        let low = (&high - numbers.tensor(&shape, dtype).abs().unwrap()).unwrap();
        let on = |t: &Tensor| t.to_dtype(dtype).unwrap().to_device(batch.q.device()).unwrap();
        let view = (on(&high), on(&low));
        let (high, low) = (elements(&view.0), elements(&view.1));
        let between = Between::new(batch.q, kv_heads, &LENS.map(|n| n as u32), 64, 64, 64).unwrap();
        let read = pick_blocks(&batch, View::Bounds(&view.0, &view.1), between, 5).unwrap().read_back().unwrap();
        let (row, n) = (3, LENS[3]);
        let whole = n / BLOCK_TOKENS * BLOCK_TOKENS;
        let window = (n - 64) / BLOCK_TOKENS;
        for head in 0..kv_heads {
            let score = |block: usize| {
                let at = (caches.tables[row][block] as usize * kv_heads + head) * d;
                let of = |g: usize| -> f64 {
                    let q = q[row][head * group + g].iter().map(|&x| f64::from(x));
                    q.zip(&high[at..]).zip(&low[at..]).map(|((q, h), l)| (q * h).max(q * l)).sum()
                };
                (0..group).map(of).fold(f64::NEG_INFINITY, f64::max)
            };
            let mut order: Vec<usize> = (1..window).collect();
            order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
            let mut best = order[..5].to_vec();
            best.sort_unstable();
            let got = &read[row * kv_heads + head];
            let mut blocks: Vec<usize> = got.iter().map(|&t| t as usize / BLOCK_TOKENS).collect();
            blocks.dedup();
            let tail = (window..=whole / BLOCK_TOKENS).filter(|b| b * BLOCK_TOKENS < n);
            let expected: Vec<usize> = std::iter::once(0).chain(best).chain(tail).collect();
            assert_eq!(blocks, expected, "{dtype:?} {d} {kv_heads}x{group} head {head}");
        }
    }
    assert!(LIMIT > 0.0 && DType::F32.is_float());
}
