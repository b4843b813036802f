//! What decode methods call, on both devices: scores, choices, samples, indices, and the attention that follows.

use crate::cache::{Caches, GRID, LIMIT, Numbers, Queries, below, by_key, device, every_group, furthest, relative};
use candle_core::{DType, Device, Tensor};
use taper_kernels::budget::{Promise, Rule};
use taper_kernels::decode::{
    By, Decode, DecodeRow, Foreseen, Importance, Over, Sampling, Scores, Selection, Spread, Targets, attend,
    bernoulli_queries, foresee, importance, sample, sample_some, sample_values, scores, top_k, top_p, top_paying,
};
use taper_kernels::index::clusters::{self, Centroids, Probes};
use taper_kernels::index::{Part, bounds, codes, labels, quantized};
use taper_kernels::kv::BLOCK_TOKENS;
use taper_kernels::mlp::{self, Activation, Mlp, PerHead};
use taper_kernels::philox::Stream;
use taper_kernels::rotary::{Rotation, Rotations};

const LENS: [usize; 4] = [3, 90, 700, 2500];
/// Keys that are read whatever is chosen: neither number ends a page.
const FIXED: (usize, usize) = (5, 37);

/// The same rows on both devices, queries in f32 as a model hands them over.
pub struct Both {
    pub caches: Caches,
    pub queries: Queries,
    pub cuda_q: Tensor,
    pub group: usize,
}

impl Both {
    pub fn new(
        numbers: &mut Numbers,
        (dtype, d, kv_heads, group): (DType, usize, usize, usize),
        lens: &[usize],
    ) -> Self {
        let caches = Caches::new(numbers, lens, kv_heads, d, dtype, 0.5);
        let queries = Queries::new(numbers, &caches, group);
        let cuda_q = queries.cpu.to_device(&device()).unwrap();
        Self { caches, queries, cuda_q, group }
    }

    pub fn heads(&self) -> usize {
        self.caches.lens.len() * self.caches.kv_heads
    }

    /// What `run` says of the batch of either device.
    pub fn run<T>(&self, rows: &[DecodeRow], run: impl Fn(&Decode) -> T) -> (T, T) {
        let cuda = Decode { q: &self.cuda_q, kv: self.caches.on_cuda(), rows };
        (run(&self.queries.decode(&self.caches, rows)), run(&cuda))
    }

    /// An index of either device over all of the cache, taken in by parts of at most so many rows.
    pub fn index(
        &self,
        (rows, width, dtype): (usize, usize, DType),
        at_once: usize,
        extend: impl Fn(&Tensor, &Tensor, &[Part]),
    ) -> (Tensor, Tensor) {
        let shape = (self.caches.cpu.0.dim(0).unwrap(), self.caches.kv_heads, rows, width);
        let make = |device: &Device, k: &Tensor| {
            let index = taper_kernels::kv::zeros(shape, dtype, device).unwrap();
            let mut first = 0;
            while first < *self.caches.lens.iter().max().unwrap() {
                extend(&index, k, &self.caches.parts(first, first + at_once));
                first += at_once;
            }
            index
        };
        (make(&Device::Cpu, &self.caches.cpu.0), make(&device(), &self.caches.cuda.0))
    }

    pub fn streams(&self, numbers: &mut Numbers) -> Vec<Stream> {
        let one = |&n: &usize| Stream { seed: numbers.next(), layer: 3, head: 0, position: n as u32 - 1 };
        self.caches.lens.iter().map(one).collect()
    }
}

/// Fails unless both selections name as many keys, all but one in five hundred the same, and give the same outputs.
#[track_caller]
fn alike(both: &Both, rows: &[DecodeRow], (cpu, cuda): (Selection, Selection), what: &str) {
    let (expected, got) = (cpu.tokens(rows).unwrap(), cuda.tokens(rows).unwrap());
    assert_eq!(cuda.counts(rows).unwrap(), cpu.counts(rows).unwrap(), "{what}");
    let missed = |(a, b): (&Vec<u32>, &Vec<u32>)| a.iter().filter(|x| b.binary_search(x).is_err()).count();
    let apart: usize = expected.iter().zip(&got).map(missed).sum();
    let all: usize = expected.iter().map(Vec::len).sum();
    assert!(apart * 500 <= all, "{what}: {apart} of {all} keys differ");
    outputs(both, rows, (&cpu, &cuda), if apart > 0 { 0.1 } else { LIMIT }, what);
}

