//! Values drawn from what selections of every kind name, and queries of which only some features are left.

use crate::cache::{Caches, GRID, LIMIT, Numbers, Queries, below, device, elements, every_group, furthest, relative};
use candle_core::{DType, Tensor};
use taper_kernels::budget::{Promise, Rule};
use taper_kernels::decode::{
    By, Decode, DecodeRow, Foreseen, HeadSelection, Keys, Over, Sample, Sampling, Selection, Spread, Targets, attend,
    bernoulli_queries, importance, sample, sample_some, sample_values, scores, top_k, top_p,
};
use taper_kernels::index::{bounds, clusters};
use taper_kernels::kv::BLOCK_TOKENS;
use taper_kernels::philox::Stream;

const LENS: [usize; 4] = [3, 90, 700, 2500];
const SPREADS: [Spread; 9] = [
    Spread::Whole(Targets::Systematic),
    Spread::Whole(Targets::Stratified),
    Spread::Whole(Targets::Independent),
    Spread::LargestRemainder(7),
    Spread::LargestRemainder(100),
    Spread::LargestRemainder(128),
    Spread::EachTile(1),
    Spread::EachTile(90),
    Spread::EachTile(65_536),
];

fn streams(numbers: &mut Numbers, lens: &[usize]) -> Vec<Stream> {
    lens.iter().map(|&n| Stream { seed: numbers.next(), layer: 3, head: 0, position: n as u32 - 1 }).collect()
}

/// Some keys of a row, as ranges, single tokens and, but for the first of `kind`s, a sample of log weight 0, of which every
/// head reads another share.
fn keys(numbers: &mut Numbers, n: usize, group: usize, kind: usize) -> HeadSelection {
    if n < 20 {
        return HeadSelection::Keys(Keys { ranges: vec![0..1, n - 1..n], ..Keys::default() });
    }
    let (first, second) = (n / 20..n / 10, n / 2..n / 2 + 2 + n / 7);
    let third = n - n / 9 - 1..n;
    let ranges = match kind {
        0 => vec![first, third],
        1 => vec![third],
        _ => vec![first, second, third],
    };
    let left: Vec<u32> =
        (0..n as u32).filter(|&id| !ranges.iter().any(|range| range.contains(&(id as usize)))).collect();
    let (mut ids, mut drawn) = (Vec::new(), Vec::new());
    for id in left {
        match numbers.below(4) {
            0 => ids.push(id),
            1 => drawn.insert(numbers.below(drawn.len() + 1), id),
            _ => {}
        }
    }
    let counts = (0..group).map(|g| drawn.len() - g * drawn.len() / (2 * group)).collect();
    let sample = (kind > 0 && !drawn.is_empty()).then_some(Sample {
        ids: drawn,
        counts,
        log_weights: vec![0.0; group],
        output: Vec::new(),
    });
    HeadSelection::Keys(Keys { ranges, ids, sample })
}

