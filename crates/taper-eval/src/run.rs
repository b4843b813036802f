//! Runs a plan: one prefill for each prompt and prefill method, one greedy answer from it for each decode method.

mod prompts;

pub use prompts::write_prompts;

use crate::error::EvalError;
use crate::method::{Method, Phase};
use crate::results::{Audited, Record, Results};
use crate::score::share_found;
use crate::tasks::{Sample, Task};
use crate::text::PromptText;
use serde_json::json;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use taper_attention::{Artifacts, AttentionSpec, PhaseUsage, Question};
use taper_engine::{Backend, BackendError, Input, Row, Wanted};

/// Makes a sequence that continues from another one's tokens and attends by a spec of its own.
///
/// The spec's prefill method is the one that the tokens were attended by.
pub type Fork<B> =
    fn(&mut B, &<B as Backend>::Sequence, &Arc<AttentionSpec>, u64) -> Result<<B as Backend>::Sequence, BackendError>;

/// What to run: every combination.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Tasks.
    pub tasks: Vec<Task>,
    /// Lengths of prompt and answer together, in tokens.
    pub lengths: Vec<usize>,
    /// Numbers of the questions of each task and length.
    pub samples: Range<usize>,
    /// Prefill methods.
    pub prefills: Vec<Method>,
    /// Decode methods.
    pub decodes: Vec<Method>,
    /// How the question after the context is attended. By the decode method, only the context is prefilled once for
    /// all of them.
    pub question: Question,
    /// Share of tokens compared with dense attention, in all layers, 0 to 1.
    pub audit: f64,
    /// What methods learned offline.
    pub artifacts: Artifacts,
    /// Most prompt tokens of one forward pass.
    pub chunk_tokens: usize,
}

/// Who follows a run.
pub trait Watch {
    /// Asked between forward passes: whether to end now. What the current prompt came to is dropped.
    fn stopped(&self) -> bool;

    /// A prompt is about to be prefilled.
    fn begins(&mut self, task: Task, length: usize, prefill: &Method);

    /// `answers` more of all [`Plan::answers`] are in the results, or were there before.
    ///
    /// # Errors
    /// What keeps the run from going on, such as a full disk.
    fn done(&mut self, answers: usize, results: &mut Results) -> Result<(), EvalError>;
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All of the plan is in the results.
    Complete,
    /// [`Watch::stopped`] said so.
    Stopped,
}

impl Plan {
    /// Answers of the whole plan.
    pub fn answers(&self) -> usize {
        self.tasks.len() * self.lengths.len() * self.samples.len() * self.prefills.len() * self.decodes.len()
    }

    /// Length, number and task of every question, in the order that they are asked in.
    fn questions(&self) -> impl Iterator<Item = (usize, usize, Task)> {
        self.lengths.iter().flat_map(move |&length| {
            self.samples.clone().flat_map(move |sample| self.tasks.iter().map(move |&task| (length, sample, task)))
        })
    }

    fn check(&self, limits: taper_engine::Limits) -> Result<(), EvalError> {
        let counts = [
            ("tasks", self.tasks.len()),
            ("lengths", self.lengths.len()),
            ("samples", self.samples.len()),
            ("prefill methods", self.prefills.len()),
            ("decode methods", self.decodes.len()),
            ("tokens of a chunk", self.chunk_tokens),
        ];
        if let Some((name, _)) = counts.iter().find(|(_, count)| *count == 0) {
            return Err(EvalError::Empty(name));
        }
        let length = self.lengths.iter().copied().max().unwrap_or(0);
        // A fork copies the block that the prompt ends in.
        let rooms = [("the model's context", limits.context_tokens, 0), ("the KV cache", limits.cache_tokens, 64)];
        match rooms.into_iter().find(|&(_, most, spare)| length.saturating_add(spare) > most) {
            Some((what, most, spare)) => Err(EvalError::Room { length, what, most: most.saturating_sub(spare) }),
            None => Ok(()),
        }
    }
}

