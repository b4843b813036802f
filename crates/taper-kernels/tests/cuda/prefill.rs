//! Attention of many rows, and Delta's correction.

use crate::cache::{Caches, GRID, LIMIT, Numbers, below, device, every_group, furthest, none, relative, with};
use crate::lists::tiles_of;
use candle_core::{DType, Tensor};
use taper_kernels::correct::{Anchors, Correction, correct};
use taper_kernels::cuda::{Chosen, Slash, Sparse, Tiles, block_lists, drop_columns, prefill_tiles, stripe_bits};
use taper_kernels::kv::{BLOCK_TOKENS, PagedKv};
use taper_kernels::prefill::stripes::Stripes;
use taper_kernels::prefill::{HeadReads, Lists, Mask, Reads, Rows, Selection, prefill, query_blocks, sums};

/// Both sides of one call on sequence `i`.
fn compare(caches: &Caches, i: usize, q: &Tensor, positions: &[u32], window: Option<usize>, reads: Reads, what: &str) {
    let on = device();
    let table = &caches.tables[i];
    let cpu = Rows { q, kv: caches.on_cpu(), table, positions, window };
    let (out, lse) = prefill(&cpu, reads).unwrap();
    let q = q.to_device(&on).unwrap();
    let (out_cuda, lse_cuda) = prefill(&Rows { q: &q, kv: caches.on_cuda(), table, positions, window }, reads).unwrap();
    below(relative(&out_cuda, &out), LIMIT, what);
    below(furthest(&lse_cuda, &lse), LIMIT, what);
}

#[test]
fn masks_agree_with_the_cpu() {
    let mut numbers = Numbers(11);
    for (dtype, d, kv_heads, group) in every_group() {
        let lens = [1, 63, 65, 700];
        let caches = Caches::new(&mut numbers, &lens, kv_heads, d, dtype, 0.0);
        for (i, &n) in lens.iter().enumerate() {
            let strided: Vec<u32> = (0..n as u32).filter(|p| p % 7 == 0 || *p as usize + 40 > n).collect();
            let whole: Vec<u32> = (0..n as u32).collect();
            for positions in [&whole[..], &whole[n / 3..], &strided[..]] {
                let q = numbers.tensor(&[positions.len(), kv_heads * group, d], dtype);
                for window in [None, Some(90)] {
                    for mask in [
                        Mask::Causal,
                        Mask::SinkWindow { sink: 4, window: 50 },
                        Mask::SinkWindow { sink: 70, window: 64 },
                        Mask::SinkWindow { sink: 0, window: 1 },
                        Mask::SinkWindow { sink: 3, window: 5000 },
                    ] {
                        let what = format!("{dtype:?} {d} {kv_heads}x{group} {n} {mask:?} within {window:?}");
                        compare(&caches, i, &q, positions, window, mask.into(), &what);
                    }
                }
            }
        }
    }
}

#[test]
fn selections_of_blocks_and_tokens_agree_with_the_cpu() {
    let mut numbers = Numbers(12);
    for (at, (dtype, d, kv_heads, group)) in every_group().enumerate() {
        let n = 650;
        let caches = Caches::new(&mut numbers, &[70, n], kv_heads, d, dtype, 0.0);
        let positions: Vec<u32> = (40..n as u32).collect();
        let q = numbers.tensor(&[positions.len(), kv_heads * group, d], dtype);
        // Runs that are cut within a block, and longer than a tile.
        let mut runs = query_blocks(40..400, 64);
        runs.extend([400..500, 500..510, 510..n]);
        let heads = if at % 2 == 0 { kv_heads } else { kv_heads * group };
        let masks = [Mask::Causal, Mask::SinkWindow { sink: 5, window: 200 }];
        let mut reads = |h: usize| {
            let blocks: Lists = runs.iter().map(|_| numbers.some(n.div_ceil(BLOCK_TOKENS), 3)).collect();
            let tokens: Lists = runs.iter().map(|_| numbers.some(n, 40)).collect();
            match (at + h) % 4 {
                0 => HeadReads::blocks(blocks),
                1 => HeadReads { mask: Mask::Causal, blocks: Some(blocks.into()), tokens },
                2 => HeadReads { mask: masks[1], blocks: Some(blocks.into()), tokens },
                _ => HeadReads::from(masks[h % 2]),
            }
        };
        let reads: Vec<HeadReads> = (0..heads).map(&mut reads).collect();
        let selection = Selection::new(runs, reads).unwrap();
        for window in [None, Some(150)] {
            let what = format!("{dtype:?} {d} {kv_heads}x{group} selection within {window:?}");
            compare(&caches, 1, &q, &positions, window, (&selection).into(), &what);
        }
    }
}

