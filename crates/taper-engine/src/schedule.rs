//! What the next step does: pure functions of where every request stands, so that they can be read and tested alone.
//!
//! Requests start in order of priority, then of arrival; what is said of the oldest and the youngest is said of the first and
//! the last in that order. Every step takes one token of each answer, and prompts with the rest of its work:
//! half of it goes to the oldest prompt, the other half to those that have the least left. Work is counted in tokens through
//! all layers. What a prefill method wants at once, a chunk, may take the work of many steps. A request that lacks room in
//! the cache takes it from the youngest one, which is put back to wait and computed again later. The oldest one therefore
//! always goes on, and everyone ends, unless more urgent ones never stop coming.

use crate::backend::Underway;
use taper_attention::decode_rows;
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
    /// Those after them that are on their way.
    pub underway: Underway,
    /// Tokens that are known: the prompt, and what was generated or drafted.
    pub known: usize,
    /// Known tokens that are left when the next ones are drawn, which go into that step together: 1, or drafts and the token
    /// before them.
    pub takes: usize,
}

/// How much a step may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    /// Work on prompts, and on tokens that are computed again, in a step that generates none: tokens through all layers.
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
    /// Its next tokens.
    pub tokens: usize,
    /// How much of the work on them the step does.
    pub effort: usize,
    /// Whether these are an answer's last tokens, after which the next one is drawn.
    pub generates: bool,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// One step over these, by request and sequence.
    Step(Vec<Share>),
    /// The youngest request gives its blocks back and waits; then ask again.
    Preempt,
}

fn blocks(tokens: usize) -> usize {
    tokens.div_ceil(BLOCK_TOKENS)
}

impl Place {
    /// Blocks that another `tokens` tokens take; those underway have theirs.
    fn growth(self, tokens: usize) -> usize {
        blocks(self.cached + tokens).saturating_sub(blocks(self.cached + self.underway.tokens))
    }

    /// Tokens that are known and not cached.
    fn left(self) -> usize {
        self.known - self.cached
    }

    /// The work done.
    pub(crate) fn done(self) -> usize {
        self.cached + self.underway.done
    }
}

impl Standing {
    fn in_prompt(&self) -> bool {
        self.forks > 0
    }

    /// Tokens of the next step after which the next one is drawn.
    pub(crate) fn rows(&self) -> usize {
        let generates = |place: &&Place| !self.in_prompt() && place.left() == place.takes;
        self.sequences.iter().filter(generates).map(|place| place.takes).sum()
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

/// Tokens of a sequence that come before it generates: those of a prompt, or of an answer that is computed again.
#[derive(Debug, Clone, Copy)]
struct Rest {
    request: usize,
    sequence: usize,
    tokens: usize,
    /// Whether a chunk of the first of them is underway, and its work so far.
    begun: bool,
    done: usize,
}

/// What the running requests, oldest first, do next. `cut(request, max)` says how many tokens the next chunk of a request's
/// prompt has if it should have at most `max`; its method may want more, and a chunk that is underway has what it has.
///
/// Let a step do work for `b` prompt tokens, and prompts be of one chunk, or of chunks that can be cut anywhere. The
/// oldest prompt has at least `b / 2` of it, rounded up, so a prompt is in after at most the sum of `n / (b / 2)` steps
/// over it and the prompts before it, whatever comes later that is no more urgent. The others share at least `b / 2`,
/// rounded down, those first that have the least left: a prompt of `n` tokens is in after `m / (b / 2)` steps, where
/// `m` is `n` and what is left of prompts that have less left than it. A chunk that cannot be cut elsewhere adds a
/// step, since the next one does not begin in its last; beside the oldest prompt's one such chunk is underway at a
/// time, and one that has begun ends before another begins.
pub(crate) fn plan(running: &[Standing], budget: Budget, cut: impl Fn(usize, usize) -> usize) -> Decision {
    let mut free = budget.blocks;
    let youngest = running.len().saturating_sub(1);
    let mut shares = Vec::new();
    let mut rests = Vec::new();
    for (request, standing) in running.iter().enumerate() {
        for (sequence, place) in standing.sequences.iter().enumerate() {
            if standing.in_prompt() || place.left() > place.takes {
                let tokens = if standing.in_prompt() { place.left() } else { place.left() - place.takes };
                let Underway { tokens: chunk, done } = place.underway;
                rests.push(Rest { request, sequence, tokens, begun: chunk > 0, done });
                continue;
            }
            let tokens = place.takes;
            let growth = place.growth(tokens);
            if growth > free {
                return Decision::Preempt;
            }
            free -= growth;
            shares.push(Share { request, sequence, tokens, effort: tokens, generates: true });
        }
    }
    let most = if shares.is_empty() { budget.alone } else { budget.beside };
    let Some((&mut oldest, others)) = rests.split_first_mut().filter(|_| most > 0) else {
        return Decision::Step(shares);
    };
    let share = |rest: Rest, max: usize| {
        let tokens = match running[rest.request].in_prompt() {
            true => cut(rest.request, max).clamp(1, rest.tokens),
            false => decode_rows(max).min(rest.tokens),
        };
        let effort = tokens.saturating_sub(rest.done).clamp(1, max);
        Share { request: rest.request, sequence: rest.sequence, tokens, effort, generates: false }
    };
    // A chunk takes the blocks of all its tokens, and those of forks before its last work, which may end early.
    let growth = |rest: Rest, share: Share| {
        let standing = &running[rest.request];
        let last = standing.in_prompt() && share.tokens == rest.tokens;
        standing.sequences[rest.sequence].growth(share.tokens) + if last { standing.fork_blocks() } else { 0 }
    };
    // A chunk underway takes memory for all its rows: beside the oldest prompt's there is one at a time. A prompt that is more
    // urgent than two that have begun theirs, and would begin one, waits until one is through.
    let mut underway = others.iter().filter(|rest| rest.begun).count();
    let half = most.div_ceil(2);
    // The others may leave it no more than half of the step.
    let least = share(oldest, half);
    let waits = underway > 1 && !oldest.begun && least.effort < least.tokens;
    // Room for all that the oldest may take is set aside before the others take theirs.
    let whole = Some(share(oldest, most)).filter(|_| !waits);
    let Some(mut free) = free.checked_sub(whole.map_or(0, |whole| growth(oldest, whole))) else {
        return if oldest.request < youngest || shares.is_empty() { Decision::Preempt } else { Decision::Step(shares) };
    };
    let (mut left, mut taken) = (most - whole.map_or(0, |whole| whole.effort.min(half)), 0);
    others.sort_by_key(|rest| (waits && !rest.begun, rest.tokens - rest.done));
    for &rest in &*others {
        if left == 0 {
            break;
        }
        let share = share(rest, left);
        let stays = rest.done + share.effort < share.tokens;
        if underway > 0 && stays && !rest.begun {
            continue;
        }
        let Some(after) = free.checked_sub(growth(rest, share)) else {
            if rest.request < youngest {
                return Decision::Preempt;
            }
            continue;
        };
        (free, left, taken) = (after, left - share.effort, taken + share.effort);
        underway = underway + usize::from(stays) - usize::from(rest.begun);
        shares.push(share);
    }
    if !waits {
        shares.push(share(oldest, (most - taken).max(half)));
    }
    shares.sort_by_key(|share| (share.request, share.sequence));
    Decision::Step(shares)
}

#[cfg(test)]
mod tests;
