//! Samples whose promise rests on bounds of pages, and the norms that these need.

use crate::cache::{GRID, LIMIT, Numbers, below, device, elements, furthest, relative, relative_of};
use crate::step::Both;
use candle_core::{DType, Tensor};
use taper_kernels::decode::{
    Budget, Certainty, Decode, DecodeRow, Over, Selection, attend, importance, sample_certain, scores, top_k,
};
use taper_kernels::index::{bounds, norms};
use taper_kernels::kv::{self, BLOCK_TOKENS};
use taper_kernels::philox::Stream;

const EPSILON: f64 = 0.15;

/// Rows that read all, go dense, and sample.
const LENS: [usize; 3] = [100, 700, 6000];

/// Keys that hardly tell one another apart and values that lean one way, but for heavy tokens, whose keys score as given for
/// the first query head of each group and whose values lean the other way.
fn fill(both: &Both, numbers: &mut Numbers, heavy: &[(usize, f32)]) {
    let (d, kv_heads) = (both.caches.head_dim, both.caches.kv_heads);
    for (i, (table, &n)) in both.caches.tables.iter().zip(&both.caches.lens).enumerate() {
        let rows = |mean: f32, spread: f32, numbers: &mut Numbers| -> Vec<f32> {
            (0..n * kv_heads * d).map(|_| mean + spread * numbers.normal()).collect()
        };
        let (mut k, mut v) = (rows(0.0, 0.01, numbers), rows(1.0, 0.1, numbers));
        let q = both.queries.cpu.get(i).unwrap().to_vec2::<f32>().unwrap();
        for head in 0..kv_heads {
            let q = &q[head * both.group];
            let norm2: f32 = q.iter().map(|x| x * x).sum();
            for &(token, score) in heavy.iter().filter(|(token, _)| *token < n) {
                let at = (token * kv_heads + head) * d;
                let factor = score * (d as f32).sqrt() / norm2;
                k[at..at + d].iter_mut().zip(q).for_each(|(k, q)| *k = q * factor);
                v[at..at + d].fill(-1.0);
            }
        }
        let slots: Vec<u32> =
            (0..n).map(|t| table[t / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (t % BLOCK_TOKENS) as u32).collect();
        for (rows, cpu, cuda) in
            [(k, &both.caches.cpu.0, &both.caches.cuda.0), (v, &both.caches.cpu.1, &both.caches.cuda.1)]
        {
            let rows = Tensor::from_vec(rows, (n, kv_heads, d), &candle_core::Device::Cpu).unwrap();
            let rows = rows.to_dtype(both.caches.dtype).unwrap().to_dtype(DType::F32).unwrap();
            kv::append(cpu, &rows, &slots).unwrap();
            kv::append(cuda, &rows.to_device(&device()).unwrap(), &slots).unwrap();
        }
    }
}

/// Bounds of the keys and norms of the values of pages, on either device.
struct Pages {
    bounds: (Tensor, Tensor),
    norms: (Tensor, Tensor),
}

impl Pages {
    fn new(both: &Both, page: usize) -> Self {
        let (rows, width) = bounds::shape(page, both.caches.head_dim);
        let bounds = both.index((rows, width, both.caches.dtype), 3000, |index, k, parts| {
            bounds::extend(index, k, parts).unwrap();
        });
        Self { bounds, norms: value_norms(both, page, 3000) }
    }

    fn of(&self, batch: &Decode) -> (&Tensor, &Tensor) {
        match batch.q.device().is_cuda() {
            true => (&self.bounds.1, &self.norms.1),
            false => (&self.bounds.0, &self.norms.0),
        }
    }
}

fn value_norms(both: &Both, page: usize, at_once: usize) -> (Tensor, Tensor) {
    both.index((BLOCK_TOKENS / page, 1, DType::F32), at_once, |index, k, parts| {
        let v = if k.device().is_cuda() { &both.caches.cuda.1 } else { &both.caches.cpu.1 };
        norms::extend(index, v, parts).unwrap();
    })
}

#[test]
fn norms_of_pages_are_those_of_the_cpu() {
    let mut numbers = Numbers(81);
    for (at, grid) in GRID.into_iter().enumerate() {
        let both = Both::new(&mut numbers, grid, &[3, 90, 700]);
        for at_once in [7, 3000] {
            let page = [1, 4, 16, 32, 64][at % 5];
            let (cpu, cuda) = value_norms(&both, page, at_once);
            assert_eq!(furthest(&cuda, &cpu), 0.0, "{grid:?}, pages of {page}, {at_once} at once");
            assert!(elements(&cpu).iter().all(|x| x.is_finite()), "{grid:?}: unused rows count");
        }
    }
}

/// What is read whatever is sampled.
#[derive(Debug, Clone, Copy)]
enum Fixed {
    SinkWindow,
    Tokens,
    Pages,
}

/// Selections of both devices and their budgets.
fn sampled(
    both: &Both,
    rows: &[DecodeRow],
    streams: &[Stream],
    (fixed, pages): (Fixed, &Pages),
    how: &Certainty,
) -> [(Selection, Vec<Budget>); 2] {
    let (kv_heads, k) = (both.caches.kv_heads, vec![24; both.heads()]);
    let wanted = vec![true; both.heads()];
    let run = |batch: &Decode| {
        let (found, selection) = match fixed {
            Fixed::SinkWindow => (None, Selection::sink_window(rows, kv_heads, 16, 64)),
            Fixed::Tokens => {
                let found = scores(batch, &wanted).unwrap();
                let chosen = top_k(rows, &importance(&found, Over::Sum), 16, 64, &k).unwrap();
                (Some(found), chosen)
            }
            Fixed::Pages => {
                let found = bounds::importance(batch, pages.of(batch).0, &wanted, Over::Sum).unwrap();
                (None, top_k(rows, &found, 16, 64, &k).unwrap())
            }
        };
        sample_certain(batch, &selection, found.as_ref(), streams, pages.of(batch), how).unwrap()
    };
    let (cpu, cuda) = both.run(rows, run);
    assert!(cuda.1.is_empty() && cuda.0.counts_wait(), "budgets wait until they are asked for");
    let budgets = cuda.0.budgets().unwrap().expect("a sample's budgets");
    [cpu, (cuda.0, budgets)]
}

/// What was found over many lists.
#[derive(Debug, Default)]
struct Found {
    lists: usize,
    sampled: usize,
    apart: Vec<(Budget, Budget)>,
}

impl Found {
    /// A bound at its limit falls to either side by rounding: one list in twenty at most.
    #[track_caller]
    fn check(&self) {
        assert!(self.apart.len() * 20 <= self.lists, "{self:?}");
    }

    /// Fails where budgets are equal and outputs are not, or where the promise is not kept; returns how many lists sampled.
    #[track_caller]
    fn compare(&mut self, both: &Both, rows: &[DecodeRow], of: &[(Selection, Vec<Budget>); 2], what: &str) -> usize {
        let [(cpu, budgets), (cuda, got)] = of;
        assert_eq!(budgets.len(), got.len(), "{what}");
        let read = cpu.counts(rows).unwrap().into_iter().zip(cuda.counts(rows).unwrap());
        let outs = both.run(rows, |batch| {
            let selection = if batch.q.device().is_cuda() { cuda } else { cpu };
            elements(&attend(batch, selection, None).unwrap())
        });
        let (d, dense) = (both.caches.head_dim, Selection::dense(rows.len(), both.caches.kv_heads));
        let exact = elements(&both.run(rows, |batch| attend(batch, &dense, None).unwrap()).0);
        let (before, size) = (self.sampled, both.group * d);
        for (i, ((a, b), read)) in budgets.chunks(both.group).zip(got.chunks(both.group)).zip(read).enumerate() {
            let [cpu, cuda, exact] = [&outs.0, &outs.1, &exact].map(|out| &out[i * size..(i + 1) * size]);
            for (cuda, exact) in cuda.chunks(d).zip(exact.chunks(d)) {
                below(relative_of(cuda, exact), EPSILON, &format!("{what}: the promise of list {i}, {b:?}"));
            }
            assert!(b.iter().all(|x| x == &b[0]), "{what}: a group shares its sample");
            self.lists += 1;
            self.sampled += usize::from(b[0].pilot > 0 && !b[0].dense);
            if a != b {
                self.apart.push((a[0], b[0]));
                continue;
            }
            assert_eq!(read.0, read.1, "{what}: keys of list {i}");
            below(relative_of(cuda, cpu), LIMIT, &format!("{what}: list {i}, {b:?}"));
        }
        self.sampled - before
    }
}

fn certainty(pilot_tokens: usize, dense_share: f64) -> Certainty {
    Certainty { epsilon: EPSILON, delta: 0.1, pilot_tokens, dense_share }
}

#[test]
fn a_sample_beside_the_pages_that_could_weigh_most_is_that_of_the_cpu() {
    let (mut numbers, mut all) = (Numbers(82), Found::default());
    for (at, grid) in GRID.into_iter().enumerate() {
        let both = Both::new(&mut numbers, grid, &LENS);
        // A key that holds a tenth of the mass, and some that hold less: no predictor of these tests looks for them but one.
        fill(&both, &mut numbers, &[(3000, 6.5), (3001, 5.5), (1200, 5.0), (4711, 5.0), (5100, 4.5)]);
        let (rows, streams) = (both.caches.rows(), both.streams(&mut numbers));
        let pages = Pages::new(&both, [16, 4, 8, 32, 64][at % 5]);
        let how = certainty([64, 100, 50][at % 3], [0.5, 1.0][at % 2]);
        for fixed in [Fixed::SinkWindow, Fixed::Tokens, Fixed::Pages] {
            let what = format!("{grid:?} {fixed:?} {how:?}");
            let of = sampled(&both, &rows, &streams, (fixed, &pages), &how);
            assert!(all.compare(&both, &rows, &of, &what) > 0, "{what}: {:?}", of[1].1);
            // The first row has too little to sample from: no pilot, and not for want of a sample that would do.
            let first = of[1].1[0];
            assert_eq!((first.pilot, first.dense, first.sampled), (0, false, first.residual), "{what}");
            let [_, again] = sampled(&both, &rows, &streams, (fixed, &pages), &how);
            let out = |selection: &Selection| both.run(&rows, |batch| attend(batch, selection, None).ok()).1.unwrap();
            assert_eq!(furthest(&out(&of[1].0), &out(&again.0)), 0.0, "the same launches give the same bits: {what}");
        }
    }
    all.check();
}

/// As few launches as go through all of the kernels: bench/gpu/racecheck.sh looks at every one.
#[test]
fn one_row_is_sampled_by_itself() {
    let (mut numbers, mut all) = (Numbers(87), Found::default());
    let both = Both::new(&mut numbers, GRID[0], &[6000]);
    fill(&both, &mut numbers, &[(3000, 6.5), (3001, 5.5), (1200, 5.0), (4711, 5.0), (5100, 4.5)]);
    let (rows, streams, pages) = (both.caches.rows(), both.streams(&mut numbers), Pages::new(&both, 16));
    let of = sampled(&both, &rows, &streams, (Fixed::SinkWindow, &pages), &certainty(64, 1.0));
    assert!(all.compare(&both, &rows, &of, "one row") > 0, "{:?}", of[1].1);
    all.check();
}

/// Most samples do not have it, and do not show that they have not.
#[test]
fn a_heavy_key_that_nobody_predicted_is_read() {
    let (mut numbers, mut all) = (Numbers(83), Found::default());
    for grid in GRID {
        let both = Both::new(&mut numbers, grid, &[6000]);
        let rows = both.caches.rows();
        for score in [6.5, 9.0, 12.0] {
            fill(&both, &mut numbers, &[(2345, score)]);
            let pages = Pages::new(&both, 16);
            for _ in 0..8 {
                let streams = both.streams(&mut numbers);
                let of = sampled(&both, &rows, &streams, (Fixed::SinkWindow, &pages), &certainty(64, 0.5));
                all.compare(&both, &rows, &of, &format!("{grid:?}, a key that scores {score}"));
            }
        }
    }
    all.check();
    assert!(all.sampled * 3 > all.lists, "{} of {} lists sampled", all.sampled, all.lists);
}

#[test]
fn bounds_that_leave_much_open_send_a_head_dense() {
    let mut numbers = Numbers(84);
    for grid in GRID {
        let both = Both::new(&mut numbers, grid, &[100, 700, 3000]);
        let (rows, streams) = (both.caches.rows(), both.streams(&mut numbers));
        let pages = Pages::new(&both, 16);
        for fixed in [Fixed::SinkWindow, Fixed::Tokens, Fixed::Pages] {
            let what = format!("{grid:?} {fixed:?}");
            let of = sampled(&both, &rows, &streams, (fixed, &pages), &certainty(64, 0.5));
            assert_eq!(of[0].1, of[1].1, "{what}");
            assert_eq!(Found::default().compare(&both, &rows, &of, &what), 0, "{what}");
            assert!(of[1].1.last().unwrap().dense, "{what}");
        }
    }
}

/// What a row reads and gives does not depend on what stands beside it, and of pages in their thousands the heaviest are
/// read.
#[test]
fn a_row_alone_is_the_row_among_others() {
    let (mut numbers, mut all) = (Numbers(85), Found::default());
    for (page, grid) in [(16, GRID[0]), (4, (DType::F16, 64, 1, 3))] {
        let both = Both::new(&mut numbers, grid, &[40_000, 100, 6000, 700]);
        let heavy: Vec<(usize, f32)> = (0..60).map(|i| (650 * i + 77, 5.0)).collect();
        fill(&both, &mut numbers, &heavy);
        let (rows, streams) = (both.caches.rows(), both.streams(&mut numbers));
        let (pages, how) = (Pages::new(&both, page), certainty(64, 0.5));
        let of = sampled(&both, &rows, &streams, (Fixed::Tokens, &pages), &how);
        let what = format!("{grid:?}");
        assert!(all.compare(&both, &rows, &of, &what) > 0, "{what}: {:?}", of[1].1);
        let batch = Decode { q: &both.cuda_q, kv: both.caches.on_cuda(), rows: &rows };
        let out = attend(&batch, &of[1].0, None).unwrap();
        let heads = both.caches.kv_heads * both.group;
        for i in 0..rows.len() {
            let q = both.cuda_q.narrow(0, i, 1).unwrap();
            let alone = Decode { q: &q, rows: &rows[i..=i], ..batch };
            let found = scores(&alone, &vec![true; both.caches.kv_heads]).unwrap();
            let k = vec![24; both.caches.kv_heads];
            let fixed = top_k(&rows[i..=i], &importance(&found, Over::Sum), 16, 64, &k).unwrap();
            let (selection, _) = sample_certain(&alone, &fixed, None, &streams[i..=i], pages.of(&alone), &how).unwrap();
            let (got, row) = (attend(&alone, &selection, None).unwrap(), out.narrow(0, i, 1).unwrap());
            match selection.budgets().unwrap() {
                // A short row reads all, with no sample to have a budget of.
                None => below(relative(&got, &row), LIMIT, &format!("{what}: row {i}")),
                Some(budgets) => {
                    assert_eq!(budgets, of[1].1[i * heads..(i + 1) * heads], "{what}: row {i}");
                    assert_eq!(furthest(&got, &row), 0.0, "{what}: row {i}");
                }
            }
        }
    }
    all.check();
}

#[test]
fn rows_that_have_left_the_first_token_behind_and_dense_ones_read_all_that_they_see() {
    let mut numbers = Numbers(86);
    let both = Both::new(&mut numbers, GRID[0], &[900]);
    let (mut rows, heads, streams) = (both.caches.rows(), both.heads(), both.streams(&mut numbers));
    let (pages, how) = (Pages::new(&both, 16), certainty(64, 0.5));
    let dense = Selection::dense(1, heads);
    for first in [0, 100] {
        rows[0].visible = first..900;
        let batch = Decode { q: &both.cuda_q, kv: both.caches.on_cuda(), rows: &rows };
        let fixed = if first == 0 { dense.clone() } else { Selection::sink_window(&rows, heads, 16, 64) };
        let (selection, budgets) = sample_certain(&batch, &fixed, None, &streams, pages.of(&batch), &how).unwrap();
        assert_eq!(
            (selection.counts(&rows).unwrap(), budgets),
            (vec![900 - first; heads], vec![Budget::default(); heads * both.group])
        );
        let (cpu, cuda) = both.run(&rows, |batch| attend(batch, &dense, None).unwrap());
        below(relative(&cuda, &cpu), LIMIT, "a window");
        assert_eq!(furthest(&attend(&batch, &selection, None).unwrap(), &cuda), 0.0);
    }
}
