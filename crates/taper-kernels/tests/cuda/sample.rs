//! Draws, and steps that read them.

use crate::cache::{
    Caches, GRID, LIMIT, Numbers, Queries, below, device, elements, every_group, furthest, relative, relative_of, u32s,
};
use candle_core::{DType, Tensor};
use taper_kernels::budget::{Promise, Rule};
use taper_kernels::cuda::{Lists, Plan, Scratch, Streams, Values, View, draw, sampled, scores, spread_values, values};
use taper_kernels::decode::{
    By, Foreseen, HeadSelection, Sampling, Selection, Spread, Targets, attend, sample, sample_some, sample_values,
};
use taper_kernels::philox::Stream;

const LAYER: u32 = 5;

/// The rows' streams on both sides.
struct Seeds {
    cpu: Vec<Stream>,
    seeds: Tensor,
    positions: Tensor,
}

impl Seeds {
    fn new(numbers: &mut Numbers, positions: &[usize]) -> Self {
        let one = |&p: &usize| Stream { seed: numbers.next(), layer: LAYER, head: 0, position: p as u32 };
        let cpu: Vec<Stream> = positions.iter().map(one).collect();
        let seeds: Vec<i64> = cpu.iter().map(|s| s.seed as i64).collect();
        let at: Vec<u32> = cpu.iter().map(|s| s.position).collect();
        let n = cpu.len();
        let (seeds, positions) = (Tensor::from_vec(seeds, n, &device()), Tensor::from_vec(at, n, &device()));
        Self { cpu, seeds: seeds.unwrap(), positions: positions.unwrap() }
    }

    fn streams(&self) -> Streams<'_> {
        Streams { seeds: &self.seeds, positions: &self.positions, layer: LAYER }
    }
}

/// Sinks and window of rows of `lens`, on both sides; rows that have no more are dense.
fn fixed(caches: &Caches, like: &Tensor) -> (Selection, Lists) {
    let rows = caches.rows();
    let selection = Selection::sink_window(&rows, caches.kv_heads, 16, 64);
    let ranges: Vec<_> = (selection.heads().unwrap().iter().step_by(caches.kv_heads).zip(&caches.lens))
        .map(|(head, &n)| match head {
            HeadSelection::Keys(keys) => {
                let range = |i: usize| (keys.ranges[i].start as u32, keys.ranges[i].end as u32);
                ([range(0), range(1)], n as u32)
            }
            _ => ([(0, n as u32), (0, 0)], n as u32),
        })
        .collect();
    let lists = Lists::ranges(like, caches.kv_heads, &ranges).unwrap();
    (selection, lists)
}

#[test]
fn draws_are_those_of_the_cpu() {
    let mut numbers = Numbers(41);
    for (dtype, d, kv_heads, group) in GRID {
        let caches = Caches::new(&mut numbers, &[300, 4000, 1025], kv_heads, d, dtype, 0.0);
        let queries = Queries::new(&mut numbers, &caches, group);
        let seeds = Seeds::new(&mut numbers, &[299, 3999, 1024]);
        let (selection, lists) = fixed(&caches, &queries.cuda);
        let want = 150;
        let (ids, counts) = draw(&lists, seeds.streams(), queries.max_len, want).unwrap();
        let (ids, counts) = (ids.to_vec2::<u32>().unwrap(), counts.to_vec1::<u32>().unwrap());
        let rows = caches.rows();
        let batch = queries.decode(&caches, &rows);
        let cpu = sample_some(&batch, &selection, &vec![want; 3 * kv_heads], &seeds.cpu).unwrap();
        for (i, head) in cpu.heads().unwrap().iter().enumerate() {
            let HeadSelection::Keys(keys) = head else { panic!("dense") };
            assert_eq!(counts[i] as usize, want);
            assert_eq!(ids[i], keys.sample.as_ref().unwrap().ids, "list {i}");
        }
    }
}

