#![allow(clippy::single_range_in_vec_init)] // One range is what these tests mean.

use super::attend::attend_with;
use super::*;
use crate::simd::Isa;
use crate::testing::{Cache, Numbers, relative_error};
use candle_core::{DType, Tensor};

/// The scores of every head.
pub(super) fn all_scores(batch: &Decode) -> Scores {
    let (rows, _, kv_heads, _) = batch.dims().unwrap();
    scores(batch, &vec![true; rows * kv_heads]).unwrap()
}

/// (token, natural-log weight) of what query head `g` of a group reads.
fn keys_of(row: &DecodeRow, head: &HeadSelection, g: usize) -> Vec<(usize, f64)> {
    let keys = match head {
        HeadSelection::Dense => return row.visible.clone().map(|i| (i, 0.0)).collect(),
        HeadSelection::Keys(keys) => keys,
        HeadSelection::Values(_) => panic!("values"),
    };
    let fixed = keys.ranges.iter().flat_map(Clone::clone).chain(keys.ids.iter().map(|&i| i as usize)).map(|i| (i, 0.0));
    let sampled = keys
        .sample
        .iter()
        .flat_map(|s| s.ids[..s.counts[g]].iter().map(move |&i| (i as usize, f64::from(s.log_weights[g]))));
    fixed.chain(sampled).collect()
}

fn sampled(n: usize, group: usize) -> HeadSelection {
    HeadSelection::Keys(Keys {
        ranges: vec![0..3, n - 5..n],
        ids: (10..n as u32 - 50).step_by(7).collect(),
        sample: Some(Sample {
            ids: (11..n as u32 - 50).step_by(14).rev().collect(),
            counts: (0..group).map(|g| 3 + 5 * g).collect(),
            log_weights: (0..group).map(|g| 1.5 + g as f32).collect(),
            output: Vec::new(),
        }),
    })
}

#[test]
fn agrees_with_f64_for_every_group_dtype_selection_and_instruction_set() {
    let mut numbers = Numbers(5);
    for isa in Isa::available() {
        for (dtype, kv_heads, group, d) in [
            (DType::F32, 2, 3, 64),
            (DType::F16, 1, 4, 128),
            (DType::BF16, 2, 1, 64),
            (DType::F32, 1, 8, 80),
            (DType::F32, 1, 5, 20),
        ] {
            for n in [1, 63, 64, 65, 1000, 1300] {
                let cache = Cache::new(&mut numbers, n, kv_heads, d, dtype);
                let q = numbers.tensor(&[2, kv_heads * group, d]);
                let rows = [
                    DecodeRow { table: &cache.table, visible: 0..n },
                    DecodeRow { table: &cache.table, visible: n / 3..n.div_ceil(2).max(n / 3 + 1) },
                ];
                let batch = Decode { q: &q, kv: cache.kv(), rows: &rows };
                let mut selections = vec![
                    Selection::dense(2, kv_heads),
                    Selection::sink_window(&rows, kv_heads, 4, 100),
                    top_k(
                        batch.rows,
                        &importance(&all_scores(&batch), Over::Sum),
                        4,
                        16,
                        &[vec![20; kv_heads], vec![7; kv_heads]].concat(),
                    )
                    .unwrap(),
                ];
                if n >= 1000 {
                    let mut mixed = vec![sampled(n, group); kv_heads];
                    mixed.resize(2 * kv_heads, HeadSelection::Dense);
                    selections.push(mixed.into());
                }
                for selection in &selections {
                    let partly: Vec<bool> = (0..2 * kv_heads).map(|head| head % 2 == 1).collect();
                    for given in [None, Some(all_scores(&batch)), Some(scores(&batch, &partly).unwrap())] {
                        let out = attend_with(isa, &batch, selection, given.as_ref()).unwrap();
                        compare(&cache, &rows, selection, &q, &out, group);
                    }
                }
            }
        }
    }
}

