//! MInference: for each query head the pattern that keeps most of its attention, for as many keys as any other.
//!
//! Source: Jiang et al. 2024, arXiv:2407.02490, Algorithm 1: of settings of the three patterns with equal cost the one
//! with the best recall. Ours: the cost is the keys that rows read on average, as measured, at most those of an a_shape;
//! and recall is that of query blocks all over long texts, while the last rows alone choose keys and diagonals.

use super::kept::{Kept, Tally};
use super::prompt::Prompt;
use candle_core::Result;
use std::ops::Range;
use taper_attention::minference::{Pattern, reads};
use taper_kernels::kv::BLOCK_TOKENS;
use taper_kernels::prefill::{Mask, Selection, Sums, sums};

/// Rows at a prompt's end that keys and diagonals are chosen by: the method's default.
const CHOOSERS: usize = 64;

/// Diagonals that are always read.
const LEAST_SLASHES: usize = 100;

/// The rows that choose.
pub(super) fn choosers(tokens: usize) -> Range<usize> {
    tokens.saturating_sub(CHOOSERS)..tokens
}

/// One layer of some sequences, and what their last rows look at.
pub(super) struct Search<'a> {
    prompts: Vec<(Prompt<'a>, Sums)>,
    /// Keys that a row may read.
    keys: usize,
}

/// Stands where a head has no pattern of a kind.
const NOBODYS: Pattern = Pattern::AShape { init: 0, local: 1 };

/// The kinds of patterns.
const KINDS: [&str; 3] = ["a_shape", "vertical_slash", "block_sparse"];

fn kind(pattern: &Pattern) -> usize {
    match pattern {
        Pattern::AShape { .. } => 0,
        Pattern::VerticalSlash { .. } => 1,
        Pattern::BlockSparse { .. } => 2,
    }
}

/// What was found of each head.
pub(super) struct Assigned {
    /// The best pattern `[q_heads]`.
    pub best: Vec<Pattern>,
    /// The best of each kind that the number of keys allows `[q_heads][kinds]`.
    of_kind: Vec<[Option<Pattern>; 3]>,
}

