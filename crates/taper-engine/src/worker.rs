//! The step loop: who runs, what the next step does, who gets its rows.
//!
//! One turn of [`Worker::turn`] lets go of requests that nobody waits for, starts those that there is room for, asks
//! [`schedule::plan`] what to do, and does it. A step that fails is tried again one request at a time, so that only the
//! request at fault ends.

use crate::backend::{Backend, Input, Row, lacks_memory};
use crate::engine::{Counts, EngineConfig};
use crate::job::Job;
use crate::pace::Pace;
use crate::passes::Passes;
use crate::queue::{Next, Queue};
use crate::request::RequestError;
use crate::run::{Draw, Run};
use crate::schedule::{self, Budget, Decision, Place, Share, Standing};
use crate::text::Text;
use rayon::prelude::*;
use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

/// The thread's state.
pub(crate) struct Worker<B: Backend> {
    backend: B,
    queue: Arc<Queue<Arc<Job>>>,
    text: Arc<dyn Text>,
    config: EngineConfig,
    pace: Pace,
    passes: Passes,
    /// Requests that run, the urgent and then the oldest first. All go before those that were preempted.
    running: Vec<Run<B::Sequence>>,
    /// Requests that ran and gave their place up, in the same order.
    preempted: VecDeque<Run<B::Sequence>>,
    /// Requests that ended in this turn.
    ended: usize,
    /// Whether one of them failed by what may be the backend's fault.
    failed: bool,
}

/// What inputs wanted, in order.
type Rows = Vec<Vec<Row>>;

/// The same of all inputs of a step that was done; those whose rows are not what was wanted cannot go on.
type Counted = Vec<Result<Vec<Row>, RequestError>>;

/// The rows of inputs that wanted so many; an input that is not through has none.
fn counted(rows: Rows, wanted: &[usize]) -> Counted {
    if rows.len() != wanted.len() {
        let error = RequestError::Rows { got: rows.len(), wanted: wanted.len() };
        return vec![Err(error); wanted.len()];
    }
    let count = |(rows, &wanted): (Vec<Row>, &usize)| match rows.len() {
        got if got == wanted || got == 0 => Ok(rows),
        got => Err(RequestError::Rows { got, wanted }),
    };
    rows.into_iter().zip(wanted).map(count).collect()
}

impl<B: Backend> Worker<B> {
    pub(crate) fn new(backend: B, queue: Arc<Queue<Arc<Job>>>, text: Arc<dyn Text>, config: EngineConfig) -> Self {
        let (pace, passes, running, preempted, ended, failed) = Default::default();
        Self { backend, queue, text, config, pace, passes, running, preempted, ended, failed }
    }

    /// Works until the queue drains and all is done, or the backend is dead. `ready` learns whether the backend could be warmed
    /// up; if not, that is all.
    pub(crate) fn work(mut self, ready: Sender<Result<(), RequestError>>) {
        // Whatever ends this thread, callers must learn of it.
        struct Last(Arc<Queue<Arc<Job>>>);
        impl Drop for Last {
            fn drop(&mut self) {
                drop(self.0.die());
            }
        }
        let _last = Last(Arc::clone(&self.queue));
        let tried = guard(|| Ok(self.backend.warm_up()?));
        self.queue.set_blocks(self.backend.free_blocks(), self.backend.offloaded_blocks());
        let failed = tried.is_err();
        // Whoever started this thread waits for it.
        if ready.send(tried).is_err() || failed {
            return;
        }
        drop(ready);
        loop {
            if self.running.is_empty() && self.preempted.is_empty() {
                let Some(job) = self.queue.pop() else { return };
                self.queue.turn(true);
                self.begin(job);
            } else {
                self.queue.turn(true);
            }
            let turned = guard(|| {
                self.turn();
                Ok(())
            });
            // What is not one request's fault ends those that run; the engine goes on.
            if let Err(error) = turned {
                tracing::error!(%error, "a turn of the engine failed: a bug");
                self.fail_all(&error);
            }
            if std::mem::take(&mut self.failed)
                && let Some(error) = self.dead()
            {
                tracing::error!(%error, "the backend is dead, and the engine ends");
                self.fail_all(&error);
                self.queue.die().iter().for_each(|job| job.fail(error.clone()));
                return;
            }
            self.queue.turn(false);
        }
    }

