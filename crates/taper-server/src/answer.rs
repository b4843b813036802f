//! A parsed request's run through the engine, and the answer in one piece.

use crate::app::App;
use crate::body::Parsed;
use crate::error::{self, ApiError};
use crate::knobs;
use crate::request_id::RequestId;
use crate::sampling::Common;
use crate::tools::{Calls, Tools};
use crate::{sampling, stream, structured, usage};
use axum::Json;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{BoxStream, SelectAll, Stream, StreamExt, poll_fn, select_all};
use serde_json::{Map, Value, json};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use taper_attention::AttentionSpec;
use taper_attention::AttentionUsage;
use taper_engine::{
    Delta, Event, Events, Finish, Grammar, Parts, Request, RequestError, SamplingParams, Scored, Shape, Text,
    TokenLogprob, TokenRecord, Usage,
};

/// Names the top-level fields that had no effect.
pub(crate) const IGNORED: HeaderName = HeaderName::from_static("x-taper-ignored-fields");

/// Answers of one request that may be traced: a trace is some megabytes of JSON.
const TRACED: usize = 4;

/// Log probabilities of prompts' tokens in one answer: each is some hundred bytes while it is written.
const ECHOED: usize = 1 << 18;

/// Bytes of prompts' texts in one answer, which is held as values and once more as it is sent.
const ECHOED_BYTES: usize = 32 << 20;

/// The most characters of a request's own words in a line of the log.
const LOGGED: usize = 300;

/// Which of the two formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Chat,
    Text,
    Embedding,
}

/// One prompt, and its text if the answer begins with it.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    /// How many at its end are the question.
    pub(crate) question_tokens: usize,
    pub(crate) echo: Option<String>,
}

/// A request that was understood.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    /// Whether answers go on with the prompt's text, instead of being a reply.
    pub(crate) continues: bool,
    /// Answers to each prompt that the client gets, of those drawn.
    pub(crate) kept: usize,
    pub(crate) prompts: Vec<Prompt>,
    pub(crate) prompt_field: &'static str,
    pub(crate) common: Common,
    pub(crate) logprobs: Option<usize>,
    /// Functions that the answer may call.
    pub(crate) tools: Option<Tools>,
    /// What the answer must be, until the grammar of it is compiled.
    pub(crate) shape: Option<Shape>,
    pub(crate) grammar: Option<Grammar>,
    /// The field that asked for it.
    pub(crate) grammar_field: Option<String>,
    pub(crate) attention: Arc<AttentionSpec>,
    pub(crate) ignored: Vec<String>,
}

/// Events of all prompts, each with its prompt's number.
pub(crate) type Merged = SelectAll<Numbered>;

/// Events of one prompt with its number.
type Numbered = BoxStream<'static, (usize, Event)>;

/// Events until the deadline. The engine ends a late request at its next step; its client waits for no step.
fn by(deadline: Option<Instant>, events: impl Stream<Item = Event>) -> impl Stream<Item = Event> {
    async_stream::stream! {
        let mut events = pin!(events);
        loop {
            let next = match deadline {
                Some(deadline) => tokio::time::timeout_at(deadline.into(), events.next()).await,
                None => Ok(events.next().await),
            };
            match next {
                Ok(Some(event)) => yield event,
                Ok(None) => break,
                Err(_) => {
                    yield Event::Failed(RequestError::Deadline);
                    break;
                }
            }
        }
    }
}

/// What all parts of one answer have in common.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    pub(crate) kind: Kind,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
}

impl Parsed for Call {
    fn has_grammar(&self) -> bool {
        self.shape.is_some()
    }

    fn compile(&mut self, app: &App) -> Result<(), ApiError> {
        let Some(shape) = self.shape.take() else { return Ok(()) };
        let compiled = structured::compile(app, &shape, self.grammar_field.as_deref().unwrap_or_default());
        // Which of the functions it is, their grammar together does not say.
        let culprit = |error| self.tools.as_ref().and_then(|tools| tools.culprit(app)).unwrap_or(error);
        self.grammar = Some(compiled.map_err(culprit)?);
        Ok(())
    }
}

