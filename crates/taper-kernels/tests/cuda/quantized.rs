//! Keys at 2 bits a channel: what is kept of them, and scores by it.

use crate::cache::{Caches, GRID, Numbers, Queries, below, device, elements, u32s};
use crate::step::Both;
use candle_core::{DType, Device, Tensor};
use half::bf16;
use taper_kernels::cuda::index::{Metadata, Span, extend};
use taper_kernels::cuda::{Batch, Scores, quantized_scores};
use taper_kernels::decode::{Decode, DecodeRow, Over, Selection, top_paying};
use taper_kernels::index::quantized;
use taper_kernels::kv::BLOCK_TOKENS;

/// What no launch writes.
const UNWRITTEN: u32 = 0xDEAD_BEEF;
const SHAPES: [(DType, usize); 4] = [(DType::BF16, 128), (DType::F16, 128), (DType::BF16, 64), (DType::F16, 64)];

/// The words of a block of which so many rows are visible, by its keys `[64, d]`.
fn words(keys: &[f64], rows: usize, d: usize) -> Vec<u32> {
    let mut words = vec![0u32; 64 * d / 16];
    let (mut base, mut step) = (Vec::new(), Vec::new());
    for c in 0..d {
        let line: Vec<f32> = (0..rows).map(|r| keys[r * d + c] as f32).collect();
        let (mut lo, mut hi) = (line[0], line[0]);
        for &x in &line {
            lo = if x < lo || x.is_nan() { x } else { lo };
            hi = if x > hi || x.is_nan() { x } else { hi };
        }
        let one = (hi - lo) * 0.25;
        let limits = [1.0f32, 2.0, 3.0].map(|i| lo + i * one);
        for (t, x) in line.iter().enumerate() {
            let code = limits.iter().filter(|limit| x >= limit).count() as u32;
            let (i, m) = (c % 16 / 4, c % 4);
            words[c / 16 * 64 + t] |= code << (8 * [0, 2, 1, 3][m] + 2 * i);
        }
        base.push(bf16::from_f32(lo + 0.5 * one));
        step.push(bf16::from_f32(one));
    }
    let pair = |two: &[bf16]| u32::from(two[0].to_bits()) | u32::from(two[1].to_bits()) << 16;
    words.extend(base.chunks(2).chain(step.chunks(2)).map(pair));
    words
}

fn halves(word: u32) -> [bf16; 2] {
    [bf16::from_bits(word as u16), bf16::from_bits((word >> 16) as u16)]
}

/// An index of the cache in which nothing is yet.
fn unwritten(caches: &Caches) -> Tensor {
    let shape = (caches.cuda.0.dim(0).unwrap(), caches.kv_heads, 1, 5 * caches.head_dim);
    Tensor::full(UNWRITTEN, shape, &device()).unwrap().contiguous().unwrap()
}

/// Takes in the tokens of every sequence from one to another, those that it has.
fn take(caches: &Caches, index: &Tensor, from: usize, to: usize) {
    let span = |(&n, table): (&usize, u32)| Span { table, tokens: (from as u32, to.min(n) as u32) };
    let spans: Vec<Span> = caches.lens.iter().zip(0..).map(span).filter(|s| s.tokens.0 < s.tokens.1).collect();
    let to = Metadata { quantized: Some(index), ..Metadata::default() };
    extend(&caches.cuda.0, &caches.device_tables(), &spans, from, &to).unwrap();
}

