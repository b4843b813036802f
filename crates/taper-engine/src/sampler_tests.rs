use super::*;
use proptest::prelude::*;
use rand::Rng;

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..Default::default() }
}

fn draws(params: SamplingParams, logits: &[f32], count: usize) -> Vec<u32> {
    let mut sampler = Sampler::new(params, 0, &[]);
    (0..count).map(|_| sampler.sample(logits).unwrap()).collect()
}

/// Tokens by falling logit, ties by token.
fn order(logits: &[f32]) -> Vec<u32> {
    let mut all: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all.into_iter().map(|(t, _)| t).collect()
}

#[test]
fn greedy_takes_the_first_of_equals() {
    assert_eq!(draws(greedy(), &[0.0, 3.0, 3.0], 2), [1, 1]);
}

#[test]
fn frequencies_follow_the_probabilities() {
    let logits = [0.0, 1.0f32, 2.0, -1.0];
    let total: f32 = logits.iter().map(|l| (l / 0.7).exp()).sum();
    let params = SamplingParams { temperature: 0.7, seed: 5, ..Default::default() };
    let drawn = draws(params, &logits, 20_000);
    for (token, logit) in (0u32..).zip(logits) {
        let share = drawn.iter().filter(|&&t| t == token).count() as f32 / 20_000.0;
        let expected = (logit / 0.7).exp() / total;
        // Five standard deviations of the largest binomial are 0.018.
        assert!((share - expected).abs() < 0.018, "{token}: {share} for {expected}");
    }
}