#[track_caller]
fn outputs(both: &Both, rows: &[DecodeRow], of: (&Selection, &Selection), limit: f64, what: &str) {
    let cuda = Decode { q: &both.cuda_q, kv: both.caches.on_cuda(), rows };
    let out = attend(&both.queries.decode(&both.caches, rows), of.0, None).unwrap();
    below(relative(&attend(&cuda, of.1, None).unwrap(), &out), limit, what);
}

/// What is chosen of each KV head by what both devices make of importance.
#[track_caller]
fn by_importance(both: &Both, rows: &[DecodeRow], (cpu, cuda): (&Importance, &Importance), what: &str) {
    assert_eq!(cpu.entries(rows.len()), cuda.entries(rows.len()), "{what}");
    // A number for each head: some take all there is.
    for step in [1, 33, 700] {
        let k: Vec<usize> = (0..both.heads()).map(|i| step * (1 + i % 3)).collect();
        let chosen = |of| top_k(rows, of, FIXED.0, FIXED.1, &k).unwrap();
        alike(both, rows, (chosen(cpu), chosen(cuda)), &format!("{what}, {step} keys"));
    }
}

/// The same by importance that is a share of the attention mass, over the group in either way.
#[track_caller]
fn by_number(both: &Both, rows: &[DecodeRow], of: impl Fn(Over) -> (Importance, Importance), what: &str) {
    for over in [Over::Sum, Over::Max] {
        let of = of(over);
        by_importance(both, rows, (&of.0, &of.1), &format!("{what}, {over:?} of a group"));
    }
}

/// The same, and of those that pay.
#[track_caller]
fn by_share(both: &Both, rows: &[DecodeRow], of: impl Fn(Over) -> (Importance, Importance), what: &str) {
    by_number(both, rows, &of, what);
    let of = of(Over::Max);
    let mut some = 0;
    for (most, noise) in [(2500, 1e-5), (2500, 1e-4), (2500, 1e-3), (40, 1e-4), (2500, 1e6)] {
        let k: Vec<usize> = (0..both.heads()).map(|i| most >> (i % 3)).collect();
        let chosen = |of| top_paying(rows, of, FIXED, &k, Some(noise)).unwrap();
        let (cpu, cuda) = (chosen(&of.0), chosen(&of.1));
        let counts: Vec<_> = cpu.counts(rows).unwrap().into_iter().zip(cuda.counts(rows).unwrap()).collect();
        let visible = |i: usize| rows[i / both.caches.kv_heads].visible.len();
        some +=
            counts.iter().enumerate().filter(|(i, of)| (FIXED.0 + FIXED.1 + 1..visible(*i)).contains(&of.0)).count();
        // Rounding: a page more or less where a share lies all but between two bins; a bin where it decides on one.
        let near = |a: usize, b: usize| a.abs_diff(b) <= 64 + a.max(b) / 4;
        counts.iter().for_each(|&(a, b)| assert!(near(a, b), "{what}, {most} at {noise}: {a} and {b} keys"));
        let apart: usize = counts.iter().map(|(a, b)| a.abs_diff(*b)).sum();
        outputs(
            both,
            rows,
            (&cpu, &cuda),
            if apart > 0 { 0.1 } else { LIMIT },
            &format!("{what}, what pays at {noise}"),
        );
    }
    assert!(some > 0, "{what}: no choice between nothing and everything");
}

