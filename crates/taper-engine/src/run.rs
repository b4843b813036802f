//! One request from its first prompt token to its last event: what it knows, what of it is cached, what it sends.
//!
//! A request may lose its place in the cache at any time between two steps ([`Run::retract`]) and be computed again from
//! the tokens that it knows; what it sends does not show it.

use crate::backend::{Backend, BackendError, Input, Row, Wanted};
use crate::emit::{Drawn, Output};
use crate::request::{Event, Request, RequestError, Usage};
use crate::sampler::{Sampler, logprobs};
use crate::schedule::{self, Place, Share, Standing};
use crate::text::Text;
use crate::worker::guard;
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

impl Job {
    /// Whether nobody waits for the answer any more.
    pub(crate) fn abandoned(&self) -> bool {
        self.events.is_closed()
    }

    /// Whether it should have been done by now.
    pub(crate) fn late(&self) -> bool {
        self.request.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    /// Blocks for the prompt, and sequences.
    pub(crate) fn wants(&self) -> (usize, usize) {
        let choices = self.request.choices;
        (schedule::wanted(self.request.prompt.len(), std::iter::repeat_n(0, choices)), choices)
    }

    /// Sends the last event of a request that failed.
    pub(crate) fn fail(&self, error: RequestError) {
        send(&self.events, Event::Failed(error));
    }
}

/// A request that is being worked on.
pub(crate) struct Run<S> {
    job: Job,
    /// The prompt's sequence until the choices go on from it, the first time or again.
    prompt: Option<S>,
    choices: Vec<Choice<S>>,
    /// Prompt tokens that came from the cache, where other prompts had left them.
    reused: usize,
    /// Prompt tokens that were in the cache before it lost its place, from wherever.
    known: usize,
    started: Instant,
}

struct Choice<S> {
    sequence: Option<S>,
    sampler: Sampler,
    output: Output,
    tokens: Vec<u32>,
    /// What was drawn after the latest step.
    drawn: Option<Result<Drawn, RequestError>>,
    usage: Option<AttentionUsage>,
}

/// A token to draw for a choice, or to take as it was drawn.
pub(crate) struct Draw<'a> {
    sampler: &'a mut Sampler,
    row: &'a Row,
    logprobs: Option<usize>,
    drawn: &'a mut Option<Result<Drawn, RequestError>>,
}

impl Draw<'_> {
    /// Draws it. Draws know nothing of one another.
    pub(crate) fn draw(&mut self) {
        let mut draw = || match self.row {
            Row::Logits(logits) => {
                let token = self.sampler.sample(logits).map_err(|_| RequestError::NonFinite)?;
                Ok(Drawn { token, logprobs: self.logprobs.map(|top| logprobs(logits, token, top)) })
            }
            Row::Token(token) => {
                let token = token.ok_or(RequestError::NonFinite)?;
                self.sampler.take(token);
                Ok(Drawn { token, logprobs: None })
            }
        };
        *self.drawn = Some(guard(&mut draw));
    }
}

impl<S> Choice<S> {
    fn live(&self) -> bool {
        self.usage.is_none()
    }

