//! What the next step does: pure functions of where every request stands, so that they can be read and tested alone.
//!
//! Requests run in order of arrival. Every step takes one token of each answer, and as much of the oldest prompts as the
//! rest of its tokens allows. A request that lacks room in the cache takes it from the youngest one, which is put back
//! to wait and computed again later; the oldest one therefore always goes on, and everyone ends.

use taper_kv_cache::BLOCK_TOKENS;

/// Where a running request stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Standing {
    /// Its sequences: one while the prompt goes in, then one for each choice that goes on.
    pub sequences: Vec<Place>,
    /// Choices that will go on from the prompt's sequence; 0 once they have.
    pub forks: usize,
    /// Blocks that these take for what they have generated already, where the prompt comes again.
    pub again: usize,
}

/// Where a sequence stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// Tokens in the cache.
    pub cached: usize,
    /// Tokens that are known: the prompt, and what was generated.
    pub known: usize,
}

/// How much a step may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    /// Tokens of prompts, and tokens that are computed again, in a step that generates none.
    pub alone: usize,
    /// The same in a step that does.
    pub beside: usize,
    /// Blocks that nobody holds.
    pub blocks: usize,
}

/// A sequence's share of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    /// Place of the request among those that run.
    pub request: usize,
    /// Place of the sequence among its own.
    pub sequence: usize,
    /// Tokens.
    pub tokens: usize,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// One forward pass over these, by request and sequence.
    Step(Vec<Share>),
    /// The youngest request gives its blocks back and waits; then ask again.
    Preempt,
}

fn blocks(tokens: usize) -> usize {
    tokens.div_ceil(BLOCK_TOKENS)
}

impl Place {
    /// Blocks that another `tokens` tokens take.
    fn growth(self, tokens: usize) -> usize {
        blocks(self.cached + tokens) - blocks(self.cached)
    }

    /// Tokens that are known and not cached.
    fn left(self) -> usize {
        self.known - self.cached
    }
}

impl Standing {
    fn in_prompt(&self) -> bool {
        self.forks > 0
    }

    /// Blocks that the choices take when they go on from the prompt: all but one copy a started block.
    fn fork_blocks(&self) -> usize {
        let started = self.sequences.first().is_some_and(|prompt| !prompt.known.is_multiple_of(BLOCK_TOKENS));
        if started { self.forks.saturating_sub(1) } else { 0 }
    }

    /// Blocks that are still to come before the first answer token has its place.
    fn to_come(&self) -> usize {
        let prompt: usize = self.sequences.iter().map(|place| place.growth(place.left())).sum();
        prompt + self.fork_blocks() + self.again
    }
}

/// Blocks of a prompt whose choices have generated so many tokens each: the prompt's whole blocks are shared. Of none,
/// those of the prompt alone.
pub(crate) fn wanted(prompt: usize, choices: impl IntoIterator<Item = usize>) -> usize {
    let shared = prompt / BLOCK_TOKENS;
    let own: Vec<usize> = choices.into_iter().map(|tokens| blocks(prompt + tokens) - shared).collect();
    if own.is_empty() { blocks(prompt) } else { shared + own.iter().sum::<usize>() }
}

/// Whether a waiting request may start beside those that run: `known` [blocks](wanted) for what it knows; of `sequences`
/// sequences beside the running ones' at most `most`.
pub(crate) fn admits(
    running: &[Standing],
    free_blocks: usize,
    most: usize,
    (known, sequences): (usize, usize),
) -> bool {
    if running.is_empty() {
        return true;
    }
    let live = |standing: &Standing| standing.sequences.len().max(standing.forks);
    if running.iter().map(live).sum::<usize>() + sequences > most {
        return false;
    }
    // Every sequence may want its next block soon.
    let reserved: usize = running.iter().map(|standing| standing.to_come() + live(standing)).sum();
    known + 2 * sequences + reserved <= free_blocks
}

/// What the running requests, oldest first, do next. `cut(request, max)` says how many tokens of its prompt a request
/// takes if it should take at most `max`; its method may want more.
pub(crate) fn plan(running: &[Standing], budget: Budget, cut: impl Fn(usize, usize) -> usize) -> Decision {
    let mut free = budget.blocks;
    let youngest = running.len().saturating_sub(1);
    let mut shares = Vec::new();
    // Answers: one token each.
    for (request, standing) in running.iter().enumerate().filter(|(_, standing)| !standing.in_prompt()) {
        for (sequence, place) in standing.sequences.iter().enumerate().filter(|(_, place)| place.left() == 1) {
            let growth = place.growth(1);
            if growth > free {
                return Decision::Preempt;
            }
            free -= growth;
            shares.push(Share { request, sequence, tokens: 1 });
        }
    }
    // Prompts, and answers that are computed again but for their last token.
    let mut most = if shares.is_empty() { budget.alone } else { budget.beside };
    let mut first = true;
    for (request, standing) in running.iter().enumerate() {
        for (sequence, place) in standing.sequences.iter().enumerate() {
            let again = if standing.in_prompt() { place.left() } else { place.left() - 1 };
            if again == 0 || most == 0 {
                continue;
            }
            let take = if standing.in_prompt() { cut(request, most).clamp(1, again) } else { most.min(again) };
            // What cannot be cut short goes alone.
            if take > most && !first {
                continue;
            }
            let ends = standing.in_prompt() && take == again;
            let growth = place.growth(take) + if ends { standing.fork_blocks() } else { 0 };
            if growth > free {
                if request < youngest || shares.is_empty() {
                    return Decision::Preempt;
                }
                continue;
            }
            free -= growth;
            most = most.saturating_sub(take);
            first = false;
            shares.push(Share { request, sequence, tokens: take });
        }
    }
    shares.sort_by_key(|share| (share.request, share.sequence));
    Decision::Step(shares)
}

#[cfg(test)]
mod tests;