#[test]
fn what_scores_choose_is_what_they_choose_on_the_cpu() {
    let mut numbers = Numbers(71);
    for grid in GRID {
        let both = Both::new(&mut numbers, grid, &LENS);
        let rows = both.caches.rows();
        let what = format!("{grid:?}");
        // Not all heads are wanted: the others are dense.
        let wanted: Vec<bool> = (0..both.heads()).map(|i| i != 2).collect();
        let (cpu, cuda) = both.run(&rows, |batch| scores(batch, &wanted).unwrap());
        let known = |of: &Scores| (of.keys(rows.len()), of.has(2), of.has(3));
        assert_eq!(known(&cpu), known(&cuda), "{what}");
        by_share(&both, &rows, |over| (importance(&cpu, over), importance(&cuda, over)), &what);
        for p in [0.2, 0.9, 1.0] {
            let chosen = |of| top_p(&rows, &importance(of, Over::Sum), FIXED.0, FIXED.1, p, both.group).unwrap();
            let (cpu, cuda) = (chosen(&cpu), chosen(&cuda));
            let counts = cpu.counts(&rows).unwrap().into_iter().zip(cuda.counts(&rows).unwrap());
            // Sums in another order: a key more or less where the share is all but reached.
            counts.for_each(|(a, b)| assert!(a.abs_diff(b) <= 2 + a / 200, "{what}, {p}: {a} and {b} keys"));
            outputs(&both, &rows, (&cpu, &cuda), 2.0 * LIMIT, &format!("{what}, share {p}"));
        }
        // Rows chosen apart, one of them in host memory, as one.
        let (_, cuda) = both.run(&rows, |batch| {
            let alone = |i: usize| {
                let (q, rows) = (batch.q.narrow(0, i, 1).unwrap(), &rows[i..=i]);
                let batch = Decode { q: &q, rows, ..*batch };
                let found = scores(&batch, &vec![i != 1; both.caches.kv_heads]).unwrap();
                top_k(rows, &importance(&found, Over::Sum), FIXED.0, FIXED.1, &vec![40; both.caches.kv_heads]).unwrap()
            };
            Selection::join((0..rows.len()).map(alone))
        });
        let (cpu, _) = both.run(&rows, |batch| {
            let wanted: Vec<bool> = (0..both.heads()).map(|i| i / both.caches.kv_heads != 1).collect();
            let found = importance(&scores(batch, &wanted).unwrap(), Over::Sum);
            top_k(&rows, &found, FIXED.0, FIXED.1, &vec![40; both.heads()]).unwrap()
        });
        alike(&both, &rows, (cpu, cuda), &format!("{what}, joined"));
    }
}

#[test]
fn samples_are_those_of_the_cpu() {
    let mut numbers = Numbers(72);
    for grid in GRID {
        let both = Both::new(&mut numbers, grid, &LENS);
        let (rows, streams) = (both.caches.rows(), both.streams(&mut numbers));
        let fixed = Selection::sink_window(&rows, both.caches.kv_heads, FIXED.0, FIXED.1);
        let sizes: Vec<usize> = (0..both.heads()).map(|i| 60 * (i % 4)).collect();
        let chosen = both.run(&rows, |batch| sample_some(batch, &fixed, &sizes, &streams).unwrap());
        alike(&both, &rows, chosen, &format!("{grid:?}, beside sinks and window"));
        let all = Selection::dense(rows.len(), both.caches.kv_heads);
        for (spread, features) in [
            (Spread::Whole(Targets::Systematic), false),
            (Spread::Whole(Targets::Independent), true),
            (Spread::LargestRemainder(256), false),
            (Spread::EachTile(128), false),
        ] {
            let (cpu, cuda) = both.run(&rows, |batch| {
                let q = bernoulli_queries(batch, &streams, 4, true).unwrap();
                let known = scores(batch, &vec![true; both.heads()]).unwrap();
                let by = if features { By::Queries(&q) } else { By::Scores(&known) };
                sample_values(batch, &all, by, &streams, 64, spread).unwrap()
            });
            let what = format!("{grid:?} {spread:?}");
            let counts = cpu.counts(&rows).unwrap().into_iter().zip(cuda.counts(&rows).unwrap());
            counts.for_each(|(a, b)| assert!(a.abs_diff(b) <= 2 + a / 50, "{what}: {a} and {b} values"));
            // A target at the edge between two keys may fall on the other, and a draw of 64 moves an output by some tenth;
            // queries that bf16 does not hold exactly move more.
            outputs(&both, &rows, (&cpu, &cuda), if features { 0.3 } else { 0.1 }, &what);
        }
    }
}

