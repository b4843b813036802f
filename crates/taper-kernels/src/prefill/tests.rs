use super::*;
use crate::testing::{Cache, Numbers, plain, relative_error};
use candle_core::{DType, Device};
use proptest::prelude::*;

fn check(
    isa: Isa,
    dtype: DType,
    (kv_heads, group, d): (usize, usize, usize),
    positions: &[u32],
    mask: Mask,
    window: Option<usize>,
) {
    let mut numbers = Numbers(positions.len() as u64 * 31 + d as u64);
    let tokens = *positions.last().unwrap() as usize + 1;
    let cache = Cache::new(&mut numbers, tokens, kv_heads, d, dtype);
    let q = numbers.tensor(&[positions.len(), kv_heads * group, d]);
    let rows = Rows { q: &q, kv: cache.kv(), table: &cache.table, positions, window };
    let (out, _) = prefill_with(isa, &rows, mask.into()).unwrap();
    let (q, out) = (q.to_vec3::<f32>().unwrap(), out.to_vec3::<f32>().unwrap());
    for (row, &position) in positions.iter().enumerate() {
        let keys = mask.keys(position as usize, window);
        for head in 0..kv_heads * group {
            let exact = cache.attend(&q[row][head], head / group, plain(&keys));
            let error = relative_error(&out[row][head], &exact);
            assert!(error < 1e-5, "{isa:?} {dtype:?} group {group} d {d} {mask:?} row {row} head {head}: {error}");
        }
    }
}

#[test]
fn agrees_with_f64_on_every_instruction_set_dtype_and_group() {
    for isa in Isa::available() {
        for (n, heads) in [
            (1, (1, 1, 64)),
            (2, (2, 3, 64)),
            (63, (1, 4, 16)),
            (65, (1, 8, 128)),
            (200, (2, 3, 64)),
            (130, (1, 2, 80)),
        ] {
            for mask in [Mask::Causal, Mask::SinkWindow { sink: 4, window: 37 }] {
                let positions: Vec<u32> = (0..n).collect();
                check(isa, DType::F32, heads, &positions, mask, None);
            }
        }
        let chunk: Vec<u32> = (150..300).collect();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            check(isa, dtype, (1, 3, 64), &chunk, Mask::Causal, None);
            check(isa, dtype, (1, 3, 64), &chunk, Mask::Causal, Some(70));
            check(isa, dtype, (1, 3, 64), &chunk, Mask::SinkWindow { sink: 100, window: 64 }, Some(120));
        }
    }
}

#[test]
fn rows_may_stand_far_apart() {
    let anchors: Vec<u32> = (0..20).map(|j| j * 64).chain(1250..1290).collect();
    for isa in Isa::available() {
        check(isa, DType::F16, (2, 3, 64), &anchors, Mask::Causal, None);
    }
}

#[test]
fn bad_rows_are_errors() {
    let mut numbers = Numbers(1);
    let cache = Cache::new(&mut numbers, 10, 1, 16, DType::F32);
    let q = numbers.tensor(&[2, 2, 16]);
    for positions in [&[3u32, 3][..], &[5, 4], &[0, 64], &[1]] {
        let rows = Rows { q: &q, kv: cache.kv(), table: &cache.table, positions, window: None };
        assert!(prefill(&rows, Mask::Causal.into()).is_err(), "{positions:?}");
    }
}

/// Random lists over `lists` heads, for rows cut at multiples of 64 and at 77.
fn random_selection(numbers: &mut Numbers, positions: &[u32], lists: usize) -> Selection {
    let mut runs = Vec::new();
    let (start, end) = (positions[0] as usize, *positions.last().unwrap() as usize + 1);
    for run in query_blocks(start..end, BLOCK_TOKENS) {
        let cut = 77.clamp(run.start, run.end);
        runs.extend([run.start..cut, cut..run.end].into_iter().filter(|r| !r.is_empty()));
    }
    let mut pick =
        |n: usize, one_in: u64| (0..n as u32).filter(|_| numbers.next().is_multiple_of(one_in)).collect::<Vec<_>>();
    let heads = (0..lists).map(|list| {
        let own = |run: &Range<usize>| (run.end - 1) / BLOCK_TOKENS;
        let blocks = runs.iter().map(|run| {
            let mut blocks = pick(own(run) + 3, 3);
            blocks.push(own(run) as u32);
            blocks.sort_unstable();
            blocks.dedup();
            blocks
        });
        let blocks = (list != 1).then(|| blocks.collect::<Lists>().into());
        let tokens: Lists = match list % 3 {
            0 => Lists::default(),
            1 => [pick(end + 20, 5)].into_iter().collect(),
            _ => runs.iter().map(|run| pick(run.end, 3)).collect(),
        };
        let mask = if list == 1 { Mask::SinkWindow { sink: 5, window: 40 } } else { Mask::Causal };
        HeadReads { mask, blocks, tokens }
    });
    let heads = heads.collect();
    Selection::new(runs, heads).unwrap()
}

