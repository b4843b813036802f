//! The answer as server-sent events: role first, text, usage chunk, `[DONE]` last, also after an error.

use crate::answer::{Call, Head, Kind, Merged, Total, cut_off, echoed, finish, logprobs, silent};
use crate::app::App;
use crate::error::ApiError;
use crate::request_id::Failed;
use crate::tools::{Calls, Told, Tools};
use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{Stream, StreamExt};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use taper_engine::{Delta, Event, Scored};

/// Tells nginx to pass events on at once.
const UNBUFFERED: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Answers with a stream.
pub(crate) async fn answer(
    app: &Arc<App>,
    call: Call,
    head: Head,
    failed: Failed,
    mut events: Merged,
) -> Result<Response, ApiError> {
    let first = first(&mut events, &call, app.config.keep_alive).await?;
    let chunks = Chunks { app: Arc::clone(app), call, head, failed };
    Ok(respond(app, chunks.stream(first, events)))
}

/// The first event that says something.
///
/// The status is held back until then, so that a failed prefill is an honest 500; but no longer than the keep-alive interval,
/// since proxies close silent connections.
pub(crate) async fn first(
    events: &mut Merged,
    call: &Call,
    longest: Duration,
) -> Result<Option<(usize, Event)>, ApiError> {
    // The end of a prefill is not yet a token.
    let next = async {
        loop {
            match events.next().await {
                Some((_, Event::Prefilled)) => {}
                event => return event,
            }
        }
    };
    match tokio::time::timeout(longest, next).await {
        Ok(None) => Err(cut_off()),
        Ok(Some((_, Event::Failed(error)))) => Err(call.failed(error)),
        Ok(first) => Ok(first),
        Err(_) => Ok(None),
    }
}

/// A response of events, with comments in between where they are long in coming.
pub(crate) fn respond(
    app: &App,
    events: impl Stream<Item = Result<sse::Event, Infallible>> + Send + 'static,
) -> Response {
    let keep_alive = KeepAlive::new().interval(app.config.keep_alive).text("keep-alive");
    let mut response = Sse::new(events).keep_alive(keep_alive).into_response();
    response.headers_mut().insert(UNBUFFERED, HeaderValue::from_static("no"));
    response
}

struct Chunks {
    app: Arc<App>,
    call: Call,
    head: Head,
    failed: Failed,
}

impl Chunks {
    fn stream(
        self,
        first: Option<(usize, Event)>,
        mut events: Merged,
    ) -> impl Stream<Item = Result<sse::Event, Infallible>> + Send {
        async_stream::stream! {
            for chunk in self.opening() {
                yield data(&chunk);
            }
            let text = self.app.engine.text();
            let mut calls: Vec<Option<Calls>> = (0..self.call.total()).map(|_| self.call.calls(text)).collect();
            let mut total = Total::default();
            let mut next = first;
            let failure = loop {
                let event = match next.take() {
                    Some(event) => Some(event),
                    None => events.next().await,
                };
                match event {
                    None => break (total.done < self.call.prompts.len()).then(cut_off),
                    Some((_, Event::Prefilled | Event::Embedding(_))) => {}
                    Some((prompt, Event::Delta(delta))) => {
                        let calls = &mut calls[self.call.index(prompt, delta.choice)];
                        for chunk in self.delta(prompt, &delta, calls.as_mut()) {
                            yield data(&chunk);
                        }
                    }
                    Some((prompt, Event::Prompt(scored))) => {
                        for chunk in self.echo(prompt, scored) {
                            yield data(&chunk);
                        }
                    }
                    Some((prompt, Event::Done(usage))) => total.add(prompt, usage),
                    Some((_, Event::Failed(error))) => break Some(self.call.failed(error)),
                }
            };
            if let Some(error) = failure {
                self.failed.by(&error);
                yield data(&error.body());
            } else if self.call.common.include_usage {
                let mut chunk = self.head.object(true, Vec::new());
                chunk["usage"] = total.json();
                yield data(&chunk);
            }
            yield Ok(sse::Event::default().data("[DONE]"));
        }
    }

