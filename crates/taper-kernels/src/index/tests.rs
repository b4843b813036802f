//! Indices against the plainest computation of what they stand for.

use super::clusters::{Centroids, Probes};
use super::*;
use crate::decode::{DecodeRow, HeadSelection, Keys, Over, top_k};
use crate::kv;
use crate::mlp::{Activation, Mlp, PerHead};
use crate::rotary::{Rotation, Rotations};
use crate::testing::{Cache, Numbers};
use candle_core::{DType, Device};

const D: usize = 24;

/// The parts of a sequence's first `to` tokens that come after the first `from`.
fn parts(table: &[u32], from: usize, to: usize) -> Vec<Part> {
    (from / BLOCK_TOKENS..to.div_ceil(BLOCK_TOKENS))
        .map(|i| Part {
            block: table[i],
            rows: from.saturating_sub(i * BLOCK_TOKENS)..BLOCK_TOKENS.min(to - i * BLOCK_TOKENS),
            start: i * BLOCK_TOKENS,
        })
        .collect()
}

fn index(cache: &Cache, rows: usize, width: usize, dtype: DType) -> Tensor {
    let (blocks, heads, ..) = cache.k.dims4().unwrap();
    kv::zeros((blocks, heads, rows, width), dtype, &Device::Cpu).unwrap()
}