#[test]
fn choices_of_one_seed_differ_and_repeat() {
    let logits = vec![0.0; 64];
    let run = |choice| {
        let mut s = Sampler::new(SamplingParams::default(), choice, &[]);
        (0..16).map(|_| s.sample(&logits).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(0), run(1));
}

#[test]
fn presence_and_frequency_count_the_answer_only() {
    let params = SamplingParams { presence_penalty: 0.5, frequency_penalty: 0.25, ..greedy() };
    let mut s = Sampler::new(params, 0, &[1]);
    let logits = [0.0, 1.0, 0.1];
    assert_eq!(s.sample(&logits).unwrap(), 1, "the prompt's 1 costs nothing");
    // 1.0 - 0.75 = 0.25 still beats 0.1; the third time 1.0 - 1.0 = 0 does not.
    assert_eq!(s.sample(&logits).unwrap(), 1);
    assert_eq!(s.sample(&logits).unwrap(), 2);
}

#[test]
fn repetition_counts_the_prompt_and_both_signs() {
    let params = SamplingParams { repetition_penalty: 2.0, ..greedy() };
    let mut s = Sampler::new(params.clone(), 0, &[0]);
    assert_eq!(s.sample(&[1.0, 0.6]).unwrap(), 1);
    let mut s = Sampler::new(params, 0, &[0]);
    assert_eq!(s.sample(&[-1.0, -1.5]).unwrap(), 1);
}

#[test]
fn bias_forces_and_forbids() {
    let with = |bias: Vec<(u32, f32)>| SamplingParams { logit_bias: bias, ..Default::default() };
    assert_eq!(draws(with(vec![(2, 100.0)]), &[1.0, 2.0, 0.0], 50), [2; 50]);
    let drawn = draws(with(vec![(1, -100.0), (9, 5.0)]), &[0.0, 5.0, 0.0], 50);
    assert!(!drawn.contains(&1));
}

#[test]
fn only_what_is_allowed_comes() {
    let params = SamplingParams { allowed: Some([1, 3, 77].into()), temperature: 5.0, ..Default::default() };
    let drawn = draws(params, &[9.0, 0.0, 9.0, 0.5], 200);
    assert!(drawn.iter().all(|token| [1, 3].contains(token)) && drawn.contains(&1) && drawn.contains(&3));
    let none = SamplingParams { allowed: Some([77].into()), ..Default::default() };
    assert_eq!(Sampler::new(none, 0, &[]).sample(&[0.0, 1.0]), Err(Undrawable::NoToken));
    // A bias moves what is allowed, and allows nothing.
    let params = SamplingParams { allowed: Some([1, 3].into()), logit_bias: vec![(0, 100.0), (1, 50.0)], ..greedy() };
    assert_eq!(draws(params, &[0.0, 0.0, 0.0, 9.0], 2), [1, 1]);
}

#[test]
fn a_banned_row_never_comes_whole() {
    // Token 2 is the likeliest, then 1, then 0.
    let logits = [0.0, 1.0, 2.0];
    let banned = |rows: &[&[u32]]| SamplingParams { banned: rows.iter().map(|row| row.to_vec()).collect(), ..greedy() };
    assert_eq!(draws(banned(&[&[2]]), &logits, 3), [1, 1, 1]);
    assert_eq!(draws(banned(&[&[2, 2]]), &logits, 5), [2, 1, 2, 1, 2]);
    assert_eq!(draws(banned(&[&[2, 2, 2], &[2, 1]]), &logits, 6), [2, 2, 0, 2, 2, 0]);
    // It is the answer's tokens that count, not the prompt's.
    assert_eq!(Sampler::new(banned(&[&[2, 2]]), 0, &[2]).sample(&logits), Ok(2));
    assert_eq!(Sampler::new(banned(&[&[0], &[1], &[2]]), 0, &[]).sample(&logits), Err(Undrawable::NoToken));
}

#[test]
fn bad_logits_are_an_error() {
    for bad in [vec![], vec![0.0, f32::NAN], vec![f32::INFINITY, 0.0], vec![f32::NEG_INFINITY; 3]] {
        assert_eq!(Sampler::new(greedy(), 0, &[]).sample(&bad), Err(Undrawable::NonFinite), "{bad:?}");
    }
    assert_eq!(draws(greedy(), &[f32::NEG_INFINITY, -1.0], 1), [1]);
}

#[test]
fn logprobs_are_a_log_softmax() {
    let (chosen, top) = logprobs(&[0.0, 2.0, 1.0, 2.0], 2, 3);
    let norm = (1.0 + 2.0 * 2f32.exp() + 1f32.exp()).ln();
    assert!((chosen.logprob - (1.0 - norm)).abs() < 1e-6);
    assert_eq!(top.iter().map(|t| t.token).collect::<Vec<_>>(), [1, 3, 2]);
    assert!((top[0].logprob - (2.0 - norm)).abs() < 1e-6);
    assert_eq!(logprobs(&[0.0, 1.0], 0, 20).1.len(), 2);
}

/// What is drawn by going through all tokens that the filters leave, in f64; none where rounding may decide.
fn by_hand(p: &SamplingParams, logits: &[f32]) -> Option<u32> {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let weight = |t: u32| (f64::from(logits[t as usize] - max) / f64::from(p.temperature)).exp();
    let mut kept = order(logits);
    kept.truncate(p.top_k.unwrap_or(usize::MAX));
    let near = |a: f64, b: f64| (a - b).abs() < 1e-5 * b;
    if kept.iter().any(|&t| near(weight(t), f64::from(p.min_p))) {
        return None;
    }
    kept.retain(|&t| weight(t) >= f64::from(p.min_p));
    let all: f64 = kept.iter().map(|&t| weight(t)).sum();
    let mut sum = 0.0;
    for (i, &token) in kept.iter().enumerate() {
        sum += weight(token);
        if p.top_p < 1.0 && near(sum, all * f64::from(p.top_p)) {
            return None;
        }
        if p.top_p < 1.0 && sum >= all * f64::from(p.top_p) {
            kept.truncate(i + 1);
            break;
        }
    }
    kept.sort_unstable();
    let all: f64 = kept.iter().map(|&t| weight(t)).sum();
    let mut left = ChaCha8Rng::seed_from_u64(p.seed).random::<f64>() * all;
    for token in kept {
        if (left - weight(token)).abs() < 1e-5 * all {
            return None;
        }
        left -= weight(token);
        if left < 0.0 {
            return Some(token);
        }
    }
    None
}

proptest! {
    #[test]
    fn draws_are_those_by_hand(
        logits in prop::collection::vec(-6f32..6.0, 1..700),
        (temperature, top_k) in (0.2f32..3.0, prop::option::of(1usize..400)),
        (top_p, min_p) in (prop_oneof![Just(1f32), 0.1f32..1.0], prop_oneof![Just(0f32), 0.001f32..0.5]),
        seed: u64,
    ) {
        let params = SamplingParams { temperature, top_k, top_p, min_p, seed, ..Default::default() };
        if let Some(token) = by_hand(&params, &logits) {
            prop_assert_eq!(draws(params, &logits, 1), [token]);
        }
    }

    #[test]
    fn top_k_keeps_the_k_best(logits in prop::collection::vec(-4f32..4.0, 1..700), k in 1usize..20, seed: u64) {
        let params = SamplingParams { top_k: Some(k), temperature: 2.0, seed, ..Default::default() };
        let best = order(&logits);
        for token in draws(params, &logits, 20) {
            prop_assert!(best[..k.min(best.len())].contains(&token));
        }
    }

    #[test]
    fn top_p_keeps_the_fewest_that_reach_p(logits in prop::collection::vec(-4f32..4.0, 1..700), p in 0.01f32..1.0, seed: u64) {
        let params = SamplingParams { top_p: p, seed, ..Default::default() };
        let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let best = order(&logits);
        for token in draws(params, &logits, 20) {
            // What comes before a kept token does not reach p.
            let before: f64 = best.iter().take_while(|&&t| t != token).map(|&t| f64::from(logits[t as usize]).exp()).sum();
            prop_assert!(before / total < f64::from(p) + 1e-5);
        }
    }

    #[test]
    fn min_p_keeps_what_is_near_the_best(logits in prop::collection::vec(-4f32..4.0, 1..100), p in 0.0f32..=1.0, seed: u64) {
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        let params = SamplingParams { min_p: p, seed, ..Default::default() };
        for token in draws(params, &logits, 20) {
            prop_assert!((logits[token as usize] - max).exp() >= p * 0.9999);
        }
    }

    #[test]
    fn narrow_filters_are_greedy(logits in prop::collection::vec(-4f32..4.0, 1..300), seed: u64) {
        let best = draws(greedy(), &logits, 1);
        let one = |f: &dyn Fn(&mut SamplingParams)| {
            let mut params = SamplingParams { seed, ..Default::default() };
            f(&mut params);
            draws(params, &logits, 1)
        };
        prop_assert_eq!(&one(&|p| p.top_k = Some(1)), &best);
        prop_assert_eq!(&one(&|p| p.top_p = 1e-6), &best);
    }

    #[test]
    fn banned_rows_are_those_by_hand(
        rows in prop::collection::vec(prop::collection::vec(0u32..3, 1..4), 0..4),
        seed: u64,
    ) {
        let params = SamplingParams { banned: rows.clone().into(), seed, ..Default::default() };
        let mut sampler = Sampler::new(params, 0, &[]);
        let mut answer = Vec::new();
        for _ in 0..30 {
            let free: Vec<u32> = (0..4).filter(|&token| {
                let next = [&answer[..], &[token]].concat();
                !rows.iter().any(|row| next.ends_with(row))
            }).collect();
            // Token 3 is in no row, so that one is always free.
            let token = sampler.sample(&[0.0; 4]).unwrap();
            prop_assert!(free.contains(&token), "{token} after {answer:?}, {rows:?}");
            answer.push(token);
        }
    }

    #[test]
    fn the_same_seed_draws_the_same(logits in prop::collection::vec(-4f32..4.0, 1..300), seed: u64, t in 0.1f32..2.0) {
        let params = SamplingParams { seed, temperature: t, frequency_penalty: 0.3, ..Default::default() };
        prop_assert_eq!(draws(params.clone(), &logits, 10), draws(params, &logits, 10));
    }
}