/// Whether a row reads a key, spelt out.
fn is_read(selection: &Selection, list: usize, position: usize, key: usize, window: Option<usize>) -> bool {
    let run = selection.runs().iter().position(|run| run.contains(&position)).unwrap();
    let reads = &selection.heads()[list];
    let (blocks, tokens) = reads.lists(run);
    let listed = blocks.is_none_or(|b| b.contains(&((key / BLOCK_TOKENS) as u32))) || tokens.contains(&(key as u32));
    listed && reads.mask.keys(position, window).iter().any(|keys| keys.contains(&key))
}

#[test]
fn a_selection_reads_what_it_lists_and_gives_its_log_sum() {
    for isa in Isa::available() {
        for (kv_heads, group, per_query_head, window) in [
            (2, 3, false, None),
            (2, 3, true, None),
            (1, 4, true, Some(130)),
            (3, 1, false, Some(50)),
            (1, 8, false, None),
        ] {
            let mut numbers = Numbers(kv_heads as u64 + group as u64);
            let positions: Vec<u32> = (40..390).filter(|p| p % 7 != 3).collect();
            let cache = Cache::new(&mut numbers, 390, kv_heads, 64, DType::F32);
            let q = numbers.tensor(&[positions.len(), kv_heads * group, 64]);
            let lists = if per_query_head { kv_heads * group } else { kv_heads };
            let selection = random_selection(&mut numbers, &positions, lists);
            let rows = Rows { q: &q, kv: cache.kv(), table: &cache.table, positions: &positions, window };
            let (out, lse) = prefill_with(isa, &rows, Reads::Selection(&selection)).unwrap();
            let (q, out) = (q.to_vec3::<f32>().unwrap(), out.to_vec3::<f32>().unwrap());
            let lse = lse.to_vec2::<f32>().unwrap();
            let counts = selection.counts(&positions, window);
            for (row, &position) in positions.iter().enumerate() {
                for head in 0..kv_heads * group {
                    let list = head * lists / (kv_heads * group);
                    let position = position as usize;
                    let keys: Vec<usize> =
                        (0..=position).filter(|&key| is_read(&selection, list, position, key, window)).collect();
                    assert_eq!(counts[row * lists + list], keys.len(), "row {row} list {list}");
                    let exact = cache.attend(&q[row][head], head / group, keys.iter().map(|&key| (key, 0.0)));
                    let error = relative_error(&out[row][head], &exact);
                    assert!(error < 1e-5, "{isa:?} group {group} row {row} head {head}: {error}");
                    let exact = cache.scores(&q[row][head], head / group, &keys);
                    let sum = exact.iter().map(|s| s.exp()).sum::<f64>().ln();
                    assert!((f64::from(lse[row][head]) - sum).abs() < 1e-5, "{isa:?} row {row} head {head}");
                }
            }
        }
    }
}

#[test]
fn a_row_that_reads_nothing_gives_nothing() {
    let mut numbers = Numbers(3);
    let cache = Cache::new(&mut numbers, 130, 1, 16, DType::F32);
    let q = numbers.tensor(&[2, 1, 16]);
    let blocks = HeadReads::blocks([vec![0u32], vec![]].into_iter().collect());
    let selection = Selection::new(vec![3..64, 64..130], vec![blocks]).unwrap();
    let rows = Rows { q: &q, kv: cache.kv(), table: &cache.table, positions: &[5, 129], window: None };
    let (out, lse) = prefill(&rows, Reads::Selection(&selection)).unwrap();
    let (out, lse) = (out.to_vec3::<f32>().unwrap(), lse.to_vec2::<f32>().unwrap());
    assert!(out[0][0].iter().all(|x| x.is_finite()) && out[1][0].iter().all(|&x| x == 0.0), "{out:?}");
    assert!(lse[0][0].is_finite() && lse[1][0] == f32::NEG_INFINITY);
}