/// Runs what of the plan is not yet in the results, question by question, so that a run cut short has measured every
/// method on the same questions.
///
/// # Errors
/// A plan that does not fit the model, a length too short for a task, a step that failed, or what `watch` says.
pub fn run<B: Backend>(
    backend: &mut B,
    fork: Fork<B>,
    text: &dyn PromptText,
    plan: &Plan,
    results: &mut Results,
    watch: &mut dyn Watch,
) -> Result<Outcome, EvalError> {
    plan.check(backend.limits())?;
    let mut runner = Runner { backend, fork, text, plan };
    for (length, sample, task) in plan.questions() {
        let mut question = None;
        for prefill in &plan.prefills {
            let place = results.place(Phase::Prefill, prefill);
            let decodes: Vec<(usize, &Method)> =
                plan.decodes.iter().map(|m| (results.place(Phase::Decode, m), m)).collect();
            let missing = |&&(decode, _): &&(usize, &Method)| !results.has(task, length, sample, place, decode);
            let wanted: Vec<(usize, &Method)> = decodes.iter().filter(missing).copied().collect();
            if !wanted.is_empty() {
                let seed = results.header.seed;
                let question = match &mut question {
                    Some(question) => question,
                    none => none.insert(task.sample(length, seed, sample, text)?),
                };
                watch.begins(task, length, prefill);
                let at = At { task, length, sample, seed, prefill: place };
                match runner.question(&at, question, prefill, &wanted, watch)? {
                    Some(records) => results.records.extend(records),
                    None => return Ok(Outcome::Stopped),
                }
            }
            watch.done(decodes.len(), results)?;
        }
    }
    Ok(Outcome::Complete)
}

/// Where in the plan.
struct At {
    task: Task,
    length: usize,
    sample: usize,
    /// The run's.
    seed: u64,
    /// Place of the prefill method.
    prefill: usize,
}

impl At {
    /// Seed of the methods' draws: each question has its own.
    fn draws(&self) -> u64 {
        self.seed.wrapping_add(self.sample as u64)
    }
}

fn audited(phase: &PhaseUsage) -> Option<Audited> {
    phase.audit.as_ref().map(|audit| Audited { heads: audit.heads, mean: audit.error_mean })
}

struct Runner<'a, B: Backend> {
    backend: &'a mut B,
    fork: Fork<B>,
    text: &'a dyn PromptText,
    plan: &'a Plan,
}

impl<B: Backend> Runner<'_, B> {
    /// Answers by the decode methods given; `None` if the watch said stop.
    fn question(
        &mut self,
        at: &At,
        question: &Sample,
        prefill: &Method,
        decodes: &[(usize, &Method)],
        watch: &dyn Watch,
    ) -> Result<Option<Vec<Record>>, EvalError> {
        let step = |reason| EvalError::Step { task: at.task.name(), length: at.length, sample: at.sample, reason };
        let rest = json!({ "question": self.plan.question, "audit": self.plan.audit });
        let spec = |&(place, decode): &(usize, &Method)| {
            Ok((place, Method::pair(prefill, decode, &rest, &self.plan.artifacts)?))
        };
        let specs = decodes.iter().map(spec).collect::<Result<Vec<_>, EvalError>>()?;
        // The prompt leaves its last queries to whoever chooses by them, in the layers of the first that does.
        let first = specs.iter().map(|(_, spec)| spec).min_by_key(|spec| spec.ahead_from().unwrap_or(usize::MAX));
        let Some(first) = first else { return Ok(Some(Vec::new())) };
        let mut prompt =
            self.backend.open(first, at.draws(), &question.tokens, question.question_tokens).map_err(step)?;
        let records = self.records(at, question, &mut prompt, &specs, watch);
        self.backend.close(prompt);
        records.map_err(step)
    }

    fn records(
        &mut self,
        at: &At,
        question: &Sample,
        prompt: &mut B::Sequence,
        specs: &[(usize, Arc<AttentionSpec>)],
        watch: &dyn Watch,
    ) -> Result<Option<Vec<Record>>, BackendError> {
        let started = Instant::now();
        // What the decode methods share: all of the prompt, or what comes before the question.
        let own = if self.plan.question == Question::Decode { question.question_tokens } else { 0 };
        let (shared, own) = question.tokens.split_at(question.tokens.len() - own);
        let Some(first) = self.prefill(prompt, shared, watch)? else { return Ok(None) };
        let prefill_s = started.elapsed().as_secs_f64();
        let mut records = Vec::new();
        for (decode, spec) in specs {
            let mut sequence = (self.fork)(self.backend, prompt, spec, at.draws())?;
            let started = Instant::now();
            let tokens = self.question_and_answer(&mut sequence, own, first, at.task.answer_tokens(), watch);
            let decode_s = started.elapsed().as_secs_f64();
            let usage = self.backend.usage(&sequence);
            self.backend.close(sequence);
            let Some(tokens) = tokens? else { return Ok(None) };
            let answer = self.text.decode(&tokens);
            records.push(Record {
                task: at.task,
                length: at.length,
                sample: at.sample,
                prefill: at.prefill,
                decode: *decode,
                prompt_tokens: question.tokens.len(),
                score: share_found(&answer, &question.wanted),
                prefill_density: usage.prefill.density,
                // The prompt's last row gives the first token: only the next ones are decoded.
                decode_density: (!tokens.is_empty()).then_some(usage.decode.density),
                prefill_error: audited(&usage.prefill),
                decode_error: audited(&usage.decode),
                prefill_s,
                decode_s,
                answer,
                wanted: question.wanted.clone(),
            });
        }
        Ok(Some(records))
    }

    fn question_and_answer(
        &mut self,
        sequence: &mut B::Sequence,
        own: &[u32],
        first: u32,
        most: usize,
        watch: &dyn Watch,
    ) -> Result<Option<Vec<u32>>, BackendError> {
        let first = if own.is_empty() { Some(first) } else { self.prefill(sequence, own, watch)? };
        first.map_or(Ok(None), |first| self.answer(sequence, first, most, watch))
    }

    /// Takes in the prompt's next tokens, and returns the likeliest one after them; `None` if the watch said stop.
    fn prefill(
        &mut self,
        sequence: &mut B::Sequence,
        tokens: &[u32],
        watch: &dyn Watch,
    ) -> Result<Option<u32>, BackendError> {
        let logits = feed(self.backend, sequence, tokens, self.plan.chunk_tokens, &|| watch.stopped())?;
        logits.map(|logits| likeliest(&logits)).transpose()
    }

    /// Decodes greedily to the end token, which is left out, or to `most` tokens; `None` if the watch said stop.
    fn answer(
        &mut self,
        sequence: &mut B::Sequence,
        first: u32,
        most: usize,
        watch: &dyn Watch,
    ) -> Result<Option<Vec<u32>>, BackendError> {
        let (mut tokens, mut next) = (Vec::new(), first);
        while !self.text.ends(next) {
            tokens.push(next);
            if tokens.len() == most {
                break;
            }
            if watch.stopped() {
                return Ok(None);
            }
            let logits = step(self.backend, sequence, &[next], true)?.unwrap_or_default();
            next = likeliest(&logits)?;
        }
        Ok(Some(tokens))
    }
}