#[test]
fn a_sampled_step_reads_the_draws_of_the_cpu_and_keeps_its_promise() {
    let mut numbers = Numbers(42);
    for (at, (dtype, d, kv_heads, group)) in every_group().enumerate() {
        let rule = [Rule::Chi2, Rule::Ratio, Rule::Lemma, Rule::Tight][at % 4];
        let epsilon = if matches!(rule, Rule::Lemma | Rule::Tight) { 0.3 } else { 0.15 };
        let lens = [100, 9000, 20000];
        let caches = Caches::new(&mut numbers, &lens, kv_heads, d, dtype, 0.5);
        let queries = Queries::new(&mut numbers, &caches, group);
        let (batch, rows) = (queries.batch(&caches), caches.rows());
        let seeds = Seeds::new(&mut numbers, &lens.map(|n| n - 1));
        let (selection, lists) = fixed(&caches, &queries.cuda);
        let how = Sampling {
            promise: Promise::new(rule, epsilon, 0.1),
            hopeless: Promise::new(rule, 1.5 * epsilon, 0.1),
            // A thread block has more tiles of a first look than it sifts ahead of reading them.
            pilot_tokens: if at % 3 == 2 { 2000 } else { 64 },
            pilot_share: 0.01,
            dense_share: 0.5,
        };
        let scratch = Scratch::new(batch.q, 3, kv_heads * group, kv_heads).unwrap();
        let of = sampled(&batch, &lists, seeds.streams(), &how, &scratch).unwrap();
        let state = of.state().unwrap().to_vec1::<u32>().unwrap();
        let counts: Vec<usize> = of.counts().unwrap().to_vec1::<u32>().unwrap().iter().map(|&c| c as usize).collect();
        let residual = of.residual().unwrap().to_vec1::<u32>().unwrap();
        let what = format!("{rule:?} {dtype:?} {d} {kv_heads}x{group}, states {state:?}, counts {counts:?}");
        assert!(state.contains(&1), "{what}");
        // What the CPU reads with as many draws.
        let sizes: Vec<usize> = (0..state.len()).map(|i| if state[i] == 1 { counts[i] } else { usize::MAX }).collect();
        let decode = queries.decode(&caches, &rows);
        // The CPU's budgets, but where rounding moves one to the other side of what is drawn: then one look more is
        // made, at a sample a little larger, or up to half as large again.
        let (_, budgets) = sample(&decode, &selection, &Foreseen::default(), None, &seeds.cpu, &how).unwrap();
        let apart = |i: &usize| {
            let cpu = &budgets[i * group];
            let read = if state[*i] == 1 { counts[*i] } else { cpu.residual };
            read.abs_diff(cpu.sampled) * 50 > cpu.sampled
        };
        let apart: Vec<usize> = (0..state.len()).filter(apart).collect();
        assert!(apart.len() <= 1, "{what}, apart {apart:?} from {budgets:?}");
        // The first look is at the same points, of which a list leaves the same out.
        let first = of.first().unwrap().to_vec1::<u32>().unwrap();
        for i in (0..state.len()).filter(|&i| state[i] == 1) {
            assert_eq!(first[i] as usize, budgets[i * group].pilot, "{what}, list {i}");
        }
        let known = |i: usize| match state[i] {
            2 => first[i] > 0 && (!budgets[i * group].dense || first[i] as usize == budgets[i * group].pilot),
            3 => first[i] == 0,
            _ => true,
        };
        assert!((0..state.len()).all(known), "{what}, first {first:?} of {budgets:?}");
        let same = sample_some(&decode, &selection, &sizes, &seeds.cpu).unwrap();
        below(relative(&of.out, &attend(&decode, &same, None).unwrap()), LIMIT, &what);
        let dense = attend(&decode, &Selection::dense(3, kv_heads), None).unwrap();
        let (out, dense) = (elements(&of.out), elements(&dense));
        let errors = out.chunks_exact(d).zip(dense.chunks_exact(d)).map(|(a, b)| relative_of(a, b));
        // One head in ten may miss it; none by much.
        below(errors.fold(0.0, f64::max), 2.0 * epsilon, &what);
        for (i, &n) in residual.iter().enumerate() {
            let HeadSelection::Keys(keys) = &selection.heads().unwrap()[i] else { continue };
            assert_eq!(n as usize, lens[i / kv_heads] - keys.fixed(), "{what}");
        }
        let again = sampled(&batch, &lists, seeds.streams(), &how, &scratch).unwrap();
        assert_eq!(furthest(&again.out, &of.out), 0.0, "the same launch gives the same bits: {what}");
    }
}

