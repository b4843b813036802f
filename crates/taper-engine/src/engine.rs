//! The engine's handle and its thread.

use crate::backend::{Backend, Limits};
use crate::grammar::{Grammar, GrammarError, Grammars, Shape};
use crate::job::Job;
use crate::queue::Queue;
use crate::request::{Events, Request, RequestError, SubmitError};
use crate::text::Text;
use crate::worker::Worker;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use taper_kv_cache::BLOCK_TOKENS;
use tokio::sync::mpsc;

/// Limits of the engine itself.
#[derive(Debug, Clone, Copy)]
pub struct EngineConfig {
    /// Requests that may wait; more are refused.
    pub queue: usize,
    /// Most work on prompts in one step, in tokens through all layers, give or take a block and what a prefill method takes to
    /// choose in a layer: a cancelled request ends after at most so much. Where more than 512 would take longer than 0.3 of a
    /// second, a step takes fewer.
    pub chunk_tokens: usize,
    /// Most answers that are generated together.
    pub sequences: usize,
    /// How many times as long as without prompts a step may take that takes some of one beside generated tokens.
    pub stretch: f64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self { queue: 256, chunk_tokens: 8192, sequences: 64, stretch: 2.0 }
    }
}

/// The model as clients see it.
#[derive(Debug, Clone)]
pub struct ModelInfo {
    /// Its name in requests and answers.
    pub id: String,
    /// Unix time at which it was loaded.
    pub created: u64,
}

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The system starts no thread.
    #[error("no thread for the engine: {0}")]
    Thread(#[from] std::io::Error),
    /// The backend failed at what it does before the first request.
    #[error("{0}")]
    WarmUp(String),
}

/// How busy the engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Requests waiting, preempted ones among them.
    pub waiting: usize,
    /// Requests running.
    pub running: usize,
    /// What was done so far.
    pub counts: Counts,
    /// In which steps.
    pub steps: Steps,
    /// Blocks of the KV cache that no request holds.
    pub free_blocks: usize,
    /// Blocks outside its memory, in a file or beside a device, that requests hold.
    pub offloaded_blocks: usize,
    /// For how long it has been at its present turn, a step and what stands around it.
    pub turn: Option<Duration>,
    /// Whether new requests are refused because the engine shuts down.
    pub draining: bool,
    /// Whether the engine's thread has ended.
    pub dead: bool,
}

/// What the engine has done since it started, step by step and whatever became of the requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// How often a request gave its place in the KV cache up, to be computed again later.
    pub preemptions: u64,
    /// Tokens of prompts that are in, each once.
    pub prompt_tokens: u64,
    /// Those of them that came from the cache.
    pub cached_tokens: u64,
    /// Tokens drawn.
    pub generated_tokens: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, more: Self) {
        self.preemptions += more.preemptions;
        self.prompt_tokens += more.prompt_tokens;
        self.cached_tokens += more.cached_tokens;
        self.generated_tokens += more.generated_tokens;
    }

    /// What came on top of an earlier state.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            preemptions: self.preemptions - before.preemptions,
            prompt_tokens: self.prompt_tokens - before.prompt_tokens,
            cached_tokens: self.cached_tokens - before.cached_tokens,
            generated_tokens: self.generated_tokens - before.generated_tokens,
        }
    }
}

/// Steps by how many tokens went through each, those of bin `i` up to 2^i, and so many more of the last: how many steps, and the
/// tokens of all of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Steps {
    /// Steps of each bin.
    pub counts: [u64; Self::BINS],
    /// Their tokens.
    pub tokens: [u64; Self::BINS],
}

impl Steps {
    /// How many bins there are.
    pub const BINS: usize = 21;

    pub(crate) fn add(&mut self, tokens: usize) {
        let bin = (tokens.next_power_of_two().trailing_zeros() as usize).min(Self::BINS - 1);
        self.counts[bin] += 1;
        self.tokens[bin] += tokens as u64;
    }
}

/// The handle to the engine's thread. Dropping it lets what was taken finish, then ends the thread.
pub struct Engine {
    queue: Arc<Queue<Arc<Job>>>,
    text: Arc<dyn Text>,
    /// Made when the first grammar comes: a look at every token.
    grammars: OnceLock<Result<Grammars, GrammarError>>,
    model: ModelInfo,
    limits: Limits,
}

impl Engine {
    /// Starts the thread that owns the backend.
    ///
    /// # Errors
    /// No thread, or a backend that fails when it is warmed up.
    pub fn start<B: Backend>(
        backend: B,
        text: Arc<dyn Text>,
        model: ModelInfo,
        config: EngineConfig,
    ) -> Result<Self, StartError> {
        let queue = Arc::new(Queue::new(config.queue.max(1)).by(|job: &Arc<Job>| job.request.priority));
        let limits = backend.limits();
        let (own_queue, own_text) = (Arc::clone(&queue), Arc::clone(&text));
        // Running requests never leave the thread, so their state need not be able to.
        let (ready, is_ready) = std::sync::mpsc::channel();
        let work = move || Worker::new(backend, own_queue, own_text, config).work(ready);
        std::thread::Builder::new().name("taper-engine".into()).spawn(work)?;
        match is_ready.recv() {
            Ok(Ok(())) => {}
            Ok(Err(RequestError::Step(reason))) => return Err(StartError::WarmUp(reason)),
            Ok(Err(error)) => return Err(StartError::WarmUp(error.to_string())),
            Err(_) => return Err(StartError::WarmUp("the engine's thread ended".into())),
        }
        Ok(Self { queue, text, grammars: OnceLock::new(), model, limits })
    }

    /// The model as clients see it.
    pub fn model(&self) -> &ModelInfo {
        &self.model
    }

