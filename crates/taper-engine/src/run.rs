//! One request from its first prompt token to its last event: what it knows, what of it is cached, what it sends.
//!
//! A request may lose its place in the cache at any time between two steps ([`Run::retract`]) and be computed again from
//! the tokens that it knows; what it sends does not show it.

use crate::backend::{Backend, BackendError, CheckedDrafts, Input, Row, Wanted};
use crate::drafts::{Drafts, look_up};
use crate::emit::{Drawn, Output};
use crate::engine::Counts;
use crate::job::{Job, send};
use crate::request::{Delta, Event, Finish, Request, RequestError, Scored, StopRules, Times, Usage};
use crate::sampler::{Sampler, logprobs};
use crate::schedule::{self, Place, Share, Standing};
use crate::text::Text;
use crate::worker::guard;
use std::sync::Arc;
use std::time::Instant;
use taper_attention::{AttentionUsage, Drafting};
use taper_kernels::token;
use tokio::sync::mpsc;

/// A request that is being worked on.
pub(crate) struct Run<S> {
    job: Arc<Job>,
    /// The prompt's sequence until the choices go on from it, the first time or again.
    prompt: Option<S>,
    choices: Vec<Choice<S>>,
    /// Prompt tokens that came from the cache, where other prompts had left them.
    reused: usize,
    /// Prompt tokens that were in the cache before it lost its place, from wherever.
    known: usize,
    started: Instant,
    /// When the first token was drawn.
    first: Option<Instant>,
    /// What the model makes of the prompt, where no answer is wanted.
    hidden: Option<Vec<f32>>,
    /// Log probabilities of the prompt's tokens from the second on, as far as they are known and wanted.
    scored: Vec<Scored>,
}

struct Choice<S> {
    sequence: Option<S>,
    sampler: Sampler,
    output: Output,
    /// The answer's tokens, and after them those drafted.
    tokens: Vec<u32>,
    drafts: Drafts,
    /// What was drawn after the latest step.
    drawn: Vec<Result<Drawn, RequestError>>,
    usage: Option<AttentionUsage>,
}

/// Tokens to draw for a choice, or to take as they were drawn: one, and more as long as they are what was guessed.
pub(crate) struct Draw<'a> {
    sampler: &'a mut Sampler,
    rows: &'a [Row],
    guesses: &'a [u32],
    logprobs: Option<usize>,
    drawn: &'a mut Vec<Result<Drawn, RequestError>>,
}

impl Draw<'_> {
    /// Draws them. Draws of several choices know nothing of one another.
    pub(crate) fn draw(&mut self) {
        if self.rows.is_empty() {
            self.drawn.push(Err(RequestError::Step("the forward pass returned no logits".into())));
        }
        for (place, row) in self.rows.iter().enumerate() {
            let drawn = guard(|| self.next(row));
            let right = |drawn: &Drawn| self.guesses.get(place) == Some(&drawn.token) && !drawn.last;
            let guessed = drawn.as_ref().is_ok_and(right);
            self.drawn.push(drawn);
            if !guessed {
                return;
            }
        }
    }

    fn next(&mut self, row: &Row) -> Result<Drawn, RequestError> {
        match row {
            Row::Logits(logits) => {
                let token = self.sampler.sample(logits)?;
                let logprobs = self.logprobs.map(|top| logprobs(logits, token, top));
                Ok(Drawn { token, logprobs, last: self.sampler.done() })
            }
            Row::Hidden(_) | Row::Score(_) => {
                Err(RequestError::Step("the forward pass returned no logits: a bug".into()))
            }
            Row::Token(token) => {
                let token = token.ok_or(RequestError::NonFinite)?;
                self.sampler.take(token);
                Ok(Drawn { token, logprobs: None, last: false })
            }
        }
    }
}

/// What draws one choice's tokens.
fn sampler(request: &Request, choice: usize, text: &dyn Text) -> Sampler {
    let StopRules { tokens, min_tokens, .. } = &request.stop;
    let mut sampler = Sampler::new(request.sampling.clone(), choice, &request.prompt);
    if *min_tokens > 0 {
        sampler = sampler.at_least(*min_tokens, [text.eos(), tokens].concat());
    }
    match &request.grammar {
        // The first choice has the request's own.
        Some(grammar) => sampler.within(if choice == 0 { grammar.clone() } else { grammar.apart() }),
        None => sampler,
    }
}

impl<S> Choice<S> {
    fn live(&self) -> bool {
        self.usage.is_none()
    }

