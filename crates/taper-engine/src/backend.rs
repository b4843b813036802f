//! The seam between the step loop and what computes logits: the real model, or a stub in tests.

use crate::request::Scored;
use std::sync::Arc;
use taper_attention::{AttentionSpec, AttentionUsage, Beginning};
use taper_kernels::token;

/// How much a backend can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest sequence that the model was made for, prompt and answer together.
    pub context_tokens: usize,
    /// Tokens that the KV cache holds, over all sequences.
    pub cache_tokens: usize,
    /// Those of them that a file holds, or the host beside a device.
    pub offloaded_tokens: usize,
    /// Bytes of all of them.
    pub cache_bytes: u64,
    /// Tokens of the vocabulary.
    pub vocab: usize,
}

/// A failure of one step. It ends the request; the engine only if the backend is [dead](Backend::check_alive).
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BackendError(pub String);

/// Whether what failed did so for want of memory, by the words of CUDA and of allocators.
pub(crate) fn lacks_memory(reason: &str) -> bool {
    ["out of memory", "OUT_OF_MEMORY", "ALLOC_FAILED"].iter().any(|words| reason.contains(words))
}

/// One sequence's share of a step.
#[derive(Debug)]
pub struct Input<'a, S> {
    /// The sequence that grows.
    pub sequence: &'a mut S,
    /// Its next tokens.
    pub tokens: &'a [u32],
    /// How much of a [chunk](Backend::chunk)'s work the step does: as much as so many of its tokens through all layers. With
    /// less than is left of it the chunk is [underway](Backend::underway) afterwards, with none of its tokens cached.
    pub effort: usize,
    /// What is wanted after each of the last so many of them, once they are through.
    pub wants: Vec<Wanted>,
    /// How the token after those is drawn, if the next step will want just that unless what is drawn first ends the answer or
    /// something comes between: a backend may begin it.
    pub next: Option<token::Draw>,
}

/// What is wanted after an input's token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Wanted {
    /// The logits.
    Logits,
    /// What the logits are made of: the last layer's output, normalised as for them.
    Hidden,
    /// The next token, drawn like this; the logits where the backend draws none.
    Token(token::Draw),
    /// The log probability of a token that is known to come next.
    Score {
        /// The token.
        token: u32,
        /// How many of the most probable ones come beside it.
        top: usize,
    },
}

impl Wanted {
    /// How it is drawn, if it is a token.
    pub(crate) fn draw(&self) -> Option<token::Draw> {
        if let Self::Token(draw) = self { Some(*draw) } else { None }
    }
}

/// What came after an input's token.
#[derive(Debug, Clone, PartialEq)]
pub enum Row {
    /// Logits `[vocab]`.
    Logits(Vec<f32>),
    /// The last layer's output `[hidden]`.
    Hidden(Vec<f32>),
    /// The token drawn; none from logits that hold NaN or plus infinity, or nothing but minus infinity.
    Token(Option<u32>),
    /// A known token's log probability.
    Score(Scored),
}

impl Row {
    /// The logits, if it is these.
    pub fn logits(self) -> Option<Vec<f32>> {
        match self {
            Self::Logits(logits) => Some(logits),
            Self::Hidden(_) | Self::Token(_) | Self::Score(_) => None,
        }
    }
}

impl<'a, S> Input<'a, S> {
    /// All of the work at once.
    pub fn whole(sequence: &'a mut S, tokens: &'a [u32], wants: Option<Wanted>) -> Self {
        Self { sequence, tokens, effort: tokens.len(), wants: Vec::from_iter(wants), next: None }
    }
}

/// A chunk of a prompt whose work is not done yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Underway {
    /// Its tokens, which have their room in the cache; 0 without one.
    pub tokens: usize,
    /// The work done, as so many tokens through all layers: fewer than `tokens`.
    pub done: usize,
}

/// What the drafts that one step checked came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckedDrafts {
    /// How many there were.
    pub made: usize,
    /// So many of the first were right.
    pub right: usize,
    /// Whether they were looked up, all of them, or attended for.
    pub looked_up: bool,
}