#[test]
fn samples_of_a_size_that_keeps_a_promise_are_those_of_the_cpu() {
    let mut numbers = Numbers(73);
    let mut apart = (0, 0);
    for grid in GRID {
        let both = Both::new(&mut numbers, grid, &[100, 250, 700, 6000]);
        let (rows, streams, kv_heads) = (both.caches.rows(), both.streams(&mut numbers), both.caches.kv_heads);
        let how = Sampling {
            promise: Promise::new(Rule::Chi2, 0.2, 0.1),
            hopeless: Promise::new(Rule::Chi2, 0.3, 0.1),
            pilot_tokens: 64,
            pilot_share: 0.01,
            dense_share: 0.5,
        };
        let k = vec![50; both.heads()];
        let (cpu, cuda) = both.run(&rows, |batch| {
            let foreseen = if batch.q.device().is_cuda() {
                foresee(batch, (16, 64), &k, &streams, &how).unwrap()
            } else {
                Foreseen::default()
            };
            let found = scores(batch, &vec![true; both.heads()]).unwrap();
            let fixed = top_k(&rows, &importance(&found, Over::Sum), 16, 64, &k).unwrap();
            sample(batch, &fixed, &foreseen, Some(&found), &streams, &how).unwrap()
        });
        let what = format!("{grid:?}");
        assert!(cuda.1.is_empty() && cuda.0.counts_wait(), "budgets wait until they are asked for");
        let cuda = (cuda.0.clone(), cuda.0.budgets().unwrap().expect("a sample's budgets"));
        assert_eq!(cuda.1.len(), cpu.1.len(), "{what}");
        let counts = cpu.0.counts(&rows).unwrap().into_iter().zip(cuda.0.counts(&rows).unwrap());
        let budgets = cpu.1.chunks(both.group).zip(cuda.1.chunks(both.group)).zip(counts);
        for ((a, b), (read, got)) in budgets {
            assert!(b.iter().all(|x| x == &b[0]), "{what}: a group shares its sample");
            // Where rounding moves a budget to the other side of what is drawn, one look more is made.
            let near = a[0].sampled.abs_diff(b[0].sampled) * 50 <= a[0].sampled;
            apart.0 += usize::from(!near);
            apart.1 += 1;
            assert_eq!(
                (a[0].residual, a[0].dense, a[0].pilot == 0),
                (b[0].residual, b[0].dense, b[0].pilot == 0),
                "{what}"
            );
            assert!(!near || read.abs_diff(got) * 50 <= read, "{what}: {read} and {got} keys");
        }
        let dense = Selection::dense(rows.len(), kv_heads);
        let (_, cuda_dense) = both.run(&rows, |batch| attend(batch, &dense, None).unwrap());
        let (_, out) = both.run(&rows, |batch| attend(batch, &cuda.0, None));
        // One head in ten may miss the promise; none by much.
        below(relative(&out.unwrap(), &cuda_dense), 0.25, &what);
    }
    assert!(apart.0 * 10 <= apart.1, "{apart:?} budgets differ");
}

#[test]
fn pages_and_channels_choose_what_they_choose_on_the_cpu() {
    let mut numbers = Numbers(74);
    for (at, grid) in every_group().enumerate() {
        // How many pay and how an index is taken in does not depend on the group.
        let all = at < GRID.len();
        let (dtype, d, kv_heads, _) = grid;
        let both = Both::new(&mut numbers, grid, &LENS);
        let rows = both.caches.rows();
        let wanted = vec![true; both.heads()];
        let page = [4, 8, 16, 32, 64][at % 5];
        let (pages, width) = bounds::shape(page, d);
        for &at_once in if all { &[7, 3000][..] } else { &[3000] } {
            let (cpu, cuda) =
                both.index((pages, width, dtype), at_once, |index, k, parts| bounds::extend(index, k, parts).unwrap());
            assert_eq!(furthest(&cuda, &cpu), 0.0, "pages of {page}, {at_once} at once");
            let found = |over| {
                both.run(&rows, |batch| {
                    let index = if batch.q.device().is_cuda() { &cuda } else { &cpu };
                    bounds::importance(batch, index, &wanted, over).unwrap()
                })
            };
            let what = format!("{grid:?}, pages of {page}");
            if all { by_share(&both, &rows, found, &what) } else { by_number(&both, &rows, found, &what) }
        }
        let width = [16, 32, 64][at % 3];
        let channels: Vec<Vec<u32>> =
            (0..kv_heads).map(|h| (0..width).map(|c| (3 * c + h) as u32 % d as u32).collect()).collect();
        let extend = |index: &Tensor, k: &Tensor, parts: &[Part]| labels::extend(index, k, parts, &channels).unwrap();
        let (cpu, cuda) = both.index((BLOCK_TOKENS, width, dtype), 50, extend);
        assert_eq!(furthest(&cuda, &by_key(&cpu)), 0.0, "{width} channels");
        let found = |over| {
            both.run(&rows, |batch| {
                let index = if batch.q.device().is_cuda() { &cuda } else { &cpu };
                labels::importance(batch, index, &channels, &wanted, over).unwrap()
            })
        };
        let what = format!("{grid:?}, {width} channels");
        if all { by_share(&both, &rows, found, &what) } else { by_number(&both, &rows, found, &what) }
    }
}

