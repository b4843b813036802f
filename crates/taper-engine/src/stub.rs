//! A scripted model for tests of the engine and of what sits on it: bytes are tokens, the answer is a fixed text.
//!
//! Words in the prompt ask for trouble: `PANIC`, `HUGE` (no memory is enough) and `NAN` strike at the third token, `NIL` at the
//! first, `FAIL` at the first prefill chunk, `DIE` there too and at every step from then on, `SLOW` makes each step take 20 ms,
//! `HANG` has it wait as long as [`Probe::hang`] says, and for
//! half a minute at most.

use crate::backend::{Backend, BackendError, CheckedDrafts, Input, Limits, Row, Underway, Wanted};
use crate::calls::CallFormat;
use crate::engine::{Engine, EngineConfig, ModelInfo};
use crate::sampler::logprobs;
use crate::text::{Message, Text, TextError, TokenStream};
use serde_json::{Map, Value};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use taper_attention::{AttentionSpec, AttentionUsage, Beginning, Sequence};
use taper_kernels::token;
use taper_kv_cache::BLOCK_TOKENS;

/// The token that ends an answer.
pub const EOS: u32 = 256;
/// Tokens of the vocabulary: the bytes and [`EOS`].
pub const VOCAB: usize = 257;

/// What tests watch of a running stub.
#[derive(Debug, Default)]
pub struct Probe {
    /// Forward passes so far.
    pub steps: AtomicUsize,
    /// Sequences open now.
    pub open: AtomicUsize,
    /// Most work that one step did for one sequence so far, in tokens.
    pub longest: AtomicUsize,
    /// Steps that lacked memory.
    pub lacked: AtomicUsize,
    /// Most sequences of one step so far.
    pub widest: AtomicUsize,
    /// Lengths of prompts, in the order in which they were all in.
    pub prefilled: Mutex<Vec<usize>>,
    /// How often a sequence lost its place in the cache.
    pub retracted: AtomicUsize,
    /// Tokens that it drew itself.
    pub drawn: AtomicUsize,
    /// How often the idle engine had the stub checked.
    pub checks: AtomicUsize,
    /// How often it was asked what a prompt begins with, which it says once it can have the lock.
    pub looked: AtomicUsize,
    /// The salt of the latest of them.
    pub salt: Mutex<String>,
    /// Held by tests that have it wait there.
    pub look: Mutex<()>,
    /// Whether a step that is to hang still does.
    pub hang: AtomicBool,
    /// The attention of the latest request.
    pub attention: Mutex<Option<AttentionSpec>>,
    /// The seed of each sequence's attention, in the order in which they were opened.
    pub seeds: Mutex<Vec<u64>>,
}

/// The scripted backend.
pub struct StubBackend {
    /// The answer to every prompt.
    pub script: Vec<u8>,
    /// What fits.
    pub limits: Limits,
    /// Prompts are cut into chunks of multiples of this.
    pub chunk_multiple: usize,
    /// Whether it draws tokens itself, as a device does.
    pub draws: bool,
    /// Whether it fails when it is warmed up.
    pub cold: bool,
    /// Whether no step can succeed any more.
    pub dead: bool,
    /// Most work, in tokens, that a step has the memory for.
    pub memory: usize,
    /// More of it, to be had back once.
    pub spare: usize,
    /// Spoils what a step gives back.
    pub spoils: Option<fn(&mut Vec<Vec<Row>>)>,
    /// Blocks of the cache that sequences hold.
    pub held_blocks: usize,
    /// What tests watch.
    pub probe: Arc<Probe>,
}

/// One sequence of the stub.
pub struct StubSequence {
    spec: Arc<AttentionSpec>,
    report: Sequence,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    /// Blocks that it shares with forks of the same prompt.
    shared: Arc<AtomicUsize>,
    underway: Underway,
    drafting: bool,
}

impl StubSequence {
    /// Blocks that it has for itself.
    fn blocks(&self) -> usize {
        (self.tokens.len() + self.underway.tokens).div_ceil(BLOCK_TOKENS) - self.shared.load(Ordering::SeqCst)
    }

    /// What another one of the same prompt shares from now on.
    fn share(&self) -> Arc<AtomicUsize> {
        self.shared.store(self.tokens.len() / BLOCK_TOKENS, Ordering::SeqCst);
        Arc::clone(&self.shared)
    }

    /// Whether the prompt says a word within its first `tokens` tokens.
    fn says(&self, word: &str, tokens: usize) -> bool {
        let bytes: Vec<u8> = self.prompt.iter().take(tokens).map(|&t| t as u8).collect();
        String::from_utf8_lossy(&bytes).contains(word)
    }
}