#[test]
fn few_rows_of_many_keys_agree_with_the_cpu() {
    let mut numbers = Numbers(18);
    for (dtype, d, kv_heads, group) in every_group() {
        let n = 3_000;
        let caches = Caches::new(&mut numbers, &[n], kv_heads, d, dtype, 0.0);
        // Keys are read in parts, of which early rows and small windows leave some empty.
        let positions: Vec<u32> = (0..n as u32).filter(|p| p % 150 == 0 || *p as usize + 20 > n).collect();
        let q = numbers.tensor(&[positions.len(), kv_heads * group, d], dtype);
        for mask in [Mask::Causal, Mask::SinkWindow { sink: 70, window: 2_100 }] {
            for window in [None, Some(2_500)] {
                let what = format!("{dtype:?} {d} {kv_heads}x{group} {mask:?} within {window:?}");
                compare(&caches, 0, &q, &positions, window, mask.into(), &what);
            }
        }
    }
}

#[test]
fn a_key_that_is_no_number_shows_in_the_rows_that_read_it_in_parts_too() {
    let mut numbers = Numbers(26);
    for (dtype, d, kv_heads, group) in every_group() {
        let n = 3_000;
        let caches = Caches::new(&mut numbers, &[n], kv_heads, d, dtype, 0.0);
        // Of the last KV head a key of the second block, which one part of some reads.
        let last = kv_heads - 1;
        let at = ((caches.tables[0][1] as usize * kv_heads + last) * BLOCK_TOKENS + 10) * d;
        let k = with(&caches.cuda.0, |k| k[at] = f32::NAN);
        let kv = PagedKv { k: &k, v: &caches.cuda.1 };
        for positions in [vec![50, 74, 75, 2_998, 2_999], (0..n as u32).collect()] {
            let q = numbers.tensor(&[positions.len(), kv_heads * group, d], dtype).to_device(&device()).unwrap();
            let rows = Rows { q: &q, kv, table: &caches.tables[0], positions: &positions, window: None };
            let (out, _) = prefill(&rows, Mask::Causal.into()).unwrap();
            let expected =
                |position: &u32| (0..kv_heads * group).map(|h| *position >= 74 && h / group == last).collect();
            let expected: Vec<Vec<bool>> = positions.iter().map(expected).collect();
            assert_eq!(none(&out), expected, "{dtype:?} {d} {kv_heads}x{group}, {} rows", positions.len());
        }
    }
}

#[test]
fn stripes_agree_with_the_cpu() {
    let mut numbers = Numbers(19);
    for (at, (dtype, d, kv_heads, group)) in every_group().enumerate() {
        // Groups of other sizes with fewer rows: the CPU's attention takes most of the time.
        let n = if at < GRID.len() { 1_500 } else { 800 };
        let caches = Caches::new(&mut numbers, &[n], kv_heads, d, dtype, 0.0);
        let (all, some) = ((0..n as u32).collect::<Vec<_>>(), (448..n as u32 - 297).collect::<Vec<_>>());
        let runs = query_blocks(0..n, BLOCK_TOKENS);
        let heads = if at % 2 == 0 { kv_heads } else { kv_heads * group };
        let stripes = |numbers: &mut Numbers, listed: bool| {
            let mut blocks = numbers.some(n / BLOCK_TOKENS + 2, 4);
            // Without block 0 the host makes the lists.
            blocks.retain(|&block| block > 0);
            blocks.splice(0..0, listed.then_some(0));
            let mut distances: Vec<u32> = numbers.some(n / BLOCK_TOKENS, 5).iter().flat_map(|s| [*s, s + 1]).collect();
            distances.dedup();
            Stripes { blocks, tokens: Vec::new(), distances, block_tokens: BLOCK_TOKENS }.reads(&runs)
        };
        for listed in [true, false] {
            let reads = (0..heads).map(|_| stripes(&mut numbers, listed)).collect();
            let selection = Selection::new(runs.clone(), reads).unwrap();
            for positions in [&all, &some] {
                let q = numbers.tensor(&[positions.len(), kv_heads * group, d], dtype);
                for window in [None, Some(700)] {
                    let what = format!("{dtype:?} {d} {kv_heads}x{group} stripes {listed} within {window:?}");
                    compare(&caches, 0, &q, positions, window, (&selection).into(), &what);
                }
            }
        }
    }
}