/// Codes' weights are rounded to other numbers on the CPU, so that only how much pays is nearly the same; tests of quantized keys
/// say what.
#[test]
fn as_much_pays_by_quantized_keys_as_on_the_cpu() {
    let mut numbers = Numbers(80);
    for grid in GRID {
        let both = Both::new(&mut numbers, grid, &LENS);
        let rows = both.caches.rows();
        let wanted: Vec<bool> = (0..both.heads()).map(|i| i != 2).collect();
        let (one, words) = quantized::shape(grid.1);
        let extend = |index: &Tensor, k: &Tensor, parts: &[Part]| quantized::extend(index, k, parts).unwrap();
        let (cpu, cuda) = both.index((one, words, DType::U32), 50, extend);
        let mut some = 0;
        for (over, most, noise) in [(Over::Max, 2500, 1e-5), (Over::Sum, 2500, 1e-4), (Over::Max, 40, 1e-4)] {
            let k: Vec<usize> = (0..both.heads()).map(|i| most >> (i % 3)).collect();
            let (cpu, cuda) = both.run(&rows, |batch| {
                let index = if batch.q.device().is_cuda() { &cuda } else { &cpu };
                let found = quantized::importance(batch, index, &wanted, over).unwrap();
                (found.entries(rows.len()), top_paying(&rows, &found, FIXED, &k, Some(noise)).unwrap())
            });
            assert_eq!(cpu.0, cuda.0, "{grid:?}");
            for (i, (a, b)) in cpu.1.counts(&rows).unwrap().into_iter().zip(cuda.1.counts(&rows).unwrap()).enumerate() {
                // A bin more or less.
                assert!(a.abs_diff(b) <= 16 + a.max(b) / 4, "{grid:?} {over:?} {noise} list {i}: {a} and {b} keys");
                let visible = rows[i / both.caches.kv_heads].visible.len();
                some += usize::from((FIXED.0 + FIXED.1 + 1..visible).contains(&a));
            }
        }
        assert!(some > 0, "{grid:?}: no choice between nothing and everything");
    }
}

/// The first step behind a prompt makes its index as a whole, right ahead of the launch that chooses by it.
#[test]
fn pages_that_were_made_right_ahead_are_seen() {
    let mut numbers = Numbers(79);
    let both = Both::new(&mut numbers, GRID[0], &[40_000, 30_000]);
    let (rows, wanted) = (both.caches.rows(), vec![true; both.heads()]);
    // In the cache's own type: nothing else stands between the index and the choice.
    let q = both.cuda_q.to_dtype(GRID[0].0).unwrap();
    let batch = Decode { q: &q, kv: both.caches.on_cuda(), rows: &rows };
    let (pages, width) = bounds::shape(16, GRID[0].1);
    let blocks = both.caches.cuda.0.dim(0).unwrap();
    let parts = both.caches.parts(0, 40_000);
    let shape = (blocks, both.caches.kv_heads, pages, width);
    let empty = || taper_kernels::kv::zeros(shape, GRID[0].0, &device()).unwrap();
    let choose = |index: &Tensor, parts: &[Part]| {
        bounds::extend(index, &both.caches.cuda.0, parts).unwrap();
        let found = bounds::importance(&batch, index, &wanted, Over::Sum).unwrap();
        top_k(&rows, &found, FIXED.0, FIXED.1, &vec![2000; wanted.len()]).unwrap().tokens(&rows).unwrap()
    };
    let index = empty();
    choose(&index, &parts);
    let settled = choose(&index, &both.caches.parts(39_999, 40_000));
    for _ in 0..50 {
        assert_eq!(choose(&empty(), &parts), settled);
    }
}