impl Call {
    /// Queues every prompt and answers.
    pub(crate) async fn run(mut self, app: &Arc<App>, asked: RequestId) -> Result<Response, ApiError> {
        let asked = asked.named(if self.kind == Kind::Chat { "chatcmpl-" } else { "cmpl-" });
        let headers = self.headers(&asked.id);
        let events = self.submit(app, &asked)?;
        let head = Head { kind: self.kind, id: asked.id, created: unix_now(), model: app.model_name().into() };
        let mut response = if self.common.stream {
            stream::answer(app, self, head, asked.failed, events).await?
        } else {
            whole(app, &self, &head, events).await?.into_response()
        };
        response.headers_mut().extend(headers);
        Ok(response)
    }

    pub(crate) fn headers(&self, id: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if self.ignored.is_empty() {
            return headers;
        }
        let names = self.ignored.join(", ");
        // What clients of other servers send anyway is no news.
        if self.ignored.iter().any(|name| !knobs::known(name)) {
            tracing::warn!(id, fields = %error::beginning(&names, LOGGED), "fields ignored");
        }
        // A name may hold any character; a header may not.
        let plain: String =
            names.chars().map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' }).take(1000).collect();
        if let Ok(value) = HeaderValue::from_str(&plain) {
            headers.insert(IGNORED, value);
        }
        headers
    }

    /// One request to the engine for each prompt; all or none.
    pub(crate) fn submit(&mut self, app: &App, asked: &RequestId) -> Result<Merged, ApiError> {
        self.submit_part(app, asked, None)
    }

    /// The same for prompts of a request of which others were taken before.
    pub(crate) fn submit_part(&mut self, app: &App, asked: &RequestId, of: Option<&Parts>) -> Result<Merged, ApiError> {
        self.check_tokens(app)?;
        self.check_trace()?;
        self.check_echo()?;
        let RequestId { id, came, shares, priority, .. } = asked;
        let priority = match priority {
            Some(said) => sampling::said_priority(said, app)?,
            None => self.common.priority,
        };
        let salt = salt(shares.as_deref(), self.common.salt.as_deref());
        let deadline = self.common.timeout.and_then(|timeout| came.checked_add(timeout));
        // Answers are compared by their tokens' probabilities.
        let logprobs = if self.kept < self.common.choices { self.logprobs.or(Some(0)) } else { self.logprobs };
        let request = |(index, prompt): (usize, &mut Prompt)| Request {
            id: id.to_string(),
            // Those of a prompt that comes back with its log probabilities are wanted again.
            prompt: match prompt.echo.is_some() && self.logprobs.is_some() {
                true => prompt.tokens.clone(),
                false => std::mem::take(&mut prompt.tokens),
            },
            continues: self.continues,
            special: self.common.special,
            attention: Arc::clone(&self.attention),
            question_tokens: prompt.question_tokens,
            salt: Arc::clone(&salt),
            sampling: match self.common.drawn_seed && index > 0 {
                true => SamplingParams { seed: sampling::draw_seed(), ..self.common.sampling.clone() },
                false => self.common.sampling.clone(),
            },
            grammar: self.grammar.as_ref().map(Grammar::apart),
            stop: self.common.stop.clone(),
            embeds: self.kind == Kind::Embedding,
            choices: self.common.choices,
            logprobs,
            prompt_logprobs: if prompt.echo.is_some() { self.logprobs } else { None },
            priority,
            deadline,
        };
        let requests = self.prompts.iter_mut().enumerate().map(request).collect();
        let events = match of {
            Some(parts) => app.engine.submit_more(parts, requests),
            None => app.engine.submit_all(requests),
        };
        let events =
            events.map_err(|e| error::refused(&e, self.prompt_field, self.count_field(), self.common.max_field))?;
        let numbered = |(index, mut events): (usize, Events)| {
            let mut watch = app.watch(self, id, *came);
            let echo = self.prompts[index].echo.as_ref().map_or(0, |echo| echo.chars().count());
            let events = poll_fn(move |cx| events.poll_recv(cx));
            let events = by(deadline, events).map(move |event| {
                let event = after_echo(event, echo);
                watch.see(&event);
                (index, event)
            });
            events.boxed()
        };
        Ok(select_all(events.into_iter().enumerate().map(numbered)))
    }

    /// An answer that could not be made, with the field that makes it impossible.
    pub(crate) fn failed(&self, error: RequestError) -> ApiError {
        let param = match &error {
            RequestError::Grammar(_) => self.grammar_field.clone(),
            RequestError::NoToken if self.common.sampling.allowed.is_some() => Some("allowed_token_ids".into()),
            RequestError::NoToken => self.grammar_field.clone(),
            _ => None,
        };
        ApiError { param, ..error.into() }
    }

