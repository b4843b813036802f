//! Chooses the next token from logits.
//!
//! Order: logit bias, penalties, what must not come, temperature, min_p, top_k, top_p, as vLLM applies them. Each choice owns
//! its random stream, keyed by seed and choice, with one number for each token: other requests cannot change what it picks.

use crate::grammar::{Grammar, GrammarError};
use crate::request::{Scored, TokenLogprob};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use taper_kernels::logits;
use taper_kernels::token::{self, Draw};

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
    /// The only tokens that may come; `None`: all.
    pub allowed: Option<Arc<[u32]>>,
    /// Rows of tokens that an answer does not have: the last of one does not come after the others.
    pub banned: Arc<[Vec<u32>]>,
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
            allowed: None,
            banned: Arc::default(),
        }
    }
}

/// Why there is no next token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Undrawable {
    /// Logits that hold NaN or plus infinity, or nothing but minus infinity.
    #[error("the logits are not finite")]
    NonFinite,
    /// The grammar became too much to follow.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// All of them are excluded.
    #[error("no token may come")]
    NoToken,
}

/// The sampler of one choice: parameters, its random stream and the tokens seen so far.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    rng: ChaCha8Rng,
    /// The stream's number for the next token, in [0, 1).
    uniform: f64,
    prompt: Arc<HashSet<u32>>,
    /// How often the answer has each token, where a penalty asks.
    counts: HashMap<u32, u32>,
    /// The answer's last tokens, as many as a banned row may look back.
    latest: VecDeque<u32>,
    looks_back: usize,
    /// How many more tokens come before one of these, which end the answer.
    early: usize,
    ends: Vec<u32>,
    grammar: Option<Grammar>,
}