/// A perceptron of the widths given.
pub fn perceptron(numbers: &mut Numbers, widths: &[usize], activation: Activation) -> Mlp {
    made(numbers, widths, activation, |weight| weight)
}

/// One whose weights bf16 holds, as a device keeps them of a classifier.
pub fn short_perceptron(numbers: &mut Numbers, widths: &[usize], activation: Activation) -> Mlp {
    made(numbers, widths, activation, |weight| f32::from_bits(weight.to_bits() & 0xFFFF_0000))
}

fn made(numbers: &mut Numbers, widths: &[usize], activation: Activation, of: fn(f32) -> f32) -> Mlp {
    let mut layer = |w: &[usize]| {
        let weight = (0..w[0] * w[1]).map(|_| of(numbers.normal() / (w[0] as f32).sqrt())).collect();
        (weight, (0..w[1]).map(|_| 0.1 * numbers.normal()).collect())
    };
    Mlp::new(widths.windows(2).map(&mut layer).collect(), activation).unwrap()
}

#[test]
fn codes_choose_what_they_choose_on_the_cpu() {
    let mut numbers = Numbers(75);
    for (at, grid) in every_group().enumerate() {
        let (_, d, kv_heads, group) = grid;
        let both = Both::new(&mut numbers, grid, &LENS);
        let rows = both.caches.rows();
        let each = if at % 2 == 0 { 1 } else { group };
        let mut maps = |count: usize| -> PerHead<Mlp> {
            (0..count).map(|_| perceptron(&mut numbers, &[d, 48, 24, codes::BITS], Activation::Silu)).collect()
        };
        let (keys, queries) = (maps(kv_heads * each), maps(kv_heads * group));
        let extend = |index: &Tensor, k: &Tensor, parts: &[Part]| codes::extend(index, k, parts, &keys).unwrap();
        // A few keys at a time go another way than many.
        let at_once = if at % 3 == 0 { 7 } else { 100 };
        let (cpu, cuda) = both.index((BLOCK_TOKENS, each, DType::U32), at_once, extend);
        let bits = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        let (a, b) = (bits(&cpu), bits(&cuda));
        let apart: u32 = a.iter().zip(&b).map(|(a, b)| (a ^ b).count_ones()).sum();
        assert!(apart as usize * 10_000 <= a.len() * codes::BITS, "{grid:?}: {apart} bits of {} codes", a.len());
        // Of the same codes both make the same, but for a bit of a query's.
        let cuda = cpu.to_device(&device()).unwrap();
        let found = both.run(&rows, |batch| {
            let index = if batch.q.device().is_cuda() { &cuda } else { &cpu };
            codes::importance(batch, index, &queries, &vec![true; both.heads()]).unwrap()
        });
        by_importance(&both, &rows, (&found.0, &found.1), &format!("{grid:?}, {each} codes"));
    }
}

/// The clusters that both devices choose, each by its index and logits.
fn probed(both: &Both, rows: &[DecodeRow], of: [(&Tensor, &Tensor); 2], probes: Probes) -> (Selection, Selection) {
    both.run(rows, |batch| {
        let (index, logits) = of[usize::from(batch.q.device().is_cuda())];
        clusters::select(batch, index, logits, FIXED, probes).unwrap()
    })
}