#[test]
fn scores_that_rise_late_agree_with_the_cpu() {
    let mut numbers = Numbers(13);
    let caches = Caches::new(&mut numbers, &[400], 2, 128, DType::BF16, 0.0);
    let positions: Vec<u32> = (0..400).collect();
    let q = (numbers.tensor(&[400, 8, 128], DType::BF16) * 8.0).unwrap();
    compare(&caches, 0, &q, &positions, None, Mask::Causal.into(), "large scores");
}

#[test]
fn tiles_of_many_sequences_in_one_launch() {
    let mut numbers = Numbers(14);
    for (dtype, d, kv_heads, group) in every_group() {
        let lens = [130, 300];
        let caches = Caches::new(&mut numbers, &lens, kv_heads, d, dtype, 0.0);
        for (i, &n) in lens.iter().enumerate() {
            let q = numbers.tensor(&[n, kv_heads * group, d], dtype);
            let on = q.to_dtype(dtype).unwrap().to_device(&device()).unwrap();
            let tiles = Tiles::span(&on, 0..n as u32, i as u32).unwrap();
            let reads = Sparse::default();
            let tables = caches.device_tables();
            let (out, lse) = prefill_tiles(&on, caches.on_cuda(), &tables, &tiles, &reads).unwrap();
            let positions: Vec<u32> = (0..n as u32).collect();
            let (q, kv, table) = (&q, caches.on_cpu(), &caches.tables[i][..]);
            let rows = Rows { q, kv, table, positions: &positions, window: None };
            let (want, want_lse) = prefill(&rows, Mask::Causal.into()).unwrap();
            below(relative(&out, &want), LIMIT, "out");
            below(furthest(&lse, &want_lse), LIMIT, "lse");
        }
    }
}

#[test]
fn delta_agrees_with_the_cpu() {
    let mut numbers = Numbers(15);
    let on = device();
    for (dtype, d, kv_heads, group) in GRID {
        let (rows, heads, gamma) = (200, kv_heads * group, 16);
        for first in [0, 5, 300] {
            let anchors = Anchors { first, gamma };
            let count = anchors.below(rows).count();
            for tail in [0, 30] {
                let sparse = numbers.tensor(&[rows + tail, heads, d], dtype);
                let dense = numbers.tensor(&[(count + tail).max(1), heads, d], DType::F32);
                let dense = dense.narrow(0, 0, count + tail).unwrap();
                let carry = numbers.tensor(&[heads, d], DType::F32);
                for correction in [Correction::Propagate, Correction::Replace] {
                    let what = format!("{dtype:?} {d} {heads} heads from {first}, {tail} dense, {correction:?}");
                    let there = |t: &Tensor| t.to_device(&on).unwrap();
                    let (out, next) = correct((&sparse, rows), &dense, anchors, Some(&carry), correction).unwrap();
                    let all = (&there(&sparse), rows);
                    let (cuda, cuda_next) =
                        correct(all, &there(&dense), anchors, Some(&there(&carry)), correction).unwrap();
                    below(relative(&cuda, &out), 1e-6, &format!("{what}, correct"));
                    below(relative(&cuda_next.unwrap(), &next.unwrap()), 1e-6, &format!("{what}, carry"));
                }
            }
        }
    }
}

#[test]
fn sums_of_probabilities_agree_with_the_cpu() {
    let mut numbers = Numbers(16);
    for (dtype, d, kv_heads, group) in every_group() {
        let lens = [70, 3000];
        let caches = Caches::new(&mut numbers, &lens, kv_heads, d, dtype, 0.0);
        for (i, n) in [(0, 70u32), (1, 3000)] {
            let last: Vec<u32> = (n - 64..n).collect();
            let apart: Vec<u32> = (0..n).filter(|p| p % 500 < 20).collect();
            for (positions, window) in
                [&last, &apart].into_iter().flat_map(|of| [(of, None), (of, Some(150)), (of, Some(1))])
            {
                let q = numbers.tensor(&[positions.len(), kv_heads * group, d], dtype);
                let (kv, table) = (caches.on_cpu(), &caches.tables[i][..]);
                let want = sums(&Rows { q: &q, kv, table, positions, window }).unwrap();
                let (q, kv) = (q.to_device(&device()).unwrap(), caches.on_cuda());
                let got = sums(&Rows { q: &q, kv, table, positions, window }).unwrap();
                let what = format!("{dtype:?} {d} {kv_heads}x{group} {n} within {window:?}");
                below(relative(&got.columns, &want.columns), LIMIT, &what);
                below(relative(&got.diagonals, &want.diagonals), LIMIT, &what);
                below(furthest(&got.lse, &want.lse), LIMIT, &what);
            }
        }
    }
}