/// Scores that are all 0 make every sum exact, so every draw must fall on the same key. A list that is as long as its row is
/// in the order of the tokens.
#[test]
fn draws_from_any_list_fall_where_they_fall_on_the_cpu() {
    let mut numbers = Numbers(81);
    for (dtype, d, kv_heads, group) in every_group() {
        let caches = Caches::new(&mut numbers, &LENS, kv_heads, d, dtype, 0.5);
        let (rows, of) = (caches.rows(), streams(&mut numbers, &LENS));
        let zeros = |device| Tensor::zeros((LENS.len(), kv_heads * group, d), DType::F32, device).unwrap();
        let (q, cuda_q) = (zeros(&candle_core::Device::Cpu), zeros(&device()));
        let on_cpu = Decode { q: &q, kv: caches.on_cpu(), rows: &rows };
        let on_cuda = Decode { q: &cuda_q, kv: caches.on_cuda(), rows: &rows };
        let heads: Vec<HeadSelection> = (0..LENS.len() * kv_heads)
            .map(|i| match i % 4 {
                3 => HeadSelection::Dense,
                kind => keys(&mut numbers, LENS[i / kv_heads], group, kind),
            })
            .collect();
        let selection = Selection::from(heads);
        for spread in SPREADS {
            let what = format!("{dtype:?} {d} {kv_heads}x{group} {spread:?}");
            let drawn = |batch: &Decode| sample_values(batch, &selection, By::Keys, &of, 47, spread).unwrap();
            let (cpu, cuda) = (drawn(&on_cpu), drawn(&on_cuda));
            let (expected, got) = (cpu.tokens(&rows).unwrap(), cuda.tokens(&rows).unwrap());
            let mut checked = 0;
            for (i, head) in cpu.heads().unwrap().iter().enumerate() {
                if matches!(head, HeadSelection::Values(_)) {
                    assert_eq!(got[i], expected[i], "{what}: list {i}");
                    checked += 1;
                }
            }
            assert!(checked >= kv_heads, "{what}: {checked} lists were drawn from");
            let out = attend(&on_cpu, &cpu, None).unwrap();
            below(relative(&attend(&on_cuda, &cuda, None).unwrap(), &out), LIMIT, &what);
        }
    }
}

/// Caches and queries of both devices.
struct Both {
    caches: Caches,
    queries: Queries,
    cuda_q: Tensor,
    streams: Vec<Stream>,
    group: usize,
}

impl Both {
    fn new(numbers: &mut Numbers, (dtype, d, kv_heads, group): (DType, usize, usize, usize), lens: &[usize]) -> Self {
        let caches = Caches::new(numbers, lens, kv_heads, d, dtype, 0.5);
        let queries = Queries::new(numbers, &caches, group);
        let cuda_q = queries.cpu.to_device(&device()).unwrap();
        Self { caches, queries, cuda_q, streams: streams(numbers, lens), group }
    }

    fn heads(&self) -> usize {
        self.caches.lens.len() * self.caches.kv_heads
    }

    fn batches<'a>(&'a self, rows: &'a [DecodeRow<'a>]) -> [Decode<'a>; 2] {
        [self.queries.decode(&self.caches, rows), Decode { q: &self.cuda_q, kv: self.caches.on_cuda(), rows }]
    }

    /// Fails unless draws from what either device chose come to as many values, and to outputs within the limit.
    #[track_caller]
    fn alike(&self, rows: &[DecodeRow], chosen: [&Selection; 2], by: [By; 2], spread: Spread, limit: f64, what: &str) {
        let [cpu, cuda] = self.batches(rows);
        let drawn =
            |batch: &Decode, of: &Selection, by| sample_values(batch, of, by, &self.streams, 64, spread).unwrap();
        let (a, b) = (drawn(&cpu, chosen[0], by[0]), drawn(&cuda, chosen[1], by[1]));
        let counts = a.counts(rows).unwrap().into_iter().zip(b.counts(rows).unwrap());
        counts.for_each(|(a, b)| assert!(a.abs_diff(b) <= 2 + a / 20, "{what}: {a} and {b} values"));
        // What was scored for it, where the device alone knows how much it chose from.
        if chosen[1].counts_wait() {
            let known = |head| matches!(by[1], By::Scores(known) if known.has(head));
            let from = chosen[1].counts(rows).unwrap().into_iter().enumerate();
            let scored: usize = from.filter(|&(i, n)| n > 64 && !known(i)).map(|(_, n)| n).sum();
            assert_eq!(b.scored().unwrap().unwrap().iter().sum::<usize>(), scored, "{what}");
        }
        let (a, b) = (attend(&cpu, &a, None).unwrap(), attend(&cuda, &b, None).unwrap());
        below(relative(&b, &a), limit, what);
    }
}

/// A draw of 64 that falls on another key, by rounding, moves an output by some tenth.
const DRAWN: f64 = 0.1;