#[test]
fn clusters_and_classifiers_choose_what_they_choose_on_the_cpu() {
    let mut numbers = Numbers(76);
    for (at, grid) in every_group().enumerate() {
        let (_, d, kv_heads, group) = grid;
        let both = Both::new(&mut numbers, grid, &LENS);
        let rows = both.caches.rows();
        let count = [8, 33, 100, 1500][at % 4];
        let centroids: PerHead<Centroids> = (0..kv_heads)
            .map(|_| Centroids::new(&(0..count * d).map(|_| numbers.normal()).collect::<Vec<_>>(), d).unwrap())
            .collect();
        let frequencies: Vec<f32> = (0..d / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / d as f32)).collect();
        let rotation = Rotations::new(|position| Rotation::new(position, &frequencies, 1.0));
        let turned = (at % 2 == 0).then_some(&rotation);
        let extend = |index: &Tensor, k: &Tensor, parts: &[Part]| {
            clusters::extend(index, k, parts, &centroids, turned).unwrap();
        };
        let at_once = if at % 3 == 0 { 7 } else { 500 };
        let (cpu, cuda) = both.index((BLOCK_TOKENS, 1, DType::I16), at_once, extend);
        let ids = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<i16>().unwrap();
        let (a, b) = (ids(&cpu), ids(&cuda));
        // A layer after another, by turns that are on the device already.
        let (_, again) = both.index((BLOCK_TOKENS, 1, DType::I16), at_once, extend);
        assert!(ids(&again) == b, "{grid:?}: a second layer");
        let apart = a.iter().zip(&b).filter(|(a, b)| a != b).count();
        assert!(apart * 1000 <= a.len(), "{grid:?}: {apart} of {} keys in other clusters", a.len());

        let classifiers: PerHead<Mlp> =
            (0..kv_heads).map(|_| short_perceptron(&mut numbers, &[d, 40, count], Activation::Relu)).collect();
        let turns: Vec<Rotation> = both.caches.lens.iter().map(|n| rotation.at(n - 1)).collect();
        let of = |batch: &Decode| {
            let turns = Some(&turns[..]);
            [
                mlp::per_head(&classifiers, batch.q, turns).unwrap(),
                clusters::products(&centroids, batch.q, turns).unwrap(),
            ]
        };
        let (logits, cuda_logits) = both.run(&rows, of);
        for (a, b) in logits.iter().zip(&cuda_logits) {
            assert_eq!(a.dims(), [LENS.len(), kv_heads * group, count]);
            below(relative(b, a), 1e-5, &format!("{grid:?}, logits"));
        }
        // Of the same clusters and logits both choose the same.
        let (cuda, same) = (cpu.to_device(&device()).unwrap(), logits[0].to_device(&device()).unwrap());
        let k: Vec<usize> = (0..both.heads()).map(|i| 1 + 150 * i).collect();
        for probes in [
            Probes::Clusters(1, usize::MAX),
            Probes::Clusters(count / 3, usize::MAX),
            Probes::Clusters(count / 2, 300),
            Probes::Keys(&k),
        ] {
            let chosen = probed(&both, &rows, [(&cpu, &logits[0]), (&cuda, &same)], probes);
            let what = format!("{grid:?} {count} clusters, {probes:?}");
            assert_eq!(chosen.0.tokens(&rows).unwrap(), chosen.1.tokens(&rows).unwrap(), "{what}");
            alike(&both, &rows, chosen, &what);
        }
    }
}

/// Rows so long that thread blocks share a list, beside a short one: by any limit what the CPU takes.
#[test]
fn clusters_of_long_rows_are_those_of_the_cpu() {
    let mut numbers = Numbers(77);
    let grid = (DType::BF16, 64, 2, 4);
    let both = Both::new(&mut numbers, grid, &[70_001, 5, 9_000, 20_000, 52]);
    let rows = both.caches.rows();
    for count in [8, 300, 2048] {
        let blocks = both.caches.cpu.0.dim(0).unwrap();
        // Some clusters are far larger than others.
        let ids: Vec<i16> = (0..blocks * 2 * BLOCK_TOKENS)
            .map(|_| (numbers.below(count) * numbers.below(count) / count) as i16)
            .collect();
        let index = Tensor::from_vec(ids, (blocks, 2, BLOCK_TOKENS, 1), &Device::Cpu).unwrap();
        let logits: Vec<f32> = (0..5 * 8 * count).map(|_| 2.0 * numbers.normal()).collect();
        let logits = Tensor::from_vec(logits, (5, 8, count), &Device::Cpu).unwrap();
        let (cuda_index, cuda_logits) = (index.to_device(&device()).unwrap(), logits.to_device(&device()).unwrap());
        let k: Vec<usize> = (0..both.heads()).map(|i| 1 + 3_001 * i).collect();
        for probes in [
            Probes::Clusters(1, usize::MAX),
            Probes::Clusters(count / 3, usize::MAX),
            Probes::Clusters(count / 2, 4_000),
            Probes::Keys(&k),
        ] {
            let chosen = probed(&both, &rows, [(&index, &logits), (&cuda_index, &cuda_logits)], probes);
            let (cpu, cuda) = (chosen.0.tokens(&rows).unwrap(), chosen.1.tokens(&rows).unwrap());
            for (i, (cpu, cuda)) in cpu.iter().zip(&cuda).enumerate() {
                assert!(cpu == cuda, "{count} clusters, {probes:?}, list {i}: {} and {} tokens", cpu.len(), cuda.len());
            }
        }
    }
}

