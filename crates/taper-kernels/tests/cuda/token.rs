//! Tokens chosen on the device against a plain reading of the same rules in f64.

use crate::cache::{Numbers, device};
use candle_core::{Device, Tensor};
use taper_kernels::token::{Draw, choose, pick};

/// Rows of logits, most of them of few values, so that many are equal.
fn rows(numbers: &mut Numbers, count: usize, vocab: usize) -> Vec<Vec<f32>> {
    let step = |row: usize| [0.0, 0.25, 2.0][row % 3];
    let one = |numbers: &mut Numbers, row: usize| match step(row) {
        0.0 => 4.0 * numbers.normal(),
        step => (4.0 * numbers.normal() / step).round() * step,
    };
    (0..count).map(|row| (0..vocab).map(|_| one(numbers, row)).collect()).collect()
}

fn chosen(rows: &[Vec<f32>], draws: &[Draw]) -> Vec<u32> {
    let logits = Tensor::from_vec(rows.concat(), (rows.len(), rows[0].len()), &Device::Cpu).unwrap();
    choose(&logits.to_device(&device()).unwrap(), draws).unwrap().unwrap().to_vec1::<u32>().unwrap()
}

/// The tokens that the filters keep and their weights, in order.
fn kept(row: &[f32], draw: &Draw) -> Vec<(u32, f64)> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |x: &f32| f64::from((x - max) / draw.temperature).exp();
    let mut kept: Vec<(u32, f64)> = (0u32..).zip(row.iter().map(weight)).collect();
    kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if draw.top_k > 0 {
        kept.truncate(draw.top_k);
    }
    kept.retain(|(_, weight)| *weight >= f64::from(draw.min_p));
    if draw.top_p < 1.0 {
        let goal = f64::from(draw.top_p) * kept.iter().map(|k| k.1).sum::<f64>();
        let mut sum = 0.0;
        let last = kept.iter().position(|k| {
            sum += k.1;
            sum >= goal
        });
        kept.truncate(last.map_or(kept.len(), |last| last + 1));
    }
    kept.sort_by_key(|k| k.0);
    kept
}

#[test]
fn the_likeliest_token_is_the_first_of_the_largest() {
    let mut numbers = Numbers(41);
    for vocab in [1, 7, 1000, 49_152, 65_537, 128_256, 262_144] {
        let rows = rows(&mut numbers, 7, vocab);
        let first = |row: &Vec<f32>| {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            row.iter().position(|x| *x == max).unwrap() as u32
        };
        let expected: Vec<u32> = rows.iter().map(first).collect();
        assert_eq!(chosen(&rows, &[Draw::LIKELIEST; 7]), expected, "{vocab}");
        let mut bad = rows;
        bad[0][vocab / 2] = f32::NAN;
        bad[1][vocab - 1] = f32::INFINITY;
        bad[2].fill(f32::NEG_INFINITY);
        // Of two zeros the first, whatever their signs.
        bad[3].fill(-3.0);
        (bad[3][vocab - 1], bad[3][vocab / 3]) = (0.0, -0.0);
        bad[4].fill(f32::NEG_INFINITY);
        bad[4][vocab / 2] = -1e30;
        let expected = [u32::MAX, u32::MAX, u32::MAX, vocab as u32 / 3, vocab as u32 / 2, expected[5], expected[6]];
        assert_eq!(chosen(&bad, &[Draw::LIKELIEST; 7]), expected, "{vocab}");
        let warm = [Draw { temperature: 0.5, top_p: 0.9, ..Draw::LIKELIEST }; 7];
        assert_eq!(chosen(&bad, &warm)[..3], [u32::MAX; 3]);
    }
}