fn read(index: &Tensor) -> Vec<u32> {
    index.to_device(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Fails unless the index has what a reference makes of the first `visible` tokens of each sequence, and nothing else.
#[track_caller]
fn right(caches: &Caches, index: &Tensor, visible: usize, what: &str) {
    let (keys, got, d) = (elements(&caches.cpu.0), read(index), caches.head_dim);
    let mut expected = vec![vec![UNWRITTEN; 5 * d]; got.len() / (5 * d)];
    for (table, &n) in caches.tables.iter().zip(&caches.lens) {
        for (b, &block) in table.iter().enumerate() {
            let rows = n.min(visible).saturating_sub(b * BLOCK_TOKENS).min(BLOCK_TOKENS);
            for head in 0..caches.kv_heads {
                let at = block as usize * caches.kv_heads + head;
                if rows > 0 {
                    expected[at] = words(&keys[at * BLOCK_TOKENS * d..][..BLOCK_TOKENS * d], rows, d);
                } else {
                    expected[at] = got[at * 5 * d..][..5 * d].to_vec();
                }
            }
        }
    }
    for (at, (got, expected)) in got.chunks(5 * d).zip(&expected).enumerate() {
        let (codes, lines) = got.split_at(4 * d);
        assert_eq!(codes, &expected[..4 * d], "{what}: codes of block {at}");
        let same = |(a, b): (bf16, bf16)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        let equal = |(a, b): (&u32, &u32)| halves(*a).into_iter().zip(halves(*b)).all(same);
        assert!(lines.iter().zip(&expected[4 * d..]).all(equal), "{what}: steps of block {at}");
    }
}

#[test]
fn a_block_is_a_function_of_its_visible_keys() {
    let mut numbers = Numbers(121);
    for (dtype, d) in SHAPES {
        let lens = [1, 63, 64, 65, 150];
        let caches = Caches::new(&mut numbers, &lens, 2, d, dtype, 0.0);
        // Channels that are one number, zeros of both signs, of any size; and some that are not finite.
        let mut odd = numbers.tensor(&[150, 2, d], dtype).flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (i, x) in odd.iter_mut().enumerate() {
            *x = match i % d {
                0 => 0.75,
                1 => 0.0 * x.signum(),
                2 => *x * 1e-6,
                3 => *x * 3e4 / 5.0,
                4 if i / (2 * d) == 100 => f32::NAN,
                5 if i / (2 * d) == 90 => f32::INFINITY,
                6 if i / (2 * d) == 80 => f32::NEG_INFINITY,
                _ => *x,
            };
        }
        let odd = Tensor::from_vec(odd, (150, 2, d), &Device::Cpu).unwrap();
        caches.set_keys(4, &odd.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap());

        let what = format!("{dtype:?} {d}");
        let whole = unwritten(&caches);
        take(&caches, &whole, 0, 150);
        right(&caches, &whole, 150, &format!("{what} at once"));
        let grown = unwritten(&caches);
        for n in 0..150 {
            take(&caches, &grown, n, n + 1);
            if n % 50 == 13 {
                right(&caches, &grown, n + 1, &format!("{what} row {n}"));
            }
        }
        assert_eq!(read(&grown), read(&whole), "{what} row by row");
        // Truncated, and grown again from there.
        take(&caches, &whole, 40, 41);
        right(&caches, &whole, 41, &format!("{what} cut"));
        take(&caches, &whole, 41, 150);
        assert_eq!(read(&whole), read(&grown), "{what} grown again");
    }
}

/// Scaled scores of each row and head over its tokens, in f64, by what the index says.
fn expected(caches: &Caches, queries: &Queries, index: &[u32], scale: f64) -> Vec<Vec<Vec<f64>>> {
    let (d, q) = (caches.head_dim, queries.cpu.to_vec3::<f32>().unwrap());
    let key = |words: &[u32], t: usize| -> Vec<f64> {
        let line = |first: usize, c: usize| halves(words[first + c / 2])[c % 2].to_f64();
        let code = |c: usize| words[c / 16 * 64 + t] >> (8 * [0, 2, 1, 3][c % 4] + 2 * (c % 16 / 4)) & 3;
        (0..d).map(|c| line(4 * d, c) + line(4 * d + d / 2, c) * f64::from(code(c))).collect()
    };
    let row = |(row, (table, &n)): (usize, (&Vec<u32>, &usize))| {
        let group = q[row].len() / caches.kv_heads;
        let keys = |head: usize| -> Vec<Vec<f64>> {
            let words = |t: usize| (table[t / BLOCK_TOKENS] as usize * caches.kv_heads + head) * 5 * d;
            (0..n).map(|t| key(&index[words(t)..][..5 * d], t % BLOCK_TOKENS)).collect()
        };
        let head = |head: usize| {
            let keys = keys(head);
            // What four blocks tell of how sure scores are.
            let steps = |i: usize, c: usize| {
                let table = &table[..n.div_ceil(BLOCK_TOKENS)];
                let block = table[(2 * i + 1) * table.len() / 8] as usize * caches.kv_heads + head;
                halves(index[block * 5 * d + 4 * d + d / 2 + c / 2])[c % 2].to_f64()
            };
            let squares: Vec<f64> = (0..d).map(|c| (0..4).map(|i| steps(i, c).powi(2) / 4.0).sum()).collect();
            let line = |q: &Vec<f32>| {
                let square = |(q, s): (&f32, &f64)| bf16::from_f32(*q).to_f64().powi(2) * s;
                let variance = q.iter().zip(&squares).map(square).sum::<f64>() * scale * scale / 12.0;
                let scale = scale / (1.0 + std::f64::consts::FRAC_PI_4 * variance).sqrt();
                // Queries are rounded to bf16.
                let of = |(q, k): (&f32, &f64)| bf16::from_f32(*q).to_f64() * k;
                let dot = |k: &Vec<f64>| q.iter().zip(k).map(of).sum::<f64>() * scale;
                keys.iter().map(dot).collect::<Vec<f64>>()
            };
            q[row][head * group..][..group].iter().map(line).collect::<Vec<_>>()
        };
        (0..caches.kv_heads).flat_map(head).collect()
    };
    caches.tables.iter().zip(&caches.lens).enumerate().map(row).collect()
}

/// Gives neighbouring blocks steps of other sizes, so that it matters which of them tell how sure scores are, and keys
/// of that mean.
fn unequal(numbers: &mut Numbers, caches: &Caches, mean: f64) {
    for (i, &n) in caches.lens.iter().enumerate() {
        let keys = numbers.tensor(&[n, caches.kv_heads, caches.head_dim], caches.dtype);
        // Powers of two, so that keys stay numbers of their dtype.
        let scales: Vec<f32> = (0..n).map(|t| [1.0, 0.25, 4.0, 0.5, 2.0][t / BLOCK_TOKENS * 3 % 5]).collect();
        let scales = Tensor::from_vec(scales, (n, 1, 1), &Device::Cpu).unwrap();
        let keys = (keys.broadcast_mul(&scales).unwrap() + mean).unwrap();
        caches.set_keys(i, &keys.to_dtype(caches.dtype).unwrap().to_dtype(DType::F32).unwrap());
    }
}

fn scored(batch: &Batch, index: &Tensor) -> (Vec<Vec<Vec<f32>>>, Vec<Vec<f32>>) {
    let found: Scores = quantized_scores(batch, index, 1.0 / (batch.q.dim(2).unwrap() as f32).sqrt()).unwrap();
    (found.values().to_vec3().unwrap(), found.lse().to_vec2().unwrap())
}

#[test]
fn scores_agree_with_f64_whatever_else_is_in_the_batch() {
    let mut numbers = Numbers(122);
    let lens = [1, 63, 64, 65, 1000, 5003];
    for (dtype, d) in SHAPES {
        for (kv_heads, group) in [(2, 1), (1, 3), (2, 4), (1, 8), (1, 16)] {
            let what = format!("{dtype:?} {d} {kv_heads}x{group}");
            let caches = Caches::new(&mut numbers, &lens, kv_heads, d, dtype, 0.0);
            unequal(&mut numbers, &caches, 0.0);
            let queries = Queries::new(&mut numbers, &caches, group);
            let index = unwritten(&caches);
            take(&caches, &index, 0, 5003);
            let batch = queries.batch(&caches);
            let (values, lse) = scored(&batch, &index);
            let want = expected(&caches, &queries, &read(&index), 1.0 / (d as f64).sqrt());
            for (row, &n) in lens.iter().enumerate() {
                let (q, len) = (batch.q.narrow(0, row, 1).unwrap(), u32s(vec![n as u32]));
                // In memory of its own: a view may begin anywhere.
                let table = batch.tables.index_select(&u32s(vec![row as u32]), 0).unwrap();
                let alone = Batch { q: &q, tables: &table, lens: &len, max_len: n, ..queries.batch(&caches) };
                let (own, own_lse) = scored(&alone, &index);
                for (head, want) in want[row].iter().enumerate() {
                    let got = &values[row][head][..n];
                    let most = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                    let apart = got.iter().zip(want).fold(0.0f64, |apart, (a, b)| {
                        let off = (f64::from(*a) - b).abs();
                        if off.is_nan() { off } else { apart.max(off) }
                    });
                    below(apart / most, 1e-2, &format!("{what} row {row} head {head}"));
                    let sum: f64 = got.iter().map(|&x| f64::from(x).exp()).sum();
                    below((f64::from(lse[row][head]) - sum.ln()).abs(), 1e-3, &format!("{what} row {row} lse"));
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&own[0][head][..n]), bits(got), "{what} row {row} alone");
                    assert_eq!(own_lse[0][head].to_bits(), lse[row][head].to_bits(), "{what} row {row} lse alone");
                }
            }
        }
    }
}

