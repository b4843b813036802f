//! One request from its first prompt token to its last event, one step at a time.
//!
//! A step is one prefill chunk or one token of every live choice. The engine's loop calls [`Run::step`] and may stop
//! between any two.

use crate::backend::{Backend, BackendError, Input};
use crate::emit::Output;
use crate::request::{Event, Request, RequestError, Usage};
use crate::sampler::Sampler;
use crate::text::Text;
use std::time::Instant;
use taper_attention::AttentionUsage;
use tokio::sync::mpsc;

/// A request with its way back to the client.
pub(crate) struct Job {
    pub(crate) request: Request,
    /// Tokens that each choice may have.
    pub(crate) max_tokens: usize,
    pub(crate) events: mpsc::Sender<Event>,
}

/// A request that is being worked on.
pub(crate) struct Run<S> {
    job: Job,
    /// The prompt's sequence until the choices take over.
    prompt: Option<S>,
    prefilled: usize,
    choices: Vec<Choice<S>>,
    started: Instant,
}

struct Choice<S> {
    sequence: Option<S>,
    sampler: Sampler,
    output: Output,
    next: u32,
    usage: Option<AttentionUsage>,
}

impl<S> Choice<S> {
    fn live(&self) -> bool {
        self.usage.is_none()
    }
}

impl From<BackendError> for RequestError {
    fn from(error: BackendError) -> Self {
        Self::Step(error.0)
    }
}

impl<S> Run<S> {
    pub(crate) fn new(job: Job, text: &dyn Text) -> Self {
        let request = &job.request;
        let choices = (0..request.choices)
            .map(|index| Choice {
                sequence: None,
                sampler: Sampler::new(request.sampling.clone(), index, &request.prompt),
                output: Output::new(index, text, request, job.max_tokens),
                next: 0,
                usage: None,
            })
            .collect();
        Self { job, prompt: None, prefilled: 0, choices, started: Instant::now() }
    }

    /// Whether nobody waits for the answer any more.
    pub(crate) fn abandoned(&self) -> bool {
        self.job.events.is_closed()
    }

    /// The name in the log.
    pub(crate) fn id(&self) -> &str {
        &self.job.request.id
    }

    /// Sends the last event of a request that failed.
    pub(crate) fn fail(&self, error: RequestError) {
        send(&self.job.events, Event::Failed(error));
    }

    /// Works one step; true once the last event is sent.
    pub(crate) fn step<B: Backend<Sequence = S>>(
        &mut self,
        backend: &mut B,
        chunk_tokens: usize,
    ) -> Result<bool, RequestError> {
        if self.prefilled < self.job.request.prompt.len() {
            self.prefill(backend, chunk_tokens)?;
        } else {
            self.decode(backend)?;
        }
        if self.choices.iter().any(Choice::live) {
            return Ok(false);
        }
        let usage = self.usage();
        tracing::info!(
            id = self.id(),
            prompt_tokens = usage.prompt_tokens,
            completion_tokens = usage.completion_tokens,
            seconds = self.started.elapsed().as_secs_f64(),
            "done"
        );
        send(&self.job.events, Event::Done(usage));
        Ok(true)
    }

    fn prefill<B: Backend<Sequence = S>>(&mut self, backend: &mut B, chunk_tokens: usize) -> Result<(), RequestError> {
        let request = &self.job.request;
        let total = request.prompt.len();
        let sequence = match &mut self.prompt {
            Some(sequence) => sequence,
            none => {
                none.insert(backend.open(&request.attention, request.sampling.seed, total, request.question_tokens)?)
            }
        };
        // A method that cannot cut so short may take more than asked for.
        let take = backend.chunk(sequence, chunk_tokens).clamp(1, total - self.prefilled);
        let end = self.prefilled + take;
        let input = Input { sequence, tokens: &request.prompt[self.prefilled..end], logits: end == total };
        let logits = backend.forward(vec![input])?.pop().flatten();
        self.prefilled = end;
        if end == total {
            let logits = logits.ok_or_else(no_logits)?;
            self.begin(backend, &logits)?;
        }
        Ok(())
    }

    /// The prompt is in: every choice samples its first token from the same logits, those that go on get a sequence.
    fn begin<B: Backend<Sequence = S>>(&mut self, backend: &mut B, logits: &[f32]) -> Result<(), RequestError> {
        send(&self.job.events, Event::Prefilled);
        let prompt = self.prompt.as_ref().expect("prefill has just used it");
        for (index, choice) in self.choices.iter_mut().enumerate() {
            if choice.take(logits, &self.job.events)? {
                choice.usage = Some(backend.usage(prompt));
            } else if index > 0 {
                let seed = self.job.request.sampling.seed.wrapping_add(index as u64);
                choice.sequence = Some(backend.fork(prompt, seed)?);
            }
        }
        // The first choice goes on in the prompt's own sequence: n = 1 copies nothing.
        if self.choices[0].live() {
            self.choices[0].sequence = self.prompt.take();
        } else if let Some(prompt) = self.prompt.take() {
            backend.close(prompt);
        }
        Ok(())
    }

    fn decode<B: Backend<Sequence = S>>(&mut self, backend: &mut B) -> Result<(), RequestError> {
        let live: Vec<&mut Choice<S>> = self.choices.iter_mut().filter(|c| c.live()).collect();
        let inputs = live.into_iter().filter_map(|choice| {
            Some(Input {
                sequence: choice.sequence.as_mut()?,
                tokens: std::slice::from_ref(&choice.next),
                logits: true,
            })
        });
        let rows = backend.forward(inputs.collect())?;
        let live = self.choices.iter_mut().filter(|c| c.live());
        for (choice, row) in live.zip(rows) {
            if choice.take(&row.ok_or_else(no_logits)?, &self.job.events)?
                && let Some(sequence) = choice.sequence.take()
            {
                choice.usage = Some(backend.usage(&sequence));
                backend.close(sequence);
            }
        }
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.job.request.prompt.len(),
            cached_tokens: 0,
            completion_tokens: self.choices.iter().map(|c| c.output.generated()).sum(),
            attention: self.choices.iter().filter_map(|c| c.usage.clone()).collect(),
        }
    }

    /// Frees whatever the request still holds.
    pub(crate) fn close<B: Backend<Sequence = S>>(mut self, backend: &mut B) {
        let held = self.choices.iter_mut().filter_map(|choice| choice.sequence.take());
        for sequence in self.prompt.take().into_iter().chain(held) {
            backend.close(sequence);
        }
    }
}

impl<S> Choice<S> {
    /// Samples from the logits and sends what became final; true at the choice's end.
    fn take(&mut self, logits: &[f32], events: &mpsc::Sender<Event>) -> Result<bool, RequestError> {
        self.next = self.sampler.sample(logits).map_err(|_| RequestError::NonFinite)?;
        let Some(delta) = self.output.push(self.next, logits) else {
            return Ok(false);
        };
        let end = delta.finish.is_some();
        send(events, Event::Delta(delta));
        Ok(end)
    }
}

fn no_logits() -> RequestError {
    RequestError::Step("the forward pass returned no logits".into())
}

/// The channel has room for all that a request may send, so it is never full; a closed one is seen before the next
/// step.
fn send(events: &mpsc::Sender<Event>, event: Event) {
    if let Err(mpsc::error::TrySendError::Full(_)) = events.try_send(event) {
        tracing::error!("an event did not fit its channel: a bug");
    }
}
