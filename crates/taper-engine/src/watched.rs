//! A backend that tests look at, with something done around what another one does.

use crate::backend::{Backend, BackendError, CheckedDrafts, Input, Limits, Row, Underway};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use taper_attention::{AttentionSpec, AttentionUsage, Beginning};

/// What a test sees of a [`Watched`] backend.
#[derive(Debug, Default)]
pub struct Seen {
    /// Idle checks that passed.
    pub checks: AtomicUsize,
    /// Free blocks at the latest of them.
    pub free: AtomicUsize,
    /// Chunks underway whose sequence lost its place or was closed.
    pub dropped: AtomicUsize,
}

/// What is done to a new sequence of a prompt.
pub type Opened<S> = Box<dyn Fn(&mut S, &[u32]) + Send>;

/// What is done once a step went well.
pub type After<B> = Box<dyn Fn(&B) -> Result<(), BackendError> + Send>;

/// A backend, with something done to what is opened, and before and after each step.
pub struct Watched<B: Backend> {
    /// The backend.
    pub inner: B,
    /// Done to what is opened.
    pub opened: Opened<B::Sequence>,
    /// Done before each step.
    pub before: Box<dyn Fn(&B) + Send>,
    /// Done after each step that went well; it may fail after all.
    pub after: After<B>,
    /// What a test sees.
    pub seen: Arc<Seen>,
}

impl<B: Backend> Watched<B> {
    /// With nothing done yet.
    pub fn new(inner: B) -> Self {
        let (opened, before, after) =
            (Box::new(|_: &mut _, _: &[u32]| ()), Box::new(|_: &B| ()), Box::new(|_: &B| Ok(())));
        Self { inner, opened, before, after, seen: Arc::default() }
    }

    fn note(&self, sequence: &B::Sequence) {
        self.seen.dropped.fetch_add(usize::from(self.inner.underway(sequence).tokens > 0), Ordering::SeqCst);
    }
}

impl<B: Backend> Backend for Watched<B> {
    type Sequence = B::Sequence;

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn open(
        &mut self,
        spec: &Arc<AttentionSpec>,
        seed: u64,
        prompt: &[u32],
        question: usize,
    ) -> Result<B::Sequence, BackendError> {
        let mut sequence = self.inner.open(spec, seed, prompt, question)?;
        (self.opened)(&mut sequence, prompt);
        Ok(sequence)
    }

    fn reuse(&mut self, sequence: &mut B::Sequence, beginning: &Beginning) {
        self.inner.reuse(sequence, beginning);
    }

    fn cached(&self, sequence: &B::Sequence) -> usize {
        self.inner.cached(sequence)
    }

    fn free_blocks(&self) -> usize {
        self.inner.free_blocks()
    }

    fn offloaded_blocks(&self) -> usize {
        self.inner.offloaded_blocks()
    }

    fn beginning(&self, spec: &Arc<AttentionSpec>, prompt: &[u32], question: usize, salt: &str) -> Beginning {
        self.inner.beginning(spec, prompt, question, salt)
    }

    fn shared_blocks(&self, beginning: &Beginning) -> usize {
        self.inner.shared_blocks(beginning)
    }

    fn gains(&self, beginning: &Beginning, other: &Beginning, cached: usize) -> bool {
        self.inner.gains(beginning, other, cached)
    }

    fn retract(&mut self, sequence: &mut B::Sequence) {
        self.note(sequence);
        self.inner.retract(sequence);
    }

    fn rejoin(&mut self, sequences: Vec<&mut B::Sequence>, prompt: B::Sequence) -> Result<(), BackendError> {
        self.inner.rejoin(sequences, prompt)
    }

    fn fork(&mut self, sequence: &B::Sequence, seed: u64) -> Result<B::Sequence, BackendError> {
        self.inner.fork(sequence, seed)
    }

    fn chunk(&self, sequence: &B::Sequence, max: usize) -> usize {
        self.inner.chunk(sequence, max)
    }

    fn underway(&self, sequence: &B::Sequence) -> Underway {
        self.inner.underway(sequence)
    }

    fn forward(&mut self, inputs: Vec<Input<'_, B::Sequence>>) -> Result<Vec<Vec<Row>>, BackendError> {
        (self.before)(&self.inner);
        let rows = self.inner.forward(inputs)?;
        (self.after)(&self.inner)?;
        Ok(rows)
    }

    fn draft(&self, sequence: &mut B::Sequence, drafts: bool) {
        self.inner.draft(sequence, drafts);
    }

    fn drafted(&self, sequence: &mut B::Sequence, drafts: CheckedDrafts) {
        self.inner.drafted(sequence, drafts);
    }

    fn truncate(&mut self, sequence: &mut B::Sequence, tokens: usize) -> Result<(), BackendError> {
        self.inner.truncate(sequence, tokens)
    }

    fn usage(&self, sequence: &B::Sequence) -> AttentionUsage {
        self.inner.usage(sequence)
    }

    fn close(&mut self, sequence: B::Sequence) {
        self.note(&sequence);
        self.inner.close(sequence);
    }

    fn discard(&mut self, sequence: B::Sequence) {
        self.note(&sequence);
        self.inner.discard(sequence);
    }

    fn warm_up(&mut self) -> Result<(), BackendError> {
        self.inner.warm_up()
    }

    fn spare(&mut self) -> bool {
        self.inner.spare()
    }

    fn check_alive(&mut self) -> Result<(), BackendError> {
        self.inner.check_alive()
    }

    fn check_idle(&self) {
        self.inner.check_idle();
        self.seen.free.store(self.inner.free_blocks(), Ordering::SeqCst);
        self.seen.checks.fetch_add(1, Ordering::SeqCst);
    }
}