#[test]
fn values_of_what_was_chosen_on_the_device_are_those_of_the_cpu() {
    let mut numbers = Numbers(82);
    for (at, grid) in GRID.into_iter().enumerate() {
        let both = Both::new(&mut numbers, grid, &LENS);
        let rows = both.caches.rows();
        let [cpu, cuda] = both.batches(&rows);
        let spread = |i: usize| SPREADS[(at + i) % 6];
        let wanted = vec![true; both.heads()];
        let (found, cuda_found) = (scores(&cpu, &wanted).unwrap(), scores(&cuda, &wanted).unwrap());
        let k: Vec<usize> = (0..both.heads()).map(|i| 40 * (1 + i % 5)).collect();
        let top = |of| top_k(&rows, &importance(of, Over::Sum), 5, 37, &k).unwrap();
        let most = |of| top_p(&rows, &importance(of, Over::Sum), 5, 37, 0.6, both.group).unwrap();
        let few = |batch: &Decode| {
            let fixed = Selection::sink_window(&rows, both.caches.kv_heads, 5, 37);
            sample_some(batch, &fixed, &k, &both.streams).unwrap()
        };
        let other = [&cpu, &cuda].map(|batch| bernoulli_queries(batch, &both.streams, 4, at % 2 == 0).unwrap());
        for (i, (name, of_cpu, of_cuda)) in [
            ("the heaviest", top(&found), top(&cuda_found)),
            ("a share", most(&found), most(&cuda_found)),
            ("a sample", few(&cpu), few(&cuda)),
            (
                "sinks and a window",
                Selection::sink_window(&rows, grid.2, 5, 100),
                Selection::sink_window(&rows, grid.2, 5, 100),
            ),
        ]
        .iter()
        .enumerate()
        {
            let what = |by: &str| format!("{grid:?}, of {name}, {by}, {:?}", spread(i));
            let chosen = [of_cpu, of_cuda];
            both.alike(&rows, chosen, [By::Keys; 2], spread(i), DRAWN, &what("by keys"));
            let by = [By::Scores(&found), By::Scores(&cuda_found)];
            both.alike(&rows, chosen, by, spread(i), DRAWN, &what("by scores"));
            // Queries that bf16 does not hold exactly move more.
            let by = [By::Queries(&other[0]), By::Queries(&other[1])];
            both.alike(&rows, chosen, by, spread(i), 0.3, &what("by other queries"));
        }
        // All of it, by other queries: short rows are read as they are.
        let all = Selection::dense(rows.len(), grid.2);
        let by = [By::Queries(&other[0]), By::Queries(&other[1])];
        both.alike(&rows, [&all, &all], by, spread(4), 0.3, &format!("{grid:?}, of all"));
    }
}

#[test]
fn values_of_pages_and_clusters_are_those_of_the_cpu() {
    let mut numbers = Numbers(83);
    for (at, grid) in GRID.into_iter().enumerate() {
        let both = Both::new(&mut numbers, grid, &LENS);
        let (rows, kv_heads) = (both.caches.rows(), grid.2);
        let [cpu, cuda] = both.batches(&rows);
        let parts = both.caches.parts(0, usize::MAX);
        let blocks = both.caches.cpu.0.dim(0).unwrap();
        let index = |shape: (usize, usize), dtype, device| {
            taper_kernels::kv::zeros((blocks, kv_heads, shape.0, shape.1), dtype, device).unwrap()
        };
        let page = [16, 64, 4, 32][at % 4];
        let shape = bounds::shape(page, grid.1);
        let pages =
            [(&candle_core::Device::Cpu, &both.caches.cpu.0), (&device(), &both.caches.cuda.0)].map(|(at, k)| {
                let index = index(shape, grid.0, at);
                bounds::extend(&index, k, &parts).unwrap();
                index
            });
        let (wanted, k) = (vec![true; both.heads()], vec![300; both.heads()]);
        let by_pages = |batch: &Decode, index: &Tensor| {
            top_k(&rows, &bounds::importance(batch, index, &wanted, Over::Sum).unwrap(), 5, 37, &k).unwrap()
        };
        let chosen = [&by_pages(&cpu, &pages[0]), &by_pages(&cuda, &pages[1])];
        both.alike(&rows, chosen, [By::Keys; 2], SPREADS[at % 6], DRAWN, &format!("{grid:?}, pages of {page}"));

        // Clusters that are given, so that both choose the same.
        let count = 20;
        let at_random: Vec<i16> = (0..blocks * kv_heads * BLOCK_TOKENS).map(|_| numbers.below(count) as i16).collect();
        let ids = Tensor::from_vec(at_random, (blocks, kv_heads, BLOCK_TOKENS, 1), &candle_core::Device::Cpu).unwrap();
        let logits = numbers.tensor(&[rows.len(), kv_heads * grid.3, count], DType::F32);
        let by_clusters = |batch: &Decode, at: &candle_core::Device| {
            let (ids, logits) = (ids.to_device(at).unwrap(), logits.to_device(at).unwrap());
            clusters::select(batch, &ids, &logits, (5, 37), clusters::Probes::Clusters(6, usize::MAX)).unwrap()
        };
        let chosen = [&by_clusters(&cpu, &candle_core::Device::Cpu), &by_clusters(&cuda, &device())];
        both.alike(&rows, chosen, [By::Keys; 2], SPREADS[(at + 1) % 6], DRAWN, &format!("{grid:?}, clusters"));
    }
}