    /// A token id that the model lacks would otherwise do nothing, quietly.
    fn check_tokens(&self, app: &App) -> Result<(), ApiError> {
        let Common { sampling, stop, .. } = &self.common;
        sampling.logit_bias.iter().try_for_each(|(id, _)| app.check_token(*id, format_args!("logit_bias.{id}")))?;
        sampling
            .allowed
            .iter()
            .flat_map(|ids| ids.iter())
            .try_for_each(|id| app.check_token(*id, "allowed_token_ids"))?;
        stop.tokens.iter().try_for_each(|id| app.check_token(*id, "stop_token_ids"))
    }

    fn check_trace(&self) -> Result<(), ApiError> {
        if self.attention.traced() && self.total() > TRACED {
            let message = format!(
                "attention.trace: of one request at most {TRACED} answers are traced; this one asks for {}",
                self.total()
            );
            return Err(ApiError::invalid("attention.trace", message));
        }
        Ok(())
    }

    /// The field that says how many answers are drawn.
    fn count_field(&self) -> &'static str {
        if self.kept < self.common.choices { "best_of" } else { "n" }
    }

    fn check_echo(&self) -> Result<(), ApiError> {
        let texts = self.prompts.iter().filter_map(|prompt| prompt.echo.as_ref());
        let bytes = texts.map(String::len).sum::<usize>() * self.kept;
        if bytes > ECHOED_BYTES {
            let message =
                format!("echo: bytes of the prompts, times n, may be at most {ECHOED_BYTES}; here they are {bytes}");
            return Err(ApiError::invalid("echo", message));
        }
        let echoed = self.prompts.iter().filter(|prompt| prompt.echo.is_some()).map(|prompt| prompt.tokens.len());
        let wanted = self.logprobs.map_or(0, |top| echoed.sum::<usize>() * (top + 1) * self.kept);
        if wanted > ECHOED {
            let message = format!(
                "echo with logprobs: prompt tokens, times logprobs + 1, times n, may be at most {ECHOED}; here they are {wanted}"
            );
            return Err(ApiError::invalid("echo", message));
        }
        Ok(())
    }

    /// The number of a prompt's choice in the answer.
    pub(crate) fn index(&self, prompt: usize, choice: usize) -> usize {
        prompt * self.common.choices + choice
    }

    /// What finds calls of functions in a choice's text, where there may be any.
    pub(crate) fn calls(&self, text: &dyn Text) -> Option<Calls> {
        self.tools.as_ref().map(|tools| tools.calls_in(text.call_format()))
    }

    /// Whether anything is wanted but the prompt.
    pub(crate) fn answers(&self) -> bool {
        self.common.stop.max_tokens != Some(0)
    }

    /// Choices in the answer.
    pub(crate) fn total(&self) -> usize {
        self.prompts.len() * self.common.choices
    }
}

/// What prompts have alike that may share what they begin with: their keys' word, and the request's own.
fn salt(shares: Option<&str>, own: Option<&str>) -> Arc<str> {
    match (shares, own) {
        (None, None) => "".into(),
        // Not to be mistaken for one another, whatever stands in them.
        both => json!(both).to_string().into(),
    }
}

impl Head {
    /// An answer, or a chunk of one.
    pub(crate) fn object(&self, chunk: bool, choices: Vec<Value>) -> Value {
        let object = match (self.kind, chunk) {
            (Kind::Chat, false) => "chat.completion",
            (Kind::Chat, true) => "chat.completion.chunk",
            (Kind::Text | Kind::Embedding, _) => "text_completion",
        };
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }
}

/// Sums the usage of all prompts.
#[derive(Debug, Default)]
pub(crate) struct Total {
    prompt: usize,
    cached: usize,
    completion: usize,
    attention: Vec<(usize, Vec<AttentionUsage>)>,
    pub(crate) done: usize,
}

impl Total {
    /// Takes in what a prompt's answers cost.
    pub(crate) fn add(&mut self, prompt: usize, usage: Usage) {
        self.prompt += usage.prompt_tokens;
        self.cached += usage.cached_tokens;
        self.completion += usage.completion_tokens;
        self.attention.push((prompt, usage.attention));
        self.done += 1;
    }