/// Sinks and window.
const FIXED: (usize, usize) = (5, 37);

/// The shares of a group's heads, by their scores `[heads][tokens]` and log-sum-exps, as one.
fn shares(scores: &[Vec<f32>], lse: &[f32], n: usize, over: Over) -> Vec<f64> {
    let share = |t: usize, head: usize| (f64::from(scores[head][t]) - f64::from(lse[head])).exp();
    let heads = |t: usize| (0..scores.len()).map(move |head| share(t, head));
    let one = |t: usize| match over {
        Over::Sum => heads(t).sum(),
        Over::Max => heads(t).fold(0.0, f64::max),
    };
    (0..n).map(one).collect()
}

/// The least share that pays, as the CPU finds it (src/decode/paying.rs).
fn least(shares: &[f64], noise: f32, most: usize) -> f64 {
    const FIRST: u32 = (127 + 5) * 8 - 256;
    let bin = |share: &f64| (((*share as f32).to_bits() >> 20).saturating_sub(FIRST) as usize).min(255);
    let square = |bin: usize| (((17 + 2 * (bin as u128 % 8)).pow(2) << (2 * (bin / 8))) >> 8) as u64;
    let mut counts = [0u64; 256];
    shares.iter().for_each(|share| counts[bin(share)] += 1);
    let mut sum: u64 = (0..256).map(|bin| counts[bin] * square(bin)).sum();
    let mut left = shares.len();
    for bin in (0..256).rev().filter(|&bin| counts[bin] > 0) {
        let pays = square(bin) as f64 * left as f64 >= sum as f64 + f64::from(noise) * 18_014_398_509_481_984.0;
        left -= counts[bin] as usize;
        if !pays || shares.len() - left > most {
            return f64::from(f32::from_bits((bin as u32 + 1 + FIRST) << 20));
        }
        sum -= counts[bin] * square(bin);
    }
    0.0
}