fn compare(cache: &Cache, rows: &[DecodeRow], selection: &Selection, q: &Tensor, out: &Tensor, group: usize) {
    let (q, out) = (q.to_vec3::<f32>().unwrap(), out.to_vec3::<f32>().unwrap());
    let heads = selection.heads().unwrap();
    let kv_heads = heads.len() / rows.len();
    for (i, head) in heads.iter().enumerate() {
        let (row, kv_head) = (i / kv_heads, i % kv_heads);
        for g in 0..group {
            let keys = keys_of(&rows[row], head, g);
            let exact = cache.attend(&q[row][kv_head * group + g], kv_head, keys.into_iter());
            let error = relative_error(&out[row][kv_head * group + g], &exact);
            assert!(error < 1e-5, "row {row} head {kv_head}.{g} of {:?}: {error}", rows[row].visible);
        }
    }
}

#[test]
fn top_k_keeps_the_keys_of_largest_mass_over_the_group() {
    let mut numbers = Numbers(9);
    let (n, group, d) = (700, 3, 16);
    let cache = Cache::new(&mut numbers, n, 1, d, DType::F32);
    let q = numbers.tensor(&[1, group, d]);
    let rows = [DecodeRow { table: &cache.table, visible: 0..n }];
    let batch = Decode { q: &q, kv: cache.kv(), rows: &rows };
    let queries = q.to_vec3::<f32>().unwrap();
    let mut mass = vec![0f64; n];
    for q in &queries[0] {
        let scores: Vec<f64> = (cache.keys.iter())
            .map(|k| k[0].iter().zip(q).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() / (d as f64).sqrt())
            .collect();
        let sum: f64 = scores.iter().map(|s| s.exp()).sum();
        mass.iter_mut().zip(scores).for_each(|(m, s)| *m += s.exp() / sum);
    }
    let chosen = top_k(batch.rows, &importance(&all_scores(&batch), Over::Sum), 4, 32, &[25]).unwrap();
    let HeadSelection::Keys(keys) = &chosen.heads().unwrap()[0] else { panic!("dense") };
    assert_eq!(keys.ranges, [0..4, n - 32..n]);
    let mut order: Vec<usize> = (4..n - 32).collect();
    order.sort_by(|&a, &b| mass[b].total_cmp(&mass[a]));
    let first = |count: usize| {
        let mut ids: Vec<u32> = order[..count].iter().map(|&i| i as u32).collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(keys.ids, first(25));

    // Of them those that pay, the heaviest first, to an eighth of an octave.
    let known = importance(&all_scores(&batch), Over::Sum);
    let squares: Vec<f64> = order.iter().map(|&i| mass[i] * mass[i]).collect();
    let noise = squares[20..].iter().sum::<f64>() as f32;
    let pays = |read: usize| {
        let rest: f64 = squares[read..].iter().sum();
        (order.len() - read) as f64 * squares[read] >= rest + f64::from(noise)
    };
    let exact = (0..order.len()).find(|&read| !pays(read)).unwrap();
    for k in [400, exact / 2] {
        let chosen = top_paying(batch.rows, &known, (4, 32), &[k], Some(noise)).unwrap();
        let HeadSelection::Keys(keys) = &chosen.heads().unwrap()[0] else { panic!("dense") };
        let count = keys.ids.len();
        assert_eq!((&keys.ids, &keys.ranges[..]), (&first(count), &[0..4, n - 32..n][..]), "at most {k}");
        let apart = (squares[count] / squares[exact.min(k)]).log2().abs() / 2.0;
        assert!(count > 3 && count <= k && apart <= 0.25, "at most {k}: {count} keys, {exact} by the rule");
    }
    // As many as there are at most is everything, whatever they hold.
    let all = top_paying(batch.rows, &known, (4, 32), &[n - 36], Some(noise)).unwrap();
    assert_eq!(all.heads().unwrap(), [HeadSelection::Dense]);
}

#[test]
fn shares_over_a_group_are_their_sum_or_the_largest() {
    let mut numbers = Numbers(10);
    let cache = Cache::new(&mut numbers, 300, 1, 16, DType::F32);
    let q = numbers.tensor(&[1, 3, 16]);
    let rows = [DecodeRow { table: &cache.table, visible: 0..300 }];
    let of = |q: &Tensor, over| {
        let known = all_scores(&Decode { q, kv: cache.kv(), rows: &rows });
        known.of(0).unwrap().importance(over)
    };
    let heads: Vec<_> = (0..3).map(|g| of(&q.narrow(1, g, 1).unwrap(), Over::Sum)).collect();
    for (i, (sum, most)) in of(&q, Over::Sum).into_iter().zip(of(&q, Over::Max)).enumerate() {
        let all = [heads[0][i], heads[1][i], heads[2][i]];
        assert!((sum - all.iter().sum::<f32>()).abs() <= 1e-6 * sum);
        assert!((most - all.into_iter().fold(0.0, f32::max)).abs() <= 1e-6 * most);
    }
}

/// Over spans and units that end in their midst.
#[test]
fn shares_are_those_in_f64_wherever_a_token_stands() {
    let mut numbers = Numbers(12);
    let n = 9_001;
    let cache = Cache::new(&mut numbers, n, 1, 16, DType::F32);
    let q = numbers.tensor(&[1, 3, 16]).affine(4.0, 0.0).unwrap();
    let rows = [DecodeRow { table: &cache.table, visible: 0..n }];
    let known = all_scores(&Decode { q: &q, kv: cache.kv(), rows: &rows });
    let scored = known.of(0).unwrap();
    let shares = |g: usize| {
        let weights: Vec<f64> = scored.of(g).iter().map(|&score| f64::from(score).exp()).collect();
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(move |weight| weight / sum).collect::<Vec<_>>()
    };
    let shares: Vec<_> = (0..3).map(shares).collect();
    for isa in Isa::available() {
        let (sums, most) = (scored.importance_with(isa, Over::Sum), scored.importance_with(isa, Over::Max));
        assert_eq!((sums.len(), most.len()), (n, n));
        for (i, (sum, most)) in sums.into_iter().zip(most).enumerate() {
            let of = |g: usize| shares[g][i];
            let close = |is: f32, expected: f64| (f64::from(is) - expected).abs() <= 1e-5 * expected;
            assert!(
                close(sum, of(0) + of(1) + of(2)) && close(most, of(0).max(of(1)).max(of(2))),
                "{isa:?}: token {i}"
            );
        }
    }
}

#[test]
fn a_rows_result_does_not_depend_on_the_batch() {
    let mut numbers = Numbers(6);
    let cache = Cache::new(&mut numbers, 900, 2, 64, DType::F16);
    let q = numbers.tensor(&[5, 6, 64]);
    let rows: Vec<_> = (0..5).map(|i| DecodeRow { table: &cache.table, visible: 0..900 - 100 * i }).collect();
    let together = attend(&Decode { q: &q, kv: cache.kv(), rows: &rows }, &Selection::dense(5, 2), None).unwrap();
    for i in 0..5 {
        let q = q.narrow(0, i, 1).unwrap();
        let alone = Decode { q: &q, kv: cache.kv(), rows: &rows[i..=i] };
        let alone = attend(&alone, &Selection::dense(1, 2), None).unwrap();
        let row = together.narrow(0, i, 1).unwrap();
        assert_eq!(alone.to_vec3::<f32>().unwrap(), row.to_vec3::<f32>().unwrap());
    }
}

#[test]
fn selections_that_reach_beyond_what_is_visible_are_errors() {
    let mut numbers = Numbers(8);
    let cache = Cache::new(&mut numbers, 100, 1, 16, DType::F32);
    let q = numbers.tensor(&[1, 1, 16]);
    let rows = [DecodeRow { table: &cache.table, visible: 10..90 }];
    let batch = Decode { q: &q, kv: cache.kv(), rows: &rows };
    let keys = |ranges: &[std::ops::Range<usize>], ids: &[u32]| {
        Selection::from(vec![HeadSelection::Keys(Keys { ranges: ranges.to_vec(), ids: ids.to_vec(), sample: None })])
    };
    assert!(attend(&batch, &keys(&[10..12], &[89]), None).is_ok());
    for bad in [keys(&[], &[]), keys(&[9..12], &[]), keys(&[80..91], &[]), keys(&[], &[90]), Vec::new().into()] {
        assert!(attend(&batch, &bad, None).is_err(), "{bad:?}");
    }
    let rows = [DecodeRow { table: &cache.table[..1], visible: 0..65 }];
    assert!(scores(&Decode { q: &q, kv: cache.kv(), rows: &rows }, &[true]).is_err());
    assert!(scores(&batch, &[true; 2]).is_err());
}