/// A sample that keeps a promise is drawn again for its keys: those that attention over the same selection has read. Budgets
/// of both devices may differ by rounding, so the device's draws are held against dense attention: on average they are what
/// the sample itself gives, which the promise holds near it.
#[test]
fn values_of_a_sample_that_keeps_a_promise_are_near_dense_attention() {
    let mut numbers = Numbers(84);
    for (at, grid) in GRID.into_iter().enumerate() {
        // As many rows as seeds, all of the same two sequences.
        let both = Both::new(&mut numbers, grid, &[100, 6000]);
        let (kv_heads, seeds) = (grid.2, 64);
        let one = both.caches.rows();
        let rows: Vec<DecodeRow> = (0..seeds).flat_map(|_| one.clone()).collect();
        let q = both.cuda_q.repeat((seeds, 1, 1)).unwrap();
        let batch = Decode { q: &q, kv: both.caches.on_cuda(), rows: &rows };
        let of: Vec<Stream> = (0..seeds).flat_map(|_| streams(&mut numbers, &both.caches.lens)).collect();
        let how = Sampling {
            promise: Promise::new(Rule::Chi2, 0.2, 0.1),
            hopeless: Promise::new(Rule::Chi2, 0.3, 0.1),
            pilot_tokens: 64,
            pilot_share: 0.01,
            dense_share: 0.5,
        };
        let found = scores(&batch, &vec![true; rows.len() * kv_heads]).unwrap();
        let by_scores = |page: bool| -> Selection {
            if !page {
                return top_k(&rows, &importance(&found, Over::Sum), 16, 64, &vec![50; rows.len() * kv_heads]).unwrap();
            }
            let shape = bounds::shape(16, grid.1);
            let blocks = both.caches.cuda.0.dim(0).unwrap();
            let index = taper_kernels::kv::zeros((blocks, kv_heads, shape.0, shape.1), grid.0, &device()).unwrap();
            let parts = both.caches.parts(0, usize::MAX);
            bounds::extend(&index, &both.caches.cuda.0, &parts).unwrap();
            let wanted = vec![true; rows.len() * kv_heads];
            top_k(
                &rows,
                &bounds::importance(&batch, &index, &wanted, Over::Sum).unwrap(),
                16,
                64,
                &vec![50; wanted.len()],
            )
            .unwrap()
        };
        let fixed = by_scores(at % 2 == 1);
        let (sampled, _) = sample(&batch, &fixed, &Foreseen::default(), None, &of, &how).unwrap();
        let what = format!("{grid:?}");
        let budgets = sampled.budgets().unwrap().unwrap();
        assert!(budgets.iter().any(|budget| budget.sampled > 0 && budget.sampled < budget.residual), "{what}");
        let spread = SPREADS[at % 3];
        let values = sample_values(&batch, &sampled, By::Keys, &of, 128, spread).unwrap();
        assert_eq!(values.budgets().unwrap().unwrap(), budgets, "{what}: the promise is that of the sample");
        let read = sampled.counts(&rows).unwrap();
        let scored: usize = values.scored().unwrap().unwrap().iter().sum();
        assert_eq!(scored, read.iter().filter(|&&n| n > 128).sum::<usize>(), "{what}");
        let exact = attend(&batch, &sampled, None).unwrap();
        let out = attend(&batch, &values, None).unwrap();
        // Short rows are read whole, by their probabilities.
        let (d, width) = (grid.1, 2 * kv_heads * grid.3 * grid.1);
        let (exact, out) = (elements(&exact), elements(&out));
        for (a, b) in out.chunks_exact(width).zip(exact.chunks_exact(width)) {
            below(crate::cache::relative_of(&a[..width / 2], &b[..width / 2]), LIMIT, &what);
        }
        // A mean of 128 values that are about 1 off in each element, over 64 seeds: over hundreds of elements the root mean
        // square stays within twice its standard error but for one run in 10^9 or so.
        let mut off = vec![0f64; width / 2];
        for (a, b) in out.chunks_exact(width).zip(exact.chunks_exact(width)) {
            off.iter_mut().zip(a[width / 2..].iter().zip(&b[width / 2..])).for_each(|(sum, (a, b))| *sum += a - b);
        }
        let mean: f64 = off.iter().map(|sum| (sum / seeds as f64).powi(2)).sum::<f64>() / off.len() as f64;
        below(mean.sqrt(), 2.0 / (128.0 * seeds as f64).sqrt(), &format!("{what}, {d} wide"));
    }
}