#[test]
fn what_the_device_cannot_do_is_an_error_that_says_so() {
    let mut numbers = Numbers(77);
    let both = Both::new(&mut numbers, GRID[0], &[900]);
    let (rows, heads, streams) = (both.caches.rows(), both.heads(), both.streams(&mut numbers));
    let refused = |rows: &[DecodeRow], run: &dyn Fn(&Decode) -> candle_core::Result<()>, of: &str| {
        let batch = Decode { q: &both.cuda_q, kv: both.caches.on_cuda(), rows };
        let error = run(&batch).unwrap_err().to_string();
        assert!(error.contains(of), "{error}");
    };
    let fixed = Selection::sink_window(&rows, heads, 4, 64);
    let spread = Spread::Whole(Targets::Systematic);
    let again = |b: &Decode| {
        let values = sample_values(b, &fixed, By::Keys, &streams, 16, spread)?;
        sample_values(b, &values, By::Keys, &streams, 8, spread).map(drop)
    };
    refused(&rows, &again, "of values");
    let seven = vec![(0..7).collect::<Vec<u32>>(); heads];
    let blocks = both.caches.cpu.0.dim(0).unwrap();
    let index = Tensor::zeros((blocks, heads, 64, 7), GRID[0].0, &device()).unwrap();
    refused(&rows, &|b| labels::importance(b, &index, &seven, &vec![true; heads], Over::Sum).map(drop), "7 wide");
}

#[test]
fn rows_that_have_left_the_first_token_behind_read_all_that_they_see() {
    let mut numbers = Numbers(78);
    let both = Both::new(&mut numbers, GRID[0], &[900]);
    let (mut rows, heads, streams) = (both.caches.rows(), both.heads(), both.streams(&mut numbers));
    rows[0].visible = 100..900;
    let batch = Decode { q: &both.cuda_q, kv: both.caches.on_cuda(), rows: &rows };
    let (wanted, k) = (vec![true; heads], vec![50; heads]);
    let how = Sampling {
        promise: Promise::new(Rule::Chi2, 0.2, 0.1),
        hopeless: Promise::new(Rule::Chi2, 0.3, 0.1),
        pilot_tokens: 64,
        pilot_share: 0.01,
        dense_share: 0.5,
    };
    let found = scores(&batch, &wanted).unwrap();
    let by_scores = top_k(&rows, &importance(&found, Over::Sum), 4, 64, &k).unwrap();
    let (sampled, _) = sample(&batch, &by_scores, &Foreseen::default(), Some(&found), &streams, &how).unwrap();
    let (pages, width) = bounds::shape(16, GRID[0].1);
    let (_, index) =
        both.index((pages, width, GRID[0].0), 3000, |index, k, parts| bounds::extend(index, k, parts).unwrap());
    let by_pages = top_k(&rows, &bounds::importance(&batch, &index, &wanted, Over::Sum).unwrap(), 4, 64, &k).unwrap();
    let dense = Selection::dense(1, heads);
    let values = sample_values(&batch, &dense, By::Keys, &streams, 16, Spread::Whole(Targets::Systematic)).unwrap();
    for selection in [by_scores, sampled, by_pages, values] {
        assert_eq!(selection.counts(&rows).unwrap(), vec![800; heads]);
        outputs(&both, &rows, (&dense, &selection), LIMIT, "a window");
    }
}