/// What rows of queries in f32 read of what pays.
fn pays(
    (q, caches, rows): (&Tensor, &Caches, &[DecodeRow]),
    index: &Tensor,
    (k, over, noise): (&[usize], Over, f32),
) -> (Selection, Vec<Vec<u32>>) {
    let batch = Decode { q, kv: caches.on_cuda(), rows };
    let found = quantized::importance(&batch, index, &vec![true; k.len()], over).unwrap();
    let chosen = top_paying(rows, &found, FIXED, k, Some(noise)).unwrap();
    let tokens = chosen.tokens(rows).unwrap();
    (chosen, tokens)
}

#[test]
fn what_pays_is_what_scores_say_whatever_else_is_in_the_batch() {
    let mut numbers = Numbers(125);
    let lens = [3, 90, 700, 2500, 20_000];
    let grid = GRID.into_iter().chain([(DType::BF16, 128, 1, 16), (DType::BF16, 128, 8, 4)]);
    for (dtype, d, kv_heads, group) in grid {
        let both = Both::new(&mut numbers, (dtype, d, kv_heads, group), &lens);
        // Of some all scores are far from 0, on either side.
        unequal(&mut numbers, &both.caches, if group % 2 == 0 { 16.0 } else { 0.0 });
        let rows = both.caches.rows();
        let index = unwritten(&both.caches);
        take(&both.caches, &index, 0, 20_000);
        let (values, lse) = scored(&both.queries.batch(&both.caches), &index);
        for (over, noise, few) in
            [(Over::Max, 1e-7, 1), (Over::Sum, 1e-5, 1), (Over::Max, 1e-4, 20), (Over::Max, 1e6, 1)]
        {
            // Some lists take all there is, and are dense.
            let k: Vec<usize> = (0..both.heads())
                .map(|i| match lens[i / kv_heads] {
                    700 if i % kv_heads == 1 => 700,
                    n => n.saturating_sub(43) / few,
                })
                .collect();
            let (selection, tokens) = pays((&both.cuda_q, &both.caches, &rows), &index, (&k, over, noise));
            let what = format!("{dtype:?} {d} {kv_heads}x{group} {over:?} {noise}");
            let counts = selection.counts(&rows).unwrap();
            for (row, &n) in lens.iter().enumerate() {
                for head in 0..kv_heads {
                    let i = row * kv_heads + head;
                    let got = &tokens[i];
                    assert_eq!(got.len(), counts[i], "{what} list {i}");
                    if n <= FIXED.0 + FIXED.1 || k[i] >= n - FIXED.0 - FIXED.1 {
                        assert_eq!(got.len(), n, "{what} list {i}");
                        continue;
                    }
                    let heads = head * group..(head + 1) * group;
                    let all = shares(&values[row][heads.clone()], &lse[row][heads], n, over);
                    let between = FIXED.0..n - FIXED.1;
                    let least = least(&all[between.clone()], noise, k[i]);
                    for (t, share) in all.iter().enumerate() {
                        let taken = got.binary_search(&(t as u32)).is_ok();
                        let near = (share / least - 1.0).abs() < 1e-3;
                        assert!(
                            near || taken == (!between.contains(&t) || *share >= least),
                            "{what} list {i} of {}: token {t} of {share}, least {least}",
                            got.len()
                        );
                    }
                }
                let own = row * kv_heads..(row + 1) * kv_heads;
                let q = both.cuda_q.narrow(0, row, 1).unwrap();
                let alone = (&q, &both.caches, &rows[row..=row]);
                let (_, alone) = pays(alone, &index, (&k[own.clone()], over, noise));
                assert_eq!(alone, tokens[own], "{what} row {row} alone");
            }
        }
    }
}