impl StubBackend {
    /// A stub that answers `script`, with a context of 512 tokens and a cache of 1024.
    pub fn new(script: &str) -> Self {
        let limits =
            Limits { context_tokens: 512, cache_tokens: 1024, offloaded_tokens: 0, cache_bytes: 0, vocab: VOCAB };
        Self {
            script: script.into(),
            limits,
            chunk_multiple: 1,
            draws: false,
            cold: false,
            dead: false,
            memory: usize::MAX,
            spare: 0,
            spoils: None,
            held_blocks: 0,
            probe: Arc::default(),
        }
    }

    /// An engine over this stub, named `stub`.
    pub fn engine(self, config: EngineConfig) -> Engine {
        let model = ModelInfo { id: "stub".into(), created: 1_700_000_000 };
        Engine::start(self, Arc::new(StubText), model, config).expect("a thread starts")
    }

    /// Takes a sequence's blocks from it.
    fn release(&mut self, sequence: &mut StubSequence) {
        self.held_blocks -= sequence.blocks();
        self.held_blocks -= Arc::into_inner(std::mem::take(&mut sequence.shared)).map_or(0, AtomicUsize::into_inner);
        sequence.tokens.clear();
        sequence.underway = Underway::default();
    }

    /// After its first `tokens` tokens. Of three drafts one is wrong.
    fn logits(&self, sequence: &StubSequence, tokens: usize) -> Vec<f32> {
        let mut logits = vec![0.0; VOCAB];
        // Within a prompt the token itself is what the stub expects to come again.
        let Some(answered) = tokens.checked_sub(sequence.prompt.len()) else {
            logits[sequence.prompt[tokens - 1] as usize] = 12.0;
            return logits;
        };
        // The answer repeats after its end, for requests that ignore the end token.
        let place = answered % (self.script.len() + 1);
        let next = self.script.get(place).map_or(EOS, |&b| u32::from(b));
        let wrong = sequence.drafting && answered.is_multiple_of(3);
        logits[if wrong { 0 } else { next as usize }] = 12.0;
        let says = |word| sequence.says(word, sequence.tokens.len());
        if answered == 2 && says("NAN") || answered == 0 && says("NIL") {
            logits[7] = f32::NAN;
        }
        logits
    }
}

/// What a device says that has too little memory.
fn lacks() -> BackendError {
    BackendError("CUDA status 2 (out of memory)".into())
}

impl Backend for StubBackend {
    type Sequence = StubSequence;

    fn limits(&self) -> Limits {
        self.limits
    }

    fn open(
        &mut self,
        attention: &Arc<AttentionSpec>,
        seed: u64,
        prompt: &[u32],
        question_tokens: usize,
    ) -> Result<StubSequence, BackendError> {
        self.probe.open.fetch_add(1, Ordering::SeqCst);
        self.probe.seeds.lock().unwrap_or_else(PoisonError::into_inner).push(seed);
        *self.probe.attention.lock().unwrap_or_else(PoisonError::into_inner) = Some(AttentionSpec::clone(attention));
        Ok(StubSequence {
            spec: Arc::clone(attention),
            report: Sequence::new(Arc::clone(attention), seed, prompt.len()).with_question(question_tokens),
            prompt: prompt.to_vec(),
            tokens: Vec::new(),
            shared: Arc::default(),
            underway: Underway::default(),
            drafting: false,
        })
    }

    fn cached(&self, sequence: &StubSequence) -> usize {
        sequence.tokens.len()
    }

    fn free_blocks(&self) -> usize {
        self.limits.cache_tokens / BLOCK_TOKENS - self.held_blocks
    }

    fn beginning(&self, _: &Arc<AttentionSpec>, _: &[u32], _: usize, salt: &str) -> Beginning {
        *self.probe.salt.lock().unwrap_or_else(PoisonError::into_inner) = salt.into();
        self.probe.looked.fetch_add(1, Ordering::SeqCst);
        drop(self.probe.look.lock());
        Beginning::default()
    }

    fn retract(&mut self, sequence: &mut StubSequence) {
        self.probe.retracted.fetch_add(1, Ordering::SeqCst);
        self.release(sequence);
    }

    fn rejoin(&mut self, sequences: Vec<&mut StubSequence>, prompt: StubSequence) -> Result<(), BackendError> {
        for sequence in sequences {
            (sequence.tokens, sequence.shared) = (prompt.tokens.clone(), prompt.share());
            self.held_blocks += sequence.blocks();
        }
        self.close(prompt);
        Ok(())
    }