    /// One turn of the loop, with at least one request at hand.
    fn turn(&mut self) {
        self.let_go();
        debug_assert!(self.running.iter().chain(&self.preempted).is_sorted_by_key(|run| run.priority()));
        let mut standing = self.running.iter().map(|run| run.standing(&self.backend)).collect();
        self.admit(&mut standing);
        if let Some(shares) = self.decide(standing) {
            self.step(&shares);
        }
        if self.running.is_empty() && self.preempted.is_empty() && self.queue.is_empty() {
            self.check();
        }
        self.count_ended();
    }

    /// Why no step can succeed any more, if that is so.
    fn dead(&mut self) -> Option<RequestError> {
        let dead = guard(|| Ok(self.backend.check_alive().err().map(|error| error.0)));
        dead.unwrap_or_else(|panic| Some(panic.to_string())).map(RequestError::Stopped)
    }

    /// Ends all that were started.
    fn fail_all(&mut self, error: &RequestError) {
        let runs: Vec<_> = self.running.drain(..).chain(self.preempted.drain(..)).collect();
        runs.into_iter().for_each(|run| self.fail(run, error.clone()));
        self.count_ended();
    }

    /// Tells the queue of those that ended, and what the cache has free.
    fn count_ended(&mut self) {
        self.queue.set_blocks(self.backend.free_blocks(), self.backend.offloaded_blocks());
        self.queue.set_preempted(self.preempted.len());
        (0..std::mem::take(&mut self.ended)).for_each(|_| self.queue.finished());
    }

    /// Ends requests that nobody waits for any more, or that are late.
    fn let_go(&mut self) {
        let over = |job: &Job| job.abandoned() || job.late();
        for job in self.queue.remove(|job: &Arc<Job>| over(job)) {
            end(&job);
        }
        let mut at = 0;
        while at < self.running.len() {
            if over(self.running[at].job()) {
                let run = self.running.remove(at);
                end(run.job());
                self.close(run, true);
            } else {
                at += 1;
            }
        }
        let (gone, stay) = self.preempted.drain(..).partition(|run| over(run.job()));
        self.preempted = stay;
        for run in Vec::from(gone) {
            end(run.job());
            self.close(run, true);
        }
    }

    /// Starts what there is room for beside those that run: what in the queue is more urgent than all that ran before, then
    /// those, then the queue. A prompt that begins like one that is on its way waits until that is in as far as they are the
    /// same, and others go before it.
    fn admit(&mut self, standing: &mut Vec<Standing>) {
        loop {
            let any = schedule::admits(standing, self.backend.free_blocks(), self.config.sequences, (0, 1));
            // Not under the queue's lock, on which those wait who have more: it takes a while, the first time.
            let looked_at = if any { self.queue.first() } else { Vec::new() };
            let shares = looked_at.iter().filter(|job| !job.scores());
            shares.for_each(|job| drop(guard(|| Ok(job.beginning(&self.backend)))));
            let fits = |(blocks, sequences), job: &Job| {
                let free = self.backend.free_blocks();
                let admits = |blocks| schedule::admits(standing, free, self.config.sequences, (blocks, sequences));
                // What others hold already takes no room. To look for it takes time.
                let shared = |beginning| guard(|| Ok(self.backend.shared_blocks(beginning))).unwrap_or(0);
                admits(blocks) || admits(0) && admits(blocks.saturating_sub(job.shared().map_or(0, shared)))
            };
            let before = self.preempted.front().map(Run::priority);
            let waits = |job: &Job| before.is_some_and(|before| before <= job.request.priority);
            // What one that runs is about to compute is not computed twice; nor is what has come since looked at yet.
            let late = Cell::new(false);
            let held = |job: &Arc<Job>| {
                let seen = looked_at.iter().any(|seen| Arc::ptr_eq(seen, job));
                late.set(late.get() || !seen);
                !seen || waits(job) || guard(|| Ok(self.held(job))).unwrap_or(false)
            };
            let next = if any { self.queue.pop_if(held, |job| fits(job.wants(), job)) } else { Next::None };
            let again = || self.preempted.front().is_some_and(|run| fits(run.wants(), run.job()));
            let place = match next {
                Next::Job(job) => self.begin(job),
                Next::None | Next::Waits if late.get() => continue,
                Next::None if again() => self.preempted.pop_front().and_then(|run| self.start(run)),
                Next::None | Next::Waits => return,
            };
            if let Some(place) = place {
                standing.insert(place, self.running[place].standing(&self.backend));
            }
        }
    }

