//! Attention of single rows over selections and lists.
#![allow(clippy::single_range_in_vec_init)] // One range is what these tests mean.

use crate::cache::{
    Caches, LIMIT, Numbers, Queries, below, device, elements, every_group, furthest, none, relative, relative_of, with,
};
use candle_core::{DType, Device, Tensor};
use taper_kernels::cuda::{Batch, Lists, Plan};
use taper_kernels::decode::{
    Decode, DecodeRow, HeadSelection, Keys, Over, Sample, Selection, Values, attend, importance, scores, top_k,
};
use taper_kernels::kv::{BLOCK_TOKENS, PagedKv};

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
    for (dtype, d, kv_heads, group) in every_group() {
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
            top_k(&rows, &importance(&scores(&batch, &wanted).unwrap(), Over::Sum), 4, 16, &vec![40; wanted.len()])
                .unwrap();
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
        .attend(&Batch { q: &odd, ..strange }, None, DType::F32)
        .unwrap_err();
    assert!(error.to_string().starts_with("decode: q is F32"), "{error}");
}

#[test]
fn plans_serve_any_layer_and_partial_results_join() {
    let mut numbers = Numbers(23);
    for (dtype, d, kv_heads, group) in every_group() {
        let caches = Caches::new(&mut numbers, &[70, 2000], kv_heads, d, dtype, 0.0);
        let queries = Queries::new(&mut numbers, &caches, group);
        let (batch, rows) = (queries.batch(&caches), caches.rows());
        let lists = |ranges: &[[(u32, u32); 2]; 2]| {
            Lists::ranges(batch.q, kv_heads, &[(ranges[0], 70), (ranges[1], 2000)]).unwrap()
        };
        let plan = |ranges: &[[(u32, u32); 2]; 2]| Plan::new(lists(ranges), &batch).unwrap();
        let dense = attend(&queries.decode(&caches, &rows), &Selection::dense(2, kv_heads), None).unwrap();
        let whole = plan(&[[(0, 70), (0, 0)], [(0, 1000), (1000, 2000)]]);
        let (out, lse) = whole.attend(&batch, None, dtype).unwrap();
        let (again, _) = whole.attend(&batch, None, dtype).unwrap();
        below(relative(&out, &dense), LIMIT, "ranges");
        assert_eq!(furthest(&again, &out), 0.0, "the same launch gives the same bits");
        // Cut by a launch of its own, lists are the same units.
        for ranges in [[[(0, 70), (0, 0)], [(0, 1000), (1000, 2000)]], [[(0, 0), (0, 0)], [(3, 700), (901, 1999)]]] {
            let (out, lse) = plan(&ranges).attend(&batch, None, DType::F32).unwrap();
            let shared = Plan::shared(lists(&ranges), &batch).unwrap().attend(&batch, None, DType::F32).unwrap();
            assert_eq!(elements(&out), elements(&shared.0), "units cut in the attention and before it");
            assert_eq!(elements(&lse), elements(&shared.1));
        }
        // Two halves, the second joined to the first; the first row has nothing in it.
        let first = plan(&[[(0, 0), (0, 0)], [(0, 700), (0, 0)]]).attend(&batch, None, DType::F32).unwrap();
        let rest = plan(&[[(0, 70), (0, 0)], [(700, 2000), (0, 0)]]);
        let (joined, joined_lse) = rest.attend(&batch, Some((&first.0, &first.1)), DType::F32).unwrap();
        below(relative(&joined, &dense), LIMIT, "joined");
        below(furthest(&joined_lse, &lse), LIMIT, "joined lse");
    }
}