#[test]
fn tokens_are_drawn_from_those_that_the_filters_keep() {
    let mut numbers = Numbers(42);
    let filters =
        [(0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (300, 0.8, 0.001), (1, 0.5, 0.0), (0, 0.0, 0.0)];
    for vocab in [5, 49_152, 128_256, 200_000] {
        for (top_k, top_p, min_p) in filters {
            let rows = rows(&mut numbers, 9, vocab);
            let mut draw = || Draw {
                temperature: 0.3 + numbers.below(20) as f32 / 10.0,
                top_k,
                top_p,
                min_p,
                uniform: (numbers.next() >> 11) as f64 / (1u64 << 53) as f64,
            };
            let draws: Vec<Draw> = (0..9).map(|_| draw()).collect();
            let got = chosen(&rows, &draws);
            for ((row, draw), got) in rows.iter().zip(&draws).zip(got) {
                let kept = kept(row, draw);
                let total: f64 = kept.iter().map(|k| k.1).sum();
                // Where the token's own weight begins and ends; an edge may be rounded over.
                let at = kept.iter().position(|k| k.0 == got);
                let at = at.unwrap_or_else(|| panic!("{vocab} {draw:?}: token {got} is not kept"));
                let before: f64 = kept[..at].iter().map(|k| k.1).sum();
                let (from, to) = (before / total, (before + kept[at].1) / total);
                assert!(
                    from - 1e-5 <= draw.uniform && draw.uniform <= to + 1e-5,
                    "{vocab} {draw:?}: {got} of {from}..{to}"
                );
            }
            assert_eq!(chosen(&rows, &draws), chosen(&rows, &draws));
        }
    }
}

/// As few launches as go through all of the kernel: bench/gpu/racecheck.sh looks at every one.
#[test]
fn one_row_goes_through_every_filter() {
    let mut numbers = Numbers(44);
    let row = rows(&mut numbers, 2, 1000).pop().unwrap();
    let all = Draw { temperature: 0.8, top_k: 300, top_p: 0.8, min_p: 0.001, uniform: 0.4 };
    for draw in [Draw::LIKELIEST, all] {
        assert_eq!(chosen(std::slice::from_ref(&row), &[draw]), [pick(&row, &draw).unwrap()], "{draw:?}");
    }
}

/// Some other share of what the token's weight begins or ends at may decide where sums are rounded otherwise.
fn on_an_edge(row: &[f32], draw: &Draw, token: u32) -> bool {
    let kept = kept(row, draw);
    let total: f64 = kept.iter().map(|k| k.1).sum();
    let Some(at) = kept.iter().position(|k| k.0 == token) else { return false };
    let before: f64 = kept[..at].iter().map(|k| k.1).sum();
    let ends = [before / total, (before + kept[at].1) / total];
    ends.iter().any(|end| (draw.uniform - end).abs() < 1e-5)
}

#[test]
fn tokens_are_those_that_the_host_picks_from_the_same_logits() {
    let mut numbers = Numbers(43);
    let (mut apart, mut all) = (0, 0);
    for (vocab, count) in [(1000, 33), (49_152, 33), (128_256, 7)] {
        let rows = rows(&mut numbers, count, vocab);
        let mut draw = |row: usize| Draw {
            // Every fifth row is greedy, and rows of one launch have filters of their own.
            temperature: if row.is_multiple_of(5) { 0.0 } else { 0.4 + 0.1 * (row % 9) as f32 },
            top_k: [0, 0, 40, 0][row % 4],
            top_p: [1.0, 0.9, 0.8, 1.0][row % 4],
            min_p: [0.0, 0.0, 0.0, 0.02][row % 4],
            uniform: (numbers.next() >> 11) as f64 / (1u64 << 53) as f64,
        };
        let draws: Vec<Draw> = (0..count).map(&mut draw).collect();
        let got = chosen(&rows, &draws);
        for ((row, draw), got) in rows.iter().zip(&draws).zip(got) {
            let expected = pick(row, draw).unwrap();
            all += 1;
            if got != expected {
                apart += 1;
                let edge = draw.temperature > 0.0 && on_an_edge(row, draw, got) && on_an_edge(row, draw, expected);
                assert!(edge, "{vocab} {draw:?}: {got}, where the host picks {expected}");
            }
        }
        // A row's token does not depend on those beside it.
        let alone = chosen(&rows[3..4], &draws[3..4]);
        assert_eq!(alone, chosen(&rows, &draws)[3..4]);
    }
    assert!(apart * 20 <= all, "{apart} of {all} are drawn at an edge");
    assert_eq!(pick(&[f32::NAN, 0.0], &Draw::LIKELIEST), None);
}