    /// Whether a prompt had better wait for one that runs and begins like it: for the oldest, or for one that is in no later
    /// than it would be itself. It waits for none that is less urgent, which others may go before.
    fn held(&self, job: &Job) -> bool {
        let urgent = self.running.iter().filter(|run| run.priority() <= job.request.priority);
        let mut in_prompt = urgent.filter_map(|run| Some((run, run.left(&self.backend)?)));
        let oldest = in_prompt.next();
        let soon = in_prompt.filter(|(_, left)| *left <= job.request.prompt.len());
        oldest.into_iter().chain(soon).any(|(run, _)| run.leads(job, &self.backend))
    }

    /// Starts what comes from the queue; its place among those that run, if it can.
    fn begin(&mut self, job: Arc<Job>) -> Option<usize> {
        match guard(|| Ok(Run::new(Arc::clone(&job), &*self.text))) {
            Ok(run) => self.start(run),
            Err(error) => {
                tracing::error!(%error, "a request could not begin: a bug");
                job.fail(error);
                self.ended += 1;
                None
            }
        }
    }

    fn start(&mut self, mut run: Run<B::Sequence>) -> Option<usize> {
        if let Err(error) = guard(|| run.open(&mut self.backend)) {
            self.fail(run, error);
            return None;
        }
        let place = self.running.partition_point(|other| other.priority() <= run.priority());
        self.running.insert(place, run);
        Some(place)
    }

    /// What the next step does with those that run, once there is room for it; none if nothing runs.
    fn decide(&mut self, mut standing: Vec<Standing>) -> Option<Vec<Share>> {
        while !self.running.is_empty() {
            let rows = standing.iter().map(Standing::rows).sum();
            let most = self.pace.alone_tokens(self.config.chunk_tokens.max(1));
            let budget = Budget {
                alone: most,
                beside: self.pace.prompt_tokens(rows, self.config.stretch, most),
                blocks: self.backend.free_blocks(),
            };
            // A method that panics here fails in the step, where its request alone is at fault.
            let cut = |request: usize, max| guard(|| Ok(self.running[request].cut(&self.backend, max))).unwrap_or(max);
            match schedule::plan(&standing, budget, cut) {
                Decision::Step(shares) => return Some(shares),
                Decision::Preempt => {
                    standing.pop();
                    let mut run = self.running.pop()?;
                    if self.running.is_empty() {
                        let error = RequestError::Step("the KV cache has no room for the request alone: a bug".into());
                        self.fail(run, error);
                        return None;
                    }
                    tracing::info!(id = run.id(), "preempted: its place in the KV cache is needed");
                    self.queue.count(Counts { preemptions: 1, ..Counts::default() });
                    let retracted = guard(|| {
                        run.retract(&mut self.backend);
                        Ok(())
                    });
                    match retracted {
                        Ok(()) => self.preempted.push_front(run),
                        Err(error) => self.fail(run, error),
                    }
                }
            }
        }
        None
    }

    /// The work that those that run have had done, in tokens.
    fn progress(&self) -> usize {
        self.running.iter().map(|run| self.done(run)).sum()
    }

