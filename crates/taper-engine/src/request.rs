//! What goes into the engine and what comes out.

use crate::SamplingParams;
use crate::grammar::{Grammar, GrammarError};
use crate::sampler::Undrawable;
use std::sync::Arc;
use std::time::{Duration, Instant};
use taper_attention::{AttentionSpec, AttentionUsage};
use tokio::sync::mpsc;

/// When a choice ends, besides the length limits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopRules {
    /// Texts that end the answer; what follows is never emitted, and they themselves only if `shown`.
    pub strings: Vec<String>,
    /// Tokens that end the answer, besides the model's own.
    pub tokens: Vec<u32>,
    /// Go on past the model's own end tokens.
    pub ignore_eos: bool,
    /// Tokens that come before anything may end the answer. A stop string that begins in them and ends behind them is found, and
    /// the text ends where it begins.
    pub min_tokens: usize,
    /// Most tokens of a choice; 0: the prompt alone is wanted, and may be as long as the context; `None`: as many as fit.
    pub max_tokens: Option<usize>,
    /// Whether the string or token of these that ended the answer stands at its end.
    pub shown: bool,
}

/// One prompt and what to make of it.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Name for the log.
    pub id: String,
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Whether the answer goes on with the prompt's text, or is a reply of its own.
    pub continues: bool,
    /// Whether marks between texts ([special](crate::Text::special) tokens) are part of the answer's text.
    pub special: bool,
    /// How it is attended to.
    pub attention: Arc<AttentionSpec>,
    /// How many tokens of the prompt's end are the question; of use where the attention treats it in a way of its own.
    pub question_tokens: usize,
    /// Whose prompts it may share keys and values with: those of requests with an equal salt. How fast an answer comes,
    /// and how much of its prompt was cached, tells what others asked before.
    pub salt: Arc<str>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// What each answer must fit.
    pub grammar: Option<Grammar>,
    /// When to end.
    pub stop: StopRules,
    /// Whether no answer is wanted, but what the model makes of the prompt.
    pub embeds: bool,
    /// Answers wanted; 0 is 1.
    pub choices: usize,
    /// Log probabilities wanted: of each token, and of this many alternatives.
    pub logprobs: Option<usize>,
    /// The same of the prompt's tokens. Nothing of such a prompt is taken over from others.
    pub prompt_logprobs: Option<usize>,
    /// Requests with less of it go before those with more.
    pub priority: i64,
    /// When the request ends whether or not it is done.
    pub deadline: Option<Instant>,
}

/// A token and its log probability before any penalty, bias or temperature.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Its natural log probability.
    pub logprob: f32,
}

/// A token and the most probable ones at its place, best first.
pub type Scored = (TokenLogprob, Vec<TokenLogprob>);

/// A generated token as the client sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRecord {
    /// The token and its log probability.
    pub chosen: TokenLogprob,
    /// The most probable tokens at its place, best first.
    pub top: Vec<TokenLogprob>,
    /// Characters of the choice's text before it, as OpenAI's `text_offset` counts.
    pub text_offset: usize,
}

/// Why a choice ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// The model's own end token.
    Eos,
    /// One of the request's stop tokens.
    StopToken(u32),
    /// One of the request's stop strings.
    StopString(String),
    /// The request's grammar: nothing can follow.
    Whole,
    /// `max_tokens`, or no room left.
    Length,
}

/// Text of one choice that is final.
#[derive(Debug, Clone, PartialEq)]
pub struct Delta {
    /// Which choice, from 0.
    pub choice: usize,
    /// The text; may be empty where only `finish` or `tokens` say something.
    pub text: String,
    /// The tokens of the text, if the request wants log probabilities.
    pub tokens: Vec<TokenRecord>,
    /// Set on the choice's last delta.
    pub finish: Option<Finish>,
}

/// What a request cost.
#[derive(Debug, Clone)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens that came from the cache.
    pub cached_tokens: usize,
    /// Tokens generated, over all choices, end tokens included.
    pub completion_tokens: usize,
    /// What attention did, one entry a choice.
    pub attention: Vec<AttentionUsage>,
    /// How long it took.
    pub times: Times,
}

/// A request's time, by what it was spent on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Times {
    /// Until it began.
    pub queued: Duration,
    /// From there until the first token was drawn.
    pub prefill: Duration,
    /// From there until the last one was.
    pub decode: Duration,
}

