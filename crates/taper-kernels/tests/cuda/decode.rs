//! Attention of single rows over selections and lists.
#![allow(clippy::single_range_in_vec_init)] // One range is what these tests mean.

use crate::cache::{Caches, GRID, LIMIT, Numbers, Queries, below, device, furthest, relative};
use candle_core::{DType, Tensor};
use taper_kernels::cuda::{Lists, Plan, Scratch, Streams, listed};
use taper_kernels::decode::{
    Decode, DecodeRow, HeadSelection, Keys, Sample, Selection, Values, attend, importance, scores, top_k,
};

/// The same call on both devices.
fn compare(caches: &Caches, queries: &Queries, rows: &[DecodeRow], selection: &Selection, what: &str) {
    let out = attend(&Decode { q: &queries.cpu, kv: caches.on_cpu(), rows }, selection, None).unwrap();
    let cuda = attend(&Decode { q: &queries.cuda, kv: caches.on_cuda(), rows }, selection, None).unwrap();
    assert_eq!(cuda.dtype(), DType::F32);
    below(relative(&cuda, &out), LIMIT, what);
}

/// Two ranges, or three, single tokens, and a sample of which every head of the group reads another prefix.
fn mixed(numbers: &mut Numbers, n: usize, group: usize, ranges: usize) -> HeadSelection {
    let middle: Vec<u32> = numbers.some(n - 60, 5).into_iter().filter(|&id| id >= 30).collect();
    let (ids, mut sample): (Vec<u32>, Vec<u32>) = middle.into_iter().partition(|id| id % 2 == 0);
    sample.reverse();
    let counts = (0..group).map(|g| (3 + 7 * g).min(sample.len())).collect();
    HeadSelection::Keys(Keys {
        ranges: [0..3, 10..30, n - 40..n][3 - ranges..].to_vec(),
        ids,
        sample: Some(Sample {
            ids: sample,
            counts,
            log_weights: (0..group).map(|g| 1.5 - g as f32 / 2.0).collect(),
            output: Vec::new(),
        }),
    })
}

/// A few values with weights of each head, which add up to 1.
fn given(numbers: &mut Numbers, n: usize, group: usize) -> HeadSelection {
    let ids = numbers.some(n, 9);
    let mut weights: Vec<f32> = (0..group * ids.len()).map(|_| numbers.below(4) as f32).collect();
    for line in weights.chunks_exact_mut(ids.len()) {
        line[0] += 1.0;
        let sum: f32 = line.iter().sum();
        line.iter_mut().for_each(|w| *w /= sum);
    }
    HeadSelection::Values(Values { ids, weights })
}

#[test]
fn selections_agree_with_the_cpu() {
    let mut numbers = Numbers(21);
    for (dtype, d, kv_heads, group) in GRID {
        let caches = Caches::new(&mut numbers, &[1, 64, 65, 900, 3000], kv_heads, d, dtype, 0.0);
        let queries = Queries::new(&mut numbers, &caches, group);
        let mut rows = caches.rows();
        rows[3].visible = 200..900;
        let what = format!("{dtype:?} {d} {kv_heads}x{group}");
        compare(&caches, &queries, &rows, &Selection::dense(rows.len(), kv_heads), &what);
        compare(&caches, &queries, &rows, &Selection::sink_window(&rows, kv_heads, 4, 100), &what);
        let batch = queries.decode(&caches, &rows);
        let wanted = vec![true; rows.len() * kv_heads];
        let chosen =
            top_k(&rows, &importance(&scores(&batch, &wanted).unwrap()), 4, 16, &vec![40; wanted.len()]).unwrap();
        compare(&caches, &queries, &rows, &chosen, &what);
        // Each head otherwise, values with given weights among them.
        let mut heads = Selection::dense(rows.len(), kv_heads).heads().unwrap().to_vec();
        for h in 0..kv_heads {
            heads[4 * kv_heads + h] = mixed(&mut numbers, 3000, group, 2 + h % 2);
        }
        compare(&caches, &queries, &rows, &heads.clone().into(), &what);
        heads[3 * kv_heads] = HeadSelection::Keys(Keys { ranges: vec![300..310], ids: vec![450], sample: None });
        heads[4 * kv_heads] = given(&mut numbers, 3000, group);
        compare(&caches, &queries, &rows, &heads.into(), &what);
    }
}

#[test]
fn what_the_cpu_refuses_is_refused() {
    let mut numbers = Numbers(22);
    let caches = Caches::new(&mut numbers, &[100], 1, 64, DType::F16, 0.0);
    let queries = Queries::new(&mut numbers, &caches, 1);
    let rows = caches.rows();
    let batch = Decode { q: &queries.cuda, kv: caches.on_cuda(), rows: &rows };
    let keys = |ids: &[u32]| Selection::from(vec![HeadSelection::Keys(Keys { ids: ids.to_vec(), ..Keys::default() })]);
    assert!(attend(&batch, &keys(&[99]), None).is_ok());
    assert!(attend(&batch, &keys(&[100]), None).is_err());
    assert!(attend(&batch, &Vec::new().into(), None).is_err());
    let odd = Tensor::zeros((1, 1, 64), DType::F32, &device()).unwrap();
    let strange = queries.batch(&caches);
    let error = Plan::new(Lists::ranges(&odd, 1, &[([(0, 100), (0, 0)], 100)]).unwrap(), &strange)
        .unwrap()
        .attend(&taper_kernels::cuda::Batch { q: &odd, ..strange }, None, DType::F32)
        .unwrap_err();
    assert!(error.to_string().starts_with("decode: q is F32"), "{error}");
}