/// A number that is none sends its group dense, and shows in its own head alone.
#[test]
fn a_sampled_step_shows_what_is_no_number() {
    let mut numbers = Numbers(45);
    for (dtype, d, kv_heads, group) in every_group() {
        let caches = Caches::new(&mut numbers, &[100, 6000], kv_heads, d, dtype, 0.5);
        let mut queries = Queries::new(&mut numbers, &caches, group);
        let heads = kv_heads * group;
        let mut q = queries.cpu.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        q[2 * heads * d - 1] = f32::NAN;
        let q = Tensor::from_vec(q, (2, heads, d), &device()).unwrap();
        queries.cuda = q.to_dtype(dtype).unwrap();
        let batch = queries.batch(&caches);
        let seeds = Seeds::new(&mut numbers, &[99, 5999]);
        let (_, lists) = fixed(&caches, &queries.cuda);
        let how = Sampling {
            promise: Promise::new(Rule::Chi2, 0.2, 0.1),
            hopeless: Promise::new(Rule::Chi2, 0.3, 0.1),
            pilot_tokens: 64,
            pilot_share: 0.01,
            dense_share: 0.5,
        };
        let scratch = Scratch::new(batch.q, 2, heads, kv_heads).unwrap();
        for _ in 0..2 {
            let of = sampled(&batch, &lists, seeds.streams(), &how, &scratch).unwrap();
            let (state, what) =
                (of.state().unwrap().to_vec1::<u32>().unwrap(), format!("{dtype:?} {d} {kv_heads}x{group}"));
            assert_eq!(state[2 * kv_heads - 1], 2, "{what}");
            for (i, head) in elements(&of.out).chunks_exact(d).enumerate() {
                let nan = head.iter().filter(|x| x.is_nan()).count();
                assert_eq!(nan, if i + 1 == 2 * heads { d } else { 0 }, "{what}, head {i}");
            }
        }
    }
}

/// The mean over 256 seeds against dense attention. A mean of 128 values has the standard error that the probabilities give,
/// that of 256 of them a sixteenth; outputs of all heads together stay within twice that but for one run in 10^9 or so,
/// since their squares average over hundreds of elements.
#[test]
fn drawn_values_are_right_on_average_and_their_sums_exact() {
    let mut numbers = Numbers(43);
    for (at, (dtype, d, kv_heads, group)) in every_group().enumerate() {
        let n = 1500;
        let caches = Caches::new(&mut numbers, &[n], kv_heads, d, dtype, 0.0);
        let queries = Queries::new(&mut numbers, &caches, group);
        let seeds = Seeds::new(&mut numbers, &vec![n - 1; 256]);
        let q = queries.cuda.repeat((256, 1, 1)).unwrap();
        let (tables, lens) = (u32s(caches.tables[0].repeat(256)), u32s(vec![n as u32; 256]));
        let tables = tables.reshape((256, caches.tables[0].len())).unwrap();
        let kv = caches.on_cuda();
        let batch = taper_kernels::cuda::Batch { q: &q, kv, tables: &tables, lens: &lens, max_len: n };
        let scratch = Scratch::new(&q, 256, kv_heads * group, kv_heads).unwrap();
        let targets = [Targets::Systematic, Targets::Stratified, Targets::Independent][at % 3];
        let Values { out, lse, .. } = values(&batch, seeds.streams(), 128, targets, &scratch).unwrap();
        let lists = Lists::ranges(&queries.cuda, kv_heads, &[([(0, n as u32), (0, 0)], n as u32)]).unwrap();
        let one = queries.batch(&caches);
        let (dense, exact) = Plan::new(lists, &one).unwrap().attend(&one, None, DType::F32).unwrap();
        let what = format!("{dtype:?} {d} {kv_heads}x{group} {targets:?}");
        below(furthest(&lse.narrow(0, 0, 1).unwrap(), &exact), 1e-2, &what);
        below(furthest(&lse.narrow(0, 255, 1).unwrap(), &exact), 1e-2, &what);
        let mean = out.mean_keepdim(0).unwrap();
        // Values are standard normal: one draw is off by about 1 in each element.
        let off: f64 = elements(&mean).iter().zip(elements(&dense)).map(|(a, b)| (a - b).powi(2)).sum();
        let per_element = (off / elements(&mean).len() as f64).sqrt();
        below(per_element, 2.0 / (256.0f64 * 128.0).sqrt(), &what);
    }
}