/// A request's life, in order: `Prefilled`, `Prompt` if wanted, `Delta`s, `Done`; or `Prefilled`, `Embedding`, `Done`; or
/// `Failed` at any time, last.
#[derive(Debug, Clone)]
pub enum Event {
    /// The prompt is in the cache; the first token follows.
    Prefilled,
    /// Log probabilities of the prompt's tokens from the second on, each after those before it.
    Prompt(Vec<Scored>),
    /// More text.
    Delta(Delta),
    /// The last layer's output for the prompt's last token, `[hidden]`.
    Embedding(Vec<f32>),
    /// The end.
    Done(Usage),
    /// The end, without the answer.
    Failed(RequestError),
}

/// The receiving end of a request. Dropping it cancels the request within one step.
pub type Events = mpsc::Receiver<Event>;

/// Why a running request ended without its answer: the server's fault, but where its grammar or its tokens leave none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A step failed.
    #[error("the step failed: {0}")]
    Step(String),
    /// A step panicked.
    #[error("the step panicked: {0}")]
    Panic(String),
    /// A step came back with more or fewer rows than it was asked for, so that nobody knows whose they are.
    #[error("the step gave {got} rows where {wanted} were wanted: a bug of the backend")]
    Rows {
        /// Rows, or inputs with rows, that came.
        got: usize,
        /// Those that were wanted.
        wanted: usize,
    },
    /// Its deadline passed.
    #[error("the request was not done by its deadline")]
    Deadline,
    /// The logits held NaN or infinity.
    #[error("the model produced logits that are not finite")]
    NonFinite,
    /// The grammar became too much to follow.
    #[error("the answer could not be kept to its grammar: {0}")]
    Grammar(#[from] GrammarError),
    /// The engine ended, with nothing that could still answer.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
    /// What the request allows leaves no token.
    #[error("no token may come next: the tokens that are allowed, those that are not, and the grammar leave none")]
    NoToken,
}

impl From<Undrawable> for RequestError {
    fn from(error: Undrawable) -> Self {
        match error {
            Undrawable::NonFinite => Self::NonFinite,
            Undrawable::Grammar(error) => Self::Grammar(error),
            Undrawable::NoToken => Self::NoToken,
        }
    }
}

/// What a message about the cache's tokens says of those that lie elsewhere, if there are any.
pub fn of_them_offloaded(tokens: usize) -> String {
    if tokens == 0 { String::new() } else { format!(", {tokens} of them offloaded") }
}

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// No tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A token that the model lacks.
    #[error("token {token} is not in the vocabulary of {vocab} tokens")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// Prompt and answer are longer than the model's context. Clients' libraries know it by OpenAI's first words.
    #[error("This model's maximum context length is {limit} tokens; the prompt has {prompt}{}", match wanted {
        0 => String::new(),
        wanted => format!(" and the answer asks for {wanted} more"),
    })]
    Context {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens wanted after it.
        wanted: usize,
        /// The context.
        limit: usize,
    },
    /// Prompt and answers do not fit the KV cache even when it is empty.
    #[error(
        "the KV cache holds {limit} tokens{}; the request needs {needed}, in blocks of 64, for a prompt of {prompt} and {} of \
         {wanted}", of_them_offloaded(*.offloaded), match choices {
            1 => "an answer".to_owned(),
            choices => format!("{choices} answers"),
        }
    )]
    Cache {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens wanted after it.
        wanted: usize,
        /// Answers wanted.
        choices: usize,
        /// Tokens needed, in whole blocks; answers share the prompt's.
        needed: usize,
        /// Those that one answer of one token would need.
        least: usize,
        /// Those that as many answers as are wanted would need, of one token each.
        fewest: usize,
        /// Tokens that the cache holds.
        limit: usize,
        /// Those of them that a file holds, or the host beside a device.
        offloaded: usize,
    },
    /// The queue is full.
    #[error("{queued} requests are waiting, which is the limit; try again later")]
    Busy {
        /// Requests waiting.
        queued: usize,
        /// Seconds in which one that runs ends, of late, at least 1: then the next place is free.
        retry_seconds: u64,
    },
    /// The engine takes nothing new.
    #[error("the server is shutting down")]
    Draining,
    /// The engine's thread is gone.
    #[error("the engine has stopped")]
    Dead,
}
