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

/// A sequence, by the backend that has it.
#[derive(Debug)]
pub enum Held {
    /// The one for prompts.
    Prompts(Sequence),
    /// The one for answers.
    Answers(Sequence),
}

impl Held {
    fn sequence(&self) -> &Sequence {
        match self {
            Self::Prompts(sequence) | Self::Answers(sequence) => sequence,
        }
    }
}

impl Handover {
    /// Of two backends of one model.
    pub fn new(prompts: ModelBackend, answers: ModelBackend) -> Self {
        Self { prompts, answers }
    }

    /// A copy of a sequence for answers, with draws of its own, that is attended by the decode method of `spec` from here
    /// on.
    ///
    /// # Errors
    /// No room in the cache, or a prompt that is not all there.
    pub fn hand_over(&mut self, held: &Held, spec: &AttentionSpec, seed: u64) -> Result<Held, BackendError> {
        let mut sequence = match held {
            Held::Prompts(sequence) => self.answers.adopt(&self.prompts, sequence, seed)?,
            Held::Answers(sequence) => self.answers.fork(sequence, seed)?,
        };
        sequence.decode_by(spec);
        Ok(Held::Answers(sequence))
    }
}

impl Backend for Handover {
    type Sequence = Held;

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
    ) -> Result<Held, BackendError> {
        self.prompts.open(attention, seed, prompt, question_tokens).map(Held::Prompts)
    }

    fn reuse(&mut self, held: &mut Held, beginning: &Beginning) {
        if let Held::Prompts(sequence) = held {
            self.prompts.reuse(sequence, beginning);
        }
    }

    fn cached(&self, held: &Held) -> usize {
        held.sequence().len()
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

    fn retract(&mut self, held: &mut Held) {
        match held {
            Held::Prompts(sequence) => self.prompts.retract(sequence),
            Held::Answers(sequence) => self.answers.retract(sequence),
        }
    }

    fn rejoin(&mut self, sequences: Vec<&mut Held>, prompt: Held) -> Result<(), BackendError> {
        let again = || BackendError("a sequence that was handed over cannot be computed again".into());
        let Held::Prompts(prompt) = prompt else { return Err(again()) };
        let sequences = sequences.into_iter().map(|held| match held {
            Held::Prompts(sequence) => Ok(sequence),
            Held::Answers(_) => Err(again()),
        });
        self.prompts.rejoin(sequences.collect::<Result<_, _>>()?, prompt)
    }

    fn fork(&mut self, held: &Held, seed: u64) -> Result<Held, BackendError> {
        match held {
            Held::Prompts(sequence) => self.prompts.fork(sequence, seed).map(Held::Prompts),
            Held::Answers(sequence) => self.answers.fork(sequence, seed).map(Held::Answers),
        }
    }

    fn chunk(&self, held: &Held, max: usize) -> usize {
        held.sequence().chunk(max)
    }

    fn underway(&self, held: &Held) -> Underway {
        match held {
            Held::Prompts(sequence) => self.prompts.underway(sequence),
            Held::Answers(sequence) => self.answers.underway(sequence),
        }
    }

    fn forward(&mut self, inputs: Vec<Input<'_, Held>>) -> Result<Vec<Vec<Row>>, BackendError> {
        let (mut prompts, mut answers) = (Vec::new(), Vec::new());
        for Input { sequence, tokens, effort, wants, next } in inputs {
            match sequence {
                Held::Prompts(sequence) => prompts.push(Input { sequence, tokens, effort, wants, next }),
                Held::Answers(sequence) => answers.push(Input { sequence, tokens, effort, wants, next }),
            }
        }
        match (prompts.is_empty(), answers.is_empty()) {
            // The second of two steps could fail after the first was done.
            (false, false) => Err(BackendError("a step over prompts and over answers on another device".into())),
            (false, true) => self.prompts.forward(prompts),
            (true, _) => self.answers.forward(answers),
        }
    }

    fn truncate(&mut self, held: &mut Held, tokens: usize) -> Result<(), BackendError> {
        match held {
            Held::Prompts(sequence) => self.prompts.truncate(sequence, tokens),
            Held::Answers(sequence) => self.answers.truncate(sequence, tokens),
        }
    }

    fn usage(&self, held: &Held) -> AttentionUsage {
        held.sequence().usage()
    }

    fn draft(&self, held: &mut Held, drafts: bool) {
        match held {
            Held::Prompts(sequence) => self.prompts.draft(sequence, drafts),
            Held::Answers(sequence) => self.answers.draft(sequence, drafts),
        }
    }

    fn drafted(&self, held: &mut Held, drafts: CheckedDrafts) {
        match held {
            Held::Prompts(sequence) => self.prompts.drafted(sequence, drafts),
            Held::Answers(sequence) => self.answers.drafted(sequence, drafts),
        }
    }

    fn discard(&mut self, held: Held) {
        match held {
            Held::Prompts(sequence) => self.prompts.discard(sequence),
            Held::Answers(sequence) => self.answers.discard(sequence),
        }
    }

    fn close(&mut self, held: Held) {
        match held {
            Held::Prompts(sequence) => self.prompts.close(sequence),
            Held::Answers(sequence) => self.answers.close(sequence),
        }
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