    /// That of one of them.
    fn done(&self, run: &Run<B::Sequence>) -> usize {
        run.standing(&self.backend).sequences.into_iter().map(Place::done).sum()
    }

    /// One step, and what follows from it for each request.
    fn step(&mut self, shares: &[Share]) {
        let of = |request: usize| shares.iter().filter(move |s| s.request == request).copied().collect::<Vec<_>>();
        let shares: Vec<Vec<Share>> = (0..self.running.len()).map(of).collect();
        let (started, before, passes) = (Instant::now(), self.progress(), self.passes);
        let (rows, whole) = self.rows(&shares, 0..shares.len());
        if rows.iter().any(lacked) {
            // What a request lacks alone says nothing of how many go together.
            self.passes = passes;
        }
        if whole {
            let generated = shares.iter().flatten().filter(|share| share.generates).map(|share| share.tokens).sum();
            let prompt = self.progress().saturating_sub(before + generated);
            let seconds = started.elapsed().as_secs_f64();
            tracing::debug!(generated, prompt, milliseconds = 1e3 * seconds, "step");
            self.pace.note(generated, prompt, seconds);
            self.queue.count_step(generated + prompt);
            self.passes.done();
        }
        self.draw(&shares, &rows);
        let runs = std::mem::take(&mut self.running);
        let mut done = Counts::default();
        for ((mut run, rows), shares) in runs.into_iter().zip(rows).zip(&shares) {
            let before = run.counts();
            let advanced = rows.and_then(|_| match shares.is_empty() {
                true => Ok(false),
                false => guard(|| run.advance(&mut self.backend)),
            });
            done.add(run.counts().since(before));
            match advanced {
                Ok(false) => self.running.push(run),
                Ok(true) => self.close(run, true),
                Err(error) => self.fail(run, error),
            }
        }
        self.queue.count(done);
    }

    /// Draws the next tokens of all requests' answers, on all threads.
    fn draw(&mut self, shares: &[Vec<Share>], rows: &[Result<Rows, RequestError>]) {
        let Self { backend, running, .. } = self;
        let each = running.iter_mut().zip(shares).zip(rows);
        let draws = each.filter_map(|((run, shares), rows)| Some(run.draws(backend, shares, rows.as_ref().ok()?)));
        let mut draws: Vec<Draw> = draws.flatten().collect();
        match &mut draws[..] {
            [alone] => alone.draw(),
            draws => draws.par_iter_mut().for_each(Draw::draw),
        }
    }

    /// What those of the requests `of` get from a step, in one pass or several, and whether all did at the first try.
    fn rows(&mut self, shares: &[Vec<Share>], of: Range<usize>) -> (Vec<Result<Rows, RequestError>>, bool) {
        let efforts: Vec<usize> =
            shares[of.clone()].iter().map(|shares| shares.iter().map(|share| share.effort).sum()).collect();
        let (mut out, mut whole) = (Vec::with_capacity(of.len()), true);
        for pass in self.passes.cut(&efforts) {
            let (requests, efforts) = (of.start + pass.start..of.start + pass.end, &efforts[pass]);
            let done = |worker: &Self| worker.running[requests.clone()].iter().map(|run| worker.done(run)).collect();
            let mut before: Vec<usize> = done(self);
            let mut tried = self.forward(shares, requests.clone());
            if lacked(&tried) && self.backend.spare() {
                before = done(self);
                tried = self.forward(shares, requests.clone());
                // Its time is two steps', and what the first try lost counts against what was done.
                whole = false;
            }
            let several = efforts.iter().filter(|effort| **effort > 0).count() > 1;
            let lacks = lacked(&tried);
            match tried {
                Ok(rows) => {
                    let mut rows = rows.into_iter();
                    // All of a request's, also where one of them is an error: the next ones are others'.
                    let own = |shares: &Vec<Share>| rows.by_ref().take(shares.len()).collect::<Counted>();
                    out.extend(shares[requests].iter().map(own).map(|own| own.into_iter().collect()));
                    continue;
                }
                Err(_) if several && lacks => {
                    self.passes.lacked(efforts.iter().sum());
                    out.extend(self.rows(shares, requests).0);
                }
                Err(error) if several => {
                    tracing::warn!(%error, "a step failed and is tried again request by request");
                    let alone = |(at, before): (usize, usize)| {
                        if !shares[at].is_empty() && self.done(&self.running[at]) < before {
                            // It failed in the middle of a chunk, which would begin again, and come to the same place again.
                            return Err(error.clone());
                        }
                        self.forward(shares, at..at + 1).and_then(|rows| rows.into_iter().collect())
                    };
                    out.extend(requests.zip(before).map(alone));
                }
                Err(error) => {
                    let none =
                        |shares: &Vec<Share>| if shares.is_empty() { Ok(Vec::new()) } else { Err(error.clone()) };
                    out.extend(shares[requests].iter().map(none));
                }
            }
            whole = false;
        }
        (out, whole)
    }