    /// What its next token takes.
    fn wants(&self) -> Wanted {
        match (self.sampler.draw(), self.output.logprobs()) {
            (Some(draw), None) => Wanted::Token(draw),
            _ => Wanted::Logits,
        }
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
                tokens: Vec::new(),
                drawn: None,
                usage: None,
            })
            .collect();
        Self { job, prompt: None, choices, reused: 0, known: 0, started: Instant::now() }
    }

    pub(crate) fn job(&self) -> &Job {
        &self.job
    }

    /// The name in the log.
    pub(crate) fn id(&self) -> &str {
        &self.job.request.id
    }

    /// Blocks for what it knows, and sequences.
    pub(crate) fn wants(&self) -> (usize, usize) {
        let live = || self.choices.iter().filter(|choice| choice.live());
        let tokens = live().map(|choice| choice.tokens.len());
        (schedule::wanted(self.job.request.prompt.len(), tokens), live().count())
    }

    /// Whether the choices have their first tokens.
    fn begun(&self) -> bool {
        self.choices.iter().any(|choice| !choice.tokens.is_empty())
    }

    /// Takes its place in the cache, for the first time or after [`retract`](Self::retract).
    pub(crate) fn open<B: Backend<Sequence = S>>(&mut self, backend: &mut B) -> Result<(), RequestError> {
        let request = &self.job.request;
        let fresh =
            backend.open(&request.attention, request.sampling.seed, &request.prompt, request.question_tokens)?;
        let cached = backend.cached(&fresh);
        self.reused += cached.saturating_sub(self.known);
        self.known = self.known.max(cached);
        match &mut self.prompt {
            Some(prompt) => backend.rejoin(vec![prompt], fresh)?,
            None => self.prompt = Some(fresh),
        }
        Ok(())
    }

    /// Gives its place in the cache up.
    pub(crate) fn retract<B: Backend<Sequence = S>>(&mut self, backend: &mut B) {
        if self.begun()
            && let Some(prompt) = self.prompt.take()
        {
            // The prompt came again for the choices, which are retracted already.
            backend.close(prompt);
            return;
        }
        let choices = self.choices.iter_mut().filter_map(|choice| choice.sequence.as_mut());
        for sequence in self.prompt.iter_mut().chain(choices) {
            self.known = self.known.max(backend.cached(sequence).min(self.job.request.prompt.len()));
            backend.retract(sequence);
        }
    }

    /// The sequences that steps go over: of the prompt, or of each choice that goes on.
    fn sequences(&self) -> impl Iterator<Item = (&S, &[u32])> {
        let choices = self.prompt.is_none().then_some(&self.choices);
        let choices = choices.into_iter().flatten().filter_map(|c| Some((c.sequence.as_ref()?, &c.tokens[..])));
        self.prompt.iter().map(|prompt| (prompt, &[][..])).chain(choices)
    }

    /// Where it stands.
    pub(crate) fn standing<B: Backend<Sequence = S>>(&self, backend: &B) -> Standing {
        let prompt = self.job.request.prompt.len();
        let place = |(sequence, tokens): (&S, &[u32])| Place {
            cached: backend.cached(sequence),
            underway: backend.underway(sequence),
            known: prompt + tokens.len(),
        };
        let live = || self.choices.iter().filter(|choice| choice.live() && self.prompt.is_some());
        let answers =
            live().map(|choice| schedule::wanted(prompt + choice.tokens.len(), []) - schedule::wanted(prompt, []));
        Standing { sequences: self.sequences().map(place).collect(), forks: live().count(), again: answers.sum() }
    }

    /// How many tokens the prompt's next chunk has if it should have at most `max`; its method may want more.
    pub(crate) fn cut<B: Backend<Sequence = S>>(&self, backend: &B, max: usize) -> usize {
        self.prompt.as_ref().map_or(0, |prompt| backend.chunk(prompt, max))
    }

    /// What a step takes of it, by sequence: the shares given, which are in order.
    pub(crate) fn inputs<'a, B: Backend<Sequence = S>>(
        &'a mut self,
        backend: &B,
        shares: &[Share],
    ) -> Vec<Input<'a, S>> {
        let begun = self.begun();
        let prompt = &self.job.request.prompt[..];
        // Several choices draw their first tokens from the same logits.
        let first = if let [choice] = &self.choices[..] { choice.wants() } else { Wanted::Logits };
        // Each sequence with the tokens that it knows from some place on, and what it wants after them.
        let all: Vec<(&mut S, &[u32], usize, Wanted)> = match &mut self.prompt {
            Some(sequence) => vec![(sequence, prompt, 0, first)],
            None => {
                let of = |choice: &'a mut Choice<S>| {
                    let wants = choice.wants();
                    Some((choice.sequence.as_mut()?, &choice.tokens[..], prompt.len(), wants))
                };
                self.choices.iter_mut().filter_map(of).collect()
            }
        };
        let mut inputs = Vec::with_capacity(shares.len());
        let mut shares = shares.iter().peekable();
        for (place, (sequence, known, from, wants)) in all.into_iter().enumerate() {
            let Some(share) = shares.next_if(|share| share.sequence == place) else { continue };
            let start = backend.cached(sequence) - from;
            let end = start + share.tokens;
            // A prompt that comes again has been sampled from already.
            let draws = end == known.len() && (from > 0 || !begun);
            let wants = if draws { wants } else { Wanted::Nothing };
            inputs.push(Input { sequence, tokens: &known[start..end], effort: share.effort, wants });
        }
        inputs
    }

    /// What is to be drawn after a step from the rows of its inputs.
    pub(crate) fn draws<'a, B: Backend<Sequence = S>>(
        &'a mut self,
        backend: &B,
        shares: &[Share],
        rows: &'a [Option<Row>],
    ) -> Vec<Draw<'a>> {
        let begun = self.begun();
        let draw = |choice: &'a mut Choice<S>, row: &'a Row| {
            let Choice { sampler, output, drawn, .. } = choice;
            Draw { sampler, row, logprobs: output.logprobs(), drawn }
        };
        if let Some(prompt) = &self.prompt {
            // Once it is in, every choice draws its first token from the same logits.
            let whole = !begun && backend.cached(prompt) == self.job.request.prompt.len();
            let Some(row) = rows.first().and_then(Option::as_ref).filter(|_| whole) else { return Vec::new() };
            return self.choices.iter_mut().map(|choice| draw(choice, row)).collect();
        }
        let running = self.choices.iter_mut().filter(|choice| choice.sequence.is_some());
        let mut rows = shares.iter().zip(rows).peekable();
        let own = |(place, choice)| {
            let (share, row) = rows.next_if(|(share, _)| share.sequence == place)?;
            match row {
                Some(row) => Some(draw(choice, row)),
                // Tokens that came again, with more to come, or a step that did not do what it was asked for.
                None => {
                    choice.drawn = share.generates.then(|| Err(nothing()));
                    None
                }
            }
        };
        running.enumerate().filter_map(own).collect()
    }

    /// Goes on after a step with what was drawn; true once the last event is sent.
    pub(crate) fn advance<B: Backend<Sequence = S>>(&mut self, backend: &mut B) -> Result<bool, RequestError> {
        if let Some(prompt) = &self.prompt {
            if backend.cached(prompt) < self.job.request.prompt.len() {
                return Ok(false);
            }
            if self.begun() { self.rejoin(backend)? } else { self.begin(backend)? }
        } else {
            for choice in self.choices.iter_mut().filter(|choice| choice.drawn.is_some()) {
                if choice.take(&self.job.events)?
                    && let Some(sequence) = choice.sequence.take()
                {
                    choice.usage = Some(backend.usage(&sequence));
                    backend.close(sequence);
                }
            }
        }
        if self.choices.iter().any(Choice::live) {
            return Ok(false);
        }
        let usage = self.usage();
        tracing::info!(
            id = self.id(),
            prompt_tokens = usage.prompt_tokens,
            cached_tokens = usage.cached_tokens,
            completion_tokens = usage.completion_tokens,
            seconds = self.started.elapsed().as_secs_f64(),
            "done"
        );
        send(&self.job.events, Event::Done(usage));
        Ok(true)
    }

    /// The prompt is in: every choice takes its first token, those that go on get a sequence.
    fn begin<B: Backend<Sequence = S>>(&mut self, backend: &mut B) -> Result<(), RequestError> {
        send(&self.job.events, Event::Prefilled);
        let prompt = self.prompt.as_ref().expect("a step has just used it");
        for (index, choice) in self.choices.iter_mut().enumerate() {
            if choice.take(&self.job.events)? {
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

    /// The prompt is in again: the choices that had begun go on from it.
    fn rejoin<B: Backend<Sequence = S>>(&mut self, backend: &mut B) -> Result<(), RequestError> {
        if let Some(prompt) = self.prompt.take() {
            backend.rejoin(self.choices.iter_mut().filter_map(|choice| choice.sequence.as_mut()).collect(), prompt)?;
        }
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.job.request.prompt.len(),
            cached_tokens: self.reused,
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
    /// Takes what was drawn and sends what became final; true at the choice's end.
    fn take(&mut self, events: &mpsc::Sender<Event>) -> Result<bool, RequestError> {
        let drawn = self.drawn.take().ok_or_else(nothing)??;
        self.tokens.push(drawn.token);
        let Some(delta) = self.output.push(drawn) else {
            return Ok(false);
        };
        let end = delta.finish.is_some();
        send(events, Event::Delta(delta));
        Ok(end)
    }
}

fn nothing() -> RequestError {
    RequestError::Step("the forward pass returned no logits".into())
}

/// The channel has room for all that a request may send, so it is never full; a closed one is seen before the next
/// step.
fn send(events: &mpsc::Sender<Event>, event: Event) {
    if let Err(mpsc::error::TrySendError::Full(_)) = events.try_send(event) {
        tracing::error!("an event did not fit its channel: a bug");
    }
}