    fn fork(&mut self, sequence: &StubSequence, seed: u64) -> Result<StubSequence, BackendError> {
        let mut fork = self.open(&sequence.spec, seed, &sequence.prompt, 0)?;
        (fork.tokens, fork.shared) = (sequence.tokens.clone(), sequence.share());
        self.held_blocks += fork.blocks();
        Ok(fork)
    }

    fn chunk(&self, sequence: &StubSequence, max: usize) -> usize {
        match sequence.underway.tokens {
            0 => (max / self.chunk_multiple).max(1) * self.chunk_multiple,
            tokens => tokens,
        }
    }

    fn underway(&self, sequence: &StubSequence) -> Underway {
        sequence.underway
    }

    fn forward(&mut self, inputs: Vec<Input<'_, StubSequence>>) -> Result<Vec<Vec<Row>>, BackendError> {
        self.probe.steps.fetch_add(1, Ordering::SeqCst);
        if inputs.iter().map(|input| input.effort).sum::<usize>() > self.memory {
            self.probe.lacked.fetch_add(1, Ordering::SeqCst);
            return Err(lacks());
        }
        self.probe.widest.fetch_max(inputs.len(), Ordering::SeqCst);
        for Input { sequence, tokens, effort, .. } in &inputs {
            self.probe.longest.fetch_max(*effort, Ordering::SeqCst);
            let known = sequence.tokens.len() + tokens.len();
            if sequence.says("SLOW", known) {
                std::thread::sleep(Duration::from_millis(20));
            }
            let since = Instant::now();
            while sequence.says("HANG", known)
                && self.probe.hang.load(Ordering::SeqCst)
                && since.elapsed() < Duration::from_secs(30)
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.dead |= sequence.says("DIE", known);
            if self.dead || sequence.says("FAIL", known) {
                return Err(BackendError("the prompt asked for it".into()));
            }
            let third = (sequence.tokens.len()..known).contains(&(sequence.prompt.len() + 1));
            if third && sequence.says("HUGE", known) {
                self.probe.lacked.fetch_add(1, Ordering::SeqCst);
                return Err(lacks());
            }
            if third && sequence.says("PANIC", known) {
                panic!("the prompt asked for a panic");
            }
        }
        let mut rows = Vec::new();
        for Input { sequence, tokens, effort, wants, .. } in inputs {
            let before = sequence.blocks();
            let rest = &sequence.prompt[sequence.tokens.len().min(sequence.prompt.len())..];
            assert!(rest.iter().zip(tokens).all(|(a, b)| a == b), "a prompt's tokens in their order");
            let Underway { tokens: underway, done } = sequence.underway;
            assert!(effort > 0 && done + effort <= tokens.len(), "work that there is");
            assert!(underway == 0 || underway == tokens.len(), "a chunk that is underway stays as it is");
            if done + effort < tokens.len() {
                sequence.underway = Underway { tokens: tokens.len(), done: done + effort };
                self.held_blocks += sequence.blocks() - before;
                rows.push(Vec::new());
                continue;
            }
            sequence.underway = Underway::default();
            sequence.tokens.extend_from_slice(tokens);
            self.held_blocks += sequence.blocks() - before;
            if sequence.tokens.len() == sequence.prompt.len() {
                let mut prefilled = self.probe.prefilled.lock().unwrap_or_else(PoisonError::into_inner);
                prefilled.push(sequence.prompt.len());
            }
            let first = sequence.tokens.len() - wants.len();
            let row = |(i, wants): (usize, Wanted)| match (self.logits(sequence, first + i + 1), wants) {
                (logits, Wanted::Token(draw)) if self.draws => {
                    self.probe.drawn.fetch_add(1, Ordering::SeqCst);
                    Row::Token(token::pick(&logits, &draw))
                }
                // Told by how many tokens there are.
                (_, Wanted::Hidden) => {
                    let bad = if sequence.says("NIL", usize::MAX) { f32::INFINITY } else { 0.0 };
                    Row::Hidden(vec![3.0, 4.0 * sequence.tokens.len() as f32, bad])
                }
                (logits, Wanted::Score { token, top }) => Row::Score(logprobs(&logits, token, top)),
                (logits, _) => Row::Logits(logits),
            };
            rows.push(wants.into_iter().enumerate().map(row).collect());
        }
        if self.held_blocks > self.limits.cache_tokens / BLOCK_TOKENS {
            return Err(BackendError("the KV cache is full".into()));
        }
        if let Some(spoils) = self.spoils {
            spoils(&mut rows);
        }
        Ok(rows)
    }

    fn draft(&self, sequence: &mut StubSequence, drafts: bool) {
        sequence.drafting = drafts;
    }

