//! Chooses the next token from logits.
//!
//! Order: logit bias, penalties, temperature, min_p, top_k, top_p, as vLLM applies them. Each choice owns its random
//! stream, keyed by seed and choice, and draws once per token: other requests cannot change what it picks.

use crate::request::TokenLogprob;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

/// How a request's tokens are chosen. Ranges are the server's to check.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy; otherwise logits are divided by it.
    pub temperature: f32,
    /// Keep only so many of the most probable tokens.
    pub top_k: Option<usize>,
    /// Keep the fewest most probable tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this times as probable as the most probable one; 0 keeps all.
    pub min_p: f32,
    /// Seed of the random stream.
    pub seed: u64,
    /// Taken off the logit of each token that the answer already has.
    pub presence_penalty: f32,
    /// Taken off the logit of each token, times its count in the answer.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or answer; 1 is none.
    pub repetition_penalty: f32,
    /// Added to single tokens' logits.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
        }
    }
}

/// Logits that hold NaN or plus infinity, or nothing but minus infinity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the logits are not finite")]
pub struct NonFinite;

/// The sampler of one choice: parameters, its random stream and the tokens seen so far.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    rng: ChaCha8Rng,
    prompt: HashSet<u32>,
    counts: HashMap<u32, u32>,
}

impl Sampler {
    /// A sampler for one choice of a request.
    pub fn new(params: SamplingParams, choice: usize, prompt: &[u32]) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(params.seed);
        rng.set_stream(choice as u64);
        // Only the repetition penalty asks what the prompt held.
        let prompt = if params.repetition_penalty == 1.0 { HashSet::new() } else { prompt.iter().copied().collect() };
        Self { params, rng, prompt, counts: HashMap::new() }
    }

    /// Picks the next token and remembers it.
    ///
    /// # Errors
    /// [`NonFinite`].
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, NonFinite> {
        check(logits)?;
        let mut logits = logits.to_vec();
        self.bias(&mut logits);
        let best = argmax(&logits).ok_or(NonFinite)?;
        let token = if self.params.temperature == 0.0 {
            best
        } else {
            let candidates = self.candidates(&logits, logits[best as usize]);
            self.draw(&candidates)
        };
        *self.counts.entry(token).or_default() += 1;
        Ok(token)
    }

    fn bias(&self, logits: &mut [f32]) {
        let p = &self.params;
        for &(token, bias) in &p.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        if p.repetition_penalty != 1.0 {
            let answered = self.counts.keys().filter(|token| !self.prompt.contains(token));
            for &token in self.prompt.iter().chain(answered) {
                let Some(logit) = logits.get_mut(token as usize) else {
                    continue;
                };
                if *logit > 0.0 {
                    *logit /= p.repetition_penalty;
                } else {
                    *logit *= p.repetition_penalty;
                }
            }
        }
        if p.presence_penalty != 0.0 || p.frequency_penalty != 0.0 {
            for (&token, &count) in &self.counts {
                logits[token as usize] -= p.presence_penalty + p.frequency_penalty * count as f32;
            }
        }
    }

    /// The tokens still in the running with their weights; the most probable one weighs 1.
    fn candidates(&self, logits: &[f32], max: f32) -> Vec<(u32, f32)> {
        let p = &self.params;
        let floor = p.min_p.max(f32::MIN_POSITIVE);
        let mut kept: Vec<(u32, f32)> = (0u32..)
            .zip(logits)
            .map(|(token, &logit)| (token, ((logit - max) / p.temperature).exp()))
            .filter(|&(_, weight)| weight >= floor)
            .collect();
        if let Some(k) = p.top_k.filter(|&k| k > 0 && k < kept.len()) {
            kept.select_nth_unstable_by(k - 1, heavier);
            kept.truncate(k);
        }
        if p.top_p < 1.0 {
            keep_mass(&mut kept, p.top_p);
        }
        // One fixed order, so that the same draw gives the same token whichever filters ran.
        kept.sort_unstable_by_key(|&(token, _)| token);
        kept
    }

    fn draw(&mut self, candidates: &[(u32, f32)]) -> u32 {
        let total: f64 = candidates.iter().map(|&(_, w)| f64::from(w)).sum();
        let mut left = self.rng.random::<f64>() * total;
        for &(token, weight) in candidates {
            left -= f64::from(weight);
            if left < 0.0 {
                return token;
            }
        }
        // Rounding may leave a hair; the most probable token is always among the candidates.
        candidates.iter().copied().min_by(heavier).expect("the best token is kept").0
    }
}

/// Heaviest first, then the smallest token.
fn heavier(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Keeps the fewest heaviest candidates that hold the share `p` of the weight.
fn keep_mass(kept: &mut Vec<(u32, f32)>, p: f32) {
    let goal = kept.iter().map(|&(_, w)| f64::from(w)).sum::<f64>() * f64::from(p);
    // Sorting a whole vocabulary costs more than the rest of the sampler: sort its heaviest part first.
    let mut part = 256.min(kept.len());
    loop {
        if part < kept.len() {
            kept.select_nth_unstable_by(part - 1, heavier);
        }
        kept[..part].sort_unstable_by(heavier);
        let mut sum = 0.0;
        for (index, &(_, weight)) in kept[..part].iter().enumerate() {
            sum += f64::from(weight);
            if sum >= goal {
                kept.truncate(index + 1);
                return;
            }
        }
        if part == kept.len() {
            return;
        }
        part = (part * 8).min(kept.len());
    }
}

fn check(logits: &[f32]) -> Result<(), NonFinite> {
    let bad = |l: &f32| l.is_nan() || *l == f32::INFINITY;
    if logits.iter().any(bad) {
        return Err(NonFinite);
    }
    Ok(())
}

fn argmax(logits: &[f32]) -> Option<u32> {
    let best = (0u32..).zip(logits.iter().copied()).min_by(heavier)?;
    best.1.is_finite().then_some(best.0)
}

/// Log probabilities of one token and of the `top` most probable ones, best first, from unchanged logits.
pub(crate) fn logprobs(logits: &[f32], token: u32, top: usize) -> (TokenLogprob, Vec<TokenLogprob>) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    let norm = max + sum.ln() as f32;
    let of = |token: u32, logit: f32| TokenLogprob { token, logprob: logit - norm };
    let mut all: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
    let top = top.min(all.len());
    if top > 0 && top < all.len() {
        all.select_nth_unstable_by(top - 1, heavier);
    }
    all.truncate(top);
    all.sort_unstable_by(heavier);
    let best = all.into_iter().map(|(t, l)| of(t, l)).collect();
    (of(token, logits[token as usize]), best)
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