    /// One pass over the shares of the requests `of`.
    fn forward(&mut self, shares: &[Vec<Share>], of: Range<usize>) -> Result<Counted, RequestError> {
        let Self { backend, running, .. } = self;
        let all = of.len() == running.len();
        guard(|| {
            let runs = running[of.clone()].iter_mut().zip(&shares[of]);
            let mut inputs: Vec<Input<'_, B::Sequence>> =
                runs.flat_map(|(run, shares)| run.inputs(backend, shares)).collect();
            if !all {
                // A step ahead would be of these alone, and the next pass is of others.
                inputs.iter_mut().for_each(|input| input.next = None);
            }
            let wanted: Vec<usize> = inputs.iter().map(|input| input.wants.len()).collect();
            if inputs.is_empty() { Ok(Vec::new()) } else { Ok(counted(backend.forward(inputs)?, &wanted)) }
        })
    }

    fn fail(&mut self, run: Run<B::Sequence>, error: RequestError) {
        // What a request asks for may leave no answer; what it computed is as good as ever.
        let own = matches!(error, RequestError::NoToken | RequestError::Grammar(_));
        if own {
            tracing::info!(id = run.id(), %error, "request failed");
        } else {
            tracing::error!(id = run.id(), %error, "request failed");
        }
        self.failed |= !own;
        run.job().fail(error);
        self.close(run, own);
    }

    /// Frees what a request holds. Freeing may panic too after a step that did; the engine goes on all the same.
    fn close(&mut self, run: Run<B::Sequence>, sound: bool) {
        let closed = guard(|| {
            run.close(&mut self.backend, sound);
            Ok(())
        });
        if let Err(error) = closed {
            tracing::error!(%error, "closing a request failed");
        }
        self.ended += 1;
    }

    /// Nothing waits, so there is time to look for what an ended request may have left behind.
    fn check(&mut self) {
        let checked = guard(|| {
            self.backend.check_idle();
            Ok(())
        });
        match checked {
            Ok(()) => tracing::debug!(free = self.backend.free_blocks(), "idle and sound"),
            Err(error) => tracing::error!(%error, "the idle engine is not sound: a bug"),
        }
    }
}

/// Whether it failed for want of memory.
fn lacked<T>(tried: &Result<T, RequestError>) -> bool {
    matches!(tried, Err(RequestError::Step(reason)) if lacks_memory(reason))
}

/// The end of a request that is over before it is done. Of one that is late its caller may know already.
fn end(job: &Job) {
    if job.late() {
        tracing::info!(id = job.request.id, "late: its deadline has passed");
        job.fail(RequestError::Deadline);
    } else {
        tracing::info!(id = job.request.id, "cancelled: the client is gone");
    }
}

/// Turns a panic into an error. What a step leaves half done, the backend undoes.
pub(crate) fn guard<T>(step: impl FnOnce() -> Result<T, RequestError>) -> Result<T, RequestError> {
    catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|panic| Err(RequestError::Panic(message(&*panic))))
}

fn message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_string())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a value that is no text".into())
}