    /// How much fits.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Tokenizer and chat template.
    pub fn text(&self) -> &dyn Text {
        &*self.text
    }

    /// Compiles what answers must be; takes a while, the first time most of a second.
    ///
    /// # Errors
    /// What is wrong with it, or too much.
    pub fn grammar(&self, shape: &Shape) -> Result<Grammar, GrammarError> {
        let grammars = self.grammars.get_or_init(|| Grammars::new(&*self.text, self.limits.vocab));
        grammars.as_ref().map_err(Clone::clone)?.compile(shape)
    }

    /// How busy the engine is.
    pub fn load(&self) -> Load {
        self.queue.load()
    }

    /// Checks that a request can fit and queues it.
    ///
    /// # Errors
    /// A request that can never run, or a queue that takes no more.
    pub fn submit(&self, request: Request) -> Result<Events, SubmitError> {
        Ok(self.submit_all(vec![request])?.remove(0))
    }

    /// The same for several, all of them or none.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn submit_all(&self, requests: Vec<Request>) -> Result<Vec<Events>, SubmitError> {
        let (jobs, events) = self.jobs(requests)?;
        self.queue.push(jobs, |job| job.abandoned())?;
        Ok(events)
    }

    /// For a request whose parts come one after the other: once it is taken, all of it is.
    ///
    /// # Errors
    /// An engine that takes nothing more.
    pub fn parts(&self) -> Result<Parts, SubmitError> {
        self.queue.begin()?;
        Ok(Parts { queue: Arc::clone(&self.queue) })
    }

    /// A later part of a request, for which there is always room: who sends them sends the next when one is done.
    ///
    /// # Errors
    /// A part that can never run, or an engine that died.
    pub fn submit_more(&self, _of: &Parts, requests: Vec<Request>) -> Result<Vec<Events>, SubmitError> {
        let (jobs, events) = self.jobs(requests)?;
        self.queue.push_more(jobs)?;
        Ok(events)
    }

    /// Requests that may wait.
    pub fn queue_limit(&self) -> usize {
        self.queue.limit()
    }

    fn jobs(&self, requests: Vec<Request>) -> Result<(Vec<Arc<Job>>, Vec<Events>), SubmitError> {
        let jobs = requests.into_iter().map(|request| self.job(request)).collect::<Result<Vec<_>, _>>()?;
        Ok(jobs.into_iter().unzip())
    }

    /// A request with both ends of its way back.
    fn job(&self, mut request: Request) -> Result<(Arc<Job>, Events), SubmitError> {
        request.choices = request.choices.max(1);
        let max_tokens = self.admit(&request)?;
        // Each choice sends at most one delta a token; `Prefilled`, `Prompt` and the last event come on top.
        let room = request.choices * max_tokens.max(1) + 5;
        let (events, receiver) = mpsc::channel(room);
        let (beginning, ended) = Default::default();
        let job = Job { request, max_tokens, events, beginning, submitted: Instant::now(), ended };
        Ok((job.into(), receiver))
    }

    /// Tokens that each choice may have.
    fn admit(&self, request: &Request) -> Result<usize, SubmitError> {
        let Limits { context_tokens, cache_tokens, offloaded_tokens, vocab, .. } = self.limits;
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if let Some(&token) = request.prompt.iter().find(|&&t| t as usize >= vocab) {
            return Err(SubmitError::UnknownToken { token, vocab });
        }
        // An embedding has no token after it.
        let wanted = if request.embeds { 0 } else { request.stop.max_tokens.unwrap_or(1) };
        if prompt.saturating_add(wanted) > context_tokens {
            return Err(SubmitError::Context { prompt, wanted, limit: context_tokens });
        }
        let choices = request.choices;
        // The prompt's whole blocks are shared, as `schedule::wanted` has it.
        let shared = prompt / BLOCK_TOKENS;
        let needed = |choices: usize, tokens: usize| {
            let own = (prompt + tokens).div_ceil(BLOCK_TOKENS) - shared;
            own.saturating_mul(choices).saturating_add(shared).saturating_mul(BLOCK_TOKENS)
        };
        let limit = cache_tokens / BLOCK_TOKENS * BLOCK_TOKENS;
        if needed(choices, wanted) > limit {
            return Err(SubmitError::Cache {
                prompt,
                wanted,
                choices,
                needed: needed(choices, wanted),
                least: needed(1, wanted.min(1)),
                fewest: needed(choices, wanted.min(1)),
                limit,
                offloaded: offloaded_tokens,
            });
        }
        match request.stop.max_tokens {
            None if !request.embeds => Ok(self.room(prompt, choices)),
            _ => Ok(wanted),
        }
    }

    /// The most tokens that each of `choices` answers to a prompt can have. They share the prompt's whole blocks, so that a
    /// longer prompt may leave several answers more.
    pub fn room(&self, prompt: usize, choices: usize) -> usize {
        let Limits { context_tokens, cache_tokens, .. } = self.limits;
        let shared = prompt / BLOCK_TOKENS;
        let each = (cache_tokens / BLOCK_TOKENS).saturating_sub(shared) / choices.max(1);
        context_tokens.min((shared + each) * BLOCK_TOKENS).saturating_sub(prompt)
    }

    /// From now on new requests are refused; those taken still finish.
    pub fn drain(&self) {
        self.queue.drain();
    }

    /// Waits until nothing waits or runs.
    pub async fn idle(&self) {
        loop {
            if self.queue.idle() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// A request of which more may come; the engine waits for it until this is dropped.
pub struct Parts {
    queue: Arc<Queue<Arc<Job>>>,
}

impl Drop for Parts {
    fn drop(&mut self) {
        self.queue.complete();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.queue.drain();
    }
}