/// Many lists share a device otherwise than few: in blocks that have several runs of a list, by the lengths of all rows.
#[test]
fn values_of_a_row_are_the_same_bits_alone_and_among_others() {
    let mut numbers = Numbers(46);
    let sets: [&[usize]; 4] =
        [&[3, 5000, 64, 700, 2049], &[9000, 9000], &[20_000, 65, 1, 300, 300, 300], &[1100, 1000, 900, 800, 700, 600]];
    for (at, (dtype, d, kv_heads, group)) in every_group().enumerate() {
        let few = sets[at % sets.len()];
        // Once more with so many rows that each list has a block at most.
        let short = few.iter().map(|&n| n.min(700)).cycle();
        let many: Vec<usize> = few.iter().copied().chain(short).take(140 / kv_heads + 1).collect();
        for lens in [few, &many] {
            let caches = Caches::new(&mut numbers, lens, kv_heads, d, dtype, 0.5);
            let queries = Queries::new(&mut numbers, &caches, group);
            let seeds = Seeds::new(&mut numbers, &lens.iter().map(|n| n - 1).collect::<Vec<_>>());
            let (all, rows) = (queries.batch(&caches), lens.len());
            let scratch = Scratch::new(all.q, rows, kv_heads * group, kv_heads).unwrap();
            let samples = [128, 47, 600][at % 3];
            for targets in [Targets::Systematic, Targets::Stratified, Targets::Independent] {
                let together = values(&all, seeds.streams(), samples, targets, &scratch).unwrap();
                for i in 0..few.len().min(rows) {
                    // In memory of its own: a view may begin anywhere.
                    let at = Tensor::new(&[i as u32], &device()).unwrap();
                    let row = |t: &Tensor| t.index_select(&at, 0).unwrap();
                    let (q, table, len) = (row(all.q), row(all.tables), row(all.lens));
                    let (seed, position) = (row(&seeds.seeds), row(&seeds.positions));
                    let batch =
                        taper_kernels::cuda::Batch { q: &q, tables: &table, lens: &len, max_len: lens[i], ..all };
                    let of = Streams { seeds: &seed, positions: &position, layer: LAYER };
                    let scratch = Scratch::new(&q, 1, kv_heads * group, kv_heads).unwrap();
                    let alone = values(&batch, of, samples, targets, &scratch).unwrap();
                    let what = format!("{dtype:?} {d} {kv_heads}x{group} {targets:?}, row {i} of {lens:?}");
                    assert_eq!(furthest(&alone.out, &row(&together.out)), 0.0, "{what}");
                    assert_eq!(furthest(&alone.lse, &row(&together.lse)), 0.0, "{what}");
                    let ids = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<u32>().unwrap();
                    assert_eq!(ids(&alone.ids), ids(&row(&together.ids)), "{what}");
                }
            }
        }
    }
}

#[test]
fn values_drawn_from_scores_are_those_of_the_cpu() {
    let mut numbers = Numbers(44);
    let lens = [40, 1000, 5003];
    for (dtype, d, kv_heads, group) in every_group() {
        let caches = Caches::new(&mut numbers, &lens, kv_heads, d, dtype, 0.0);
        let queries = Queries::new(&mut numbers, &caches, group);
        let (batch, rows) = (queries.batch(&caches), caches.rows());
        let seeds = Seeds::new(&mut numbers, &lens.map(|n| n - 1));
        let found = scores(&batch, batch.q, View::Rows(&caches.cuda.0), 1.0 / (d as f32).sqrt()).unwrap();
        let all = Selection::dense(3, kv_heads);
        for spread in [
            Spread::Whole(Targets::Systematic),
            Spread::Whole(Targets::Stratified),
            Spread::Whole(Targets::Independent),
            Spread::LargestRemainder(64),
            Spread::LargestRemainder(256),
            Spread::EachTile(128),
        ] {
            let what = format!("{dtype:?} {d} {kv_heads}x{group} {spread:?}");
            let decode = queries.decode(&caches, &rows);
            let cpu = sample_values(&decode, &all, By::Keys, &seeds.cpu, 64, spread).unwrap();
            let lists = spread_values(&batch, &found, seeds.streams(), 64, spread).unwrap();
            let read = lists.read_back().unwrap();
            let (mut missed, mut drawn) = (0, 0);
            for (i, head) in cpu.heads().unwrap().iter().enumerate() {
                let HeadSelection::Values(values) = head else { continue };
                for g in 0..group {
                    let own = &values.weights[g * values.ids.len()..][..values.ids.len()];
                    let mut expected: Vec<u32> = Vec::new();
                    expected.extend(values.ids.iter().zip(own).filter(|(_, w)| **w > 0.0).map(|(id, _)| *id));
                    let mut got = read[i * group + g].clone();
                    got.dedup();
                    missed += expected.iter().filter(|id| got.binary_search(id).is_err()).count();
                    drawn += expected.len();
                }
            }
            // A target within rounding of the edge between two keys may fall on the other.
            assert!(drawn > 0 && missed * 500 <= drawn, "{what}: {missed} of {drawn}");
            let (out, sum) = Plan::new(lists, &batch).unwrap().attend_given(&batch, DType::F32).unwrap();
            below(furthest(&sum, &sum.zeros_like().unwrap()), 2e-3, &what);
            let want = attend(&decode, &cpu, None).unwrap();
            // One draw of 64 on another key moves an output of one head by some tenth.
            below(relative(&out, &want), if missed > 0 { 0.1 } else { LIMIT }, &what);
        }
    }
}
