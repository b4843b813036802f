//! Prompts on one device, answers on another: two backends of one model as one.

use crate::backend::{Backend, BackendError, CheckedDrafts, Input, Limits, Row, Underway};
use crate::model::ModelBackend;
use std::sync::Arc;
use taper_attention::{AttentionSpec, AttentionUsage, Beginning, Sequence};

/// Two backends of one model. A sequence begins in the first, and [`Handover::hand_over`] copies it to the second. A step goes
/// over sequences of one of them.
pub struct Handover {
    prompts: ModelBackend,
    answers: ModelBackend,
}

/// A sequence of one of them.
#[derive(Debug)]
pub struct HandoverSequence {
    sequence: Sequence,
    /// Whether the backend for answers has it.
    pub(crate) answers: bool,
}

impl Handover {
    /// Of two backends of one model.
    pub fn new(prompts: ModelBackend, answers: ModelBackend) -> Self {
        Self { prompts, answers }
    }

    fn of(&self, held: &HandoverSequence) -> &ModelBackend {
        if held.answers { &self.answers } else { &self.prompts }
    }

    fn of_mut(&mut self, held: &HandoverSequence) -> &mut ModelBackend {
        if held.answers { &mut self.answers } else { &mut self.prompts }
    }

    /// A copy of a sequence for answers, with draws of its own, that is attended by the decode method of `spec` from here
    /// on.
    ///
    /// # Errors
    /// No room in the cache, or a prompt that is not all there.
    pub fn hand_over(
        &mut self,
        held: &HandoverSequence,
        spec: &AttentionSpec,
        seed: u64,
    ) -> Result<HandoverSequence, BackendError> {
        let mut sequence = match held.answers {
            false => self.answers.adopt(&self.prompts, &held.sequence, seed)?,
            true => self.answers.fork(&held.sequence, seed)?,
        };
        sequence.decode_by(spec);
        Ok(HandoverSequence { sequence, answers: true })
    }
}

impl Backend for Handover {
    type Sequence = HandoverSequence;

    fn limits(&self) -> Limits {
        let (prompts, answers) = (self.prompts.limits(), self.answers.limits());
        match answers.cache_tokens < prompts.cache_tokens {
            true => answers,
            false => prompts,
        }
    }

    fn open(
        &mut self,
        attention: &Arc<AttentionSpec>,
        seed: u64,
        prompt: &[u32],
        question_tokens: usize,
    ) -> Result<HandoverSequence, BackendError> {
        let sequence = self.prompts.open(attention, seed, prompt, question_tokens)?;
        Ok(HandoverSequence { sequence, answers: false })
    }

    fn reuse(&mut self, held: &mut HandoverSequence, beginning: &Beginning) {
        if !held.answers {
            self.prompts.reuse(&mut held.sequence, beginning);
        }
    }

    fn cached(&self, held: &HandoverSequence) -> usize {
        held.sequence.len()
    }

    fn free_blocks(&self) -> usize {
        self.prompts.free_blocks().min(self.answers.free_blocks())
    }

    fn offloaded_blocks(&self) -> usize {
        self.prompts.offloaded_blocks() + self.answers.offloaded_blocks()
    }

    fn beginning(
        &self,
        attention: &Arc<AttentionSpec>,
        prompt: &[u32],
        question_tokens: usize,
        salt: &str,
    ) -> Beginning {
        self.prompts.beginning(attention, prompt, question_tokens, salt)
    }

    fn shared_blocks(&self, beginning: &Beginning) -> usize {
        self.prompts.shared_blocks(beginning)
    }

    fn gains(&self, beginning: &Beginning, other: &Beginning, cached: usize) -> bool {
        self.prompts.gains(beginning, other, cached)
    }

    fn retract(&mut self, held: &mut HandoverSequence) {
        self.of_mut(held).retract(&mut held.sequence);
    }

    fn rejoin(&mut self, sequences: Vec<&mut HandoverSequence>, prompt: HandoverSequence) -> Result<(), BackendError> {
        if prompt.answers || sequences.iter().any(|held| held.answers) {
            return Err(BackendError("a sequence that was handed over cannot be computed again".into()));
        }
        self.prompts.rejoin(sequences.into_iter().map(|held| &mut held.sequence).collect(), prompt.sequence)
    }

    fn fork(&mut self, held: &HandoverSequence, seed: u64) -> Result<HandoverSequence, BackendError> {
        let sequence = self.of_mut(held).fork(&held.sequence, seed)?;
        Ok(HandoverSequence { sequence, answers: held.answers })
    }

    fn chunk(&self, held: &HandoverSequence, max: usize) -> usize {
        self.of(held).chunk(&held.sequence, max)
    }

    fn underway(&self, held: &HandoverSequence) -> Underway {
        self.of(held).underway(&held.sequence)
    }

    fn forward(&mut self, inputs: Vec<Input<'_, HandoverSequence>>) -> Result<Vec<Vec<Row>>, BackendError> {
        let answers = inputs.iter().filter(|input| input.sequence.answers).count();
        // The second of two steps could fail after the first was done.
        if 0 < answers && answers < inputs.len() {
            return Err(BackendError("a step over prompts and over answers on another device".into()));
        }
        let own = |Input { sequence, tokens, effort, wants, next }| {
            let HandoverSequence { sequence, .. } = sequence;
            Input { sequence, tokens, effort, wants, next }
        };
        let backend = if answers > 0 { &mut self.answers } else { &mut self.prompts };
        backend.forward(inputs.into_iter().map(own).collect())
    }

    fn truncate(&mut self, held: &mut HandoverSequence, tokens: usize) -> Result<(), BackendError> {
        self.of_mut(held).truncate(&mut held.sequence, tokens)
    }

    fn usage(&self, held: &HandoverSequence) -> AttentionUsage {
        held.sequence.usage()
    }

    fn draft(&self, held: &mut HandoverSequence, drafts: bool) {
        self.of(held).draft(&mut held.sequence, drafts);
    }

    fn drafted(&self, held: &mut HandoverSequence, drafts: CheckedDrafts) {
        self.of(held).drafted(&mut held.sequence, drafts);
    }

    fn discard(&mut self, held: HandoverSequence) {
        self.of_mut(&held).discard(held.sequence);
    }

    fn close(&mut self, held: HandoverSequence) {
        self.of_mut(&held).close(held.sequence);
    }

    fn warm_up(&mut self) -> Result<(), BackendError> {
        self.prompts.warm_up()?;
        self.answers.warm_up()
    }

    fn spare(&mut self) -> bool {
        let prompts = self.prompts.spare();
        self.answers.spare() || prompts
    }

    fn check_alive(&mut self) -> Result<(), BackendError> {
        self.prompts.check_alive()?;
        self.answers.check_alive()
    }

    fn check_idle(&self) {
        self.prompts.check_idle();
        self.answers.check_idle();
    }
}
