//! `/v1/responses`: OpenAI's newer form of a chat, over the same request to the engine. Nothing is stored: a conversation comes
//! whole with each request.

mod builder;
mod request;

pub(crate) use request::{Asked, parse};

use crate::answer::{Call, Merged, cut_off};
use crate::app::App;
use crate::error::ApiError;
use crate::request_id::RequestId;
use crate::stream;
use axum::Json;
use axum::response::sse;
use axum::response::{IntoResponse, Response};
use builder::Builder;
use futures_util::stream::{Stream, StreamExt};
use std::convert::Infallible;
use std::sync::Arc;
use taper_engine::Event;

impl Asked {
    /// Queues the prompt and answers.
    pub(crate) async fn run(mut self, app: &Arc<App>, asked: RequestId) -> Result<Response, ApiError> {
        let asked = asked.named("resp_");
        let headers = self.call.headers(&asked.id);
        let events = self.call.submit(app, &asked).map_err(request::renamed)?;
        let builder = Builder::new(app, asked, self.echo, &self.call);
        let mut response = match self.call.common.stream {
            true => streamed(app, self.call, builder, events).await?,
            false => whole(&self.call, builder, events).await?.into_response(),
        };
        response.headers_mut().extend(headers);
        Ok(response)
    }
}

async fn whole(call: &Call, mut builder: Builder, mut events: Merged) -> Result<Response, ApiError> {
    while let Some((_, event)) = events.next().await {
        match event {
            Event::Prefilled | Event::Prompt(_) | Event::Embedding(_) => {}
            Event::Delta(delta) => drop(builder.delta(&delta)),
            Event::Done(usage) => return Ok(Json(builder.done(usage).1).into_response()),
            Event::Failed(error) => return Err(request::renamed(call.failed(error))),
        }
    }
    Err(cut_off())
}

async fn streamed(app: &Arc<App>, call: Call, builder: Builder, mut events: Merged) -> Result<Response, ApiError> {
    let first = stream::first(&mut events, &call, app.config.keep_alive).await.map_err(request::renamed)?;
    Ok(stream::respond(app, told(call, builder, first, events)))
}

/// The events of a stream, of which the last says how it ended.
fn told(
    call: Call,
    mut builder: Builder,
    first: Option<(usize, Event)>,
    mut events: Merged,
) -> impl Stream<Item = Result<sse::Event, Infallible>> + Send {
    async_stream::stream! {
        for event in builder.opening() {
            yield named(&event);
        }
        let mut next = first;
        loop {
            let event = match next.take() {
                Some(event) => Some(event),
                None => events.next().await,
            };
            let (told, over) = match event {
                Some((_, Event::Prefilled | Event::Prompt(_) | Event::Embedding(_))) => continue,
                Some((_, Event::Delta(delta))) => (builder.delta(&delta), false),
                Some((_, Event::Done(usage))) => (builder.done(usage).0, true),
                Some((_, Event::Failed(error))) => (builder.failed(&request::renamed(call.failed(error))), true),
                None => (builder.failed(&cut_off()), true),
            };
            for event in told {
                yield named(&event);
            }
            if over {
                return;
            }
        }
    }
}

/// An event under its own name, as this protocol has it.
fn named(value: &serde_json::Value) -> Result<sse::Event, Infallible> {
    let name = value["type"].as_str().unwrap_or_default();
    Ok(sse::Event::default().event(name).data(value.to_string()))
}