    /// What its next tokens take: one, or all that may be drawn where drafts are checked.
    fn wants(&self) -> Vec<Wanted> {
        let (sampler, count) = match &self.drafts.sampler {
            Some(sampler) if self.drafts.growing() => (sampler, 1),
            _ => (&self.sampler, self.drafts.made + 1),
        };
        match (sampler.draws(count), self.output.logprobs()) {
            (Some(draws), None) => draws.into_iter().map(Wanted::Token).collect(),
            _ => vec![Wanted::Logits; count],
        }
    }

    /// How the token after the next is drawn, where the answer has one and nothing but its logits decides.
    fn next(&self) -> Option<token::Draw> {
        let plain = self.output.left() > 1 && self.output.logprobs().is_none();
        if plain { self.sampler.draws(2)?.pop() } else { None }
    }

    /// Tokens of the answer, without drafts.
    fn answered(&self) -> usize {
        self.tokens.len() - self.drafts.made
    }

    /// Forgets what was drafted: the next token comes without.
    fn forget(&mut self) {
        self.tokens.truncate(self.answered());
        self.drafts = Drafts::default();
    }

    /// Forgets what was drafted; others come before the next check, fewer at the answer's end.
    fn draft(&mut self, drafting: Drafting, prompt: &[u32]) {
        self.forget();
        let most = drafting.tokens.min(self.output.left().saturating_sub(1));
        let found = match drafting.lookup {
            0 => Vec::new(),
            least => look_up((prompt, &self.tokens), least, most),
        };
        if !found.is_empty() {
            self.drafts = Drafts { wanted: found.len(), made: found.len(), looked_up: true, sampler: None };
            self.tokens.extend(found);
        } else if drafting.by_method && most > 0 {
            self.drafts = Drafts { wanted: most, sampler: Some(self.sampler.for_drafts()), ..Drafts::default() };
        }
    }
}

impl From<BackendError> for RequestError {
    fn from(error: BackendError) -> Self {
        Self::Step(error.0)
    }
}

impl<S> Run<S> {
    pub(crate) fn new(job: Arc<Job>, text: &dyn Text) -> Self {
        let request = &job.request;
        let choices = (0..request.choices)
            .map(|index| Choice {
                sequence: None,
                sampler: sampler(request, index, text),
                output: Output::new(index, text, request, job.max_tokens),
                tokens: Vec::new(),
                drafts: Drafts::default(),
                drawn: Vec::new(),
                usage: None,
            })
            .collect();
        let (prompt, reused, known, first, hidden, scored) = Default::default();
        Self { job, prompt, choices, reused, known, started: Instant::now(), first, hidden, scored }
    }

    pub(crate) fn job(&self) -> &Job {
        &self.job
    }

    /// The name in the log.
    pub(crate) fn id(&self) -> &str {
        &self.job.request.id
    }

    /// Those with less of it go before those with more.
    pub(crate) fn priority(&self) -> i64 {
        self.job.request.priority
    }

    /// Blocks for what it knows, and sequences.
    pub(crate) fn wants(&self) -> (usize, usize) {
        let live = || self.choices.iter().filter(|choice| choice.live());
        let tokens = live().map(Choice::answered);
        (schedule::wanted(self.job.request.prompt.len(), tokens), live().count())
    }

    /// Whether the choices have their first tokens.
    fn begun(&self) -> bool {
        self.choices.iter().any(|choice| !choice.tokens.is_empty())
    }

    /// Takes its place in the cache, for the first time or after [`retract`](Self::retract).
    pub(crate) fn open<B: Backend<Sequence = S>>(&mut self, backend: &mut B) -> Result<(), RequestError> {
        let Request { attention, prompt, question_tokens, sampling, .. } = &self.job.request;
        let mut fresh = backend.open(attention, sampling.seed, prompt, *question_tokens)?;
        // What is cached is not scored; what comes again is not scored again.
        if !self.job.scores() || self.begun() {
            let beginning = self.job.beginning(backend);
            backend.reuse(&mut fresh, beginning);
        }
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
        let prompt = self.job.request.prompt.len();
        for choice in self.choices.iter_mut().filter(|choice| choice.live()) {
            // What was drafted is not what comes again. Whether or not there is room to cut it off, all blocks go.
            choice.forget();
            let _ = choice.rewind(backend, prompt);
        }
        let choices = self.choices.iter_mut().filter_map(|choice| choice.sequence.as_mut());
        for sequence in self.prompt.iter_mut().chain(choices) {
            self.known = self.known.max(backend.cached(sequence).min(self.job.request.prompt.len()));
            backend.retract(sequence);
        }
    }