/// Elements of an index as numbers, of the blocks of a table.
fn content(index: &Tensor, table: &[u32]) -> Vec<f64> {
    let table = Tensor::new(table, &Device::Cpu).unwrap();
    let numbers = index.index_select(&table, 0).unwrap().to_dtype(DType::F64).unwrap();
    numbers.flatten_all().unwrap().to_vec1().unwrap()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Importance by the book: softmax of each query head's scores, summed over the group.
fn shares(scores: &[Vec<f64>]) -> Vec<f64> {
    let mut total = vec![0.0; scores[0].len()];
    for scores in scores {
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        total.iter_mut().zip(scores).for_each(|(t, s)| *t += (s - max).exp() / sum);
    }
    total
}

/// The `count` largest of the places given, ascending.
fn best(importance: &[f64], places: std::ops::Range<usize>, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = places.collect();
    order.sort_by(|&a, &b| importance[b].total_cmp(&importance[a]));
    order.truncate(count);
    order.sort_unstable();
    order
}

fn keys(head: &HeadSelection) -> &Keys {
    match head {
        HeadSelection::Keys(keys) => keys,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_index_taken_in_piece_by_piece_equals_one_taken_in_at_once() {
    let mut numbers = Numbers(51);
    let cache = Cache::new(&mut numbers, 300, 2, D, DType::F16);
    let maps: PerHead<Mlp> = (0..4).map(|_| mlp(&mut numbers)).collect();
    let channels = vec![vec![1, 5, 20], vec![0, 2, 23]];
    let centroids: PerHead<Centroids> = (0..2).map(|_| centroids(&mut numbers, 7)).collect();
    let rotation = Rotations::new(|position| Rotation::new(position, &[0.5; D / 2], 1.0));
    type Extend<'a> = &'a dyn Fn(&Tensor, &[Part]) -> Result<()>;
    let (k, v, page) = (&cache.k, cache.kv().v, 16);
    let (rows, width) = bounds::shape(page, D);
    let (one, words) = quantized::shape(D);
    let all: [(Tensor, Extend); 6] = [
        (index(&cache, rows, width, DType::F16), &|to, parts| bounds::extend(to, k, parts)),
        (index(&cache, 64, 3, DType::F16), &|to, parts| labels::extend(to, k, parts, &channels)),
        (index(&cache, 64, 2, DType::U32), &|to, parts| codes::extend(to, k, parts, &maps)),
        (index(&cache, one, words, DType::U32), &|to, parts| quantized::extend(to, k, parts)),
        (index(&cache, 64, 1, DType::I16), &|to, parts| clusters::extend(to, k, parts, &centroids, Some(&rotation))),
        (index(&cache, 64 / page, 1, DType::F32), &|to, parts| norms::extend(to, v, parts)),
    ];
    for (to, extend) in all {
        extend(&to, &parts(&cache.table, 0, 300)).unwrap();
        let at_once = content(&to, &cache.table);
        assert!(at_once.iter().any(|&x| x != 0.0));
        let again = to.zeros_like().unwrap().contiguous().unwrap();
        for (from, end) in [(0, 1), (1, 63), (63, 64), (64, 200), (200, 201), (201, 300)] {
            extend(&again, &parts(&cache.table, from, end)).unwrap();
        }
        assert_eq!(content(&again, &cache.table), at_once);
        assert!(extend(&to, &[Part { block: 999, rows: 0..1, start: 0 }]).is_err());
        assert!(extend(&to.narrow(1, 0, 1).unwrap(), &parts(&cache.table, 0, 1)).is_err());
    }
}

/// Keys whose channels all span the same within a block, and queries that are whole numbers: rounding leaves scores as they are.
#[test]
fn shares_of_quantized_keys_are_those_of_f64_whatever_is_visible() {
    let (mut numbers, n, kv_heads, group) = (Numbers(57), 500usize, 2, 3);
    let scale_of = |token: usize| (1 + token / BLOCK_TOKENS) as f32;
    let mut keys = Vec::new();
    for token in 0..n {
        let end = |c: usize| if (token + c).is_multiple_of(2) { 2.0 } else { -2.0 };
        let key = (0..kv_heads * D)
            .map(|c| if token % BLOCK_TOKENS < 2 { end(c) } else { numbers.normal().clamp(-2.0, 2.0) });
        keys.extend(key.map(|x: f32| x * scale_of(token)));
    }
    let keys = Tensor::from_vec(keys, (n, kv_heads, D), &Device::Cpu).unwrap();
    let cache = Cache::from_rows(&keys, &keys, DType::F32);
    let stands = |token: usize, head: usize| -> Vec<f64> {
        let step = f64::from(scale_of(token));
        let code = |&key: &f32| ((f64::from(key) + 2.0 * step) / step).floor().clamp(0.0, 3.0);
        cache.keys[token][head].iter().map(|key| (code(key) - 1.5) * step).collect()
    };
    let (one, words) = quantized::shape(D);
    let to = index(&cache, one, words, DType::U32);
    quantized::extend(&to, &cache.k, &parts(&cache.table, 0, n)).unwrap();

    let visible = [70..n, 0..130, 3..4, 128..n];
    let rows = visible.clone().map(|visible| DecodeRow { table: &cache.table, visible });
    let whole = |mut q: Vec<f32>| {
        let most = q.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        q.iter_mut().for_each(|x| *x = (127.0 * *x / most).round() / 512.0);
        q
    };
    let q: Vec<f32> =
        (0..rows.len() * kv_heads * group).flat_map(|_| whole((0..D).map(|_| numbers.normal()).collect())).collect();
    let queries: Vec<_> = q.chunks_exact(D).collect();
    let tensor = Tensor::from_slice(&q, (rows.len(), kv_heads * group, D), &Device::Cpu).unwrap();
    let batch = Decode { q: &tensor, kv: cache.kv(), rows: &rows };
    let wanted: Vec<bool> = (0..rows.len() * kv_heads).map(|i| i != 2).collect();
    for over in [Over::Sum, Over::Max] {
        let importance = quantized::importance(&batch, &to, &wanted, over).unwrap();
        for (i, wanted) in wanted.iter().enumerate() {
            let (visible, head) = (&visible[i / kv_heads], i % kv_heads);
            let blocks = visible.start / BLOCK_TOKENS..visible.end.div_ceil(BLOCK_TOKENS);
            let mut expected = vec![0.0f64; visible.len()];
            for q in &queries[i * group..][..group] {
                let square: f64 = q.iter().map(|&x| f64::from(x).powi(2)).sum();
                let step =
                    |i: usize| f64::from(scale_of((blocks.start + (2 * i + 1) * blocks.len() / 8) * BLOCK_TOKENS));
                let variance = square * (0..4).map(|i| step(i).powi(2)).sum::<f64>() / 4.0 / 12.0 / D as f64;
                let by = 1.0 / (D as f64).sqrt() / (1.0 + std::f64::consts::FRAC_PI_4 * variance).sqrt();
                let score = |token| q.iter().zip(stands(token, head)).map(|(&q, k)| f64::from(q) * k).sum::<f64>() * by;
                let own = shares(&[visible.clone().map(score).collect()]);
                for (all, own) in expected.iter_mut().zip(own) {
                    *all = if over == Over::Max { all.max(own) } else { *all + own };
                }
            }
            let Some(found) = importance.of(i) else {
                assert!(!wanted);
                continue;
            };
            assert!(*wanted && found.len() == expected.len());
            for (found, exact) in found.iter().zip(expected) {
                assert!((f64::from(*found) - exact).abs() <= 2e-5 * exact, "{over:?} {i}: {found} {exact}");
            }
        }
    }
}

#[test]
fn bounds_hold_every_score_and_rank_pages_by_it() {
    let mut numbers = Numbers(52);
    for (n, page, group) in [(333usize, 16usize, 3usize), (200, 64, 1), (130, 4, 2)] {
        let cache = Cache::new(&mut numbers, n, 2, D, DType::F16);
        let q = numbers.tensor(&[1, 2 * group, D]);
        let (rows, width) = bounds::shape(page, D);
        let to = index(&cache, rows, width, DType::F16);
        bounds::extend(&to, &cache.k, &parts(&cache.table, 0, n)).unwrap();
        // A model's own window: the first page is seen in part.
        for start in [0, 37] {
            let row = [DecodeRow { table: &cache.table, visible: start..n }];
            let batch = Decode { q: &q, kv: cache.kv(), rows: &row };
            let importance = bounds::importance(&batch, &to, &[true, true], Over::Sum).unwrap();
            let chosen = top_k(&row, &importance, 5, 9, &[40, 40]).unwrap();
            let queries = &q.to_vec3::<f32>().unwrap()[0];
            for head in 0..2 {
                let pages: Vec<usize> = (start / page..n.div_ceil(page)).collect();
                let bound = |q: &[f32], p: usize| -> f64 {
                    let keys = &cache.keys[p * page..n.min((p + 1) * page)];
                    let over = |c: usize| keys.iter().map(|k| f64::from(k[head][c] * q[c])).fold(f64::MIN, f64::max);
                    let sum: f64 = (0..D).map(over).sum();
                    assert!(keys.iter().all(|k| dot(q, &k[head]) <= sum + 1e-4));
                    sum / (D as f64).sqrt()
                };
                let scores: Vec<Vec<f64>> =
                    (0..group).map(|g| pages.iter().map(|&p| bound(&queries[head * group + g], p)).collect()).collect();
                // Sinks are the sequence's first tokens, seen or not.
                let (low, high) = (start.max(5), n - 9);
                let places = low / page - start / page..(high - 1) / page + 1 - start / page;
                let expected: Vec<u32> = best(&shares(&scores), places, 40usize.div_ceil(page))
                    .into_iter()
                    .flat_map(|at| {
                        let first = pages[at] * page;
                        (first.max(low)..(first + page).min(high)).map(|t| t as u32)
                    })
                    .collect();
                assert_eq!(
                    keys(&chosen.heads().unwrap()[head]).ids,
                    expected,
                    "{n} tokens from {start}, pages of {page}"
                );
            }
        }
    }
}

#[test]
fn labels_of_all_channels_rank_as_true_scores_and_few_by_their_own() {
    let mut numbers = Numbers(53);
    let (n, group) = (300, 3);
    let cache = Cache::new(&mut numbers, n, 2, D, DType::F32);
    let q = numbers.tensor(&[2, 2 * group, D]);
    let rows = [0, 50].map(|start| DecodeRow { table: &cache.table, visible: start..n - start });
    let batch = Decode { q: &q, kv: cache.kv(), rows: &rows };
    let queries = q.to_vec3::<f32>().unwrap();
    for channels in [vec![(0..D as u32).collect::<Vec<_>>(); 2], vec![vec![3, 9, 17, 22], vec![0, 1, 2, 5]]] {
        let to = index(&cache, 64, channels[0].len(), DType::F32);
        labels::extend(&to, &cache.k, &parts(&cache.table, 0, n), &channels).unwrap();
        let importance = labels::importance(&batch, &to, &channels, &[true; 4], Over::Sum).unwrap();
        let chosen = top_k(&rows, &importance, 4, 10, &[25; 4]).unwrap();
        for (i, head) in chosen.heads().unwrap().iter().enumerate() {
            let (row, head_index) = (i / 2, i % 2);
            let visible = rows[row].visible.clone();
            let score = |g: usize, t: usize| {
                let (q, k) = (&queries[row][head_index * group + g], &cache.keys[t][head_index]);
                let of = |c: &u32| f64::from(q[*c as usize]) * f64::from(k[*c as usize]);
                channels[head_index].iter().map(of).sum::<f64>() / (D as f64).sqrt()
            };
            let scores: Vec<Vec<f64>> = (0..group).map(|g| visible.clone().map(|t| score(g, t)).collect()).collect();
            let expected: Vec<u32> =
                best(&shares(&scores), 4usize.saturating_sub(visible.start)..visible.len() - 10, 25)
                    .into_iter()
                    .map(|at| (visible.start + at) as u32)
                    .collect();
            assert_eq!(keys(head).ids, expected, "row {row}, head {head_index}");
        }
    }
    let to = index(&cache, 64, 2, DType::F32);
    for bad in [vec![vec![0, 24]; 2], vec![vec![0]; 2], vec![vec![0, 1]]] {
        assert!(labels::extend(&to, &cache.k, &parts(&cache.table, 0, n), &bad).is_err(), "{bad:?}");
    }
}

fn mlp(numbers: &mut Numbers) -> Mlp {
    let mut layer = |inputs: usize, outputs: usize| {
        let mut some = |n: usize| (0..n).map(|_| numbers.normal()).collect::<Vec<f32>>();
        (some(inputs * outputs), some(outputs))
    };
    Mlp::new(vec![layer(D, 8), layer(8, 32)], Activation::Silu).unwrap()
}

/// Tokens and first visible token: few, and more than one thread takes at once, from within a block on.
const SPANS: [(usize, usize); 2] = [(200, 0), (8997, 37)];

#[test]
fn codes_rank_by_equal_bits_and_ties_go_to_the_earlier_key() {
    let mut numbers = Numbers(54);
    let group = 2;
    for (n, start) in SPANS {
        let cache = Cache::new(&mut numbers, n, 2, D, DType::F32);
        let q = numbers.tensor(&[1, 2 * group, D]);
        let rows = [DecodeRow { table: &cache.table, visible: start..n }];
        let batch = Decode { q: &q, kv: cache.kv(), rows: &rows };
        let queries: PerHead<Mlp> = (0..2 * group).map(|_| mlp(&mut numbers)).collect();
        let signs = |m: &Mlp, x: &[f32]| m.forward(x).into_iter().map(|y| y >= 0.0).collect::<Vec<bool>>();
        let asked: Vec<Vec<bool>> =
            q.to_vec3::<f32>().unwrap()[0].iter().zip(queries.iter()).map(|(q, m)| signs(m, q)).collect();
        for codes in [1, group] {
            let maps: PerHead<Mlp> = (0..2 * codes).map(|_| mlp(&mut numbers)).collect();
            let to = index(&cache, 64, codes, DType::U32);
            codes::extend(&to, &cache.k, &parts(&cache.table, 0, n), &maps).unwrap();
            let importance = codes::importance(&batch, &to, &queries, &[true, true]).unwrap();
            let chosen = top_k(&rows, &importance, 41, 8, &[30, 30]).unwrap();
            for head in 0..2 {
                let score = |t: usize| -> f64 {
                    let equal = |g: usize| {
                        let key = signs(&maps[head * codes + g % codes], &cache.keys[t][head]);
                        asked[head * group + g].iter().zip(&key).filter(|(a, b)| a == b).count()
                    };
                    (0..group).map(equal).sum::<usize>() as f64
                };
                let scores: Vec<f64> = (0..n).map(score).collect();
                let expected: Vec<u32> = best(&scores, 41..n - 8, 30).into_iter().map(|t| t as u32).collect();
                assert_eq!(
                    keys(&chosen.heads().unwrap()[head]).ids,
                    expected,
                    "{n} tokens, {codes} codes, head {head}"
                );
            }
        }
    }
}

fn centroids(numbers: &mut Numbers, clusters: usize) -> Centroids {
    let rows: Vec<f32> = (0..clusters * D).map(|_| numbers.normal()).collect();
    Centroids::new(&rows, D).unwrap()
}

#[test]
fn clusters_are_read_by_preference_until_the_probes_or_the_keys_run_out() {
    let mut numbers = Numbers(55);
    for (n, start) in SPANS {
        let cache = Cache::new(&mut numbers, n, 1, D, DType::F32);
        let q = numbers.tensor(&[1, 2, D]);
        let rows = [DecodeRow { table: &cache.table, visible: start..n }];
        let batch = Decode { q: &q, kv: cache.kv(), rows: &rows };
        let of = centroids(&mut numbers, 9);
        let to = index(&cache, 64, 1, DType::I16);
        clusters::extend(&to, &cache.k, &parts(&cache.table, 0, n), &vec![of.clone()].into(), None).unwrap();
        let cluster: Vec<u16> = cache.keys.iter().map(|k| of.assign(&k[0])[0]).collect();
        // One head of the group prefers them in this order, the other has no preference.
        let logits: Vec<f32> = (0..18).map(|i| if i < 9 { ((i * 5) % 9) as f32 } else { -7.0 }).collect();
        let logits = candle_core::Tensor::from_vec(logits, (1, 2, 9), &candle_core::Device::Cpu).unwrap();
        let order: Vec<u16> = (0..9).rev().map(|rank| (0..9u16).find(|c| (c * 5) % 9 == rank).unwrap()).collect();
        let members = |count: usize| -> Vec<u32> {
            (41..n - 20).filter(|&t| order[..count].contains(&cluster[t])).map(|t| t as u32).collect()
        };
        let read = |probes: Probes| {
            let selection = clusters::select(&batch, &to, &logits, (41, 20), probes).unwrap();
            match &selection.heads().unwrap()[0] {
                HeadSelection::Keys(keys) => Some(keys.ids.clone()),
                _ => None,
            }
        };
        for count in 0..9 {
            assert_eq!(read(Probes::Clusters(count, n)), Some(members(count)), "{count} probes of {n} tokens");
            // As many keys as these clusters hold, or one fewer: exactly these; one more: one cluster more.
            let size = members(count).len();
            assert_eq!(read(Probes::Keys(&[size])), Some(members(count)));
            if count > 0 {
                assert_eq!(read(Probes::Keys(&[size - 1])), Some(members(count)));
                assert_eq!(read(Probes::Clusters(count, size - 1)), Some(members(count - 1)), "the cap");
            }
            if count < 8 {
                assert_eq!(read(Probes::Keys(&[size + 1])), Some(members(count + 1)));
            }
        }
        assert_eq!(read(Probes::Clusters(9, n)), None, "all clusters are everything");
        assert_eq!(read(Probes::Keys(&[n])), None);
        let one = logits.narrow(1, 0, 1).unwrap();
        assert!(clusters::select(&batch, &to, &one, (41, 20), Probes::Clusters(1, n)).is_err());
        assert!(clusters::select(&batch, &to, &logits, (41, 20), Probes::Keys(&[1, 1])).is_err());
    }
    assert!(Centroids::new(&[], D).is_err() && Centroids::new(&[0.0; D + 1], D).is_err());
}

/// Clusters that hold nothing of a context are no answer to a wish for keys.
#[test]
fn empty_clusters_do_not_stand_for_keys() {
    let n = 300;
    let cache = Cache::new(&mut Numbers(58), n, 1, D, DType::F32);
    let q = Numbers(59).tensor(&[1, 1, D]);
    let rows = [DecodeRow { table: &cache.table, visible: 0..n }];
    let batch = Decode { q: &q, kv: cache.kv(), rows: &rows };
    // Cluster 4 holds 100 keys from token 10 on, cluster 7 all others; 0 to 3, which are preferred, none.
    let to = index(&cache, 64, 1, DType::I16);
    let blocks = to.dim(0).unwrap();
    let mut ids = vec![0i16; blocks * BLOCK_TOKENS];
    for token in 0..n {
        let place = cache.table[token / BLOCK_TOKENS] as usize * BLOCK_TOKENS + token % BLOCK_TOKENS;
        ids[place] = if (10..110).contains(&token) { 4 } else { 7 };
    }
    let to = Tensor::from_vec(ids, (blocks, 1, BLOCK_TOKENS, 1), &Device::Cpu).unwrap();
    let logits = Tensor::from_vec((0..9).map(|c| -(c as f32)).collect(), (1, 1, 9), &Device::Cpu).unwrap();
    let read = |probes: Probes| {
        let selection = clusters::select(&batch, &to, &logits, (1, 1), probes).unwrap();
        let HeadSelection::Keys(keys) = &selection.heads().unwrap()[0] else { return None };
        Some(keys.ids.clone())
    };
    let fourth: Vec<u32> = (10..110).collect();
    assert_eq!(read(Probes::Keys(&[0])), Some(vec![]));
    for k in [1, 82, 100] {
        assert_eq!(read(Probes::Keys(&[k])), Some(fourth.clone()), "{k} keys");
    }
    assert_eq!(read(Probes::Keys(&[101])), None);
    // A cap is one still.
    assert_eq!(read(Probes::Clusters(9, 99)), Some(vec![]));
    assert_eq!(read(Probes::Clusters(9, 100)), Some(fourth));
}

/// Queries and keys are compared as they were before the rotary embedding.
#[test]
fn keys_are_assigned_as_they_were_before_they_were_turned() {
    let mut numbers = Numbers(56);
    let n = 150;
    let frequencies: Vec<f32> = (0..D / 2).map(|i| 1.0 / (i + 1) as f32).collect();
    let plain = numbers.tensor(&[n, 1, D]);
    let mut turned = plain.to_vec3::<f32>().unwrap();
    for (position, key) in turned.iter_mut().enumerate() {
        for (i, f) in frequencies.iter().enumerate() {
            let (sin, cos) = (position as f32 * f).sin_cos();
            let (a, b) = (key[0][i], key[0][i + D / 2]);
            (key[0][i], key[0][i + D / 2]) = (a * cos - b * sin, b * cos + a * sin);
        }
    }
    let flat: Vec<f32> = turned.into_iter().flatten().flatten().collect();
    let turned = Tensor::from_vec(flat, (n, 1, D), &Device::Cpu).unwrap();
    let cache = Cache::from_rows(&turned, &plain, DType::F32);
    let of = centroids(&mut numbers, 5);
    let to = index(&cache, 64, 1, DType::I16);
    let rotation = Rotations::new(|position| Rotation::new(position, &frequencies, 1.0));
    clusters::extend(&to, &cache.k, &parts(&cache.table, 0, n), &vec![of.clone()].into(), Some(&rotation)).unwrap();
    let assigned = content(&to, &cache.table);
    for (t, key) in plain.to_vec3::<f32>().unwrap().iter().enumerate() {
        assert_eq!(assigned[t] as u16, of.assign(&key[0])[0], "token {t}");
    }
}