    /// Of each prompt's answers these are told of, in this order.
    fn keep(&mut self, kept: &[Vec<usize>]) {
        for (prompt, usages) in &mut self.attention {
            *usages = kept[*prompt].iter().filter_map(|&drawn| usages.get(drawn).cloned()).collect();
        }
    }

    /// The `usage` object. `attention` is the first choice's; with more choices it lists them all under `choices`, and a trace,
    /// which is long, there alone.
    pub(crate) fn json(mut self) -> Value {
        self.attention.sort_by_key(|(prompt, _)| *prompt);
        let all: Vec<AttentionUsage> = self.attention.into_iter().flat_map(|(_, a)| a).collect();
        let attention = match &all[..] {
            [] => Value::Null,
            [one] => usage::attention(one),
            [_, ..] => {
                let choices: Vec<Value> = all.iter().map(usage::attention).collect();
                let mut attention = choices[0].clone();
                attention.as_object_mut().into_iter().for_each(|first| drop(first.shift_remove("trace")));
                attention["choices"] = json!(choices);
                attention
            }
        };
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "attention": attention,
        })
    }
}

/// An event of an answer that comes after so many characters of its prompt.
fn after_echo(mut event: Event, echo: usize) -> Event {
    if let Event::Delta(delta) = &mut event {
        delta.tokens.iter_mut().for_each(|token| token.text_offset += echo);
    }
    event
}

/// A prompt's tokens as they stand before an answer's. The first comes after nothing: it has no log probability, which is NaN.
/// Their places are those in the echo, which has special tokens that stood in the text and none that encoding added.
pub(crate) fn echoed(text: &dyn Text, prompt: &Prompt, scored: Vec<Scored>) -> Vec<TokenRecord> {
    let (mut plain, mut full) = (text.stream(false, false), text.stream(false, true));
    let echo = prompt.echo.as_deref().unwrap_or_default();
    let (mut text_offset, mut at) = (0, 0);
    let first = prompt.tokens.first().map(|&token| (TokenLogprob { token, logprob: f32::NAN }, Vec::new()));
    let record = |(chosen, top): Scored| {
        let record = TokenRecord { text_offset, top, chosen };
        let [mut piece, special] = [&mut plain, &mut full].map(|stream| stream.push(record.chosen.token));
        if special != piece && echo.get(at..).is_some_and(|rest| rest.starts_with(&special)) {
            piece = special;
        }
        text_offset += piece.chars().count();
        at += piece.len();
        record
    };
    first.into_iter().chain(scored).map(record).collect()
}

#[derive(Default)]
struct Choice {
    text: String,
    tokens: Vec<TokenRecord>,
    finish: Option<Finish>,
}

impl Choice {
    /// The mean log probability of its tokens; an answer without any is the last that one would take.
    fn likelihood(&self) -> f32 {
        match self.tokens.len() {
            0 => f32::NEG_INFINITY,
            tokens => self.tokens.iter().map(|token| token.chosen.logprob).sum::<f32>() / tokens as f32,
        }
    }
}

/// Places of the most probable answers to each prompt, the best first.
fn best(choices: &[Choice], drawn: usize, kept: usize) -> Vec<Vec<usize>> {
    let best = |of_one: &[Choice]| {
        let mut places: Vec<usize> = (0..of_one.len()).collect();
        places.sort_by(|&a, &b| of_one[b].likelihood().total_cmp(&of_one[a].likelihood()));
        places.truncate(kept);
        places
    };
    choices.chunks(drawn).map(best).collect()
}