#[test]
fn bad_selections_are_errors() {
    let list = |ids: &[u32]| -> Lists { [ids.to_vec()].into_iter().collect() };
    let one = |blocks| vec![HeadReads::blocks(blocks)];
    let run = |rows: Range<usize>| query_blocks(rows, 64);
    let none = HeadReads::from(Mask::Causal);
    assert!(Selection::new(vec![0..64, 32..90], vec![none.clone()]).is_err(), "runs overlap");
    assert!(Selection::new(vec![0..5, 5..5], vec![none.clone()]).is_err(), "an empty run");
    assert!(Selection::new(run(0..9), one(list(&[2, 1]))).is_err(), "blocks descend");
    assert!(Selection::new(vec![0..9, 9..20], one(list(&[1]))).is_err(), "a list short");
    assert!(Selection::new(run(0..9), vec![HeadReads { tokens: list(&[1, 1]), ..none.clone() }]).is_err(), "twice");
    let mut numbers = Numbers(1);
    let cache = Cache::new(&mut numbers, 10, 2, 16, DType::F32);
    let q = numbers.tensor(&[2, 4, 16]);
    let rows = Rows { q: &q, kv: cache.kv(), table: &cache.table, positions: &[3, 8], window: None };
    for (runs, heads) in [(run(0..9), 1), (run(0..9), 3), (run(0..8), 2), (run(4..9), 4)] {
        let selection = Selection::new(runs, vec![none.clone(); heads]).unwrap();
        assert!(prefill(&rows, Reads::Selection(&selection)).is_err(), "{selection:?}");
    }
    for heads in [2, 4] {
        let selection = Selection::new(run(0..9), vec![none.clone(); heads]).unwrap();
        assert!(prefill(&rows, Reads::Selection(&selection)).is_ok());
    }
}

#[test]
fn sums_agree_with_f64_by_key_and_by_diagonal() {
    for isa in Isa::available() {
        for (first, n, group, window) in
            [(0, 1, 1, None), (70, 100, 3, None), (2200, 2264, 3, None), (40, 300, 8, Some(90))]
        {
            let mut numbers = Numbers(n as u64);
            let positions: Vec<u32> = (first..n).collect();
            let cache = Cache::new(&mut numbers, n as usize, 2, 64, DType::F16);
            let q = numbers.tensor(&[positions.len(), 2 * group, 64]);
            let rows = Rows { q: &q, kv: cache.kv(), table: &cache.table, positions: &positions, window };
            let sums = sums::sums_with(isa, &rows).unwrap();
            let of = |t: &Tensor| t.to_vec2::<f32>().unwrap();
            let (columns, diagonals, lse, q) =
                (of(&sums.columns), of(&sums.diagonals), of(&sums.lse), q.to_vec3::<f32>().unwrap());
            for head in 0..2 * group {
                let (mut by_key, mut by_diagonal) = (vec![0f64; n as usize], vec![0f64; n as usize]);
                for (row, &position) in positions.iter().enumerate() {
                    let position = position as usize;
                    let [_, keys] = Mask::Causal.keys(position, window);
                    let keys: Vec<usize> = keys.collect();
                    let scores = cache.scores(&q[row][head], head / group, &keys);
                    let log = scores.iter().map(|s| s.exp()).sum::<f64>().ln();
                    assert!((f64::from(lse[row][head]) - log).abs() < 1e-5);
                    for (key, score) in keys.into_iter().zip(scores) {
                        by_key[key] += (score - log).exp();
                        by_diagonal[position - key] += (score - log).exp();
                    }
                }
                for (mass, exact) in columns[head].iter().chain(&diagonals[head]).zip(by_key.iter().chain(&by_diagonal))
                {
                    assert!((f64::from(*mass) - exact).abs() < 1e-5 * exact.max(1e-3), "{isa:?} {mass} {exact}");
                }
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let mut numbers = Numbers(9);
    let positions: Vec<u32> = (2300..2500).collect();
    let cache = Cache::new(&mut numbers, 2500, 2, 64, DType::F32);
    let q = numbers.tensor(&[positions.len(), 6, 64]);
    let selection = random_selection(&mut numbers, &positions, 6);
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let rows = Rows { q: &q, kv: cache.kv(), table: &cache.table, positions: &positions, window: None };
            let (out, lse) = prefill(&rows, Reads::Selection(&selection)).unwrap();
            let sums = sums(&rows).unwrap();
            [out, lse, sums.columns, sums.diagonals, sums.lse]
                .map(|t| t.flatten_all().unwrap().to_vec1::<f32>().unwrap())
        })
    };
    assert!(run(1) == run(3));
}