#[test]
fn lists_of_columns_and_slashes_are_those_of_the_cpu() {
    let mut numbers = Numbers(17);
    let on = device();
    let (heads, start, n) = (3, 40usize, 1500usize);
    let (blocks, runs) = (n.div_ceil(BLOCK_TOKENS), query_blocks(start..n, BLOCK_TOKENS));
    let tiles = tiles_of(&runs);
    let choose = |numbers: &mut Numbers, most: usize, of: usize| -> (Vec<Vec<u32>>, Tensor, Tensor) {
        let all: Vec<Vec<u32>> = (0..heads).map(|_| numbers.some(most, of)).collect();
        let mut flat = vec![u32::MAX; heads * most];
        for (to, ids) in flat.chunks_exact_mut(most).zip(&all) {
            to[..ids.len()].copy_from_slice(ids);
        }
        let counts: Vec<u32> = all.iter().map(|ids| ids.len() as u32).collect();
        let ids = Tensor::from_vec(flat, (heads, most), &on).unwrap();
        (all, ids, Tensor::from_vec(counts, heads, &on).unwrap())
    };
    let (columns, column_ids, column_counts) = choose(&mut numbers, blocks, 5);
    let (slashes, slash_ids, slash_counts) = choose(&mut numbers, blocks, 8);
    let of = |ids, counts| Chosen { ids, counts };
    let (columns_there, slashes_there) = (of(&column_ids, &column_counts), of(&slash_ids, &slash_counts));
    let bitmaps = stripe_bits(Some(columns_there), slashes_there, Slash::TwoBlocks, blocks).unwrap();
    let lists = block_lists(&tiles, (&bitmaps, BLOCK_TOKENS), false).unwrap();
    let got = lists.read_back().unwrap();
    let sorted = |ids: &mut Vec<u32>| {
        ids.sort_unstable();
        ids.dedup();
    };
    for (head, got) in got.iter().enumerate().take(heads) {
        for (at, run) in runs.iter().enumerate() {
            let mut listed = columns[head].clone();
            listed.push(0);
            let mut distances: Vec<u32> = slashes[head].iter().flat_map(|s| [*s, s + 1]).collect();
            sorted(&mut listed);
            sorted(&mut distances);
            let stripes = Stripes { blocks: listed, tokens: Vec::new(), distances, block_tokens: BLOCK_TOKENS };
            let reads = stripes.reads(std::slice::from_ref(run));
            assert_eq!(got.get(at), &*reads.blocks.unwrap().get(0), "head {head}, rows {run:?}");
        }
    }
    // Two heads to a list of blocks.
    let each: Vec<Vec<u32>> = (0..2 * heads).map(|_| numbers.some(n, 70)).collect();
    let room = each.iter().map(Vec::len).max().unwrap();
    let padded: Vec<u32> = each.iter().flat_map(|ids| (0..room).map(|i| ids.get(i).copied().unwrap_or(0))).collect();
    let tokens = Tensor::from_vec(padded, (2 * heads, room), &on).unwrap();
    let counts = Tensor::from_vec(each.iter().map(|ids| ids.len() as u32).collect(), 2 * heads, &on).unwrap();
    let left = drop_columns(&tiles, &tokens, &counts, &lists).unwrap().read_back().unwrap();
    for (head, ids) in each.iter().enumerate() {
        for (at, run) in runs.iter().enumerate() {
            let held = |id: &u32| got[head / 2].get(at).contains(&(id / BLOCK_TOKENS as u32));
            let expected: Vec<u32> = ids.iter().copied().filter(|id| (*id as usize) < run.end && !held(id)).collect();
            assert_eq!(left[head].get(at), expected, "head {head}, rows {run:?}");
        }
    }
}