async fn whole(app: &App, call: &Call, head: &Head, mut events: Merged) -> Result<Json<Value>, ApiError> {
    let mut choices: Vec<Choice> = Vec::new();
    choices.resize_with(call.total(), Choice::default);
    let text = app.engine.text();
    let mut echoes = vec![Vec::new(); call.prompts.len()];
    let mut total = Total::default();
    while let Some((prompt, event)) = events.next().await {
        match event {
            Event::Prefilled | Event::Embedding(_) => {}
            Event::Prompt(scored) => echoes[prompt] = echoed(text, &call.prompts[prompt], scored),
            Event::Delta(delta) => {
                let choice = &mut choices[call.index(prompt, delta.choice)];
                choice.text.push_str(&delta.text);
                choice.tokens.extend(delta.tokens);
                choice.finish = delta.finish;
            }
            Event::Done(usage) => total.add(prompt, usage),
            Event::Failed(error) => return Err(call.failed(error)),
        }
    }
    if total.done < call.prompts.len() {
        return Err(cut_off());
    }
    if call.kept < call.common.choices {
        let kept = best(&choices, call.common.choices, call.kept);
        total.keep(&kept);
        let places =
            kept.iter().enumerate().flat_map(|(prompt, kept)| kept.iter().map(move |&of| call.index(prompt, of)));
        choices = places.map(|place| std::mem::take(&mut choices[place])).collect();
    }
    let choices = choices.into_iter().enumerate().map(|(index, choice)| {
        let echo = &echoes[index / call.kept][..];
        let logprobs = call.logprobs.map(|_| logprobs(call.kind, text, &[echo, &choice.tokens].concat()));
        let calls = call.calls(text).map(|mut calls| {
            calls.push(&choice.text);
            calls.finish();
            calls
        });
        let mut object = match (call.kind, &calls) {
            (Kind::Chat, Some(calls)) => json!({"message": calls.message()}),
            (Kind::Chat, None) => json!({"message": {"role": "assistant", "content": choice.text}}),
            (Kind::Text | Kind::Embedding, _) => {
                let prompt = call.prompts[index / call.kept].echo.as_deref().unwrap_or_default();
                let text = [prompt, &choice.text].concat();
                json!({"text": text})
            }
        };
        object["index"] = json!(index);
        object["logprobs"] = json!(logprobs);
        finish(&mut object, choice.finish.as_ref());
        calls.iter().for_each(|calls| calls.finished(&mut object));
        object
    });
    let mut answer = head.object(false, choices.collect());
    answer["usage"] = total.json();
    Ok(Json(answer))
}

/// The engine went away without a last event.
pub(crate) fn cut_off() -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the engine stopped before the answer was complete")
}

/// Sets `finish_reason` and vLLM's `stop_reason`.
pub(crate) fn finish(choice: &mut Value, finish: Option<&Finish>) {
    let (reason, stop) = match finish {
        None => (Value::Null, Value::Null),
        Some(Finish::Eos | Finish::Whole) => (json!("stop"), Value::Null),
        Some(Finish::StopToken(token)) => (json!("stop"), json!(token)),
        Some(Finish::StopString(string)) => (json!("stop"), json!(string)),
        Some(Finish::Length) => (json!("length"), Value::Null),
    };
    choice["finish_reason"] = reason;
    choice["stop_reason"] = stop;
}

/// The `logprobs` object of some tokens in either format.
pub(crate) fn logprobs(kind: Kind, text: &dyn Text, tokens: &[TokenRecord]) -> Value {
    match kind {
        Kind::Chat => {
            let entry = |t: &TokenLogprob| {
                let bytes = text.token_bytes(t.token);
                json!({"token": String::from_utf8_lossy(&bytes), "logprob": t.logprob, "bytes": bytes})
            };
            let content = tokens.iter().map(|t| {
                let mut object = entry(&t.chosen);
                object["top_logprobs"] = t.top.iter().map(entry).collect();
                object
            });
            json!({"content": content.collect::<Vec<_>>(), "refusal": null})
        }
        Kind::Text | Kind::Embedding => {
            // As OpenAI writes a part of a character.
            let name = |token| {
                String::from_utf8(text.token_bytes(token))
                    .unwrap_or_else(|part| format!("bytes:{}", part.as_bytes().escape_ascii()))
            };
            let top = tokens.iter().map(|t| {
                // The token itself is always there.
                let pairs = t.top.iter().chain([&t.chosen]).map(|t| (name(t.token), json!(t.logprob)));
                (!t.chosen.logprob.is_nan()).then(|| pairs.collect::<Map<String, Value>>())
            });
            json!({
                "tokens": tokens.iter().map(|t| name(t.chosen.token)).collect::<Vec<_>>(),
                "token_logprobs": tokens.iter().map(|t| t.chosen.logprob).collect::<Vec<_>>(),
                "top_logprobs": top.collect::<Vec<_>>(),
                "text_offset": tokens.iter().map(|t| t.text_offset).collect::<Vec<_>>(),
            })
        }
    }
}

/// The `usage` object of one prompt's answer.
pub(crate) fn usage(usage: Usage) -> Value {
    let mut total = Total::default();
    total.add(0, usage);
    total.json()
}

/// A delta with nothing to show needs no chunk.
pub(crate) fn silent(delta: &Delta) -> bool {
    delta.text.is_empty() && delta.tokens.is_empty()
}

pub(crate) fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