    /// Prompt tokens that are not in yet; none once they are.
    pub(crate) fn left<B: Backend<Sequence = S>>(&self, backend: &B) -> Option<usize> {
        self.prompt.as_ref().map(|prompt| self.job.request.prompt.len() - backend.cached(prompt))
    }

    /// Whether a waiting job has more to take over once this one's prompt is in.
    pub(crate) fn leads<B: Backend<Sequence = S>>(&self, job: &Job, backend: &B) -> bool {
        let gains = |prompt| Some(backend.gains(job.shared()?, self.job.shared()?, backend.cached(prompt)));
        self.prompt.as_ref().and_then(gains).unwrap_or(false)
    }

    /// The sequences that steps go over: of the prompt, or of each choice that goes on.
    fn sequences(&self) -> impl Iterator<Item = (&S, Option<&Choice<S>>)> {
        let choices = self.prompt.is_none().then_some(&self.choices);
        let choices = choices.into_iter().flatten().filter_map(|c| Some((c.sequence.as_ref()?, Some(c))));
        self.prompt.iter().map(|prompt| (prompt, None)).chain(choices)
    }

    /// Where it stands.
    pub(crate) fn standing<B: Backend<Sequence = S>>(&self, backend: &B) -> Standing {
        let prompt = self.job.request.prompt.len();
        let place = |(sequence, choice): (&S, Option<&Choice<S>>)| Place {
            cached: backend.cached(sequence),
            underway: backend.underway(sequence),
            known: prompt + choice.map_or(0, |choice| choice.tokens.len()),
            takes: choice.filter(|choice| !choice.drafts.growing()).map_or(0, |choice| choice.drafts.made) + 1,
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
        let Request { prompt, prompt_logprobs, .. } = &self.job.request;
        let (prompt, begun) = (&prompt[..], self.begun());
        // What is wanted once all that is known, from some place on, is in.
        let input =
            |share: &Share, sequence: &'a mut S, (known, from): (&'a [u32], usize), wants: Vec<Wanted>, drafts| {
                let start = backend.cached(sequence) - from;
                let tokens = &known[start..start + share.tokens];
                let wants = if start + share.tokens == known.len() { wants } else { Vec::new() };
                backend.draft(sequence, drafts && !wants.is_empty());
                Input { sequence, tokens, effort: share.effort, wants, next: None }
            };
        let wants = match &self.choices[..] {
            // A prompt that comes again has been drawn from already.
            _ if begun => Vec::new(),
            _ if self.job.max_tokens == 0 => vec![Wanted::Hidden],
            [choice] => choice.wants(),
            // Several choices draw their first tokens from the same logits.
            _ => vec![Wanted::Logits],
        };
        if let Some(sequence) = &mut self.prompt {
            let (start, scored) = (backend.cached(sequence), self.scored.len());
            // What comes again was told.
            let scores = prompt_logprobs.filter(|_| !begun);
            let score = |share: &Share, mut input: Input<'a, S>| {
                if let Some(top) = scores {
                    let next = start.max(scored) + 1..(start + share.tokens + 1).min(prompt.len());
                    let next = prompt.get(next).unwrap_or_default();
                    input.wants.splice(..0, next.iter().map(|&token| Wanted::Score { token, top }));
                }
                input
            };
            let input = |share| score(share, input(share, sequence, (prompt, 0), wants, false));
            return shares.first().map(input).into_iter().collect();
        }
        let guesses = self.job.request.attention.drafting().tokens > 0;
        let mut shares = shares.iter().peekable();
        let running = self.choices.iter_mut().filter(|choice| choice.sequence.is_some()).enumerate();
        let own = |(place, choice): (usize, &'a mut Choice<S>)| {
            let share = shares.next_if(|share| share.sequence == place)?;
            let (wants, drafts) = (choice.wants(), choice.drafts.growing());
            // Tokens of which some are guessed end nobody knows where.
            let next = if guesses { None } else { choice.next() };
            let input = input(share, choice.sequence.as_mut()?, (&choice.tokens, prompt.len()), wants, drafts);
            Some(Input { next, ..input })
        };
        running.filter_map(own).collect()
    }

    /// What is to be drawn after a step from the rows of its inputs.
    pub(crate) fn draws<'a, B: Backend<Sequence = S>>(
        &'a mut self,
        backend: &B,
        shares: &[Share],
        rows: &'a [Vec<Row>],
    ) -> Vec<Draw<'a>> {
        let begun = self.begun();
        let draw = |choice: &'a mut Choice<S>, rows: &'a [Row]| {
            let Choice { sampler, output, tokens, drafts, drawn, .. } = choice;
            let (guesses, logprobs) = (&tokens[tokens.len() - drafts.made..], output.logprobs());
            let growing = drafts.growing();
            match &mut drafts.sampler {
                Some(sampler) if growing => Draw { sampler, rows, guesses: &[], logprobs: None, drawn },
                _ => Draw { sampler, rows, guesses, logprobs, drawn },
            }
        };
        if let Some(prompt) = &self.prompt {
            let Some(rows) = rows.first() else { return Vec::new() };
            let score = |row: &Row| if let Row::Score(scored) = row { Some(scored.clone()) } else { None };
            self.scored.extend(rows.iter().map_while(score));
            // Once it is in, every choice draws its first token from the same logits.
            if begun || backend.cached(prompt) < self.job.request.prompt.len() {
                return Vec::new();
            }
            let rows = &rows[rows.len().saturating_sub(1)..];
            if let [Row::Hidden(hidden)] = rows {
                self.hidden = Some(hidden.clone());
                return Vec::new();
            }
            return self.choices.iter_mut().map(|choice| draw(choice, rows)).collect();
        }
        let running = self.choices.iter_mut().filter(|choice| choice.sequence.is_some());
        let mut rows = shares.iter().zip(rows).peekable();
        let own = |(place, choice)| {
            let (share, rows) = rows.next_if(|(share, _)| share.sequence == place)?;
            // Tokens that came again have nothing after them.
            share.generates.then(|| draw(choice, rows))
        };
        running.enumerate().filter_map(own).collect()
    }

    /// Goes on after a step with what was drawn; true once the last event is sent.
    pub(crate) fn advance<B: Backend<Sequence = S>>(&mut self, backend: &mut B) -> Result<bool, RequestError> {
        if let Some(prompt) = &self.prompt {
            if backend.cached(prompt) < self.job.request.prompt.len() {
                return Ok(false);
            }
            match self.hidden.take() {
                Some(hidden) => self.end(backend, hidden)?,
                None if self.begun() => self.rejoin(backend)?,
                None => self.begin(backend)?,
            }
        } else {
            let Request { attention, prompt, .. } = &self.job.request;
            for choice in self.choices.iter_mut().filter(|choice| !choice.drawn.is_empty()) {
                choice.advance(backend, &self.job.events, (prompt, attention.drafting()))?;
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
        self.job.end(Event::Done(usage));
        Ok(true)
    }

    /// The prompt is in: every choice takes its first token, those that go on get a sequence.
    fn begin<B: Backend<Sequence = S>>(&mut self, backend: &mut B) -> Result<(), RequestError> {
        self.first = Some(Instant::now());
        self.tell_prompt()?;
        let prompt = self.prompt.as_ref().expect("a step has just used it");
        for (index, choice) in self.choices.iter_mut().enumerate() {
            if choice.take(&self.job.events)? {
                choice.usage = Some(backend.usage(prompt));
                continue;
            }
            choice.draft(self.job.request.attention.drafting(), &self.job.request.prompt);
            if index > 0 {
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

    /// The prompt is in, and nothing more is wanted than what became of it.
    fn end<B: Backend<Sequence = S>>(&mut self, backend: &B, hidden: Vec<f32>) -> Result<(), RequestError> {
        if hidden.iter().any(|x| !x.is_finite()) {
            return Err(RequestError::NonFinite);
        }
        self.first = Some(Instant::now());
        self.tell_prompt()?;
        let prompt = self.prompt.as_ref().expect("a step has just used it");
        self.choices.iter_mut().for_each(|choice| choice.usage = Some(backend.usage(prompt)));
        if self.job.request.embeds {
            send(&self.job.events, Event::Embedding(hidden));
            return Ok(());
        }
        for choice in 0..self.choices.len() {
            let (text, tokens, finish) = (String::new(), Vec::new(), Some(Finish::Length));
            send(&self.job.events, Event::Delta(Delta { choice, text, tokens, finish }));
        }
        Ok(())
    }

    /// Says that the prompt is in, and its tokens' log probabilities where they are wanted.
    fn tell_prompt(&mut self) -> Result<(), RequestError> {
        send(&self.job.events, Event::Prefilled);
        if self.job.request.prompt_logprobs.is_none() {
            return Ok(());
        }
        let scored = std::mem::take(&mut self.scored);
        if scored.iter().any(|(token, _)| !token.logprob.is_finite()) {
            return Err(RequestError::NonFinite);
        }
        if scored.len() + 1 != self.job.request.prompt.len() {
            return Err(RequestError::Step("some of the prompt's tokens were not scored: a bug".into()));
        }
        send(&self.job.events, Event::Prompt(scored));
        Ok(())
    }

    /// The prompt is in again: the choices that had begun go on from it.
    fn rejoin<B: Backend<Sequence = S>>(&mut self, backend: &mut B) -> Result<(), RequestError> {
        if let Some(prompt) = self.prompt.take() {
            backend.rejoin(self.choices.iter_mut().filter_map(|choice| choice.sequence.as_mut()).collect(), prompt)?;
        }
        Ok(())
    }

    /// What was done for it so far.
    pub(crate) fn counts(&self) -> Counts {
        let of_prompt = |tokens: usize| if self.first.is_some() { tokens as u64 } else { 0 };
        Counts {
            preemptions: 0,
            prompt_tokens: of_prompt(self.job.request.prompt.len()),
            cached_tokens: of_prompt(self.reused),
            generated_tokens: self.choices.iter().map(|choice| choice.output.generated() as u64).sum(),
        }
    }

    fn usage(&self) -> Usage {
        let (began, now) = (self.started, Instant::now());
        let first = self.first.unwrap_or(now);
        let seed = self.job.request.sampling.seed;
        let times = Times { queued: began - self.job.submitted, prefill: first - began, decode: now - first };
        Usage {
            times,
            prompt_tokens: self.job.request.prompt.len(),
            cached_tokens: self.reused,
            completion_tokens: self.choices.iter().map(|c| c.output.generated()).sum(),
            // Later choices' attention draws by numbers of their own, which follow from the request's.
            attention: self.choices.iter().filter_map(|c| Some(c.usage.clone()?.with_seed(seed))).collect(),
        }
    }

    /// Frees whatever the request still holds, which others may go on from if it is `sound`.
    pub(crate) fn close<B: Backend<Sequence = S>>(mut self, backend: &mut B, sound: bool) {
        let held = self.choices.iter_mut().filter_map(|choice| choice.sequence.take());
        for sequence in self.prompt.take().into_iter().chain(held) {
            if sound { backend.close(sequence) } else { backend.discard(sequence) }
        }
    }
}

impl<S> Choice<S> {
    /// Goes on after a step with what was drawn. Drafts come from where it says, the prompt's text among that.
    fn advance<B: Backend<Sequence = S>>(
        &mut self,
        backend: &mut B,
        events: &mpsc::Sender<Event>,
        (prompt, drafting): (&[u32], Drafting),
    ) -> Result<(), RequestError> {
        let Drafts { made, looked_up, .. } = self.drafts;
        if self.drafts.growing() {
            match self.drawn.pop() {
                Some(Ok(drawn)) => {
                    self.tokens.push(drawn.token);
                    self.drafts.made += 1;
                }
                // No guess; the check goes without.
                _ => self.drafts.wanted = made,
            }
            if self.drafts.growing() {
                return Ok(());
            }
        } else {
            let (right, before) = (self.drawn.len().saturating_sub(1), self.output.generated());
            let end = self.take(events)?;
            // An answer may end among them.
            let right = right.min(self.output.generated() - before);
            let Some(sequence) = &mut self.sequence else { return Ok(()) };
            backend.drafted(sequence, CheckedDrafts { made, right, looked_up });
            if end {
                // What was tried beyond the answer's end is none of what its attention did; a whole answer does not fail for it.
                let _ = self.rewind(backend, prompt.len());
                if let Some(sequence) = self.sequence.take() {
                    self.usage = Some(backend.usage(&sequence));
                    backend.close(sequence);
                }
                return Ok(());
            }
            self.draft(drafting, prompt);
        }
        self.rewind(backend, prompt.len())
    }

    /// Has the answer's last token come into the cache next, whatever was tried after it.
    fn rewind<B: Backend<Sequence = S>>(&mut self, backend: &mut B, prompt: usize) -> Result<(), RequestError> {
        let answered = self.answered();
        let Some(sequence) = &mut self.sequence else { return Ok(()) };
        let cached = prompt + answered - 1;
        if backend.cached(sequence) > cached {
            backend.truncate(sequence, cached)?;
        }
        Ok(())
    }

    /// Takes what was drawn in place of what was drafted and sends what became final; true at the choice's end.
    fn take(&mut self, events: &mpsc::Sender<Event>) -> Result<bool, RequestError> {
        self.forget();
        for drawn in self.drawn.drain(..) {
            let drawn = drawn?;
            self.tokens.push(drawn.token);
            let Some(delta) = self.output.push(drawn) else { continue };
            let end = delta.finish.is_some();
            send(events, Event::Delta(delta));
            if end {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