/// Takes in a prompt's next tokens, at most so many a step or as much work as of so many, as an engine does, and returns the
/// logits after the last; `None` if told to stop.
pub(crate) fn feed<B: Backend>(
    backend: &mut B,
    sequence: &mut B::Sequence,
    tokens: &[u32],
    chunk_tokens: usize,
    stopped: &dyn Fn() -> bool,
) -> Result<Option<Vec<f32>>, BackendError> {
    let before = backend.cached(sequence);
    loop {
        if stopped() {
            return Ok(None);
        }
        let at = backend.cached(sequence) - before;
        // A method that cannot cut so short may take more than asked for.
        let take = backend.chunk(sequence, chunk_tokens).clamp(1, tokens.len() - at);
        let effort = (take - backend.underway(sequence).done).min(chunk_tokens.max(1));
        let wants = Vec::from_iter((at + take == tokens.len()).then_some(Wanted::Logits));
        let input = Input { effort, wants, ..Input::whole(&mut *sequence, &tokens[at..at + take], None) };
        let rows = backend.forward(vec![input])?;
        if backend.cached(sequence) - before == tokens.len() {
            return logits_of(rows).map(Some);
        }
    }
}

/// One step of one sequence; its logits if they are wanted.
pub(crate) fn step<B: Backend>(
    backend: &mut B,
    sequence: &mut B::Sequence,
    tokens: &[u32],
    logits: bool,
) -> Result<Option<Vec<f32>>, BackendError> {
    let rows = backend.forward(vec![Input::whole(sequence, tokens, logits.then_some(Wanted::Logits))])?;
    if logits { logits_of(rows).map(Some) } else { Ok(None) }
}

/// The logits that a step of one sequence returned.
fn logits_of(rows: Vec<Vec<Row>>) -> Result<Vec<f32>, BackendError> {
    let row = rows.into_iter().flatten().next().and_then(Row::logits);
    row.ok_or_else(|| BackendError("the step returned no logits".into()))
}

/// The token of the largest logit; of equal ones the first.
fn likeliest(logits: &[f32]) -> Result<u32, BackendError> {
    let mut best: Option<(usize, f32)> = None;
    for (token, &logit) in logits.iter().enumerate() {
        if logit.is_nan() {
            return Err(BackendError("the model's logits are not numbers".into()));
        }
        if best.is_none_or(|(_, most)| logit > most) {
            best = Some((token, logit));
        }
    }
    best.map(|(token, _)| token as u32).ok_or_else(|| BackendError("the model has no logits".into()))
}

#[cfg(test)]
mod tests;