impl<'a> Search<'a> {
    /// # Errors
    /// candle's.
    pub fn new(prompts: Vec<Prompt<'a>>, keys: usize) -> Result<Self> {
        let with_sums = |prompt: Prompt<'a>| {
            let last = prompt.queries(&[choosers(prompt.tokens())])?;
            let sums = sums(&prompt.rows(&last))?;
            Ok((prompt, sums))
        };
        Ok(Self { prompts: prompts.into_iter().map(with_sums).collect::<Result<_>>()?, keys })
    }

    /// Looks for each head's patterns.
    ///
    /// # Errors
    /// candle's.
    pub fn run(&self) -> Result<Assigned> {
        let q_heads = self.prompts.first().map_or(0, |(prompt, _)| prompt.heads().0);
        let mut best = vec![[None::<(f64, Pattern)>; 3]; q_heads];
        let candidates = self.candidates(q_heads)?;
        // A head without a candidate is measured by an a_shape that nobody looks at.
        let ways: Vec<Vec<Pattern>> =
            candidates.iter().map(|heads| heads.iter().map(|p| p.unwrap_or(NOBODYS)).collect()).collect();
        for (candidates, tallies) in candidates.into_iter().zip(self.measure(&ways)?) {
            for (head, (pattern, tally)) in candidates.into_iter().zip(tallies).enumerate() {
                let Some(pattern) = pattern else { continue };
                let place = &mut best[head][kind(&pattern)];
                if place.is_none_or(|(share, _)| tally.mean() > share) {
                    *place = Some((tally.mean(), pattern));
                }
            }
        }
        // An a_shape is always there. Of equals the first.
        let first = |found: &[Option<(f64, Pattern)>; 3]| {
            let all = found.iter().flatten();
            all.copied().reduce(|a, b| if b.0 > a.0 { b } else { a }).map(|(_, pattern)| pattern)
        };
        let best_of_all =
            best.iter().map(|found| first(found).unwrap_or(Pattern::AShape { init: 0, local: self.keys }));
        Ok(Assigned {
            best: best_of_all.collect(),
            of_kind: best.iter().map(|found| found.map(|found| found.map(|(_, pattern)| pattern))).collect(),
        })
    }

    /// Settings of equal cost `[candidates][q_heads]`; none where the least that a pattern reads is more.
    fn candidates(&self, q_heads: usize) -> Result<Vec<Vec<Option<Pattern>>>> {
        let keys = self.keys;
        let a_shape = |init: usize| vec![Some(Pattern::AShape { init, local: keys - init }); q_heads];
        let mut all: Vec<Vec<Option<Pattern>>> = [keys / 32, keys / 4].map(a_shape).into();
        for vertical in [keys / 8, keys / 4, keys / 2] {
            let fitted = (0..q_heads).map(|head| self.fitted(head, vertical)).collect::<Result<_>>()?;
            all.push(fitted);
        }
        let blocks = keys / BLOCK_TOKENS;
        all.push(vec![(blocks > 0).then_some(Pattern::BlockSparse { blocks }); q_heads]);
        Ok(all)
    }

    /// As many diagonals beside `vertical` keys as the number of keys allows.
    fn fitted(&self, head: usize, vertical: usize) -> Result<Option<Pattern>> {
        let affordable: usize = self
            .prompts
            .iter()
            .flat_map(|(prompt, _)| {
                let seen = |p: u32| Mask::Causal.count(p as usize, prompt.window());
                prompt.positions().into_iter().map(move |p| seen(p).min(self.keys))
            })
            .sum();
        let fits = |slash: usize| -> Result<bool> {
            let pattern = Pattern::VerticalSlash { vertical, slash };
            let mut read = 0;
            for (prompt, sums) in &self.prompts {
                let own = Sums {
                    columns: sums.columns.narrow(0, head, 1)?,
                    diagonals: sums.diagonals.narrow(0, head, 1)?,
                    lse: sums.lse.clone(),
                };
                let none = prompt.queries(&[])?;
                let (heads, _) = reads(&prompt.rows(&none), &[pattern], &prompt.measured, Some(&own))?;
                let selection = Selection::new(prompt.measured.clone(), heads)?;
                read += selection.counts(&prompt.positions(), prompt.window()).iter().sum::<usize>();
            }
            Ok(read <= affordable)
        };
        if !fits(LEAST_SLASHES)? {
            return Ok(None);
        }
        let longest = self.prompts.iter().map(|(prompt, _)| prompt.tokens()).max().unwrap_or(0);
        let (mut least, mut most) = (LEAST_SLASHES, longest.max(LEAST_SLASHES));
        while least < most {
            let middle = (least + most).div_ceil(2);
            if fits(middle)? {
                least = middle;
            } else {
                most = middle - 1;
            }
        }
        Ok(Some(Pattern::VerticalSlash { vertical, slash: least }))
    }

    /// What the heads' patterns keep of all sequences, for each way of assigning them `[ways][q_heads]`.
    ///
    /// # Errors
    /// candle's.
    pub fn measure(&self, ways: &[Vec<Pattern>]) -> Result<Vec<Vec<Tally>>> {
        let mut all: Vec<Vec<Tally>> = ways.iter().map(|patterns| vec![Tally::default(); patterns.len()]).collect();
        for (prompt, sums) in &self.prompts {
            let queries = prompt.queries(&prompt.measured)?;
            let selection = |patterns: &Vec<Pattern>| {
                let (heads, _) = reads(&prompt.rows(&queries), patterns, &prompt.measured, Some(sums))?;
                Selection::new(prompt.measured.clone(), heads)
            };
            let kept = prompt.kept(&ways.iter().map(selection).collect::<Result<Vec<_>>>()?)?;
            let pairs = all.iter_mut().flatten().zip(kept.iter().flatten());
            pairs.for_each(|(all, kept)| all.add(kept));
        }
        Ok(all)
    }

    /// What the assignment keeps, and what one kind for every head that can have it would.
    ///
    /// # Errors
    /// candle's.
    pub fn report(&self, assigned: &Assigned) -> Result<Vec<Kept>> {
        let own: Vec<_> = assigned.best.iter().copied().map(Some).collect();
        let of_kind = |kind: usize| assigned.of_kind.iter().map(|found| found[kind]).collect::<Vec<_>>();
        let named = KINDS.iter().enumerate().map(|(kind, name)| (*name, of_kind(kind)));
        let ways = std::iter::once(("as assigned", own)).chain(named);
        let ways: Vec<_> = ways.filter(|(_, patterns)| patterns.iter().any(Option::is_some)).collect();
        let patterns: Vec<Vec<Pattern>> =
            ways.iter().map(|(_, heads)| heads.iter().map(|p| p.unwrap_or(NOBODYS)).collect()).collect();
        let of = |((name, patterns), tallies): (&(&str, Vec<Option<Pattern>>), Vec<Tally>)| {
            let there = tallies.iter().zip(patterns).filter(|(_, pattern)| pattern.is_some());
            let sum = there.fold(Tally::default(), |mut sum, (tally, _)| {
                sum.add(tally);
                sum
            });
            sum.named(name)
        };
        Ok(ways.iter().zip(self.measure(&patterns)?).map(of).collect())
    }
}