    fn drafted(&self, sequence: &mut StubSequence, CheckedDrafts { made, right, looked_up }: CheckedDrafts) {
        sequence.report.drafted(made as u64, right as u64, looked_up);
    }

    fn truncate(&mut self, sequence: &mut StubSequence, tokens: usize) -> Result<(), BackendError> {
        let before = sequence.blocks();
        assert!(tokens >= sequence.prompt.len(), "a prompt's tokens stay");
        sequence.tokens.truncate(tokens);
        self.held_blocks -= before - sequence.blocks();
        Ok(())
    }

    fn usage(&self, sequence: &StubSequence) -> AttentionUsage {
        sequence.report.usage()
    }

    fn close(&mut self, mut sequence: StubSequence) {
        self.release(&mut sequence);
        self.probe.open.fetch_sub(1, Ordering::SeqCst);
    }

    fn warm_up(&mut self) -> Result<(), BackendError> {
        if self.cold { Err(BackendError("it was asked to fail at once".into())) } else { Ok(()) }
    }

    fn spare(&mut self) -> bool {
        let spare = std::mem::take(&mut self.spare);
        self.memory = self.memory.saturating_add(spare);
        spare > 0
    }

    fn check_alive(&mut self) -> Result<(), BackendError> {
        if self.dead { Err(BackendError("the stub is dead".into())) } else { Ok(()) }
    }

    fn check_idle(&self) {
        self.probe.checks.fetch_add(1, Ordering::SeqCst);
        assert_eq!(self.probe.open.load(Ordering::SeqCst), 0, "sequences are open");
        assert_eq!(self.held_blocks, 0, "blocks are held");
    }
}

/// Bytes as tokens. A text that says `MARKED` has a mark at its start, `^`, where marks are wanted.
pub struct StubText;

impl Text for StubText {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        let mark = (special && text.contains("MARKED")).then_some(b'^');
        Ok(mark.into_iter().chain(text.bytes()).map(u32::from).collect())
    }

    fn chat(&self, messages: &[Message], variables: &Map<String, Value>) -> Result<Vec<u32>, TextError> {
        let mut text = variables.get("tools").map_or(String::new(), |tools| format!("<tools>{tools}\n"));
        for message in messages {
            match message.role.as_str() {
                "odd" => return Err(TextError::Refused("the template knows no role odd".into())),
                "slow" => return Err(TextError::Busy("the template is at another conversation".into())),
                "broken" => return Err(TextError::Failed("the template fails".into())),
                _ => {}
            }
            text.push_str(&format!("<{}>{}", message.role, message.content.as_deref().unwrap_or_default()));
            if !message.extra.is_empty() {
                text.push_str(&Value::Object(message.extra.clone()).to_string());
            }
            text.push('\n');
        }
        self.encode(&(text + "<assistant>"), true)
    }

    fn open(&self, messages: &[Message], variables: &Map<String, Value>) -> Result<Vec<u32>, TextError> {
        let mut tokens = self.chat(messages, variables)?;
        tokens.truncate(tokens.len() - "\n<assistant>".len());
        Ok(tokens)
    }

    fn call_format(&self) -> CallFormat {
        CallFormat::Tagged
    }

    fn mark(&self, mark: &str) -> Option<u32> {
        (mark == "<eos>").then_some(EOS)
    }

    fn decode(&self, tokens: &[u32], special: bool) -> String {
        let bytes: Vec<u8> = tokens.iter().flat_map(|&token| shown(token, special)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn token_bytes(&self, token: u32) -> Vec<u8> {
        u8::try_from(token).map_or_else(|_| b"<eos>".to_vec(), |byte| vec![byte])
    }

    fn special(&self, token: u32) -> bool {
        token >= EOS
    }

    fn eos(&self) -> &[u32] {
        &[EOS]
    }

    fn stream(&self, _: bool, special: bool) -> Box<dyn TokenStream> {
        Box::new(StubStream { bytes: Vec::new(), special })
    }
}

/// A token's bytes, where special ones are shown or not.
fn shown(token: u32, special: bool) -> Vec<u8> {
    if token < 256 || special { StubText.token_bytes(token) } else { Vec::new() }
}

struct StubStream {
    bytes: Vec<u8>,
    special: bool,
}

impl TokenStream for StubStream {
    fn push(&mut self, token: u32) -> String {
        self.bytes.extend(shown(token, self.special));
        match std::str::from_utf8(&self.bytes) {
            Ok(_) => String::from_utf8(std::mem::take(&mut self.bytes)).unwrap_or_default(),
            Err(_) => String::new(),
        }
    }

    fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.bytes)).into_owned()
    }
}