#[test]
fn rows_of_one_sequence_that_see_nearly_the_same_agree_with_the_cpu() {
    let mut numbers = Numbers(24);
    for (dtype, d, kv_heads, group) in every_group() {
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

/// Where a group has fewer heads than the kernel has columns, the next heads' queries are in the others: they must not decide
/// when a running maximum is raised, which rounds probabilities otherwise.
#[test]
fn a_row_is_the_same_bits_alone_and_beside_larger_queries() {
    let mut numbers = Numbers(47);
    for (dtype, d, kv_heads, group) in every_group() {
        let caches = Caches::new(&mut numbers, &[700, 3000, 700], kv_heads, d, dtype, 0.0);
        let rows = caches.rows();
        let each = kv_heads * group * d;
        let q = Queries::new(&mut numbers, &caches, group).cuda.to_dtype(DType::F32).unwrap();
        let q = with(&q, |q| q[each..2 * each].iter_mut().for_each(|x| *x *= 10.0));
        for selection in [Selection::dense(3, kv_heads), Selection::sink_window(&rows, kv_heads, 4, 300)] {
            let attend = |range: std::ops::Range<usize>| {
                let q = q.narrow(0, range.start, range.len()).unwrap();
                let heads = &selection.heads().unwrap()[range.start * kv_heads..range.end * kv_heads];
                let batch = Decode { q: &q, kv: caches.on_cuda(), rows: &rows[range] };
                attend(&batch, &heads.to_vec().into(), None).unwrap()
            };
            let together = attend(0..3);
            for i in 0..3 {
                let off = furthest(&attend(i..i + 1), &together.narrow(0, i, 1).unwrap());
                assert_eq!(off, 0.0, "{dtype:?} {d} {kv_heads}x{group}, row {i}");
            }
        }
    }
}

#[test]
fn a_head_whose_numbers_are_none_gives_none_and_spoils_no_other() {
    let mut numbers = Numbers(25);
    for (dtype, d, kv_heads, group) in every_group() {
        let lens = [200, 3000];
        let caches = Caches::new(&mut numbers, &lens, kv_heads, d, dtype, 0.0);
        let mut queries = Queries::new(&mut numbers, &caches, group);
        let (rows, q_heads) = (caches.rows(), kv_heads * group);
        let what = format!("{dtype:?} {d} {kv_heads}x{group}");
        let mixed: Vec<HeadSelection> =
            (0..2 * kv_heads).map(|i| mixed(&mut numbers, lens[i / kv_heads], group, 2)).collect();
        let selections = [Selection::dense(2, kv_heads), Selection::sink_window(&rows, kv_heads, 4, 100), mixed.into()];
        // One number of the last head's query in the second row.
        let clean = queries.cuda.clone();
        queries.cuda = with(&clean, |q| q[2 * q_heads * d - 3] = f32::NAN);
        let mut expected = vec![vec![false; q_heads]; 2];
        expected[1][q_heads - 1] = true;
        let batch = Decode { q: &queries.cuda, kv: caches.on_cuda(), rows: &rows };
        for (i, selection) in selections.iter().enumerate() {
            assert_eq!(none(&attend(&batch, selection, None).unwrap()), expected, "{what}, selection {i}");
        }
        let ranges = [([(0, 200), (0, 0)], 200), ([(0, 3000), (0, 0)], 3000)];
        let lists = |q: &Tensor| Lists::ranges(q, kv_heads, &ranges).unwrap();
        let asked = queries.batch(&caches);
        let of_lse = |lse: &Tensor| -> Vec<Vec<bool>> {
            lse.to_vec2::<f32>().unwrap().iter().map(|row| row.iter().map(|x| x.is_nan()).collect()).collect()
        };
        let first = Plan::new(lists(asked.q), &asked).unwrap().attend(&asked, None, DType::F32).unwrap();
        assert_eq!(of_lse(&first.1), expected, "{what}");
        // Joined to what has numbers.
        queries.cuda = clean;
        let (asked, empty) = (queries.batch(&caches), [([(0, 0), (0, 0)], 200), ([(0, 70), (0, 0)], 3000)]);
        let rest = Plan::new(Lists::ranges(asked.q, kv_heads, &empty).unwrap(), &asked).unwrap();
        let joined = rest.attend(&asked, Some((&first.0, &first.1)), DType::F32).unwrap();
        assert_eq!((none(&joined.0), of_lse(&joined.1)), (expected.clone(), expected), "{what}, joined");
        // A key that is none shows where it is read.
        let pool = [caches.cuda.0.dim(0).unwrap(), kv_heads, BLOCK_TOKENS, d];
        let at = ((caches.tables[1][2] as usize * kv_heads) * BLOCK_TOKENS + 10) * d;
        let k = with(&caches.cuda.0, |k| k[at] = f32::NAN).reshape(&pool).unwrap();
        let batch = Decode { q: &queries.cuda, kv: PagedKv { k: &k, v: &caches.cuda.1 }, rows: &rows };
        for (selection, read) in [(&selections[0], true), (&selections[1], false)] {
            let expected: Vec<Vec<bool>> =
                (0..2).map(|row| (0..q_heads).map(|head| read && row == 1 && head < group).collect()).collect();
            assert_eq!(none(&attend(&batch, selection, None).unwrap()), expected, "{what}, a key, read: {read}");
        }
    }
}

/// Keys and values of small whole numbers, but for a few heavy keys, whose values name them. The logarithm of the sum shows
/// each of the 16,384 blocks that would be left out or read twice: it moves by 6e-5.
#[test]
fn a_million_tokens_agree_with_f64() {
    const N: usize = 1 << 20;
    let (d, group, blocks) = (64, 4, N / BLOCK_TOKENS);
    let mut numbers = Numbers(26);
    let mut table: Vec<u32> = (0..blocks as u32).collect();
    for i in (1..blocks).rev() {
        table.swap(i, numbers.below(i + 1));
    }
    let bf16 = |values: Vec<f32>, shape: &[usize]| {
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap()
    };
    let q = numbers.tensor(&[1, group, d], DType::BF16);
    let asked = q.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    // Sixteen whole numbers between -2 and 2 from one draw; by token here, by place in the pool below.
    let mut small = || -> Vec<f32> {
        let sixteen = |x: u64| (0..16).map(move |i| (((x >> (4 * i) & 15) * 5) >> 4) as f32 - 2.0);
        (0..N * d / 16).flat_map(|_| sixteen(numbers.next())).collect()
    };
    let (mut k, mut v) = (small(), small());
    let heavy = [0, 63, 64, 4095, 65_535, 65_536, N / 3, N / 2 - 1, N / 2, N - 65, N - 64, N - 1];
    for (i, &token) in heavy.iter().enumerate() {
        // Each head has three, with some hundredths of its mass.
        let own = &asked[i % group * d..][..d];
        let factor = 10.0 * (d as f32).sqrt() / own.iter().map(|x| x * x).sum::<f32>();
        k[token * d..][..d].iter_mut().zip(own).for_each(|(k, q)| *k = half::bf16::from_f32(q * factor).to_f32());
        v[token * d..][..d].iter_mut().enumerate().for_each(|(c, v)| *v = if c % 12 == i { 8.0 } else { 0.0 });
    }
    let (mut out, mut lse) = (vec![0f64; group * d], Vec::new());
    let scale = (d as f64).sqrt();
    for (q, out) in asked.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
        let mut sum = 0f64;
        for (k, v) in k.chunks_exact(d).zip(v.chunks_exact(d)) {
            let e = (q.iter().zip(k).map(|(q, k)| f64::from(q * k)).sum::<f64>() / scale).exp();
            sum += e;
            out.iter_mut().zip(v).for_each(|(out, v)| *out += e * f64::from(*v));
        }
        out.iter_mut().for_each(|x| *x /= sum);
        lse.push(sum.ln());
    }
    let pool = |by_token: Vec<f32>| {
        let mut by_place = vec![0f32; N * d];
        for (rows, &block) in by_token.chunks_exact(BLOCK_TOKENS * d).zip(&table) {
            by_place[block as usize * BLOCK_TOKENS * d..][..BLOCK_TOKENS * d].copy_from_slice(rows);
        }
        drop(by_token);
        bf16(by_place, &[blocks, 1, BLOCK_TOKENS, d]).to_device(&device()).unwrap()
    };
    let (k, v) = (pool(k), pool(v));
    let tables = Tensor::from_vec(table, (1, blocks), &device()).unwrap();
    let q = q.to_device(&device()).unwrap().to_dtype(DType::BF16).unwrap();
    let (kv, lens) = (PagedKv { k: &k, v: &v }, crate::cache::u32s(vec![N as u32]));
    let batch = Batch { q: &q, kv, tables: &tables, lens: &lens, max_len: N };
    let n = N as u32;
    // As one range, and cut where no tile ends.
    for ranges in [[(0, n), (0, 0)], [(0, 333_333), (333_333, n)]] {
        let lists = Lists::ranges(&q, 1, &[(ranges, n)]).unwrap();
        let (got, got_lse) = Plan::new(lists, &batch).unwrap().attend(&batch, None, DType::F32).unwrap();
        for (got, lse) in elements(&got_lse).iter().zip(&lse) {
            below((got - lse).abs(), 3e-5, "the logarithm of the sum");
        }
        for (got, out) in elements(&got).chunks_exact(d).zip(out.chunks_exact(d)) {
            below(relative_of(got, out), LIMIT, "a head's output");
        }
    }
}
