//! Scores, and lists chosen by them on the device.

use crate::cache::{Caches, Numbers, Queries, below, elements, every_group, furthest};
use crate::step::Both;
use candle_core::Tensor;
use taper_kernels::cuda::{View, scores};
use taper_kernels::decode::{self, Importance, Over, importance, top_k, top_p};
use taper_kernels::kv::BLOCK_TOKENS;

const LENS: [usize; 4] = [3, 80, 700, 2500];

/// How many tokens two ascending lists do not share.
fn apart(a: &[u32], b: &[u32]) -> usize {
    let of = |a: &[u32], b: &[u32]| a.iter().filter(|x| b.binary_search(x).is_err()).count();
    of(a, b) + of(b, a)
}

#[test]
fn the_largest_shares_and_the_fewest_that_hold_one_are_those_of_the_cpu() {
    let mut numbers = Numbers(31);
    let mut swapped = (0, 0);
    for of in every_group() {
        let both = Both::new(&mut numbers, of, &LENS);
        let rows = both.caches.rows();
        let wanted = vec![true; both.heads()];
        let (cpu, cuda) = both.run(&rows, |batch| importance(&decode::scores(batch, &wanted).unwrap(), Over::Sum));
        for k in [1, 50, 1000] {
            let chosen =
                |of: &Importance| top_k(&rows, of, 4, 30, &vec![k; wanted.len()]).unwrap().tokens(&rows).unwrap();
            for (i, (expected, read)) in chosen(&cpu).iter().zip(&chosen(&cuda)).enumerate() {
                assert_eq!(expected.len(), read.len(), "{of:?}, {k} of list {i}");
                swapped.0 += apart(expected, read);
                swapped.1 += read.len();
            }
        }
        for p in [0.3, 0.9, 1.0] {
            let chosen = |of: &Importance| top_p(&rows, of, 4, 30, p, both.group).unwrap().tokens(&rows).unwrap();
            for (i, (expected, read)) in chosen(&cpu).iter().zip(&chosen(&cuda)).enumerate() {
                // Sums in another order: a token more or less where the share is all but reached.
                let more = apart(expected, read);
                assert!(more <= 2 + expected.len() / 200, "{of:?}, {p} of list {i}: {more} of {}", read.len());
            }
        }
    }
    // Shares that differ by rounding alone may change places.
    assert!(swapped.0 * 500 < swapped.1, "{} of {} tokens differ", swapped.0, swapped.1);
}

#[test]
fn scores_and_their_sums_agree_with_f64() {
    let mut numbers = Numbers(32);
    for (dtype, d, kv_heads, group) in every_group() {
        let caches = Caches::new(&mut numbers, &LENS, kv_heads, d, dtype, 0.0);
        let queries = Queries::new(&mut numbers, &caches, group);
        let batch = queries.batch(&caches);
        let found = scores(&batch, batch.q, View::Rows(&caches.cuda.0), 1.0 / (d as f32).sqrt()).unwrap();
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
    }
}