#[test]
fn plans_serve_any_layer_and_partial_results_join() {
    let mut numbers = Numbers(23);
    for (dtype, d, kv_heads, group) in GRID {
        let caches = Caches::new(&mut numbers, &[70, 2000], kv_heads, d, dtype, 0.0);
        let queries = Queries::new(&mut numbers, &caches, group);
        let (batch, rows) = (queries.batch(&caches), caches.rows());
        let plan = |ranges: &[[(u32, u32); 2]; 2]| {
            let rows = [(ranges[0], 70), (ranges[1], 2000)];
            Plan::new(Lists::ranges(batch.q, kv_heads, &rows).unwrap(), &batch).unwrap()
        };
        let dense = attend(&queries.decode(&caches, &rows), &Selection::dense(2, kv_heads), None).unwrap();
        let whole = plan(&[[(0, 70), (0, 0)], [(0, 1000), (1000, 2000)]]);
        let (out, lse) = whole.attend(&batch, None, dtype).unwrap();
        let (again, _) = whole.attend(&batch, None, dtype).unwrap();
        below(relative(&out, &dense), LIMIT, "ranges");
        assert_eq!(furthest(&again, &out), 0.0, "the same launch gives the same bits");
        // Two halves, the second joined to the first; the first row has nothing in it.
        let first = plan(&[[(0, 0), (0, 0)], [(0, 700), (0, 0)]]).attend(&batch, None, DType::F32).unwrap();
        let rest = plan(&[[(0, 70), (0, 0)], [(700, 2000), (0, 0)]]);
        let (joined, joined_lse) = rest.attend(&batch, Some((&first.0, &first.1)), DType::F32).unwrap();
        below(relative(&joined, &dense), LIMIT, "joined");
        below(furthest(&joined_lse, &lse), LIMIT, "joined lse");
        // And in one launch, without plan and merge.
        let lists = Lists::ranges(batch.q, kv_heads, &[([(0, 70), (0, 0)], 70), ([(0, 2000), (0, 0)], 2000)]).unwrap();
        let scratch = Scratch::new(batch.q, 2, kv_heads * group, kv_heads).unwrap();
        let seeds = Tensor::from_vec(vec![0i64; 2], 2, &device()).unwrap();
        let streams = Streams { seeds: &seeds, positions: batch.lens, layer: 0 };
        for _ in 0..2 {
            let (out, one_lse) = listed(&batch, &lists, streams, &scratch).unwrap();
            below(relative(&out, &dense), LIMIT, "one launch");
            below(furthest(&one_lse, &lse), LIMIT, "one launch's lse");
        }
    }
}

#[test]
fn rows_of_one_sequence_that_see_nearly_the_same_agree_with_the_cpu() {
    let mut numbers = Numbers(24);
    for (dtype, d, kv_heads, group) in GRID {
        // Few tokens, rows on both sides of a block's end, and many units.
        for (n, count) in [(7, 7), (67, 7), (700, 2), (11_000, 4), (11_000, 7), (2_000, 33)] {
            let caches = Caches::new(&mut numbers, &[n], kv_heads, d, dtype, 0.0);
            let cpu = numbers.tensor(&[count, kv_heads * group, d], dtype);
            let on = cpu.to_device(&device()).unwrap();
            let rows: Vec<DecodeRow> =
                (0..count).map(|i| DecodeRow { table: &caches.tables[0], visible: 0..n - count + 1 + i }).collect();
            let selection = Selection::dense(count, kv_heads);
            let expected = attend(&Decode { q: &cpu, kv: caches.on_cpu(), rows: &rows }, &selection, None).unwrap();
            // Queries as the model has them, and in f32.
            for q in [on.clone(), on.to_dtype(dtype).unwrap()] {
                let batch = Decode { q: &q, kv: caches.on_cuda(), rows: &rows };
                let out = attend(&batch, &selection, None).unwrap();
                let what = format!("{dtype:?} {d} {kv_heads}x{group}, {count} rows");
                below(relative(&out, &expected), LIMIT, &what);
                assert_eq!(furthest(&attend(&batch, &selection, None).unwrap(), &out), 0.0, "{what}");
                let alone = Decode { q: &q.narrow(0, 1, 1).unwrap(), kv: caches.on_cuda(), rows: &rows[1..2] };
                let alone = attend(&alone, &Selection::dense(1, kv_heads), None).unwrap();
                below(relative(&out.narrow(0, 1, 1).unwrap(), &alone), LIMIT, &what);
            }
        }
    }
}