    /// What comes before any token: each choice's role, or the echoed prompt.
    fn opening(&self) -> Vec<Value> {
        let mut chunks = Vec::new();
        for (prompt, p) in self.call.prompts.iter().enumerate() {
            for choice in 0..self.call.common.choices {
                let mut object = match (self.call.kind, &p.echo) {
                    (Kind::Chat, _) => json!({"delta": {"role": "assistant", "content": self.blank()}}),
                    // It comes with its log probabilities, once they are known.
                    (Kind::Text | Kind::Embedding, Some(_)) if self.call.logprobs.is_some() => continue,
                    (Kind::Text | Kind::Embedding, Some(echo)) => json!({"text": echo}),
                    (Kind::Text | Kind::Embedding, None) => continue,
                };
                object["index"] = json!(self.call.index(prompt, choice));
                object["logprobs"] = Value::Null;
                finish(&mut object, None);
                chunks.push(self.head.object(true, vec![object]));
            }
        }
        chunks
    }

    /// A chat's content where there is none: null, if it is to be calls alone.
    fn blank(&self) -> Option<&'static str> {
        (!self.call.tools.as_ref().is_some_and(Tools::forced)).then_some("")
    }

    /// The echoed prompt of each choice, with its log probabilities.
    fn echo(&self, prompt: usize, scored: Vec<Scored>) -> Vec<Value> {
        let (text, of) = (self.app.engine.text(), &self.call.prompts[prompt]);
        let logprobs = logprobs(self.call.kind, text, &echoed(text, of, scored));
        let chunk = |choice| {
            let index = self.call.index(prompt, choice);
            let mut object = json!({"text": of.echo, "index": index, "logprobs": logprobs});
            finish(&mut object, None);
            self.head.object(true, vec![object])
        };
        (0..self.call.common.choices).map(chunk).collect()
    }

    fn delta(&self, prompt: usize, delta: &Delta, mut calls: Option<&mut Calls>) -> Vec<Value> {
        let index = self.call.index(prompt, delta.choice);
        let logprobs = self
            .call
            .logprobs
            .filter(|_| !delta.tokens.is_empty())
            .map(|_| logprobs(self.call.kind, self.app.engine.text(), &delta.tokens));
        let make = |mut object: Value, logprobs: Option<Value>, end| {
            object["index"] = json!(index);
            object["logprobs"] = json!(logprobs);
            finish(&mut object, end);
            self.head.object(true, vec![object])
        };
        let end = delta.finish.as_ref();
        if self.call.kind == Kind::Text {
            return vec![make(json!({"text": delta.text}), logprobs, end)];
        }
        // OpenAI's chat stream ends a choice with an empty delta of its own.
        let told = |told: Vec<Told>| told.iter().map(Told::delta).collect::<Vec<_>>();
        let mut deltas = match &mut calls {
            Some(calls) => told(calls.push(&delta.text)),
            None if silent(delta) => Vec::new(),
            None => vec![json!({"content": delta.text})],
        };
        if let (Some(calls), Some(_)) = (&mut calls, end) {
            deltas.extend(told(calls.finish()));
        }
        if deltas.is_empty() && logprobs.is_some() {
            // Tokens of what is not certain yet.
            deltas.push(json!({"content": self.blank()}));
        }
        let mut logprobs = logprobs;
        let chunk = |delta| make(json!({"delta": delta}), logprobs.take(), None);
        let mut chunks: Vec<Value> = deltas.into_iter().map(chunk).collect();
        if end.is_some() {
            let mut last = make(json!({"delta": {}}), None, end);
            calls.iter().for_each(|calls| calls.finished(&mut last["choices"][0]));
            chunks.push(last);
        }
        chunks
    }
}

fn data(value: &Value) -> Result<sse::Event, Infallible> {
    Ok(sse::Event::default().data(value.to_string()))
}