/// What computes logits. All calls come from the engine's one thread.
pub trait Backend: Send + 'static {
    /// The state of one sequence: its attention and its place in the cache.
    type Sequence;

    /// How much fits.
    fn limits(&self) -> Limits;

    /// Begins a sequence for a prompt, the last `question_tokens` tokens of which are the question.
    ///
    /// # Errors
    /// A spec that does not fit the model.
    fn open(
        &mut self,
        attention: &Arc<AttentionSpec>,
        seed: u64,
        prompt: &[u32],
        question_tokens: usize,
    ) -> Result<Self::Sequence, BackendError>;

    /// Has a new sequence share its prompt's [beginning](Self::beginning) with others: some of its first tokens may be
    /// [cached](Self::cached) at once, since an earlier prompt began with them; never all.
    fn reuse(&mut self, sequence: &mut Self::Sequence, beginning: &Beginning) {
        let _ = (sequence, beginning);
    }

    /// Tokens of the sequence that are in the cache.
    fn cached(&self, sequence: &Self::Sequence) -> usize;

    /// Blocks of the cache that no sequence holds.
    fn free_blocks(&self) -> usize;

    /// Blocks outside its memory that some sequence holds.
    fn offloaded_blocks(&self) -> usize {
        0
    }

    /// What such a sequence may share of its prompt with others of the same salt: nothing.
    fn beginning(
        &self,
        _attention: &Arc<AttentionSpec>,
        _prompt: &[u32],
        _question_tokens: usize,
        _salt: &str,
    ) -> Beginning {
        Beginning::default()
    }

    /// Blocks that a sequence would share with others from the start, so that it takes none of the free ones for them.
    fn shared_blocks(&self, _beginning: &Beginning) -> usize {
        0
    }

    /// Whether it could share more once `other`, of which `cached` tokens are in, is as far as they are the same.
    fn gains(&self, _beginning: &Beginning, _other: &Beginning, _cached: usize) -> bool {
        false
    }

    /// Takes the cache's blocks from a sequence; it keeps what it has reported.
    fn retract(&mut self, sequence: &mut Self::Sequence);

    /// Lets sequences that were retracted go on from a new one of the same prompt: one from as much of it as is in, several
    /// once all is. What they had beyond comes once more, and tokens after the prompt not in one step with new ones.
    ///
    /// # Errors
    /// No room in the cache.
    fn rejoin(&mut self, sequences: Vec<&mut Self::Sequence>, prompt: Self::Sequence) -> Result<(), BackendError>;

    /// A second sequence that continues from the same tokens with its own seed.
    ///
    /// # Errors
    /// No room in the cache.
    fn fork(&mut self, sequence: &Self::Sequence, seed: u64) -> Result<Self::Sequence, BackendError>;

    /// How many prompt tokens the sequence's next chunk has: at most `max`, unless its method cannot cut so short. A chunk
    /// that is [underway](Self::underway) stays as it is.
    fn chunk(&self, sequence: &Self::Sequence, max: usize) -> usize;

    /// The chunk that is underway.
    fn underway(&self, _sequence: &Self::Sequence) -> Underway {
        Underway::default()
    }

    /// One step over all inputs; for each what it wants, or nothing if it is not through. If it fails, panics included, the
    /// sequences are as they were, but for room in the cache and the chunk that it failed in, which has to begin again.
    ///
    /// # Errors
    /// No room in the cache, or a device error.
    fn forward(&mut self, inputs: Vec<Input<'_, Self::Sequence>>) -> Result<Vec<Vec<Row>>, BackendError>;

    /// Says whether the tokens of the sequence's next steps are drafts, which its spec's `speculate` attends for.
    fn draft(&self, _sequence: &mut Self::Sequence, _drafts: bool) {}

    /// Takes what drafts came to into the sequence's report.
    fn drafted(&self, _sequence: &mut Self::Sequence, _drafts: CheckedDrafts) {}

    /// Lets all tokens but the first `tokens` of a sequence go, as if they had never come; those of the prompt stay.
    ///
    /// # Errors
    /// No room in the cache for a copy of a block that it shares.
    fn truncate(&mut self, sequence: &mut Self::Sequence, tokens: usize) -> Result<(), BackendError>;

    /// What the sequence's attention did so far.
    fn usage(&self, sequence: &Self::Sequence) -> AttentionUsage;

    /// Frees what the sequence holds.
    fn close(&mut self, sequence: Self::Sequence);

    /// The same of a sequence that may hold what it should not: no other prompt goes on from it.
    fn discard(&mut self, sequence: Self::Sequence) {
        self.close(sequence);
    }

    /// Called once, before anything else, by the thread that calls everything else: does what would make the first requests
    /// slow. An engine whose backend fails here does not start.
    ///
    /// # Errors
    /// Whatever a step may fail with, and what to change.
    fn warm_up(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// Gives memory back that it can do without, after a step that lacked some; whether there was any.
    fn spare(&mut self) -> bool {
        false
    }

    /// Whether it still computes, asked after a request failed.
    ///
    /// # Errors
    /// What every step will fail with from now on.
    fn check_alive(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// Called now and then while no sequence is open.
    ///
    /// # Panics
    /// If something is held all the same: a bug. The engine logs it and goes on.
    fn check_idle(&self) {}
}