/// A row's values do not depend on those beside it, nor on how its rows were chosen for.
#[test]
fn values_of_a_row_do_not_depend_on_the_batch() {
    let mut numbers = Numbers(85);
    for grid in GRID {
        let both = Both::new(&mut numbers, grid, &LENS);
        let (rows, kv_heads) = (both.caches.rows(), grid.2);
        let [_, batch] = both.batches(&rows);
        let heads: Vec<HeadSelection> =
            (0..both.heads()).map(|i| keys(&mut numbers, LENS[i / kv_heads], both.group, i % 3)).collect();
        for spread in [Spread::Whole(Targets::Independent), Spread::LargestRemainder(100), Spread::EachTile(90)] {
            let drawn = |batch: &Decode, heads: &[HeadSelection], streams: &[Stream]| {
                sample_values(batch, &heads.to_vec().into(), By::Keys, streams, 20, spread).unwrap()
            };
            let together = drawn(&batch, &heads, &both.streams);
            let out = attend(&batch, &together, None).unwrap();
            let alone: Vec<Selection> = (0..rows.len())
                .map(|i| {
                    let q = batch.q.narrow(0, i, 1).unwrap();
                    let batch = Decode { q: &q, rows: &rows[i..=i], ..batch };
                    drawn(&batch, &heads[i * kv_heads..(i + 1) * kv_heads], &both.streams[i..=i])
                })
                .collect();
            let joined = Selection::join(alone);
            assert_eq!(together.tokens(&rows).unwrap()[kv_heads..], joined.tokens(&rows).unwrap()[kv_heads..]);
            let apart = attend(&batch, &joined, None).unwrap();
            // The shortest row is read as it is where it is alone.
            let rest = |t: &Tensor| t.narrow(0, 1, rows.len() - 1).unwrap();
            assert_eq!(furthest(&rest(&apart), &rest(&out)), 0.0, "{grid:?} {spread:?}");
            below(relative(&apart, &out), LIMIT, "the shortest row");
        }
    }
}