impl Sampler {
    /// A sampler for one choice of a request.
    pub fn new(params: SamplingParams, choice: usize, prompt: &[u32]) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(params.seed);
        rng.set_stream(choice as u64);
        let uniform = rng.random();
        // Only the repetition penalty asks what the prompt held.
        let prompt = match params.repetition_penalty == 1.0 {
            true => Arc::default(),
            false => Arc::new(prompt.iter().copied().collect()),
        };
        let looks_back = params.banned.iter().map(|row| row.len().saturating_sub(1)).max().unwrap_or(0);
        let (counts, latest, early, ends, grammar) = Default::default();
        Self { params, rng, uniform, prompt, counts, latest, looks_back, early, ends, grammar }
    }

    /// The same for drafts of the next tokens, which leave nothing behind here.
    pub(crate) fn for_drafts(&mut self) -> Self {
        // What is cloned is the rest.
        let mut own = self.grammar.take();
        let drafts = Self { grammar: own.as_mut().map(Grammar::for_drafts), ..self.clone() };
        self.grammar = own;
        drafts
    }

    /// The same, but none of the first `tokens` is one of `ends`.
    pub fn at_least(self, tokens: usize, ends: Vec<u32>) -> Self {
        Self { early: tokens, ends, ..self }
    }

    /// The same, but what it draws fits a grammar.
    pub fn within(self, grammar: Grammar) -> Self {
        Self { grammar: Some(grammar), ..self }
    }

    /// Whether the grammar has nothing more.
    pub(crate) fn done(&self) -> bool {
        self.grammar.as_ref().is_some_and(Grammar::done)
    }

    /// Picks the next token and remembers it.
    ///
    /// # Errors
    /// [`Undrawable`].
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, Undrawable> {
        let mut logits = Cow::from(logits);
        if self.biases() {
            self.bias(logits.to_mut());
        }
        if self.forbids() {
            // Whatever was wrong with the logits would be gone with the tokens that may not come.
            logits::peak(&logits).ok_or(Undrawable::NonFinite)?;
            self.forbid(logits.to_mut())?;
        }
        let token = token::pick(&logits, &self.next()).ok_or(Undrawable::NonFinite)?;
        if let Some(grammar) = &mut self.grammar {
            grammar.take(token)?;
        }
        self.take(token);
        Ok(token)
    }

    /// How the next tokens are drawn, where nothing but the logits decides: who has drawn one so says [`take`](Self::take).
    pub fn draws(&self, count: usize) -> Option<Vec<Draw>> {
        if self.biases() || self.forbids() {
            return None;
        }
        let mut ahead = self.rng.clone();
        let uniforms = std::iter::once(self.uniform).chain(std::iter::from_fn(|| Some(ahead.random())));
        Some(uniforms.take(count).map(|uniform| Draw { uniform, ..self.next() }).collect())
    }

    fn next(&self) -> Draw {
        let &SamplingParams { temperature, top_k, top_p, min_p, .. } = &self.params;
        Draw { temperature, top_k: top_k.unwrap_or(0), top_p, min_p, uniform: self.uniform }
    }

    /// Remembers the next token.
    pub fn take(&mut self, token: u32) {
        if self.penalizes() {
            *self.counts.entry(token).or_default() += 1;
        }
        if self.looks_back > 0 {
            self.latest.push_back(token);
            self.latest.drain(..self.latest.len().saturating_sub(self.looks_back));
        }
        self.early = self.early.saturating_sub(1);
        self.uniform = self.rng.random();
    }

    /// Whether [`bias`](Self::bias) may change anything.
    fn biases(&self) -> bool {
        !self.params.logit_bias.is_empty() || self.penalizes()
    }

    fn penalizes(&self) -> bool {
        let p = &self.params;
        (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0)
    }

    /// Whether the request names tokens that may come or may not.
    fn excludes(&self) -> bool {
        self.params.allowed.is_some() || !self.params.banned.is_empty()
    }

    /// Whether [`forbid`](Self::forbid) may change anything.
    fn forbids(&self) -> bool {
        self.early > 0 || self.grammar.is_some() || self.excludes()
    }

    fn forbid(&mut self, logits: &mut [f32]) -> Result<(), Undrawable> {
        if let Some(grammar) = &mut self.grammar {
            grammar.mask(logits)?;
        }
        if let Some(allowed) = &self.params.allowed {
            let kept = |&token: &u32| Some((token as usize, *logits.get(token as usize)?));
            let kept: Vec<(usize, f32)> = allowed.iter().filter_map(kept).collect();
            logits.fill(f32::NEG_INFINITY);
            kept.into_iter().for_each(|(token, logit)| logits[token] = logit);
        }
        for row in &*self.params.banned {
            let Some((&last, before)) = row.split_last() else { continue };
            let comes = || self.latest.iter().rev().zip(before.iter().rev()).all(|(a, b)| a == b);
            if before.len() <= self.latest.len()
                && comes()
                && let Some(logit) = logits.get_mut(last as usize)
            {
                *logit = f32::NEG_INFINITY;
            }
        }
        if self.excludes() {
            logits::peak(logits).ok_or(Undrawable::NoToken)?;
        }
        if self.early > 0 {
            let before: Vec<Option<f32>> = self.ends.iter().map(|end| logits.get(*end as usize).copied()).collect();
            let set = |logits: &mut [f32], values: &mut dyn Iterator<Item = Option<f32>>| {
                for (end, value) in self.ends.iter().zip(values) {
                    if let (Some(logit), Some(value)) = (logits.get_mut(*end as usize), value) {
                        *logit = value;
                    }
                }
            };
            set(logits, &mut std::iter::repeat(Some(f32::NEG_INFINITY)));
            if logits::peak(logits).is_none() {
                // Nothing else may come: that goes before the least number of tokens.
                set(logits, &mut before.into_iter());
            }
        }
        Ok(())
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
}

/// Log probabilities of one token and of the `top` most probable ones, best first, from unchanged logits.
pub(crate) fn logprobs(row: &[f32], token: u32, top: usize) -> Scored {
    let max = logits::peak(row).map_or(f32::NEG_INFINITY, |(_, max)| max);
    let mass = logits::total(&logits::mass(row, max, 1.0));
    let norm = max + mass.ln() as f32;
    let of = |(token, logit): (u32, f32)| TokenLogprob { token, logprob: logit - norm };
    (of((token, row[token as usize])), logits::largest(row, top).into_iter().map(of).collect())
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
