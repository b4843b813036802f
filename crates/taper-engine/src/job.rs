//! A request with its way back to the client, from the queue to its last event, which it has whatever becomes of the engine.

use crate::backend::Backend;
use crate::request::{Event, Request, RequestError};
use crate::schedule;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;
use taper_attention::Beginning;
use tokio::sync::mpsc;

/// A request with its way back to the client.
pub(crate) struct Job {
    pub(crate) request: Request,
    /// Tokens that each choice may have.
    pub(crate) max_tokens: usize,
    pub(crate) events: mpsc::Sender<Event>,
    /// Found out when it is first asked for.
    pub(crate) beginning: OnceLock<Beginning>,
    pub(crate) submitted: Instant,
    /// Whether its last event was sent.
    pub(crate) ended: AtomicBool,
}

impl Drop for Job {
    fn drop(&mut self) {
        if !self.ended.load(Relaxed) {
            self.fail(RequestError::Stopped("its thread ended; the server's log says why".into()));
        }
    }
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

    /// What its prompt may share with others. To find out takes a while, the first time.
    pub(crate) fn beginning<B: Backend>(&self, backend: &B) -> &Beginning {
        let Request { attention, prompt, question_tokens, salt, .. } = &self.request;
        self.beginning.get_or_init(|| backend.beginning(attention, prompt, *question_tokens, salt))
    }

    /// The same once it is known, if it shares anything from the start.
    pub(crate) fn shared(&self) -> Option<&Beginning> {
        self.beginning.get().filter(|_| !self.scores())
    }

    /// Whether its prompt is scored, which what is cached is not.
    pub(crate) fn scores(&self) -> bool {
        self.request.prompt_logprobs.is_some()
    }

    /// Sends the last event of a request that failed.
    pub(crate) fn fail(&self, error: RequestError) {
        self.end(Event::Failed(error));
    }

    /// Sends the last event.
    pub(crate) fn end(&self, last: Event) {
        self.ended.store(true, Relaxed);
        send(&self.events, last);
    }
}

/// The channel has room for all that a request may send, so it is never full; a closed one is seen before the next
/// step.
pub(crate) fn send(events: &mpsc::Sender<Event>, event: Event) {
    if let Err(mpsc::error::TrySendError::Full(_)) = events.try_send(event) {
        tracing::error!("an event did not fit its channel: a bug");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_has_one_last_event() {
        let stopped = RequestError::Stopped("its thread ended; the server's log says why".into());
        for (fails, last) in [(None, stopped), (Some(RequestError::Deadline), RequestError::Deadline)] {
            let (events, mut receiver) = mpsc::channel(5);
            let (request, max_tokens, beginning, ended) = Default::default();
            let job = Job { request, max_tokens, events, beginning, submitted: Instant::now(), ended };
            fails.into_iter().for_each(|error| job.fail(error));
            // As where the engine's thread panics.
            drop(job);
            let Some(Event::Failed(error)) = receiver.blocking_recv() else { panic!("there is none") };
            assert_eq!(error, last);
            assert!(receiver.blocking_recv().is_none(), "it is the last");
        }
    }
}