#[test]
fn numbers_that_are_none_show() {
    let mut numbers = Numbers(86);
    let both = Both::new(&mut numbers, GRID[0], &[700]);
    let rows = both.caches.rows();
    let q = (&both.cuda_q * f64::NAN).unwrap();
    let batch = Decode { q: &q, kv: both.caches.on_cuda(), rows: &rows };
    for selection in [Selection::dense(1, 2), Selection::sink_window(&rows, 2, 5, 100)] {
        let values = sample_values(&batch, &selection, By::Keys, &both.streams, 16, SPREADS[0]).unwrap();
        assert!(values.tokens(&rows).unwrap().concat().iter().all(|&id| id < 700));
        assert_eq!(values.counts(&rows).unwrap(), [16, 16]);
        let out = attend(&batch, &values, None).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(out.iter().all(|x| x.is_nan()), "what is no number shows");
    }
}

/// A team has more thread blocks than a short sequence has tiles. Rounding once gave one without any a share of the mass, and
/// with it draws from nowhere.
#[test]
fn short_sequences_are_drawn_from_as_often_as_anyone_likes() {
    let mut numbers = Numbers(88);
    let both = Both::new(&mut numbers, (DType::BF16, 64, 3, 3), &[2000, 700, 1300]);
    let (rows, dense) = (both.caches.rows(), Selection::dense(3, 3));
    let batch = Decode { q: &both.cuda_q, kv: both.caches.on_cuda(), rows: &rows };
    for _ in 0..400 {
        let streams = streams(&mut numbers, &both.caches.lens);
        let spread = Spread::Whole(Targets::Independent);
        let values = sample_values(&batch, &dense, By::Keys, &streams, 4096, spread).unwrap();
        let within = |(i, ids): (usize, &Vec<u32>)| ids.iter().all(|&id| (id as usize) < both.caches.lens[i / 3]);
        assert!(values.tokens(&rows).unwrap().iter().enumerate().all(within));
    }
}

#[test]
fn features_are_drawn_as_on_the_cpu() {
    let mut numbers = Numbers(87);
    for grid in GRID {
        let both = Both::new(&mut numbers, grid, &LENS);
        let rows = both.caches.rows();
        // A head of zeros, and one of which a number is none.
        let mut q = both.queries.cpu.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (d, width) = (grid.1, grid.1 * grid.2 * grid.3);
        q[..d].fill(0.0);
        q[width + 3] = f32::INFINITY;
        let q = Tensor::from_vec(q, both.queries.cpu.dims(), &candle_core::Device::Cpu).unwrap();
        let cuda_q = q.to_device(&device()).unwrap();
        let [cpu, cuda] = both.batches(&rows);
        let (cpu, cuda) = (Decode { q: &q, ..cpu }, Decode { q: &cuda_q, ..cuda });
        for (draws, shared) in [(1, false), (4, false), (64, false), (1, true), (5, true), (64, true)] {
            let of = |batch: &Decode| {
                let kept = bernoulli_queries(batch, &both.streams, draws, shared).unwrap();
                kept.flatten_all().unwrap().to_vec1::<f32>().unwrap()
            };
            let (a, b) = (of(&cpu), of(&cuda));
            for (i, (a, b)) in a.iter().zip(&b).enumerate() {
                // The same features are left; roots and quotients may round otherwise.
                let same = a == b || (a - b).abs() <= 1e-6 * a.abs();
                assert!(same && (*a == 0.0) == (*b == 0.0), "{grid:?} {draws} {shared}: {a} and {b} at {i}");
            }
        }
        let bf16 = cuda_q.to_dtype(grid.0).unwrap();
        let (a, b) =
            (bernoulli_queries(&Decode { q: &bf16, ..cuda }, &both.streams, 4, true), of_f32(&cuda, &both.streams));
        assert_eq!(a.unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap(), b, "{grid:?}: of the cache's dtype");
    }
}

fn of_f32(batch: &Decode, streams: &[Stream]) -> Vec<f32> {
    bernoulli_queries(batch, streams, 4, true).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}