/// A launch that chooses begins while the one right ahead still makes the end of the index, all of it behind a prompt;
/// queries come in the cache's dtype, so that nothing stands between the two. Of 40,000 and 30,000 tokens the last
/// 10,001 and one are in the making, then all.
#[test]
fn blocks_that_were_made_right_ahead_are_seen() {
    let mut numbers = Numbers(126);
    let both = Both::new(&mut numbers, GRID[0], &[40_000, 30_000]);
    let (rows, k) = (both.caches.rows(), vec![20_000; both.heads()]);
    let choose = |index: &Tensor| pays((&both.queries.cuda, &both.caches, &rows), index, (&k, Over::Max, 1e-6)).1;
    let whole = unwritten(&both.caches);
    take(&both.caches, &whole, 0, 40_000);
    device().synchronize().unwrap();
    let settled = choose(&whole);
    for i in 0..50 {
        for from in [29_999, 0] {
            let index = unwritten(&both.caches);
            if from > 0 {
                take(&both.caches, &index, 0, from);
            }
            device().synchronize().unwrap();
            take(&both.caches, &index, from, 40_000);
            assert_eq!(choose(&index), settled, "{i}: from {from}");
        }
    }
}

/// A key that is no number takes its head's scores with it where its block is one of those that tell how sure scores
/// are, else its block's; a query its own head's.
#[test]
fn what_is_no_number_stays_where_it_is() {
    let mut numbers = Numbers(123);
    let (dtype, d, lens, group) = (DType::BF16, 128, [130, 200], 4);
    let caches = Caches::new(&mut numbers, &lens, 2, d, dtype, 0.0);
    let mut keys = numbers.tensor(&[130, 2, d], dtype).flatten_all().unwrap().to_vec1::<f32>().unwrap();
    keys[(70 * 2) * d + 5] = f32::NAN;
    caches.set_keys(0, &Tensor::from_vec(keys, (130, 2, d), &Device::Cpu).unwrap());
    let queries = Queries::new(&mut numbers, &caches, group);
    let q = crate::cache::with(&queries.cuda, |q| q[(8 + 6) * d + 77] = f32::NAN);
    let index = unwritten(&caches);
    take(&caches, &index, 0, 200);
    let (values, _) = scored(&Batch { q: &q, ..queries.batch(&caches) }, &index);
    for (row, &n) in lens.iter().enumerate() {
        for (head, line) in values[row].iter().enumerate() {
            for (t, x) in line[..n].iter().enumerate() {
                // All three blocks tell.
                let none = (row == 0 && head < group) || (row == 1 && head == 6);
                assert_eq!(x.is_nan(), none, "row {row} head {head} token {t}: {x}");
            }
        }
    }
}

#[test]
fn an_index_of_another_shape_is_an_error_that_says_so() {
    let mut numbers = Numbers(124);
    let caches = Caches::new(&mut numbers, &[70], 2, 64, DType::BF16, 0.0);
    let queries = Queries::new(&mut numbers, &caches, 4);
    let wrong = Tensor::zeros((caches.cuda.0.dim(0).unwrap(), 2, 1, 640), DType::U32, &device()).unwrap();
    let error = quantized_scores(&queries.batch(&caches), &wrong, 1.0).unwrap_err().to_string();
    assert!(error.starts_with("quantized_scores: index"), "{error}");
    let to = Metadata { quantized: Some(&wrong), ..Metadata::default() };
    let spans = [Span { table: 0, tokens: (0, 70) }];
    let error = extend(&caches.cuda.0, &caches.device_tables(), &spans, 0, &to).unwrap_err().to_string();
    assert!(error.starts_with("index-extend: quantized"), "{error}");
}