proptest! {
    #[test]
    fn a_rows_keys_are_causal_and_disjoint_and_end_with_its_own(
        position in 0usize..300, sink in 0usize..100, window in 1usize..100, model in prop::option::of(1usize..200)
    ) {
        for mask in [Mask::Causal, Mask::SinkWindow { sink, window }] {
            let [a, b] = mask.keys(position, model);
            prop_assert!(a.start <= a.end && a.end <= b.start && b.start < b.end);
            prop_assert_eq!(b.end, position + 1);
            let lowest = (position + 1).saturating_sub(model.unwrap_or(usize::MAX));
            for key in 0..=position {
                let read = key >= lowest && match mask {
                    Mask::Causal => true,
                    Mask::SinkWindow { sink, window } => key < sink || key + window > position,
                };
                prop_assert_eq!(read, a.contains(&key) || b.contains(&key), "key {}", key);
            }
        }
    }
}

#[test]
fn numbers_that_are_none_stay_with_the_rows_that_read_them() {
    // The same rows over a cache whose later keys and values are other numbers, or none at all.
    let (n, from) = (200usize, 145usize);
    for isa in Isa::available() {
        for (dtype, window) in [(DType::F32, None), (DType::F16, None), (DType::F16, Some(70))] {
            let with = |late: Option<(f32, bool)>| {
                let mut numbers = Numbers(9);
                let [q, k, v] = [6, 2, 2].map(|heads| numbers.tensor(&[n, heads, 40]));
                let spoil = |x: &Tensor, late: f32| {
                    let late = Tensor::full(late, (n - from, 2, 40), &Device::Cpu).unwrap();
                    Tensor::cat(&[x.narrow(0, 0, from).unwrap(), late], 0).unwrap()
                };
                let (k, v) = match late {
                    None => (k, v),
                    Some((late, keys)) => (if keys { spoil(&k, late) } else { k }, spoil(&v, late)),
                };
                let cache = Cache::from_rows(&k, &v, dtype);
                let positions: Vec<u32> = (0..n as u32).collect();
                let rows = Rows { q: &q, kv: cache.kv(), table: &cache.table, positions: &positions, window };
                let selection = random_selection(&mut Numbers(4), &positions, 2);
                let reads = [Mask::Causal.into(), Mask::SinkWindow { sink: 3, window: 50 }.into(), (&selection).into()];
                reads.map(|reads| {
                    let (out, lse) = prefill_with(isa, &rows, reads).unwrap();
                    [out, lse].map(|x| x.flatten_all().unwrap().to_vec1::<f32>().unwrap())
                })
            };
            let finite = with(None);
            let all = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(|x| [(x, false), (x, true)]).concat();
            for late in all {
                for ([out, lse], [other, other_lse]) in finite.iter().zip(&with(Some(late))) {
                    let bits =
                        |x: &[f32], each: usize| x[..from * each].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert!(bits(out, 6 * 40) == bits(other, 6 * 40), "{isa:?} {dtype:?} {late:?}");
                    assert!(bits(lse, 6) == bits(other_lse, 6), "{isa:?} {dtype:?} {late:?}");
                    // Nor are they swallowed.
                    let after = &other[from * 6 * 40..(from + 1) * 6 * 40];
                    assert!(after.iter().all(|x| !x.is_finite()), "{isa:?} {dtype:?} {late:?}");
                }
            }
        }
    }
}
